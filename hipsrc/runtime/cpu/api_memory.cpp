// api_memory.cpp - allocation, registration and queries of memory.
#include "api.h"

using namespace glm53_cpu;

namespace glm53_cpu {

static hipError_t allocate(State& s, void** pointer, size_t bytes, uint32_t flags) {
  if (!pointer) return hipErrorInvalidValue;
  *pointer = nullptr;
  bool known = flags == hipDeviceMallocDefault || flags == hipDeviceMallocFinegrained || flags == hipDeviceMallocUncached;
  if (!known) return hipErrorInvalidValue;
  if (bytes == 0) return hipSuccess;
  uint64_t address = 0;
  hipError_t error = s.memory.allocate(this_thread().device, bytes, flags, &address);
  *pointer = reinterpret_cast<void*>(address);
  return error;
}

// A damaged red zone found at a free: the device that owned the block is lost.
static hipError_t report_violation(State& s, Lock& lock, int device, const std::string& violation) {
  if (violation.empty()) return hipSuccess;
  s.lose_now(lock, *s.devices[device], hipErrorIllegalAddress, violation);
  return hipErrorIllegalAddress;
}

static void wait_all(State& s, Lock& lock) {
  for (auto& device : s.devices) s.wait_device(lock, *device);
}

}  // namespace glm53_cpu

GLM53_EXPORT hipError_t hipMalloc(void** pointer, size_t bytes) {
  return call("hipMalloc", uses_device | not_captured,
              [&](State& s, Lock&) { return allocate(s, pointer, bytes, hipDeviceMallocDefault); });
}

GLM53_EXPORT hipError_t hipExtMallocWithFlags(void** pointer, size_t bytes, unsigned int flags) {
  return call("hipExtMallocWithFlags", uses_device | not_captured, [&](State& s, Lock&) { return allocate(s, pointer, bytes, flags); });
}

GLM53_EXPORT hipError_t hipFree(void* pointer) {
  return call("hipFree", not_captured, [&](State& s, Lock& lock) {
    if (!pointer) return hipSuccess;
    auto address = reinterpret_cast<uint64_t>(pointer);
    Place place = s.memory.find(address);
    if (!place.on_device() || place.offset) return hipErrorInvalidDevicePointer;
    Device& device = *s.devices[place.block->device];
    if (device.lost != hipSuccess) return device.lost;
    s.wait_device(lock, device);
    if (device.lost != hipSuccess) return device.lost;
    std::string violation;
    hipError_t error = s.memory.release(address, &violation);
    return error != hipSuccess ? error : report_violation(s, lock, device.index, violation);
  });
}

GLM53_EXPORT hipError_t hipMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  return call("hipMemGetInfo", uses_device, [&](State& s, Lock&) {
    if (!free_bytes || !total_bytes) return hipErrorInvalidValue;
    *total_bytes = s.memory.capacity();
    *free_bytes = s.memory.capacity() - s.memory.used(this_thread().device);
    return hipSuccess;
  });
}

GLM53_EXPORT hipError_t hipHostMalloc(void** pointer, size_t bytes, unsigned int flags) {
  return call("hipHostMalloc", uses_device | not_captured, [&](State& s, Lock&) {
    constexpr uint32_t known = hipHostMallocPortable | hipHostMallocMapped | hipHostMallocWriteCombined | hipHostMallocUncached |
                               hipHostMallocNumaUser | hipHostMallocCoherent | hipHostMallocNonCoherent;
    if (!pointer) return hipErrorInvalidValue;
    *pointer = nullptr;
    if ((flags & ~known) || ((flags & hipHostMallocCoherent) && (flags & hipHostMallocNonCoherent))) return hipErrorInvalidValue;
    if (bytes == 0) return hipSuccess;
    uint64_t address = 0;
    hipError_t error = s.memory.host_allocate(this_thread().device, bytes, flags, &address);
    *pointer = reinterpret_cast<void*>(address);
    return error;
  });
}

GLM53_EXPORT hipError_t hipHostFree(void* pointer) {
  return call("hipHostFree", not_captured, [&](State& s, Lock& lock) {
    if (!pointer) return hipSuccess;
    auto address = reinterpret_cast<uint64_t>(pointer);
    Place place = s.memory.find(address);
    if (!place.pinned() || place.alias || place.offset || place.block->kind != Kind::host) return hipErrorInvalidValue;
    int owner = place.block->device;
    wait_all(s, lock);
    std::string violation;
    hipError_t error = s.memory.host_release(address, &violation);
    return error != hipSuccess ? error : report_violation(s, lock, owner, violation);
  });
}

GLM53_EXPORT hipError_t hipHostRegister(void* pointer, size_t bytes, unsigned int flags) {
  return call("hipHostRegister", uses_device | not_captured, [&](State& s, Lock&) {
    constexpr uint32_t known =
        hipHostRegisterPortable | hipHostRegisterMapped | hipExtHostRegisterCoarseGrained | hipExtHostRegisterUncached;
    if (!pointer || bytes == 0 || (flags & ~known)) return hipErrorInvalidValue;
    return s.memory.host_register(this_thread().device, reinterpret_cast<uint64_t>(pointer), bytes, flags);
  });
}

GLM53_EXPORT hipError_t hipHostUnregister(void* pointer) {
  return call("hipHostUnregister", not_captured, [&](State& s, Lock& lock) {
    if (!pointer) return hipErrorInvalidValue;
    wait_all(s, lock);
    return s.memory.host_unregister(reinterpret_cast<uint64_t>(pointer));
  });
}

GLM53_EXPORT hipError_t hipHostGetDevicePointer(void** device_pointer, void* host_pointer, unsigned int flags) {
  return call("hipHostGetDevicePointer", uses_device, [&](State& s, Lock&) {
    if (!device_pointer) return hipErrorInvalidValue;
    *device_pointer = nullptr;
    if (!host_pointer || flags) return hipErrorInvalidValue;
    Place place = s.memory.find(reinterpret_cast<uint64_t>(host_pointer));
    if (!place.pinned() || place.alias) return hipErrorInvalidValue;
    *device_pointer = reinterpret_cast<void*>(place.block->alias + place.offset);
    return hipSuccess;
  });
}

GLM53_EXPORT hipError_t hipPointerGetAttributes(hipPointerAttribute_t* attributes, const void* pointer) {
  return call("hipPointerGetAttributes", plain, [&](State& s, Lock&) {
    if (!attributes || !pointer) return hipErrorInvalidValue;
    Place place = s.memory.find(reinterpret_cast<uint64_t>(pointer));
    if (!place.known()) return hipErrorInvalidValue;
    const Block& block = *place.block;
    *attributes = {};
    attributes->type = place.on_device() ? hipMemoryTypeDevice : hipMemoryTypeHost;
    attributes->device = block.device;
    attributes->devicePointer = reinterpret_cast<void*>(block.alias + place.offset);
    attributes->hostPointer = place.on_device() ? nullptr : reinterpret_cast<void*>(block.base + place.offset);
    attributes->allocationFlags = block.flags;
    return hipSuccess;
  });
}
