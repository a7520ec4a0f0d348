// api_copy.cpp - copies and fills. Synchronous ones go through the null stream and wait.
#include "api.h"
#include "copy.h"

using namespace glm53_cpu;

namespace glm53_cpu {

// An asynchronous copy from pageable memory up to this size reads its source at the call; a larger one is synchronous, as HIP allows.
constexpr uint64_t staging_bytes = 64ull << 10;

static uint64_t extent(uint64_t width, uint64_t height, uint64_t pitch) { return (height - 1) * pitch + width; }

static hipError_t check_kind(hipMemcpyKind kind, const Side& target, const Side& source) {
  bool to_device = target.device || target.alias, to_host = !target.device;
  bool from_device = source.device || source.alias, from_host = !source.device;
  switch (kind) {
    case hipMemcpyDefault: return hipSuccess;
    case hipMemcpyHostToHost: return to_host && from_host ? hipSuccess : hipErrorInvalidMemcpyDirection;
    case hipMemcpyHostToDevice: return to_device && from_host ? hipSuccess : hipErrorInvalidMemcpyDirection;
    case hipMemcpyDeviceToHost: return to_host && from_device ? hipSuccess : hipErrorInvalidMemcpyDirection;
    case hipMemcpyDeviceToDevice:
    case hipMemcpyDeviceToDeviceNoCU: return to_device && from_device ? hipSuccess : hipErrorInvalidMemcpyDirection;
  }
  return hipErrorInvalidMemcpyDirection;
}

static hipError_t copy(State& s, Lock& lock, const std::shared_ptr<Stream>& stream, const CopyShape& shape, hipMemcpyKind kind,
                       bool wait) {
  if (!stream) return hipErrorInvalidHandle;
  if (stream->device->lost != hipSuccess) return stream->device->lost;
  if (shape.width == 0 || shape.height == 0) return hipSuccess;
  if (!shape.target || !shape.source) return hipErrorInvalidValue;
  uint64_t source_bytes = extent(shape.width, shape.height, shape.source_pitch);
  Side target = side_of(s.memory, shape.target, extent(shape.width, shape.height, shape.target_pitch));
  Side source = side_of(s.memory, shape.source, source_bytes);
  if (!target.valid || !source.valid) return hipErrorInvalidValue;
  hipError_t error = check_kind(kind, target, source);
  if (error != hipSuccess) return error;
  if (stream->capture) {
    int device = stream->device->index;
    if ((target.device && target.owner != device) || (source.device && source.owner != device)) {
      stream->capture->invalidated = true;
      s.message = "capture on device " + std::to_string(device) +
                  ": a copy touches memory of another device; graphs of several devices are refused";
      return hipErrorStreamCaptureUnsupported;
    }
    return submit(s, stream, std::make_shared<CopyOp>(s.memory, shape));
  }
  std::shared_ptr<Op> op;
  if (!wait && source.pageable && !target.pageable && source_bytes <= staging_bytes) {
    std::vector<uint8_t> staged(shape.width * shape.height);
    for (uint64_t row = 0; row < shape.height; row++) {
      auto from = reinterpret_cast<const uint8_t*>(shape.source + row * shape.source_pitch);
      std::copy(from, from + shape.width, staged.begin() + static_cast<std::ptrdiff_t>(row * shape.width));
    }
    op = std::make_shared<CopyOp>(s.memory, shape, std::move(staged));
  } else {
    op = std::make_shared<CopyOp>(s.memory, shape);
    wait = wait || source.pageable || target.pageable;
  }
  error = submit(s, stream, op);
  return error == hipSuccess && wait ? finish(s, lock, op) : error;
}

static CopyShape flat(void* target, const void* source, size_t bytes) {
  CopyShape shape;
  shape.target = reinterpret_cast<uint64_t>(target);
  shape.source = reinterpret_cast<uint64_t>(source);
  shape.width = shape.target_pitch = shape.source_pitch = bytes;
  return shape;
}

static hipError_t sync_copy(const char* name, void* target, const void* source, size_t bytes, hipMemcpyKind kind) {
  return call(name, uses_device | not_captured, [&](State& s, Lock& lock) {
    return copy(s, lock, current_device(s).null_stream, flat(target, source, bytes), kind, true);
  });
}

static hipError_t async_copy(const char* name, void* target, const void* source, size_t bytes, hipMemcpyKind kind, hipStream_t stream) {
  return call(name, uses_device, [&](State& s, Lock& lock) {
    return copy(s, lock, find_stream(s, stream), flat(target, source, bytes), kind, false);
  });
}

static hipError_t fill(State& s, Lock& lock, const std::shared_ptr<Stream>& stream, void* target, int value, size_t bytes, bool wait) {
  if (!stream) return hipErrorInvalidHandle;
  if (stream->device->lost != hipSuccess) return stream->device->lost;
  if (bytes == 0) return hipSuccess;
  auto address = reinterpret_cast<uint64_t>(target);
  Side side = side_of(s.memory, address, bytes);
  if (!side.valid || side.pageable) return hipErrorInvalidValue;
  if (stream->capture && side.device && side.owner != stream->device->index) {
    stream->capture->invalidated = true;
    return hipErrorStreamCaptureUnsupported;
  }
  auto op = std::make_shared<FillOp>(s.memory, address, static_cast<uint8_t>(value), bytes);
  hipError_t error = submit(s, stream, op);
  return error == hipSuccess && wait ? finish(s, lock, op) : error;
}

}  // namespace glm53_cpu

GLM53_EXPORT hipError_t hipMemcpy(void* target, const void* source, size_t bytes, hipMemcpyKind kind) {
  return sync_copy("hipMemcpy", target, source, bytes, kind);
}

GLM53_EXPORT hipError_t hipMemcpyDtoH(void* target, hipDeviceptr_t source, size_t bytes) {
  return sync_copy("hipMemcpyDtoH", target, source, bytes, hipMemcpyDeviceToHost);
}

GLM53_EXPORT hipError_t hipMemcpyHtoD(hipDeviceptr_t target, const void* source, size_t bytes) {
  return sync_copy("hipMemcpyHtoD", target, source, bytes, hipMemcpyHostToDevice);
}

GLM53_EXPORT hipError_t hipMemcpyAsync(void* target, const void* source, size_t bytes, hipMemcpyKind kind, hipStream_t stream) {
  return async_copy("hipMemcpyAsync", target, source, bytes, kind, stream);
}

GLM53_EXPORT hipError_t hipMemcpyDtoHAsync(void* target, hipDeviceptr_t source, size_t bytes, hipStream_t stream) {
  return async_copy("hipMemcpyDtoHAsync", target, source, bytes, hipMemcpyDeviceToHost, stream);
}

GLM53_EXPORT hipError_t hipMemcpyHtoDAsync(hipDeviceptr_t target, const void* source, size_t bytes, hipStream_t stream) {
  return async_copy("hipMemcpyHtoDAsync", target, source, bytes, hipMemcpyHostToDevice, stream);
}

GLM53_EXPORT hipError_t hipMemcpyPeerAsync(void* target, int target_device, const void* source, int source_device, size_t bytes,
                                           hipStream_t stream) {
  return call("hipMemcpyPeerAsync", uses_device, [&](State& s, Lock& lock) {
    int count = static_cast<int>(s.devices.size());
    if (target_device < 0 || target_device >= count || source_device < 0 || source_device >= count) return hipErrorInvalidDevice;
    if (bytes) {
      Side to = side_of(s.memory, reinterpret_cast<uint64_t>(target), bytes);
      Side from = side_of(s.memory, reinterpret_cast<uint64_t>(source), bytes);
      if (to.owner != target_device || from.owner != source_device) return hipErrorInvalidValue;
    }
    return copy(s, lock, find_stream(s, stream), flat(target, source, bytes), hipMemcpyDeviceToDevice, false);
  });
}

GLM53_EXPORT hipError_t hipMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t width,
                                         size_t height, hipMemcpyKind kind, hipStream_t stream) {
  return call("hipMemcpy2DAsync", uses_device, [&](State& s, Lock& lock) {
    if (width > target_pitch || width > source_pitch) return hipErrorInvalidPitchValue;
    if (height && (target_pitch > (1ull << 40) / height || source_pitch > (1ull << 40) / height)) return hipErrorInvalidValue;
    CopyShape shape = flat(target, source, width);
    shape.height = height;
    shape.target_pitch = target_pitch;
    shape.source_pitch = source_pitch;
    return copy(s, lock, find_stream(s, stream), shape, kind, false);
  });
}

GLM53_EXPORT hipError_t hipMemset(void* target, int value, size_t bytes) {
  return call("hipMemset", uses_device | not_captured, [&](State& s, Lock& lock) {
    return fill(s, lock, current_device(s).null_stream, target, value, bytes, true);
  });
}

GLM53_EXPORT hipError_t hipMemsetAsync(void* target, int value, size_t bytes, hipStream_t stream) {
  return call("hipMemsetAsync", uses_device, [&](State& s, Lock& lock) {
    return fill(s, lock, find_stream(s, stream), target, value, bytes, false);
  });
}
