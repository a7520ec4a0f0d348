// wave_stream.h - rings of weights that a block keeps full from its first product to its last (wave_product.h, wave_one.h), for targets with TILE_MMA
// and asynchronous copies: the blocks of a launch are as many as run at once, each goes through its share of the products, and the copies of one
// product begin while those before it are added. A wave's ring has DEPTH units of 4 KiB: two stages of wave_one.h, lines of 128 bytes of its 32 rows
// of weights. A unit is a run of q4g64, half a run of q8g64.
#pragma once
#include "wave_rows.h"

#if defined(TILE_MMA)
namespace wave_stream {

using namespace wave_product;
constexpr uint32_t UNIT_STAGES = 2, UNIT_BYTES = UNIT_STAGES * wave_one::STAGE_BYTES<2>;
template <class W> constexpr uint32_t UNITS = wave_one::STAGES<W> / UNIT_STAGES;  // of a run

// The ring of a wave. scales: the four of each row, where the first unit of a run is.
struct Ring {
  uint8_t* units;    // [DEPTH][UNIT_BYTES]
  uint64_t* scales;  // [DEPTH][COLS]
};
template <uint32_t DEPTH> constexpr uint32_t RINGS_BYTES = WAVES * DEPTH * (UNIT_BYTES + COLS * 8);  // of a block
template <uint32_t DEPTH> DEVICE Ring ring_of_wave(uint8_t* at) {
  return {at + tile_group() * DEPTH * UNIT_BYTES, (uint64_t*)(at + WAVES * DEPTH * UNIT_BYTES) + tile_group() * DEPTH * COLS};
}
template <uint32_t DEPTH> DEVICE void next_slot(uint32_t& slot) { slot = slot + 1u == DEPTH ? 0u : slot + 1u; }

// Where the 32 rows of weights lie, whose values [w.first, w.first + w.k) are copied.
struct Place {
  uint32_t at[4];     // of this work-item's 16 bytes of the first stage of row l / 4 + 8 i, in 16 bytes
  uint32_t scale_at;  // of row l
};
// row(i): index of the row of weights of column i < 32.
template <class W, class Row> DEVICE Place place(const Weights& w, const Row& row) {
  auto first_group = [&](uint32_t i) { return row(i) * (w.pitch / GROUP) + w.first / GROUP; };
  Place p;
  UNROLL
  for (uint32_t i = 0; i < 4; i++) p.at[i] = first_group(load_row(i)) * wave_one::group_units<W> + part();
  p.scale_at = first_group(tile_lane());
  return p;
}

// What a work-item reads and writes where, in bytes: its copies in a slot; weights of q4g64 in a stage by group of the stage; their x in the planes
// of four rows by group % 2 and half of the group; own: in the planes of one row, of group l / 8 (add_run_of_one).
struct Lane {
  uint32_t copy, weights[2], x[2][2], own;
};
template <class W> DEVICE Lane lane_of() {
  uint32_t lane = tile_lane();
  Lane l;
  l.copy = wave_one::place_in_stage(load_row(0), part());
  uint32_t plane = lane / 4 % 2, first_unit = lane / 8 * 4 + lane % 4 / 2;
  l.own = plane * RUN_VALUES + ((first_unit ^ wave_rows::turned<W>(plane)) << 4) + lane % 2 * 8;
  UNROLL
  for (uint32_t i = 0; i < 2; i++) {
    l.weights[i] = wave_one::place_in_stage(lane % 16, 2 * i + lane / 16);
    UNROLL
    for (uint32_t half = 0; half < 2; half++) {
      l.x[i][half] = lane / 4 * RUN_VALUES + (((4 * i + 2 * half + lane % 4 / 2) ^ wave_rows::turned<W>(lane / 4)) << 4) + lane % 2 * 8;
    }
  }
  return l;
}

// All copies of unit `unit` of a run into a slot, and with the first one those of the run's scales. Groups past the end are left out.
template <class W>
DEVICE void copy_unit(const Ring& ring, const Lane& lane, const Weights& w, const Matrix& from, const Place& p, uint32_t run, uint32_t unit,
                      uint32_t slot) {
  uint32_t before = run * RUN, groups = groups_in(w);
  uint64_t codes = (uint64_t)in_global(from.codes) + (uint64_t)((before * wave_one::group_units<W> + unit * UNIT_STAGES * 4) * 16);
  asm volatile("" : "+l"(codes));  // else the sum with each row's offset takes four instructions
  const uint8_t* row[4];
  UNROLL
  for (uint32_t i = 0; i < 4; i++) row[i] = (const uint8_t*)(codes + (uint64_t)p.at[i] * 16);
  uint8_t* to = ring.units + slot * UNIT_BYTES + lane.copy;
  bool whole = before + RUN <= groups;
  UNROLL
  for (uint32_t stage = 0; stage < UNIT_STAGES; stage++) {
    if (!whole && before + (unit * UNIT_STAGES + stage) * wave_one::GROUPS<W> + part() / wave_one::group_units<W> >= groups) continue;
    UNROLL
    for (uint32_t i = 0; i < 4; i++) copy16_line_async(to + stage * wave_one::STAGE_BYTES<2> + i * 512, row[i] + stage * 64);
  }
  if (unit == 0) {
    const uint16_t* scales = in_global(from.scales) + (uint64_t)(p.scale_at + before);
    uint16_t* to = (uint16_t*)(ring.scales + slot * COLS + tile_lane());
    if (whole && w.pitch % RUN_VALUES == 0 && w.first % RUN_VALUES == 0) {
      copy8_async(to, scales);
    } else {
      ROLLED
      for (uint32_t i = 0; i < RUN && before + i < groups; i++) to[i] = scales[i];
    }
  }
  copies_commit();
}

// The x of a run, of up to four rows, that a wave has from slot `first` on of SLOTS.
template <uint32_t SLOTS> DEVICE wave_rows::Lds from_slot(const wave_rows::Lds& lds, uint32_t first) {
  wave_rows::Lds some = lds;
  some.one.x += first * (2 * RUN_VALUES / 16);
  some.one.x_sum += first * RUN;
  some.x_scale += first * RUN;
  return some;
}

// This work-item's 8 values of a run of the row in slot 0.
template <class W, uint32_t SLOTS> DEVICE void put_values(const wave_rows::Lds& lds, const float* v) {
  uint32_t unit = tile_lane() / 2, inside = tile_lane() % 2 * 8, side = wave_rows::side_of<SLOTS>(lds, 0) + tile_lane() / 8;
  uint8_t *low = wave_rows::unit_of<W, SLOTS>(lds, 0, unit) + inside, *high = wave_rows::unit_of<W, SLOTS>(lds, 1, unit) + inside;
  put_codes<W>(low, high, lds.x_scale + side, lds.one.x_sum + side, v);
}

// Of a work-item's row of x, what its groups of a run need.
struct Sides {
  uint32_t scale[2];
  int32_t less[RUN];
};
template <uint32_t SLOTS> DEVICE Sides load_sides(const wave_rows::Lds& x) {
  uint32_t side = wave_rows::side_of<SLOTS>(x, part());
  Sides s;
  wave_one::load_pair((const uint8_t*)(x.x_scale + side), s.scale);
  load16(x.one.x_sum + side, (uint32_t*)s.less);
  return s;
}

// The codes of a group of a run of q4g64, from the stage at `stage`.
DEVICE void load_codes(uint32_t (&codes)[2][4], const Lane& lane, uint32_t group, const uint8_t* stage) {
  UNROLL
  for (uint32_t tile = 0; tile < 2; tile++) load_matrices(codes[tile], stage + tile * 1024 + lane.weights[group % 2]);
}
// Adds them.
DEVICE void add_codes(float (&sum)[4], const uint32_t (&codes)[2][4], const Lane& lane, const uint8_t* planes, const Sides& sides,
                      const uint32_t (&scale)[4][2], uint32_t group) {
  uint32_t x[2][2];
  UNROLL
  for (uint32_t half = 0; half < 2; half++) {
    uint32_t both[2];
    wave_one::load_pair(planes + lane.x[group % 2][half] + group / 2 * 128, both);
    x[0][half] = both[0];
    x[1][half] = both[1];
  }
  float x_scale = float_of(group % 2 ? sides.scale[group / 2] & 0xffff0000u : sides.scale[group / 2] << 16);
  int32_t none = -sides.less[group];
  UNROLL
  for (uint32_t tile = 0; tile < 2; tile++) {
    int32_t d[4] = {none, 0, none, 0};
    UNROLL
    for (uint32_t odd = 0; odd < 2; odd++) {
      uint32_t a[4];
      UNROLL
      for (uint32_t i = 0; i < 4; i++) a[i] = (codes[tile][i] >> (4 * odd)) & 0x0f0f0f0fu;
      mma_16x8x32(d, a, x[odd]);
    }
    UNROLL
    for (uint32_t half = 0; half < 2; half++) {
      uint32_t i = 2 * tile + half;
      float factor = f16_value((uint16_t)(scale[i][group / 2] >> (16 * (group % 2)))) * x_scale;
      sum[i] = fma_f32((float)(int32_t)(((uint32_t)d[2 * half + 1] << 8) + (uint32_t)d[2 * half]), factor, sum[i]);
    }
  }
}

// A run of which all units are or will be in the ring from `slot` on, for `rows` rows of x, `groups` of its groups; refill(slot) when a unit has been
// added. x: from_slot.
template <class W, uint32_t DEPTH, uint32_t SLOTS, class Refill>
DEVICE void add_run(wave_rows::Walk<W, wave_rows::SET>& walk, const Ring& ring, const Lane& lane, const wave_rows::Lds& x, uint32_t& slot, uint32_t rows,
                    uint32_t groups, const Refill& refill) {
  constexpr bool Q4 = W::FORMAT == WEIGHT_Q4G64;
  constexpr uint32_t EACH = UNIT_STAGES * wave_one::GROUPS<W>;  // groups of a unit
  constexpr uint32_t BEFORE = 2;                                // groups of a whole run of q4g64 that are added before its unit is refilled
  uint32_t scale[4][2];
  UNROLL
  for (uint32_t unit = 0; unit < UNITS<W>; unit++) {
    copies_wait<DEPTH - 1>();
    wave_sync();
    if (unit == 0) wave_one::load_scales<2>(ring.scales + slot * COLS, scale);
    const uint8_t* planes = (const uint8_t*)x.one.x + tile_group() * wave_rows::X_WAVE<SLOTS>;
    Sides sides = {};
    if constexpr (Q4) sides = load_sides<SLOTS>(x);
    const uint8_t* stages = ring.units + slot * UNIT_BYTES;
    if constexpr (Q4) {
      if (groups >= RUN) {  // without a branch between them the groups overlap
        uint32_t codes[RUN][2][4];
        UNROLL
        for (uint32_t i = 0; i < BEFORE; i++) {
          load_codes(codes[i], lane, i, stages + i / 2 * wave_one::STAGE_BYTES<2>);
          add_codes(walk.sum[0], codes[i], lane, planes, sides, scale, i);
        }
        UNROLL
        for (uint32_t i = BEFORE; i < RUN; i++) load_codes(codes[i], lane, i, stages + i / 2 * wave_one::STAGE_BYTES<2>);
        wave_sync();
        refill(slot);
        next_slot<DEPTH>(slot);
        UNROLL
        for (uint32_t i = BEFORE; i < RUN; i++) add_codes(walk.sum[0], codes[i], lane, planes, sides, scale, i);
        wave_sync();
        return;
      }
    }
    UNROLL
    for (uint32_t i = 0; i < EACH; i++) {
      uint32_t group = unit * EACH + i;
      if (group >= groups) continue;
      const uint8_t* stage = stages + i / wave_one::GROUPS<W> * wave_one::STAGE_BYTES<2>;
      if constexpr (Q4) {
        uint32_t codes[2][4];
        load_codes(codes, lane, group, stage);
        add_codes(walk.sum[0], codes, lane, planes, sides, scale, group);
      } else {
        wave_rows::add_group<W, wave_rows::SET, SLOTS>(walk, x, scale, 0, rows, group, i % wave_one::GROUPS<W>, stage);
      }
    }
    wave_sync();
    refill(slot);
    next_slot<DEPTH>(slot);
  }
}
// Four values of each of four neighbours: v[i] of neighbour j becomes v[j] of neighbour i.
DEVICE void turn_four(int32_t (&v)[4]) {
  UNROLL
  for (uint32_t bit = 1; bit < 4; bit <<= 1) {
    bool upper = tile_lane() & bit;
    UNROLL
    for (uint32_t i = 0; i < 4; i++) {
      if (i & bit) continue;
      int32_t other = (int32_t)shuffle_xor((uint32_t)(upper ? v[i] : v[i | bit]), bit);
      v[i] = upper ? other : v[i];
      v[i | bit] = upper ? v[i | bit] : other;
    }
  }
}

// As add_run for q4g64 and one row of x, with the sum of column load_row(part()) in `sum`. Column 2 g + plane of the matrix tiles is that plane of
// group g of x, and zero while other groups are added, so that four groups are in the same registers at the end, and what is done with their sums
// is done once for all. A code in the upper half of a byte is added as 16 times itself.
template <uint32_t DEPTH, uint32_t SLOTS, class Refill>
DEVICE void add_run_of_one(float& sum, const Ring& ring, const Lane& lane, const wave_rows::Lds& x, uint32_t& slot, uint32_t groups,
                           const Refill& refill) {
  copies_wait<DEPTH - 1>();
  wave_sync();
  uint32_t codes[RUN][2][4], own[2][2], x_scale[2];
  const uint8_t *stages = ring.units + slot * UNIT_BYTES, *planes = (const uint8_t*)x.one.x + tile_group() * wave_rows::X_WAVE<SLOTS>;
  UNROLL
  for (uint32_t i = 0; i < RUN; i++) load_codes(codes[i], lane, i, stages + i / 2 * wave_one::STAGE_BYTES<2>);
  uint64_t scales = ring.scales[slot * COLS + load_row(part())];
  UNROLL
  for (uint32_t half = 0; half < 2; half++) wave_one::load_pair(planes + (lane.own ^ 32u * half), own[half]);
  uint32_t side = wave_rows::side_of<SLOTS>(x, 0);
  wave_one::load_pair((const uint8_t*)(x.x_scale + side), x_scale);
  int32_t less = x.one.x_sum[side + part()];
  wave_sync();
  refill(slot);
  next_slot<DEPTH>(slot);
  int32_t d[2][2][4] = {};  // [tile][half of the byte]
  UNROLL
  for (uint32_t i = 0; i < RUN; i++) {
    bool mine = tile_lane() / 8 == i;
    UNROLL
    for (uint32_t odd = 0; odd < 2; odd++) {
      uint32_t b[2] = {mine ? own[0][odd] : 0u, mine ? own[1][odd] : 0u};
      UNROLL
      for (uint32_t tile = 0; tile < 2; tile++) {
        uint32_t a[4];
        UNROLL
        for (uint32_t j = 0; j < 4; j++) a[j] = codes[i][tile][j] & (odd ? 0xf0f0f0f0u : 0x0f0f0f0fu);
        mma_16x8x32_unsigned(d[tile][odd], a, b);
      }
    }
  }
  int32_t all[4];
  UNROLL
  for (uint32_t i = 0; i < 4; i++) {
    auto both = [&](const int32_t* planes) { return (int32_t)((uint32_t)planes[1] << 8) + planes[0]; };
    all[i] = both(d[i / 2][0] + i % 2 * 2) + (both(d[i / 2][1] + i % 2 * 2) >> 4) - less;
  }
  turn_four(all);
  UNROLL
  for (uint32_t i = 0; i < RUN; i++) {
    float factor = f16_value((uint16_t)(scales >> (16 * i))) * float_of(i % 2 ? x_scale[i / 2] & 0xffff0000u : x_scale[i / 2] << 16);
    if (i < groups) sum = fma_f32((float)all[i], factor, sum);
  }
  wave_sync();
}

DEVICE uint32_t groups_of_run(const Weights& w, uint32_t run) { return groups_in(w) > run * RUN ? groups_in(w) - run * RUN : 0u; }

}  // namespace wave_stream
#endif
