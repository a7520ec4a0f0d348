// step_experts.hip - the routed experts of a decode step, in any weight format (docs/decisions/0004-step-graph.md).
//   step_experts  act[pair] = T(T(silu(gate)) * up), gate and up = T(x[row] @ w[expert]^T), as matmul and silu_mul round
//   step_down     y = T(residual + T(T(sum over slots, weight * T(act @ down[expert]^T)) + T(shared_act @ shared_down^T))), as expert_sum rounds
// Order of additions of an output: chunk c (what 16 bytes of weights hold) belongs to lane c % LANES, LANES = 32 for k >= 1024, else 4; a lane adds
// its elements in ascending order by one chain of fma (q8g64: a chain over the chunk from 0, then fma(chunk sum, scale, lane sum); q4g64 likewise,
// from the chunk's start, see below); then a butterfly over the lanes. Nothing of it depends on the rows beside.
// q4g64: a pair of codes becomes two floats in three instructions. p = ((word >> s) & 0x000f000f) | 0x43004300 is, with u and v the codes in its low
// and high half: float(p << 16) = 128 + u; float(p) = 128 + v + (0x4300 + u) / 65536. The code u that hides in the second is taken out of x: with
// x_u' = x_u - x_v / 65536 the sum x_u' * float(p << 16) + x_v * float(p) is x_u * (u - 8) + x_v * (v - 8) + 136 x_u' + 136.26184.. x_v, and the
// last two terms, summed over the chunk with a minus sign, are where its chain starts. x is prepared once for all weights that meet it. The detour
// through 136 costs 4 bits of the sum's 24.
// A kernel for each format of the routed weights: one kernel for all would need the registers of the greediest, and then some.
#include "portable.h"
#include "gemv.h"

namespace step_moe {

constexpr uint32_t THREADS = 256, TEAM = 32, TEAMS = THREADS / TEAM;  // a team of 32 lanes works on the same columns
constexpr uint32_t EXPERT_COLS = 32, DOWN_COLS = 8;                   // columns of a block
constexpr uint32_t TEAM_COLS = EXPERT_COLS / TEAMS;                   // each a row of gate and one of up
constexpr uint32_t GROUP = 4;                                         // rows of weights whose chains run side by side
constexpr uint32_t X_MAX = 6144;                                      // values of x in LDS; a multiple of the 32 chunks of any format
constexpr uint32_t SLOTS_MAX = 16;
static_assert(X_MAX % (32 * gemv::CHUNK_MAX) == 0, "X_MAX ends with a step of 32 chunks");

// One 32-bit word of weights as floats, and what x needs before it meets them (returns where the chain of the chunk starts).
template <class W> struct word_reader;
template <> struct word_reader<f32_weights> {
  static constexpr uint32_t VALUES = 1;
  DEVICE void expand(uint32_t word, float* v) { v[0] = float_of(word); }
  DEVICE float prepare(float*) { return 0.0f; }
};
template <> struct word_reader<bf16_weights> {
  static constexpr uint32_t VALUES = 2;
  DEVICE void expand(uint32_t word, float* v) {
    v[0] = float_of(word << 16);
    v[1] = float_of(word & 0xffff0000u);
  }
  DEVICE float prepare(float*) { return 0.0f; }
};
template <> struct word_reader<q8g64_weights> {
  static constexpr uint32_t VALUES = 4;
  DEVICE void expand(uint32_t word, float* v) {
    uint32_t biased = word ^ 0x80808080u;
    UNROLL
    for (uint32_t j = 0; j < 4; j++) v[j] = float_of(MAGIC_BITS | ((biased >> (8 * j)) & 0xffu)) - 8388736.0f;
  }
  DEVICE float prepare(float*) { return 0.0f; }
};
template <> struct word_reader<q4g64_weights> {
  static constexpr uint32_t VALUES = 8;
  DEVICE void expand(uint32_t word, float* v) {
    UNROLL
    for (uint32_t j = 0; j < 4; j++) {
      uint32_t p = ((word >> (4 * j)) & 0x000f000fu) | 0x43004300u;
      v[j] = float_of(p << 16);
      v[j + 4] = float_of(p);
    }
  }
  DEVICE float prepare(float* x) {
    float start = 0.0f;
    UNROLL
    for (uint32_t i = 0; i < 32; i += 8) {
      UNROLL
      for (uint32_t j = 0; j < 4; j++) {
        x[i + j] = fma_f32(x[i + j + 4], -1.52587890625e-5f, x[i + j]);  // 1 / 65536
        start = fma_f32(-136.0f, x[i + j], start);
        start = fma_f32(-136.2618408203125f, x[i + j + 4], start);  // 136 + (0x4300 + 8) / 65536
      }
    }
    return start;
  }
};

// Chunk of x as it lies in memory.
template <class T, class W> struct RawX {
  static constexpr uint32_t PER_UNIT = 16 / sizeof(T), UNITS = W::CHUNK > PER_UNIT ? W::CHUNK / PER_UNIT : 1;
  uint32_t word[UNITS][4];
};
// Quantised weights: rows of x are whole, aligned chunks; past the end the last one is loaded, which nobody adds.
template <class T, class W, bool ALIGNED> DEVICE void load_x(RawX<T, W>& raw, const T* row, uint32_t chunk, uint32_t k) {
  constexpr uint32_t PER_UNIT = RawX<T, W>::PER_UNIT;
  if constexpr (W::SCALED) {
    uint32_t last = k / W::CHUNK - 1u;
    const words16* from = (const words16*)(row + (chunk < last ? chunk : last) * W::CHUNK);
    UNROLL
    for (uint32_t u = 0; u < RawX<T, W>::UNITS; u++) {
      UNROLL
      for (uint32_t i = 0; i < 4; i++) raw.word[u][i] = from[u].w[i];
    }
  } else {
    UNROLL
    for (uint32_t u = 0; u < RawX<T, W>::UNITS; u++) {
      gemv::load_unit(row, chunk * W::CHUNK + u * PER_UNIT, k, ALIGNED && W::CHUNK >= PER_UNIT, raw.word[u]);
    }
  }
}
// Values of the chunk, prepared; returns the start of its chain.
template <class T, class W> DEVICE float open_x(const RawX<T, W>& raw, float (&v)[W::CHUNK]) {
  constexpr uint32_t PER_UNIT = RawX<T, W>::PER_UNIT;
  UNROLL
  for (uint32_t u = 0; u < RawX<T, W>::UNITS; u++) {
    float some[PER_UNIT];
    gemv::value_reader<T>::expand(raw.word[u], some);
    UNROLL
    for (uint32_t j = 0; j < PER_UNIT && j < W::CHUNK; j++) v[u * PER_UNIT + j] = some[j];
  }
  return word_reader<W>::prepare(v);
}
// Whether 16-byte loads can read the rows of weights and of x; always so where the weights are quantised.
template <class T, class W> DEVICE bool aligned_rows(const T* x, const void* codes, uint32_t k) {
  return W::SCALED || ((((uint64_t)x | (uint64_t)k * sizeof(T)) & 15u) == 0 && gemv::rows_aligned<W>(codes, k));
}

// A chunk of x in LDS: pieces of four values, `stride` pieces apart. Part i is what one word of weights meets.
template <class W> DEVICE void store_pieces(words16* to, uint32_t stride, const float* v) {
  UNROLL
  for (uint32_t p = 0; p < W::CHUNK / 4; p++) {
    to[p * stride] = {{bits_of(v[4 * p]), bits_of(v[4 * p + 1]), bits_of(v[4 * p + 2]), bits_of(v[4 * p + 3])}};
  }
}
template <class W> DEVICE void load_part(const words16* from, uint32_t stride, uint32_t i, float* v) {
  words16 piece;
  UNROLL
  for (uint32_t j = 0; j < W::CHUNK / 4; j++) {
    uint32_t e = i * (W::CHUNK / 4) + j;
    if (j == 0 || e % 4 == 0) piece = from[e / 4 * stride];
    v[j] = float_of(piece.w[e % 4]);
  }
}

// Where a walk finds its x. Near: each lane reads and prepares its own chunks, one step ahead. The chunk at work lies in registers, or, PARKED, in
// LDS of this work-item: `cell` and every THREADS pieces after it.
template <class T, class W, uint32_t LANES, bool ALIGNED, bool PARKED> struct NearX {
  const T* row;
  words16* cell;
  uint32_t k, lane;
  RawX<T, W> next;
  float v[PARKED ? 1 : W::CHUNK];
  float start;
};
template <class T, class W, uint32_t LANES, bool ALIGNED, bool PARKED>
DEVICE void first_x(NearX<T, W, LANES, ALIGNED, PARKED>& x, const T* row, uint32_t k, words16* cells) {
  x.row = row;
  x.k = k;
  x.lane = thread_id() % LANES;
  x.cell = cells + thread_id();
  load_x<T, W, ALIGNED>(x.next, row, x.lane, k);
}
template <class T, class W, uint32_t LANES, bool ALIGNED, bool PARKED>
DEVICE void step_x(NearX<T, W, LANES, ALIGNED, PARKED>& x, uint32_t step, bool more) {
  if constexpr (PARKED) {
    float v[W::CHUNK];
    x.start = open_x<T, W>(x.next, v);
    store_pieces<W>(x.cell, THREADS, v);
  } else {
    x.start = open_x<T, W>(x.next, x.v);
  }
  if (more) load_x<T, W, ALIGNED>(x.next, x.row, (step + 1) * LANES + x.lane, x.k);
}
template <class T, class W, uint32_t LANES, bool ALIGNED, bool PARKED>
DEVICE void part_x(const NearX<T, W, LANES, ALIGNED, PARKED>& x, uint32_t i, float* v) {
  if constexpr (PARKED) {
    load_part<W>(x.cell, THREADS, i, v);
  } else {
    UNROLL
    for (uint32_t j = 0; j < W::CHUNK / 4; j++) v[j] = x.v[i * (W::CHUNK / 4) + j];
  }
}

// Staged: the block has prepared x in LDS, as f32. Piece p of chunk c lies at (c / 32 * pieces + p) * 32 + c % 32, so that
// lanes read neighbouring pieces. starts: of each chunk, q4g64.
template <class W> struct StagedX {
  const words16* pieces;
  const float* starts;
  uint32_t lane, at;
  float start;
};
template <class W> DEVICE void step_x(StagedX<W>& x, uint32_t step, bool) {
  x.at = step * (W::CHUNK / 4) * 32 + x.lane;
  x.start = W::FORMAT == WEIGHT_Q4G64 ? x.starts[step * 32 + x.lane] : 0.0f;
}
template <class W> DEVICE void part_x(const StagedX<W>& x, uint32_t i, float* v) {
  load_part<W>(x.pieces + x.at, 32, i, v);
}
template <class T, class W, bool ALIGNED> DEVICE void stage_x(words16* pieces, float* starts, const T* row, uint32_t k) {
  uint32_t chunks = (k + W::CHUNK - 1) / W::CHUNK;
  for (uint32_t c = thread_id(); c < chunks; c += THREADS) {
    RawX<T, W> raw;
    load_x<T, W, ALIGNED>(raw, row, c, k);
    float v[W::CHUNK];
    float start = open_x<T, W>(raw, v);
    store_pieces<W>(pieces + c / 32 * (W::CHUNK / 4) * 32 + c % 32, 32, v);
    if (W::FORMAT == WEIGHT_Q4G64) starts[c] = start;
  }
}

// The weights of one expert, or of the shared one: [rows, k].
struct Rows {
  const uint8_t* codes;
  const uint16_t* scales;
  uint32_t k;
};
template <class W> DEVICE Rows rows_of(const void* codes, const void* scales, uint64_t first, uint32_t k) {
  return {(const uint8_t*)codes + first * W::row_bytes(k), W::SCALED ? (const uint16_t*)scales + first * (k / WEIGHT_GROUP) : nullptr, k};
}

// ROWS rows of weights on their way through a group of LANES lanes, AHEAD steps of LANES chunks in flight. Row r is row r / HALVES after the first
// of half r % HALVES.
template <class W, uint32_t ROWS_, uint32_t HALVES, uint32_t AHEAD, uint32_t LANES, bool ALIGNED> struct Walk {
  static constexpr uint32_t ROWS = ROWS_;
  const uint8_t* codes;
  const uint16_t* scales;
  uint32_t half;  // in rows
  uint32_t k, chunks, steps, lane;
  uint32_t word[AHEAD][ROWS][4];
  uint16_t scale[AHEAD][ROWS];
};

// Past the end a lane loads the last chunk, which nobody adds.
template <class W, uint32_t ROWS, uint32_t HALVES, uint32_t AHEAD, uint32_t LANES, bool ALIGNED>
DEVICE void load_row(Walk<W, ROWS, HALVES, AHEAD, LANES, ALIGNED>& walk, uint32_t slot, uint32_t r, uint32_t step) {
  uint32_t c = step * LANES + walk.lane, at = c < walk.chunks ? c : walk.chunks - 1u;
  uint32_t row = r / HALVES + r % HALVES * walk.half;
  const uint8_t* from = walk.codes + row * W::row_bytes(walk.k);
  if (ALIGNED) {
    const words16* chunk = (const words16*)from + at;
    UNROLL
    for (uint32_t i = 0; i < 4; i++) walk.word[slot][r][i] = chunk->w[i];
  } else {
    gemv::load_elements<W>(from, walk.k, at, walk.word[slot][r]);
  }
  if (W::SCALED) walk.scale[slot][r] = walk.scales[row * (walk.k / WEIGHT_GROUP) + at * W::CHUNK / WEIGHT_GROUP];
}

template <class W, uint32_t ROWS, uint32_t HALVES, uint32_t AHEAD, uint32_t LANES, bool ALIGNED>
DEVICE void aim(Walk<W, ROWS, HALVES, AHEAD, LANES, ALIGNED>& walk, const Rows& rows, uint32_t first, uint32_t half) {
  walk.k = rows.k;
  walk.chunks = (rows.k + W::CHUNK - 1) / W::CHUNK;
  walk.steps = (walk.chunks + LANES - 1) / LANES;
  walk.lane = thread_id() % LANES;
  walk.codes = rows.codes + first * W::row_bytes(rows.k);
  walk.scales = W::SCALED ? rows.scales + (uint64_t)first * (rows.k / WEIGHT_GROUP) : nullptr;
  walk.half = half;
}
template <class W, uint32_t ROWS, uint32_t HALVES, uint32_t AHEAD, uint32_t LANES, bool ALIGNED>
DEVICE void start(Walk<W, ROWS, HALVES, AHEAD, LANES, ALIGNED>& walk) {
  UNROLL
  for (uint32_t s = 0; s < AHEAD; s++) {
    UNROLL
    for (uint32_t r = 0; r < ROWS; r++) load_row(walk, s, r, s);
  }
}

// Rows [first, first + COUNT) of slot `slot` times this lane's chunk.
template <uint32_t COUNT, class W, uint32_t ROWS, uint32_t HALVES, uint32_t AHEAD, uint32_t LANES, bool ALIGNED, class X>
DEVICE void add_chunk(const Walk<W, ROWS, HALVES, AHEAD, LANES, ALIGNED>& walk, uint32_t slot, uint32_t first, const X& x, float (&sums)[ROWS]) {
  constexpr uint32_t VALUES = word_reader<W>::VALUES;
  float part[COUNT];
  UNROLL
  for (uint32_t r = 0; r < COUNT; r++) part[r] = W::SCALED ? x.start : sums[first + r];
  UNROLL
  for (uint32_t i = 0; i < 4; i++) {
    float v[VALUES];
    part_x(x, i, v);
    UNROLL
    for (uint32_t r = 0; r < COUNT; r++) {
      float w[VALUES];
      word_reader<W>::expand(walk.word[slot][first + r][i], w);
      UNROLL
      for (uint32_t j = 0; j < VALUES; j++) part[r] = fma_f32(v[j], w[j], part[r]);
    }
  }
  UNROLL
  for (uint32_t r = 0; r < COUNT; r++) {
    float scale = W::SCALED ? f16_value(walk.scale[slot][first + r]) : 0.0f;
    sums[first + r] = W::SCALED ? fma_f32(part[r], scale, sums[first + r]) : part[r];
  }
}

// The products of all rows, the same in every lane of the group. `start` has set off the loads.
template <class W, uint32_t ROWS, uint32_t HALVES, uint32_t AHEAD, uint32_t LANES, bool ALIGNED, class X>
DEVICE void multiply(Walk<W, ROWS, HALVES, AHEAD, LANES, ALIGNED>& walk, X& x, float (&sums)[ROWS]) {
  constexpr uint32_t COUNT = ROWS < GROUP ? ROWS : GROUP;
  UNROLL
  for (uint32_t r = 0; r < ROWS; r++) sums[r] = 0.0f;
  for (uint32_t base = 0; base < walk.steps; base += AHEAD) {
    UNROLL
    for (uint32_t s = 0; s < AHEAD; s++) {
      uint32_t step = base + s;
      if (step >= walk.steps) continue;
      step_x(x, step, step + 1 < walk.steps);
      UNROLL
      for (uint32_t first = 0; first < ROWS; first += COUNT) {
        if (step * LANES + walk.lane < walk.chunks) add_chunk<COUNT>(walk, s, first, x, sums);
        if (step + AHEAD < walk.steps) {
          UNROLL
          for (uint32_t r = 0; r < COUNT; r++) load_row(walk, s, first + r, step + AHEAD);
        }
      }
    }
  }
  lanes_sum<LANES>(sums);
}

// act of COLS neighbouring columns; `sums` are gate, up, gate, up, .. Lane i of the group stores column i.
template <class T, uint32_t COLS> DEVICE void store_act(const float* sums, T* act, uint32_t lane) {
  float gate = sums[0], up = sums[1];
  UNROLL
  for (uint32_t i = 1; i < COLS; i++) {
    gate = lane == i ? sums[2 * i] : gate;
    up = lane == i ? sums[2 * i + 1] : up;
  }
  if (lane >= COLS) return;
  gate = rounded<T>::of(gate);
  store_f32(act + lane, rounded<T>::of(silu_f32(gate)) * rounded<T>::of(up));
}

// Where the x of a long row comes from: LDS if it fits.
template <class T, class W, bool ALIGNED, bool STAGED, class WALK>
DEVICE void multiply_long(WALK& walk, const T* x, const words16* pieces, const float* starts, float (&sums)[WALK::ROWS]) {
  if constexpr (STAGED) {
    StagedX<W> source = {pieces, starts, walk.lane, 0, 0.0f};
    multiply(walk, source, sums);
  } else {
    NearX<T, W, 32, ALIGNED, false> source;
    first_x(source, x, walk.k, (words16*)nullptr);
    multiply(walk, source, sums);
  }
}

// k >= 1024: a team takes TEAM_COLS columns, together where the weights are quantised and so many are left, else one by one.
template <class T, class W, bool ALIGNED, bool STAGED>
DEVICE void experts_long(const Rows& rows, const T* x, T* act, uint32_t n, words16* pieces, float* starts) {
  constexpr bool TOGETHER = W::SCALED && STAGED;
  uint32_t first = block_y() * EXPERT_COLS + thread_id() / TEAM * TEAM_COLS, end = first + TEAM_COLS < n ? first + TEAM_COLS : n;
  bool together = TOGETHER && first + TEAM_COLS <= n;
  Walk<W, TOGETHER ? 2 * TEAM_COLS : 2, 2, 1, 32, ALIGNED> walk;
  aim(walk, rows, first, n);
  if (together) start(walk);
  if (STAGED) {
    stage_x<T, W, ALIGNED>(pieces, starts, x, rows.k);
    block_sync();
  }
  if (together) {
    float sums[walk.ROWS];
    multiply_long<T, W, ALIGNED, STAGED>(walk, x, pieces, starts, sums);
    store_act<T, walk.ROWS / 2>(sums, act + first, walk.lane);
    return;
  }
  for (uint32_t column = first; column < end; column++) {
    Walk<W, 2, 2, W::SCALED || !ALIGNED ? 1 : 4, 32, ALIGNED> one;
    aim(one, rows, column, n);
    start(one);
    float sums[2];
    multiply_long<T, W, ALIGNED, STAGED>(one, x, pieces, starts, sums);
    store_act<T, 1>(sums, act + column, one.lane);
  }
}

// k < 1024: four lanes a column, eight columns a team; the first four teams work.
template <class T, class W, bool ALIGNED> DEVICE void experts_short(const Rows& rows, const T* x, T* act, uint32_t n) {
  if (thread_id() / 4 >= EXPERT_COLS) return;
  uint32_t column = block_y() * EXPERT_COLS + thread_id() / 4;
  Walk<W, 2, 2, ALIGNED ? 2 : 1, 4, ALIGNED> walk;
  aim(walk, rows, column < n ? column : n - 1, n);
  start(walk);
  NearX<T, W, 4, ALIGNED, false> source;
  first_x(source, x, rows.k, (words16*)nullptr);
  float sums[2];
  multiply(walk, source, sums);
  if (column < n) store_act<T, 1>(sums, act + column, walk.lane);
}

template <class T, class W, bool ALIGNED>
DEVICE void experts_rows(const Rows& rows, const T* x, T* act, uint32_t n, words16* pieces, float* starts) {
  if (rows.k < gemv::LONG_K) experts_short<T, W, ALIGNED>(rows, x, act, n);
  else if (rows.k <= X_MAX) experts_long<T, W, ALIGNED, true>(rows, x, act, n, pieces, starts);
  else experts_long<T, W, ALIGNED, false>(rows, x, act, n, pieces, starts);
}

template <class T, class W>
DEVICE void experts_of(const step_experts_args& a, uint32_t pair, uint32_t expert, words16* pieces, float* starts) {
  Rows rows = rows_of<W>(a.codes, a.scales, (uint64_t)expert * 2 * a.n, a.k);
  const T* x = (const T*)a.x + (uint64_t)(pair / a.slots) * a.k;
  T* act = (T*)a.act + (uint64_t)pair * a.n;
  if (aligned_rows<T, W>(x, rows.codes, a.k)) experts_rows<T, W, true>(rows, x, act, a.n, pieces, starts);
  else if constexpr (!W::SCALED) experts_rows<T, W, false>(rows, x, act, a.n, pieces, starts);
}

// Grid: pairs, ceil(n / 32).
template <class T, class W> DEVICE void experts(const step_experts_args& a) {
  SHARED(words16, pieces, X_MAX / 4);
  SHARED(float, starts, X_MAX / 32);
  uint32_t pair = block_x(), expert = (uint32_t)((const int32_t*)a.ids)[pair];
  if (expert < a.experts) {
    experts_of<T, W>(a, pair, expert, pieces, starts);
    return;
  }
  uint32_t column = block_y() * EXPERT_COLS + thread_id();
  if (thread_id() < EXPERT_COLS && column < a.n) store_f32((T*)a.act + (uint64_t)pair * a.n + column, 0.0f);
}

// to[c] = T(x @ w[first + c]^T) for COLS columns together.
template <class T, class W, bool ALIGNED, uint32_t COLS, uint32_t AHEAD>
DEVICE void down_cols(const Rows& rows, const T* x, uint32_t first, words16* cells, float* to) {
  Walk<W, COLS, 1, AHEAD, 32, ALIGNED> walk;
  aim(walk, rows, first, 0);
  start(walk);
  NearX<T, W, 32, ALIGNED, true> source;
  first_x(source, x, rows.k, cells);
  float sums[COLS];
  multiply(walk, source, sums);
  UNROLL
  for (uint32_t i = 0; i < COLS; i++) {
    if (walk.lane == i) to[i] = rounded<T>::of(sums[i]);
  }
}

// k >= 1024: all columns of the block by one team, together where the weights are quantised and the block is full.
template <class T, class W, bool ALIGNED>
DEVICE void down_long(const Rows& rows, const T* x, uint32_t first, uint32_t left, words16* cells, float* to) {
  if constexpr (W::SCALED) {
    if (left == DOWN_COLS) {
      down_cols<T, W, ALIGNED, DOWN_COLS, 1>(rows, x, first, cells, to);
      return;
    }
  }
  for (uint32_t c = 0; c < left; c++) down_cols<T, W, ALIGNED, 1, W::SCALED || !ALIGNED ? 1 : 4>(rows, x, first + c, cells, to + c);
}

// k < 1024: four lanes a column, the block's eight columns by one team.
template <class T, class W, bool ALIGNED>
DEVICE void down_short(const Rows& rows, const T* x, uint32_t first, uint32_t left, words16* cells, float* to) {
  uint32_t column = thread_id() % TEAM / 4;
  Walk<W, 1, 1, ALIGNED ? 2 : 1, 4, ALIGNED> walk;
  aim(walk, rows, first + (column < left ? column : left - 1), 0);
  start(walk);
  NearX<T, W, 4, ALIGNED, true> source;
  first_x(source, x, rows.k, cells);
  float sums[1];
  multiply(walk, source, sums);
  if (walk.lane == 0) to[column] = rounded<T>::of(sums[0]);
}

// SPREAD: each of the eight teams takes one column (or the last team all of them); else the calling team takes all.
template <class T, class W, bool ALIGNED, bool SPREAD>
DEVICE void down_rows(const Rows& rows, const T* x, uint32_t first, uint32_t left, words16* cells, float* to) {
  uint32_t team = thread_id() / TEAM;
  if (rows.k < gemv::LONG_K) {
    if (!SPREAD || team == TEAMS - 1) down_short<T, W, ALIGNED>(rows, x, first, left, cells, to);
  } else if (!SPREAD) {
    down_long<T, W, ALIGNED>(rows, x, first, left, cells, to);
  } else if (team < left) {
    down_cols<T, W, ALIGNED, 1, ALIGNED ? 4 : 1>(rows, x, first + team, cells, to + team);
  }
}

template <class T, class W, bool SPREAD> DEVICE void down_of(const Rows& rows, const T* x, uint32_t first, uint32_t left, words16* cells, float* to) {
  if (aligned_rows<T, W>(x, rows.codes, rows.k)) down_rows<T, W, true, SPREAD>(rows, x, first, left, cells, to);
  else if constexpr (!W::SCALED) down_rows<T, W, false, SPREAD>(rows, x, first, left, cells, to);
}

template <class T, class W> DEVICE void down_shared(const step_down_args& a, uint32_t row, uint32_t first, uint32_t left, words16* cells, float* to) {
  const T* x = (const T*)a.shared_act + (uint64_t)row * a.shared_k;
  down_of<T, W, true>(rows_of<W>(a.shared_codes, a.shared_scales, 0, a.shared_k), x, first, left, cells, to);
}

// Grid: rows, ceil(n / 8). Team t takes slots t, t + 8, ..; the shared product goes first, as it needs no ids.
template <class T, class W> DEVICE void down(const step_down_args& a) {
  SHARED(words16, cells, THREADS * gemv::CHUNK_MAX / 4);
  SHARED(float, products, (SLOTS_MAX + 1) * DOWN_COLS);  // [slot, then shared][column]
  uint32_t row = block_x(), first = block_y() * DOWN_COLS, left = a.n - first < DOWN_COLS ? a.n - first : DOWN_COLS;
  float* shared = products + SLOTS_MAX * DOWN_COLS;
  if (a.shared_format == WEIGHT_Q8G64) down_shared<T, q8g64_weights>(a, row, first, left, cells, shared);
  else if (a.shared_format == WEIGHT_Q4G64) down_shared<T, q4g64_weights>(a, row, first, left, cells, shared);
  else if (a.shared_format == WEIGHT_BF16) down_shared<T, bf16_weights>(a, row, first, left, cells, shared);
  else down_shared<T, f32_weights>(a, row, first, left, cells, shared);
  for (uint32_t slot = thread_id() / TEAM; slot < a.slots; slot += TEAMS) {
    uint64_t pair = (uint64_t)row * a.slots + slot;
    uint32_t expert = (uint32_t)((const int32_t*)a.ids)[pair];
    float* to = products + slot * DOWN_COLS;
    if (expert < a.experts) {
      uint32_t k = a.k + slot / SLOTS_MAX;  // + 0: nothing that follows from k is kept in registers from slot to slot
      down_of<T, W, false>(rows_of<W>(a.codes, a.scales, (uint64_t)expert * a.n, k), (const T*)a.act + pair * k, first, left, cells, to);
    } else if (thread_id() % TEAM < DOWN_COLS) {
      to[thread_id() % TEAM] = 0.0f;
    }
  }
  block_sync();
  uint32_t c = thread_id();
  if (c >= left) return;
  float sum = 0.0f;
  for (uint32_t slot = 0; slot < a.slots; slot++) {
    float weight = ((const float*)a.weights)[(uint64_t)row * a.slots + slot];
    sum = fma_f32(weight, products[slot * DOWN_COLS + c], sum);
  }
  float moe = rounded<T>::of(rounded<T>::of(sum) + shared[c]);
  uint64_t at = (uint64_t)row * a.n + first + c;
  store_f32((T*)a.y + at, load_f32((const T*)a.residual + at) + moe);
}

}  // namespace step_moe

#define STEP_EXPERTS(suffix, T, W)                                                            \
  KERNEL(step_experts_##suffix, step_experts_args, 256) { step_moe::experts<T, W>(a); }       \
  KERNEL(step_down_##suffix, step_down_args, 256) { step_moe::down<T, W>(a); }

// LAUNCH step_experts_f32_f32 block=256 cols=32
// LAUNCH step_down_f32_f32 block=256 cols=8 slots_max=16
STEP_EXPERTS(f32_f32, float, f32_weights)
// LAUNCH step_experts_f32_bf16 block=256 cols=32
// LAUNCH step_down_f32_bf16 block=256 cols=8 slots_max=16
STEP_EXPERTS(f32_bf16, float, bf16_weights)
// LAUNCH step_experts_f32_q8g64 block=256 cols=32
// LAUNCH step_down_f32_q8g64 block=256 cols=8 slots_max=16
STEP_EXPERTS(f32_q8g64, float, q8g64_weights)
// LAUNCH step_experts_f32_q4g64 block=256 cols=32
// LAUNCH step_down_f32_q4g64 block=256 cols=8 slots_max=16
STEP_EXPERTS(f32_q4g64, float, q4g64_weights)
// LAUNCH step_experts_bf16_f32 block=256 cols=32
// LAUNCH step_down_bf16_f32 block=256 cols=8 slots_max=16
STEP_EXPERTS(bf16_f32, bf16, f32_weights)
// LAUNCH step_experts_bf16_bf16 block=256 cols=32
// LAUNCH step_down_bf16_bf16 block=256 cols=8 slots_max=16
STEP_EXPERTS(bf16_bf16, bf16, bf16_weights)
// LAUNCH step_experts_bf16_q8g64 block=256 cols=32
// LAUNCH step_down_bf16_q8g64 block=256 cols=8 slots_max=16
STEP_EXPERTS(bf16_q8g64, bf16, q8g64_weights)
// LAUNCH step_experts_bf16_q4g64 block=256 cols=32
// LAUNCH step_down_bf16_q4g64 block=256 cols=8 slots_max=16
STEP_EXPERTS(bf16_q4g64, bf16, q4g64_weights)
