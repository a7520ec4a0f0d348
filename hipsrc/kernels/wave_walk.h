// wave_walk.h - part of the wave product (wave_product.h): how the waves of a block read their rows of weights and add them up.
#pragma once
#include "gemv.h"

namespace wave_product {

constexpr uint32_t THREADS = 256, WAVES = THREADS / 32, COLS = 32, ROWS = 8, GROUP = WEIGHT_GROUP, LONG_K = 1024;
constexpr uint32_t RUN = 4;  // groups of a wave, one after the other, whose x it has in LDS at once: 8 values a work-item and row
constexpr uint32_t RUN_VALUES = RUN * GROUP, X_BYTES = ROWS * RUN_VALUES * 2;  // of a wave
constexpr uint32_t SUMS = WAVES * ROWS * COLS, SIDE = WAVES * ROWS * RUN;
static_assert(RUN_VALUES == 8 * 32, "a work-item puts 8 values of a row");

// LOAD_ROWS: rows of weights of which a work-item has values, SHARE of each group: `part` says which.
#if defined(TILE_MMA)
constexpr uint32_t LOAD_ROWS = 4, SHARE = 16;
DEVICE uint32_t load_row(uint32_t i) { return tile_lane() / 4 + 8 * i; }
DEVICE uint32_t part() { return tile_lane() % 4; }
template <class W> constexpr uint32_t sums_of = 8;
#elif defined(TILE_WMMA)
constexpr uint32_t LOAD_ROWS = 2, SHARE = TILE_WMMA == 1 ? 64 : 32, PER_TILE = TILE_WMMA == 1 ? 4 : 8;
DEVICE uint32_t load_row(uint32_t i) { return tile_lane() % 16 + 16 * i; }
DEVICE uint32_t part() { return TILE_WMMA == 1 ? 0u : tile_lane() / 16; }
template <class W> constexpr uint32_t sums_of = W::SCALED ? 8 : 2 * PER_TILE;
#else
constexpr uint32_t LOAD_ROWS = 1, SHARE = 64, CHAINS = 8;
DEVICE uint32_t load_row(uint32_t) { return tile_lane(); }
DEVICE uint32_t part() { return 0; }
template <class W> constexpr uint32_t sums_of = W::SCALED ? ROWS : ROWS * CHAINS;
#endif
constexpr uint32_t PARTS = GROUP / SHARE;

// A share lies in memory as pieces of PIECE values, 16 bytes or the whole share; piece j of part p starts at value (j * PARTS + p) * PIECE.
template <class W> constexpr uint32_t piece_values = W::CHUNK < SHARE ? W::CHUNK : SHARE;
template <class W> constexpr uint32_t piece_words = 4 * piece_values<W> / W::CHUNK;
template <class W> constexpr uint32_t share_words = SHARE * 4 / W::CHUNK;

// The block's LDS.
struct Lds {
  words16* x;      // [WAVES * X_BYTES / 16]
  float* x_scale;  // [SIDE], scaled formats
  int32_t* x_sum;  // [SIDE], q4g64
  float* sums;     // [SUMS]; while products are added, with a norm: of each wave, row and lane the sum of x^2
  float* squares;  // [WAVES * ROWS]: norms alone
};

// What is multiplied: values [first, first + k) of rows of `pitch` values, first a multiple of 64, of one or several matrices of the same shape, whose runs
// follow one another. wide: the waves of a block share its columns, wave w of 8 has the runs i with i % 8 == w; else each has all of them.
struct Weights {
  uint32_t k, pitch, first, matrices;
  bool wide;
};
DEVICE uint32_t groups_in(const Weights& w) { return (w.k + GROUP - 1) / GROUP; }
DEVICE uint32_t runs_in(const Weights& w) { return (groups_in(w) + RUN - 1) / RUN; }
// How many runs a wave takes, those past the end counted.
DEVICE uint32_t turns_in(const Weights& w) {
  uint32_t runs = runs_in(w) * w.matrices;
  return w.wide ? (runs + WAVES - 1) / WAVES : runs;
}

// One of a wave's runs: matrix w.matrices where it is past the end.
struct Cursor {
  uint32_t matrix, run;
};
DEVICE void settle(Cursor& c, const Weights& w) {
  uint32_t per = runs_in(w);
  while (c.run >= per && c.matrix < w.matrices) {
    c.run -= per;
    c.matrix++;
  }
}
DEVICE Cursor first_run(const Weights& w) {
  Cursor c = {0, w.wide ? tile_group() : 0u};
  settle(c, w);
  return c;
}
DEVICE void next_run(Cursor& c, const Weights& w) {
  c.run += w.wide ? WAVES : 1u;
  settle(c, w);
}

// Where a matrix lies: rows are multiples of 16 bytes, as are codes.
struct Matrix {
  const uint8_t* codes;
  const uint16_t* scales;
};

// Weights come a group at a time into registers: one group is added while the loads of the next are in flight, but of formats that take many registers.
template <class W> struct Walk {
  static constexpr uint32_t SLOTS = LOAD_ROWS * share_words<W> <= 16 ? 2 : 1;
  uint32_t at[LOAD_ROWS];  // where the share of each row starts, in pieces
  Cursor cursor;           // of the next loads
  uint32_t word[SLOTS][LOAD_ROWS][share_words<W>];
  uint16_t scale[SLOTS][LOAD_ROWS];
  float sum[sums_of<W>];
};

template <uint32_t WORDS> DEVICE void load_piece(const uint8_t* from, uint32_t* to) {
  if (WORDS == 4) {
    load16(from, to);
  } else {
    uint64_t both = *(const uint64_t*)from;
    to[0] = (uint32_t)both;
    to[1] = (uint32_t)(both >> 32);
  }
}

// All loads of group `group` of the cursor's run into slot `slot`. Past k the last values are read again, past the end zeros are taken: x is 0 there.
template <class W, class At> DEVICE void load_group(Walk<W>& walk, const Weights& w, const At& at, uint32_t group, uint32_t slot) {
  constexpr uint32_t PIECE = piece_values<W>, UNIT = 4 * piece_words<W>;
  if (walk.cursor.matrix >= w.matrices) {
    UNROLL
    for (uint32_t i = 0; i < LOAD_ROWS; i++) {
      walk.scale[slot][i] = 0;
      UNROLL
      for (uint32_t j = 0; j < share_words<W> && !W::SCALED; j++) walk.word[slot][i][j] = 0;
    }
    return;
  }
  Matrix m = at(walk.cursor.matrix);
  uint32_t of_matrix = walk.cursor.run * RUN + group, last = groups_in(w) - 1u;
  int32_t end = (int32_t)(w.k / PIECE) - 1 - (int32_t)part();  // below 0: even the first piece of this part is past k
  of_matrix = of_matrix < last ? of_matrix : last;
  UNROLL
  for (uint32_t i = 0; i < LOAD_ROWS; i++) {
    UNROLL
    for (uint32_t j = 0; j < SHARE / PIECE; j++) {
      uint32_t piece = of_matrix * (GROUP / PIECE) + j * PARTS;
      if (!W::SCALED) piece = (uint32_t)((int32_t)piece < end ? (int32_t)piece : end);
      const uint8_t* from = in_global(m.codes) + (uint64_t)(walk.at[i] + piece) * UNIT;
      load_piece<piece_words<W>>(from, walk.word[slot][i] + j * piece_words<W>);
    }
    if (W::SCALED) walk.scale[slot][i] = in_global(m.scales)[walk.at[i] / (GROUP / PIECE) + of_matrix];
  }
}

// at(i): matrix i < w.matrices. row(i): index of the row of weights of column i < 32. The first loads are on their way.
template <class W, class At, class Row> DEVICE void begin(Walk<W>& walk, const Weights& w, const At& at, const Row& row) {
  constexpr uint32_t PIECE = piece_values<W>;
  UNROLL
  for (uint32_t i = 0; i < LOAD_ROWS; i++) walk.at[i] = row(load_row(i)) * (w.pitch / PIECE) + w.first / PIECE + part();
  UNROLL
  for (uint32_t i = 0; i < sums_of<W>; i++) walk.sum[i] = 0.0f;
  walk.cursor = first_run(w);
  UNROLL
  for (uint32_t slot = 0; slot < Walk<W>::SLOTS; slot++) load_group(walk, w, at, slot, slot);
}
// Group `group` of a run, in slot `slot`, has been added: a later one takes its place, unless this is the last run and it would be past it.
template <class W, class At> DEVICE void release(Walk<W>& walk, const Weights& w, const At& at, uint32_t group, uint32_t slot, bool last) {
  uint32_t later = group + Walk<W>::SLOTS;
  asm volatile("" ::: "memory");  // else loads are brought forward and registers run out
  if (later == RUN) next_run(walk.cursor, w);
  if (later < RUN || !last) load_group(walk, w, at, later % RUN, slot);
  asm volatile("" ::: "memory");
}
template <class W> DEVICE void share_of(const Walk<W>& walk, uint32_t slot, uint32_t i, uint32_t* word) {
  UNROLL
  for (uint32_t j = 0; j < share_words<W>; j++) word[j] = walk.word[slot][i][j];
}
template <class W> DEVICE float scale_of(const Walk<W>& walk, uint32_t slot, uint32_t i) {
  return f16_value(walk.scale[slot][i]);
}

// Word i of a share as four signed bytes, in the order in which put_x leaves x.
DEVICE uint32_t code_word(q8g64_weights, const uint32_t* word, uint32_t i) { return word[i]; }
DEVICE uint32_t code_word(q4g64_weights, const uint32_t* word, uint32_t i) { return (word[i / 2] >> (4 * (i % 2))) & 0x0f0f0f0fu; }

// Where unit u of 8 values of this work-item's share starts in a group.
template <class W> DEVICE uint32_t unit_start(uint32_t u) {
  constexpr uint32_t PIECE = piece_values<W>;
  return (8 * u / PIECE * PARTS + part()) * PIECE + 8 * u % PIECE;
}

// The wave's x: rows of bf16 one after the other, or two planes of bytes a row, low and high (put_x). Groups of the high plane change places in
// pairs, so that work-items which read both planes meet no bank twice.
DEVICE uint8_t* x_of_wave(const Lds& lds) { return (uint8_t*)lds.x + tile_group() * X_BYTES; }
DEVICE uint8_t* plane_of(const Lds& lds, uint32_t row, uint32_t plane, uint32_t group) {
  return x_of_wave(lds) + (2 * row + plane) * RUN_VALUES + (group ^ plane) * GROUP;
}
DEVICE const bf16* values_of(const Lds& lds, uint32_t row, uint32_t group) { return (const bf16*)x_of_wave(lds) + row * RUN_VALUES + group * GROUP; }
DEVICE uint32_t side_of(uint32_t row, uint32_t group) { return (tile_group() * ROWS + row) * RUN + group; }

// sum + scale * (256 high + low, what is less than 0 in codes of q4g64 taken out), of row `row` of x.
template <class W> DEVICE float add_codes(const Lds& lds, uint32_t row, uint32_t group, float scale, int32_t low, int32_t high, float sum) {
  uint32_t at = side_of(row, group);
  int32_t all = (int32_t)((uint32_t)high << 8) + low;
  if (W::FORMAT == WEIGHT_Q4G64) all -= lds.x_sum[at];
  return fma_f32((float)all, scale * lds.x_scale[at], sum);
}

// Adds the group in slot `slot`, the run's group `group`, for `rows` rows of x; rows past them as the last one.
#if defined(TILE_MMA)
template <class W> DEVICE void add_group(Walk<W>& walk, const Lds& lds, uint32_t rows, uint32_t group, uint32_t slot) {
  uint32_t last = rows - 1u, word[LOAD_ROWS][share_words<W>];
  UNROLL
  for (uint32_t i = 0; i < LOAD_ROWS; i++) share_of(walk, slot, i, word[i]);
  if constexpr (W::SCALED) {
    constexpr uint32_t SET = 4;  // rows of x that share the 8 columns of a tile: column 2r and 2r + 1 are the planes of row r
    float scale[LOAD_ROWS];
    UNROLL
    for (uint32_t i = 0; i < LOAD_ROWS; i++) scale[i] = scale_of(walk, slot, i);
    UNROLL
    for (uint32_t first = 0; first < ROWS; first += SET) {
      if (first > last) continue;
      uint32_t x[4], r = first + tile_lane() / 8, of = first + part();
      load16(plane_of(lds, r < last ? r : last, tile_lane() / 4 % 2, group) + unit_start<W>(0), x);
      of = of < last ? of : last;
      UNROLL
      for (uint32_t tile = 0; tile < 2; tile++) {
        int32_t d[4] = {0, 0, 0, 0};
        UNROLL
        for (uint32_t step = 0; step < 2; step++) {
          uint32_t a[4];
          UNROLL
          for (uint32_t i = 0; i < 4; i++) a[i] = code_word(W(), word[2 * tile + i % 2], 2 * step + i / 2);
          mma_16x8x32(d, a, x + 2 * step);
        }
        UNROLL
        for (uint32_t half = 0; half < 2; half++) {
          uint32_t i = 2 * tile + half;
          walk.sum[first + i] = add_codes<W>(lds, of, group, scale[i], d[2 * half], d[2 * half + 1], walk.sum[first + i]);
        }
      }
    }
  } else {
    uint32_t r = tile_lane() / 4, x[SHARE / 2];
    const bf16* row = values_of(lds, r < last ? r : last, group);
    UNROLL
    for (uint32_t u = 0; u < SHARE / 8; u++) load16(row + unit_start<W>(u), x + 4 * u);
    UNROLL
    for (uint32_t step = 0; step < 4; step++) {
      UNROLL
      for (uint32_t tile = 0; tile < 2; tile++) {
        uint32_t a[4];
        UNROLL
        for (uint32_t i = 0; i < 4; i++) a[i] = word[2 * tile + i % 2][2 * step + i / 2];
        mma_16x8x16(walk.sum + 4 * tile, a, x + 2 * step);
      }
    }
  }
}
#elif defined(TILE_WMMA)
// x is A, the weights are B: a work-item's sums are all of one row of weights.
template <class W> DEVICE void add_group(Walk<W>& walk, const Lds& lds, uint32_t rows, uint32_t group, uint32_t slot) {
  constexpr uint32_t STEPS = GROUP / TILE;
  uint32_t last = rows - 1u, word[LOAD_ROWS][share_words<W>];
  UNROLL
  for (uint32_t i = 0; i < LOAD_ROWS; i++) share_of(walk, slot, i, word[i]);
  if constexpr (W::SCALED) {
    // Rows of the tile are planes, such that d[2j] and d[2j + 1] of a work-item are those of one row of x.
    constexpr uint32_t WORDS = SHARE / 4 / STEPS, UNITS = SHARE / 8 / STEPS;
    uint32_t m = tile_lane() % 16, row = TILE_WMMA == 1 ? 2 * (m / 4) + m % 2 : m / 8 * 4 + m % 8 / 2, plane = TILE_WMMA == 1 ? m / 2 % 2 : m % 2;
    const uint8_t* x = plane_of(lds, row < last ? row : last, plane, group);
    int32_t d[2][TILE_ELEMENTS] = {};
    UNROLL
    for (uint32_t step = 0; step < STEPS; step++) {
      code_words a, b[2];
      UNROLL
      for (uint32_t i = 0; i < WORDS; i++) {
        a[i] = (int)((const uint32_t*)(x + unit_start<W>(UNITS * step + i / 2)))[i % 2];
        b[0][i] = (int)code_word(W(), word[0], WORDS * step + i);
        b[1][i] = (int)code_word(W(), word[1], WORDS * step + i);
      }
      wmma_16x16x16(d[0], a, b[0]);
      wmma_16x16x16(d[1], a, b[1]);
      asm volatile("" ::: "memory");  // else the x of all steps is loaded first and registers run out
    }
    UNROLL
    for (uint32_t i = 0; i < 8; i++) {
      uint32_t tile = i / 4, j = i % 4, of = TILE_WMMA == 1 ? 2 * j + tile_lane() / 16 : tile_lane() / 16 * 4 + j;
      walk.sum[i] = add_codes<W>(lds, of < last ? of : last, group, scale_of(walk, slot, tile), d[tile][2 * j], d[tile][2 * j + 1], walk.sum[i]);
    }
  } else {
    constexpr uint32_t WORDS = SHARE / 8;  // of a fragment
    uint32_t r = tile_lane() % 16;
    const bf16* row = values_of(lds, r < last ? r : last, group);
    float sum[2][TILE_ELEMENTS];
    UNROLL
    for (uint32_t i = 0; i < 2 * TILE_ELEMENTS; i++) {
      uint32_t tile = i / TILE_ELEMENTS, j = i % TILE_ELEMENTS;
      sum[tile][j] = j >= PER_TILE ? 0.0f : walk.sum[tile * PER_TILE + j];
    }
    UNROLL
    for (uint32_t step = 0; step < STEPS; step++) {
      uint32_t x[WORDS];
      UNROLL
      for (uint32_t u = 0; u < WORDS / 4; u++) load16(row + unit_start<W>(step * (WORDS / 4) + u), x + 4 * u);
      tile_words a, b[2];
      UNROLL
      for (uint32_t i = 0; i < WORDS; i++) {
        a[i] = x[i];
        b[0][i] = word[0][step * WORDS + i];
        b[1][i] = word[1][step * WORDS + i];
      }
      wmma_16x16x16(sum[0], a, b[0]);
      wmma_16x16x16(sum[1], a, b[1]);
      asm volatile("" ::: "memory");
    }
    UNROLL
    for (uint32_t i = 0; i < 2 * PER_TILE; i++) walk.sum[i] = sum[i / PER_TILE][i % PER_TILE];
  }
}
#else
template <class W> DEVICE void add_group(Walk<W>& walk, const Lds& lds, uint32_t rows, uint32_t group, uint32_t slot) {
  uint32_t word[share_words<W>];
  share_of(walk, slot, 0, word);
  UNROLL
  for (uint32_t r = 0; r < ROWS; r++) {
    if (r >= opaque(rows)) continue;  // opaque: else 8 conditions are kept in registers of the wave
    if constexpr (W::SCALED) {
      const uint32_t *low = (const uint32_t*)plane_of(lds, r, 0, group), *high = (const uint32_t*)plane_of(lds, r, 1, group);
      int32_t sum[2] = {0, 0};
      UNROLL
      for (uint32_t i = 0; i < SHARE / 4; i++) {
        uint32_t codes = code_word(W(), word, i);
        sum[0] = dot4(codes, low[i], sum[0]);
        sum[1] = dot4(codes, high[i], sum[1]);
      }
      walk.sum[r] = add_codes<W>(lds, r, group, scale_of(walk, slot, 0), sum[0], sum[1], walk.sum[r]);
    } else {
      const bf16* x = values_of(lds, r, group);
      float* sum = walk.sum + r * CHAINS;
      UNROLL
      for (uint32_t i = 0; i < GROUP; i += CHAINS) {
        float v[CHAINS];
        load8(x + i, v);
        UNROLL
        for (uint32_t j = 0; j < CHAINS; j++) sum[j] = fma_f32(v[j], W::value(word + i / W::CHUNK * 4, i % W::CHUNK + j), sum[j]);
      }
    }
  }
}
#endif

// The wave's sums into LDS; block_sync before they are read.
template <class W> DEVICE void finish(const Walk<W>& walk, const Lds& lds, uint32_t rows) {
  float* to = lds.sums + tile_group() * ROWS * COLS;
  (void)rows;
#if defined(TILE_MMA)
  UNROLL
  for (uint32_t i = 0; i < 8; i++) {
    uint32_t row = W::SCALED ? i / 4 * 4 + part() : 2 * part() + i % 2, column = load_row(W::SCALED ? i % 4 : i / 2);
    to[row * COLS + column] = walk.sum[i];
  }
#elif defined(TILE_WMMA)
  constexpr uint32_t EACH = W::SCALED ? 4 : PER_TILE;
  UNROLL
  for (uint32_t i = 0; i < 2 * EACH; i++) {
    uint32_t row = TILE_WMMA == 1 ? 2 * (i % EACH) + tile_lane() / 16 : tile_lane() / 16 * EACH + i % EACH;
    if (row < ROWS) to[row * COLS + load_row(i / EACH)] = walk.sum[i];
  }
#else
  UNROLL
  for (uint32_t r = 0; r < ROWS; r++) {
    if (r >= opaque(rows)) continue;
    const float* v = walk.sum + (W::SCALED ? r : r * CHAINS);
    if constexpr (W::SCALED) to[r * COLS + tile_lane()] = v[0];
    else to[r * COLS + tile_lane()] = ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
  }
#endif
}

}  // namespace wave_product
