// fibers.h - one workgroup on one host thread: each work-item is a fiber, barriers and shuffles are the places where fibers switch.
//
// A fiber is created once per thread and serves one work-item of every block that the thread runs; a switch is a handful of instructions
// in line (x86-64) or goes through ucontext elsewhere. Lanes of a wave switch straight to the next lane; only the end of a wave returns
// to the scheduler, which checks that all lanes of the wave wait for the same thing. Divergence, forbidden addresses and waits given up end
// the block with a message. Kernels have no destructors, so an ended block's stacks are simply set up again.
//
// Below each stack is a page that it must not reach. Where that cannot be touched the process has two mappings a stack, of the 65,530 that Linux gives
// it, and a pair's waiting blocks keep dozens of threads of 1,024 stacks. So only the first wave and the first lane of the others have such a page: the
// lanes of a wave run the same code. The other pages must still be zeros in their highest bytes when the blocks of a call have ended.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sys/mman.h>
#if !defined(__x86_64__) || defined(GLM53_UCONTEXT)  // the define lets x86-64 test the other way
#define GLM53_FIBER_UCONTEXT 1
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#define GLM53_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define GLM53_ASAN 1
#endif
#endif
#if defined(GLM53_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#include "host_abi.h"

#define WAVE 32

// Unnamed: a process may load several host code objects, and statics of inline functions would be one for all of them.
namespace {
namespace host {

enum : uint32_t { MAX_BLOCK = 1024, MAX_SHARED = 512, PAGE_BYTES = 4096, TOUCH_CACHE = 256, SUMS_MAX = 16 };
#if defined(GLM53_ASAN)
enum : size_t { STACK_BYTES = 256 << 10 };  // redzones make frames several times larger
#else
enum : size_t { STACK_BYTES = 64 << 10 };
#endif
// The stride of 17 pages and the colour below put the hot ends of 256 stacks into different cache sets; equal offsets would evict each other.
enum : size_t { STACK_STRIDE = STACK_BYTES + PAGE_BYTES, SHARED_BYTES = 16 << 20, SHARED_GAP = 64, CANARY_BYTES = 64 };

enum State : uint8_t { READY, AT_SHUFFLE, AT_BARRIER, RETURNED, FAILED };

struct Context {
#if !defined(GLM53_FIBER_UCONTEXT)
  void *sp, *resume, *rbp, *rbx;  // offsets 0, 8, 16, 24: see switch_context
#else
  ucontext_t u;
#endif
  const void* stack_bottom;
  size_t stack_bytes;
};

struct Workgroup;
// Initial-exec: 8 bytes of static TLS, so that thread_id() is two loads. Everything large lives behind the pointer.
static thread_local Workgroup* group __attribute__((tls_model("initial-exec"))) = nullptr;

// Where one SHARED declaration lives in the arena of each thread.
struct SharedSlot {
  uint32_t id;
  uint32_t offset;
};

inline SharedSlot reserve_shared(size_t bytes) {
  static uint32_t next_id = 0;
  static size_t next_offset = SHARED_GAP;
  static int lock = 0;
  while (__atomic_exchange_n(&lock, 1, __ATOMIC_ACQUIRE)) {
  }
  SharedSlot slot = {next_id++, (uint32_t)next_offset};
  next_offset += ((bytes + 63) & ~(size_t)63) + SHARED_GAP;
  bool fits = next_id <= MAX_SHARED && next_offset <= SHARED_BYTES;
  __atomic_store_n(&lock, 0, __ATOMIC_RELEASE);
  if (!fits) {
    fprintf(stderr, "glm53: more than %u SHARED arrays or %zu bytes of them: raise the limits in fibers.h\n", (unsigned)MAX_SHARED, (size_t)SHARED_BYTES);
    abort();
  }
  return slot;
}

struct Workgroup {
  // Read by every work-item.
  uint32_t current = 0;  // work-item that runs
  uint32_t bx = 0, by = 0, bz = 0;
  uint32_t size = 0;
  char* shared = nullptr;
  uint64_t serial = 0;  // number of the block, so that each SHARED array is poisoned once a block
  void (*entry)(const void*) = nullptr;
  const void* args = nullptr;
  const glm53_host_hooks* hooks = nullptr;
  char* message = nullptr;
  size_t message_bytes = 0;
  bool running = false;
  char* stacks = nullptr;
  uint32_t ready_fibers = 0;  // fibers [0, ready_fibers) stand at the top of their loop, or inside the running block
  Context scheduler = {};
  Context* left = nullptr;  // ASan builds: what the last switch came from
  Context fiber[MAX_BLOCK] = {};
  uint8_t state[MAX_BLOCK] = {};
  uint8_t parity[MAX_BLOCK] = {};
  uint64_t slots[MAX_BLOCK / WAVE][2][WAVE] = {};  // a shuffle's values; two sets in turn make one rendezvous a shuffle enough
  float sums[MAX_BLOCK / WAVE][2][WAVE][SUMS_MAX] = {};  // likewise, of lanes_sum
  uint64_t shared_serial[MAX_SHARED] = {};
  struct {
    uint64_t address, bytes, call;
  } touched[TOUCH_CACHE] = {};  // ranges allowed during this run_blocks call
  uint64_t call = 0;

  bool open() {
    void* stack_map = mmap(nullptr, MAX_BLOCK * STACK_STRIDE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    void* shared_map = mmap(nullptr, SHARED_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    stacks = stack_map == MAP_FAILED ? nullptr : (char*)stack_map;
    shared = shared_map == MAP_FAILED ? nullptr : (char*)shared_map;
#if defined(GLM53_ASAN)
    if (shared) __asan_poison_memory_region(shared, SHARED_BYTES);
#endif
    return stacks && shared;
  }
  ~Workgroup() {
#if defined(GLM53_ASAN)
    if (shared) __asan_unpoison_memory_region(shared, SHARED_BYTES);
    if (stacks) __asan_unpoison_memory_region(stacks, MAX_BLOCK * STACK_STRIDE);
#endif
    if (stacks) munmap(stacks, MAX_BLOCK * STACK_STRIDE);
    if (shared) munmap(shared, SHARED_BYTES);
  }
};

// What ASan must know after each switch; it answers with the bounds of the stack that was left (the scheduler's are learnt that way).
inline void arrived(void* fake_stack) {
#if defined(GLM53_ASAN)
  Context* left = group->left;
  __sanitizer_finish_switch_fiber(fake_stack, &left->stack_bottom, &left->stack_bytes);
#else
  (void)fake_stack;
#endif
}

inline __attribute__((always_inline)) void switch_context(Context& from, Context& to) {
  void* fake_stack = nullptr;
#if defined(GLM53_ASAN)
  group->left = &from;
  __sanitizer_start_switch_fiber(&fake_stack, to.stack_bottom, to.stack_bytes);
#endif
#if !defined(GLM53_FIBER_UCONTEXT)
  // In line, with neither call nor return: those would desynchronise the processor's return predictor at every switch. The compiler saves the
  // registers it needs (all but rsp, rbp and rbx are clobbered); nothing is pushed, so a red zone stays intact.
  Context *save = &from, *load = &to;
  asm volatile(
      "leaq 1f(%%rip), %%rax\n\t"
      "movq %%rsp, 0(%0)\n\t"
      "movq %%rax, 8(%0)\n\t"
      "movq %%rbp, 16(%0)\n\t"
      "movq %%rbx, 24(%0)\n\t"
      "movq 0(%1), %%rsp\n\t"
      "movq 16(%1), %%rbp\n\t"
      "movq 24(%1), %%rbx\n\t"
      "jmpq *8(%1)\n"
      "1:"
      : "+D"(save), "+S"(load)
      :
      : "rax", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",
        "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "cc", "memory");
#else
  swapcontext(&from.u, &to.u);
#endif
  arrived(fake_stack);
}

// Ends this work-item's turn: the next lane of the wave runs if it can, else the scheduler.
inline __attribute__((always_inline)) void leave(State state) {
  Workgroup* g = group;
  uint32_t me = g->current, next = me + 1;
  g->state[me] = state;
  if (state != FAILED && next % WAVE != 0 && next < g->size && g->state[next] == READY) {
    g->current = next;
    switch_context(g->fiber[me], g->fiber[next]);
  } else {
    switch_context(g->fiber[me], g->scheduler);
  }
}

[[noreturn]] __attribute__((cold, noinline, format(printf, 1, 2))) inline void fail(const char* format, ...) {
  Workgroup* g = group;
  char text[256];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  if (g->message && g->message_bytes) {
    snprintf(g->message, g->message_bytes, "%s; block (%u, %u, %u), work-item %u", text, g->bx, g->by, g->bz, g->current);
  }
  leave(FAILED);
  abort();  // a failed block's fibers are never resumed
}

inline void fiber_loop() {
  arrived(nullptr);
  for (;;) {
    group->entry(group->args);
    leave(RETURNED);
  }
}

inline bool is_guarded(uint32_t i) { return i < WAVE || i % WAVE == 0; }

// What an overflow of an unguarded stack writes first. Pages that are only read take no memory.
inline char* canary(Workgroup* g, uint32_t i) { return g->stacks + i * STACK_STRIDE + PAGE_BYTES - CANARY_BYTES; }

inline bool is_spoiled(Workgroup* g, uint32_t i) {
  static const char zeros[CANARY_BYTES] = {};
  return memcmp(canary(g, i), zeros, CANARY_BYTES) != 0;
}

inline bool prepare_fiber(Workgroup* g, uint32_t i) {
  char* bottom = g->stacks + i * STACK_STRIDE + PAGE_BYTES;
  size_t below = is_guarded(i) ? 0 : (size_t)PAGE_BYTES;
  if (mprotect(bottom - below, STACK_BYTES + below, PROT_READ | PROT_WRITE) != 0) return false;
#if defined(GLM53_ASAN)
  if (below) __asan_poison_memory_region(bottom - below, below);
#else
  if (below && is_spoiled(g, i)) memset(canary(g, i), 0, CANARY_BYTES);
#endif
  Context& c = g->fiber[i];
  c.stack_bottom = bottom;
  c.stack_bytes = STACK_BYTES;
#if defined(GLM53_ASAN)
  __asan_unpoison_memory_region(bottom, STACK_BYTES);
#endif
#if !defined(GLM53_FIBER_UCONTEXT)
  void** sp = (void**)(bottom + STACK_BYTES - 64 - ((i + i / 16) % 16) * 256);
  *--sp = nullptr;  // where a return address would be: fiber_loop sees the stack as after a call, and unwinders stop here
  c.sp = sp;
  c.resume = (void*)fiber_loop;
  c.rbp = c.rbx = nullptr;
#else
  getcontext(&c.u);
  c.u.uc_stack.ss_sp = bottom;
  c.u.uc_stack.ss_size = STACK_BYTES;
  c.u.uc_link = nullptr;
  makecontext(&c.u, fiber_loop, 0);
#endif
  return true;
}

// The first work-item whose unguarded stack was too small, or the block size.
inline uint32_t overflowed(Workgroup* g) {
#if !defined(GLM53_ASAN)
  for (uint32_t i = 0; i < g->size; i++) {
    if (!is_guarded(i) && is_spoiled(g, i)) return i;
  }
#endif
  return g->size;
}

inline bool all_in(const uint8_t* state, uint32_t count) { return memcmp(state, state + 1, count - 1) == 0; }

inline int report(Workgroup* g, uint32_t first, uint32_t count, const char* what) {
  uint32_t seen[5] = {0, 0, 0, 0, 0};
  for (uint32_t i = 0; i < count; i++) seen[g->state[first + i]]++;
  if (g->message && g->message_bytes) {
    snprintf(g->message, g->message_bytes, "%s: block (%u, %u, %u), work-items %u to %u: %u at a shuffle, %u at a barrier, %u returned", what, g->bx, g->by,
             g->bz, first, first + count - 1, seen[AT_SHUFFLE], seen[AT_BARRIER], seen[RETURNED]);
  }
  return 1;
}

// Runs one wave until it has returned or stands at the block barrier. 0, or 1 with a message.
inline int run_wave(Workgroup* g, uint32_t first, uint32_t count) {
  for (;;) {
    for (uint32_t i = first; i < first + count; i++) {
      if (g->state[i] != READY) continue;
      g->current = i;
      switch_context(g->scheduler, g->fiber[i]);
      if (g->state[g->current] == FAILED) return 1;
    }
    if (!all_in(g->state + first, count)) return report(g, first, count, "divergent wave");
    if (g->state[first] != AT_SHUFFLE) return 0;
    memset(g->state + first, READY, count);
  }
}

inline int run_block(Workgroup* g) {
  g->serial++;
  memset(g->state, READY, g->size);
  for (;;) {
    for (uint32_t first = 0; first < g->size; first += WAVE) {
      if (run_wave(g, first, g->size - first < WAVE ? g->size - first : WAVE)) return 1;
    }
    if (!all_in(g->state, g->size)) return report(g, 0, g->size, "divergent barrier");
    if (g->state[0] == RETURNED) return 0;
    memset(g->state, READY, g->size);
  }
}

struct Owner {
  Workgroup* workgroup = nullptr;
  ~Owner() {
    delete workgroup;
    group = nullptr;
  }
};

inline Workgroup* thread_workgroup() {
  static thread_local Owner owner;
  if (!owner.workgroup) {
    Workgroup* fresh = new (std::nothrow) Workgroup();
    if (!fresh) return nullptr;
    if (!fresh->open()) {
      delete fresh;
      return nullptr;
    }
    owner.workgroup = fresh;
    group = fresh;
  }
  return owner.workgroup;
}

// glm53_host_module.run_blocks, see host_abi.h.
inline int run_blocks(const glm53_host_kernel* kernel, const void* args, glm53_dim3 grid, uint64_t first, uint64_t last, const glm53_host_hooks* hooks,
                      char* message, size_t message_bytes) {
  Workgroup* g = thread_workgroup();
  const char* refusal = nullptr;
  if (!g) refusal = "no memory for the fibers of this thread";
  else if (g->running) refusal = "run_blocks called from inside a running kernel";
  else if (kernel->block_size == 0 || kernel->block_size > MAX_BLOCK) refusal = "block size outside 1 to 1024";
  for (; !refusal && g->ready_fibers < kernel->block_size; g->ready_fibers++) {
    if (!prepare_fiber(g, g->ready_fibers)) refusal = "no memory for a fiber stack";
  }
  if (refusal) {
    if (message && message_bytes) snprintf(message, message_bytes, "%s", refusal);
    return 1;
  }
  g->entry = kernel->entry;
  g->args = args;
  g->hooks = hooks;
  g->message = message;
  g->message_bytes = message_bytes;
  g->size = kernel->block_size;
  g->call++;
  g->running = true;
  int failed = 0;
  for (uint64_t b = first; b < last && !failed; b++) {
    g->bx = (uint32_t)(b % grid.x);
    g->by = (uint32_t)(b / grid.x % grid.y);
    g->bz = (uint32_t)(b / grid.x / grid.y);
    failed = run_block(g);
  }
  if (uint32_t over = overflowed(g); over < g->size) {
    failed = 1;
    if (message && message_bytes) snprintf(message, message_bytes, "stack overflow: work-item %u needs more than %zu bytes", over, (size_t)STACK_BYTES);
  }
  if (failed) {
    g->ready_fibers = 0;  // the next call sets all stacks up again
    memset(g->parity, 0, sizeof g->parity);
  }
  g->running = false;
  return failed;
}

}  // namespace host
}  // namespace
