// portable_amd.h - clang -x hip -nogpuinc -nogpulib, gfx9 (wave64), gfx11 and gfx12 (wave32). No ROCm headers, no device libraries.
#pragma once
typedef unsigned char uint8_t;
typedef signed char int8_t;
typedef unsigned short uint16_t;
typedef short int16_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef unsigned long uint64_t;
typedef long int64_t;
typedef unsigned long size_t;

#define DEVICE static inline __attribute__((device, always_inline))
#define SHARED(type, name, count) __attribute__((shared)) type name[count]
// clang ignores launch_bounds for AMDGPU; this attribute is what sets .max_flat_workgroup_size.
#define KERNEL(name, args_type, threads)                                                             \
  extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(threads, threads))) void name(const args_type a)
#define SPIN_KERNEL(name, args_type, threads) KERNEL(name, args_type, threads)
#define EARLY_KERNEL(name, args_type, threads, blocks) KERNEL(name, args_type, threads)
#define LDS_KERNEL(name, args_type, threads, blocks, bytes) EARLY_KERNEL(name, args_type, threads, blocks)
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("nounroll")

#if defined(__GFX9__)
#define WAVE 64
#else
#define WAVE 32
#endif

// Launches do not overlap here.
DEVICE void next_may_begin() {}
DEVICE void previous_done() {}

DEVICE uint32_t thread_id() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE uint32_t block_x() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE uint32_t block_y() { return __builtin_amdgcn_workgroup_id_y(); }
DEVICE uint32_t block_z() { return __builtin_amdgcn_workgroup_id_z(); }
DEVICE uint32_t lane_id() {
#if WAVE == 64
  return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));
#else
  return __builtin_amdgcn_mbcnt_lo(~0u, 0);
#endif
}
DEVICE void block_sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
DEVICE void wave_sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
DEVICE int32_t shuffle_from(int32_t v, uint32_t lane) { return __builtin_amdgcn_ds_bpermute((int)((lane & (WAVE - 1)) << 2), v); }
DEVICE uint32_t shuffle_from(uint32_t v, uint32_t lane) { return (uint32_t)shuffle_from((int32_t)v, lane); }
DEVICE float shuffle_from(float v, uint32_t lane) { return __builtin_bit_cast(float, shuffle_from(__builtin_bit_cast(int32_t, v), lane)); }
DEVICE uint64_t shuffle_from(uint64_t v, uint32_t lane) {
  return (uint64_t)shuffle_from((uint32_t)(v >> 32), lane) << 32 | shuffle_from((uint32_t)v, lane);
}
template <class T> DEVICE T shuffle_xor(T v, uint32_t mask) { return shuffle_from(v, lane_id() ^ mask); }
DEVICE uint64_t wave32_max(uint64_t v) {
  UNROLL
  for (uint32_t m = 16; m; m >>= 1) {
    uint64_t other = shuffle_xor(v, m);
    v = other > v ? other : v;
  }
  return v;
}

DEVICE uint32_t uniform(uint32_t v) { return __builtin_amdgcn_readfirstlane(v); }
DEVICE uint32_t bit_count(uint32_t v) { return (uint32_t)__builtin_popcount(v); }
DEVICE uint32_t opaque(uint32_t v) {
  asm volatile("" : "+s"(v));
  return v;
}
DEVICE uint32_t opaque_item(uint32_t v) {
  asm volatile("" : "+v"(v));
  return v;
}
template <class A> DEVICE const A& kernel_args(const A&) {
  return *(const A*)(const __attribute__((address_space(4))) A*)__builtin_amdgcn_kernarg_segment_ptr();
}
template <class T> DEVICE T* in_global(T* p) { return (T*)(__attribute__((address_space(1))) T*)(uint64_t)p; }
DEVICE uint32_t and_or(uint32_t v, uint32_t mask, uint32_t bits) { return (v & mask) | bits; }
DEVICE uint32_t with_byte(uint32_t word, uint32_t byte, uint32_t high) { return __builtin_amdgcn_perm(high, word, 0x07060500u + byte); }
template <uint32_t A, uint32_t B, uint32_t C, uint32_t D> DEVICE uint32_t pick_bytes(uint32_t low, uint32_t high) {
  return __builtin_amdgcn_perm(high, low, A | B << 8 | C << 16 | D << 24);
}
typedef uint32_t words4 __attribute__((ext_vector_type(4)));
DEVICE void load16(const void* from, uint32_t* to) {
  words4 v = *(const words4*)from;
  UNROLL
  for (int i = 0; i < 4; i++) to[i] = v[i];
}
DEVICE float f16_value(uint16_t bits) { return (float)__builtin_bit_cast(_Float16, bits); }
DEVICE float fma_f32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE float exp_f32(float x) { return __builtin_expf(x); }
DEVICE float log_f32(float x) { return __builtin_logf(x); }
DEVICE float sqrt_f32(float x) { return __builtin_sqrtf(x); }
DEVICE float floor_f32(float x) { return __builtin_floorf(x); }
DEVICE float rint_f32(float x) { return __builtin_rintf(x); }
DEVICE float max_f32(float a, float b) { return __builtin_fmaxf(a, b); }
DEVICE float min_f32(float a, float b) { return __builtin_fminf(a, b); }
DEVICE uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
DEVICE float float_of(uint32_t x) { return __builtin_bit_cast(float, x); }

DEVICE uint32_t global_add(uint32_t* p, uint32_t v) { return __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
DEVICE uint64_t global_add(uint64_t* p, uint64_t v) { return __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
DEVICE uint32_t global_max(uint32_t* p, uint32_t v) { return __hip_atomic_fetch_max(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
DEVICE uint32_t lds_add(uint32_t* p, uint32_t v) { return __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP); }
DEVICE uint64_t lds_add(uint64_t* p, uint64_t v) { return __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP); }

// System scope: what another device or the host sees while this kernel runs (memory must be uncached, fine-grained or coherent host memory).
DEVICE void store_system(uint64_t* p, uint64_t v) { __hip_atomic_store(p, v, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM); }
DEVICE void store_system(uint32_t* p, uint32_t v) { __hip_atomic_store(p, v, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM); }
DEVICE uint64_t load_system(const uint64_t* p) { return __hip_atomic_load(const_cast<uint64_t*>(p), __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM); }
DEVICE uint32_t load_system(const uint32_t* p) { return __hip_atomic_load(const_cast<uint32_t*>(p), __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM); }
DEVICE void store_word_system(uint64_t* p, uint64_t v) { __hip_atomic_store(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM); }
DEVICE uint64_t load_word_system(const uint64_t* p) { return __hip_atomic_load(const_cast<uint64_t*>(p), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM); }
DEVICE void fence_device() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }
DEVICE void fence_system() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, ""); }
DEVICE void give_way() { __builtin_amdgcn_s_sleep(1); }
constexpr uint32_t QUICK_POLLS = 512;

// Through the global address space, so that accesses are global and not flat ones.
template <class T> DEVICE T* pointer_from(uint64_t address, uint64_t bytes) {
  (void)bytes;
  return (T*)(__attribute__((address_space(1))) T*)address;
}

// Matrix tiles (portable_tiles.h). d += a * b with the fragments of WMMA in bf16: 16 values a work-item on gfx11, 8 on gfx12.
#if defined(__GFX11__)
#define TILE_WMMA 1
typedef uint32_t tile_words __attribute__((ext_vector_type(8)));
typedef short tile_values __attribute__((ext_vector_type(16)));
typedef int code_words __attribute__((ext_vector_type(4)));
#define TILE_INSTRUCTION __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32
#define TILE_CODES __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32
#elif defined(__GFX12__)
#define TILE_WMMA 2
typedef uint32_t tile_words __attribute__((ext_vector_type(4)));
typedef short tile_values __attribute__((ext_vector_type(8)));
typedef int code_words __attribute__((ext_vector_type(2)));
#define TILE_INSTRUCTION __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12
#define TILE_CODES __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32_gfx12
#endif
#if defined(TILE_WMMA)
DEVICE void wmma_16x16x16(float* d, tile_words a, tile_words b) {
  typedef float sums __attribute__((ext_vector_type(8)));
  sums v = {d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7]};
  v = TILE_INSTRUCTION(__builtin_bit_cast(tile_values, a), __builtin_bit_cast(tile_values, b), v);
  UNROLL
  for (int i = 0; i < 8; i++) d[i] = v[i];
}
// The same in signed bytes: 16 a work-item on gfx11, 8 on gfx12.
DEVICE void wmma_16x16x16(int32_t* d, code_words a, code_words b) {
  typedef int sums __attribute__((ext_vector_type(8)));
  sums v = {d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7]};
  v = TILE_CODES(true, a, true, b, v, false);
  UNROLL
  for (int i = 0; i < 8; i++) d[i] = v[i];
}
#else
DEVICE int32_t dot4(uint32_t a, uint32_t b, int32_t c) { return __builtin_amdgcn_sdot4((int)a, (int)b, c, false); }
#endif
