// gemv.h - rows of x times rows of a weight matrix in any format, for the few rows of a decode step. Sums in f32.
// Bits (docs/decisions/0004-step-graph.md): a CHUNK is what 16 bytes of weights hold; chunk c belongs to lane c % lanes. A lane adds its elements in
// ascending order by one chain of fma; quantised, a chain over the chunk from 0, then fma(chunk sum, scale, lane sum). The lanes are added by a
// butterfly. lanes = 32 where the product is wide, else 4: k >= LONG_K, of half a product (wave_product.h) the first half of its k. A row's bits
// depend on its own x, on w and on k alone.
// Use, in a block of THREADS work-items whose aligned groups of 32 lanes each walk over COLS rows of weights:
//   Walk<W, COLS, DEPTH, ALIGNED> walk;  set walk.codes[], walk.scales[];  begin(walk, k, wide, t);  the first DEPTH rounds are on their way
//   for each span of x:  stage(..);  block_sync();  [normalise(..);  block_sync();]  advance<T>(walk, x, span, sums);  block_sync() before the next
//   finish(walk, sums)                                                                           every lane of the column has the sums
// x lies in LDS as T: unit u (16 bytes) at place u ^ (u / 8 % 8), so that lanes which read several neighbouring units use all banks.
#pragma once
#include "portable.h"
#include "weight_format.h"

namespace gemv {

constexpr uint32_t THREADS = 256;
constexpr uint32_t LONG_K = 1024;
constexpr uint32_t X_BYTES = 32768;  // LDS for x
constexpr uint32_t X_UNITS = X_BYTES / 16;
constexpr uint32_t CHUNK_MAX = 32;

DEVICE uint32_t lanes_of(bool wide) { return wide ? 32u : 4u; }
// Groups of lanes in a block: each takes its own COLS rows of weights.
DEVICE uint32_t groups_of(bool wide) { return THREADS / lanes_of(wide); }

DEVICE uint32_t place_of(uint32_t unit) { return unit ^ ((unit >> 3) & 7u); }

// Elements of a row that are staged at once; the rows of a group share the LDS. A multiple of 32 lanes' chunks.
template <class T, uint32_t ROWS> constexpr uint32_t span_of = X_BYTES / (uint32_t)sizeof(T) / ROWS;

// Rounds of weights in flight; a span is a multiple of so many rounds of 32 chunks.
template <class T, uint32_t ROWS> constexpr uint32_t depth_of = sizeof(T) == 2 && ROWS == 1 ? 4 : 2;

template <class W, uint32_t COLS, uint32_t DEPTH, bool ALIGNED> struct Walk {
  const uint8_t* codes[COLS];    // first byte of each row of weights
  const uint16_t* scales[COLS];  // f16, quantised formats
  uint32_t k, chunks, lanes, lane;
  uint32_t word[DEPTH][COLS][4];
  uint16_t scale[DEPTH][COLS];
};

// Rows that 16-byte loads can read: whole chunks at multiples of 16 bytes.
template <class W> DEVICE bool rows_aligned(const void* codes, uint32_t k) { return (((uint64_t)codes | W::row_bytes(k)) & 15u) == 0; }

// Element loads where rows are not aligned; zeros past k.
template <class W> DEVICE void load_elements(const uint8_t* row, uint32_t k, uint32_t chunk, uint32_t* word) {
  constexpr uint32_t BYTES = 16 / W::CHUNK;
  UNROLL
  for (uint32_t i = 0; i < 4; i++) word[i] = 0;
  UNROLL
  for (uint32_t j = 0; j < W::CHUNK; j++) {
    uint32_t i = chunk * W::CHUNK + j;
    if (i < k) {
      if (BYTES == 4) word[j] = ((const uint32_t*)row)[i];
      else word[j / 2] |= (uint32_t)((const uint16_t*)row)[i] << (16 * (j % 2));
    }
  }
}

// Round `round` into slot `slot`. No branch on the lane: past the end a lane loads the last chunk, which nobody adds.
template <class W, uint32_t COLS, uint32_t DEPTH, bool ALIGNED>
DEVICE void load_round(Walk<W, COLS, DEPTH, ALIGNED>& walk, uint32_t slot, uint32_t round) {
  uint32_t c = round * walk.lanes + walk.lane, at = c < walk.chunks ? c : walk.chunks - 1u;
  UNROLL
  for (uint32_t col = 0; col < COLS; col++) {
    if (ALIGNED) {
      load16(in_global((const words16*)walk.codes[col] + at), walk.word[slot][col]);
    } else {
      load_elements<W>(walk.codes[col], walk.k, at, walk.word[slot][col]);
    }
    if (W::SCALED) walk.scale[slot][col] = *in_global(walk.scales[col] + at * W::CHUNK / WEIGHT_GROUP);
  }
}

// codes and scales are set. Starts the first DEPTH rounds.
template <class W, uint32_t COLS, uint32_t DEPTH, bool ALIGNED>
DEVICE void begin(Walk<W, COLS, DEPTH, ALIGNED>& walk, uint32_t k, bool wide, uint32_t t) {
  static_assert(!W::SCALED || ALIGNED, "quantised rows are multiples of 64 weights");
  walk.k = k;
  walk.chunks = (k + W::CHUNK - 1) / W::CHUNK;
  walk.lanes = lanes_of(wide);
  walk.lane = t % walk.lanes;
  UNROLL
  for (uint32_t slot = 0; slot < DEPTH; slot++) load_round(walk, slot, slot);
}

// Values of T that share a read, of the x that a chunk of W needs.
template <class T, class W> constexpr uint32_t piece_of = 16 / (uint32_t)sizeof(T) < W::CHUNK ? 16 / (uint32_t)sizeof(T) : W::CHUNK;

template <class T> struct value_reader;
template <> struct value_reader<float> : f32_weights {};
template <> struct value_reader<bf16> : bf16_weights {};

// Piece `piece` of chunk `chunk` of a staged row.
template <class T, class W> DEVICE void read_x(const words16* row, uint32_t chunk, uint32_t piece, float* v) {
  constexpr uint32_t PER_UNIT = 16 / sizeof(T);
  if constexpr (W::CHUNK >= PER_UNIT) {
    uint32_t word[4];
    load16(row + place_of(chunk * (W::CHUNK / PER_UNIT) + piece), word);
    value_reader<T>::expand(word, v);
  } else {  // f32 weights, bf16 x: half a unit
    const uint32_t* half = row[place_of(chunk / 2)].w + chunk % 2 * 2;
    UNROLL
    for (uint32_t i = 0; i < 2; i++) {
      v[2 * i] = float_of(half[i] << 16);
      v[2 * i + 1] = float_of(half[i] & 0xffff0000u);
    }
  }
}

// Adds the chunk in slot `slot` to the sums; `chunk` counts from the start of the span.
template <class T, uint32_t ROWS, class W, uint32_t COLS, uint32_t DEPTH, bool ALIGNED>
DEVICE void add_chunk(const Walk<W, COLS, DEPTH, ALIGNED>& walk, uint32_t slot, const words16* x, uint32_t chunk, float (&sums)[ROWS][COLS]) {
  constexpr uint32_t PIECE = piece_of<T, W>, PITCH = X_UNITS / ROWS;
  float part[ROWS][COLS];
  UNROLL
  for (uint32_t col = 0; col < COLS; col++) {
    UNROLL
    for (uint32_t r = 0; r < ROWS; r++) part[r][col] = W::SCALED ? 0.0f : sums[r][col];
  }
  UNROLL
  for (uint32_t piece = 0; piece < W::CHUNK / PIECE; piece++) {
    float w[COLS][PIECE];
    UNROLL
    for (uint32_t col = 0; col < COLS; col++) {
      UNROLL
      for (uint32_t j = 0; j < PIECE; j++) w[col][j] = W::value(walk.word[slot][col], piece * PIECE + j);
    }
    UNROLL
    for (uint32_t r = 0; r < ROWS; r++) {
      float v[PIECE];
      read_x<T, W>(x + r * PITCH, chunk, piece, v);
      UNROLL
      for (uint32_t j = 0; j < PIECE; j++) {
        UNROLL
        for (uint32_t col = 0; col < COLS; col++) part[r][col] = fma_f32(v[j], w[col][j], part[r][col]);
      }
    }
  }
  UNROLL
  for (uint32_t col = 0; col < COLS; col++) {
    float scale = W::SCALED ? f16_value(walk.scale[slot][col]) : 0.0f;
    UNROLL
    for (uint32_t r = 0; r < ROWS; r++) sums[r][col] = W::SCALED ? fma_f32(part[r][col], scale, sums[r][col]) : part[r][col];
  }
}

// Adds the span of x that starts at element `first` and is staged in x: span_of<T, ROWS> elements, or what is left of k. The slots are refilled
// across the border of spans.
template <class T, uint32_t ROWS, class W, uint32_t COLS, uint32_t DEPTH, bool ALIGNED>
DEVICE void advance(Walk<W, COLS, DEPTH, ALIGNED>& walk, const words16* x, uint32_t first, float (&sums)[ROWS][COLS]) {
  constexpr uint32_t SPAN = span_of<T, ROWS>;
  static_assert(SPAN % (32 * W::CHUNK * DEPTH) == 0, "a span is a whole number of turns of the slots");
  uint32_t per_round = walk.lanes * W::CHUNK, rounds = (walk.k + per_round - 1) / per_round;
  uint32_t begin = first / per_round, end = walk.k - first > SPAN ? begin + SPAN / per_round : rounds;
  for (uint32_t round = begin; round < end; round += DEPTH) {
    UNROLL
    for (uint32_t slot = 0; slot < DEPTH; slot++) {
      uint32_t c = (round + slot) * walk.lanes + walk.lane;
      if (c < walk.chunks) add_chunk<T, ROWS>(walk, slot, x, c - begin * walk.lanes, sums);
      if (round + slot + DEPTH < rounds) load_round(walk, slot, round + slot + DEPTH);
    }
  }
}

// Adds the lanes: afterwards every lane of a group has its columns' sums.
template <uint32_t ROWS, class W, uint32_t COLS, uint32_t DEPTH, bool ALIGNED>
DEVICE void finish(const Walk<W, COLS, DEPTH, ALIGNED>& walk, float (&sums)[ROWS][COLS]) {
  float flat[ROWS * COLS];
  UNROLL
  for (uint32_t i = 0; i < ROWS * COLS; i++) flat[i] = sums[i / COLS][i % COLS];
  if (walk.lanes == 32u) lanes_sum<32>(flat);
  else lanes_sum<4>(flat);
  UNROLL
  for (uint32_t i = 0; i < ROWS * COLS; i++) sums[i / COLS][i % COLS] = flat[i];
}

// Units of a row that a span takes: what is left of k, up to a whole chunk of any format.
template <class T, uint32_t ROWS> DEVICE uint32_t staged_units(uint32_t first, uint32_t k) {
  uint32_t left = k - first < span_of<T, ROWS> ? k - first : span_of<T, ROWS>;
  return (left + CHUNK_MAX - 1) / CHUNK_MAX * (CHUNK_MAX * (uint32_t)sizeof(T) / 16);
}

// Unit of a row of x from element `at` on, zeros past k.
template <class T> DEVICE void load_unit(const T* row, uint32_t at, uint32_t k, bool aligned, uint32_t* word) {
  constexpr uint32_t PER_UNIT = 16 / sizeof(T);
  if (aligned && at + PER_UNIT <= k) {
    load16(row + at, word);
  } else {
    UNROLL
    for (uint32_t i = 0; i < 4; i++) word[i] = 0;
    UNROLL
    for (uint32_t j = 0; j < PER_UNIT; j++) {
      if (at + j < k) {
        if (sizeof(T) == 4) word[j] = ((const uint32_t*)row)[at + j];
        else word[j / 2] |= (uint32_t)((const uint16_t*)row)[at + j] << (16 * (j % 2));
      }
    }
  }
}

// Rows of `k` values `stride` apart that 16-byte loads can read.
template <class T> DEVICE bool values_aligned(const T* x, uint64_t stride, uint32_t k) {
  return (((uint64_t)x | (stride * sizeof(T)) | ((uint64_t)k * sizeof(T))) & 15u) == 0;
}

// 16 aligned bytes of T as f32, and back.
template <class T> DEVICE void unit_values(const T* from, float* v) {
  uint32_t word[4];
  load16(from, word);
  value_reader<T>::expand(word, v);
}
DEVICE void store_unit(float* to, const float* v) {
  UNROLL
  for (uint32_t i = 0; i < 4; i++) ((words16*)to)->w[i] = bits_of(v[i]);
}
DEVICE void store_unit(bf16* to, const float* v) {
  UNROLL
  for (uint32_t i = 0; i < 4; i++) ((words16*)to)->w[i] = f32_to_bf16(v[2 * i]).bits | (uint32_t)f32_to_bf16(v[2 * i + 1]).bits << 16;
}

// Value c of a staged row.
template <class T> DEVICE T* staged_value(words16* row, uint32_t c) {
  constexpr uint32_t PER_UNIT = 16 / sizeof(T);
  return (T*)(row + place_of(c / PER_UNIT)) + c % PER_UNIT;
}

// Brings elements [first, first + span) of ROWS rows of x into LDS, zeros past k; rows are x_stride elements apart. block_sync before they are read.
// t: thread_id().
template <class T, uint32_t ROWS> DEVICE void stage(words16* lds, const T* x, uint64_t x_stride, uint32_t first, uint32_t k, uint32_t t) {
  constexpr uint32_t PER_UNIT = 16 / sizeof(T), FLIGHT = 4 / ROWS, PITCH = X_UNITS / ROWS;
  uint32_t units = staged_units<T, ROWS>(first, k);
  if (!values_aligned(x, x_stride, k)) {
    for (uint32_t r = 0; r < ROWS; r++) {
      for (uint32_t c = t; c < units * PER_UNIT; c += THREADS) {
        store_f32(staged_value<T>(lds + r * PITCH, c), first + c < k ? load_f32(x + r * x_stride + first + c) : 0.0f);
      }
    }
    return;
  }
  for (uint32_t u = t; u < units; u += THREADS * FLIGHT) {
    uint32_t word[FLIGHT][ROWS][4];
    UNROLL
    for (uint32_t j = 0; j < FLIGHT; j++) {  // no branch: a unit past k is loaded from the row's start and replaced by zeros
      uint32_t at = first + (u + j * THREADS) * PER_UNIT;
      UNROLL
      for (uint32_t r = 0; r < ROWS; r++) load16(in_global(x + r * x_stride + (at < k ? at : 0u)), word[j][r]);
    }
    UNROLL
    for (uint32_t j = 0; j < FLIGHT; j++) {
      uint32_t unit = u + j * THREADS;
      bool inside = first + unit * PER_UNIT < k;
      if (unit < units) {
        UNROLL
        for (uint32_t r = 0; r < ROWS; r++) {
          UNROLL
          for (uint32_t i = 0; i < 4; i++) lds[r * PITCH + place_of(unit)].w[i] = inside ? word[j][r][i] : 0u;
        }
      }
    }
  }
}

// Sums of N values over the block in the order of block_sum, the same in every work-item. `lds`: N * THREADS / WAVE values.
template <int N> DEVICE void block_sums(float (&v)[N], float* lds) {
  if constexpr (WAVE == 32) {
    lanes_sum<32>(v);
  } else {
    UNROLL
    for (int i = 0; i < N; i++) v[i] = wave_sum(v[i]);
  }
  UNROLL
  for (int i = 0; i < N; i++) {
    if (lane_id() == 0) lds[i * (THREADS / WAVE) + thread_id() / WAVE] = v[i];
  }
  block_sync();
  UNROLL
  for (int i = 0; i < N; i++) {
    v[i] = lds[i * (THREADS / WAVE)];
    UNROLL
    for (uint32_t w = 1; w < THREADS / WAVE; w++) v[i] += lds[i * (THREADS / WAVE) + w];
  }
  block_sync();
}

// 1 / sqrt(mean(x^2) + eps) of ROWS rows, the bits of rms_norm. From LDS where a row fits one span (staged, and block_sync passed), else from x.
template <class T, uint32_t ROWS>
DEVICE void norm_scales(words16* lds, const T* x, uint64_t x_stride, uint32_t k, float eps, float* partial, float (&scale)[ROWS], uint32_t t) {
  constexpr uint32_t PITCH = X_UNITS / ROWS;
  bool staged = k <= span_of<T, ROWS>;
  UNROLL
  for (uint32_t r = 0; r < ROWS; r++) {
    float sum = 0;
    if (staged) {
      for (uint32_t c = t; c < k; c += THREADS) {
        float v = load_f32(staged_value<T>(lds + r * PITCH, c));
        sum = fma_f32(v, v, sum);
      }
    } else {
      for (uint32_t c = t; c < k; c += THREADS) {
        float v = load_f32(x + r * x_stride + c);
        sum = fma_f32(v, v, sum);
      }
    }
    scale[r] = sum;
  }
  block_sums(scale, partial);
  UNROLL
  for (uint32_t r = 0; r < ROWS; r++) scale[r] = rsqrt_exact(scale[r] / (float)k + eps);
}

// h = T(weight * T(x * scale)) in place on the staged span; also to h where it is not null. block_sync before and after.
template <class T, uint32_t ROWS>
DEVICE void normalise(words16* lds, const T* weight, const float (&scale)[ROWS], uint32_t first, uint32_t k, T* h, uint64_t h_stride, uint32_t t) {
  constexpr uint32_t PER_UNIT = 16 / sizeof(T), PITCH = X_UNITS / ROWS;
  uint32_t values = k - first < span_of<T, ROWS> ? k - first : span_of<T, ROWS>;
  if (!values_aligned(weight, 0, k) || (h && !values_aligned(h, h_stride, k))) {
    for (uint32_t c = t; c < values; c += THREADS) {
      float w = load_f32(weight + first + c);
      UNROLL
      for (uint32_t r = 0; r < ROWS; r++) {
        T* value = staged_value<T>(lds + r * PITCH, c);
        float v = w * rounded<T>::of(load_f32(value) * scale[r]);
        store_f32(value, v);
        if (h) store_f32(h + r * h_stride + first + c, v);
      }
    }
    return;
  }
  for (uint32_t u = t; u < values / PER_UNIT; u += THREADS) {
    float w[PER_UNIT], v[PER_UNIT];
    unit_values(weight + first + u * PER_UNIT, w);
    UNROLL
    for (uint32_t r = 0; r < ROWS; r++) {
      T* unit = staged_value<T>(lds + r * PITCH, u * PER_UNIT);
      unit_values((const T*)unit, v);
      UNROLL
      for (uint32_t j = 0; j < PER_UNIT; j++) v[j] = w[j] * rounded<T>::of(v[j] * scale[r]);
      store_unit(unit, v);
      if (h) store_unit(h + r * h_stride + first + u * PER_UNIT, v);
    }
  }
}

}  // namespace gemv
