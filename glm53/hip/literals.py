"""HIP flags and codes as numbers, each with its source: several are missing from hip-python, and the values do not differ between releases.

Sources: [A] hip/hip_runtime_api.h of ROCm 6.0 and later; [B] the enumeration of the same name in rocm.bindings.hip. hip-python 10 has no
name for the values marked A alone.
"""

from __future__ import annotations

# hipExtMallocWithFlags
MALLOC_FINEGRAINED = 0x1  # [A, B] hipDeviceMallocFinegrained
MALLOC_UNCACHED = 0x3  # [A] hipDeviceMallocUncached

# hipHostMalloc
HOST_MALLOC_PORTABLE = 0x1  # [A, B]
HOST_MALLOC_MAPPED = 0x2  # [A, B]
HOST_MALLOC_COHERENT = 0x40000000  # [A, B]
HOST_MALLOC_NON_COHERENT = 0x80000000  # [A, B]

# hipHostRegister. CUDA's 0x8 means read-only: the cuda runtime translates.
HOST_REGISTER_PORTABLE = 0x1  # [A, B]
HOST_REGISTER_MAPPED = 0x2  # [A, B]
HOST_REGISTER_COARSE_GRAINED = 0x8  # [A, B] hipExtHostRegisterCoarseGrained

# hipEventCreateWithFlags
EVENT_DISABLE_TIMING = 0x2  # [A, B]
EVENT_DISABLE_SYSTEM_FENCE = 0x20000000  # [A] hipEventDisableSystemFence

# hipStreamCreateWithFlags
STREAM_NON_BLOCKING = 0x1  # [A, B]: no implicit order with the null stream

# hipError_t
ERROR_OUT_OF_MEMORY = 2
ERROR_NO_DEVICE = 100
ERROR_NOT_READY = 600
ERROR_PEER_ACCESS_ALREADY_ENABLED = 704
# After one of these the device takes no more work in this process.
ERRORS_DEVICE_LOST = frozenset(
    {
        214,  # hipErrorECCNotCorrectable
        700,  # hipErrorIllegalAddress
        702,  # hipErrorLaunchTimeOut
        710,  # hipErrorAssert
        719,  # hipErrorLaunchFailure
    }
)
