// expert_tiles.h - the wave product (expert_walk.h, whose order of additions it keeps) of step_experts.hip: several tiles of 32 columns one after
// another, whose weights never stop flowing, groups as the caller says, and scales of quantised weights in runs: a load of one scale by each lane
// meets as many lines of memory as all the codes of a group.
//   STRIDE == WAVES   the waves share a tile's rows of weights: the block brings all scales of a panel into LDS
//   STRIDE == 1       the wave has its own: lane l reads those of row l, of several groups at once
// product() below and the slots of step_down are the uses.
#pragma once
#include "expert_walk.h"

namespace expert_tiles {

using namespace expert_walk;

constexpr uint32_t CHUNK_MAX = 6144;                             // values of a panel
constexpr uint32_t SCALE_PITCH = CHUNK_MAX / GROUP + 2;          // scales from row to row: an odd number of words, so that rows meet no bank twice
constexpr uint32_t SCALES = COLS * SCALE_PITCH;                  // of LDS

#if defined(TILE_MMA)
constexpr bool RUNS = true;
#else
constexpr bool RUNS = false;
#endif
// Groups in flight a wave.
template <class W> constexpr uint32_t flight_of = !RUNS ? depth_of<W> : W::FORMAT == WEIGHT_Q4G64 ? 4 : W::FORMAT == WEIGHT_Q8G64 ? 2 : 1;

// A panel of `rows` rows of k values where there is room for `most` rows.
template <class W> DEVICE Panel panel(const Lds& lds, uint32_t rows, uint32_t most, uint32_t k) {
  constexpr uint32_t TURN = WAVES * GROUP * flight_of<W>;
  uint32_t room = X_VALUES / most < CHUNK_MAX ? X_VALUES / most : CHUNK_MAX, chunk = room / TURN * TURN;
  return {lds, rows, k, 0, chunk, chunk + pad_of<W>};
}

// Scales on their way from memory to LDS.
struct Quads {
  static constexpr uint32_t COUNT = (COLS * CHUNK_MAX / GROUP / 4 + THREADS - 1) / THREADS;
  uint64_t four[COUNT];
};

// Without runs: the walk of expert_walk.h, which starts anew with each tile. STRIDE 0: as k says.
template <class W, bool ALIGNED, uint32_t STRIDE, bool FAST = RUNS && ALIGNED> struct Stream {
  Walk<W> walk;

  template <class Row>
  DEVICE void begin(Stream& s, const uint8_t* codes, const uint16_t* scales, uint32_t k, const Row& row, uint32_t next, uint32_t tiles) {
    uint32_t stride = STRIDE ? STRIDE : k >= LONG_K ? WAVES : 1u;
    begin_at(s.walk, codes, scales, k, [&](uint32_t i) { return row(0, i); }, tiles ? next : k, stride);
  }
  template <class Row> DEVICE void turn_to(Stream& s, uint32_t tile, uint32_t next, const Row& row) {
    begin_at(s.walk, s.walk.codes, s.walk.scales, s.walk.k, [&](uint32_t i) { return row(tile, i); }, next, s.walk.stride);
  }
  template <class Row> DEVICE void fetch_scales(const Stream&, Quads&, const Panel&, uint32_t, const Row&) {}
  template <class Row> DEVICE void put_scales(const Stream&, const Quads&, const Panel&, uint32_t, const Row&, uint16_t*) {}
  template <class Row> DEVICE void advance(Stream& s, const Panel& p, const uint16_t*, const Row&) { expert_walk::advance(s.walk, p); }
  DEVICE void finish(const Stream& s, const Panel& p) { expert_walk::finish(s.walk, p); }
};

// bf16 in rows of any length, and all bf16 where the walk would run out of registers: lane l adds column l, in the order of targets without tiles.
template <class W, uint32_t STRIDE> struct Stream<W, false, STRIDE, false> {
  const uint16_t *codes, *own;  // of row 0, of the lane's
  uint32_t k, next, stride;
  bool aligned;
  float sum[ROWS * 8];

  template <class Row>
  DEVICE void begin(Stream& s, const uint8_t* codes, const uint16_t*, uint32_t k, const Row& row, uint32_t next, uint32_t tiles) {
    s.codes = (const uint16_t*)codes;
    s.k = k;
    s.aligned = gemv::rows_aligned<W>(codes, k);
    s.stride = STRIDE ? STRIDE : k >= LONG_K ? WAVES : 1u;
    turn_to(s, 0, tiles ? next : k, row);
  }
  template <class Row> DEVICE void turn_to(Stream& s, uint32_t tile, uint32_t next, const Row& row) {
    s.own = s.codes + (uint64_t)row(tile, tile_lane()) * s.k;
    s.next = next;
    UNROLL
    for (uint32_t i = 0; i < ROWS * 8; i++) s.sum[i] = 0.0f;
  }
  template <class Row> DEVICE void fetch_scales(const Stream&, Quads&, const Panel&, uint32_t, const Row&) {}
  template <class Row> DEVICE void put_scales(const Stream&, const Quads&, const Panel&, uint32_t, const Row&, uint16_t*) {}
  template <class Row> DEVICE void advance(Stream& s, const Panel& p, const uint16_t*, const Row&) {
    uint32_t first = p.first / GROUP, end = first + units_of(p) / 8;
    for (; s.next < end; s.next += s.stride) {
      ROLLED
      for (uint32_t c = 0; c < GROUP; c += 8) {
        uint32_t word[4];
        float w[8];
        uint32_t at = s.next * GROUP + c;
        if (s.aligned && at < s.k) load16(in_global(s.own + at), word);
        else load_elements(s.own, s.k, at, word);
        bf16_weights::expand(word, w);
        UNROLL
        for (uint32_t r = 0; r < ROWS; r++) {
          if (r >= p.rows) continue;
          float v[8];
          load8((const bf16*)p.lds.x + r * p.pitch + (s.next - first) * GROUP + c, v);
          UNROLL
          for (uint32_t j = 0; j < 8; j++) s.sum[8 * r + j] = fma_f32(v[j], w[j], s.sum[8 * r + j]);
        }
      }
    }
  }
  DEVICE void finish(const Stream& s, const Panel& p) {
    float* to = p.lds.sums + tile_group() * ROWS * COLS + tile_lane();
    UNROLL
    for (uint32_t r = 0; r < ROWS; r++) {
      const float* v = s.sum + 8 * r;
      if (r < p.rows) to[r * COLS] = ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
    }
  }
};

#if defined(TILE_MMA)
template <class W, uint32_t STRIDE> struct Stream<W, true, STRIDE, true> {
  static constexpr uint32_t DEPTH = flight_of<W>, TURN = DEPTH * STRIDE, WORDS = share_words<W>;
  static constexpr bool STAGED = STRIDE == WAVES, RUN = !STAGED && W::SCALED;
  static constexpr uint32_t PIECES = SHARE / piece_values<W>, PIECE_WORDS = piece_words<W>;
  const uint8_t* codes;  // of row 0
  const uint16_t* scales;
  const uint16_t* own;             // RUN: scales of the tile's row tile_lane()
  uint32_t k, groups, start, tiles, next;
  uint32_t load_tile, load_next;   // where the next turn of loads starts
  const uint8_t* from[LOAD_ROWS];  // this work-item's share of each row there
  bool runs;                       // scales can be read four, or two, at a time
  uint32_t word[DEPTH][LOAD_ROWS][WORDS];
  uint32_t scale[2][(DEPTH + 1) / 2];    // RUN: of this turn and of the next, two a word
  float sum[PER_WALK];

  template <class Row> DEVICE void aim(Stream& s, const Row& row) {
    UNROLL
    for (uint32_t i = 0; i < LOAD_ROWS; i++) {
      s.from[i] = s.codes + (uint64_t)row(s.load_tile, load_row(i)) * W::row_bytes(s.k) + (s.start * group_bytes<W> + part() * (PIECE_WORDS * 4));
    }
  }
  DEVICE void load(Stream& s, uint32_t slot) {
    if (s.load_tile >= s.tiles || s.load_next + slot * STRIDE >= s.groups) return;
    UNROLL
    for (uint32_t i = 0; i < LOAD_ROWS; i++) {
      const uint8_t* from = in_global(s.from[i] + slot * STRIDE * group_bytes<W>);
      UNROLL
      for (uint32_t j = 0; j < PIECES; j++) {
        uint32_t* to = s.word[slot][i] + j * PIECE_WORDS;
        if constexpr (PIECE_WORDS == 4) {
          load16_stream(from + j * PARTS * 16, to);
        } else {
          load8_stream(from, to);
        }
      }
    }
  }
  // After the loads of a turn.
  template <class Row> DEVICE void step(Stream& s, const Row& row) {
    s.load_next += TURN;
    UNROLL
    for (uint32_t i = 0; i < LOAD_ROWS; i++) s.from[i] += TURN * group_bytes<W>;
    if (s.load_next < s.groups) return;
    s.load_next = s.start;
    s.load_tile++;
    if (s.load_tile < s.tiles) aim(s, row);
  }
  DEVICE void load_scales(Stream& s, uint32_t turn, uint32_t group) {
    if constexpr (RUN) {
      if (group >= s.groups) return;
      UNROLL
      for (uint32_t i = 0; i < DEPTH / 2; i++) {
        if (s.runs) {
          s.scale[turn][i] = *in_global((const uint32_t*)(s.own + group) + i);
        } else {
          uint32_t low = group + 2 * i, high = low + 1, last = s.groups - 1;
          s.scale[turn][i] = s.own[low < last ? low : last] | (uint32_t)s.own[high < last ? high : last] << 16;
        }
      }
    }
  }
  // row(tile, i): of column i of the tile. tiles 0: the wave has nothing to do.
  template <class Row>
  DEVICE void begin(Stream& s, const uint8_t* codes, const uint16_t* scales, uint32_t k, const Row& row, uint32_t next, uint32_t tiles) {
    s.codes = codes;
    s.scales = scales;
    s.k = k;
    s.groups = k / GROUP;
    s.start = s.load_next = next;
    s.tiles = tiles;
    s.load_tile = 0;
    s.runs = (((uint64_t)scales | (k / GROUP * 2)) & (STAGED ? 7u : 2 * DEPTH - 1)) == 0;
    aim(s, row);
    UNROLL
    for (uint32_t slot = 0; slot < DEPTH; slot++) load(s, slot);
    step(s, row);
    turn_to(s, 0, next, row);
    if (tiles == 0) s.next = s.groups;
  }
  // The sums of the next tile.
  template <class Row> DEVICE void turn_to(Stream& s, uint32_t tile, uint32_t next, const Row& row) {
    s.next = next;
    UNROLL
    for (uint32_t i = 0; i < PER_WALK; i++) s.sum[i] = 0.0f;
    if (!RUN) return;
    s.own = s.scales + (uint64_t)row(tile, tile_lane()) * s.groups;
    load_scales(s, 0, next);
  }
  // The scales of the panel's groups of a tile: from memory, then, when LDS is free, there. A panel is a multiple of four groups, or ends with k.
  template <class Row> DEVICE void fetch_scales(const Stream& s, Quads& q, const Panel& p, uint32_t tile, const Row& row) {
    if constexpr (STAGED && W::SCALED) {
      uint32_t quads = units_of(p) / 32;
      if (!s.runs) return;
      UNROLL
      for (uint32_t j = 0; j < Quads::COUNT; j++) {
        uint32_t f = thread_id() + j * THREADS;
        if (f < COLS * quads) {
          q.four[j] = *in_global((const uint64_t*)(s.scales + (uint64_t)row(tile, f / quads) * s.groups + p.first / GROUP + f % quads * 4));
        }
      }
    }
  }
  template <class Row> DEVICE void put_scales(const Stream& s, const Quads& q, const Panel& p, uint32_t tile, const Row& row, uint16_t* lds) {
    if constexpr (STAGED && W::SCALED) {
      uint32_t count = units_of(p) / 8, quads = count / 4;
      if (s.runs) {
        UNROLL
        for (uint32_t j = 0; j < Quads::COUNT; j++) {
          uint32_t f = thread_id() + j * THREADS;
          uint32_t* to = (uint32_t*)(lds + f / quads * SCALE_PITCH + f % quads * 4);
          if (f < COLS * quads) {
            to[0] = (uint32_t)q.four[j];
            to[1] = (uint32_t)(q.four[j] >> 32);
          }
        }
      } else {
        ROLLED
        for (uint32_t f = thread_id(); f < COLS * count; f += THREADS) {
          uint32_t r = f / count, c = f % count;
          lds[r * SCALE_PITCH + c] = s.scales[(uint64_t)row(tile, r) * s.groups + p.first / GROUP + c];
        }
      }
    }
  }
  // x, x_sums, scales: of this work-item and the group.
  DEVICE void add(Stream& s, uint32_t slot, const bf16* x, const float* const (&x_sums)[2], const uint16_t* scales) {
    uint32_t v[SHARE / 2];
    UNROLL
    for (uint32_t u = 0; u < SHARE / 8; u++) load16(x + 8 * u / piece_values<W> * (PARTS * piece_values<W>) + 8 * u % piece_values<W>, v + 4 * u);
    float part_sum[PER_WALK], out[2] = {};
    UNROLL
    for (uint32_t i = 0; i < PER_WALK; i++) part_sum[i] = W::SCALED ? 0.0f : s.sum[i];
    UNROLL
    for (uint32_t step = 0; step < 4; step++) {
      UNROLL
      for (uint32_t tile = 0; tile < 2; tile++) {
        uint32_t a[4];
        UNROLL
        for (uint32_t i = 0; i < 4; i++) a[i] = weight_pair(W(), s.word[slot][2 * tile + i % 2], 2 * step + i / 2);
        mma_16x8x16(part_sum + 4 * tile, a, v + 2 * step);
      }
    }
    if (OFFSET<W>) {
      UNROLL
      for (uint32_t i = 0; i < 2; i++) out[i] = x_sums[i][slot * STRIDE];
    }
    float own = RUN ? f16_value((uint16_t)(s.scale[0][slot / 2] >> (16 * (slot % 2)))) : 0.0f;
    UNROLL
    for (uint32_t i = 0; i < LOAD_ROWS; i++) {
      float scale = !W::SCALED ? 0.0f : STAGED ? f16_value(scales[8 * i * SCALE_PITCH]) : shuffle_from(own, load_row(i));
      UNROLL
      for (uint32_t j = 0; j < 2; j++) {
        float v = part_sum[2 * i + j];
        if (OFFSET<W>) v = fma_f32(-CODE_OFFSET, out[j], v);
        s.sum[2 * i + j] = W::SCALED ? fma_f32(v, scale, s.sum[2 * i + j]) : v;
      }
    }
  }
  template <class Row> DEVICE void advance(Stream& s, const Panel& p, const uint16_t* lds, const Row& row) {
    uint32_t first = p.first / GROUP, end = first + units_of(p) / 8, last = p.rows - 1u, at = s.next - first;
    const bf16* x = (const bf16*)p.lds.x + (x_row() < last ? x_row() : last) * p.pitch + at * GROUP + part() * piece_values<W>;
    const uint16_t* scales = lds + load_row(0) * SCALE_PITCH + at;
    const float* x_sums[2];
    UNROLL
    for (uint32_t i = 0; i < 2; i++) x_sums[i] = p.lds.x_sums + (2 * part() + i < last ? 2 * part() + i : last) * (p.chunk / GROUP) + at;
    while (s.next < end) {
      load_scales(s, 1, s.next + TURN);
      UNROLL
      for (uint32_t slot = 0; slot < DEPTH; slot++) {
        if (s.next + slot * STRIDE < end) add(s, slot, x + slot * STRIDE * GROUP, x_sums, scales + slot * STRIDE);
        load(s, slot);
      }
      step(s, row);
      if constexpr (RUN) {
        UNROLL
        for (uint32_t i = 0; i < DEPTH / 2; i++) s.scale[0][i] = s.scale[1][i];
      }
      s.next += TURN;
      x += TURN * GROUP;
      x_sums[0] += TURN;
      x_sums[1] += TURN;
      scales += TURN;
    }
  }
  DEVICE void finish(const Stream& s, const Panel& p) {
    float* to = p.lds.sums + tile_group() * ROWS * COLS;
    UNROLL
    for (uint32_t i = 0; i < PER_WALK; i++) {
      if (2 * part() + i % 2 < p.rows) to[(2 * part() + i % 2) * COLS + load_row(i / 2)] = s.sum[i];
    }
  }
};
#endif

// Products of `tiles` tiles of 32 columns with `count` rows of x by the block. row(tile, i): row of weights of column i; x(r): row r; emit(tile): the
// waves' parts are in lds.sums. k below LONG_K: by the first wave. block_sync before and after.
template <class W, bool ALIGNED, uint32_t STRIDE, class Row, class X, class Emit>
DEVICE void product(const uint8_t* codes, const uint16_t* scales, uint32_t k, uint32_t tiles, const Row& row, const X& x, bool x_aligned,
                    uint32_t count, const Lds& lds, uint16_t* scales_lds, const Emit& emit) {
  using S = Stream<W, ALIGNED, STRIDE>;
  bool works = tile_group() < (k >= LONG_K ? WAVES : 1u);
  uint32_t start = works ? tile_group() : 0u;
  S s;
  Quads q = {};
  Panel p = panel<W>(lds, count, count, k);
  S::begin(s, codes, scales, k, row, start, works ? tiles : 0u);
  S::fetch_scales(s, q, p, 0, row);
  block_sync();
  ROLLED
  for (uint32_t tile = 0; tile < tiles; tile++) {
    if (tile && works) S::turn_to(s, tile, start, row);
    ROLLED
    for (p.first = 0; p.first < k;) {
      S::put_scales(s, q, p, tile, row, scales_lds);
      if (tile == 0 || k > p.chunk) stage<W>(p, x, x_aligned);
      block_sync();
      if (works) S::advance(s, p, scales_lds, row);
      p.first += p.chunk;
      Panel ahead = p;
      if (p.first >= k) ahead.first = 0;
      if (p.first < k || tile + 1 < tiles) S::fetch_scales(s, q, ahead, p.first < k ? tile : tile + 1, row);
      if (p.first >= k && works) S::finish(s, p);
      block_sync();
    }
    emit(tile);
  }
}

}  // namespace expert_tiles
