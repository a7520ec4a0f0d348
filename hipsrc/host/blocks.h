// blocks.h - what a fast kernel is given: blocks [first, last) of a grid, on one thread, and how it is registered beside its fiber kernel.
//
// A fast kernel leaves in memory the bits that the fiber kernel leaves: same order of additions, fma where the kernel has fma. It may take the
// blocks of its range in any order and together, since blocks never depend on one another. Addresses read from memory pass `touch` first.
#pragma once

namespace {
namespace host {

// Memory of one thread for packed operands, kept from launch to launch; 64-byte aligned. One use at a time.
struct Scratch {
  void* data = nullptr;
  size_t bytes = 0;
  ~Scratch() { free(data); }
};

struct Blocks {
  const glm53_host_kernel* kernel;
  const void* args;
  glm53_dim3 grid;
  uint64_t first, last;
  const glm53_host_hooks* hooks;
  char* message;
  size_t message_bytes;
  struct {
    uint64_t address, bytes;
  } touched[TOUCH_CACHE] = {};

  // May the device touch [address, address + bytes)? If not, the kernel returns false at once and the launch fails.
  __attribute__((always_inline)) bool touch(uint64_t address, uint64_t bytes) {
    auto& entry = touched[touch_index(address)];
    if (entry.address == address && entry.bytes >= bytes) return true;
    return ask(address, bytes);
  }
  __attribute__((cold, noinline)) bool ask(uint64_t address, uint64_t bytes) {
    if (hooks && hooks->may_touch && !hooks->may_touch(hooks->context, address, bytes)) {
      if (message && message_bytes) {
        snprintf(message, message_bytes, "the kernel was given address 0x%llx (%llu bytes) in device memory, which its device may not touch",
                 (unsigned long long)address, (unsigned long long)bytes);
      }
      return false;
    }
    touched[touch_index(address)] = {address, bytes};
    return true;
  }
  // Blocks [begin, end) as fibers, for what has no fast form.
  bool run_fibers(uint64_t begin, uint64_t end) { return run_blocks(kernel, args, grid, begin, end, hooks, message, message_bytes) == 0; }
  // Room for `count` floats, not initialised; null if there is no memory, and then the kernel returns false.
  float* scratch(size_t count) {
    static thread_local Scratch room;
    size_t wanted = (count * sizeof(float) + 63) & ~(size_t)63;
    if (wanted > room.bytes) {
      free(room.data);
      room.data = aligned_alloc(64, wanted);
      room.bytes = room.data ? wanted : 0;
      if (!room.data && message && message_bytes) snprintf(message, message_bytes, "no memory for %zu bytes of packed operands", wanted);
    }
    return (float*)room.data;
  }
  // The row that a reference names (row_format.h), or null after a failed touch.
  __attribute__((always_inline)) const uint8_t* row(uint64_t ref, const uint64_t* offsets, uint32_t row_bytes) {
    uint64_t address = ref_payload(ref) + space_offset(offsets, ref_space(ref));
    return touch(address, row_bytes) ? (const uint8_t*)address : nullptr;
  }
};

// A fast kernel: bool function(const args_type&, Blocks&); false, with a message, after a failed touch or without memory.
template <class A, bool (*F)(const A&, Blocks&)>
int run_fast(const glm53_host_kernel* kernel, const void* args, glm53_dim3 grid, uint64_t first, uint64_t last, const glm53_host_hooks* hooks,
             char* message, size_t message_bytes) {
  Blocks blocks = {kernel, args, grid, first, last, hooks, message, message_bytes};
  return F(*(const A*)args, blocks) ? 0 : 1;
}

inline bool add_fast(const char* name, glm53_host_run fast) {
  for (glm53_host_kernel& kernel : kernels()) {
    if (strcmp(kernel.name, name) == 0) kernel.fast = fast;
  }
  return true;
}

// Once for each name, after the kernel itself, whose registration it names.
#define FAST_KERNEL(name, args_type, ...) \
  static const bool name##_fast = name##_registered && host::add_fast(#name, host::run_fast<args_type, __VA_ARGS__>)

}  // namespace host
}  // namespace
