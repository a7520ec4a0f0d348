// step_router.h - part of step.hip: what a block of a launch of products has, and the router's logits of bf16 x.
#pragma once
#include "wave_rows.h"

namespace step {

// The block's LDS: x, or what the block's part needs; sums of the waves; partial sums of norms, and their scales.
struct Lds {
  words16* x;      // [X_UNITS]
  float* x_scale;  // [wave_product::SIDE] and
  float* sums;     // [wave_product::SUMS]: T = bf16 alone
  float* partial;  // [PARTIALS]: sums of squares, of waves
  float* scale;    // [1]
};
constexpr uint32_t X_UNITS = gemv::X_UNITS, PARTIALS = wave_product::WAVES * wave_product::ROWS;
static_assert(X_UNITS * 16 == wave_product::WAVES * wave_product::X_BYTES, "the x of all waves, or of a block");

// One of the four products, and the block's place in it.
struct Segment {
  const uint8_t* codes;
  const uint16_t* scales;
  uint8_t* y;
  uint32_t n, y_stride, epilogue, head_stride, rope_offset;
  uint32_t index, block, batch;
};

constexpr uint32_t ROUTER_COLS = 2, ROUTER_ROWS = 4;  // of a block, and rows of x that it takes at once, T = bf16

// The router's logits of bf16 x: all work-items of a block share ROUTER_COLS rows of f32 weights, chunk c of 4 values belongs to work-item c % 256,
// which adds x * norm * w, and the squares of x, in ascending order. Then a butterfly over 32 lanes, and the waves in order; the norm's scale comes
// last. Each block writes its share of the values of each row of h. ONE: one row of x, and the weights of column 0 wait in LDS, where a work-item
// reads what it copied itself, so that three blocks share a multiprocessor's registers. HELD: several rows, and those of both columns do.
struct RouterSums {
  float of[ROUTER_COLS + 1];  // the last: of squares
};
// Four values.
DEVICE void load_pair(const bf16* from, uint32_t* word) {
  uint64_t both = *(const uint64_t*)from;
  word[0] = (uint32_t)both;
  word[1] = (uint32_t)(both >> 32);
}
constexpr uint32_t ROUTER_EACH = 6, ROUTER_SPAN = ROUTER_EACH * 256;  // chunks under way, of a work-item and of the block
constexpr uint32_t ROUTER_BATCH = 10;                                  // rows whose sums wait in LDS, of blocks with the LDS of rings
static_assert(ROUTER_BATCH * (ROUTER_COLS + 1) <= wave_product::COLS && ROUTER_BATCH * (ROUTER_COLS + 1) <= PARTIALS, "`sums` of such blocks");
template <bool ONE> constexpr uint32_t router_rows = ONE ? 1 : ROUTER_ROWS;
template <bool ONE>
DEVICE void add_router_span(const step_gemv_args& a, const Segment& s, uint32_t first_row, uint32_t span, words16* held, RouterSums* sums) {
  constexpr uint32_t EACH = ROUTER_EACH;
  uint32_t t = thread_id(), chunks = a.k / 4, rows = ONE ? 1u : a.rows - first_row, w[ROUTER_COLS][EACH][4], g[EACH][2];
  UNROLL
  for (uint32_t i = 0; i < EACH; i++) {
    uint32_t chunk = span + t + 256 * i;
    UNROLL
    for (uint32_t c = 0; c < ROUTER_COLS; c++) {
      uint32_t column = s.block * ROUTER_COLS + c;
      const float* from = in_global((const float*)s.codes) + (uint64_t)(column < s.n ? column : s.n - 1u) * a.k + 4 * chunk;
#if defined(TILE_MMA)
      if (ONE && c == 0) {
        if (chunk < chunks) copy16_async(held + t + 256 * i, from);
        else held[t + 256 * i] = {{0, 0, 0, 0}};
        continue;
      }
#endif
      UNROLL
      for (uint32_t j = 0; j < 4; j++) w[c][i][j] = 0;
      if (chunk < chunks) load16(from, w[c][i]);
    }
    g[i][0] = g[i][1] = 0x3f803f80u;  // 1
    if (a.norm && chunk < chunks) load_pair(in_global((const bf16*)a.norm) + 4 * chunk, g[i]);
  }
  if (first_row + span == 0) previous_done();
  UNROLL
  for (uint32_t r = 0; r < router_rows<ONE>; r++) {
    if (!ONE && r >= opaque(rows)) continue;  // opaque: else 8 conditions are kept in registers of the wave
    const bf16* x = in_global((const bf16*)a.x) + (uint64_t)(first_row + r) * a.x_stride;
    uint32_t v[EACH][2];
    UNROLL
    for (uint32_t i = 0; i < EACH; i++) {
      uint32_t chunk = span + t + 256 * i;
      v[i][0] = v[i][1] = 0;
      if (chunk < chunks) load_pair(x + 4 * chunk, v[i]);
    }
#if defined(TILE_MMA)
    if (ONE) copies_done();
#endif
    UNROLL
    for (uint32_t i = 0; i < EACH; i++) {
      if (ONE) {
        words16 word = held[t + 256 * i];
        UNROLL
        for (uint32_t j = 0; j < 4; j++) w[0][i][j] = word.w[j];
      }
      UNROLL
      for (uint32_t j = 0; j < 4; j++) {
        float value = bf16_weights::value(v[i], j), scaled = value * bf16_weights::value(g[i], j);
        sums[r].of[ROUTER_COLS] = fma_f32(value, value, sums[r].of[ROUTER_COLS]);
        UNROLL
        for (uint32_t c = 0; c < ROUTER_COLS; c++) sums[r].of[c] = fma_f32(scaled, float_of(w[c][i][j]), sums[r].of[c]);
      }
    }
  }
}
#if defined(TILE_MMA)
// Of several rows, one after the other, by blocks with the LDS of rings: the weights of both columns wait there, where a work-item reads what it copied
// itself; x of the row after is on its way. The sums of a wave into its rows of `sums`.
template <uint32_t BATCH> DEVICE void add_router_rows(const step_gemv_args& a, const Segment& s, uint32_t first, uint32_t rows, const Lds& lds) {
  constexpr uint32_t EACH = ROUTER_EACH;
  uint32_t t = thread_id(), chunks = a.k / 4, spans = (chunks + ROUTER_SPAN - 1) / ROUTER_SPAN, later[EACH][2];
  float g[EACH][4];
  auto ask_weights = [&](uint32_t span) {
    UNROLL
    for (uint32_t i = 0; i < EACH; i++) {
      uint32_t chunk = span * ROUTER_SPAN + t + 256 * i;
      UNROLL
      for (uint32_t c = 0; c < ROUTER_COLS; c++) {
        uint32_t column = s.block * ROUTER_COLS + c;
        const float* from = in_global((const float*)s.codes) + (uint64_t)(column < s.n ? column : s.n - 1u) * a.k + 4 * chunk;
        words16* to = lds.x + c * ROUTER_SPAN + t + 256 * i;
        if (chunk < chunks) copy16_async(to, from);
        else *to = {{0, 0, 0, 0}};
      }
    }
  };
  auto ask_norm = [&](uint32_t span) {
    UNROLL
    for (uint32_t i = 0; i < EACH; i++) {
      uint32_t chunk = span * ROUTER_SPAN + t + 256 * i;
      uint32_t word[2] = {0x3f803f80u, 0x3f803f80u};  // 1
      if (a.norm && chunk < chunks) load_pair(in_global((const bf16*)a.norm) + 4 * chunk, word);
      UNROLL
      for (uint32_t j = 0; j < 4; j++) g[i][j] = bf16_weights::value(word, j);
    }
  };
  auto ask_x = [&](uint32_t row, uint32_t span) {
    const bf16* x = in_global((const bf16*)a.x) + (uint64_t)(first + row) * a.x_stride;
    UNROLL
    for (uint32_t i = 0; i < EACH; i++) {
      uint32_t chunk = span * ROUTER_SPAN + t + 256 * i;
      later[i][0] = later[i][1] = 0;
      if (chunk < chunks) load_pair(x + 4 * chunk, later[i]);
    }
  };
  if (first == 0 || spans > 1u) ask_weights(0);
  ask_norm(0);
  if (first == 0) previous_done();
  ask_x(0, 0);
  RouterSums sum = {};
  uint32_t row = 0, span = 0;
  ROLLED
  while (row < rows) {
    uint32_t v[EACH][2], next_span = span + 1u < spans ? span + 1u : 0u, next_row = next_span ? row : row + 1u;
    UNROLL
    for (uint32_t i = 0; i < EACH; i++) v[i][0] = later[i][0], v[i][1] = later[i][1];
    if (next_row < rows) ask_x(next_row, next_span);
    copies_done();
    UNROLL
    for (uint32_t i = 0; i < EACH; i++) {
      words16 word[ROUTER_COLS];
      UNROLL
      for (uint32_t c = 0; c < ROUTER_COLS; c++) word[c] = lds.x[c * ROUTER_SPAN + t + 256 * i];
      UNROLL
      for (uint32_t j = 0; j < 4; j++) {
        float value = bf16_weights::value(v[i], j), scaled = value * g[i][j];
        sum.of[ROUTER_COLS] = fma_f32(value, value, sum.of[ROUTER_COLS]);
        UNROLL
        for (uint32_t c = 0; c < ROUTER_COLS; c++) sum.of[c] = fma_f32(scaled, float_of(word[c].w[j]), sum.of[c]);
      }
    }
    if (spans > 1u && next_row < rows) {
      ask_weights(next_span);
      ask_norm(next_span);
    }
    if (next_span == 0u) {
      lanes_sum<32>(sum.of);
      UNROLL
      for (uint32_t i = 0; i < ROUTER_COLS + 1; i++) {
        if (tile_lane() == 0) lds.sums[(tile_group() * BATCH + row) * (ROUTER_COLS + 1) + i] = sum.of[i];
      }
      sum = {};
    }
    row = next_row;
    span = next_span;
  }
}
#endif

// 1 / sqrt(mean(x^2) + eps) of a row whose sums are in lds.partial, or 1.
DEVICE float router_scale(const step_gemv_args& a, const Lds& lds, uint32_t row) {
  return a.norm ? rsqrt_exact(lds.partial[row * (ROUTER_COLS + 1) + ROUTER_COLS] / (float)a.k + a.eps) : 1.0f;
}
// The block's share of the values of h of `rows` rows from `first` on.
template <bool ONE> DEVICE void store_h(const step_gemv_args& a, const Segment& s, uint32_t first, uint32_t rows, const Lds& lds) {
  uint32_t blocks = (s.n + ROUTER_COLS - 1) / ROUTER_COLS, share = (a.k + blocks - 1) / blocks;
  uint32_t from = s.block * share, end = from + share < a.k ? from + share : a.k, values = from < end ? end - from : 0u;
  for (uint32_t j = thread_id(); a.h && j < rows * values; j += 256) {
    uint32_t row = ONE ? 0u : j / values, i = from + (j - row * values);
    float x = load_f32((const bf16*)a.x + (uint64_t)(first + row) * a.x_stride + i);
    store_f32((bf16*)a.h + (uint64_t)(first + row) * a.k + i, load_f32((const bf16*)a.norm + i) * rounded<bf16>::of(x * router_scale(a, lds, row)));
  }
}

// HELD: h of the last ROUTER_BATCH rows is left to store_held_h, so that nobody who waits for the logits waits for it.
template <bool ONE, bool HELD> DEVICE void multiply_router(const step_gemv_args& a, const Segment& s, const Lds& lds) {
  constexpr uint32_t ROWS = HELD ? ROUTER_BATCH : router_rows<ONE>, EACH = ROUTER_COLS + 1;
  uint32_t t = thread_id();
  ROLLED
  for (uint32_t first = 0; first < (ONE ? 1u : a.rows); first += ROWS) {
    uint32_t rows = a.rows - first < ROWS ? a.rows - first : ROWS;
#if defined(TILE_MMA)
    if constexpr (HELD) add_router_rows<ROWS>(a, s, first, rows, lds);
#endif
    if constexpr (!HELD) {
      RouterSums sums[ROWS] = {};
      ROLLED
      for (uint32_t span = 0; span < a.k / 4; span += ROUTER_SPAN) add_router_span<ONE>(a, s, first, span, lds.x, sums);
      UNROLL
      for (uint32_t r = 0; r < ROWS; r++) {
        if (!ONE && r >= opaque(rows)) continue;
        lanes_sum<32>(sums[r].of);
        UNROLL
        for (uint32_t i = 0; i < EACH; i++) {
          if (tile_lane() == 0) lds.sums[(tile_group() * ROWS + r) * EACH + i] = sums[r].of[i];
        }
      }
    }
    block_sync();
    if (t < rows * EACH) {
      float sum = 0.0f;
      UNROLL
      for (uint32_t w = 0; w < wave_product::WAVES; w++) sum += lds.sums[w * ROWS * EACH + t];
      lds.partial[t] = sum;
    }
    block_sync();
    uint32_t r = t / EACH, c = t % EACH, column = s.block * ROUTER_COLS + c;
    bool mine = r < rows && c < ROUTER_COLS && column < s.n;
    if (mine) ((float*)s.y)[(uint64_t)(first + r) * s.y_stride + column] = lds.partial[t] * router_scale(a, lds, r);
    if (!HELD || first + ROWS < a.rows) store_h<ONE>(a, s, first, rows, lds);
    block_sync();
  }
}
DEVICE void store_held_h(const step_gemv_args& a, const Segment& s, const Lds& lds) {
  uint32_t first = (a.rows - 1u) / ROUTER_BATCH * ROUTER_BATCH;
  store_h<false>(a, s, first, a.rows - first, lds);
}

}  // namespace step
