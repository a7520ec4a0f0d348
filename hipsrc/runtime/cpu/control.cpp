// control.cpp - the runtime's own interface: its marker, settings, fault injection and counters. Plain C, for ctypes.
#include <algorithm>
#include <cstring>

#include "api.h"

using namespace glm53_cpu;

namespace glm53_cpu {

static uint64_t queued(const State& s) {
  uint64_t sum = 0;
  for (const auto& device : s.devices) {
    for (const Queue& queue : device->queues) sum += queue.ops.size();
  }
  return sum;
}

}  // namespace glm53_cpu

// The marker by which a loaded libamdhip64.so is told from AMD's.
GLM53_EXPORT const char* glm53_runtime_name(void) { return "cpu"; }

// Why the last call, launch or device failed, in words; valid until the calling thread asks again. Empty: nothing failed yet.
GLM53_EXPORT const char* glm53_runtime_message(void) {
  static thread_local std::string copy;
  State& s = state();
  Lock lock(s.mutex);
  copy = s.message;
  return copy.c_str();
}

// Number of devices (0 to 16) and memory of each, before the first HIP call. Default: 2 devices of 4 GiB, committed as it is written.
GLM53_EXPORT hipError_t glm53_cpu_configure(uint32_t devices, uint64_t bytes_per_device) {
  State& s = state();
  Lock lock(s.mutex);
  if (s.started) return hipErrorIllegalState;
  if (devices > max_devices || bytes_per_device < page_bytes) return hipErrorInvalidValue;
  s.device_count = devices;
  s.bytes_per_device = bytes_per_device;
  return hipSuccess;
}

// Seeded scheduling on or off; waits for the step that is running. Queued work stays queued.
GLM53_EXPORT void glm53_cpu_seed(uint64_t seed, int on) {
  State& s = state();
  Lock lock(s.mutex);
  s.changed.wait(lock, [&] { return !s.executing; });
  s.seeded = on != 0;
  s.random = Random(seed);
  s.pace_left = 0;
  s.favoured_queue = 0;
  s.starve_left = 0;
  s.busy_queues.clear();
  s.trace.clear();
  s.work_arrived.notify_all();
}

// Kernels as fibers, work-item by work-item, even where a fast form exists: on or off (the default). A seeded schedule and a pending injected failure
// run fibers in any case. Waits for the step that is running.
GLM53_EXPORT void glm53_cpu_fibers(int on) {
  State& s = state();
  Lock lock(s.mutex);
  s.changed.wait(lock, [&] { return !s.executing; });
  s.fibers = on != 0;
}

// The nth call from now of the named API (1: the next one) fails with `error`; nth 0 clears.
GLM53_EXPORT void glm53_cpu_fail(const char* api, uint64_t nth, int error) {
  State& s = state();
  Lock lock(s.mutex);
  if (nth) s.failures[api] = {nth, static_cast<hipError_t>(error)};
  else s.failures.erase(api);
}

// How often the named API was called. The name is the one of HIP's headers, without R0600.
GLM53_EXPORT uint64_t glm53_cpu_calls(const char* api) {
  State& s = state();
  Lock lock(s.mutex);
  auto found = s.calls.find(api);
  return found == s.calls.end() ? 0 : found->second;
}

// Live objects of one kind; UINT64_MAX for an unknown kind.
GLM53_EXPORT uint64_t glm53_cpu_live(const char* kind) {
  State& s = state();
  Lock lock(s.mutex);
  std::string name = kind ? kind : "";
  uint64_t bytes = 0;
  if (name == "allocations") return s.memory.count(Kind::device);
  if (name == "allocated_bytes") return s.memory.count(Kind::device, &bytes), bytes;
  if (name == "host_allocations") return s.memory.count(Kind::host);
  if (name == "host_bytes") return s.memory.count(Kind::host, &bytes), bytes;
  if (name == "registrations") return s.memory.count(Kind::registered);
  if (name == "registered_bytes") return s.memory.count(Kind::registered, &bytes), bytes;
  if (name == "streams") return s.streams.size();
  if (name == "events") return s.events.size();
  if (name == "modules") return s.modules.size();
  if (name == "graphs") return s.graphs.size();
  if (name == "graph_execs") return s.graph_execs.size();
  if (name == "queued") return queued(s);
  return UINT64_MAX;
}

// Host threads that run the blocks of a kernel; 0: one per processor.
GLM53_EXPORT void glm53_cpu_set_threads(uint32_t threads) {
  State& s = state();
  Lock lock(s.mutex);
  s.pool.set_threads(threads);
}

// Copies at most `bytes` - 1 characters of the seeded trace ("device.queue operation label" a line, one line a step) and a final zero;
// returns its whole length.
GLM53_EXPORT uint64_t glm53_cpu_trace(char* out, uint64_t bytes) {
  State& s = state();
  Lock lock(s.mutex);
  if (out && bytes) {
    uint64_t count = std::min<uint64_t>(bytes - 1, s.trace.size());
    memcpy(out, s.trace.data(), count);
    out[count] = 0;
  }
  return s.trace.size();
}

// Frees everything and forgets every setting, as if the library had just been loaded. No other thread may be in a call; addresses and
// handles from before are gone.
GLM53_EXPORT void glm53_cpu_reset(void) {
  replace_state();
  this_thread() = Thread();
}
