"""Typed layer over hip-python: choice of runtime, devices, memory, streams, kernels, graphs. Importing it loads no HIP library."""

from glm53.hip import runtime
from glm53.hip.array import Array
from glm53.hip.buffer import Buffer, HostBuffer, MemoryKind
from glm53.hip.device import Device, list_devices
from glm53.hip.graph import Capture, Graph
from glm53.hip.link import Link, LinkWay, PeerAccess
from glm53.hip.module import Kernel, Module, code_objects
from glm53.hip.stream import Event, Stream

__all__ = [
    "Array",
    "Buffer",
    "Capture",
    "Device",
    "Event",
    "Graph",
    "HostBuffer",
    "Kernel",
    "Link",
    "LinkWay",
    "MemoryKind",
    "Module",
    "PeerAccess",
    "Stream",
    "code_objects",
    "list_devices",
    "runtime",
]
