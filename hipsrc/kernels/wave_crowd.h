// wave_crowd.h - the products of wave_rows.h, q8g64, without a norm, in blocks of TEAMS teams of 8 waves: the same bits. A team has 32 columns. Wave
// w of each team has the runs i with i % 8 == w; these waves make the x of a run together, each a part of its rows, while they multiply the run
// before, so that x is read and made once for TEAMS * 32 columns and waits for nobody. For targets with TILE_MMA.
// Rings, tiles and planes of x are those of wave_rows.h; a stage is a group, in which a wave also makes one row of x. One loop for all stages, its
// addresses made by hand from few registers: 24 waves share a multiprocessor.
#pragma once
#include "wave_rows.h"

#if defined(TILE_MMA)
namespace wave_crowd {

using namespace wave_product;
using W = q8g64_weights;
constexpr uint32_t TEAMS = 3, THREADS = TEAMS * wave_product::THREADS, CROWD = TEAMS * WAVES;
constexpr uint32_t STAGES = wave_one::STAGES<W>, SET = wave_rows::SET;
constexpr uint32_t ROWS_MAX = TEAMS * STAGES;
static_assert(wave_one::GROUPS<W> == 1 && STAGES == 4 && W::CHUNK == 16, "a stage, a group and a row of x");
constexpr uint32_t DEPTH = wave_one::DEPTH<2>, STAGE_BYTES = wave_one::STAGE_BYTES<2>;

DEVICE uint32_t team() { return tile_group() / WAVES; }
DEVICE uint32_t lead() { return tile_group() % WAVES; }

// LDS, from its start on: the rings and the scales of all waves; x of the runs at hand and of those after them in turn, and its scales; sums of the
// waves. N: rows of x.
constexpr uint32_t SCALES_AT = CROWD * wave_one::RING_BYTES, X_AT = SCALES_AT + CROWD * COLS * 8;
template <uint32_t N> constexpr uint32_t SIDE_AT = X_AT + 2 * WAVES * wave_rows::X_WAVE<N>;
template <uint32_t N> constexpr uint32_t SUMS_AT = SIDE_AT<N> + 2 * WAVES * N * RUN * 2 + 64;  // the last 64: of rows that there are not
template <uint32_t N> constexpr uint32_t LDS_BYTES = SUMS_AT<N> + CROWD * N * COLS * 4;

// Where this wave's copies come from: the next stage of this work-item's part of row load_row(0), from there to rows load_row(1), ..; scales of row
// tile_lane() from the first group on.
struct Copies {
  const uint8_t* from;
  const uint16_t* scales;
  uint32_t further[3];
};
template <class Row> DEVICE Copies copies_of(const Weights& w, const Matrix& matrix, uint32_t run, const Row& row) {
  Copies copies;
  uint32_t first = row(load_row(0));
  copies.from = in_global(matrix.codes) + ((uint64_t)first * w.pitch + w.first + run * RUN_VALUES + 16 * part());
  UNROLL
  for (uint32_t i = 0; i < 3; i++) copies.further[i] = ((row(load_row(i + 1)) - first) * w.pitch);
  copies.scales = in_global(matrix.scales) + ((uint64_t)row(tile_lane()) * (w.pitch / GROUP) + w.first / GROUP);
  return copies;
}
// All copies of the next stage, of group `group`, to `to`, this work-item's place in the slot; of a run's scales with its first stage.
DEVICE void copy_stage(Copies& copies, const Weights& w, uint8_t* to, uint64_t* scales, bool inside, uint32_t stage, uint32_t group) {
  uint32_t groups = groups_in(w);
  if (inside && group < groups) {
    copy16_line_async(to, copies.from);
    UNROLL
    for (uint32_t i = 0; i < 3; i++) copy16_line_async(to + 512 * (i + 1), copies.from + copies.further[i]);
    if (stage == 0) {
      const uint16_t* from = copies.scales + group;
      if (w.pitch % RUN_VALUES == 0 && w.first % RUN_VALUES == 0 && group + RUN <= groups) {
        copy8_async(scales + tile_lane(), from);
      } else {
        ROLLED
        for (uint32_t i = 0; i < RUN && group + i < groups; i++) ((uint16_t*)(scales + tile_lane()))[i] = from[i];
      }
    }
  }
  copies.from += GROUP;
  copies_commit();
}

// Adds a group of a run. stage, x, side: where this work-item reads its weights of the first tile, its x and its sides.
template <uint32_t N>
DEVICE void add_group(float (&sum)[wave_rows::SETS<N>][4], uint8_t* memory, uint32_t stage, const uint8_t* x, const uint16_t* side,
                      const float (&factor)[4], uint32_t rows) {
  uint32_t a[2][2][4];  // [tile][step]
  UNROLL
  for (uint32_t step = 0; step < 2; step++) {
    UNROLL
    for (uint32_t tile = 0; tile < 2; tile++) load_matrices(a[tile][step], memory + (stage ^ (32 * step)) + 1024 * tile);
  }
  UNROLL
  for (uint32_t set = 0; set < wave_rows::SETS<N>; set++) {
    if (set && set * SET >= rows) continue;
    uint32_t b[4];
    load_matrices(b, x + set * (SET * 2 * RUN_VALUES));
    float x_scale = float_of((uint32_t)side[set * SET * RUN] << 16);
    UNROLL
    for (uint32_t tile = 0; tile < 2; tile++) {
      int32_t d[4] = {0, 0, 0, 0};
      UNROLL
      for (uint32_t step = 0; step < 2; step++) mma_16x8x32(d, a[tile][step], b + 2 * step);
      UNROLL
      for (uint32_t half = 0; half < 2; half++) {
        uint32_t i = 2 * tile + half;
        int32_t all = (int32_t)((uint32_t)d[2 * half + 1] << 8) + d[2 * half];
        sum[set][i] = fma_f32((float)all, factor[i] * x_scale, sum[set][i]);
      }
    }
  }
}

// This work-item's 8 values of row `slot` of a run go to its x, where they would be at `at` in row 0, and its sides; with a norm the squares of its
// values are added to `square`.
DEVICE void put_row(const wave_rows::Asked<1>& asked, uint8_t* memory, uint32_t at, uint16_t* side, float& square, const Operand& o, uint32_t slot) {
  float v[8];
  UNROLL
  for (uint32_t i = 0; i < 8; i++) v[i] = unit_value(asked.word[0], i);
  if (o.norm) {
    UNROLL
    for (uint32_t i = 0; i < 8; i++) {
      square = fma_f32(v[i], v[i], square);
      v[i] *= unit_value(asked.norm, i);
    }
  }
  at = (at ^ 2 * slot % 8 << 4) + 2 * slot * RUN_VALUES;
  put_codes<W>(memory + at, memory + (at ^ 16) + RUN_VALUES, side + slot * RUN + tile_lane() / 8, (int32_t*)nullptr, v);
}
DEVICE void put_row(const wave_rows::Asked<1>& asked, uint8_t* memory, uint32_t at, uint16_t* side, uint32_t slot) {
  float none;
  put_row(asked, memory, at, side, none, {}, slot);
}

// Rows that a wave makes of `rows`: team(), team() + TEAMS, ..
DEVICE uint32_t mine_of(uint32_t rows) { return rows > team() ? (rows - team() + TEAMS - 1) / TEAMS : 0u; }

// x of the first run, at c, from row_of_x(matrix, r): row r < mine of this wave's.
template <class X>
DEVICE void put_first(const Weights& w, uint8_t* memory, uint32_t at, uint16_t* side, uint32_t mine, const X& row_of_x, const Cursor& c) {
  wave_rows::Asked<STAGES> first;
  wave_rows::Asked<1> asked;
  wave_rows::ask(first, w, row_of_x, 0, mine, c);
  ROLLED
  for (uint32_t r = 0; r < mine; r++) {
    UNROLL
    for (uint32_t j = 0; j < 4; j++) asked.word[0][j] = first.word[0][j];
    put_row(asked, memory, at, side, team() + TEAMS * r);
    UNROLL
    for (uint32_t i = 0; i + 1u < STAGES; i++) {
      UNROLL
      for (uint32_t j = 0; j < 4; j++) first.word[i][j] = first.word[i + 1][j];
    }
  }
}

// A wave's sums of 32 columns go to `at`, [WAVES][N][COLS] of its team.
template <uint32_t N> DEVICE void store_sums(float* at, const float (&sum)[wave_rows::SETS<N>][4]) {
  float* of_wave = at + lead() * N * COLS;
  UNROLL
  for (uint32_t set = 0; set < wave_rows::SETS<N>; set++) {
    UNROLL
    for (uint32_t i = 0; i < 4; i++) {
      if (SET * set + part() < N) of_wave[(SET * set + part()) * COLS + load_row(i)] = sum[set][i];
    }
  }
}

// The sum of row r of this work-item's column.
template <uint32_t N> DEVICE float total_of(const float* at, uint32_t r) {
  float total = at[r * COLS + tile_lane()];
  UNROLL
  for (uint32_t i = 1; i < WAVES; i++) total += at[(i * N + r) * COLS + tile_lane()];
  return total;
}

// row(i): index of the row of weights of column i < 32 of this team's; x(r): row r < rows <= N of x. Then sum(row) is an output of this work-item's
// column, where all work-items come: out(sum). Waits for the launch before.
template <uint32_t N, class Row, class X, class Out>
DEVICE void products(const Weights& w, const Matrix& matrix, uint8_t* memory, uint32_t rows, const Row& row, const X& x, const Out& out) {
  static_assert(N <= ROWS_MAX, "each wave makes a row of x a stage");
  uint32_t turns = turns_in(w), mine = mine_of(rows);
  // Places of this work-item.
  uint32_t ring = tile_group() * wave_one::RING_BYTES, lane = tile_lane(), of_lead = X_AT + lead() * wave_rows::X_WAVE<N>;
  uint32_t copy_at = (ring + wave_one::place_in_stage(load_row(0), part()));
  uint32_t stage_at = (ring + wave_one::place_in_stage(lane % 16, lane / 16));
  uint32_t x_at = (of_lead + lane % 8 * RUN_VALUES + ((lane / 8 ^ lane % 8) << 4)), put_at = (of_lead + 8 * lane);
  uint64_t* scales = (uint64_t*)(memory + SCALES_AT) + tile_group() * COLS;
  constexpr uint32_t X_TURN = WAVES * wave_rows::X_WAVE<N>;
  static_assert(X_AT % 256 == 0 && X_TURN % 256 == 0, "places inside a row's plane are turned by their lower bits");
  auto side_of = [&](uint32_t buffer) { return (uint16_t*)(memory + SIDE_AT<N>) + (buffer * WAVES + lead()) * (N * RUN); };
  auto row_of_x = [&](uint32_t, uint32_t r) { return x(team() + TEAMS * r); };
  auto ask = [&](uint32_t* word, uint32_t r, uint32_t run) {  // this work-item's 8 values of one of the wave's rows
    uint32_t from = run * RUN_VALUES + 8 * tile_lane();
    UNROLL
    for (uint32_t i = 0; i < 4; i++) word[i] = 0u;
    if (r < mine && from < w.k) load16(in_global(x(team() + TEAMS * r) + from), word);
  };
  uint32_t run = lead();
  Copies copies = copies_of(w, matrix, run, row);
  UNROLL
  for (uint32_t stage = 0; stage < DEPTH; stage++) {
    copy_stage(copies, w, memory + copy_at + stage * STAGE_BYTES, scales, true, stage, run * RUN + stage);
  }
  previous_done();
  wave_rows::Asked<1> asked;
  put_first(w, memory, put_at, side_of(0), mine, row_of_x, {0, run});
  ask(asked.word[0], 0, run + WAVES);
  some_sync(1 + lead(), TEAMS * 32);
  float sum[wave_rows::SETS<N>][4] = {};
  uint32_t buffer = 0;
  ROLLED
  for (uint32_t left = turns; left; left--) {
    uint32_t before = run * RUN, groups = groups_in(w) > before ? groups_in(w) - before : 0u, scale[4][2];
    bool last = left == 1u;
    uint16_t *side_now = side_of(buffer), *side_later = side_of(buffer ^ 1u);
    ROLLED
    for (uint32_t stage = 0; stage < STAGES; stage++) {
      uint32_t slot = stage % DEPTH * STAGE_BYTES;
      copies_wait<DEPTH - 1>();
      wave_sync();
      if (stage == 0) wave_one::load_scales<2>(scales, scale);
      float factor[4];
      UNROLL
      for (uint32_t i = 0; i < 4; i++) {  // the scales of a row move up
        factor[i] = f16_value((uint16_t)scale[i][0]);
        scale[i][0] = scale[i][0] >> 16 | scale[i][1] << 16;
        scale[i][1] >>= 16;
      }
      if (stage < groups) {
        const uint8_t* x_now = memory + (x_at ^ stage * GROUP) + buffer * X_TURN;
        add_group<N>(sum, memory, stage_at + slot, x_now, side_now + part() * RUN + stage, factor, rows);
      }
      wave_sync();
      if (stage + DEPTH == STAGES) copies.from += (WAVES - 1) * RUN_VALUES;
      bool there = stage + DEPTH < STAGES;  // of this run
      copy_stage(copies, w, memory + copy_at + slot, scales, there || !last, there ? stage + DEPTH : stage + DEPTH - STAGES,
                 (there ? before : before + WAVES * RUN - STAGES) + stage + DEPTH);
      if (stage < mine && !last) put_row(asked, memory, put_at + (buffer ^ 1u) * X_TURN, side_later, team() + TEAMS * stage);
      bool more = stage + 1u < STAGES;
      ask(asked.word[0], more ? stage + 1u : 0u, more ? run + WAVES : run + 2 * WAVES);
    }
    some_sync(1 + lead(), TEAMS * 32);  // the x of the next run is there, and nobody reads this one any more
    run += WAVES;
    buffer ^= 1u;
  }
  float* sums = (float*)(memory + SUMS_AT<N>) + team() * WAVES * N * COLS;
  store_sums<N>(sums, sum);
  block_sync();
  out([&](uint32_t r) { return total_of<N>(sums, r); });
}

// f(row) for the rows that this wave of a team has the outputs of.
template <class F> DEVICE void for_rows(uint32_t rows, const F& f) {
  ROLLED
  for (uint32_t row = lead(); row < rows; row += WAVES) f(row);
}

}  // namespace wave_crowd
#endif
