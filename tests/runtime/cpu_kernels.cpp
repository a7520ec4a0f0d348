// cpu_kernels.cpp - a host code object for the tests of the cpu runtime: plain loops behind host_abi.h, no fibers, no barriers.
#include <atomic>
#include <cstdio>
#include <cstring>

#include "../../hipsrc/include/host_abi.h"

#ifndef TEST_ABI
#define TEST_ABI GLM53_HOST_ABI
#endif

namespace {

struct Running {
  const glm53_host_hooks* hooks;
  uint64_t block;
  uint32_t item;
  bool failed;
  char* message;
  size_t message_bytes;
};
thread_local Running running;

void fail(const char* text) {
  if (!running.failed) snprintf(running.message, running.message_bytes, "%s", text);
  running.failed = true;
}
uint64_t index() { return running.block * 32 + running.item; }

struct words_args { uint32_t* x; uint32_t* y; uint64_t count; };
const uint16_t words_pointers[] = {0, 8};

// y[i] = x[i] + 1
void add_one(const void* p) {
  auto a = static_cast<const words_args*>(p);
  if (index() < a->count) a->y[index()] = a->x[index()] + 1;
}
// y[0] takes x[0], then x[0] is stepped: order and number of launches show.
void step_state(const void* p) {
  auto a = static_cast<const words_args*>(p);
  a->y[0] = a->y[0] * 1664525u + a->x[0];
}
// y[count] is one past the buffer, on purpose.
void overrun(const void* p) {
  auto a = static_cast<const words_args*>(p);
  a->y[a->count] = 7;
}
// Each block takes the next ticket: x[block] = order in which it ran.
void ticket(const void* p) {
  auto a = static_cast<const words_args*>(p);
  if (running.item == 0) a->y[running.block] = __atomic_fetch_add(a->x, 1u, __ATOMIC_RELAXED);
}
// x holds an address read from memory: writes 9 there.
void chase(const void* p) {
  auto a = static_cast<const words_args*>(p);
  uint64_t address;
  memcpy(&address, a->x, sizeof address);
  if (!running.hooks->may_touch(running.hooks->context, address, a->count)) return fail("forbidden address");
  *reinterpret_cast<uint32_t*>(address) = 9;
}
void broken(const void*) { fail("broken on purpose"); }

struct spin_args { uint64_t* mine; uint64_t* theirs; uint64_t* result; uint64_t rounds; uint64_t first; };
const uint16_t spin_pointers[] = {0, 8, 16};

bool await(const uint64_t* flag, uint64_t wanted) {
  while (__atomic_load_n(flag, __ATOMIC_ACQUIRE) < wanted) {
    if (running.hooks->give_way(running.hooks->context)) {
      fail("gave up waiting");
      return false;
    }
  }
  return true;
}
// Ping-pong: `first` 1 sends before it waits. result[block] = rounds done. One mailbox word a block.
void exchange(const void* p) {
  auto a = static_cast<const spin_args*>(p);
  uint64_t b = running.block;
  for (uint64_t r = 1; r <= a->rounds; r++) {
    if (a->first) __atomic_store_n(a->theirs + b, r, __ATOMIC_RELEASE);
    if (!await(a->mine + b, r)) return;
    if (!a->first) __atomic_store_n(a->theirs + b, r, __ATOMIC_RELEASE);
    a->result[b] = r;
  }
}
// theirs[0] = 5 (plain data), then waits for mine[0], then result[0] = theirs[1] as this kernel sees it.
void publish_then_wait(const void* p) {
  auto a = static_cast<const spin_args*>(p);
  a->theirs[0] = 5;
  if (!await(a->mine, 1)) return;
  a->result[0] = a->theirs[1];
}

// y[block] tells which form ran: 1 work-items, 2 fast.
void two_forms(const void* p) {
  auto a = static_cast<const words_args*>(p);
  a->y[running.block] = 1;
}
int two_forms_fast(const glm53_host_kernel*, const void* args, glm53_dim3, uint64_t first, uint64_t last, const glm53_host_hooks* hooks, char* message,
                   size_t message_bytes) {
  auto a = static_cast<const words_args*>(args);
  for (uint64_t block = first; block < last; block++) {
    if (block >= a->count && !hooks->may_touch(hooks->context, 16, 4)) {  // an address that no device has
      snprintf(message, message_bytes, "forbidden address");
      return 1;
    }
    a->y[block] = 2;
  }
  return 0;
}

const glm53_host_kernel kernels[] = {
    {"add_one", add_one, sizeof(words_args), 32, 0, 2, words_pointers, nullptr},
    {"step_state", step_state, sizeof(words_args), 1, 0, 2, words_pointers, nullptr},
    {"overrun", overrun, sizeof(words_args), 1, 0, 2, words_pointers, nullptr},
    {"ticket", ticket, sizeof(words_args), 32, 0, 2, words_pointers, nullptr},
    {"chase", chase, sizeof(words_args), 1, 0, 2, words_pointers, nullptr},
    {"broken", broken, sizeof(words_args), 1, 0, 2, words_pointers, nullptr},
    {"exchange", exchange, sizeof(spin_args), 1, GLM53_KERNEL_SPINS, 3, spin_pointers, nullptr},
    {"publish_then_wait", publish_then_wait, sizeof(spin_args), 1, GLM53_KERNEL_SPINS, 3, spin_pointers, nullptr},
    {"waits_unflagged", exchange, sizeof(spin_args), 1, 0, 3, spin_pointers, nullptr},
    {"huge_args", broken, 4104, 1, 0, 0, words_pointers, nullptr},
    {"two_forms", two_forms, sizeof(words_args), 1, 0, 2, words_pointers, two_forms_fast},
};

int run_blocks(const glm53_host_kernel* kernel, const void* args, glm53_dim3, uint64_t first, uint64_t last, const glm53_host_hooks* hooks,
               char* message, size_t message_bytes) {
  for (uint64_t block = first; block < last; block++) {
    for (uint32_t item = 0; item < kernel->block_size; item++) {
      running = {hooks, block, item, false, message, message_bytes};
      kernel->entry(args);
      if (running.failed) return 1;
    }
  }
  return 0;
}

const glm53_host_module module = {TEST_ABI, sizeof kernels / sizeof kernels[0], kernels, run_blocks};

}  // namespace

extern "C" const glm53_host_module* glm53_host_module_get(void) { return &module; }
