// api.h - what every exported call goes through: counting, fault injection, lost devices, capture rules, seeded progress, the last error.
#pragma once
#include <mutex>
#include <new>
#include <utility>

#include "graph.h"
#include "state.h"

#define GLM53_EXPORT extern "C" __attribute__((visibility("default")))

namespace glm53_cpu {

enum Trait : unsigned {
  plain = 0,
  uses_device = 1,    // fails with the current device's sticky error
  not_captured = 2,   // must not be called while capturing
};

// The calling thread's own.
struct Thread {
  int device = 0;
  hipError_t last_error = hipSuccess;
};
Thread& this_thread();

using Lock = std::unique_lock<std::mutex>;

// Counts the call and finds an injected failure.
hipError_t enter(State& s, const char* name);

inline hipError_t keep_error(hipError_t error) {
  if (error != hipSuccess) this_thread().last_error = error;
  return error;
}

inline Device& current_device(State& s) { return *s.devices[this_thread().device]; }

// Runs the body of an API call under the state's lock: body(State&, Lock&) -> hipError_t.
template <class Body>
hipError_t call(const char* name, unsigned traits, Body&& body) {
  State& s = state();
  Lock lock(s.mutex);
  try {
    s.start();
    hipError_t error = enter(s, name);
    if (error != hipSuccess) return keep_error(error);
    s.pump(lock);
    if (traits & uses_device) {
      if (this_thread().device >= static_cast<int>(s.devices.size())) return keep_error(hipErrorNoDevice);
      if (current_device(s).lost != hipSuccess) return keep_error(current_device(s).lost);
    }
    if (traits & not_captured) {
      error = forbid_while_capturing(s);
      if (error != hipSuccess) return keep_error(error);
    }
    return keep_error(body(s, lock));
  } catch (const std::bad_alloc&) {
    return keep_error(hipErrorOutOfMemory);
  }
}

template <class T>
std::shared_ptr<T> find(const std::unordered_map<uint64_t, std::shared_ptr<T>>& table, const void* handle) {
  auto found = table.find(reinterpret_cast<uint64_t>(handle));
  return found == table.end() ? nullptr : found->second;
}

// The stream of a handle (0 and hipStreamLegacy: the null stream of the current device); null if there is none.
std::shared_ptr<Stream> find_stream(State& s, hipStream_t handle);

// Waits for the operation and returns the sticky error of its device, if it was lost.
inline hipError_t finish(State& s, Lock& lock, const std::shared_ptr<Op>& op) {
  s.wait(lock, op);
  return op && op->error != hipSuccess ? op->error : hipSuccess;
}

}  // namespace glm53_cpu
