// portable_cuda.h - nvcc, sm_90. NVIDIA's spelling of the vocabulary in portable.h.
#pragma once
#include <cstdint>
#include <cuda/atomic>

#define DEVICE static __device__ __forceinline__
#define SHARED(type, name, count) __shared__ type name[count]
// Tells the cuda runtime that every kernel here waits for the launch before it by itself, so that it may begin earlier.
extern "C" __device__ const int glm53_overlap = 1;
#define KERNEL(name, args_type, threads)                                                                        \
  DEVICE void name##_body(const args_type& a);                                                                  \
  extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ args_type a) {             \
    next_may_begin();                                                                                           \
    previous_done();                                                                                            \
    name##_body(a);                                                                                             \
  }                                                                                                             \
  DEVICE void name##_body(const args_type& a)
#define REHEARSES 1
#define SPIN_KERNEL(name, args_type, threads) KERNEL(name, args_type, threads)
#define EARLY_KERNEL(name, args_type, threads, blocks) \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ args_type a)
#define LDS_KERNEL(name, args_type, threads, blocks, bytes) \
  extern "C" __device__ const int name##_lds = (int)(bytes); \
  EARLY_KERNEL(name, args_type, threads, blocks)
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#define WAVE 32

DEVICE void next_may_begin() { asm volatile("griddepcontrol.launch_dependents;"); }
DEVICE void previous_done() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

DEVICE uint32_t thread_id() { return threadIdx.x; }
DEVICE uint32_t block_x() { return blockIdx.x; }
DEVICE uint32_t block_y() { return blockIdx.y; }
DEVICE uint32_t block_z() { return blockIdx.z; }
DEVICE uint32_t lane_id() { return threadIdx.x & (WAVE - 1); }
DEVICE void block_sync() { __syncthreads(); }
DEVICE void wave_sync() { __syncwarp(); }
// Of the work-items that name the same barrier, 1 to 15; so many, whole waves.
DEVICE void some_sync(uint32_t barrier, uint32_t count) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(count) : "memory"); }
template <class T> DEVICE T shuffle_from(T v, uint32_t lane) { return __shfl_sync(~0u, v, (int)lane); }
template <class T> DEVICE T shuffle_xor(T v, uint32_t mask) { return __shfl_xor_sync(~0u, v, (int)mask); }
DEVICE uint64_t wave32_max(uint64_t v) {  // by halves, each in one instruction
  uint32_t high = __reduce_max_sync(~0u, (uint32_t)(v >> 32));
  return (uint64_t)high << 32 | __reduce_max_sync(~0u, (uint32_t)(v >> 32) == high ? (uint32_t)v : 0u);
}

// The exclusive prefix sum of portable_math.h for 32 bits: a step is one shuffle, which says itself whether there was a lane below, and one sum.
DEVICE uint32_t wave32_prefix(uint32_t v, uint32_t* total) {
  uint32_t sum = v;
  UNROLL
  for (uint32_t d = 1; d < 32; d <<= 1) {
    asm volatile("{ .reg .u32 below; .reg .pred there; shfl.sync.up.b32 below|there, %0, %1, 0, 0xffffffff; @there add.u32 %0, %0, below; }"
                 : "+r"(sum)
                 : "r"(d));
  }
  *total = shuffle_from(sum, 31);
  return sum - v;
}

DEVICE uint32_t bit_count(uint32_t v) { return (uint32_t)__popc(v); }
DEVICE uint32_t uniform(uint32_t v) { return v; }
DEVICE uint32_t opaque(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}
DEVICE uint32_t opaque_item(uint32_t v) { return opaque(v); }
template <class A> DEVICE const A& kernel_args(const A& a) { return a; }
template <class T> DEVICE T* in_global(T* p) {
  __builtin_assume(__isGlobal(p));
  return p;
}
DEVICE uint32_t and_or(uint32_t v, uint32_t mask, uint32_t bits) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(v), "r"(mask), "r"(bits));  // written out as two operations it stays two
  return r;
}
DEVICE uint32_t with_byte(uint32_t word, uint32_t byte, uint32_t high) { return __byte_perm(word, high, 0x7650u + byte); }
// Byte i of the result is byte a, b, c or d of the eight of low and high.
template <uint32_t A, uint32_t B, uint32_t C, uint32_t D> DEVICE uint32_t pick_bytes(uint32_t low, uint32_t high) {
  return __byte_perm(low, high, A | B << 4 | C << 8 | D << 12);
}
DEVICE void load16(const void* from, uint32_t* to) {
  uint4 v = *(const uint4*)from;
  to[0] = v.x;
  to[1] = v.y;
  to[2] = v.z;
  to[3] = v.w;
}
DEVICE float f16_value(uint16_t bits) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
  return v;
}
DEVICE float fma_f32(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float exp_f32(float x) { return expf(x); }
DEVICE float log_f32(float x) { return logf(x); }
DEVICE float sqrt_f32(float x) { return sqrtf(x); }
DEVICE float floor_f32(float x) { return floorf(x); }
DEVICE float rint_f32(float x) { return rintf(x); }
DEVICE float max_f32(float a, float b) { return fmaxf(a, b); }
DEVICE float min_f32(float a, float b) { return fminf(a, b); }
DEVICE uint32_t bits_of(float x) { return __float_as_uint(x); }
DEVICE float float_of(uint32_t x) { return __uint_as_float(x); }

DEVICE uint32_t global_add(uint32_t* p, uint32_t v) { return atomicAdd(p, v); }
DEVICE uint64_t global_add(uint64_t* p, uint64_t v) { return atomicAdd((unsigned long long*)p, (unsigned long long)v); }
DEVICE uint32_t global_max(uint32_t* p, uint32_t v) { return atomicMax(p, v); }
DEVICE uint32_t lds_add(uint32_t* p, uint32_t v) { return atomicAdd(p, v); }
DEVICE uint64_t lds_add(uint64_t* p, uint64_t v) { return atomicAdd((unsigned long long*)p, (unsigned long long)v); }

DEVICE void store_system(uint64_t* p, uint64_t v) { cuda::atomic_ref<uint64_t, cuda::thread_scope_system>(*p).store(v, cuda::memory_order_release); }
DEVICE void store_system(uint32_t* p, uint32_t v) { cuda::atomic_ref<uint32_t, cuda::thread_scope_system>(*p).store(v, cuda::memory_order_release); }
DEVICE uint64_t load_system(const uint64_t* p) {
  return cuda::atomic_ref<uint64_t, cuda::thread_scope_system>(*const_cast<uint64_t*>(p)).load(cuda::memory_order_acquire);
}
DEVICE uint32_t load_system(const uint32_t* p) {
  return cuda::atomic_ref<uint32_t, cuda::thread_scope_system>(*const_cast<uint32_t*>(p)).load(cuda::memory_order_acquire);
}
DEVICE void store_word_system(uint64_t* p, uint64_t v) { cuda::atomic_ref<uint64_t, cuda::thread_scope_system>(*p).store(v, cuda::memory_order_relaxed); }
DEVICE uint64_t load_word_system(const uint64_t* p) {
  return cuda::atomic_ref<uint64_t, cuda::thread_scope_system>(*const_cast<uint64_t*>(p)).load(cuda::memory_order_relaxed);
}
DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }  // __threadfence() is a stronger one, and slower
DEVICE void fence_system() { __threadfence_system(); }
DEVICE void give_way() { __nanosleep(100); }
constexpr uint32_t QUICK_POLLS = 512;

template <class T> DEVICE T* pointer_from(uint64_t address, uint64_t bytes) {
  (void)bytes;
  return (T*)address;
}

// Matrix tiles (portable_tiles.h). d += a * b with the fragments of mma.m16n8k16 in bf16.
#define TILE_MMA 1
DEVICE void mma_16x8x16(float* d, const uint32_t* a, const uint32_t* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// d += a * b with the fragments of mma.m16n8k32 in signed bytes.
DEVICE void mma_16x8x32(int32_t* d, const uint32_t* a, const uint32_t* b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// The larger of |a| and |b|; NaN if one is NaN.
DEVICE float larger_magnitude(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(a)), "f"(fabsf(b)));
  return larger;
}
// a: bytes without a sign.
DEVICE void mma_16x8x32_unsigned(int32_t* d, const uint32_t* a, const uint32_t* b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Four 8 x 8 matrices of 2-byte elements; work-item l gives the address of row l % 8 of matrix l / 8, and gets elements 2 (l % 4) and the next of row
// l / 4 of each, or, transposed, of column l / 4.
DEVICE void load_matrices_transposed(uint32_t* v, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"((uint32_t)__cvta_generic_to_shared(row))
               : "memory");
}
DEVICE void load_matrices(uint32_t* v, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"((uint32_t)__cvta_generic_to_shared(row))
               : "memory");
}
// 16 aligned bytes of device memory to workgroup memory while the work-item goes on; copies_done: until its own copies are there.
DEVICE void copy16_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
// Of lines of 128 bytes which are read whole before long, by several: memory is asked for the line at once.
DEVICE void copy16_line_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
DEVICE void copy8_async(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
DEVICE void copy4_async(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
// The line of device memory goes to the L2 cache.
DEVICE void ask_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from))); }
// Workgroup memory of an LDS_KERNEL.
DEVICE uint8_t* lds_bytes() {
  extern __shared__ uint4 glm53_dynamic_lds[];
  return (uint8_t*)glm53_dynamic_lds;
}
DEVICE void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// copies_commit: the copies since the last one are one batch. copies_wait<N>: all batches but the last N are there.
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <uint32_t N> DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
// 16 aligned bytes of device memory as one access, whichever registers they are in.
DEVICE void store16(void* to, const uint32_t* v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// Signed bytes i and i + 2 (i = 0 or 1) of the word as bf16, exactly: 128 + the low seven bits, less 128 or 256.
DEVICE uint32_t bytes_bf16(uint32_t word, uint32_t i) {
  uint32_t bytes = word >> (8 * i), pair;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(and_or(bytes, 0x007f007fu, 0x43004300u)), "r"(and_or(bytes, 0x00800080u, 0x43004300u)));
  return pair;
}
