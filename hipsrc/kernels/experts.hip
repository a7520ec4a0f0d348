// experts.hip - the routed experts of a mixture-of-experts layer. A pair = row * k + slot is one row of the batch at one of its k experts.
//   expert_sort           pairs grouped by expert, ascending inside a group
//   expert_matmul_*       y[pair] = x[pair / pairs_per_row] @ w[expert of pair]^T, sums in f32, one rounding to X
//   expert_sum            sum[r] = (sum_slot weight * expert_out[r, slot]) + sum[r], of one half of k
// For prompt rows: decode rows have step_experts.hip. The products use matmul.hip's device functions and order, so a pair's bits depend on its own x
// and w only. An expert without pairs costs one early exit. Rounding as transformers' grouped_mm: expert output in T, times f32 weight, summed in f32.
#include "portable.h"
#include "scan.h"

namespace experts {

constexpr uint32_t THREADS = SCAN_THREADS;
constexpr uint32_t SORT_TILE = 1024;  // pairs that pass through LDS together

// Grid: ceil(n / 64), experts. A block walks over the pairs of its expert in tiles of 64; each output is matmul_tile's chain over k.
template <class X, class W> DEVICE void matmul_grouped(const expert_matmul_args& a) {
  SHARED(float, xs, TILE_K * TILE_PITCH);
  SHARED(float, ws, TILE_K * TILE_PITCH);
  uint32_t expert = block_y(), col0 = block_x() * TILE_COLS;
  uint32_t begin = (uint32_t)((const int32_t*)a.offsets)[expert], end = (uint32_t)((const int32_t*)a.offsets)[expert + 1];
  const int32_t* sorted = (const int32_t*)a.sorted_pairs;
  uint32_t row = thread_id() / 16 * 4, col = thread_id() % 16 * 4, loaded = thread_id() / 4;
  uint32_t cols = a.n - col0 < TILE_COLS ? a.n - col0 : TILE_COLS;
  uint64_t at = (uint64_t)expert * a.w_expert_stride + (uint64_t)col0 * a.stride;
  for (uint32_t first = begin; first < end; first += TILE_ROWS) {
    uint32_t rows = end - first < TILE_ROWS ? end - first : TILE_ROWS;
    // tile_load with stride 0: each work-item brings the pointer of the row it loads.
    const X* x = (const X*)a.x;
    if (loaded < rows) x += (uint64_t)((uint32_t)sorted[first + loaded] / a.pairs_per_row) * a.stride;
    float acc[4][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}, {0, 0, 0, 0}, {0, 0, 0, 0}};
    for (uint32_t k0 = 0; k0 < a.k; k0 += TILE_K) {
      tile_load(xs, x, 0, rows, k0, a.k);
      tile_load_weights<W>(ws, a.w, (const uint16_t*)a.scales, at, a.stride, cols, k0, a.k);
      block_sync();
      if (row < rows && col < cols) tile_multiply(xs + row, ws + col, acc);
      block_sync();
    }
    UNROLL
    for (uint32_t i = 0; i < 4; i++) {
      UNROLL
      for (uint32_t j = 0; j < 4; j++) {
        if (row + i < rows && col + j < cols) store_f32((X*)a.y + (uint64_t)sorted[first + row + i] * a.n + col0 + col + j, acc[i][j]);
      }
    }
  }
}

template <class T> DEVICE void sum_slots(const expert_sum_args& a) {
  uint32_t c = block_x() * THREADS + thread_id(), row = block_y();
  if (c >= a.width) return;
  uint64_t at = (uint64_t)row * a.width + c;
  float sum = 0.0f;
  for (uint32_t slot = 0; slot < a.k; slot++) {
    uint64_t pair = (uint64_t)row * a.k + slot;
    sum = fma_f32(((const float*)a.weights)[pair], load_f32((const T*)a.expert_out + pair * a.width + c), sum);
  }
  ((float*)a.sum)[at] = sum + ((const float*)a.sum)[at];
}

}  // namespace experts

// LAUNCH expert_sort block=256 experts_max=256
KERNEL(expert_sort, expert_sort_args, 256) {
  SHARED(uint32_t, counts, experts::THREADS);
  SHARED(uint32_t, scan, SCAN_THREADS + SCAN_GROUP);
  SHARED(int32_t, tile, experts::SORT_TILE);
  const int32_t* ids = (const int32_t*)a.ids;
  uint32_t t = thread_id(), total;
  counts[t] = 0;
  block_sync();
  for (uint32_t p = t; p < a.pairs; p += experts::THREADS) {
    if ((uint32_t)ids[p] < a.experts) lds_add(&counts[ids[p]], 1u);
  }
  block_sync();
  uint32_t next = block_prefix(counts[t], scan, &total);
  if (t < a.experts) ((int32_t*)a.offsets)[t] = (int32_t)next;
  if (t == 0) ((int32_t*)a.offsets)[a.experts] = (int32_t)total;
  for (uint32_t first = 0; first < a.pairs; first += experts::SORT_TILE) {
    uint32_t count = a.pairs - first < experts::SORT_TILE ? a.pairs - first : experts::SORT_TILE;
    for (uint32_t i = t; i < count; i += experts::THREADS) tile[i] = ids[first + i];
    block_sync();
    if (t < a.experts) {
      for (uint32_t i = 0; i < count; i++) {
        if (tile[i] == (int32_t)t) ((int32_t*)a.sorted_pairs)[next++] = (int32_t)(first + i);
      }
    }
    block_sync();
  }
}

#define EXPERT_MATMUL_TILE(suffix, X, W) KERNEL(expert_matmul_tile_##suffix, expert_matmul_args, 256) { experts::matmul_grouped<X, W>(a); }

// LAUNCH expert_matmul_tile_f32_f32 block=256 cols=64 rows=64
EXPERT_MATMUL_TILE(f32_f32, float, f32_weights)
// LAUNCH expert_matmul_tile_f32_bf16 block=256 cols=64 rows=64
EXPERT_MATMUL_TILE(f32_bf16, float, bf16_weights)
// LAUNCH expert_matmul_tile_f32_q8g64 block=256 cols=64 rows=64
EXPERT_MATMUL_TILE(f32_q8g64, float, q8g64_weights)
// LAUNCH expert_matmul_tile_f32_q4g64 block=256 cols=64 rows=64
EXPERT_MATMUL_TILE(f32_q4g64, float, q4g64_weights)
// LAUNCH expert_matmul_tile_bf16_bf16 block=256 cols=64 rows=64
EXPERT_MATMUL_TILE(bf16_bf16, bf16, bf16_weights)
// LAUNCH expert_matmul_tile_bf16_q8g64 block=256 cols=64 rows=64
EXPERT_MATMUL_TILE(bf16_q8g64, bf16, q8g64_weights)
// LAUNCH expert_matmul_tile_bf16_q4g64 block=256 cols=64 rows=64
EXPERT_MATMUL_TILE(bf16_q4g64, bf16, q4g64_weights)

// LAUNCH expert_sum_f32 block=256
KERNEL(expert_sum_f32, expert_sum_args, 256) { experts::sum_slots<float>(a); }
// LAUNCH expert_sum_bf16 block=256
KERNEL(expert_sum_bf16, expert_sum_args, 256) { experts::sum_slots<bf16>(a); }
