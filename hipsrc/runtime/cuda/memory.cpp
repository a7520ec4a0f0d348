// memory.cpp - allocation, registration, copies.
//
// HIP's synchronous copies and fills return when the bytes are there. CUDA's return earlier for pageable sources, device-to-device copies
// and fills, and order only the null stream, so each of them waits for that stream here.
#include <string.h>

#include "driver.h"

using namespace glm53_cuda;

namespace {

bool only(unsigned int flags, unsigned int known) { return (flags & ~known) == 0; }

hipError_t wait_null_stream(const Driver* driver, hipError_t before) {
  if (before) return before;
  return finish(driver, driver->cuStreamSynchronize(nullptr), "cuStreamSynchronize");
}

bool known_kind(hipMemcpyKind kind) { return kind >= hipMemcpyHostToHost && kind <= hipMemcpyDefault; }

// CUDA's memory types of the two sides of a copy; the driver finds out for hipMemcpyDefault.
void sides(hipMemcpyKind kind, bool* source_is_host, bool* target_is_host) {
  *source_is_host = kind == hipMemcpyHostToHost || kind == hipMemcpyHostToDevice;
  *target_is_host = kind == hipMemcpyHostToHost || kind == hipMemcpyDeviceToHost;
}

hipError_t check_copy(const void* target, const void* source, size_t bytes, hipMemcpyKind kind) {
  if (!known_kind(kind)) return fail(hipErrorInvalidMemcpyDirection, "copy: unknown hipMemcpyKind");
  if (bytes && (!target || !source)) return fail(hipErrorInvalidValue, "copy: an address is null");
  return hipSuccess;
}

}  // namespace

GLM53_EXPORT hipError_t hipMalloc(void** pointer, size_t bytes) {
  if (!pointer) return fail(hipErrorInvalidValue, "hipMalloc: pointer is null");
  *pointer = nullptr;
  if (bytes == 0) return hipSuccess;
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  Address address = 0;
  if (hipError_t error = finish(driver, driver->cuMemAlloc_v2(&address, bytes), "cuMemAlloc_v2")) return error;
  *pointer = reinterpret_cast<void*>((uintptr_t)address);
  return hipSuccess;
}

// Device memory of CUDA is coherent at system scope for peers and the host, so that fine-grained and uncached need nothing more.
GLM53_EXPORT hipError_t hipExtMallocWithFlags(void** pointer, size_t bytes, unsigned int flags) {
  switch (flags) {
    case hipDeviceMallocDefault:
    case hipDeviceMallocFinegrained:
    case hipDeviceMallocUncached:
      return hipMalloc(pointer, bytes);
    default:
      return fail(hipErrorInvalidValue, "hipExtMallocWithFlags: flag without CUDA counterpart");
  }
}

// HIP's free waits for the device; CUDA does not promise it.
GLM53_EXPORT hipError_t hipFree(void* pointer) {
  if (!pointer) return hipSuccess;
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  if (hipError_t error = finish(driver, driver->cuCtxSynchronize(), "cuCtxSynchronize")) return error;
  return finish(driver, driver->cuMemFree_v2(address_of(pointer)), "cuMemFree_v2");
}

GLM53_EXPORT hipError_t hipMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  if (!free_bytes || !total_bytes) return fail(hipErrorInvalidValue, "hipMemGetInfo: a result is null");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuMemGetInfo_v2(free_bytes, total_bytes), "cuMemGetInfo_v2");
}

// Pinned memory of CUDA is always coherent, so that hipHostMallocCoherent, NonCoherent and Uncached need no flag; HIP maps every allocation
// for all devices, hence the first two.
GLM53_EXPORT hipError_t hipHostMalloc(void** pointer, size_t bytes, unsigned int flags) {
  if (!pointer) return fail(hipErrorInvalidValue, "hipHostMalloc: pointer is null");
  *pointer = nullptr;
  const unsigned int known = hipHostMallocPortable | hipHostMallocMapped | hipHostMallocWriteCombined | hipHostMallocUncached |
                             hipHostMallocNumaUser | hipHostMallocCoherent | hipHostMallocNonCoherent;
  if (!only(flags, known)) return fail(hipErrorInvalidValue, "hipHostMalloc: unknown flag");
  if ((flags & hipHostMallocCoherent) && (flags & hipHostMallocNonCoherent))
    return fail(hipErrorInvalidValue, "hipHostMalloc: coherent and non-coherent exclude each other");
  if (bytes == 0) return hipSuccess;
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  unsigned int cuda = kAllocPortable | kAllocDeviceMap;
  if (flags & hipHostMallocWriteCombined) cuda |= kAllocWriteCombined;
  return finish(driver, driver->cuMemHostAlloc(pointer, bytes, cuda), "cuMemHostAlloc");
}

GLM53_EXPORT hipError_t hipHostFree(void* pointer) {
  if (!pointer) return hipSuccess;
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuMemFreeHost(pointer), "cuMemFreeHost");
}

// HIP's 0x8 is coarse-grained and must not reach CUDA, where 0x8 means read-only: registered memory stays coherent there.
GLM53_EXPORT hipError_t hipHostRegister(void* pointer, size_t bytes, unsigned int flags) {
  if (!pointer || bytes == 0) return fail(hipErrorInvalidValue, "hipHostRegister: pointer is null or size 0");
  const unsigned int known = hipHostRegisterPortable | hipHostRegisterMapped | hipHostRegisterIoMemory | hipExtHostRegisterCoarseGrained |
                             hipExtHostRegisterUncached;
  if (!only(flags, known)) return fail(hipErrorInvalidValue, "hipHostRegister: unknown flag");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  unsigned int cuda = kRegisterPortable | kRegisterDeviceMap;
  if (flags & hipHostRegisterIoMemory) cuda |= kRegisterIoMemory;
  return finish(driver, driver->cuMemHostRegister_v2(pointer, bytes, cuda), "cuMemHostRegister_v2");
}

GLM53_EXPORT hipError_t hipHostUnregister(void* pointer) {
  if (!pointer) return fail(hipErrorInvalidValue, "hipHostUnregister: pointer is null");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuMemHostUnregister(pointer), "cuMemHostUnregister");
}

GLM53_EXPORT hipError_t hipHostGetDevicePointer(void** device_pointer, void* host_pointer, unsigned int flags) {
  if (!device_pointer || !host_pointer) return fail(hipErrorInvalidValue, "hipHostGetDevicePointer: a pointer is null");
  *device_pointer = nullptr;
  if (flags) return fail(hipErrorInvalidValue, "hipHostGetDevicePointer: flags must be 0");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  Address address = 0;
  int result = driver->cuMemHostGetDevicePointer_v2(&address, host_pointer, 0);
  if (hipError_t error = finish(driver, result, "cuMemHostGetDevicePointer_v2")) return error;
  *device_pointer = reinterpret_cast<void*>((uintptr_t)address);
  return hipSuccess;
}

// An address that the driver does not know is hipErrorInvalidValue.
GLM53_EXPORT hipError_t hipPointerGetAttributes(hipPointerAttribute_t* attributes, const void* pointer) {
  if (!attributes || !pointer) return fail(hipErrorInvalidValue, "hipPointerGetAttributes: attributes or pointer is null");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  unsigned int type = 0, managed = 0;
  Address device_address = 0;
  void* host_pointer = nullptr;
  int ordinal = 0;
  int what[] = {kPointerMemoryType, kPointerDevice, kPointerHost, kPointerIsManaged, kPointerOrdinal};
  void* values[] = {&type, &device_address, &host_pointer, &managed, &ordinal};
  int result = driver->cuPointerGetAttributes(5, what, values, address_of(pointer));
  if (hipError_t error = finish(driver, result, "cuPointerGetAttributes")) return error;
  memset(attributes, 0, sizeof *attributes);
  switch (type) {
    case kHost:
      attributes->type = hipMemoryTypeHost;
      break;
    case kDevice:
      attributes->type = hipMemoryTypeDevice;
      break;
    case kUnified:
      attributes->type = hipMemoryTypeManaged;
      break;
    default:
      return fail(hipErrorInvalidValue, "hipPointerGetAttributes: the address is not of this runtime");
  }
  if (managed & 0xff) attributes->type = hipMemoryTypeManaged;  // CUDA writes a bool or an unsigned int, by version
  attributes->device = ordinal;
  attributes->devicePointer = reinterpret_cast<void*>((uintptr_t)device_address);
  attributes->hostPointer = host_pointer;
  attributes->isManaged = attributes->type == hipMemoryTypeManaged;
  return hipSuccess;
}

GLM53_EXPORT hipError_t hipMemcpy(void* target, const void* source, size_t bytes, hipMemcpyKind kind) {
  if (hipError_t error = check_copy(target, source, bytes, kind)) return error;
  if (bytes == 0) return hipSuccess;
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return wait_null_stream(driver, finish(driver, driver->cuMemcpy(address_of(target), address_of(source), bytes), "cuMemcpy"));
}

GLM53_EXPORT hipError_t hipMemcpyAsync(void* target, const void* source, size_t bytes, hipMemcpyKind kind, hipStream_t stream) {
  if (hipError_t error = check_copy(target, source, bytes, kind)) return error;
  if (bytes == 0) return hipSuccess;
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuMemcpyAsync(address_of(target), address_of(source), bytes, stream_of(stream)), "cuMemcpyAsync");
}

GLM53_EXPORT hipError_t hipMemcpyPeerAsync(void* target, int target_device, const void* source, int source_device, size_t bytes,
                                           hipStream_t stream) {
  if (hipError_t error = check_copy(target, source, bytes, hipMemcpyDeviceToDevice)) return error;
  if (bytes == 0) return hipSuccess;
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  Context to = nullptr, from = nullptr;
  if (hipError_t error = context_of(driver, target_device, &to)) return error;
  if (hipError_t error = context_of(driver, source_device, &from)) return error;
  int result = driver->cuMemcpyPeerAsync(address_of(target), to, address_of(source), from, bytes, stream_of(stream));
  return finish(driver, result, "cuMemcpyPeerAsync");
}

GLM53_EXPORT hipError_t hipMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t width,
                                         size_t height, hipMemcpyKind kind, hipStream_t stream) {
  if (hipError_t error = check_copy(target, source, width * height, kind)) return error;
  if (width == 0 || height == 0) return hipSuccess;
  if (width > target_pitch || width > source_pitch)
    return fail(hipErrorInvalidPitchValue, "hipMemcpy2DAsync: width is larger than a pitch");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  Copy2D copy;
  memset(&copy, 0, sizeof copy);
  bool source_is_host = false, target_is_host = false;
  sides(kind, &source_is_host, &target_is_host);
  copy.source_type = kind == hipMemcpyDefault ? kUnified : source_is_host ? kHost : kDevice;
  copy.target_type = kind == hipMemcpyDefault ? kUnified : target_is_host ? kHost : kDevice;
  if (source_is_host) copy.source_host = source;
  else copy.source_device = address_of(source);
  if (target_is_host) copy.target_host = target;
  else copy.target_device = address_of(target);
  copy.source_pitch = source_pitch;
  copy.target_pitch = target_pitch;
  copy.width_bytes = width;
  copy.height = height;
  return finish(driver, driver->cuMemcpy2DAsync_v2(&copy, stream_of(stream)), "cuMemcpy2DAsync_v2");
}

GLM53_EXPORT hipError_t hipMemcpyDtoH(void* target, hipDeviceptr_t source, size_t bytes) {
  if (hipError_t error = check_copy(target, source, bytes, hipMemcpyDeviceToHost)) return error;
  if (bytes == 0) return hipSuccess;
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return wait_null_stream(driver, finish(driver, driver->cuMemcpyDtoH_v2(target, address_of(source), bytes), "cuMemcpyDtoH_v2"));
}

GLM53_EXPORT hipError_t hipMemcpyHtoD(hipDeviceptr_t target, const void* source, size_t bytes) {
  if (hipError_t error = check_copy(target, source, bytes, hipMemcpyHostToDevice)) return error;
  if (bytes == 0) return hipSuccess;
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return wait_null_stream(driver, finish(driver, driver->cuMemcpyHtoD_v2(address_of(target), source, bytes), "cuMemcpyHtoD_v2"));
}

GLM53_EXPORT hipError_t hipMemcpyDtoHAsync(void* target, hipDeviceptr_t source, size_t bytes, hipStream_t stream) {
  if (hipError_t error = check_copy(target, source, bytes, hipMemcpyDeviceToHost)) return error;
  if (bytes == 0) return hipSuccess;
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuMemcpyDtoHAsync_v2(target, address_of(source), bytes, stream_of(stream)), "cuMemcpyDtoHAsync_v2");
}

GLM53_EXPORT hipError_t hipMemcpyHtoDAsync(hipDeviceptr_t target, const void* source, size_t bytes, hipStream_t stream) {
  if (hipError_t error = check_copy(target, source, bytes, hipMemcpyHostToDevice)) return error;
  if (bytes == 0) return hipSuccess;
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuMemcpyHtoDAsync_v2(address_of(target), source, bytes, stream_of(stream)), "cuMemcpyHtoDAsync_v2");
}

GLM53_EXPORT hipError_t hipMemset(void* target, int value, size_t bytes) {
  if (bytes == 0) return hipSuccess;
  if (!target) return fail(hipErrorInvalidValue, "hipMemset: address is null");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return wait_null_stream(driver, finish(driver, driver->cuMemsetD8_v2(address_of(target), (unsigned char)value, bytes), "cuMemsetD8_v2"));
}

GLM53_EXPORT hipError_t hipMemsetAsync(void* target, int value, size_t bytes, hipStream_t stream) {
  if (bytes == 0) return hipSuccess;
  if (!target) return fail(hipErrorInvalidValue, "hipMemsetAsync: address is null");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuMemsetD8Async(address_of(target), (unsigned char)value, bytes, stream_of(stream)), "cuMemsetD8Async");
}
