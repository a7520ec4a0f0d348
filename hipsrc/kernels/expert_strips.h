// expert_strips.h - the product of step_experts by mma.sync: 32 rows of weights (16 gate, 16 up) times up to 8 rows of bf16 x in f32, over whole
// groups of 64. A block's 8 waves divide k: wave w adds groups [w * part, (w + 1) * part) in ascending order, part = ceil(ceil(groups / 8) / 4) * 4;
// an output depends on its row of x, its row of weights and k alone.
// Weights come a turn at a time, 32 registers, all asked for before any is used, and there is no ring: loads of a ring share a scoreboard, so that
// the first use of a slot waits for the refill of the one before. The other blocks of the multiprocessor hide the latency. Each value of x is read
// by one wave of the block: it goes to registers without LDS.
#pragma once
#include "expert_walk.h"

#if defined(TILE_MMA)
namespace expert_strips {

using namespace expert_walk;

constexpr uint32_t WAVE_SUMS = ROWS * COLS;

// Scale i * TURN + j of a turn is that of row load_row(i) and group j; lane t of a quad holds LANE_SCALES of them.
template <class W> struct Strip {
  static constexpr uint32_t TILE_COUNT = 2;  // of 16 rows
  static constexpr uint32_t STRIP_ROWS = 2 * TILE_COUNT, WORDS = share_words<W>, TURN = 32 / (STRIP_ROWS * WORDS);
  static constexpr uint32_t LANE_SCALES = STRIP_ROWS * TURN / 4;
  static constexpr uint32_t PIECES = SHARE / piece_values<W>, GROUP_BYTES = GROUP * 16 / W::CHUNK, PIECE_BYTES = 4 * piece_words<W>;
  const uint8_t* codes;             // of row 0
  uint32_t from[2], apart;          // this work-item's share of the rows of the first tile, from there; bytes from these to the second tile's
  const uint16_t* scales;           // of the row whose scales it reads, its place in a turn added
  uint32_t next, end;               // groups
  bool scale_runs;                  // LANE_SCALES scales in one access
  uint32_t word[TURN][STRIP_ROWS][WORDS];
  uint32_t scale[2];
  float sum[4 * TILE_COUNT];

  DEVICE void load_turn(Strip& s) {
    UNROLL
    for (uint32_t slot = 0; slot < TURN; slot++) {
      if (s.next + slot >= s.end) continue;
      UNROLL
      for (uint32_t i = 0; i < STRIP_ROWS; i++) {
        UNROLL
        for (uint32_t j = 0; j < PIECES; j++) {
          const uint8_t* at = in_global(s.codes + (s.from[i % 2] + (i / 2 * s.apart + s.next * GROUP_BYTES)) + slot * GROUP_BYTES + j * PARTS * 16);
          if constexpr (WORDS == 2) load8_stream(at, s.word[slot][i]);
          else load16_stream(at, s.word[slot][i] + 4 * j);
        }
      }
    }
    if constexpr (W::SCALED) {
      uint32_t scale_at = s.next + part() * LANE_SCALES % TURN;
      if (scale_at < s.end) {
        if (s.scale_runs) {
          if constexpr (LANE_SCALES == 4) {
            uint64_t four = *in_global((const uint64_t*)(s.scales + s.next));
            s.scale[0] = (uint32_t)four;
            s.scale[1] = (uint32_t)(four >> 32);
          } else {
            s.scale[0] = *in_global((const uint32_t*)(s.scales + s.next));
          }
        } else {
          UNROLL
          for (uint32_t j = 0; j < LANE_SCALES / 2; j++) {
            uint32_t last = s.end - 1u - scale_at;
            const uint16_t* at = s.scales + s.next;
            s.scale[j] = at[2 * j < last ? 2 * j : last] | (uint32_t)at[2 * j + 1 < last ? 2 * j + 1 : last] << 16;
          }
        }
      }
    }
  }
  // The loads of the first turn are on their way.
  template <class Row> DEVICE void begin(Strip& s, const uint8_t* codes, const uint16_t* scales, uint32_t k, const Row& row, uint32_t apart) {
    uint32_t groups = k / GROUP, share = ((groups + WAVES - 1) / WAVES + 3) / 4 * 4, start = tile_group() * share;
    s.next = start;
    s.end = start + share < groups ? start + share : groups;
    s.codes = codes;
    s.apart = apart * (uint32_t)W::row_bytes(k);
    UNROLL
    for (uint32_t i = 0; i < 2; i++) s.from[i] = row(load_row(i)) * (uint32_t)W::row_bytes(k) + part() * PIECE_BYTES;
    if constexpr (W::SCALED) {
      static_assert(LANE_SCALES == 2 || LANE_SCALES == 4, "a lane reads its scales at once");
      uint32_t first = part() * LANE_SCALES;
      s.scales = scales + (uint64_t)(row(load_row(first / TURN % 2)) + first / TURN / 2 * apart) * groups + first % TURN;
      s.scale_runs = (((uint64_t)scales | (groups * 2)) & (2 * LANE_SCALES - 1)) == 0;
    }
    UNROLL
    for (uint32_t i = 0; i < 4 * TILE_COUNT; i++) s.sum[i] = 0.0f;
    load_turn(s);
  }
  DEVICE float row_scale(const Strip& s, uint32_t slot, uint32_t i) {
    uint32_t at = i * TURN + slot, both = shuffle_from(s.scale[at % LANE_SCALES / 2], (tile_lane() & 28u) + at / LANE_SCALES);
    return f16_value((uint16_t)(both >> (16 * (slot % 2))));
  }
  // x: this work-item's share of the group in row x_row() of x.
  DEVICE void add(Strip& s, uint32_t slot, const bf16* x, bool x_aligned) {
    uint32_t v[SHARE / 2];
    UNROLL
    for (uint32_t u = 0; u < SHARE / 8; u++) {
      const bf16* at = x + 8 * u / piece_values<W> * (PARTS * piece_values<W>) + 8 * u % piece_values<W>;
      if (W::SCALED || x_aligned) load16(in_global(at), v + 4 * u);
      else load_elements((const uint16_t*)at, 8, 0, v + 4 * u);
      order_unit<W>(v + 4 * u);
    }
    float offset[4] = {0, 0, 0, 0};
    if (OFFSET<W>) {
      const uint32_t less[4] = {0xc308c308u, 0xc308c308u, 0xc308c308u, 0xc308c308u};  // -CODE_OFFSET in bf16
      UNROLL
      for (uint32_t step = 0; step < 4; step++) mma_16x8x16(offset, less, v + 2 * step);
    }
    UNROLL
    for (uint32_t tile = 0; tile < TILE_COUNT; tile++) {
      float* sum = s.sum + 4 * tile;
      float part[4];
      UNROLL
      for (uint32_t i = 0; i < 4; i++) part[i] = W::SCALED ? offset[i % 2] : sum[i];  // all rows of `less` are equal
      UNROLL
      for (uint32_t step = 0; step < 4; step++) {
        uint32_t a[4];
        UNROLL
        for (uint32_t i = 0; i < 4; i++) a[i] = weight_pair(W(), s.word[slot][2 * tile + i % 2], 2 * step + i / 2);
        mma_16x8x16(part, a, v + 2 * step);
      }
      UNROLL
      for (uint32_t i = 0; i < 4; i += 2) {
        float scale = W::SCALED ? row_scale(s, slot, 2 * tile + i / 2) : 0.0f;
        UNROLL
        for (uint32_t j = i; j < i + 2; j++) sum[j] = W::SCALED ? fma_f32(part[j], scale, sum[j]) : part[j];
      }
    }
  }
  // Adds the share; x(r), count: rows of x.
  template <class X> DEVICE void advance(Strip& s, const X& x, uint32_t count) {
    uint32_t last = count - 1u;
    const bf16* row = x(x_row() < last ? x_row() : last) + part() * piece_values<W>;
    bool x_aligned = ((uint64_t)x(0) & 15u) == 0;
    ROLLED
    while (s.next < s.end) {
      UNROLL
      for (uint32_t slot = 0; slot < TURN; slot++) {
        if (s.next + slot < s.end) add(s, slot, row + (s.next + slot) * GROUP, x_aligned);
      }
      s.next += TURN;
      load_turn(s);
    }
  }
  DEVICE void finish(const Strip& s, uint32_t count, float* to) {
    UNROLL
    for (uint32_t i = 0; i < 4 * TILE_COUNT; i++) {
      uint32_t r = 2 * part() + i % 2;
      if (r < count) to[r * COLS + load_row(i / 2)] = s.sum[i];
    }
  }
};

// Wave i's part in sums + i * WAVE_SUMS, [r * COLS + column], after block_sync. row(i): row of weights of column i < 16; columns 16 to 31 are `apart`
// rows after those; x(r): row r < count of x, after block_sync. k is a multiple of 64; codes are 16-byte aligned.
template <class W, class Row, class X>
DEVICE void product(const uint8_t* codes, const uint16_t* scales, uint32_t k, const Row& row, uint32_t apart, const X& x, uint32_t count,
                    float* sums) {
  Strip<W> s;
  Strip<W>::begin(s, codes, scales, k, row, apart);
  block_sync();
  Strip<W>::advance(s, x, count);
  Strip<W>::finish(s, count, sums + tile_group() * WAVE_SUMS);
}

}  // namespace expert_strips
#endif
