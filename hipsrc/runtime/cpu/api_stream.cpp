// api_stream.cpp - streams and events.
#include "api.h"

using namespace glm53_cpu;

namespace glm53_cpu {

static hipError_t create_stream(State& s, hipStream_t* handle, uint32_t flags) {
  if (!handle || (flags & ~hipStreamNonBlocking)) return hipErrorInvalidValue;
  Device& device = current_device(s);
  auto stream = std::make_shared<Stream>();
  stream->device = &device;
  stream->queue = &device.queues[device.streams_made++ % queues_per_device];
  stream->flags = flags;
  stream->handle = s.new_handle();
  device.streams.push_back(stream);
  s.streams[stream->handle] = stream;
  *handle = reinterpret_cast<hipStream_t>(stream->handle);
  return hipSuccess;
}

// A wait or query of a stream that captures: not permitted, and the capture ends.
static hipError_t refuse_capturing(const Stream& stream) {
  if (!stream.capture) return hipSuccess;
  stream.capture->invalidated = true;
  return hipErrorStreamCaptureUnsupported;
}

// What the null stream has to wait for before a wait or query of it can succeed: itself and the blocking streams of its device.
static hipError_t usable(State& s, const std::shared_ptr<Stream>& stream) {
  if (!stream) return hipErrorInvalidHandle;
  if (stream->device->lost != hipSuccess) return stream->device->lost;
  hipError_t error = refuse_capturing(*stream);
  if (error == hipSuccess && stream == stream->device->null_stream) error = forbid_null_stream(s, *stream->device);
  return error;
}

static hipError_t event_state(State& s, const std::shared_ptr<Event>& event) {
  if (!event) return hipErrorInvalidHandle;
  if (event->capture) {
    event->capture->invalidated = true;
    return hipErrorCapturedEvent;
  }
  (void)s;
  return event->device->lost;
}

static hipError_t create_event(State& s, hipEvent_t* handle, uint32_t flags) {
  constexpr uint32_t known = hipEventBlockingSync | hipEventDisableTiming | hipEventInterprocess | hipEventDisableSystemFence |
                             hipEventReleaseToDevice | hipEventReleaseToSystem;
  if (!handle || (flags & ~known)) return hipErrorInvalidValue;
  if ((flags & hipEventReleaseToDevice) && (flags & hipEventReleaseToSystem)) return hipErrorInvalidValue;
  if ((flags & hipEventInterprocess) && !(flags & hipEventDisableTiming)) return hipErrorInvalidValue;
  auto event = std::make_shared<Event>();
  event->device = &current_device(s);
  event->flags = flags;
  uint64_t number = s.new_handle();
  s.events[number] = event;
  *handle = reinterpret_cast<hipEvent_t>(number);
  return hipSuccess;
}

}  // namespace glm53_cpu

GLM53_EXPORT hipError_t hipStreamCreate(hipStream_t* stream) {
  return call("hipStreamCreate", uses_device, [&](State& s, Lock&) { return create_stream(s, stream, hipStreamDefault); });
}

GLM53_EXPORT hipError_t hipStreamCreateWithFlags(hipStream_t* stream, unsigned int flags) {
  return call("hipStreamCreateWithFlags", uses_device, [&](State& s, Lock&) { return create_stream(s, stream, flags); });
}

// Priorities are accepted and, as hardware may, not obeyed.
GLM53_EXPORT hipError_t hipStreamCreateWithPriority(hipStream_t* stream, unsigned int flags, int) {
  return call("hipStreamCreateWithPriority", uses_device, [&](State& s, Lock&) { return create_stream(s, stream, flags); });
}

// Returns at once; work that is queued still runs.
GLM53_EXPORT hipError_t hipStreamDestroy(hipStream_t handle) {
  return call("hipStreamDestroy", plain, [&](State& s, Lock&) {
    std::shared_ptr<Stream> stream = find(s.streams, handle);
    if (!stream) return hipErrorInvalidHandle;
    hipError_t error = refuse_capturing(*stream);
    if (error != hipSuccess) return error;
    stream->destroyed = true;
    s.streams.erase(stream->handle);
    return hipSuccess;
  });
}

GLM53_EXPORT hipError_t hipStreamSynchronize(hipStream_t handle) {
  return call("hipStreamSynchronize", plain, [&](State& s, Lock& lock) {
    std::shared_ptr<Stream> stream = find_stream(s, handle);
    hipError_t error = usable(s, stream);
    if (error != hipSuccess) return error;
    std::shared_ptr<Op> op = stream->last;
    if (stream == stream->device->null_stream) {
      op = std::make_shared<MarkerOp>("synchronize");
      s.enqueue(stream, op);
    }
    s.wait(lock, op);
    return stream->device->lost;
  });
}

GLM53_EXPORT hipError_t hipStreamQuery(hipStream_t handle) {
  return call("hipStreamQuery", plain, [&](State& s, Lock&) {
    std::shared_ptr<Stream> stream = find_stream(s, handle);
    hipError_t error = usable(s, stream);
    if (error != hipSuccess) return error;
    bool busy = stream->last && !stream->last->done;
    if (stream == stream->device->null_stream) {
      for (const auto& other : stream->device->streams) busy = busy || (other->blocking() && other->last && !other->last->done);
    }
    return busy ? hipErrorNotReady : hipSuccess;
  });
}

GLM53_EXPORT hipError_t hipStreamWaitEvent(hipStream_t handle, hipEvent_t event_handle, unsigned int flags) {
  return call("hipStreamWaitEvent", plain, [&](State& s, Lock&) {
    std::shared_ptr<Stream> stream = find_stream(s, handle);
    std::shared_ptr<Event> event = find(s.events, event_handle);
    if (!stream || !event) return hipErrorInvalidHandle;
    if (flags) return hipErrorInvalidValue;
    if (stream->device->lost != hipSuccess) return stream->device->lost;
    if (stream->capture || event->capture) return capture_wait(s, stream, *event);
    if (!event->record || event->record->done) return hipSuccess;
    auto op = std::make_shared<MarkerOp>("wait");
    op->after.push_back(event->record);
    return submit(s, stream, op);
  });
}

GLM53_EXPORT hipError_t hipStreamIsCapturing(hipStream_t handle, hipStreamCaptureStatus* status) {
  return call("hipStreamIsCapturing", plain, [&](State& s, Lock&) {
    if (!status) return hipErrorInvalidValue;
    std::shared_ptr<Stream> stream = find_stream(s, handle);
    if (!stream) return hipErrorInvalidHandle;
    if (stream == stream->device->null_stream) {
      hipError_t error = forbid_null_stream(s, *stream->device);
      if (error != hipSuccess) return error;
    }
    *status = !stream->capture              ? hipStreamCaptureStatusNone
              : stream->capture->invalidated ? hipStreamCaptureStatusInvalidated
                                             : hipStreamCaptureStatusActive;
    return hipSuccess;
  });
}

GLM53_EXPORT hipError_t hipEventCreate(hipEvent_t* event) {
  return call("hipEventCreate", uses_device, [&](State& s, Lock&) { return create_event(s, event, hipEventDefault); });
}

GLM53_EXPORT hipError_t hipEventCreateWithFlags(hipEvent_t* event, unsigned flags) {
  return call("hipEventCreateWithFlags", uses_device, [&](State& s, Lock&) { return create_event(s, event, flags); });
}

GLM53_EXPORT hipError_t hipEventDestroy(hipEvent_t handle) {
  return call("hipEventDestroy", plain, [&](State& s, Lock&) {
    return s.events.erase(reinterpret_cast<uint64_t>(handle)) ? hipSuccess : hipErrorInvalidHandle;
  });
}

GLM53_EXPORT hipError_t hipEventRecord(hipEvent_t event_handle, hipStream_t handle) {
  return call("hipEventRecord", plain, [&](State& s, Lock&) {
    std::shared_ptr<Stream> stream = find_stream(s, handle);
    std::shared_ptr<Event> event = find(s.events, event_handle);
    if (!stream || !event || event->device != stream->device) return hipErrorInvalidHandle;
    if (stream->device->lost != hipSuccess) return stream->device->lost;
    if (stream->capture) {
      if (stream->capture->invalidated) return hipErrorStreamCaptureInvalidated;
      capture_record(stream, *event);
      return hipSuccess;
    }
    auto op = std::make_shared<MarkerOp>("record");
    hipError_t error = submit(s, stream, op);
    if (error != hipSuccess) return error;
    event->record = op;
    event->capture.reset();
    event->capture_nodes.clear();
    return hipSuccess;
  });
}

GLM53_EXPORT hipError_t hipEventSynchronize(hipEvent_t handle) {
  return call("hipEventSynchronize", plain, [&](State& s, Lock& lock) {
    std::shared_ptr<Event> event = find(s.events, handle);
    hipError_t error = event_state(s, event);
    if (error != hipSuccess) return error;
    s.wait(lock, event->record);
    return event->device->lost;
  });
}

GLM53_EXPORT hipError_t hipEventQuery(hipEvent_t handle) {
  return call("hipEventQuery", plain, [&](State& s, Lock&) {
    std::shared_ptr<Event> event = find(s.events, handle);
    hipError_t error = event_state(s, event);
    if (error != hipSuccess) return error;
    return event->record && !event->record->done ? hipErrorNotReady : hipSuccess;
  });
}

GLM53_EXPORT hipError_t hipEventElapsedTime(float* milliseconds, hipEvent_t start_handle, hipEvent_t stop_handle) {
  return call("hipEventElapsedTime", plain, [&](State& s, Lock&) {
    if (!milliseconds) return hipErrorInvalidValue;
    std::shared_ptr<Event> start = find(s.events, start_handle), stop = find(s.events, stop_handle);
    for (const auto& event : {start, stop}) {
      hipError_t error = event_state(s, event);
      if (error != hipSuccess) return error;
      if (!event->record || (event->flags & hipEventDisableTiming)) return hipErrorInvalidHandle;
    }
    if (start->device != stop->device) return hipErrorInvalidHandle;
    if (!start->record->done || !stop->record->done) return hipErrorNotReady;
    double ns = static_cast<double>(static_cast<int64_t>(stop->record->finished_ns - start->record->finished_ns));
    *milliseconds = static_cast<float>(ns * 1e-6);
    return hipSuccess;
  });
}
