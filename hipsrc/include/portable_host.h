// portable_host.h - g++ or clang++ on the host, -DGLM53_HOST: the vocabulary of portable.h over the fibers of fibers.h.
// Build with -ffp-contract=fast and, on x86-64, -march=x86-64-v3 (AVX2 and FMA); never with -ffast-math, whose sums have no fixed order.
#pragma once
#include "fibers.h"
#include <vector>

#define DEVICE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("nounroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#define ROLLED _Pragma("GCC unroll 1")
#endif
// Workgroup memory: one array per declaration and thread, filled with 0xff (NaN) at the first use in each block.
#define SHARED(type, name, count)                                                                   \
  static_assert(sizeof(type[count]) <= 65536, #name ": more LDS than a gfx11 workgroup can have");  \
  static const host::SharedSlot name##_slot = host::reserve_shared(sizeof(type[count]));            \
  type(&name)[count] = *(type(*)[count])host::open_shared(name##_slot, sizeof(type[count]))
#define KERNEL(name, args_type, threads) GLM53_HOST_KERNEL(name, args_type, threads, 0u)
#define SPIN_KERNEL(name, args_type, threads) GLM53_HOST_KERNEL(name, args_type, threads, GLM53_KERNEL_SPINS)
#define EARLY_KERNEL(name, args_type, threads, blocks) GLM53_HOST_KERNEL(name, args_type, threads, host::early_flags<args_type>())
#define LDS_KERNEL(name, args_type, threads, blocks, bytes) EARLY_KERNEL(name, args_type, threads, blocks)
#define GLM53_HOST_KERNEL(name, args_type, threads, flags)                                                                 \
  static void name(const args_type a);                                                                                     \
  static const bool name##_registered =                                                                                    \
      host::add_kernel({#name, [](const void* args) { name(*(const args_type*)args); }, (uint32_t)sizeof(args_type), threads, flags, \
                        args_type##_pointer_count, args_type##_pointers, nullptr});                                                 \
  static inline void name(const args_type a)

namespace {
namespace host {

// Flags of an early kernel: the first blocks of one whose arguments have a field `waiting_blocks` may wait.
template <class A, class = void> struct Waiting {
  static constexpr uint32_t flags = 0;
};
template <class A> struct Waiting<A, decltype((void)A::waiting_blocks)> {
  static_assert(sizeof(A::waiting_blocks) == 4 && sizeof(A) < 65536, "flags hold the offset in 16 bits");
  static constexpr uint32_t flags = GLM53_KERNEL_SPINS_FIRST | (uint32_t)__builtin_offsetof(A, waiting_blocks) << 16;
};
template <class A> constexpr uint32_t early_flags() { return Waiting<A>::flags; }

// A function-local static: registrations of any translation unit may run first.
inline std::vector<glm53_host_kernel>& kernels() {
  static std::vector<glm53_host_kernel> all;
  return all;
}

inline bool add_kernel(const glm53_host_kernel& kernel) {
  kernels().push_back(kernel);
  return true;
}

inline __attribute__((always_inline)) void* open_shared(SharedSlot slot, size_t bytes) {
  Workgroup* g = group;
  char* data = g->shared + slot.offset;
  if (g->shared_serial[slot.id] != g->serial) {
    g->shared_serial[slot.id] = g->serial;
#if defined(GLM53_ASAN)
    __asan_unpoison_memory_region(data, bytes);
#endif
    memset(data, 0xff, bytes);
  }
  return __builtin_assume_aligned(data, 64);
}

inline __attribute__((always_inline)) uint32_t touch_index(uint64_t address) { return (uint32_t)((address >> 6) ^ (address >> 14)) % TOUCH_CACHE; }

__attribute__((cold, noinline)) inline void check_touch(uint64_t address, uint64_t bytes) {
  Workgroup* g = group;
  if (g->hooks && g->hooks->may_touch && !g->hooks->may_touch(g->hooks->context, address, bytes)) {
    fail("the kernel was given address 0x%llx (%llu bytes) in device memory, which its device may not touch", (unsigned long long)address,
         (unsigned long long)bytes);
  }
  auto& entry = g->touched[touch_index(address)];
  entry.address = address;
  entry.bytes = bytes;
  entry.call = g->call;
}

template <class T> inline __attribute__((always_inline)) T exchange(T value, uint32_t lane) {
  static_assert(sizeof(T) <= 8, "shuffle: at most 8 bytes");
  Workgroup* g = group;
  uint32_t me = g->current;
  uint64_t* slots = g->slots[me / WAVE][g->parity[me]];
  g->parity[me] ^= 1;
  memcpy(&slots[me % WAVE], &value, sizeof value);
  leave(AT_SHUFFLE);
  memcpy(&value, &slots[lane % WAVE], sizeof value);
  return value;
}

// lanes_sum with one meeting point: every lane leaves its N values, then adds all of its group's in the butterfly's order.
template <uint32_t LANES, int N> inline __attribute__((always_inline)) void sum_lanes(float (&v)[N]) {
  static_assert(N <= (int)SUMS_MAX, "lanes_sum: more values than SUMS_MAX in fibers.h");
  Workgroup* g = group;
  uint32_t me = g->current, lane = me % WAVE;
  float(*sums)[SUMS_MAX] = g->sums[me / WAVE][g->parity[me]];
  g->parity[me] ^= 1;
  for (int i = 0; i < N; i++) sums[lane][i] = v[i];
  leave(AT_SHUFFLE);
  const float(*from)[SUMS_MAX] = sums + lane / LANES * LANES;
  float part[LANES / 2][N];
  for (uint32_t l = 0; l < LANES / 2; l++) {
    for (int i = 0; i < N; i++) part[l][i] = from[l][i] + from[l + LANES / 2][i];
  }
  for (uint32_t m = LANES / 4; m; m >>= 1) {
    for (uint32_t l = 0; l < m; l++) {
      for (int i = 0; i < N; i++) part[l][i] += part[l + m][i];
    }
  }
  for (int i = 0; i < N; i++) v[i] = part[0][i];
}

// The exchange of exchange(), after which every lane reads all values.
template <class T> inline __attribute__((always_inline)) T exchange_prefix(T value, T* total) {
  static_assert(sizeof(T) <= 8, "wave32_prefix: at most 8 bytes");
  Workgroup* g = group;
  uint32_t me = g->current;
  uint64_t* slots = g->slots[me / WAVE][g->parity[me]];
  g->parity[me] ^= 1;
  memcpy(&slots[me % WAVE], &value, sizeof value);
  leave(AT_SHUFFLE);
  T sum = 0, before = 0;
  for (uint32_t i = 0; i < WAVE; i++) {
    before = i == me % WAVE ? sum : before;
    T other;
    memcpy(&other, &slots[i], sizeof other);
    sum += other;
  }
  *total = sum;
  return before;
}

// The exchange of exchange(), after which every lane reads all values.
inline __attribute__((always_inline)) uint64_t exchange_max(uint64_t value) {
  Workgroup* g = group;
  uint32_t me = g->current;
  uint64_t* slots = g->slots[me / WAVE][g->parity[me]];
  g->parity[me] ^= 1;
  slots[me % WAVE] = value;
  leave(AT_SHUFFLE);
  for (uint32_t i = 0; i < WAVE; i++) value = slots[i] > value ? slots[i] : value;
  return value;
}

}  // namespace host
}  // namespace

// Launches do not overlap here.
DEVICE void next_may_begin() {}
DEVICE void previous_done() {}

DEVICE uint32_t thread_id() { return host::group->current; }
DEVICE uint32_t block_x() { return host::group->bx; }
DEVICE uint32_t block_y() { return host::group->by; }
DEVICE uint32_t block_z() { return host::group->bz; }
DEVICE uint32_t lane_id() { return host::group->current % WAVE; }
DEVICE void block_sync() { host::leave(host::AT_BARRIER); }
template <class T> DEVICE T shuffle_from(T v, uint32_t lane) { return host::exchange(v, lane); }
template <class T> DEVICE T shuffle_xor(T v, uint32_t mask) { return host::exchange(v, lane_id() ^ mask); }
DEVICE void wave_sync() { shuffle_xor(0u, 0u); }
DEVICE uint64_t wave32_max(uint64_t v) { return host::exchange_max(v); }
template <class T> DEVICE T wave32_prefix(T v, T* total) { return host::exchange_prefix(v, total); }

template <uint32_t LANES, int N> DEVICE void lanes_sum(float (&v)[N]) { host::sum_lanes<LANES>(v); }

DEVICE float fma_f32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE float exp_f32(float x) { return __builtin_expf(x); }
DEVICE float log_f32(float x) { return __builtin_logf(x); }
DEVICE float sqrt_f32(float x) { return __builtin_sqrtf(x); }
DEVICE float floor_f32(float x) { return __builtin_floorf(x); }
DEVICE float rint_f32(float x) { return __builtin_rintf(x); }
// As fmaxf and fminf: the other operand if one is NaN. Written out because g++ calls libm for them without -ffast-math.
DEVICE float max_f32(float a, float b) { return (a > b || b != b) ? a : b; }
DEVICE float min_f32(float a, float b) { return (a < b || b != b) ? a : b; }
DEVICE uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
DEVICE float float_of(uint32_t x) { return __builtin_bit_cast(float, x); }

DEVICE uint32_t global_add(uint32_t* p, uint32_t v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
DEVICE uint64_t global_add(uint64_t* p, uint64_t v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
DEVICE uint32_t global_max(uint32_t* p, uint32_t v) {
  uint32_t old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (old < v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}
// One thread runs the whole workgroup, so its own memory needs no locked instruction.
DEVICE uint32_t lds_add(uint32_t* p, uint32_t v) {
  uint32_t old = *p;
  *p = old + v;
  return old;
}
DEVICE uint64_t lds_add(uint64_t* p, uint64_t v) {
  uint64_t old = *p;
  *p = old + v;
  return old;
}

DEVICE void store_system(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
DEVICE void store_system(uint32_t* p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
DEVICE uint64_t load_system(const uint64_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
DEVICE uint32_t load_system(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
DEVICE void store_word_system(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
DEVICE uint64_t load_word_system(const uint64_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
DEVICE void fence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
DEVICE uint32_t and_or(uint32_t v, uint32_t mask, uint32_t bits) { return (v & mask) | bits; }
template <uint32_t A, uint32_t B, uint32_t C, uint32_t D> DEVICE uint32_t pick_bytes(uint32_t low, uint32_t high) {
  uint64_t both = (uint64_t)high << 32 | low;
  return (uint32_t)(both >> (8 * A) & 0xffu) | (uint32_t)(both >> (8 * B) & 0xffu) << 8 | (uint32_t)(both >> (8 * C) & 0xffu) << 16 |
         (uint32_t)(both >> (8 * D) & 0xffu) << 24;
}
DEVICE int32_t dot4(uint32_t a, uint32_t b, int32_t c) {
  for (uint32_t i = 0; i < 32; i += 8) c += (int32_t)(int8_t)(a >> i) * (int32_t)(int8_t)(b >> i);
  return c;
}
DEVICE uint32_t with_byte(uint32_t word, uint32_t byte, uint32_t high) { return ((word >> (8 * byte)) & 0xffu) | (high & 0xffffff00u); }
DEVICE void load16(const void* from, uint32_t* to) { memcpy(to, from, 16); }
DEVICE uint32_t uniform(uint32_t v) { return v; }
DEVICE uint32_t bit_count(uint32_t v) { return (uint32_t)__builtin_popcount(v); }
DEVICE uint32_t opaque(uint32_t v) { return v; }
DEVICE uint32_t opaque_item(uint32_t v) { return v; }
template <class A> DEVICE const A& kernel_args(const A& a) { return a; }
template <class T> DEVICE T* in_global(T* p) { return p; }
// Blocks of a launch may run on several threads of the host.
DEVICE void fence_device() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
constexpr uint32_t QUICK_POLLS = 0;  // nothing else runs before it gives way
DEVICE void give_way() {
  const glm53_host_hooks* hooks = host::group->hooks;
  if (hooks && hooks->give_way && hooks->give_way(hooks->context)) host::fail("gave up waiting: the runtime ended the wait of a spinning kernel");
}

template <class T> DEVICE T* pointer_from(uint64_t address, uint64_t bytes) {
  const host::Workgroup* g = host::group;
  const auto& entry = g->touched[host::touch_index(address)];
  if (entry.call != g->call || entry.address != address || entry.bytes < bytes) host::check_touch(address, bytes);
  return (T*)address;
}

extern "C" __attribute__((visibility("default"))) const glm53_host_module* glm53_host_module_get(void) {
  static const glm53_host_module module = {GLM53_HOST_ABI, (uint32_t)host::kernels().size(), host::kernels().data(), host::run_blocks};
  return &module;
}
