// stream.cpp - streams and events. The null stream is CUDA's legacy default stream, which has HIP's semantics.
#include "driver.h"

using namespace glm53_cuda;

namespace {

bool stream_flags(unsigned int flags, unsigned int* cuda) {
  switch (flags) {
    case hipStreamDefault:
      *cuda = kStreamDefault;
      return true;
    case hipStreamNonBlocking:
      *cuda = kStreamNonBlocking;
      return true;
    default:
      return false;
  }
}

}  // namespace

GLM53_EXPORT hipError_t hipStreamCreateWithFlags(hipStream_t* stream, unsigned int flags) {
  unsigned int cuda = 0;
  if (!stream) return fail(hipErrorInvalidValue, "hipStreamCreateWithFlags: stream is null");
  if (!stream_flags(flags, &cuda)) return fail(hipErrorInvalidValue, "hipStreamCreateWithFlags: unknown flag");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuStreamCreate(reinterpret_cast<Stream*>(stream), cuda), "cuStreamCreate");
}

GLM53_EXPORT hipError_t hipStreamCreate(hipStream_t* stream) { return hipStreamCreateWithFlags(stream, hipStreamDefault); }

// Lower numbers are more urgent in both interfaces; the driver clamps to its range.
GLM53_EXPORT hipError_t hipStreamCreateWithPriority(hipStream_t* stream, unsigned int flags, int priority) {
  unsigned int cuda = 0;
  if (!stream) return fail(hipErrorInvalidValue, "hipStreamCreateWithPriority: stream is null");
  if (!stream_flags(flags, &cuda)) return fail(hipErrorInvalidValue, "hipStreamCreateWithPriority: unknown flag");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  int result = driver->cuStreamCreateWithPriority(reinterpret_cast<Stream*>(stream), cuda, priority);
  return finish(driver, result, "cuStreamCreateWithPriority");
}

GLM53_EXPORT hipError_t hipStreamDestroy(hipStream_t stream) {
  if (!stream) return fail(hipErrorInvalidHandle, "hipStreamDestroy: the null stream cannot be destroyed");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuStreamDestroy_v2(stream_of(stream)), "cuStreamDestroy_v2");
}

GLM53_EXPORT hipError_t hipStreamSynchronize(hipStream_t stream) {
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuStreamSynchronize(stream_of(stream)), "cuStreamSynchronize");
}

GLM53_EXPORT hipError_t hipStreamQuery(hipStream_t stream) {
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuStreamQuery(stream_of(stream)), "cuStreamQuery");
}

GLM53_EXPORT hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned int flags) {
  if (!event) return fail(hipErrorInvalidHandle, "hipStreamWaitEvent: event is null");
  if (flags) return fail(hipErrorInvalidValue, "hipStreamWaitEvent: flags must be 0");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuStreamWaitEvent(stream_of(stream), event_of(event), 0), "cuStreamWaitEvent");
}

GLM53_EXPORT hipError_t hipStreamIsCapturing(hipStream_t stream, hipStreamCaptureStatus* status) {
  if (!status) return fail(hipErrorInvalidValue, "hipStreamIsCapturing: status is null");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  int cuda = 0;
  if (hipError_t error = finish(driver, driver->cuStreamIsCapturing(stream_of(stream), &cuda), "cuStreamIsCapturing")) return error;
  switch (cuda) {
    case 0:
      *status = hipStreamCaptureStatusNone;
      return hipSuccess;
    case 1:
      *status = hipStreamCaptureStatusActive;
      return hipSuccess;
    case 2:
      *status = hipStreamCaptureStatusInvalidated;
      return hipSuccess;
    default:
      return fail(hipErrorUnknown, "cuStreamIsCapturing: unknown status");
  }
}

GLM53_EXPORT hipError_t hipStreamBeginCapture(hipStream_t stream, hipStreamCaptureMode mode) {
  int cuda = 0;
  switch (mode) {
    case hipStreamCaptureModeGlobal:
      cuda = 0;
      break;
    case hipStreamCaptureModeThreadLocal:
      cuda = 1;
      break;
    case hipStreamCaptureModeRelaxed:
      cuda = 2;
      break;
    default:
      return fail(hipErrorInvalidValue, "hipStreamBeginCapture: unknown mode");
  }
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuStreamBeginCapture_v2(stream_of(stream), cuda), "cuStreamBeginCapture_v2");
}

GLM53_EXPORT hipError_t hipStreamEndCapture(hipStream_t stream, hipGraph_t* graph) {
  if (!graph) return fail(hipErrorInvalidValue, "hipStreamEndCapture: graph is null");
  *graph = nullptr;
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuStreamEndCapture(stream_of(stream), reinterpret_cast<Graph*>(graph)), "cuStreamEndCapture");
}

// The three scopes of HIP's event fences mean nothing to CUDA, whose events are visible to everyone.
GLM53_EXPORT hipError_t hipEventCreateWithFlags(hipEvent_t* event, unsigned int flags) {
  if (!event) return fail(hipErrorInvalidValue, "hipEventCreateWithFlags: event is null");
  const unsigned int known = hipEventBlockingSync | hipEventDisableTiming | hipEventInterprocess | hipEventDisableSystemFence |
                             hipEventReleaseToDevice | hipEventReleaseToSystem;
  if (flags & ~known) return fail(hipErrorInvalidValue, "hipEventCreateWithFlags: unknown flag");
  if ((flags & hipEventReleaseToDevice) && (flags & hipEventReleaseToSystem))
    return fail(hipErrorInvalidValue, "hipEventCreateWithFlags: the two release scopes exclude each other");
  if ((flags & hipEventInterprocess) && !(flags & hipEventDisableTiming))
    return fail(hipErrorInvalidValue, "hipEventCreateWithFlags: an interprocess event must have timing disabled");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  unsigned int cuda = 0;
  if (flags & hipEventBlockingSync) cuda |= kEventBlockingSync;
  if (flags & hipEventDisableTiming) cuda |= kEventDisableTiming;
  if (flags & hipEventInterprocess) cuda |= kEventInterprocess;
  return finish(driver, driver->cuEventCreate(reinterpret_cast<Event*>(event), cuda), "cuEventCreate");
}

GLM53_EXPORT hipError_t hipEventCreate(hipEvent_t* event) { return hipEventCreateWithFlags(event, hipEventDefault); }

GLM53_EXPORT hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) {
  if (!event) return fail(hipErrorInvalidHandle, "hipEventRecord: event is null");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuEventRecord(event_of(event), stream_of(stream)), "cuEventRecord");
}

GLM53_EXPORT hipError_t hipEventQuery(hipEvent_t event) {
  if (!event) return fail(hipErrorInvalidHandle, "hipEventQuery: event is null");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuEventQuery(event_of(event)), "cuEventQuery");
}

GLM53_EXPORT hipError_t hipEventSynchronize(hipEvent_t event) {
  if (!event) return fail(hipErrorInvalidHandle, "hipEventSynchronize: event is null");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuEventSynchronize(event_of(event)), "cuEventSynchronize");
}

GLM53_EXPORT hipError_t hipEventElapsedTime(float* milliseconds, hipEvent_t start, hipEvent_t stop) {
  if (!milliseconds) return fail(hipErrorInvalidValue, "hipEventElapsedTime: result is null");
  if (!start || !stop) return fail(hipErrorInvalidHandle, "hipEventElapsedTime: an event is null");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuEventElapsedTime(milliseconds, event_of(start), event_of(stop)), "cuEventElapsedTime");
}

GLM53_EXPORT hipError_t hipEventDestroy(hipEvent_t event) {
  if (!event) return fail(hipErrorInvalidHandle, "hipEventDestroy: event is null");
  Entered driver;
  if (hipError_t error = driver.enter()) return error;
  return finish(driver, driver->cuEventDestroy_v2(event_of(event)), "cuEventDestroy_v2");
}
