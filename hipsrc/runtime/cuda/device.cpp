// device.cpp - versions, devices, properties, peers.
#include <stdio.h>
#include <string.h>

#include "driver.h"

using namespace glm53_cuda;

namespace {

// Reads attribute `what` of the device with CUDA handle `handle`; 0 where the driver does not know it.
int attribute(const Driver* driver, int handle, Attribute what) {
  int value = 0;
  return driver->cuDeviceGetAttribute(&value, what, handle) ? 0 : value;
}

hipError_t handle_of(const Driver* driver, int device, int* handle) {
  int count = 0;
  if (hipError_t error = device_total(driver, &count)) return error;
  if (device < 0 || device >= count) return fail(hipErrorInvalidDevice, "device index is outside [0, device count)");
  return finish(driver, driver->cuDeviceGet(handle, device), "cuDeviceGet");
}

void fill_limits(const Driver* driver, int handle, hipDeviceProp_tR0600* p) {
  auto get = [&](Attribute what) { return attribute(driver, handle, what); };
  p->sharedMemPerBlock = (size_t)get(kSharedPerBlock);
  p->regsPerBlock = get(kRegistersPerBlock);
  p->warpSize = get(kWarpSize);
  p->memPitch = (size_t)get(kMaxPitch);
  p->maxThreadsPerBlock = get(kMaxThreadsPerBlock);
  p->maxThreadsDim[0] = get(kMaxBlockX);
  p->maxThreadsDim[1] = get(kMaxBlockY);
  p->maxThreadsDim[2] = get(kMaxBlockZ);
  p->maxGridSize[0] = get(kMaxGridX);
  p->maxGridSize[1] = get(kMaxGridY);
  p->maxGridSize[2] = get(kMaxGridZ);
  p->totalConstMem = (size_t)get(kTotalConstant);
  p->textureAlignment = (size_t)get(kTextureAlignment);
  p->maxThreadsPerMultiProcessor = get(kThreadsPerMultiprocessor);
  p->sharedMemPerMultiprocessor = (size_t)get(kSharedPerMultiprocessor);
  p->maxSharedMemoryPerMultiProcessor = (size_t)get(kSharedPerMultiprocessor);
  p->regsPerMultiprocessor = get(kRegistersPerMultiprocessor);
  p->sharedMemPerBlockOptin = (size_t)get(kSharedPerBlockOptin);
  p->maxBlocksPerMultiProcessor = get(kBlocksPerMultiprocessor);
  p->reservedSharedMemPerBlock = (size_t)get(kReservedShared);
}

void fill_features(const Driver* driver, int handle, hipDeviceProp_tR0600* p) {
  auto get = [&](Attribute what) { return attribute(driver, handle, what); };
  p->major = get(kMajor);
  p->minor = get(kMinor);
  p->clockRate = get(kClockRate);
  p->multiProcessorCount = get(kMultiprocessors);
  p->kernelExecTimeoutEnabled = get(kExecTimeout);
  p->integrated = get(kIntegrated);
  p->canMapHostMemory = get(kCanMapHost);
  p->computeMode = get(kComputeMode);
  p->concurrentKernels = get(kConcurrentKernels);
  p->ECCEnabled = get(kEcc);
  p->pciBusID = get(kPciBus);
  p->pciDeviceID = get(kPciDevice);
  p->pciDomainID = get(kPciDomain);
  p->asyncEngineCount = get(kAsyncEngines);
  p->deviceOverlap = p->asyncEngineCount > 0;
  p->unifiedAddressing = get(kUnifiedAddressing);
  p->memoryClockRate = get(kMemoryClock);
  p->memoryBusWidth = get(kBusWidth);
  p->l2CacheSize = get(kL2Bytes);
  p->streamPrioritiesSupported = get(kStreamPriorities);
  p->managedMemory = get(kManagedMemory);
  p->hostNativeAtomicSupported = get(kHostNativeAtomic);
  p->pageableMemoryAccess = get(kPageableAccess);
  p->concurrentManagedAccess = get(kConcurrentManaged);
  p->canUseHostPointerForRegisteredMem = get(kHostPointerForRegistered);
  p->cooperativeLaunch = get(kCooperativeLaunch);
  p->hostRegisterSupported = get(kHostRegister);
  p->memoryPoolsSupported = get(kMemoryPools);
}

// HIP's device attributes that have a CUDA counterpart of the same meaning and unit.
bool cuda_attribute(int hip, Attribute* cuda) {
  struct Pair {
    int hip;
    Attribute cuda;
  };
  static const Pair kPairs[] = {
      {hipDeviceAttributeEccEnabled, kEcc},
      {hipDeviceAttributeAsyncEngineCount, kAsyncEngines},
      {hipDeviceAttributeCanMapHostMemory, kCanMapHost},
      {hipDeviceAttributeCanUseHostPointerForRegisteredMem, kHostPointerForRegistered},
      {hipDeviceAttributeClockRate, kClockRate},
      {hipDeviceAttributeComputeMode, kComputeMode},
      {hipDeviceAttributeConcurrentKernels, kConcurrentKernels},
      {hipDeviceAttributeCooperativeLaunch, kCooperativeLaunch},
      {hipDeviceAttributeIntegrated, kIntegrated},
      {hipDeviceAttributeL2CacheSize, kL2Bytes},
      {hipDeviceAttributeComputeCapabilityMajor, kMajor},
      {hipDeviceAttributeComputeCapabilityMinor, kMinor},
      {hipDeviceAttributeManagedMemory, kManagedMemory},
      {hipDeviceAttributeMaxBlockDimX, kMaxBlockX},
      {hipDeviceAttributeMaxBlockDimY, kMaxBlockY},
      {hipDeviceAttributeMaxBlockDimZ, kMaxBlockZ},
      {hipDeviceAttributeMaxGridDimX, kMaxGridX},
      {hipDeviceAttributeMaxGridDimY, kMaxGridY},
      {hipDeviceAttributeMaxGridDimZ, kMaxGridZ},
      {hipDeviceAttributeMaxThreadsPerBlock, kMaxThreadsPerBlock},
      {hipDeviceAttributeMaxThreadsPerMultiProcessor, kThreadsPerMultiprocessor},
      {hipDeviceAttributeMaxPitch, kMaxPitch},
      {hipDeviceAttributeMemoryBusWidth, kBusWidth},
      {hipDeviceAttributeMemoryClockRate, kMemoryClock},
      {hipDeviceAttributeMultiprocessorCount, kMultiprocessors},
      {hipDeviceAttributePageableMemoryAccess, kPageableAccess},
      {hipDeviceAttributePciBusId, kPciBus},
      {hipDeviceAttributePciDeviceId, kPciDevice},
      {hipDeviceAttributePciDomainId, kPciDomain},
      {hipDeviceAttributeMaxRegistersPerBlock, kRegistersPerBlock},
      {hipDeviceAttributeMaxSharedMemoryPerBlock, kSharedPerBlock},
      {hipDeviceAttributeSharedMemPerBlockOptin, kSharedPerBlockOptin},
      {hipDeviceAttributeSharedMemPerMultiprocessor, kSharedPerMultiprocessor},
      {hipDeviceAttributeMaxSharedMemoryPerMultiprocessor, kSharedPerMultiprocessor},
      {hipDeviceAttributeStreamPrioritiesSupported, kStreamPriorities},
      {hipDeviceAttributeTotalConstantMemory, kTotalConstant},
      {hipDeviceAttributeUnifiedAddressing, kUnifiedAddressing},
      {hipDeviceAttributeWarpSize, kWarpSize},
      {hipDeviceAttributeMemoryPoolsSupported, kMemoryPools},
      {hipDeviceAttributeHostRegisterSupported, kHostRegister},
  };
  for (const Pair& pair : kPairs)
    if (pair.hip == hip) {
      *cuda = pair.cuda;
      return true;
    }
  return false;
}

}  // namespace

GLM53_EXPORT hipError_t hipInit(unsigned int flags) {
  if (flags) return fail(hipErrorInvalidValue, "hipInit: flags must be 0");
  const Driver* driver = nullptr;
  return open_driver(&driver);
}

GLM53_EXPORT hipError_t hipRuntimeGetVersion(int* version) {
  if (!version) return fail(hipErrorInvalidValue, "hipRuntimeGetVersion: version is null");
  *version = GLM53_HIP_VERSION;
  return hipSuccess;
}

// CUDA's driver version, e.g. 12040.
GLM53_EXPORT hipError_t hipDriverGetVersion(int* version) {
  if (!version) return fail(hipErrorInvalidValue, "hipDriverGetVersion: version is null");
  const Driver* driver = nullptr;
  if (hipError_t error = open_driver(&driver)) return error;
  return finish(driver, driver->cuDriverGetVersion(version), "cuDriverGetVersion");
}

GLM53_EXPORT hipError_t hipGetDeviceCount(int* count) {
  if (!count) return fail(hipErrorInvalidValue, "hipGetDeviceCount: count is null");
  *count = 0;
  const Driver* driver = nullptr;
  if (hipError_t error = open_driver(&driver)) return error;
  if (hipError_t error = device_total(driver, count)) return error;
  return *count ? hipSuccess : fail(hipErrorNoDevice, "the CUDA driver sees no device");
}

GLM53_EXPORT hipError_t hipGetDevice(int* device) {
  if (!device) return fail(hipErrorInvalidValue, "hipGetDevice: device is null");
  *device = 0;
  const Driver* driver = nullptr;
  if (hipError_t error = open_driver(&driver)) return error;
  return current_device(driver, device);
}

GLM53_EXPORT hipError_t hipSetDevice(int device) {
  const Driver* driver = nullptr;
  if (hipError_t error = open_driver(&driver)) return error;
  int count = 0;
  if (hipError_t error = device_total(driver, &count)) return error;
  if (device < 0 || device >= count) return fail(hipErrorInvalidDevice, "hipSetDevice: device index is outside [0, device count)");
  return set_current_device(driver, device);
}

GLM53_EXPORT hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_tR0600* properties, int device) {
  if (!properties) return fail(hipErrorInvalidValue, "hipGetDeviceProperties: properties is null");
  const Driver* driver = nullptr;
  if (hipError_t error = open_driver(&driver)) return error;
  int handle = 0;
  if (hipError_t error = handle_of(driver, device, &handle)) return error;
  memset(properties, 0, sizeof *properties);
  int result = driver->cuDeviceGetName(properties->name, sizeof properties->name, handle);
  if (hipError_t error = finish(driver, result, "cuDeviceGetName")) return error;
  size_t total = 0;
  if (hipError_t error = finish(driver, driver->cuDeviceTotalMem_v2(&total, handle), "cuDeviceTotalMem_v2")) return error;
  properties->totalGlobalMem = total;
  fill_limits(driver, handle, properties);
  fill_features(driver, handle, properties);
  snprintf(properties->gcnArchName, sizeof properties->gcnArchName, "sm_%d%d", properties->major, properties->minor);
  return hipSuccess;
}

GLM53_EXPORT hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t what, int device) {
  if (!value) return fail(hipErrorInvalidValue, "hipDeviceGetAttribute: value is null");
  Attribute cuda;
  if (!cuda_attribute(what, &cuda)) return fail(hipErrorInvalidValue, "hipDeviceGetAttribute: attribute without CUDA counterpart");
  const Driver* driver = nullptr;
  if (hipError_t error = open_driver(&driver)) return error;
  int handle = 0;
  if (hipError_t error = handle_of(driver, device, &handle)) return error;
  return finish(driver, driver->cuDeviceGetAttribute(value, cuda, handle), "cuDeviceGetAttribute");
}

GLM53_EXPORT hipError_t hipDeviceGetPCIBusId(char* text, int length, int device) {
  if (!text || length <= 0) return fail(hipErrorInvalidValue, "hipDeviceGetPCIBusId: text is null or length not positive");
  const Driver* driver = nullptr;
  if (hipError_t error = open_driver(&driver)) return error;
  int handle = 0;
  if (hipError_t error = handle_of(driver, device, &handle)) return error;
  return finish(driver, driver->cuDeviceGetPCIBusId(text, length, handle), "cuDeviceGetPCIBusId");
}

GLM53_EXPORT hipError_t hipDeviceGetName(char* text, int length, hipDevice_t device) {
  if (!text || length <= 0) return fail(hipErrorInvalidValue, "hipDeviceGetName: text is null or length not positive");
  const Driver* driver = nullptr;
  if (hipError_t error = open_driver(&driver)) return error;
  int handle = 0;
  if (hipError_t error = handle_of(driver, device, &handle)) return error;
  return finish(driver, driver->cuDeviceGetName(text, length, handle), "cuDeviceGetName");
}

GLM53_EXPORT hipError_t hipDeviceSynchronize() {
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuCtxSynchronize(), "cuCtxSynchronize");
}

GLM53_EXPORT hipError_t hipDeviceCanAccessPeer(int* can, int device, int peer) {
  if (!can) return fail(hipErrorInvalidValue, "hipDeviceCanAccessPeer: result is null");
  const Driver* driver = nullptr;
  if (hipError_t error = open_driver(&driver)) return error;
  int handle = 0, peer_handle = 0;
  if (hipError_t error = handle_of(driver, device, &handle)) return error;
  if (hipError_t error = handle_of(driver, peer, &peer_handle)) return error;
  return finish(driver, driver->cuDeviceCanAccessPeer(can, handle, peer_handle), "cuDeviceCanAccessPeer");
}

GLM53_EXPORT hipError_t hipDeviceEnablePeerAccess(int peer, unsigned int flags) {
  if (flags) return fail(hipErrorInvalidValue, "hipDeviceEnablePeerAccess: flags must be 0");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  if (peer == driver.device()) return fail(hipErrorInvalidDevice, "hipDeviceEnablePeerAccess: a device is no peer of itself");
  Context context = nullptr;
  if (hipError_t error = context_of(driver, peer, &context)) return error;
  return finish(driver, driver->cuCtxEnablePeerAccess(context, 0), "cuCtxEnablePeerAccess");
}

GLM53_EXPORT hipError_t hipDeviceDisablePeerAccess(int peer) {
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  Context context = nullptr;
  if (hipError_t error = context_of(driver, peer, &context)) return error;
  return finish(driver, driver->cuCtxDisablePeerAccess(context), "cuCtxDisablePeerAccess");
}
