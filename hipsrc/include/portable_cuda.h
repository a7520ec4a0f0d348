// portable_cuda.h - nvcc, sm_90. NVIDIA's spelling of the vocabulary in portable.h.
#pragma once
#include <cstdint>
#include <cuda/atomic>

#define DEVICE static __device__ __forceinline__
#define SHARED(type, name, count) __shared__ type name[count]
#define KERNEL(name, args_type, threads) extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ args_type a)
#define SPIN_KERNEL(name, args_type, threads) KERNEL(name, args_type, threads)
#define UNROLL _Pragma("unroll")
#define WAVE 32

DEVICE uint32_t thread_id() { return threadIdx.x; }
DEVICE uint32_t block_x() { return blockIdx.x; }
DEVICE uint32_t block_y() { return blockIdx.y; }
DEVICE uint32_t block_z() { return blockIdx.z; }
DEVICE uint32_t lane_id() { return threadIdx.x & (WAVE - 1); }
DEVICE void block_sync() { __syncthreads(); }
template <class T> DEVICE T shuffle_from(T v, uint32_t lane) { return __shfl_sync(~0u, v, (int)lane); }
template <class T> DEVICE T shuffle_xor(T v, uint32_t mask) { return __shfl_xor_sync(~0u, v, (int)mask); }

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
DEVICE void fence_system() { __threadfence_system(); }
DEVICE void give_way() { __nanosleep(100); }

template <class T> DEVICE T* pointer_from(uint64_t address, uint64_t bytes) {
  (void)bytes;
  return (T*)address;
}
