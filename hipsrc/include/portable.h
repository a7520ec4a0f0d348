// portable.h - the only file that knows which compiler is at work. Kernels see one vocabulary:
//   KERNEL(name, args_type, threads) { body using `a` }   SPIN_KERNEL(...) for kernels that call spin_until
//   WAVE, thread_id(), block_x/y/z(), lane_id(), wave_id(), block_sync(), shuffle_xor(v, mask), shuffle_from(v, lane)
//   SHARED(type, name, count)           workgroup memory (LDS)
//   fma_f32, exp_f32, log_f32, sqrt_f32, rsqrt_f32, sincos_f32, max_f32, min_f32
//   bf16 (raw bits in a struct), load_f32(ptr), store_f32(ptr, value): f32 or bf16 memory, f32 in registers, round to nearest even
//   words16                             16 aligned bytes, for copies
//   lds_add(ptr, v) u32/u64, global_add, global_max(ptr, v) u32   atomics, relaxed
//   store_system/load_system, fence_system, spin_until        exchange with another device or the host
//   pointer_from<T>(address, bytes)     a pointer that was read from memory (extent table, plan); checked on the host
// Rules: at most 48 KiB of SHARED a kernel (nvcc refuses more static memory), no bare wave width, no calls left out of line, no __constant__
//   tables, one by-value argument struct.
#pragma once
#if defined(GLM53_LIST)
#include "portable_list.h"
#elif defined(GLM53_HOST)
#include "portable_host.h"
#elif defined(__HIP__)
#include "portable_amd.h"
#elif defined(__CUDACC__)
#include "portable_cuda.h"
#else
#error "portable.h: build with clang -x hip, nvcc, or -DGLM53_HOST"
#endif
#include "portable_math.h"
#include "args.h"
