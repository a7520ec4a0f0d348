// wave_held.h - the products of wave_rows.h, q8g64, of blocks that hold all their x in LDS: the same bits. A block has TEAMS teams of 8 waves, a team
// sets of 32 columns, one after the other; wave w of each has the runs i with i % 8 == w. The x of all runs is made once a block, and the rings of
// wave_one.h stay full from the first set to the last. For targets with TILE_MMA.
#pragma once
#include "wave_crowd.h"

#if defined(TILE_MMA)
namespace wave_held {

using namespace wave_product;
using wave_crowd::lead, wave_crowd::team, wave_crowd::W, wave_crowd::DEPTH, wave_crowd::STAGES, wave_crowd::STAGE_BYTES;
constexpr uint32_t TEAMS = 2, CROWD = TEAMS * WAVES, THREADS = CROWD * 32;
constexpr uint32_t TURNS_MAX = 3, RUNS = TURNS_MAX * WAVES, K_MAX = RUNS * RUN_VALUES;

// LDS, from its start on: the rings and the scales of all waves; x of all runs and its scales; sums of the waves; with a norm the waves' sums of
// squares. N: rows of x.
constexpr uint32_t SCALES_AT = CROWD * wave_one::RING_BYTES, X_AT = SCALES_AT + CROWD * COLS * 8;
template <uint32_t N> constexpr uint32_t SIDE_AT = X_AT + RUNS * wave_rows::X_WAVE<N>;
template <uint32_t N> constexpr uint32_t SUMS_AT = SIDE_AT<N> + RUNS * N * RUN * 2 + 64;  // the last 64: of rows that there are not
template <uint32_t N> constexpr uint32_t SQUARES_AT = SUMS_AT<N> + CROWD * N * COLS * 4;
template <uint32_t N> constexpr uint32_t LDS_BYTES = SQUARES_AT<N> + WAVES * N * 4;

template <uint32_t N> DEVICE uint16_t* side_of(uint8_t* memory, uint32_t run) { return (uint16_t*)(memory + SIDE_AT<N>) + run * (N * RUN); }

// x of this wave's runs, of the rows team(), team() + TEAMS, ..
template <uint32_t N, class X> DEVICE void put_rows(const Weights& w, uint8_t* memory, uint32_t rows, const X& x, const Operand& o) {
  wave_rows::Asked<1> asked[TURNS_MAX];
  UNROLL
  for (uint32_t turn = 0; turn < TURNS_MAX; turn++) wave_rows::ask_norm(asked[turn], w, o, {0, lead() + turn * WAVES});
  ROLLED
  for (uint32_t row = team(); row < rows; row += TEAMS) {
    float square[1] = {0.0f};
    UNROLL
    for (uint32_t turn = 0; turn < TURNS_MAX; turn++) {
      load_unit(x(row), (lead() + turn * WAVES) * RUN_VALUES + 8 * tile_lane(), w.k, asked[turn].word[0]);
    }
    UNROLL
    for (uint32_t turn = 0; turn < TURNS_MAX; turn++) {
      uint32_t run = lead() + turn * WAVES;
      uint32_t at = X_AT + run * wave_rows::X_WAVE<N> + 8 * tile_lane();
      wave_crowd::put_row(asked[turn], memory, at, side_of<N>(memory, run), square[0], o, row);
    }
    if (!o.norm) continue;
    lanes_sum<32>(square);
    if (tile_lane() == 0) ((float*)(memory + SQUARES_AT<N>))[lead() * N + row] = square[0];
  }
}

// The norm's scale of row r, or 1.
template <uint32_t N> DEVICE float scale_of(uint8_t* memory, const Weights& w, const Operand& o, uint32_t r) {
  if (!o.norm) return 1.0f;
  const float* of_row = (const float*)(memory + SQUARES_AT<N>) + r;
  float square = of_row[0];
  UNROLL
  for (uint32_t i = 1; i < WAVES; i++) square += of_row[i * N];
  return rsqrt_exact(square / (float)w.k + o.eps);
}

// w: of one set; sets: of this team. row(set, i): index of the row of weights of column i < 32 of the set; x(r): row r < rows <= N of x, of at most
// K_MAX values; out(set, row, sum): an output of this work-item's column. Waits for the launch before.
template <uint32_t N, class Row, class X, class Out>
DEVICE void products(const Weights& w, const Matrix& matrix, uint8_t* memory, uint32_t sets, uint32_t rows, const Row& row, const X& x,
                     const Operand& o, const Out& out) {
  static_assert(X_AT % 256 == 0 && wave_rows::X_WAVE<N> % 256 == 0, "places inside a row's plane are turned by their lower bits");
  uint32_t runs = turns_in(w) * WAVES, lane = tile_lane(), ring = tile_group() * wave_one::RING_BYTES;
  uint32_t copy_at = ring + wave_one::place_in_stage(load_row(0), part()), stage_at = ring + wave_one::place_in_stage(lane % 16, lane / 16);
  uint32_t x_at = X_AT + lane % 8 * RUN_VALUES + ((lane / 8 ^ lane % 8) << 4);
  uint64_t* scales = (uint64_t*)(memory + SCALES_AT) + tile_group() * COLS;
  auto place = [&](uint32_t set) { return wave_crowd::copies_of(w, matrix, lead(), [&](uint32_t i) { return row(set, i); }); };
  wave_crowd::Copies copies = place(0);
  UNROLL
  for (uint32_t stage = 0; stage < DEPTH; stage++) {
    wave_crowd::copy_stage(copies, w, memory + copy_at + stage * STAGE_BYTES, scales, sets > 0, stage, lead() * RUN + stage);
  }
  previous_done();
  put_rows<N>(w, memory, rows, x, o);
  block_sync();
  float* sums = (float*)(memory + SUMS_AT<N>) + team() * WAVES * N * COLS;
  ROLLED
  for (uint32_t set = 0; set < sets; set++) {
    float sum[wave_rows::SETS<N>][4] = {};
    ROLLED
    for (uint32_t run = lead(); run < runs; run += WAVES) {
      uint32_t before = run * RUN, groups = groups_in(w) > before ? groups_in(w) - before : 0u, scale[4][2];
      bool last = run + WAVES >= runs, more = !last || set + 1u < sets;
      uint32_t after = (last ? lead() : run + WAVES) * RUN;
      const uint16_t* side = side_of<N>(memory, run) + part() * RUN;
      UNROLL
      for (uint32_t stage = 0; stage < STAGES; stage++) {
        uint32_t slot = stage % DEPTH * STAGE_BYTES;
        copies_wait<DEPTH - 1>();
        wave_sync();
        if (stage == 0) wave_one::load_scales<2>(scales, scale);
        float factor[4];
        UNROLL
        for (uint32_t i = 0; i < 4; i++) factor[i] = f16_value((uint16_t)(scale[i][stage / 2] >> (16 * (stage % 2))));
        if (stage < groups) {
          const uint8_t* x_now = memory + (x_at ^ stage * GROUP) + run * wave_rows::X_WAVE<N>;
          wave_crowd::add_group<N>(sum, memory, stage_at + slot, x_now, side + stage, factor, rows);
        }
        wave_sync();
        if (stage + DEPTH == STAGES) {
          if (!last) copies.from += (WAVES - 1) * RUN_VALUES;
          else if (more) copies = place(set + 1u);
        }
        bool there = stage + DEPTH < STAGES;  // of this run
        wave_crowd::copy_stage(copies, w, memory + copy_at + slot, scales, there || more, (stage + DEPTH) % STAGES,
                               (there ? before + DEPTH : after + DEPTH - STAGES) + stage);
      }
    }
    wave_crowd::store_sums<N>(sums, sum);
    some_sync(1 + team(), WAVES * 32);
    ROLLED
    for (uint32_t r = lead(); r < rows; r += WAVES) out(set, r, wave_crowd::total_of<N>(sums, r) * scale_of<N>(memory, w, o, r));
    some_sync(1 + team(), WAVES * 32);
  }
}

}  // namespace wave_held
#endif
