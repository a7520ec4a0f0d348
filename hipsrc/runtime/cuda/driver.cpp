// driver.cpp - opening libcuda.so.1, contexts, and the translation of errors.
#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include <mutex>
#include <vector>

namespace glm53_cuda {
namespace {

constexpr int kMessageBytes = 512;
constexpr int kCallers = -1;
// HIP's current device is a property of the thread: chosen by hipSetDevice, or that of the caller's context.
thread_local int chosen_device = kCallers;
thread_local hipError_t thread_error = hipSuccess;
thread_local char thread_message[kMessageBytes] = "";

Driver driver_table;
hipError_t open_error = hipSuccess;
char open_message[kMessageBytes] = "";
std::once_flag open_once;

std::mutex context_mutex;
std::vector<Context> contexts;  // by device, null until retained; guarded by context_mutex

void open_failed(hipError_t error, const char* format, const char* text, int code) {
  open_error = error;
  snprintf(open_message, sizeof open_message, format, text, code);
}

void open_library() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* why = dlerror();
    return open_failed(hipErrorNoDevice, "the CUDA driver cannot be opened: %s", why ? why : "libcuda.so.1", 0);
  }
  const char* missing = nullptr;
#define GLM53_CUDA_LOAD(name, args)                                                  \
  driver_table.name = reinterpret_cast<int(*) args>(dlsym(library, #name));          \
  if (!driver_table.name && !missing) missing = #name;
  GLM53_CUDA_CALLS(GLM53_CUDA_LOAD)
#undef GLM53_CUDA_LOAD
  if (missing) return open_failed(hipErrorInsufficientDriver, "libcuda.so.1 has no %s; CUDA 12.3 or later is needed", missing, 0);
  int result = driver_table.cuInit(0);
  if (result) {
    const char* name = nullptr;
    driver_table.cuGetErrorName(result, &name);
    open_failed(translate(result), "cuInit: %s (%d)", name ? name : "unknown error", result);
  }
}

// Index of the device of `callers`, this thread's current context; 0 if that is null.
hipError_t callers_device(const Driver* driver, Context callers, int* device) {
  *device = 0;
  if (!callers) return hipSuccess;
  int wanted = 0, count = 0;
  if (hipError_t error = finish(driver, driver->cuCtxGetDevice(&wanted), "cuCtxGetDevice")) return error;
  if (hipError_t error = device_total(driver, &count)) return error;
  for (int index = 0; index < count; index++) {
    int handle = 0;
    if (hipError_t error = finish(driver, driver->cuDeviceGet(&handle, index), "cuDeviceGet")) return error;
    if (handle == wanted) {
      *device = index;
      return hipSuccess;
    }
  }
  return fail(hipErrorInvalidDevice, "the current CUDA context is of a device that the driver does not list");
}

}  // namespace

hipError_t translate(int result) {
  struct Pair {
    int cuda;
    hipError_t hip;
  };
  static const Pair kPairs[] = {
      {0, hipSuccess},
      {1, hipErrorInvalidValue},
      {2, hipErrorOutOfMemory},
      {3, hipErrorNotInitialized},
      {4, hipErrorDeinitialized},
      {34, hipErrorInsufficientDriver},  // stub library
      {46, hipErrorNoDevice},            // device unavailable
      {100, hipErrorNoDevice},
      {101, hipErrorInvalidDevice},
      {200, hipErrorInvalidImage},
      {201, hipErrorInvalidContext},
      {205, hipErrorMapFailed},
      {209, hipErrorNoBinaryForGpu},
      {214, hipErrorECCNotCorrectable},
      {217, hipErrorPeerAccessUnsupported},
      {218, hipErrorInvalidKernelFile},  // invalid PTX
      {220, hipErrorECCNotCorrectable},  // uncorrectable NVLink error
      {222, hipErrorNoBinaryForGpu},     // unsupported PTX version
      {300, hipErrorInvalidImage},       // invalid source
      {301, hipErrorFileNotFound},
      {302, hipErrorSharedObjectSymbolNotFound},
      {303, hipErrorSharedObjectInitFailed},
      {304, hipErrorOperatingSystem},
      {400, hipErrorInvalidHandle},
      {401, hipErrorIllegalState},
      {500, hipErrorNotFound},
      {600, hipErrorNotReady},
      {700, hipErrorIllegalAddress},
      {701, hipErrorLaunchOutOfResources},
      {702, hipErrorLaunchTimeOut},
      {704, hipErrorPeerAccessAlreadyEnabled},
      {705, hipErrorPeerAccessNotEnabled},
      {709, hipErrorContextIsDestroyed},
      {710, hipErrorAssert},
      {711, hipErrorPeerAccessUnsupported},  // too many peers
      {712, hipErrorHostMemoryAlreadyRegistered},
      {713, hipErrorHostMemoryNotRegistered},
      {714, hipErrorLaunchFailure},  // hardware stack error, ...
      {715, hipErrorLaunchFailure},  // ... illegal instruction,
      {716, hipErrorLaunchFailure},  // ... misaligned address,
      {717, hipErrorLaunchFailure},  // ... invalid address space,
      {718, hipErrorLaunchFailure},  // ... invalid program counter: all end the context
      {719, hipErrorLaunchFailure},
      {800, hipErrorNotSupported},  // not permitted
      {801, hipErrorNotSupported},
      {802, hipErrorNotInitialized},      // system not ready
      {803, hipErrorInsufficientDriver},  // system driver mismatch
      {900, hipErrorStreamCaptureUnsupported},
      {901, hipErrorStreamCaptureInvalidated},
      {902, hipErrorStreamCaptureMerge},
      {903, hipErrorStreamCaptureUnmatched},
      {904, hipErrorStreamCaptureUnjoined},
      {905, hipErrorStreamCaptureIsolation},
      {906, hipErrorStreamCaptureImplicit},
      {907, hipErrorCapturedEvent},
      {908, hipErrorStreamCaptureWrongThread},
      {910, hipErrorGraphExecUpdateFailure},
  };
  for (const Pair& pair : kPairs)
    if (pair.cuda == result) return pair.hip;
  return hipErrorUnknown;
}

hipError_t fail(hipError_t error, const char* message) {
  thread_error = error;
  snprintf(thread_message, sizeof thread_message, "%s", message);
  return error;
}

hipError_t finish(const Driver* driver, int result, const char* call) {
  hipError_t error = translate(result);
  if (error == hipSuccess || error == hipErrorNotReady) return error;
  const char *name = nullptr, *text = nullptr;
  driver->cuGetErrorName(result, &name);
  driver->cuGetErrorString(result, &text);
  char message[kMessageBytes];
  snprintf(message, sizeof message, "%s: %s (%d), %s", call, name ? name : "unknown error", result, text ? text : "no description");
  return fail(error, message);
}

hipError_t open_driver(const Driver** driver) {
  std::call_once(open_once, open_library);
  if (open_error != hipSuccess) return fail(open_error, open_message);
  *driver = &driver_table;
  return hipSuccess;
}

hipError_t device_total(const Driver* driver, int* count) { return finish(driver, driver->cuDeviceGetCount(count), "cuDeviceGetCount"); }

hipError_t context_of(const Driver* driver, int device, Context* context) {
  int count = 0;
  if (hipError_t error = device_total(driver, &count)) return error;
  if (device < 0 || device >= count) return fail(hipErrorInvalidDevice, "device index is outside [0, device count)");
  std::lock_guard<std::mutex> lock(context_mutex);
  if (contexts.size() < (size_t)count) contexts.resize((size_t)count, nullptr);
  if (!contexts[(size_t)device]) {
    int handle = 0;
    if (hipError_t error = finish(driver, driver->cuDeviceGet(&handle, device), "cuDeviceGet")) return error;
    Context retained = nullptr;
    if (hipError_t error = finish(driver, driver->cuDevicePrimaryCtxRetain(&retained, handle), "cuDevicePrimaryCtxRetain")) return error;
    contexts[(size_t)device] = retained;
  }
  *context = contexts[(size_t)device];
  return hipSuccess;
}

hipError_t Entered::enter() {
  if (hipError_t error = open_driver(&driver_)) return error;
  if (hipError_t error = finish(driver_, driver_->cuCtxGetCurrent(&callers_), "cuCtxGetCurrent")) return error;
  device_ = chosen_device;
  if (device_ == kCallers)
    if (hipError_t error = callers_device(driver_, callers_, &device_)) return error;
  Context wanted = nullptr;
  if (hipError_t error = context_of(driver_, device_, &wanted)) return error;
  if (callers_ == wanted) return hipSuccess;
  if (hipError_t error = finish(driver_, driver_->cuCtxSetCurrent(wanted), "cuCtxSetCurrent")) return error;
  switched_ = true;
  return hipSuccess;
}

hipError_t current_device(const Driver* driver, int* device) {
  *device = chosen_device;
  if (*device != kCallers) return hipSuccess;
  Context callers = nullptr;
  if (hipError_t error = finish(driver, driver->cuCtxGetCurrent(&callers), "cuCtxGetCurrent")) return error;
  return callers_device(driver, callers, device);
}

hipError_t set_current_device(const Driver* driver, int device) {
  Context callers = nullptr;
  if (hipError_t error = finish(driver, driver->cuCtxGetCurrent(&callers), "cuCtxGetCurrent")) return error;
  int own = 0;
  if (hipError_t error = callers_device(driver, callers, &own)) return error;
  chosen_device = device == own ? kCallers : device;
  return hipSuccess;
}

}  // namespace glm53_cuda

using namespace glm53_cuda;

GLM53_EXPORT const char* glm53_runtime_name() { return "cuda"; }
// The last failure of the calling thread in words, e.g. "cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2), out of memory".
GLM53_EXPORT const char* glm53_runtime_message() { return thread_message; }

GLM53_EXPORT hipError_t hipGetLastError() {
  hipError_t error = thread_error;
  thread_error = hipSuccess;
  return error;
}
GLM53_EXPORT hipError_t hipPeekAtLastError() { return thread_error; }

GLM53_EXPORT const char* hipGetErrorName(hipError_t error) {
  switch (error) {
#define GLM53_NAME(name, value, text) \
  case name:                          \
    return #name;
    GLM53_HIP_ERRORS(GLM53_NAME)
#undef GLM53_NAME
  }
  return "hipErrorUnknown";
}
GLM53_EXPORT const char* hipGetErrorString(hipError_t error) {
  switch (error) {
#define GLM53_TEXT(name, value, text) \
  case name:                          \
    return text;
    GLM53_HIP_ERRORS(GLM53_TEXT)
#undef GLM53_TEXT
  }
  return "unknown error";
}
