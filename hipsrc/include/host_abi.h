// host_abi.h - what the cpu runtime (libamdhip64.so of hipsrc/runtime/cpu) and a host code object (kernels.so) say to each other.
// A host code object exports the two symbols at the end. Plain C, no ownership crosses the border, nothing throws.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define GLM53_HOST_ABI 2u

typedef struct glm53_dim3 {
  uint32_t x, y, z;
} glm53_dim3;

// Flags of a kernel.
#define GLM53_KERNEL_SPINS 1u  // may wait for a store of another device or of the host
#define GLM53_KERNEL_SPINS_FIRST 2u  // its first blocks may: as many as the u32 at byte flags >> 16 of the arguments says; the others do not wait

// Services of the runtime for kernels that are running. All may be called on any work-item.
typedef struct glm53_host_hooks {
  void* context;
  // A waiting kernel gives way, so that other queues and the host can run. Returns 0 to go on waiting, 1 to give up (device lost).
  int (*give_way)(void* context);
  // Is [address, address + bytes) memory that this kernel's device may touch? Called for addresses that a kernel read from memory
  // (extent tables, plans); pointers inside the argument struct were checked before the launch. 1 yes, 0 no (the launch then fails).
  int (*may_touch)(void* context, uint64_t address, uint64_t bytes);
} glm53_host_hooks;

typedef struct glm53_host_kernel glm53_host_kernel;

// Runs blocks [first, last) of the grid, linear index x fastest, on the calling thread. Several threads may do so at once for one launch.
// Returns 0, or 1 with a message (divergent barrier, forbidden address, given up waiting).
typedef int (*glm53_host_run)(const glm53_host_kernel* kernel, const void* args, glm53_dim3 grid, uint64_t first, uint64_t last,
                              const glm53_host_hooks* hooks, char* message, size_t message_bytes);

struct glm53_host_kernel {
  const char* name;
  void (*entry)(const void* args);   // runs one work-item; only run_blocks calls it
  uint32_t args_bytes;               // size of the one by-value argument struct
  uint32_t block_size;               // the block size the kernel was written for, x only
  uint32_t flags;                    // GLM53_KERNEL_*
  uint32_t pointer_count;            // pointer fields of the argument struct (null allowed) ...
  const uint16_t* pointer_offsets;   // ... and their byte offsets
  glm53_host_run fast;               // as run_blocks, but vectorised, without fibers; the same bits in memory. Null: there is none
};

typedef struct glm53_host_module {
  uint32_t abi;                      // GLM53_HOST_ABI
  uint32_t kernel_count;
  const glm53_host_kernel* kernels;
  glm53_host_run run_blocks;         // work-item by work-item
} glm53_host_module;

// The one symbol a host code object exports.
#ifdef __cplusplus
extern "C" {
#endif
const glm53_host_module* glm53_host_module_get(void);
#ifdef __cplusplus
}
#endif
