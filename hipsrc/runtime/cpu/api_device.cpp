// api_device.cpp - initialisation, devices, peers and errors.
#include <cstdio>
#include <cstring>

#include "api.h"

using namespace glm53_cpu;

namespace glm53_cpu {

Thread& this_thread() {
  static thread_local Thread thread;
  return thread;
}

hipError_t enter(State& s, const char* name) {
  s.calls[name]++;
  auto failure = s.failures.find(name);
  if (failure == s.failures.end() || --failure->second.nth != 0) return hipSuccess;
  hipError_t error = failure->second.error;
  s.failures.erase(failure);
  return error;
}

std::shared_ptr<Stream> find_stream(State& s, hipStream_t handle) {
  if (reinterpret_cast<uint64_t>(handle) > 1) return find(s.streams, handle);
  return this_thread().device < static_cast<int>(s.devices.size()) ? current_device(s).null_stream : nullptr;
}

static bool valid_device(const State& s, int device) { return device >= 0 && static_cast<size_t>(device) < s.devices.size(); }

static void device_name(char* out, size_t bytes, int device) { snprintf(out, bytes, "glm53 cpu device %d", device); }

static void fill_properties(const State& s, int device, hipDeviceProp_tR0600* prop) {
  memset(prop, 0, sizeof *prop);
  device_name(prop->name, sizeof prop->name, device);
  snprintf(prop->uuid.bytes, sizeof prop->uuid.bytes, "glm53-cpu-%d", device);
  snprintf(prop->gcnArchName, sizeof prop->gcnArchName, "host");
  prop->totalGlobalMem = s.memory.capacity();
  prop->sharedMemPerBlock = prop->sharedMemPerBlockOptin = 65536;
  prop->sharedMemPerMultiprocessor = prop->maxSharedMemoryPerMultiProcessor = 65536;
  prop->regsPerBlock = prop->regsPerMultiprocessor = 65536;
  prop->warpSize = 32;
  prop->memPitch = 0x7fffffff;
  prop->maxThreadsPerBlock = 1024;
  prop->maxThreadsDim[0] = 1024;
  prop->maxThreadsDim[1] = prop->maxThreadsDim[2] = 1;
  prop->maxGridSize[0] = 0x7fffffff;
  prop->maxGridSize[1] = prop->maxGridSize[2] = 65535;
  prop->clockRate = 1000000;
  prop->major = 11;
  prop->multiProcessorCount = static_cast<int>(std::thread::hardware_concurrency());
  prop->canMapHostMemory = prop->unifiedAddressing = prop->concurrentKernels = prop->hostRegisterSupported = prop->isLargeBar = 1;
  prop->asyncEngineCount = 2;
  prop->pciBusID = device + 1;
  prop->pciDomainID = 0x53;
  prop->memoryClockRate = 1000000;
  prop->memoryBusWidth = 64;
  prop->l2CacheSize = 1 << 20;
  prop->maxThreadsPerMultiProcessor = 1024;
  prop->maxBlocksPerMultiProcessor = 1;
  prop->clockInstructionRate = 1000000;
  prop->streamPrioritiesSupported = 1;
  prop->textureAlignment = prop->texturePitchAlignment = prop->surfaceAlignment = 256;
  // Everything but textures and dynamic parallelism.
  prop->arch.features = 0x7fffu;
}

static hipError_t attribute_of(const hipDeviceProp_tR0600& p, hipDeviceAttribute_t attribute, int* value) {
  switch (attribute) {
    case hipDeviceAttributeAsyncEngineCount: *value = p.asyncEngineCount; break;
    case hipDeviceAttributeClockRate: *value = p.clockRate; break;
    case hipDeviceAttributeL2CacheSize: *value = p.l2CacheSize; break;
    case hipDeviceAttributeComputeCapabilityMajor: *value = p.major; break;
    case hipDeviceAttributeComputeCapabilityMinor: *value = p.minor; break;
    case hipDeviceAttributeMaxBlockDimX: *value = p.maxThreadsDim[0]; break;
    case hipDeviceAttributeMaxBlockDimY: *value = p.maxThreadsDim[1]; break;
    case hipDeviceAttributeMaxBlockDimZ: *value = p.maxThreadsDim[2]; break;
    case hipDeviceAttributeMaxGridDimX: *value = p.maxGridSize[0]; break;
    case hipDeviceAttributeMaxGridDimY: *value = p.maxGridSize[1]; break;
    case hipDeviceAttributeMaxGridDimZ: *value = p.maxGridSize[2]; break;
    case hipDeviceAttributeMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case hipDeviceAttributeMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case hipDeviceAttributeMaxPitch: *value = static_cast<int>(p.memPitch); break;
    case hipDeviceAttributeMemoryBusWidth: *value = p.memoryBusWidth; break;
    case hipDeviceAttributeMemoryClockRate: *value = p.memoryClockRate; break;
    case hipDeviceAttributeMultiprocessorCount: *value = p.multiProcessorCount; break;
    case hipDeviceAttributePciBusId: *value = p.pciBusID; break;
    case hipDeviceAttributePciDeviceId: *value = p.pciDeviceID; break;
    case hipDeviceAttributePciDomainId: *value = p.pciDomainID; break;
    case hipDeviceAttributeMaxRegistersPerBlock: *value = p.regsPerBlock; break;
    case hipDeviceAttributeMaxSharedMemoryPerBlock: *value = static_cast<int>(p.sharedMemPerBlock); break;
    case hipDeviceAttributeSharedMemPerBlockOptin: *value = static_cast<int>(p.sharedMemPerBlockOptin); break;
    case hipDeviceAttributeSharedMemPerMultiprocessor:
    case hipDeviceAttributeMaxSharedMemoryPerMultiprocessor: *value = static_cast<int>(p.sharedMemPerMultiprocessor); break;
    case hipDeviceAttributeTotalGlobalMem: *value = static_cast<int>(p.totalGlobalMem); break;
    case hipDeviceAttributeWarpSize: *value = p.warpSize; break;
    case hipDeviceAttributeWallClockRate: *value = 1000000; break;
    case hipDeviceAttributeCanMapHostMemory:
    case hipDeviceAttributeConcurrentKernels:
    case hipDeviceAttributeStreamPrioritiesSupported:
    case hipDeviceAttributeUnifiedAddressing:
    case hipDeviceAttributeHostRegisterSupported:
    case hipDeviceAttributeIsLargeBar:
    case hipDeviceAttributeFineGrainSupport: *value = 1; break;
    case hipDeviceAttributeEccEnabled:
    case hipDeviceAttributeCanUseHostPointerForRegisteredMem:
    case hipDeviceAttributeComputeMode:
    case hipDeviceAttributeCooperativeLaunch:
    case hipDeviceAttributeIntegrated:
    case hipDeviceAttributeManagedMemory:
    case hipDeviceAttributePageableMemoryAccess:
    case hipDeviceAttributeTotalConstantMemory:
    case hipDeviceAttributeMemoryPoolsSupported:
    case hipDeviceAttributeAsicRevision:
    case hipDeviceAttributeCanUseStreamWaitValue: *value = 0; break;
    default: return hipErrorInvalidValue;
  }
  return hipSuccess;
}

}  // namespace glm53_cpu

GLM53_EXPORT hipError_t hipInit(unsigned int flags) {
  return call("hipInit", plain, [&](State&, Lock&) { return flags ? hipErrorInvalidValue : hipSuccess; });
}

GLM53_EXPORT hipError_t hipRuntimeGetVersion(int* version) {
  return call("hipRuntimeGetVersion", plain, [&](State&, Lock&) {
    if (!version) return hipErrorInvalidValue;
    *version = GLM53_HIP_VERSION;
    return hipSuccess;
  });
}

GLM53_EXPORT hipError_t hipDriverGetVersion(int* version) {
  return call("hipDriverGetVersion", plain, [&](State&, Lock&) {
    if (!version) return hipErrorInvalidValue;
    *version = GLM53_HIP_VERSION;
    return hipSuccess;
  });
}

GLM53_EXPORT hipError_t hipGetDeviceCount(int* count) {
  return call("hipGetDeviceCount", plain, [&](State& s, Lock&) {
    if (!count) return hipErrorInvalidValue;
    *count = static_cast<int>(s.devices.size());
    return *count ? hipSuccess : hipErrorNoDevice;
  });
}

GLM53_EXPORT hipError_t hipGetDevice(int* device) {
  return call("hipGetDevice", plain, [&](State&, Lock&) {
    if (!device) return hipErrorInvalidValue;
    *device = this_thread().device;
    return hipSuccess;
  });
}

GLM53_EXPORT hipError_t hipSetDevice(int device) {
  return call("hipSetDevice", plain, [&](State& s, Lock&) {
    if (!valid_device(s, device)) return hipErrorInvalidDevice;
    this_thread().device = device;
    return hipSuccess;
  });
}

GLM53_EXPORT hipError_t hipDeviceGet(hipDevice_t* device, int ordinal) {
  return call("hipDeviceGet", plain, [&](State& s, Lock&) {
    if (!device) return hipErrorInvalidValue;
    if (!valid_device(s, ordinal)) return hipErrorInvalidDevice;
    *device = ordinal;
    return hipSuccess;
  });
}

GLM53_EXPORT hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_tR0600* prop, int device) {
  return call("hipGetDeviceProperties", plain, [&](State& s, Lock&) {
    if (!prop) return hipErrorInvalidValue;
    if (!valid_device(s, device)) return hipErrorInvalidDevice;
    fill_properties(s, device, prop);
    return hipSuccess;
  });
}

GLM53_EXPORT hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int device) {
  return call("hipDeviceGetAttribute", plain, [&](State& s, Lock&) {
    if (!value) return hipErrorInvalidValue;
    if (!valid_device(s, device)) return hipErrorInvalidDevice;
    hipDeviceProp_tR0600 prop;
    fill_properties(s, device, &prop);
    return attribute_of(prop, attribute, value);
  });
}

GLM53_EXPORT hipError_t hipDeviceGetPCIBusId(char* text, int bytes, int device) {
  return call("hipDeviceGetPCIBusId", plain, [&](State& s, Lock&) {
    if (!valid_device(s, device)) return hipErrorInvalidDevice;
    if (!text || bytes < 13) return hipErrorInvalidValue;
    snprintf(text, static_cast<size_t>(bytes), "%04x:%02x:%02x.0", 0x53, static_cast<unsigned>(device) + 1, 0);
    return hipSuccess;
  });
}

GLM53_EXPORT hipError_t hipDeviceGetName(char* name, int bytes, hipDevice_t device) {
  return call("hipDeviceGetName", plain, [&](State& s, Lock&) {
    if (!valid_device(s, device)) return hipErrorInvalidDevice;
    if (!name || bytes <= 0) return hipErrorInvalidValue;
    device_name(name, static_cast<size_t>(bytes), device);
    return hipSuccess;
  });
}

GLM53_EXPORT hipError_t hipDeviceSynchronize(void) {
  return call("hipDeviceSynchronize", uses_device | not_captured, [&](State& s, Lock& lock) {
    Device& device = current_device(s);
    s.wait_device(lock, device);
    if (device.lost != hipSuccess) return device.lost;
    std::string problem = s.memory.check(device.index);
    if (problem.empty()) return hipSuccess;
    s.lose_now(lock, device, hipErrorIllegalAddress, problem);
    return device.lost;
  });
}

GLM53_EXPORT hipError_t hipDeviceCanAccessPeer(int* can, int device, int peer) {
  return call("hipDeviceCanAccessPeer", plain, [&](State& s, Lock&) {
    if (!can) return hipErrorInvalidValue;
    if (!valid_device(s, device) || !valid_device(s, peer)) return hipErrorInvalidDevice;
    *can = device != peer;
    return hipSuccess;
  });
}

GLM53_EXPORT hipError_t hipDeviceEnablePeerAccess(int peer, unsigned int flags) {
  return call("hipDeviceEnablePeerAccess", uses_device, [&](State& s, Lock&) {
    int device = this_thread().device;
    if (flags) return hipErrorInvalidValue;
    if (!valid_device(s, peer) || peer == device) return hipErrorInvalidDevice;
    if (s.memory.peer(device, peer)) return hipErrorPeerAccessAlreadyEnabled;
    s.memory.set_peer(device, peer, true);
    return hipSuccess;
  });
}

GLM53_EXPORT hipError_t hipDeviceDisablePeerAccess(int peer) {
  return call("hipDeviceDisablePeerAccess", uses_device, [&](State& s, Lock&) {
    int device = this_thread().device;
    if (!valid_device(s, peer) || peer == device) return hipErrorInvalidDevice;
    if (!s.memory.peer(device, peer)) return hipErrorPeerAccessNotEnabled;
    s.memory.set_peer(device, peer, false);
    return hipSuccess;
  });
}

GLM53_EXPORT hipError_t hipGetLastError(void) { return std::exchange(this_thread().last_error, hipSuccess); }

GLM53_EXPORT hipError_t hipPeekAtLastError(void) { return this_thread().last_error; }

GLM53_EXPORT const char* hipGetErrorName(hipError_t error) {
  switch (error) {
#define GLM53_ERROR_NAME(name, value, text) \
  case name: return #name;
    GLM53_HIP_ERRORS(GLM53_ERROR_NAME)
#undef GLM53_ERROR_NAME
  }
  return "hipErrorUnknown";
}

GLM53_EXPORT const char* hipGetErrorString(hipError_t error) {
  switch (error) {
#define GLM53_ERROR_TEXT(name, value, text) \
  case name: return text;
    GLM53_HIP_ERRORS(GLM53_ERROR_TEXT)
#undef GLM53_ERROR_TEXT
  }
  return "unknown error";
}
