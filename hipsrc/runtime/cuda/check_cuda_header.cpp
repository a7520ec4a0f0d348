// check_cuda_header.cpp - compares driver.h with <cuda.h> at compile time, where that exists: every symbol's signature, every enum value
// and struct layout. Produces no code.
#if __has_include(<cuda.h>)
#include <cuda.h>

#include <type_traits>

#include "driver.h"

namespace {

using namespace glm53_cuda;

// Enums cross our border as int (or unsigned int, which has the same representation); `Copy2D` and `LaunchConfig` stand for CUDA's structs.
template <class T, bool is_enum = std::is_enum<T>::value> struct Plain {
  using type = typename std::conditional<std::is_same<T, unsigned int>::value, int, T>::type;
};
template <class T> struct Plain<T, true> {
  using type = int;
};
template <> struct Plain<CUDA_MEMCPY2D, false> {
  using type = Copy2D;
};
template <> struct Plain<CUlaunchConfig, false> {
  using type = LaunchConfig;
};
template <class T> struct Plain<const T, false> {
  using type = const typename Plain<T>::type;
};
template <class T> struct Plain<const T, true> {
  using type = const int;
};
template <class T> struct Plain<T*, false> {
  using type = typename Plain<T>::type*;
};
template <class R, class... A> struct Plain<R(A...), false> {
  using type = typename Plain<R>::type(typename Plain<A>::type...);
};

#define CHECK_SIGNATURE(name, args)                                                                                                 \
  static_assert(std::is_same<Plain<std::remove_pointer<decltype(&::name)>::type>::type, Plain<int args>::type>::value, \
                #name ": the signature in driver.h differs from cuda.h");
GLM53_CUDA_CALLS(CHECK_SIGNATURE)

#define CHECK_ATTRIBUTE(name, value, cuda_name) static_assert(CU_DEVICE_ATTRIBUTE_##cuda_name == value, #cuda_name " differs from cuda.h");
GLM53_CUDA_ATTRIBUTES(CHECK_ATTRIBUTE)

#define CHECK_FIELD(ours, theirs) static_assert(offsetof(Copy2D, ours) == offsetof(CUDA_MEMCPY2D, theirs), #theirs " differs from cuda.h")
static_assert(sizeof(Copy2D) == sizeof(CUDA_MEMCPY2D), "CUDA_MEMCPY2D differs from cuda.h");
CHECK_FIELD(source_x_bytes, srcXInBytes);
CHECK_FIELD(source_y, srcY);
CHECK_FIELD(source_type, srcMemoryType);
CHECK_FIELD(source_host, srcHost);
CHECK_FIELD(source_device, srcDevice);
CHECK_FIELD(source_array, srcArray);
CHECK_FIELD(source_pitch, srcPitch);
CHECK_FIELD(target_x_bytes, dstXInBytes);
CHECK_FIELD(target_y, dstY);
CHECK_FIELD(target_type, dstMemoryType);
CHECK_FIELD(target_host, dstHost);
CHECK_FIELD(target_device, dstDevice);
CHECK_FIELD(target_array, dstArray);
CHECK_FIELD(target_pitch, dstPitch);
CHECK_FIELD(width_bytes, WidthInBytes);
CHECK_FIELD(height, Height);

#define CHECK_LAUNCH(ours, theirs) static_assert(offsetof(LaunchConfig, ours) == offsetof(CUlaunchConfig, theirs), #theirs " differs from cuda.h")
static_assert(sizeof(LaunchConfig) == sizeof(CUlaunchConfig), "CUlaunchConfig differs from cuda.h");
CHECK_LAUNCH(grid_x, gridDimX);
CHECK_LAUNCH(grid_y, gridDimY);
CHECK_LAUNCH(grid_z, gridDimZ);
CHECK_LAUNCH(block_x, blockDimX);
CHECK_LAUNCH(block_y, blockDimY);
CHECK_LAUNCH(block_z, blockDimZ);
CHECK_LAUNCH(shared_bytes, sharedMemBytes);
CHECK_LAUNCH(stream, hStream);
CHECK_LAUNCH(attributes, attrs);
CHECK_LAUNCH(attribute_count, numAttrs);
static_assert(sizeof(LaunchAttribute) == sizeof(CUlaunchAttribute), "CUlaunchAttribute differs from cuda.h");
static_assert(offsetof(LaunchAttribute, id) == offsetof(CUlaunchAttribute, id), "CUlaunchAttribute.id differs from cuda.h");
static_assert(offsetof(LaunchAttribute, overlap) == offsetof(CUlaunchAttribute, value), "CUlaunchAttribute.value differs from cuda.h");

#define CHECK_VALUE(ours, theirs) static_assert((unsigned long long)(ours) == (unsigned long long)(theirs), #theirs " differs from cuda.h")
CHECK_VALUE(kDynamicSharedBytesMax, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
CHECK_VALUE(kHost, CU_MEMORYTYPE_HOST);
CHECK_VALUE(kDevice, CU_MEMORYTYPE_DEVICE);
CHECK_VALUE(kArray, CU_MEMORYTYPE_ARRAY);
CHECK_VALUE(kUnified, CU_MEMORYTYPE_UNIFIED);
CHECK_VALUE(kAllocPortable, CU_MEMHOSTALLOC_PORTABLE);
CHECK_VALUE(kAllocDeviceMap, CU_MEMHOSTALLOC_DEVICEMAP);
CHECK_VALUE(kAllocWriteCombined, CU_MEMHOSTALLOC_WRITECOMBINED);
CHECK_VALUE(kRegisterPortable, CU_MEMHOSTREGISTER_PORTABLE);
CHECK_VALUE(kRegisterDeviceMap, CU_MEMHOSTREGISTER_DEVICEMAP);
CHECK_VALUE(kRegisterIoMemory, CU_MEMHOSTREGISTER_IOMEMORY);
CHECK_VALUE(kRegisterReadOnly, CU_MEMHOSTREGISTER_READ_ONLY);
CHECK_VALUE(kEventBlockingSync, CU_EVENT_BLOCKING_SYNC);
CHECK_VALUE(kEventDisableTiming, CU_EVENT_DISABLE_TIMING);
CHECK_VALUE(kEventInterprocess, CU_EVENT_INTERPROCESS);
CHECK_VALUE(kStreamDefault, CU_STREAM_DEFAULT);
CHECK_VALUE(kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
CHECK_VALUE(kPointerMemoryType, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
CHECK_VALUE(kPointerDevice, CU_POINTER_ATTRIBUTE_DEVICE_POINTER);
CHECK_VALUE(kPointerHost, CU_POINTER_ATTRIBUTE_HOST_POINTER);
CHECK_VALUE(kPointerIsManaged, CU_POINTER_ATTRIBUTE_IS_MANAGED);
CHECK_VALUE(kPointerOrdinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
CHECK_VALUE(0, CU_STREAM_CAPTURE_MODE_GLOBAL);
CHECK_VALUE(1, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
CHECK_VALUE(2, CU_STREAM_CAPTURE_MODE_RELAXED);
CHECK_VALUE(0, CU_STREAM_CAPTURE_STATUS_NONE);
CHECK_VALUE(1, CU_STREAM_CAPTURE_STATUS_ACTIVE);
CHECK_VALUE(2, CU_STREAM_CAPTURE_STATUS_INVALIDATED);
CHECK_VALUE(HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
CHECK_VALUE(HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
CHECK_VALUE(HIP_FUNC_ATTRIBUTE_CONST_SIZE_BYTES, CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES);
CHECK_VALUE(HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
CHECK_VALUE(HIP_FUNC_ATTRIBUTE_NUM_REGS, CU_FUNC_ATTRIBUTE_NUM_REGS);
CHECK_VALUE(HIP_FUNC_ATTRIBUTE_PTX_VERSION, CU_FUNC_ATTRIBUTE_PTX_VERSION);
CHECK_VALUE(HIP_FUNC_ATTRIBUTE_BINARY_VERSION, CU_FUNC_ATTRIBUTE_BINARY_VERSION);
CHECK_VALUE(HIP_FUNC_ATTRIBUTE_CACHE_MODE_CA, CU_FUNC_ATTRIBUTE_CACHE_MODE_CA);
CHECK_VALUE(HIP_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
CHECK_VALUE(HIP_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT);
CHECK_VALUE(1, CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
CHECK_VALUE(8, CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY);
CHECK_VALUE(kLaunchOverlap, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
static_assert(kLaunchEnd == CU_LAUNCH_PARAM_END_AS_INT, "launch parameters differ from cuda.h");
static_assert(kLaunchBufferPointer == CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT, "launch parameters differ from cuda.h");
static_assert(kLaunchBufferSize == CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT, "launch parameters differ from cuda.h");

}  // namespace
#endif
