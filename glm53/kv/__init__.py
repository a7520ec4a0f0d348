"""Histories on devices and in host memory: the binding of `glm53.mem` to `glm53.hip`."""

from glm53.kv.arrays import KvArray
from glm53.kv.cache import KvCache, KvSession
from glm53.kv.host import HostTier, HostTierConfig
from glm53.kv.keys import KeyStore
from glm53.kv.passes import Pass, PassRows, RowLayout, Tier
from glm53.kv.resident import ResidentTier
from glm53.kv.step import Runs, StepRows, TierStep, step_of

__all__ = [
    "HostTier",
    "HostTierConfig",
    "KeyStore",
    "KvArray",
    "KvCache",
    "KvSession",
    "Pass",
    "PassRows",
    "ResidentTier",
    "RowLayout",
    "Runs",
    "StepRows",
    "Tier",
    "TierStep",
    "step_of",
]
