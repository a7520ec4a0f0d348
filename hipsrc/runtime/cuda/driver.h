// driver.h - the part of the CUDA driver interface that the cuda runtime forwards to, declared here so that no CUDA header is needed to
// build. Enums cross as int. check_cuda_header.cpp compares every signature, value and layout below with <cuda.h> where that exists.
// The names are those of the library's symbols: a `_v2` is part of the name, and the plain name would be an older function.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "../hip_abi.h"

#define GLM53_EXPORT extern "C" __attribute__((visibility("default")))

struct CUctx_st;
struct CUmod_st;
struct CUfunc_st;
struct CUstream_st;
struct CUevent_st;
struct CUgraph_st;
struct CUgraphNode_st;
struct CUgraphExec_st;
struct CUarray_st;

namespace glm53_cuda {

using Context = CUctx_st*;
using Module = CUmod_st*;
using Function = CUfunc_st*;
using Stream = CUstream_st*;
using Event = CUevent_st*;
using Graph = CUgraph_st*;
using GraphNode = CUgraphNode_st*;
using GraphExec = CUgraphExec_st*;
using Address = unsigned long long;  // CUdeviceptr

// CUDA_MEMCPY2D_v2
struct Copy2D {
  size_t source_x_bytes, source_y;
  unsigned int source_type;
  const void* source_host;
  Address source_device;
  CUarray_st* source_array;
  size_t source_pitch;
  size_t target_x_bytes, target_y;
  unsigned int target_type;
  void* target_host;
  Address target_device;
  CUarray_st* target_array;
  size_t target_pitch;
  size_t width_bytes, height;
};

// CUlaunchAttribute, with the one value that is used, and CUlaunchConfig.
struct LaunchAttribute {
  int id;
  int padding;
  int overlap;  // programmaticStreamSerializationAllowed
  int unused[15];
};
struct LaunchConfig {
  unsigned int grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned int attribute_count;
};
constexpr int kLaunchOverlap = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
constexpr int kDynamicSharedBytesMax = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

enum MemoryType : unsigned { kHost = 1, kDevice = 2, kArray = 3, kUnified = 4 };
enum HostAllocFlag : unsigned { kAllocPortable = 1, kAllocDeviceMap = 2, kAllocWriteCombined = 4 };
enum HostRegisterFlag : unsigned { kRegisterPortable = 1, kRegisterDeviceMap = 2, kRegisterIoMemory = 4, kRegisterReadOnly = 8 };
enum EventFlag : unsigned { kEventBlockingSync = 1, kEventDisableTiming = 2, kEventInterprocess = 4 };
enum StreamFlag : unsigned { kStreamDefault = 0, kStreamNonBlocking = 1 };
enum PointerAttribute { kPointerMemoryType = 2, kPointerDevice = 3, kPointerHost = 4, kPointerIsManaged = 8, kPointerOrdinal = 9 };
enum LaunchParam : uintptr_t { kLaunchEnd = 0, kLaunchBufferPointer = 1, kLaunchBufferSize = 2 };

// Device attributes: our name, CUDA's number, the end of CUDA's name.
#define GLM53_CUDA_ATTRIBUTES(X)                                              \
  X(kMaxThreadsPerBlock, 1, MAX_THREADS_PER_BLOCK)                            \
  X(kMaxBlockX, 2, MAX_BLOCK_DIM_X)                                           \
  X(kMaxBlockY, 3, MAX_BLOCK_DIM_Y)                                           \
  X(kMaxBlockZ, 4, MAX_BLOCK_DIM_Z)                                           \
  X(kMaxGridX, 5, MAX_GRID_DIM_X)                                             \
  X(kMaxGridY, 6, MAX_GRID_DIM_Y)                                             \
  X(kMaxGridZ, 7, MAX_GRID_DIM_Z)                                             \
  X(kSharedPerBlock, 8, MAX_SHARED_MEMORY_PER_BLOCK)                          \
  X(kTotalConstant, 9, TOTAL_CONSTANT_MEMORY)                                 \
  X(kWarpSize, 10, WARP_SIZE)                                                 \
  X(kMaxPitch, 11, MAX_PITCH)                                                 \
  X(kRegistersPerBlock, 12, MAX_REGISTERS_PER_BLOCK)                          \
  X(kClockRate, 13, CLOCK_RATE)                                               \
  X(kTextureAlignment, 14, TEXTURE_ALIGNMENT)                                 \
  X(kMultiprocessors, 16, MULTIPROCESSOR_COUNT)                               \
  X(kExecTimeout, 17, KERNEL_EXEC_TIMEOUT)                                    \
  X(kIntegrated, 18, INTEGRATED)                                              \
  X(kCanMapHost, 19, CAN_MAP_HOST_MEMORY)                                     \
  X(kComputeMode, 20, COMPUTE_MODE)                                           \
  X(kConcurrentKernels, 31, CONCURRENT_KERNELS)                               \
  X(kEcc, 32, ECC_ENABLED)                                                    \
  X(kPciBus, 33, PCI_BUS_ID)                                                  \
  X(kPciDevice, 34, PCI_DEVICE_ID)                                            \
  X(kMemoryClock, 36, MEMORY_CLOCK_RATE)                                      \
  X(kBusWidth, 37, GLOBAL_MEMORY_BUS_WIDTH)                                   \
  X(kL2Bytes, 38, L2_CACHE_SIZE)                                              \
  X(kThreadsPerMultiprocessor, 39, MAX_THREADS_PER_MULTIPROCESSOR)            \
  X(kAsyncEngines, 40, ASYNC_ENGINE_COUNT)                                    \
  X(kUnifiedAddressing, 41, UNIFIED_ADDRESSING)                               \
  X(kPciDomain, 50, PCI_DOMAIN_ID)                                            \
  X(kMajor, 75, COMPUTE_CAPABILITY_MAJOR)                                     \
  X(kMinor, 76, COMPUTE_CAPABILITY_MINOR)                                     \
  X(kStreamPriorities, 78, STREAM_PRIORITIES_SUPPORTED)                       \
  X(kSharedPerMultiprocessor, 81, MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)       \
  X(kRegistersPerMultiprocessor, 82, MAX_REGISTERS_PER_MULTIPROCESSOR)        \
  X(kManagedMemory, 83, MANAGED_MEMORY)                                       \
  X(kHostNativeAtomic, 86, HOST_NATIVE_ATOMIC_SUPPORTED)                      \
  X(kPageableAccess, 88, PAGEABLE_MEMORY_ACCESS)                              \
  X(kConcurrentManaged, 89, CONCURRENT_MANAGED_ACCESS)                        \
  X(kHostPointerForRegistered, 91, CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM)   \
  X(kCooperativeLaunch, 95, COOPERATIVE_LAUNCH)                               \
  X(kSharedPerBlockOptin, 97, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)              \
  X(kHostRegister, 99, HOST_REGISTER_SUPPORTED)                               \
  X(kBlocksPerMultiprocessor, 106, MAX_BLOCKS_PER_MULTIPROCESSOR)             \
  X(kReservedShared, 111, RESERVED_SHARED_MEMORY_PER_BLOCK)                   \
  X(kMemoryPools, 115, MEMORY_POOLS_SUPPORTED)

enum Attribute : int {
#define GLM53_CUDA_ENUM(name, value, cuda_name) name = value,
  GLM53_CUDA_ATTRIBUTES(GLM53_CUDA_ENUM)
#undef GLM53_CUDA_ENUM
};

// Every symbol that is used: name and arguments; all return CUresult.
#define GLM53_CUDA_CALLS(X)                                                                                     \
  X(cuInit, (unsigned int))                                                                                     \
  X(cuDriverGetVersion, (int*))                                                                                 \
  X(cuGetErrorName, (int, const char**))                                                                        \
  X(cuGetErrorString, (int, const char**))                                                                      \
  X(cuDeviceGetCount, (int*))                                                                                   \
  X(cuDeviceGet, (int*, int))                                                                                   \
  X(cuDeviceGetName, (char*, int, int))                                                                         \
  X(cuDeviceTotalMem_v2, (size_t*, int))                                                                        \
  X(cuDeviceGetAttribute, (int*, int, int))                                                                     \
  X(cuDeviceGetPCIBusId, (char*, int, int))                                                                     \
  X(cuDeviceCanAccessPeer, (int*, int, int))                                                                    \
  X(cuDevicePrimaryCtxRetain, (Context*, int))                                                                  \
  X(cuCtxGetCurrent, (Context*))                                                                                \
  X(cuCtxSetCurrent, (Context))                                                                                 \
  X(cuCtxGetDevice, (int*))                                                                                     \
  X(cuCtxSynchronize, ())                                                                                       \
  X(cuCtxEnablePeerAccess, (Context, unsigned int))                                                             \
  X(cuCtxDisablePeerAccess, (Context))                                                                          \
  X(cuMemAlloc_v2, (Address*, size_t))                                                                          \
  X(cuMemFree_v2, (Address))                                                                                    \
  X(cuMemGetInfo_v2, (size_t*, size_t*))                                                                        \
  X(cuMemHostAlloc, (void**, size_t, unsigned int))                                                             \
  X(cuMemFreeHost, (void*))                                                                                     \
  X(cuMemHostRegister_v2, (void*, size_t, unsigned int))                                                        \
  X(cuMemHostUnregister, (void*))                                                                               \
  X(cuMemHostGetDevicePointer_v2, (Address*, void*, unsigned int))                                              \
  X(cuPointerGetAttributes, (unsigned int, int*, void**, Address))                                              \
  X(cuMemcpy, (Address, Address, size_t))                                                                       \
  X(cuMemcpyAsync, (Address, Address, size_t, Stream))                                                          \
  X(cuMemcpyPeerAsync, (Address, Context, Address, Context, size_t, Stream))                                    \
  X(cuMemcpy2DAsync_v2, (const Copy2D*, Stream))                                                                \
  X(cuMemcpyDtoH_v2, (void*, Address, size_t))                                                                  \
  X(cuMemcpyHtoD_v2, (Address, const void*, size_t))                                                            \
  X(cuMemcpyDtoHAsync_v2, (void*, Address, size_t, Stream))                                                     \
  X(cuMemcpyHtoDAsync_v2, (Address, const void*, size_t, Stream))                                               \
  X(cuMemsetD8_v2, (Address, unsigned char, size_t))                                                            \
  X(cuMemsetD8Async, (Address, unsigned char, size_t, Stream))                                                  \
  X(cuStreamCreate, (Stream*, unsigned int))                                                                    \
  X(cuStreamCreateWithPriority, (Stream*, unsigned int, int))                                                   \
  X(cuStreamDestroy_v2, (Stream))                                                                               \
  X(cuStreamSynchronize, (Stream))                                                                              \
  X(cuStreamQuery, (Stream))                                                                                    \
  X(cuStreamWaitEvent, (Stream, Event, unsigned int))                                                           \
  X(cuStreamIsCapturing, (Stream, int*))                                                                        \
  X(cuStreamBeginCapture_v2, (Stream, int))                                                                     \
  X(cuStreamEndCapture, (Stream, Graph*))                                                                       \
  X(cuEventCreate, (Event*, unsigned int))                                                                      \
  X(cuEventRecord, (Event, Stream))                                                                             \
  X(cuEventQuery, (Event))                                                                                      \
  X(cuEventSynchronize, (Event))                                                                                \
  X(cuEventElapsedTime, (float*, Event, Event))                                                                 \
  X(cuEventDestroy_v2, (Event))                                                                                 \
  X(cuModuleLoad, (Module*, const char*))                                                                       \
  X(cuModuleLoadData, (Module*, const void*))                                                                   \
  X(cuModuleUnload, (Module))                                                                                   \
  X(cuModuleGetGlobal_v2, (Address*, size_t*, Module, const char*))                                             \
  X(cuModuleGetFunction, (Function*, Module, const char*))                                                      \
  X(cuFuncGetAttribute, (int*, int, Function))                                                                  \
  X(cuFuncSetAttribute, (Function, int, int))                                                                   \
  X(cuLaunchKernelEx, (const LaunchConfig*, Function, void**, void**))                                          \
  X(cuGraphInstantiateWithFlags, (GraphExec*, Graph, unsigned long long))                                       \
  X(cuGraphLaunch, (GraphExec, Stream))                                                                         \
  X(cuGraphGetNodes, (Graph, GraphNode*, size_t*))                                                              \
  X(cuGraphExecDestroy, (GraphExec))                                                                            \
  X(cuGraphDestroy, (Graph))

struct Driver {
#define GLM53_CUDA_POINTER(name, args) int(*name) args;
  GLM53_CUDA_CALLS(GLM53_CUDA_POINTER)
#undef GLM53_CUDA_POINTER
};

// The driver, opened and initialised on first use. On failure returns the error (recorded for this thread) and leaves *driver alone.
hipError_t open_driver(const Driver** driver);
// One call's use of the driver. `enter` is open_driver, then makes the primary context of this thread's current device current; the end of the
// object makes the caller's context current again, none where there was none, so that other users of CUDA in this thread notice nothing.
class Entered {
 public:
  Entered() = default;
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;
  ~Entered() {
    // A refusal has nobody to go to: the caller's context was destroyed meanwhile.
    if (switched_) driver_->cuCtxSetCurrent(callers_);
  }
  hipError_t enter();
  int device() const { return device_; }
  const Driver* operator->() const { return driver_; }
  operator const Driver*() const { return driver_; }

 private:
  const Driver* driver_ = nullptr;
  Context callers_ = nullptr;
  int device_ = 0;
  bool switched_ = false;
};
// The primary context of a device, retained on first use and never released. `driver` must be open.
hipError_t context_of(const Driver* driver, int device, Context* context);

// HIP's current device of this thread: what hipSetDevice chose, else the device of the caller's CUDA context, else 0. Choosing the device of the
// caller's context is choosing nothing, so that whoever restores the device that it found follows the caller again.
hipError_t current_device(const Driver* driver, int* device);
hipError_t set_current_device(const Driver* driver, int device);
hipError_t device_total(const Driver* driver, int* count);

// Records `error` with `message` for hipGetLastError and glm53_runtime_message of this thread, and returns it.
hipError_t fail(hipError_t error, const char* message);
// Translates the result of the driver's function `call`, recording failures; hipErrorNotReady is an answer and is not recorded.
hipError_t finish(const Driver* driver, int result, const char* call);
// The HIP code for a CUresult; codes without counterpart become hipErrorUnknown.
hipError_t translate(int result);

inline Address address_of(const void* pointer) { return (Address)(uintptr_t)pointer; }
inline Stream stream_of(hipStream_t stream) { return reinterpret_cast<Stream>(stream); }
inline Event event_of(hipEvent_t event) { return reinterpret_cast<Event>(event); }

}  // namespace glm53_cuda
