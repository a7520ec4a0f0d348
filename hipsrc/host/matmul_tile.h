// matmul_tile.h - matmul_tile_* and expert_matmul_tile_* of the fast host build: one fma chain over ascending k for each output, eight rows of x in
// the lanes. x is packed to [panel of 16 rows][k][16] f32 once for all column blocks of a range; 16 rows x 6 columns stay in registers.
#pragma once

namespace {
namespace host {
namespace tile {

constexpr uint32_t PANEL = 16, COLUMNS = 6;
constexpr uint32_t DEPTH = 512;  // k at a time: a panel of that depth stays in the first-level cache

// acc[column][row] (pitch TILE_ROWS) continues its chains over k values. x: one panel. w: rows `stride` apart.
template <uint32_t C> DEVICE void multiply(const float* x, const float* w, uint64_t stride, uint32_t k, float* acc) {
  lanes8 low[C], high[C];
  for (uint32_t c = 0; c < C; c++) {
    low[c] = load8(acc + c * TILE_ROWS);
    high[c] = load8(acc + c * TILE_ROWS + LANES);
  }
  for (uint32_t i = 0; i < k; i++) {
    lanes8 a = load8(x + i * PANEL), b = load8(x + i * PANEL + LANES);
    UNROLL
    for (uint32_t c = 0; c < C; c++) {
      lanes8 v = all_lanes(w[c * stride + i]);
      low[c] = fma8(a, v, low[c]);
      high[c] = fma8(b, v, high[c]);
    }
  }
  for (uint32_t c = 0; c < C; c++) {
    store8(acc + c * TILE_ROWS, low[c]);
    store8(acc + c * TILE_ROWS + LANES, high[c]);
  }
}

// As multiply, for at most eight rows: twelve columns fill the registers.
template <uint32_t C> DEVICE void multiply_low(const float* x, const float* w, uint64_t stride, uint32_t k, float* acc) {
  lanes8 low[C];
  for (uint32_t c = 0; c < C; c++) low[c] = load8(acc + c * TILE_ROWS);
  for (uint32_t i = 0; i < k; i++) {
    lanes8 a = load8(x + i * PANEL);
    UNROLL
    for (uint32_t c = 0; c < C; c++) low[c] = fma8(a, all_lanes(w[c * stride + i]), low[c]);
  }
  for (uint32_t c = 0; c < C; c++) store8(acc + c * TILE_ROWS, low[c]);
}

inline void multiply_panel(const float* x, const float* w, uint64_t stride, uint32_t k, uint32_t rows, uint32_t cols, float* acc) {
  uint32_t c = 0;
  if (rows <= LANES) {
    for (; c + 2 * COLUMNS <= cols; c += 2 * COLUMNS) multiply_low<2 * COLUMNS>(x, w + c * stride, stride, k, acc + c * TILE_ROWS);
    for (; c + 4 <= cols; c += 4) multiply_low<4>(x, w + c * stride, stride, k, acc + c * TILE_ROWS);
    for (; c < cols; c++) multiply_low<1>(x, w + c * stride, stride, k, acc + c * TILE_ROWS);
    return;
  }
  for (; c + COLUMNS <= cols; c += COLUMNS) multiply<COLUMNS>(x, w + c * stride, stride, k, acc + c * TILE_ROWS);
  for (; c + 4 <= cols; c += 4) multiply<4>(x, w + c * stride, stride, k, acc + c * TILE_ROWS);
  for (; c < cols; c++) multiply<1>(x, w + c * stride, stride, k, acc + c * TILE_ROWS);
}

// Packs one panel: `row(i)` is the first element of row i, or null for a row of zeros.
template <class X, class Row> void pack_panel(const Row& row, uint32_t k, float* to) {
  for (uint32_t half = 0; half < PANEL; half += LANES) {
    const X* from[LANES];
    for (uint32_t i = 0; i < LANES; i++) from[i] = row(half + i);
    for (uint32_t k0 = 0; k0 < k; k0 += LANES) {
      uint32_t count = k - k0 < LANES ? k - k0 : LANES;
      lanes8 v[LANES];
      for (uint32_t i = 0; i < LANES; i++) v[i] = from[i] ? load_part(from[i] + k0, count) : all_lanes(0);
      transpose8(v);
      for (uint32_t i = 0; i < count; i++) store8(to + (k0 + i) * PANEL + half, v[i]);
    }
  }
}

// A weight matrix in any format, from element `at` on: rows `stride` elements apart.
struct Weights {
  const void* codes;
  const uint16_t* scales;
  uint64_t at, stride;
};

// Elements [k0, k0 + k) of its first `cols` rows as f32: in place, or a copy in `room`. *pitch: elements between two rows. k0 is a multiple of 64.
template <class W> DEVICE const float* weights_f32(const Weights& w, uint32_t k0, uint32_t cols, uint32_t k, float* room, uint64_t* pitch) {
  if constexpr (W::FORMAT == WEIGHT_F32) {
    *pitch = w.stride;
    return (const float*)w.codes + w.at + k0;
  } else {
    for (uint32_t c = 0; c < cols; c++) {
      uint64_t first = w.at + c * w.stride + k0;
      float* to = room + (uint64_t)c * k;
      if constexpr (W::FORMAT == WEIGHT_BF16) {
        for (uint32_t i = 0; i < k; i++) to[i] = bf16_to_f32(((const bf16*)w.codes)[first + i]);
      } else {
        for (uint32_t i = 0; i < k; i += WEIGHT_GROUP) {
          float scale = f16_value(w.scales[(first + i) / WEIGHT_GROUP]);
          if constexpr (W::FORMAT == WEIGHT_Q8G64) {
            const int8_t* codes = (const int8_t*)w.codes + first + i;
            for (uint32_t j = 0; j < WEIGHT_GROUP; j++) to[i + j] = (float)codes[j] * scale;
          } else {
            const uint8_t* codes = (const uint8_t*)w.codes + (first + i) / 2;
            for (uint32_t j = 0; j < WEIGHT_GROUP; j++) to[i + j] = (float)((int32_t)(codes[j / 2] >> (4 * (j % 2)) & 15) - 8) * scale;
          }
        }
      }
    }
    *pitch = k;
    return room;
  }
}

// acc[column][row] of one block: x packed in panels of depth k, w a column block.
template <class W> void product(const float* x, const Weights& w, uint32_t rows, uint32_t cols, uint32_t k, float* room, float* acc) {
  static_assert(DEPTH % WEIGHT_GROUP == 0, "whole groups at a time");
  memset(acc, 0, sizeof(float) * TILE_ROWS * TILE_COLS);
  for (uint32_t k0 = 0; k0 < k; k0 += DEPTH) {
    uint32_t depth = k - k0 < DEPTH ? k - k0 : DEPTH;
    uint64_t pitch;
    const float* weights = weights_f32<W>(w, k0, cols, depth, room, &pitch);
    for (uint32_t row = 0; row < rows; row += PANEL) {
      multiply_panel(x + (uint64_t)row * k + (uint64_t)k0 * PANEL, weights, pitch, depth, rows - row, cols, acc + row);
    }
  }
  // The fiber kernel goes on to whole tiles of k with zeros, which makes +0 of -0.
  if (k % TILE_K) {
    for (uint32_t i = 0; i < TILE_ROWS * TILE_COLS; i++) acc[i] += 0.0f;
  }
}

// acc as [row][column], pitch TILE_COLS; `cols` rounded up to whole lanes.
inline void turn(const float* acc, uint32_t rows, uint32_t cols, float* out) {
  for (uint32_t row = 0; row < rows; row += LANES) {
    for (uint32_t col = 0; col < cols; col += LANES) {
      lanes8 v[LANES];
      for (uint32_t i = 0; i < LANES; i++) v[i] = load8(acc + (col + i) * TILE_ROWS + row);
      transpose8(v);
      for (uint32_t i = 0; i < LANES; i++) store8(out + (row + i) * TILE_COLS + col, v[i]);
    }
  }
}

// y[0, cols) = Y(sum), or Y(Y(sum) + residual).
template <class Y> DEVICE void store_row(Y* y, const Y* residual, const float* sums, uint32_t cols) {
  uint32_t c = 0;
  for (; c + LANES <= cols; c += LANES) {
    lanes8 v = load8(sums + c);
    if (residual) v = rounded8<Y>(v) + load8(residual + c);
    round8(y + c, v);
  }
  for (; c < cols; c++) store_f32(y + c, residual ? rounded<Y>::of(sums[c]) + load_f32(residual + c) : sums[c]);
}

struct Room {
  float *x, *w, *acc, *out;
};
// Room for one row block of depth k; null x: out of memory.
inline Room room(Blocks& b, uint32_t k) {
  size_t x = (size_t)TILE_ROWS * k, w = (size_t)TILE_COLS * DEPTH, tile = TILE_ROWS * TILE_COLS;
  float* all = b.scratch(x + w + 2 * tile);
  return {all, all + x, all + x + w, all + x + w + tile};
}

// Grid: ceil(n / 64), ceil(rows / 64), batch.
template <class X, class W, class Y> bool matmul(const matmul_args& a, Blocks& b) {
  Room r = room(b, a.k);
  if (!r.x) return false;
  uint64_t packed = ~(uint64_t)0;
  for (uint64_t block = b.first; block < b.last; block++) {
    uint32_t bx = (uint32_t)(block % b.grid.x), by = (uint32_t)(block / b.grid.x % b.grid.y), bz = (uint32_t)(block / b.grid.x / b.grid.y);
    uint32_t row0 = by * TILE_ROWS, col0 = bx * TILE_COLS;
    uint32_t rows = a.rows - row0 < TILE_ROWS ? a.rows - row0 : TILE_ROWS, cols = a.n - col0 < TILE_COLS ? a.n - col0 : TILE_COLS;
    if (block / b.grid.x != packed) {
      packed = block / b.grid.x;
      const X* x = (const X*)a.x + bz * a.x_batch_stride + (uint64_t)row0 * a.x_stride;
      for (uint32_t p = 0; p < rows; p += PANEL) {
        pack_panel<X>([&](uint32_t i) { return p + i < rows ? x + (uint64_t)(p + i) * a.x_stride : nullptr; }, a.k, r.x + (uint64_t)p * a.k);
      }
    }
    Weights w = {a.w, (const uint16_t*)a.scales, bz * a.w_batch_stride + (uint64_t)col0 * a.w_stride, a.w_stride};
    product<W>(r.x, w, rows, cols, a.k, r.w, r.acc);
    turn(r.acc, rows, cols, r.out);
    for (uint32_t i = 0; i < rows; i++) {
      uint64_t at = bz * a.y_batch_stride + (uint64_t)(row0 + i) * a.y_stride + col0;
      store_row((Y*)a.y + at, a.residual ? (const Y*)a.residual + at : nullptr, r.out + i * TILE_COLS, cols);
    }
  }
  return true;
}

// Column blocks [begin, end) of one expert.
template <class X, class W> void expert_columns(const expert_matmul_args& a, uint32_t expert, uint32_t begin, uint32_t end, const Room& r) {
  uint32_t pair0 = (uint32_t)((const int32_t*)a.offsets)[expert], pair_end = (uint32_t)((const int32_t*)a.offsets)[expert + 1];
  const int32_t* sorted = (const int32_t*)a.sorted_pairs;
  for (uint32_t first = pair0; first < pair_end; first += TILE_ROWS) {
    uint32_t rows = pair_end - first < TILE_ROWS ? pair_end - first : TILE_ROWS;
    for (uint32_t p = 0; p < rows; p += PANEL) {
      auto row = [&](uint32_t i) {
        return p + i < rows ? (const X*)a.x + (uint64_t)((uint32_t)sorted[first + p + i] / a.pairs_per_row) * a.stride : nullptr;
      };
      pack_panel<X>(row, a.k, r.x + (uint64_t)p * a.k);
    }
    for (uint32_t bx = begin; bx < end; bx++) {
      uint32_t col0 = bx * TILE_COLS, cols = a.n - col0 < TILE_COLS ? a.n - col0 : TILE_COLS;
      Weights w = {a.w, (const uint16_t*)a.scales, (uint64_t)expert * a.w_expert_stride + (uint64_t)col0 * a.stride, a.stride};
      product<W>(r.x, w, rows, cols, a.k, r.w, r.acc);
      turn(r.acc, rows, cols, r.out);
      for (uint32_t i = 0; i < rows; i++) {
        store_row((X*)a.y + (uint64_t)sorted[first + i] * a.n + col0, (const X*)nullptr, r.out + i * TILE_COLS, cols);
      }
    }
  }
}

// Grid: ceil(n / 64), experts.
template <class X, class W> bool expert_matmul(const expert_matmul_args& a, Blocks& b) {
  Room r = room(b, a.k);
  if (!r.x) return false;
  for (uint64_t block = b.first; block < b.last;) {
    uint32_t expert = (uint32_t)(block / b.grid.x), begin = (uint32_t)(block % b.grid.x);
    uint64_t left = b.last - block;
    uint32_t end = left < b.grid.x - begin ? begin + (uint32_t)left : b.grid.x;
    expert_columns<X, W>(a, expert, begin, end, r);
    block += end - begin;
  }
  return true;
}

}  // namespace tile

FAST_KERNEL(matmul_tile_f32_f32_f32, matmul_args, tile::matmul<float, f32_weights, float>);
FAST_KERNEL(matmul_tile_f32_bf16_f32, matmul_args, tile::matmul<float, bf16_weights, float>);
FAST_KERNEL(matmul_tile_f32_q8g64_f32, matmul_args, tile::matmul<float, q8g64_weights, float>);
FAST_KERNEL(matmul_tile_f32_q4g64_f32, matmul_args, tile::matmul<float, q4g64_weights, float>);
FAST_KERNEL(matmul_tile_bf16_f32_f32, matmul_args, tile::matmul<bf16, f32_weights, float>);
FAST_KERNEL(matmul_tile_bf16_bf16_f32, matmul_args, tile::matmul<bf16, bf16_weights, float>);
FAST_KERNEL(matmul_tile_bf16_q8g64_f32, matmul_args, tile::matmul<bf16, q8g64_weights, float>);
FAST_KERNEL(matmul_tile_bf16_q4g64_f32, matmul_args, tile::matmul<bf16, q4g64_weights, float>);
FAST_KERNEL(matmul_tile_bf16_bf16_bf16, matmul_args, tile::matmul<bf16, bf16_weights, bf16>);
FAST_KERNEL(matmul_tile_bf16_q8g64_bf16, matmul_args, tile::matmul<bf16, q8g64_weights, bf16>);
FAST_KERNEL(matmul_tile_bf16_q4g64_bf16, matmul_args, tile::matmul<bf16, q4g64_weights, bf16>);
FAST_KERNEL(expert_matmul_tile_f32_f32, expert_matmul_args, tile::expert_matmul<float, f32_weights>);
FAST_KERNEL(expert_matmul_tile_f32_bf16, expert_matmul_args, tile::expert_matmul<float, bf16_weights>);
FAST_KERNEL(expert_matmul_tile_f32_q8g64, expert_matmul_args, tile::expert_matmul<float, q8g64_weights>);
FAST_KERNEL(expert_matmul_tile_f32_q4g64, expert_matmul_args, tile::expert_matmul<float, q4g64_weights>);
FAST_KERNEL(expert_matmul_tile_bf16_bf16, expert_matmul_args, tile::expert_matmul<bf16, bf16_weights>);
FAST_KERNEL(expert_matmul_tile_bf16_q8g64, expert_matmul_args, tile::expert_matmul<bf16, q8g64_weights>);
FAST_KERNEL(expert_matmul_tile_bf16_q4g64, expert_matmul_args, tile::expert_matmul<bf16, q4g64_weights>);

}  // namespace host
}  // namespace
