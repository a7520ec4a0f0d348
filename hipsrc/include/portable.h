// portable.h - the only file that knows which compiler is at work. Kernels see one vocabulary:
//   KERNEL(name, args_type, threads) { body using `a` }   SPIN_KERNEL(...) for kernels that call spin_until
//   EARLY_KERNEL(name, args_type, threads, blocks) { .. }   `blocks` share a multiprocessor: their part of its registers each, where the compiler
//                                       must be told. Where launches overlap it begins before the launch before has ended: every work-item calls
//                                       next_may_begin() and then previous_done() once, and touches before that nothing but weights, which no
//                                       launch in flight writes. The other kernels do it on entry. A launch must not end before the one before: the
//                                       work-items of one of its blocks wait at least, the others where they touch what launches wrote.
//                                       Its first a.waiting_blocks blocks may wait as in a SPIN_KERNEL, where the arguments have that field.
//   REHEARSES                           1 where launches overlap: a block that comes early may go through its code once on made-up values, which
//                                       brings the code from memory. It then touches neither what launches write nor what it reads after
//                                       previous_done()
//   LDS_KERNEL(name, args_type, threads, blocks, bytes) { .. }   an EARLY_KERNEL that has `bytes` of workgroup memory at lds_bytes(), where there
//                                       are TILE_MMA
//   next_may_begin()                    from here on the next launch may begin; when all blocks have come here
//   previous_done()                     waits until all that earlier launches wrote can be read
//   WAVE, thread_id(), block_x/y/z(), lane_id(), wave_id(), block_sync(), shuffle_xor(v, mask), shuffle_from(v, lane)
//   wave_sync()                         what the 32 aligned work-items wrote to LDS can be read by each of them
//   some_sync(barrier, count)           where there are TILE_MMA: a meeting of so many work-items, whole waves, that name the same barrier, 1 to 15
//   SHARED(type, name, count)           workgroup memory (LDS)
//   UNROLL, ROLLED                      before a loop: always unrolled; never, where that would cost too many registers
//   fma_f32, exp_f32, log_f32, sqrt_f32, rsqrt_f32, sincos_f32, max_f32, min_f32
//   bf16 (raw bits in a struct), load_f32(ptr), store_f32(ptr, value): f32 or bf16 memory, f32 in registers, round to nearest even
//   words16                             16 aligned bytes, for copies
//   lds_add(ptr, v) u32/u64, global_add u32/u64, global_max(ptr, v) u32   atomics, relaxed
//   and_or(v, mask, bits)               (v & mask) | bits as one instruction; with_byte(word, j, high): the upper three bytes of high, byte j of word
//   pick_bytes<a, b, c, d>(low, high)   bytes a, b, c, d of the eight of low, then high
//   dot4(a, b, c)                       c + the sum of four products of signed bytes, where there are no matrix tiles
//   load16(from, to)                    16 aligned bytes into four registers as one access
//   copy16_async, copy16_line_async, copy8_async, copy4_async, copies_done, copies_commit, copies_wait, load_matrices, store16    where there are
//                                       TILE_MMA: device memory to workgroup memory without registers, in batches; 16 bytes stored as one access
//   larger_magnitude(a, b)              likewise: the larger of |a| and |b|, NaN if one is NaN
//   ask_line(from)                      likewise: a line of device memory on its way to the cache
//   uniform(v)                         v, which is the same in the whole block, where the compiler cannot know it
//   opaque(v), opaque_item(v)           v (of the block, of the work-item) of which the compiler knows nothing: what depends on it stays in its loop
//   kernel_args(a)                      the argument struct where it lies, so that an index into its arrays is a load and no copy in scratch memory
//   in_global(p)                        p, known to point at device memory: where a pointer was chosen among several
//   f16_value(bits)                     f16 as f32 by the device's own instruction; finite values are exact
//   fence_device()                      orders this work-item's accesses for the other blocks of the launch
//   bit_count(v)                        bits that are set, of a u32
//   wave32_prefix(v, &total)            exclusive prefix sum of integers over 32 aligned lanes
//   wave32_max(v)                       the largest of 32 aligned lanes, u64, in each of them
//   lanes_sum<LANES>(values)              sums of several f32 at once over a group of lanes
//   store_system/load_system, fence_system, spin_until        exchange with another device or the host: release and acquire
//   give_way(), QUICK_POLLS             between two polls of a wait; how many come before the first, where a sleep would cost more than it saves
//   store_word_system/load_word_system  likewise of words that say themselves what they are: 8 bytes at once, no order among them
//   tile16, tile_a, tile_b, tile_add     16 x 16 x 16 matrix tiles (portable_tiles.h)
//   bytes_bf16(word, i)                signed bytes i and i + 2 of a word as a pair of bf16, on sm_90
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
#if !defined(REHEARSES)
#define REHEARSES 0
#endif
#include "portable_math.h"
#include "portable_tiles.h"
#include "args.h"
