// wave_rows.h - the wave product (wave_product.h) for several rows of x and weights with scales: the same bits, for targets with TILE_MMA and
// asynchronous copies. N: rows of a block. Weights come through the rings of wave_one.h, two tiles of 16 rows a wave. A SET is four rows of x, which
// cost a tile's 8 columns: column 2r of the weights' tile is the low plane of row r, column 2r + 1 the high one; work-item l has the sums of row l %
// 4 of each set, of the weights' rows l / 4 + 8 i. Sets without a row cost nothing.
// Planes of a wave: column c (plane c % 2 of row c / 2) starts at c * RUN_VALUES, its 16 bytes number u at place u ^ turned(c), so that what a matrix
// load or half a wave reads at once has banks of its own.
// Use as wave_product.h's: begin, product, for_outputs; LDS is rings_of<W, N>(lds_bytes()) of an LDS_KERNEL of LDS_BYTES.
#pragma once
#include "wave_one.h"

#if defined(TILE_MMA)
namespace wave_rows {

using namespace wave_product;
constexpr uint32_t SET = 4;
template <uint32_t N> constexpr uint32_t SETS = (N + SET - 1) / SET;

// The rings of a block and its x. SLOTS: rows of x that a wave has room for, of a run each.
struct Lds {
  wave_one::Lds one;  // ring, scales; x [WAVES][SLOTS] of both planes; x_sum, q4g64: [WAVES][SLOTS][RUN]
  uint16_t* x_scale;  // [WAVES][SLOTS][RUN], upper halves of f32
  uint32_t wave;      // whose x this wave uses
};
template <uint32_t SLOTS> constexpr uint32_t X_WAVE = SLOTS * 2 * RUN_VALUES;  // bytes
template <uint32_t SLOTS> constexpr uint32_t SIDES = WAVES * SLOTS * RUN;
template <class W> constexpr uint32_t SIDE_BYTES = W::FORMAT == WEIGHT_Q4G64 ? 6 : 2;
// The last 64: what is read of the sides of rows that there are not.
template <class W, uint32_t SLOTS>
constexpr uint32_t RINGS_BYTES = wave_one::RING_UNITS * 16 + WAVES * (COLS * 8 + X_WAVE<SLOTS>) + SIDES<SLOTS> * SIDE_BYTES<W> + 64;

template <class W, uint32_t SLOTS> DEVICE Lds rings_of(uint8_t* at) {
  words16 *ring = (words16*)at, *x = ring + wave_one::RING_UNITS;
  uint64_t* scales = (uint64_t*)(x + WAVES * X_WAVE<SLOTS> / 16);
  int32_t* x_sum = (int32_t*)(scales + WAVES * COLS);
  return {{ring, scales, x, nullptr, x_sum, nullptr, nullptr}, (uint16_t*)(x_sum + (W::FORMAT == WEIGHT_Q4G64 ? SIDES<SLOTS> : 0)), tile_group()};
}

// Of a product of N rows behind the rings: of a norm, lanes [WAVES][N][32], each work-item's sums of squares, then squares [WAVES][N].
template <class W, uint32_t N, bool NORM> constexpr uint32_t LDS_BYTES = RINGS_BYTES<W, N> + (NORM ? WAVES * N * 4 * (32 + 1) : 0);
template <class W, uint32_t N> DEVICE float* lanes_of(const Lds& lds) { return (float*)((uint8_t*)lds.one.ring + RINGS_BYTES<W, N>); }
template <class W, uint32_t N> DEVICE float* squares_of(const Lds& lds) { return lanes_of<W, N>(lds) + WAVES * N * 32; }
// The sums [N][COLS] of a wave, when all is added: at the start of its ring, or where the lanes' sums of squares were, if there is room for a norm.
template <class W, uint32_t N, bool NORM> DEVICE float* sums_of_wave(const Lds& lds, uint32_t wave) {
  if (!NORM) return (float*)lds.one.ring + wave * (wave_one::RING_BYTES / 4);
  return lanes_of<W, N>(lds) + wave * N * COLS;
}

// Where a wave's copies come from and go to: this work-item's part of row load_row(0) in the next stage, from there to rows load_row(1), ..; scales of
// row tile_lane() from the first group on; this work-item's place in slot 0.
struct Copies {
  const uint8_t* from;
  const uint16_t* scales;
  uint8_t* to;
  uint32_t further[3];
};
template <class W, uint32_t N> struct Walk {
  Copies copies;
  float sum[SETS<N>][4];
};

template <class W> DEVICE uint32_t turned(uint32_t column) { return W::FORMAT == WEIGHT_Q4G64 ? column % 4 * 2 : column % 8; }
template <class W, uint32_t SLOTS> DEVICE uint8_t* unit_of(const Lds& lds, uint32_t column, uint32_t unit) {
  return (uint8_t*)lds.one.x + lds.wave * X_WAVE<SLOTS> + column * RUN_VALUES + ((unit ^ turned<W>(column)) << 4);
}
template <uint32_t SLOTS> DEVICE uint32_t side_of(const Lds& lds, uint32_t slot) { return (lds.wave * SLOTS + slot) * RUN; }

template <class W, uint32_t N> DEVICE void clear(Walk<W, N>& walk) {
  UNROLL
  for (uint32_t set = 0; set < SETS<N>; set++) {
    UNROLL
    for (uint32_t i = 0; i < 4; i++) walk.sum[set][i] = 0.0f;
  }
}

// All copies of the next stage, of group `group`, into slot `slot`; of a run's scales with its first stage.
DEVICE void copy_stage(Copies& copies, const Weights& w, const Lds& lds, uint32_t stage, uint32_t group, uint32_t slot) {
  uint32_t groups = groups_in(w);
  if (group < groups) {
    uint8_t* to = copies.to + slot * wave_one::STAGE_BYTES<2>;
    copy16_line_async(to, copies.from);
    UNROLL
    for (uint32_t i = 0; i < 3; i++) copy16_line_async(to + 512 * (i + 1), copies.from + copies.further[i]);
    if (stage == 0) {
      const uint16_t* from = copies.scales + group;
      uint16_t* at = (uint16_t*)(lds.one.scales + tile_group() * COLS + tile_lane());
      if (w.pitch % RUN_VALUES == 0 && w.first % RUN_VALUES == 0 && group + RUN <= groups) {
        copy8_async(at, from);
      } else {
        ROLLED
        for (uint32_t i = 0; i < RUN && group + i < groups; i++) at[i] = from[i];
      }
    }
  }
  copies.from += GROUP;
  copies_commit();
}

// Of one matrix of q8g64. row(i): index of the row of weights of column i < 32. The first copies are on their way.
DEVICE uint32_t step_of(const Weights& w) { return w.wide ? WAVES : 1u; }
template <class W, uint32_t N, class Row> DEVICE void begin(Walk<W, N>& walk, const Weights& w, const Lds& lds, const Matrix& matrix, const Row& row) {
  static_assert(wave_one::GROUPS<W> == 1 && W::CHUNK == 16, "a stage is a group of 64 bytes");
  Copies& copies = walk.copies;
  uint32_t first = row(load_row(0)), run = w.wide ? tile_group() : 0u;
  copies.from = in_global(matrix.codes) + ((uint64_t)first * w.pitch + w.first + run * RUN_VALUES + 16 * part());
  UNROLL
  for (uint32_t i = 0; i < 3; i++) copies.further[i] = (row(load_row(i + 1)) - first) * w.pitch;
  copies.scales = in_global(matrix.scales) + ((uint64_t)row(tile_lane()) * (w.pitch / GROUP) + w.first / GROUP);
  copies.to = wave_one::stage_of<2>(lds.one, 0) + wave_one::place_in_stage(load_row(0), part());
  clear(walk);
  UNROLL
  for (uint32_t stage = 0; stage < wave_one::DEPTH<2>; stage++) copy_stage(copies, w, lds, stage, run * RUN + stage, stage);
}

// Adds the run's group `group`, number `index` of the stage at `stage`, for the rows whose x lies from slot `first` on.
template <class W, uint32_t N, uint32_t SLOTS>
DEVICE void add_group(Walk<W, N>& walk, const Lds& lds, const uint32_t (&scale)[4][2], uint32_t first, uint32_t rows, uint32_t group, uint32_t index,
                      const uint8_t* stage) {
  uint32_t lane = tile_lane(), a[2][2][4];  // [tile][step]
  UNROLL
  for (uint32_t tile = 0; tile < 2; tile++) {
    uint32_t row = 16 * tile + lane % 16;
    if constexpr (W::FORMAT == WEIGHT_Q8G64) {
      UNROLL
      for (uint32_t step = 0; step < 2; step++) load_matrices(a[tile][step], stage + wave_one::place_in_stage(row, 2 * step + lane / 16));
    } else {
      uint32_t codes[4];
      load_matrices(codes, stage + wave_one::place_in_stage(row, 2 * index + lane / 16));
      UNROLL
      for (uint32_t i = 0; i < 4; i++) {
        a[tile][0][i] = codes[i] & 0x0f0f0f0fu;
        a[tile][1][i] = (codes[i] >> 4) & 0x0f0f0f0fu;
      }
    }
  }
  float factor[4];
  UNROLL
  for (uint32_t i = 0; i < 4; i++) factor[i] = f16_value((uint16_t)(scale[i][group / 2] >> (16 * (group % 2))));
  UNROLL
  for (uint32_t set = 0; set < SETS<N>; set++) {
    if (set && set * SET >= rows) continue;
    uint32_t x[2][2];  // [step]
    if constexpr (W::FORMAT == WEIGHT_Q8G64) {
      uint32_t four[4];
      load_matrices(four, unit_of<W, SLOTS>(lds, 2 * first + 8 * set + lane % 8, 4 * group + lane / 8));
      UNROLL
      for (uint32_t i = 0; i < 4; i++) x[i / 2][i % 2] = four[i];
    } else {  // even values of half a group, odd ones
      UNROLL
      for (uint32_t half = 0; half < 2; half++) {
        uint32_t both[2];
        wave_one::load_pair(unit_of<W, SLOTS>(lds, 2 * first + 8 * set + lane / 4, 4 * group + 2 * half + lane % 4 / 2) + lane % 2 * 8, both);
        x[0][half] = both[0];
        x[1][half] = both[1];
      }
    }
    uint32_t side = side_of<SLOTS>(lds, first + SET * set + part()) + group;
    float x_scale = float_of((uint32_t)lds.x_scale[side] << 16);
    int32_t less = W::FORMAT == WEIGHT_Q4G64 ? lds.one.x_sum[side] : 0;
    UNROLL
    for (uint32_t tile = 0; tile < 2; tile++) {
      int32_t d[4] = {0, 0, 0, 0};
      UNROLL
      for (uint32_t step = 0; step < 2; step++) mma_16x8x32(d, a[tile][step], x[step]);
      UNROLL
      for (uint32_t half = 0; half < 2; half++) {
        uint32_t i = 2 * tile + half;
        int32_t all = (int32_t)((uint32_t)d[2 * half + 1] << 8) + d[2 * half] - less;
        walk.sum[set][i] = fma_f32((float)all, factor[i] * x_scale, walk.sum[set][i]);
      }
    }
  }
}

// This work-item's 8 values of the next WINDOW rows, and of the norm.
template <uint32_t WINDOW> struct Asked {
  uint32_t word[WINDOW][4], norm[4];
};
// Rows [first, first + WINDOW) of the run at the cursor. No branch: loads that are under way are waited for where ways join.
template <uint32_t WINDOW, class X>
DEVICE void ask(Asked<WINDOW>& asked, const Weights& w, const X& x, uint32_t first, uint32_t rows, const Cursor& c) {
  bool inside = c.matrix < w.matrices;
  uint32_t at = inside ? c.run * RUN_VALUES + 8 * tile_lane() : w.k, matrix = inside ? c.matrix : 0u;
  UNROLL
  for (uint32_t i = 0; i < WINDOW; i++) {
    bool there = first + i < rows;
    load_unit(x(matrix, there ? first + i : first), there ? at : w.k, w.k, asked.word[i]);
  }
}
// Rows [first, first + C) of run `run` of the only matrix. No branch: loads that are under way are waited for where ways join.
template <uint32_t C, class X> DEVICE void ask_rows(uint32_t (*word)[4], const Weights& w, const X& x, uint32_t first, uint32_t rows, uint32_t run) {
  uint32_t at = run * RUN_VALUES + 8 * tile_lane();
  UNROLL
  for (uint32_t i = 0; i < C; i++) {
    bool there = first + i < rows;
    load_unit(x(0, there ? first + i : 0u), there ? at : w.k, w.k, word[i]);
  }
}
template <uint32_t WINDOW> DEVICE void ask_norm(Asked<WINDOW>& asked, const Weights& w, const Operand& o, const Cursor& c) {
  if (o.norm) load_unit(o.norm, c.matrix < w.matrices ? c.run * RUN_VALUES + 8 * tile_lane() : w.k, w.k, asked.norm);
}

// A row of the run at the cursor goes to LDS, to slot `slot`; without a norm.
template <class W, uint32_t SLOTS> DEVICE void put_row(const uint32_t* word, const Lds& lds, uint32_t slot) {
  float v[8];
  UNROLL
  for (uint32_t i = 0; i < 8; i++) v[i] = unit_value(word, i);
  uint32_t unit = tile_lane() / 2, inside = tile_lane() % 2 * 8, side = side_of<SLOTS>(lds, slot) + tile_lane() / 8;
  uint8_t *low = unit_of<W, SLOTS>(lds, 2 * slot, unit) + inside, *high = unit_of<W, SLOTS>(lds, 2 * slot + 1, unit) + inside;
  put_codes<W>(low, high, lds.x_scale + side, lds.one.x_sum + side, v);
}

// C rows of the run at the cursor go to LDS, to the slots from `slot` on, side by side; with a norm the squares of a row's values are added to those at
// `lanes`, LANES_ROW further for each row.
constexpr uint32_t LANES_ROW = 32;
template <class W, uint32_t SLOTS, uint32_t C>
DEVICE void put_rows(const uint32_t (*word)[4], const uint32_t* norm, const Lds& lds, float* lanes, const Operand& o, uint32_t slot) {
  float v[C][8], square[C];
  uint32_t top[C];
  UNROLL
  for (uint32_t r = 0; r < C && o.norm; r++) square[r] = lanes[r * LANES_ROW];
  UNROLL
  for (uint32_t r = 0; r < C; r++) {
    UNROLL
    for (uint32_t i = 0; i < 8; i++) v[r][i] = unit_value(word[r], i);
  }
  if (o.norm) {
    UNROLL
    for (uint32_t i = 0; i < 8; i++) {
      UNROLL
      for (uint32_t r = 0; r < C; r++) {
        square[r] = fma_f32(v[r][i], v[r][i], square[r]);
        v[r][i] *= unit_value(norm, i);
      }
    }
    UNROLL
    for (uint32_t r = 0; r < C; r++) lanes[r * LANES_ROW] = square[r];
  }
  UNROLL
  for (uint32_t r = 0; r < C; r++) {
    float most = larger_magnitude(v[r][0], v[r][1]);
    UNROLL
    for (uint32_t i = 2; i < 8; i++) most = larger_magnitude(most, v[r][i]);
    top[r] = bits_of(most);
  }
  UNROLL
  for (uint32_t m = 1; m < 8; m <<= 1) {
    uint32_t other[C];
    UNROLL
    for (uint32_t r = 0; r < C; r++) other[r] = shuffle_xor(top[r], m);
    UNROLL
    for (uint32_t r = 0; r < C; r++) top[r] = other[r] > top[r] ? other[r] : top[r];
  }
  uint32_t unit = tile_lane() / 2, inside = tile_lane() % 2 * 8, side = side_of<SLOTS>(lds, slot) + tile_lane() / 8;
  UNROLL
  for (uint32_t r = 0; r < C; r++) {
    uint32_t column = 2 * (slot + r);
    uint8_t *low = unit_of<W, SLOTS>(lds, column, unit) + inside, *high = unit_of<W, SLOTS>(lds, column + 1, unit) + inside;
    put_codes_below<W>(low, high, lds.x_scale + side + r * RUN, lds.one.x_sum + side + r * RUN, v[r], top[r]);
  }
}
// All rows of run `run`, the first of which have been asked for; then those of run `later` are. Two rows at a time, for which others are asked
// when they are done; one that there is not has a slot too.
template <class W, uint32_t N, uint32_t WINDOW, class X>
DEVICE void stage(Asked<WINDOW>& asked, const Weights& w, const Lds& lds, uint32_t rows, const X& x, const Operand& o, uint32_t run, uint32_t later) {
  static_assert(N % 2 == 0 && WINDOW % 2 == 0, "rows come in pairs");
  float* lanes = lanes_of<W, N>(lds) + tile_group() * N * LANES_ROW + tile_lane();
  ROLLED
  for (uint32_t first = 0; first < rows; first += WINDOW) {
    UNROLL
    for (uint32_t i = 0; i < WINDOW; i += 2) {
      if (i && first + i >= rows) continue;
      put_rows<W, N, 2>(asked.word + i, asked.norm, lds, lanes + (first + i) * LANES_ROW, o, first + i);
      bool more = first + i + WINDOW < rows;
      if (N > WINDOW) ask_rows<2>(asked.word + i, w, x, more ? first + i + WINDOW : i, rows, more ? run : later);
    }
  }
  if (N <= WINDOW) ask_rows<WINDOW>(asked.word, w, x, 0, rows, later);
  ask_norm(asked, w, o, {0, later});
}

// x(matrix, r): row r < rows of x, k values. The sums are in LDS. WINDOW: rows of x that are asked for before the first of them is needed. NORM: there is
// room for one. kept: x and its norm are those of the product before, of one run a wave, and still there. next(): when the rings are free, may begin
// the product after this one.
template <uint32_t WINDOW, bool NORM, class W, uint32_t N, class X, class Next>
DEVICE void product(Walk<W, N>& walk, const Weights& w, const Lds& own, uint32_t rows, const X& x, const Operand& o, bool kept, const Next& next) {
  Lds lds = own;
  bool common = !w.wide && w.k <= RUN_VALUES && !o.norm;  // all waves have the same run: each makes the x of some rows
  if (common) lds.wave = 0;
  constexpr uint32_t DEPTH = wave_one::DEPTH<2>, STAGES = wave_one::STAGES<W>;
  float* of_lane = lanes_of<W, N>(lds) + tile_group() * N * 32 + tile_lane();
  if (NORM && o.norm && !kept) {
    for (uint32_t row = 0; row < rows + rows % 2; row++) of_lane[row * 32] = 0.0f;
  }
  uint32_t run = w.wide ? tile_group() : 0u;
  Asked<WINDOW> asked;
  if (kept) {
  } else if (common) {
    ROLLED
    for (uint32_t row = tile_group(); row < rows; row += WAVES) {
      ask_rows<1>(asked.word, w, x, row, rows, run);
      put_row<W, N>(asked.word[0], lds, row);
    }
    block_sync();
  } else {
    ask_rows<WINDOW>(asked.word, w, x, 0, rows, run);
    ask_norm(asked, w, o, {0, run});
  }
  ROLLED
  for (uint32_t left = turns_in(w); left; left--) {
    uint32_t before = run * RUN, groups = groups_in(w) > before ? groups_in(w) - before : 0u, scale[4][2];
    uint32_t later = run + step_of(w);
    if (!common && !kept) stage<W, N>(asked, w, lds, rows, x, o, run, later);
    run = later;
    UNROLL
    for (uint32_t stage = 0; stage < STAGES; stage++) {
      copies_wait<DEPTH - 1>();
      wave_sync();
      if (stage == 0) wave_one::load_scales<2>(lds.one.scales + tile_group() * COLS, scale);
      if (stage < groups) add_group<W, N, N>(walk, lds, scale, 0, rows, stage, 0, wave_one::stage_of<2>(lds.one, stage % DEPTH));
      wave_sync();
      if (stage + DEPTH == STAGES) walk.copies.from += (step_of(w) - 1u) * RUN_VALUES;
      bool there = stage + DEPTH < STAGES;  // of this run
      copy_stage(walk.copies, w, lds, (stage + DEPTH) % STAGES, (there ? before : later * RUN - STAGES) + stage + DEPTH, stage % DEPTH);
    }
  }
  if (NORM && o.norm && !kept) {
    ROLLED
    for (uint32_t row = 0; row < rows; row++) {
      float sum[1] = {of_lane[row * 32]};
      lanes_sum<32>(sum);
      if (tile_lane() == 0) squares_of<W, N>(lds)[tile_group() * N + row] = sum[0];
    }
  }
  wave_sync();
  float* sums = sums_of_wave<W, N, NORM>(lds, tile_group());
  UNROLL
  for (uint32_t set = 0; set < SETS<N>; set++) {
    UNROLL
    for (uint32_t i = 0; i < 4; i++) {
      if (!NORM || N % SET == 0 || SET * set + part() < N) sums[(SET * set + part()) * COLS + load_row(i)] = walk.sum[set][i];
    }
  }
  next();
  block_sync();
}

// The sum of an output, of this work-item's column, times the norm's scale; wave: whose columns they are, 0 if wide.
template <class W, uint32_t N, bool NORM>
DEVICE float sum_of(const Weights& w, const Lds& lds, uint32_t wave, uint32_t row, const Operand& o) {
  const float* of_row = squares_of<W, N>(lds) + wave * N + row;
  float sum = sums_of_wave<W, N, NORM>(lds, wave)[row * COLS + tile_lane()], squares = o.norm ? *of_row : 0.0f;
  if (w.wide) {
    UNROLL
    for (uint32_t i = 1; i < WAVES; i++) {
      sum += sums_of_wave<W, N, NORM>(lds, i)[row * COLS + tile_lane()];
      if (o.norm) squares += of_row[i * N];
    }
  }
  return o.norm ? sum * rsqrt_exact(squares / (float)w.k + o.eps) : sum * 1.0f;
}

// f(wave, column, row, sum) for each output.
template <class W, uint32_t N, bool NORM, class F> DEVICE void for_outputs(const Weights& w, const Lds& lds, uint32_t rows, const Operand& o, const F& f) {
  for_rows(w.wide, rows, [&](uint32_t wave, uint32_t row) { f(wave, tile_lane(), row, sum_of<W, N, NORM>(w, lds, wave, row, o)); });
}

}  // namespace wave_rows
#endif
