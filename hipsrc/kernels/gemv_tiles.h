// gemv_tiles.h - the wave product: 32 lanes multiply 32 rows of weights (its columns) by up to 8 rows of bf16 x, in f32, by matrix tiles where there
// are any. Formats: bf16, q8g64, q4g64 (weight_format.h). A GROUP is 64 consecutive k: what shares a scale.
//   k >= LONG_K   a block of 8 waves has one set of 32 columns; wave w adds the groups i with i % 8 == w, ascending; the waves' sums are added in LDS
//                 in the order w = 0 .. 7
//   else          each wave has 32 columns of its own and adds all groups, ascending
// Inside a group the sums are the matrix unit's. Without one: 8 chains of fma, chain j over the k with k % 8 == j, ascending; scaled formats start at
// 0 in each group and add chain * scale to the sums, others go on from group to group; a wave ends with ((0+4)+(2+6))+((1+5)+(3+7)). Either way an
// output depends on its row of x, its row of weights and k alone.
// Use, in a block of THREADS work-items, all of which call everything:
//   Walk<W> walk;  begin(walk, codes, scales, k, row)      row(i): index of the row of weights of column i < 32; the first loads are on their way
//   Panel p = panel_of<W>(lds, rows, k);  product(walk, p, x, aligned ..)     x(r): row r < rows of x, k values
//   for_outputs(p, f)                                f(wave, column, row, sum): the 32 lanes of a group have one row together; where k >= LONG_K the
//                                                    block's columns are one set of 32 and wave is 0
// block_sync before LDS is used again.
#pragma once
#include "gemv.h"

namespace wave_product {

constexpr uint32_t THREADS = 256, WAVES = THREADS / 32, COLS = 32, ROWS = 8, GROUP = WEIGHT_GROUP, LONG_K = 1024;
constexpr uint32_t X_VALUES = 16384;                                            // of x in LDS at once
constexpr uint32_t PAD_MAX = 32, X_UNITS = (X_VALUES + ROWS * PAD_MAX) / 8;     // with what rows are set apart by
constexpr uint32_t X_SUMS = X_VALUES / GROUP, SUMS = WAVES * ROWS * COLS;
constexpr uint32_t AHEAD_BYTES = 4096;  // of each row of weights, k >= LONG_K, that are asked for before they are loaded

// LOAD_ROWS: rows of weights of which a work-item loads values, SHARE of each group: `part` says which.
#if defined(TILE_MMA)
constexpr bool TILES = true;
constexpr uint32_t LOAD_ROWS = 4, SHARE = 16, PER_WALK = 8, FLIGHT_WORDS = 64;
DEVICE uint32_t load_row(uint32_t i) { return tile_lane() / 4 + 8 * i; }
DEVICE uint32_t part() { return tile_lane() % 4; }
DEVICE uint32_t x_row() { return tile_lane() / 4; }
#elif defined(TILE_WMMA)
constexpr bool TILES = true;
constexpr uint32_t LOAD_ROWS = 2, SHARE = TILE_WMMA == 1 ? 64 : 32, PER_TILE = TILE_WMMA == 1 ? 4 : 8, PER_WALK = 2 * PER_TILE, FLIGHT_WORDS = 64;
DEVICE uint32_t load_row(uint32_t i) { return tile_lane() % 16 + 16 * i; }
DEVICE uint32_t part() { return TILE_WMMA == 1 ? 0u : tile_lane() / 16; }
DEVICE uint32_t x_row() { return tile_lane() % 16; }
#else
constexpr bool TILES = false;
constexpr uint32_t LOAD_ROWS = 1, SHARE = 64, CHAINS = 8, PER_WALK = ROWS * CHAINS, FLIGHT_WORDS = 32;
DEVICE uint32_t load_row(uint32_t) { return tile_lane(); }
DEVICE uint32_t part() { return 0; }
#endif
constexpr uint32_t PARTS = GROUP / SHARE;

// A share lies in memory as pieces of PIECE values, 16 bytes or the whole share; piece j of part p starts at value (j * PARTS + p) * PIECE.
template <class W> constexpr uint32_t piece_values = W::CHUNK < SHARE ? W::CHUNK : SHARE;
template <class W> constexpr uint32_t piece_words = 4 * piece_values<W> / W::CHUNK;
template <class W> constexpr uint32_t share_words = SHARE * 4 / W::CHUNK;

// Groups in flight a wave, by the registers that they take.
constexpr uint32_t depth_for(uint32_t words) { return FLIGHT_WORDS <= words ? 1 : FLIGHT_WORDS / words < 4 ? FLIGHT_WORDS / words : 4; }
template <class W> constexpr uint32_t depth_of = W::FORMAT == WEIGHT_Q8G64 && PARTS == 4 ? 2 : depth_for(LOAD_ROWS * (share_words<W> + W::SCALED));

// Codes of q4g64 enter the tiles as 128 + code + 8; the sum of x over the group, times 136, is taken out again.
template <class W> constexpr bool OFFSET = TILES && W::FORMAT == WEIGHT_Q4G64;
constexpr float CODE_OFFSET = 136.0f;

// Values between the ends of rows of x: lanes that read several rows at once meet no bank twice.
template <class W> constexpr uint32_t pad_of = PARTS == 4 && W::FORMAT == WEIGHT_BF16 ? 32 : 8;

// The block's LDS.
struct Lds {
  words16* x;      // [X_UNITS]
  float* x_sums;   // [X_SUMS], formats with OFFSET alone
  float* sums;     // [SUMS]
  float* partial;  // [ROWS * THREADS / WAVE], and
  float* scale;    // [ROWS]: norms alone
};

// Values [first, first + chunk) of `rows` rows of x in LDS, rows `pitch` values apart.
struct Panel {
  Lds lds;
  uint32_t rows, k, first, chunk, pitch;
};

template <class W> struct Walk {
  static constexpr uint32_t DEPTH = depth_of<W>;
  const uint8_t* codes;  // of the matrix
  const uint16_t* scales;
  uint32_t at[LOAD_ROWS], scale_at[LOAD_ROWS];  // where the share of each row starts, in pieces and in scales
  uint32_t k, groups, next, stride;  // next: the wave's first group of the panel to come
  const uint8_t* row;               // of which this work-item prefetches bytes from `ahead` on; four work-items of a wave have one
  uint32_t ahead, row_bytes;
  uint32_t word[DEPTH][LOAD_ROWS][share_words<W>];
  uint16_t scale[DEPTH][LOAD_ROWS];
  float sum[PER_WALK];
};

template <class W> DEVICE Panel panel_of(const Lds& lds, uint32_t rows, uint32_t k) {
  constexpr uint32_t TURN = WAVES * GROUP * depth_of<W>;
  static_assert(X_VALUES / ROWS >= TURN, "8 rows of a whole turn of the groups in flight");
  uint32_t chunk = X_VALUES / rows / TURN * TURN;
  return {lds, rows, k, 0, chunk, chunk + pad_of<W>};
}

// Group `group` into slot `slot`. A last group that is not whole, which bf16 alone has, is read as the last 64 values; x is set to match (source_of).
template <class W> DEVICE void load_group(Walk<W>& walk, uint32_t slot, uint32_t group) {
  constexpr uint32_t PIECE = piece_values<W>, WORDS = piece_words<W>, UNIT = 4 * WORDS;
  uint32_t start = group * GROUP;
  if (!W::SCALED) start = start < walk.k - GROUP ? start : walk.k - GROUP;
  UNROLL
  for (uint32_t i = 0; i < LOAD_ROWS; i++) {
    const uint8_t* row = in_global(walk.codes + (uint64_t)(walk.at[i] + start / PIECE) * UNIT);
    UNROLL
    for (uint32_t j = 0; j < SHARE / PIECE; j++) {
      uint32_t* to = walk.word[slot][i] + j * WORDS;
      if (WORDS == 4) {
        load16(row + j * PARTS * UNIT, to);
      } else {
        uint64_t both = *(const uint64_t*)(row + j * PARTS * UNIT);
        to[0] = (uint32_t)both;
        to[1] = (uint32_t)(both >> 32);
      }
    }
    if (W::SCALED) walk.scale[slot][i] = *in_global(walk.scales + (walk.scale_at[i] + group));
  }
}

template <class W> DEVICE void prefetch_row(Walk<W>& walk, uint32_t bytes) {
  if (walk.ahead >= walk.row_bytes) return;
  uint32_t left = walk.row_bytes - walk.ahead;
  prefetch(walk.row + walk.ahead, left < bytes ? left : bytes);
  walk.ahead += bytes;
}

// codes, scales: of row 0 of a matrix of less than 2^32 weights; rows are multiples of 16 bytes, k at least 64.
// Starts the first groups.
template <class W, class Row>
DEVICE void begin(Walk<W>& walk, const uint8_t* codes, const uint16_t* scales, uint32_t k, const Row& row) {
  walk.codes = codes;
  walk.scales = scales;
  walk.k = k;
  walk.groups = (k + GROUP - 1) / GROUP;
  walk.stride = k >= LONG_K ? WAVES : 1u;
  walk.next = k >= LONG_K ? tile_group() : 0u;
  constexpr uint32_t PIECE = piece_values<W>;
  UNROLL
  for (uint32_t i = 0; i < LOAD_ROWS; i++) {
    uint32_t index = row(load_row(i));
    walk.at[i] = index * (k / PIECE) + part();
    walk.scale_at[i] = index * (k / GROUP);
  }
  UNROLL
  for (uint32_t i = 0; i < PER_WALK; i++) walk.sum[i] = 0.0f;
  UNROLL
  for (uint32_t slot = 0; slot < Walk<W>::DEPTH; slot++) {
    uint32_t group = walk.next + slot * walk.stride;
    load_group(walk, slot, group < walk.groups ? group : walk.groups - 1u);  // no branch; nobody adds the last group twice
  }
  constexpr uint32_t SHARERS = COLS / WAVES;
  walk.ahead = 0;
  walk.row_bytes = k >= LONG_K && tile_lane() < SHARERS ? (uint32_t)W::row_bytes(k) : 0u;
  walk.row = codes + (uint64_t)row(tile_group() * SHARERS + tile_lane() % SHARERS) * W::row_bytes(k);
  prefetch_row(walk, AHEAD_BYTES);
}

// Pair i of a share in bf16, in the order in which `ordered` leaves x.
DEVICE uint32_t weight_pair(bf16_weights, const uint32_t* word, uint32_t i) { return word[i]; }
#if defined(TILE_MMA) || defined(TILE_WMMA)
DEVICE uint32_t weight_pair(q8g64_weights, const uint32_t* word, uint32_t i) { return bytes_bf16(word[i / 2], i % 2); }
#endif
DEVICE uint32_t weight_pair(q4g64_weights, const uint32_t* word, uint32_t i) {
  return and_or(word[i / 4] >> (4 * (i % 4)), 0x000f000fu, 0x43004300u);
}

// Eight values of x in the order of the pairs: q8g64 (0 2) (1 3) of each four, q4g64 (0 4) (1 5) (2 6) (3 7).
template <class W> DEVICE void order_unit(uint32_t* word) {
  if (!TILES || W::FORMAT == WEIGHT_BF16) return;
  constexpr uint32_t APART = W::FORMAT == WEIGHT_Q4G64 ? 2 : 1;  // words from the one of a pair's low half to that of its high half
  uint32_t from[4] = {word[0], word[1], word[2], word[3]};
  UNROLL
  for (uint32_t i = 0; i < 2; i++) {
    uint32_t low = from[i * (3 - APART)], high = from[i * (3 - APART) + APART];
    word[2 * i] = (low & 0xffffu) | high << 16;
    word[2 * i + 1] = low >> 16 | (high & 0xffff0000u);
  }
}

DEVICE void store_words(bf16* to, const uint32_t* word) { *(words16*)to = {{word[0], word[1], word[2], word[3]}}; }

// Unit u of this work-item's share of a row of x in a group, `from`: the start of the row's group.
template <class W> DEVICE void x_unit(const bf16* from, uint32_t u, uint32_t* word) {
  constexpr uint32_t PIECE = piece_values<W>;
  load16(from + (8 * u / PIECE * PARTS + part()) * PIECE + 8 * u % PIECE, word);
}

// Adds the group in slot `slot`; `group` counts from the start of the panel.
#if defined(TILE_MMA)
template <class W> DEVICE void add_group(Walk<W>& walk, uint32_t slot, const Panel& p, uint32_t group) {
  uint32_t last = p.rows - 1u, x[SHARE / 2];
  const bf16* row = (const bf16*)p.lds.x + (x_row() < last ? x_row() : last) * p.pitch + group * GROUP;
  UNROLL
  for (uint32_t u = 0; u < SHARE / 8; u++) x_unit<W>(row, u, x + 4 * u);
  float sum[PER_WALK];
  UNROLL
  for (uint32_t i = 0; i < PER_WALK; i++) sum[i] = W::SCALED ? 0.0f : walk.sum[i];
  UNROLL
  for (uint32_t step = 0; step < 4; step++) {
    UNROLL
    for (uint32_t tile = 0; tile < 2; tile++) {
      uint32_t a[4];
      UNROLL
      for (uint32_t i = 0; i < 4; i++) a[i] = weight_pair(W(), walk.word[slot][2 * tile + i % 2], 2 * step + i / 2);
      mma_16x8x16(sum + 4 * tile, a, x + 2 * step);
    }
  }
  float out[2] = {0, 0};
  if (OFFSET<W>) {
    UNROLL
    for (uint32_t i = 0; i < 2; i++) {
      uint32_t row = 2 * part() + i < last ? 2 * part() + i : last;
      out[i] = p.lds.x_sums[row * (p.chunk / GROUP) + group];
    }
  }
  UNROLL
  for (uint32_t i = 0; i < PER_WALK; i++) {
    if (OFFSET<W>) sum[i] = fma_f32(-CODE_OFFSET, out[i % 2], sum[i]);
    walk.sum[i] = W::SCALED ? fma_f32(sum[i], f16_value(walk.scale[slot][i / 2]), walk.sum[i]) : sum[i];
  }
}
#elif defined(TILE_WMMA)
// x is A, the weights are B: a work-item's sums are all of one row of weights.
template <class W> DEVICE void add_group(Walk<W>& walk, uint32_t slot, const Panel& p, uint32_t group) {
  constexpr uint32_t WORDS = SHARE / 8;  // of a fragment
  uint32_t last = p.rows - 1u;
  const bf16* row = (const bf16*)p.lds.x + (x_row() < last ? x_row() : last) * p.pitch + group * GROUP;
  float sum[2][TILE_ELEMENTS];
  UNROLL
  for (uint32_t i = 0; i < 2 * TILE_ELEMENTS; i++) {
    uint32_t tile = i / TILE_ELEMENTS, j = i % TILE_ELEMENTS;
    sum[tile][j] = W::SCALED || j >= PER_TILE ? 0.0f : walk.sum[tile * PER_TILE + j];
  }
  UNROLL
  for (uint32_t step = 0; step < 4; step++) {
    uint32_t x[WORDS];
    UNROLL
    for (uint32_t u = 0; u < WORDS / 4; u++) x_unit<W>(row, step * (WORDS / 4) + u, x + 4 * u);
    tile_words a, b[2];
    UNROLL
    for (uint32_t i = 0; i < WORDS; i++) {
      a[i] = x[i];
      b[0][i] = weight_pair(W(), walk.word[slot][0], step * WORDS + i);
      b[1][i] = weight_pair(W(), walk.word[slot][1], step * WORDS + i);
    }
    wmma_16x16x16(sum[0], a, b[0]);
    wmma_16x16x16(sum[1], a, b[1]);
    asm volatile("" ::: "memory");  // else the x of all steps is loaded first and registers run out
  }
  UNROLL
  for (uint32_t i = 0; i < PER_WALK; i++) {
    uint32_t tile = i / PER_TILE, j = i % PER_TILE, x_row = TILE_WMMA == 1 ? 2 * j + tile_lane() / 16 : j;
    float part = sum[tile][j];
    if (OFFSET<W>) part = fma_f32(-CODE_OFFSET, p.lds.x_sums[(x_row < last ? x_row : last) * (p.chunk / GROUP) + group], part);
    walk.sum[i] = W::SCALED ? fma_f32(part, f16_value(walk.scale[slot][tile]), walk.sum[i]) : part;
  }
}
#else
template <class W> DEVICE void add_group(Walk<W>& walk, uint32_t slot, const Panel& p, uint32_t group) {
  const bf16* x = (const bf16*)p.lds.x + group * GROUP;
  float scale = W::SCALED ? f16_value(walk.scale[slot][0]) : 0.0f;
  UNROLL
  for (uint32_t r = 0; r < ROWS; r++) {
    if (r >= opaque(p.rows)) continue;  // opaque: else 8 conditions are kept in registers of the wave
    float sum[CHAINS];
    UNROLL
    for (uint32_t j = 0; j < CHAINS; j++) sum[j] = W::SCALED ? 0.0f : walk.sum[r * CHAINS + j];
    UNROLL
    for (uint32_t i = 0; i < GROUP; i += CHAINS) {
      float v[CHAINS];
      load8(x + r * p.pitch + i, v);
      UNROLL
      for (uint32_t j = 0; j < CHAINS; j++) {
        sum[j] = fma_f32(v[j], W::value(walk.word[slot][0] + i / W::CHUNK * 4, i % W::CHUNK + j), sum[j]);
      }
    }
    UNROLL
    for (uint32_t j = 0; j < CHAINS; j++) walk.sum[r * CHAINS + j] = W::SCALED ? fma_f32(sum[j], scale, walk.sum[r * CHAINS + j]) : sum[j];
  }
}
#endif

// Adds the panel's groups; slots are refilled across the border of panels.
template <class W> DEVICE void advance(Walk<W>& walk, const Panel& p) {
  uint32_t first = p.first / GROUP, end = p.k - p.first > p.chunk ? first + p.chunk / GROUP : walk.groups;
  ROLLED
  while (walk.next < end) {
    UNROLL
    for (uint32_t slot = 0; slot < Walk<W>::DEPTH; slot++) {
      uint32_t group = walk.next + slot * walk.stride, later = group + Walk<W>::DEPTH * walk.stride;
      if (group < end) add_group(walk, slot, p, group - first);
      if (later < walk.groups) load_group(walk, slot, later);
    }
    walk.next += Walk<W>::DEPTH * walk.stride;
    prefetch_row(walk, Walk<W>::DEPTH * WAVES * (uint32_t)W::row_bytes(GROUP));
  }
}

// The wave's sums into LDS; block_sync before they are read.
template <class W> DEVICE void finish(const Walk<W>& walk, const Panel& p) {
  float* to = p.lds.sums + tile_group() * ROWS * COLS;
#if defined(TILE_MMA)
  UNROLL
  for (uint32_t i = 0; i < PER_WALK; i++) to[(2 * part() + i % 2) * COLS + load_row(i / 2)] = walk.sum[i];
#elif defined(TILE_WMMA)
  UNROLL
  for (uint32_t i = 0; i < PER_WALK; i++) {
    uint32_t row = TILE_WMMA == 1 ? 2 * (i % PER_TILE) + tile_lane() / 16 : i % PER_TILE;
    if (TILE_WMMA == 1 || tile_lane() < 16) to[row * COLS + load_row(i / PER_TILE)] = walk.sum[i];
  }
#else
  UNROLL
  for (uint32_t r = 0; r < ROWS; r++) {
    const float* v = walk.sum + r * CHAINS;
    if (r < opaque(p.rows)) to[r * COLS + tile_lane()] = ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
  }
#endif
}

// f(wave, column, row, sum) for each output; wave: whose columns they are, 0 where k >= LONG_K.
template <class F> DEVICE void for_outputs(const Panel& p, const F& f) {
  bool wide = p.k >= LONG_K;
  uint32_t column = tile_lane(), wave = wide ? 0u : tile_group();
  ROLLED
  for (uint32_t row = wide ? tile_group() : 0u; row < p.rows; row += wide ? ROWS : 1u) {
    const float* from = p.lds.sums + (wave * ROWS + row) * COLS + column;
    float sum = from[0];
    if (wide) {
      UNROLL
      for (uint32_t w = 1; w < WAVES; w++) sum += from[w * ROWS * COLS];
    }
    f(wave, column, row, sum);
  }
}

// Units of 8 values of a row that the panel takes: what is left of k, in whole groups.
DEVICE uint32_t units_of(const Panel& p) {
  uint32_t left = (p.k - p.first + GROUP - 1) / GROUP * GROUP;
  return (left < p.chunk ? left : p.chunk) / 8;
}
// Where value `at` of a row of x in LDS comes from, at a multiple of 8; k: it is 0. The last group, if it is not whole, has the row's last 64 values,
// of which the group before has had some.
DEVICE uint32_t source_of(const Panel& p, uint32_t at) {
  uint32_t whole = p.k / GROUP * GROUP, source = at < whole ? at : at - (GROUP - p.k % GROUP);
  return at < whole || source >= whole ? source : p.k;
}

// f / units for f below 2^16, by one product: the quotient plus half a unit's share is never near a border.
struct Divider {
  uint32_t units;
  float share;
};
DEVICE Divider divider(uint32_t units) { return {units, 1.0f / (float)units}; }
DEVICE uint32_t quotient(const Divider& d, uint32_t f) { return (uint32_t)(((float)f + 0.5f) * d.share); }

DEVICE bf16* unit_at(const Panel& p, uint32_t row, uint32_t unit) { return (bf16*)p.lds.x + row * p.pitch + 8 * unit; }

// What becomes of x on its way into LDS where norm is not null: h = T(norm * T(x * scale)), also to h [rows, k] where that is not null. Not for
// q4g64.
struct Norm {
  const bf16* norm;
  bf16* h;
  const float* scale;  // of each row, in LDS: norm_scales
};

// Unit `at` of row `row` in `word` becomes h.
DEVICE void normalise(const Norm& n, uint32_t row, uint32_t at, uint32_t k, bool aligned, const uint32_t* weight, uint32_t* word) {
  float scale = n.scale[row];
  UNROLL
  for (uint32_t i = 0; i < 4; i++) {
    float low = bf16_weights::value(weight, 2 * i) * rounded<bf16>::of(bf16_weights::value(word, 2 * i) * scale);
    float high = bf16_weights::value(weight, 2 * i + 1) * rounded<bf16>::of(bf16_weights::value(word, 2 * i + 1) * scale);
    word[i] = f32_to_bf16(low).bits | (uint32_t)f32_to_bf16(high).bits << 16;
  }
  if (!n.h || at >= k) return;
  bf16* to = n.h + (uint64_t)row * k + at;
  if (aligned) {
    store_words(to, word);
  } else {
    UNROLL
    for (uint32_t j = 0; j < 8; j++) to[j].bits = (uint16_t)(word[j / 2] >> (16 * (j % 2)));
  }
}

// The panel's values of x, zeros past k. aligned: 16-byte accesses can read every x(r), and norm and h.
template <class W, class Row> DEVICE void stage(const Panel& p, const Row& x, bool aligned, const Norm& n) {
  constexpr uint32_t FLIGHT = 2;
  uint32_t units = units_of(p), total = p.rows * units, t = thread_id();
  Divider by = divider(units);
  if (!aligned) {
    ROLLED
    for (uint32_t f = t; f < total; f += THREADS) {
      uint32_t row = quotient(by, f), unit = f - row * units, at = source_of(p, p.first + 8 * unit), word[4], weight[4];
      gemv::load_unit(x(row), at, p.k, false, word);
      if (n.norm) {
        gemv::load_unit(n.norm, at, p.k, false, weight);
        normalise(n, row, at, p.k, false, weight, word);
      }
      order_unit<W>(word);
      store_words(unit_at(p, row, unit), word);
    }
    return;
  }
  ROLLED
  for (uint32_t begin = 0; begin < total; begin += THREADS * FLIGHT) {  // the same turns in every work-item: they meet in lanes_sum
    uint32_t row[FLIGHT], unit[FLIGHT], word[FLIGHT][4], weight[FLIGHT][4];
    UNROLL
    for (uint32_t j = 0; j < FLIGHT; j++) {
      uint32_t f = begin + j * THREADS + t, inside = f < total ? f : total - 1u;
      row[j] = quotient(by, inside);
      unit[j] = inside - row[j] * units;
      uint32_t at = source_of(p, p.first + 8 * unit[j]);
      load16(in_global(x(row[j]) + (at < p.k ? at : 0u)), word[j]);
      if (n.norm) load16(in_global(n.norm + (at < p.k ? at : 0u)), weight[j]);
    }
    if constexpr (OFFSET<W>) {
      float sum[FLIGHT];
      UNROLL
      for (uint32_t j = 0; j < FLIGHT; j++) {
        sum[j] = 0;
        UNROLL
        for (uint32_t i = 0; i < 8; i++) sum[j] += bf16_weights::value(word[j], i);
      }
      lanes_sum<8>(sum);  // 8 units are a group
      UNROLL
      for (uint32_t j = 0; j < FLIGHT; j++) {
        if (t % 8 == 0 && begin + j * THREADS + t < total) p.lds.x_sums[row[j] * (p.chunk / GROUP) + unit[j] / 8] = sum[j];
      }
    }
    UNROLL
    for (uint32_t j = 0; j < FLIGHT; j++) {
      if (begin + j * THREADS + t >= total) continue;
      uint32_t at = source_of(p, p.first + 8 * unit[j]);
      if constexpr (!OFFSET<W>) {
        if (n.norm) normalise(n, row[j], at, p.k, true, weight[j], word[j]);
      }
      UNROLL
      for (uint32_t i = 0; i < 4; i++) word[j][i] = at < p.k ? word[j][i] : 0u;
      order_unit<W>(word[j]);
      store_words(unit_at(p, row[j], unit[j]), word[j]);
    }
  }
}

// lds.scale[first + r] = 1 / sqrt(mean(x^2) + eps) for N rows, those from p.rows on as the last one. The sums are those of rms_norm: value c belongs
// to work-item c % 256. Ends with block_sync.
template <uint32_t N, class Row> DEVICE void row_scales(const Panel& p, const Row& x, uint32_t first, float eps) {
  constexpr uint32_t FLIGHT = 24 / N;
  const bf16* row[N];
  float sum[N];
  UNROLL
  for (uint32_t r = 0; r < N; r++) {
    row[r] = in_global(x(first + r < p.rows ? first + r : p.rows - 1u));
    sum[r] = 0;
  }
  ROLLED
  for (uint32_t c = thread_id(); c < p.k; c += FLIGHT * THREADS) {
    float v[FLIGHT][N];
    UNROLL
    for (uint32_t i = 0; i < FLIGHT; i++) {
      UNROLL
      for (uint32_t r = 0; r < N; r++) v[i][r] = c + i * THREADS < p.k ? load_f32(row[r] + c + i * THREADS) : 0.0f;
    }
    UNROLL
    for (uint32_t i = 0; i < FLIGHT; i++) {
      UNROLL
      for (uint32_t r = 0; r < N; r++) sum[r] = fma_f32(v[i][r], v[i][r], sum[r]);
    }
  }
  gemv::block_sums(sum, p.lds.partial);
  UNROLL
  for (uint32_t r = 0; r < N; r++) {
    if (thread_id() == r) p.lds.scale[first + r] = rsqrt_exact(sum[r] / (float)p.k + eps);
  }
  block_sync();
}

// lds.scale of all rows.
template <class Row> DEVICE void norm_scales(const Panel& p, const Row& x, float eps) {
  if (p.rows == 1) {
    row_scales<1>(p, x, 0, eps);
    return;
  }
  ROLLED
  for (uint32_t first = 0; first < p.rows; first += 4) row_scales<4>(p, x, first, eps);
}

// Everything from the staging of x to the sums in LDS.
template <class W, class Row> DEVICE void product(Walk<W>& walk, Panel& p, const Row& x, bool aligned, const Norm& norm = {}) {
  for (; p.first < p.k; p.first += p.chunk) {
    if (p.first) block_sync();
    stage<W>(p, x, aligned, norm);
    block_sync();
    advance(walk, p);
  }
  finish(walk, p);
  block_sync();
}

}  // namespace wave_product
