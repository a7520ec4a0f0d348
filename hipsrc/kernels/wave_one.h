// wave_one.h - the wave product (wave_product.h) for one row of x and weights with scales: the same bits in less registers and instructions, for
// targets with TILE_MMA and asynchronous copies. Elsewhere the kernels for one row are those for several.
// Weights go to LDS without passing registers: each wave has a ring of stages, 64 bytes of each of its rows of weights, and the copies of a stage
// are waited for alone, while those after it are on their way (loads to registers wait for one another). Two stages of a row are a line of 128 bytes,
// which memory is asked for at once: copies of half lines reach 65 % of its bandwidth. A stage is one group of q8g64, two of q4g64. A wave has T tiles
// of 16 rows: 2, or 1 in launches that would have too few blocks. In a stage row r starts at 64 r, and its 16 bytes number c lie at place
// c ^ (r / 2 % 4): eight rows of one c, which one matrix load reads, have banks of their own. Column n of a tile is plane n % 2 of x, so that
// work-item l has the sums of rows l / 4 + 8 i, as have the others of l / 4.
// Use as wave_product.h's: begin, product, for_output.
#pragma once
#include "wave_product.h"

#if defined(TILE_MMA)
namespace wave_one {

using namespace wave_product;

template <uint32_t T> constexpr uint32_t DEPTH = 4 / T;
template <uint32_t T> constexpr uint32_t STAGE_BYTES = T * 1024;
template <uint32_t T> constexpr uint32_t TILE_ROWS = 16 * T;
constexpr uint32_t RING_BYTES = 4096, RING_UNITS = WAVES * RING_BYTES / 16;  // of a wave
constexpr uint32_t X_WAVE = 2 * RUN_VALUES, X_UNITS = WAVES * X_WAVE / 16;      // bytes of both planes of a run
template <class W> constexpr uint32_t GROUPS = W::FORMAT == WEIGHT_Q4G64 ? 2 : 1;  // of a stage
template <class W> constexpr uint32_t STAGES = RUN / GROUPS<W>;                    // of a run
template <class W, uint32_t T> constexpr uint32_t RUNS = DEPTH<T> > STAGES<W> ? DEPTH<T> / STAGES<W> : 1u;  // in the ring at once

// The block's LDS.
struct Lds {
  words16* ring;     // [RING_UNITS]
  uint64_t* scales;  // [WAVES * COLS]: the four scales of a row in a run; of two runs where a wave has 16 rows
  words16* x;        // [X_UNITS]
  float* x_scale;    // [WAVES * RUN]
  int32_t* x_sum;    // [WAVES * RUN], q4g64
  float* sums;       // [WAVES * COLS]
  float* squares;    // [WAVES]
};

template <class W, uint32_t T = 2> struct Walk {
  static_assert(DEPTH<T> * STAGE_BYTES<T> == RING_BYTES, "the ring of a wave");
  static_assert(RUNS<W, T> * TILE_ROWS<T> <= COLS, "the scales of a run are read before those of a later one take their place");
  uint32_t at[2 * T];  // where this work-item's 16 bytes of a row's first stage lie, in 16 bytes
  uint32_t scale_at;       // the scales of row tile_lane() % TILE_ROWS<T>
  Cursor cursor;           // of the next copies
  Matrix from;
  float sum[2 * T];
};

template <class W> constexpr uint32_t group_units = GROUP * 4 / W::CHUNK / 4;  // 16 bytes each

template <uint32_t T> DEVICE uint8_t* stage_of(const Lds& lds, uint32_t slot) {
  return (uint8_t*)lds.ring + tile_group() * RING_BYTES + slot * STAGE_BYTES<T>;
}
DEVICE uint32_t place_in_stage(uint32_t row, uint32_t unit) { return row * 64 + ((unit ^ (row / 2 % 4)) << 4); }

// Where the wave has the scales of a run whose stages start at slot `slot`.
template <class W, uint32_t T> DEVICE uint64_t* scales_of(const Lds& lds, uint32_t slot) {
  return lds.scales + tile_group() * COLS + (RUNS<W, T> == 1 ? 0u : slot / STAGES<W> * TILE_ROWS<T>);
}

// All copies of stage `stage` of the cursor's run into slot `slot`, and of the scales of the run with its first one.
template <class W, uint32_t T> DEVICE void copy_stage(const Walk<W, T>& walk, const Weights& w, const Lds& lds, uint32_t stage, uint32_t slot) {
  uint32_t before = walk.cursor.run * RUN, groups = groups_in(w);
  bool inside = walk.cursor.matrix < w.matrices;
  if (inside && before + stage * GROUPS<W> + part() / group_units<W> < groups) {
    const uint8_t* from = in_global(walk.from.codes) + (uint64_t)(before * group_units<W> + stage * 4) * 16;
    UNROLL
    for (uint32_t i = 0; i < 2 * T; i++) {
      copy16_line_async(stage_of<T>(lds, slot) + place_in_stage(load_row(i), part()), from + (uint64_t)walk.at[i] * 16);
    }
  }
  if (stage == 0 && inside) {
    const uint16_t* from = in_global(walk.from.scales) + (uint64_t)(walk.scale_at + before);
    uint16_t* to = (uint16_t*)(scales_of<W, T>(lds, slot) + tile_lane() % TILE_ROWS<T>);
    if (w.pitch % RUN_VALUES == 0 && w.first % RUN_VALUES == 0 && before + RUN <= groups) {
      copy8_async(to, from);
    } else {
      ROLLED
      for (uint32_t i = 0; i < RUN && before + i < groups; i++) to[i] = from[i];
    }
  }
  copies_commit();
}

// row(i): index of the row of weights of column i < TILE_ROWS<T>; at(i): matrix i < w.matrices.
template <class W, uint32_t T, class At, class Row> DEVICE void place(Walk<W, T>& walk, const Weights& w, const At& at, const Row& row) {
  UNROLL
  for (uint32_t i = 0; i < 2 * T; i++) {
    walk.at[i] = row(load_row(i)) * (w.pitch / GROUP * group_units<W>) + w.first / GROUP * group_units<W> + part();
    walk.sum[i] = 0.0f;
  }
  walk.scale_at = row(tile_lane() % TILE_ROWS<T>) * (w.pitch / GROUP) + w.first / GROUP;
  walk.cursor = first_run(w);
  walk.from = at(walk.cursor.matrix < w.matrices ? walk.cursor.matrix : 0u);
}

// The copies go on with the run after the cursor's.
template <class W, uint32_t T, class At> DEVICE void next_copies(Walk<W, T>& walk, const Weights& w, const At& at) {
  next_run(walk.cursor, w);
  if (w.matrices > 1u && walk.cursor.matrix < w.matrices) walk.from = at(walk.cursor.matrix);
}

// The first copies into slot `slot`, of all slots in turn.
template <class W, uint32_t T, class At> DEVICE void fill(Walk<W, T>& walk, const Weights& w, const Lds& lds, const At& at, uint32_t slot) {
  uint32_t stage = slot % STAGES<W>;
  if (slot && stage == 0) next_copies(walk, w, at);
  copy_stage(walk, w, lds, stage, slot);
}

// As `place`; the first copies are on their way.
template <class W, uint32_t T, class At, class Row>
DEVICE void begin(Walk<W, T>& walk, const Weights& w, const Lds& lds, const At& at, const Row& row) {
  place(walk, w, at, row);
  UNROLL
  for (uint32_t slot = 0; slot < DEPTH<T>; slot++) fill(walk, w, lds, at, slot);
}

// The four scales of rows l / 4 + 8 i, two a word.
template <uint32_t T> DEVICE void load_scales(const uint64_t* scales, uint32_t (&scale)[2 * T][2]) {
  UNROLL
  for (uint32_t i = 0; i < 2 * T; i++) {
    uint64_t four = scales[load_row(i)];
    scale[i][0] = (uint32_t)four;
    scale[i][1] = (uint32_t)(four >> 32);
  }
}

DEVICE void load_pair(const uint8_t* from, uint32_t* to) {
  uint64_t both = *(const uint64_t*)from;
  to[0] = (uint32_t)both;
  to[1] = (uint32_t)(both >> 32);
}

// Adds the run's group `group`, number `index` of the stage at `stage`.
template <class W, uint32_t T>
DEVICE void add_group(Walk<W, T>& walk, const Lds& lds, const uint32_t (&scale)[2 * T][2], uint32_t group, uint32_t index, const uint8_t* stage) {
  const uint8_t* planes = (const uint8_t*)lds.x + tile_group() * X_WAVE + group * GROUP;
  uint32_t lane = tile_lane(), x[4];
  if constexpr (W::FORMAT == WEIGHT_Q8G64) {
    load_matrices(x, planes + lane % 2 * RUN_VALUES + lane / 8 * 16);
  } else {
    const uint8_t* plane = planes + lane / 4 % 2 * RUN_VALUES + lane % 4 * 8;
    load_pair(plane, x);           // even values of the first half of the group, odd ones
    load_pair(plane + 32, x + 2);  // of the second
  }
  float x_scale = lds.x_scale[tile_group() * RUN + group];
  int32_t less = W::FORMAT == WEIGHT_Q4G64 ? lds.x_sum[tile_group() * RUN + group] : 0;
  UNROLL
  for (uint32_t tile = 0; tile < T; tile++) {
    int32_t d[4] = {0, 0, 0, 0};
    uint32_t row = 16 * tile + lane % 16;
    if constexpr (W::FORMAT == WEIGHT_Q8G64) {
      UNROLL
      for (uint32_t step = 0; step < 2; step++) {
        uint32_t a[4];
        load_matrices(a, stage + place_in_stage(row, 2 * step + lane / 16));
        mma_16x8x32(d, a, x + 2 * step);
      }
    } else {
      uint32_t a[4], codes[4];
      load_matrices(a, stage + place_in_stage(row, 2 * index + lane / 16));
      UNROLL
      for (uint32_t odd = 0; odd < 2; odd++) {
        uint32_t b[2] = {x[odd], x[2 + odd]};
        UNROLL
        for (uint32_t i = 0; i < 4; i++) codes[i] = (a[i] >> (4 * odd)) & 0x0f0f0f0fu;
        mma_16x8x32(d, codes, b);
      }
    }
    UNROLL
    for (uint32_t half = 0; half < 2; half++) {
      uint32_t i = 2 * tile + half;
      int32_t all = (int32_t)((uint32_t)d[2 * half + 1] << 8) + d[2 * half] - less;
      walk.sum[i] = fma_f32((float)all, f16_value((uint16_t)(scale[i][group / 2] >> (16 * (group % 2)))) * x_scale, walk.sum[i]);
    }
  }
}

// This work-item's 8 values of a run, and what they are multiplied by.
struct Asked {
  uint32_t word[4], norm[4];
  float factor;
};
template <class X> DEVICE void ask(Asked& asked, const Weights& w, const X& x, const Operand& o, const Cursor& c) {
  bool inside = c.matrix < w.matrices;
  uint32_t at = inside ? c.run * RUN_VALUES + 8 * tile_lane() : w.k, matrix = inside ? c.matrix : 0u;
  load_unit(x(matrix), at, w.k, asked.word);
  if (o.norm) load_unit(o.norm, at, w.k, asked.norm);
  asked.factor = o.weights ? o.weights[matrix] : 1.0f;
}

// They go to LDS; returns `square` with their squares added.
template <class W> DEVICE float put(const Asked& asked, const Lds& lds, const Operand& o, float square) {
  float v[8];
  UNROLL
  for (uint32_t i = 0; i < 8; i++) {
    v[i] = unit_value(asked.word, i);
    if (o.norm) {
      square = fma_f32(v[i], v[i], square);
      v[i] *= unit_value(asked.norm, i);
    }
    if (o.weights) v[i] *= asked.factor;
  }
  uint8_t* low = (uint8_t*)lds.x + tile_group() * X_WAVE + 8 * tile_lane();
  uint32_t side = tile_group() * RUN + tile_lane() / 8;
  put_codes<W>(low, low + RUN_VALUES, lds.x_scale + side, lds.x_sum + side, v);
  return square;
}

// The sums of this wave into its row of LDS; block_sync before others read them. x(matrix): k values. next(slot): makes the first copies of the
// product after this one into slot `slot` of the ring, which goes on without a pause, of all slots in turn; or commits none.
template <class W, uint32_t T, class At, class X, class Next>
DEVICE void add_runs(Walk<W, T>& walk, const Weights& w, const At& at, const Lds& lds, const X& x, const Operand& o, const Next& next) {
  Cursor c = first_run(w);  // of x; the copies are ahead of it
  Asked asked;
  ask(asked, w, x, o, c);
  float square = 0.0f;
  constexpr bool AHEAD = RUNS<W, T> > 1u;  // the copies are of the run after the next one
  uint32_t first = 0;                      // slot of the run's first stage
  uint32_t turns = turns_in(w);
  ROLLED
  for (uint32_t left = turns ? turns : 1u; left; left--) {  // one at least, for `next`
    square = put<W>(asked, lds, o, square);
    uint32_t groups = c.matrix < w.matrices ? groups_in(w) - c.run * RUN : 0u, scale[2 * T][2];
    next_run(c, w);
    ask(asked, w, x, o, c);
    UNROLL
    for (uint32_t stage = 0; stage < STAGES<W>; stage++) {
      copies_wait<DEPTH<T> - 1>();
      wave_sync();
      if (stage == 0) load_scales<T>(scales_of<W, T>(lds, first), scale);
      UNROLL
      for (uint32_t i = 0; i < GROUPS<W>; i++) {
        uint32_t group = stage * GROUPS<W> + i;
        if (group < groups) add_group(walk, lds, scale, group, i, stage_of<T>(lds, AHEAD ? first + stage : stage % DEPTH<T>));
      }
      wave_sync();
      if (AHEAD && stage == 0) next_copies(walk, w, at);
      if (!AHEAD && stage + DEPTH<T> == STAGES<W>) {
        walk.cursor = c;
        if (w.matrices > 1u && c.matrix < w.matrices) walk.from = at(c.matrix);
      }
      uint32_t later = (stage + DEPTH<T>) % STAGES<W>;
      if (!AHEAD && later < DEPTH<T> && left == 1u) next(later);
      else copy_stage(walk, w, lds, later, AHEAD ? first + stage : stage % DEPTH<T>);
    }
    if (AHEAD) first ^= STAGES<W>;
  }
  if (o.norm) {
    float sum[1] = {square};
    lanes_sum<32>(sum);
    if (tile_lane() == 0) lds.squares[tile_group()] = sum[0];
  }
  UNROLL
  for (uint32_t i = 0; i < 2 * T; i++) {
    if (part() == 0) lds.sums[tile_group() * COLS + load_row(i)] = walk.sum[i];
  }
}

template <class W, uint32_t T, class At, class X>
DEVICE void product(Walk<W, T>& walk, const Weights& w, const At& at, const Lds& lds, const X& x, const Operand& o) {
  add_runs(walk, w, at, lds, x, o, [](uint32_t) { copies_commit(); });
  block_sync();
}

// The sum of column tile_lane() % TILE_ROWS<T>, of wave `wave`, or of all where wide; times the norm's scale.
template <uint32_t T = 2> DEVICE float sum_of(const Weights& w, const Lds& lds, uint32_t wave, const Operand& o) {
  float sum = lds.sums[wave * COLS + tile_lane() % TILE_ROWS<T>], squares = o.norm ? lds.squares[wave] : 0.0f;
  if (w.wide) {
    UNROLL
    for (uint32_t i = 1; i < WAVES; i++) {
      sum += lds.sums[i * COLS + tile_lane() % TILE_ROWS<T>];
      if (o.norm) squares += lds.squares[i];
    }
  }
  return o.norm ? sum * rsqrt_exact(squares / (float)w.k + o.eps) : sum * 1.0f;
}

// f(wave, column, row, sum) for each output, row 0. T = 1: twice.
template <uint32_t T = 2, class F> DEVICE void for_outputs(const Weights& w, const Lds& lds, const Operand& o, const F& f) {
  if (w.wide && tile_group()) return;
  f(tile_group(), tile_lane() % TILE_ROWS<T>, 0u, sum_of<T>(w, lds, tile_group(), o));
}

}  // namespace wave_one
#endif
