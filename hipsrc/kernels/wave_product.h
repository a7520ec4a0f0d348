// wave_product.h - the wave product: 32 lanes multiply 32 rows of weights (its columns) by up to 8 rows of bf16 x, by matrix tiles where there are any.
// Formats: bf16, q8g64, q4g64 (weight_format.h). A GROUP is 64 consecutive k: what shares a scale. A RUN is 4 consecutive groups.
//   wide     a block of 8 waves has one set of 32 columns; wave w adds the runs i with i % 8 == w, their groups ascending; the waves' sums are added
//            in LDS in the order w = 0 .. 7
//   else     each wave has 32 columns of its own and adds all groups, ascending
// Scaled formats: x enters a group as integers q of 16 bits, x ~ q * 2^e, e chosen by the largest |x| of the group (put_x: values down to 1/64 of it
// are exact). The sum of code * q over a group is an exact integer whatever adds it, and sum = fma(float(that), scale * 2^e, sum): outputs are the same
// on every target. A group of x with a value that is not finite makes the output NaN.
// bf16: the sums inside a group are the matrix unit's, on top of those before; without one 8 chains of fma, chain j over the k with k % 8 == j, ascending,
// and a wave ends with ((0+4)+(2+6))+((1+5)+(3+7)). Either way an output depends on its row of x, its row of weights and k alone.
// Norm: x * norm takes the place of x, in f32 for scaled formats, rounded for bf16, and the sums are multiplied by 1 / sqrt(mean(x^2) + eps) at the end,
// so that nothing waits for the sum of a row: it is gathered on the way. A lane adds the squares of its 8 values of a run to its own sum, a butterfly
// adds the lanes, then the waves are added in order.
// Use, in a block of THREADS work-items, all of which call everything:
//   Weights w = {k, pitch, first, matrices, wide};  Walk<W> walk;  begin(walk, w, at, row)      the first loads are on their way (wave_walk.h); weights alone
//                                                    have been touched
//   product(walk, w, at, lds, rows, x, operand)      x(matrix, r): row r < rows of x, k values; the sums are in LDS
//   for_outputs(w, lds, rows, operand, f)            f(wave, column, row, sum): the 32 lanes of a group have one row together; wide: the block's
//                                                    columns are one set of 32 and wave is 0
// block_sync before LDS is used again.
#pragma once
#include "wave_walk.h"

namespace wave_product {

// norm [k], or null; at a multiple of 16 bytes, as every row of x. weights, if not null: what the x of matrix i is multiplied by, in f32.
struct Operand {
  const bf16* norm;
  float eps;
  const float* weights;
};

// Eight values at `at`, zeros past k and of a row that is null; pairs of bf16.
DEVICE void load_unit(const bf16* row, uint32_t at, uint32_t k, uint32_t* word) {
  UNROLL
  for (uint32_t i = 0; i < 4; i++) word[i] = 0u;
  if (row && at < k) load16(in_global(row + at), word);
}
DEVICE float unit_value(const uint32_t* word, uint32_t i) { return float_of(i % 2 ? word[i / 2] & 0xffff0000u : word[i / 2] << 16); }

// The 8 values of each of 8 work-items, which have a group, as planes q = 256 high + low of signed bytes; q8g64 in ascending order, q4g64 of each 8
// values the even ones and then the odd ones, as the nibbles of a word of codes come. low, high: where 8 bytes of this work-item go; scale, excess: of
// the group. A scale is a power of two or NaN: its upper half says it all.
DEVICE void put_scale(float* to, uint32_t bits) { *to = float_of(bits); }
DEVICE void put_scale(uint16_t* to, uint32_t bits) { *to = (uint16_t)(bits >> 16); }
// top: the largest magnitude of the group, as bits of f32; at least those of infinity if one is not finite.
template <class W, class S> DEVICE void put_codes_below(uint8_t* low, uint8_t* high, S* scale, int32_t* excess, const float* v, uint32_t top) {
  bool first = tile_lane() % 8 == 0;
  // The exponent of top, one more for the largest mantissas, so that |q| <= 32512 fits the planes; not so small that 2^e has no normal f32.
  uint32_t exponent = (top + 0x20000u) >> 23;
  exponent = exponent > 27u ? exponent : 27u;
  float up = float_of((268u - exponent) << 23);
  constexpr uint32_t ZERO = 0x4b400080u;  // 1.5 * 2^23 + 128: the f32 that is added to q, which rounds it to an integer in the low bits
  uint32_t q[8];
  UNROLL
  for (uint32_t i = 0; i < 8; i++) q[W::FORMAT == WEIGHT_Q4G64 ? i % 2 * 4 + i / 2 : i] = bits_of(fma_f32(v[i], up, float_of(ZERO)));
  if constexpr (W::FORMAT == WEIGHT_Q4G64) {
    uint32_t sum = 0;
    UNROLL
    for (uint32_t i = 0; i < 8; i++) sum += q[i] - ZERO;
    UNROLL
    for (uint32_t m = 1; m < 8; m <<= 1) sum += shuffle_xor(sum, m);
    if (first) *excess = (int32_t)(sum << 3);  // a code is 8 + value
  }
  if (first) put_scale(scale, top >= 0x7f800000u ? 0x7fc00000u : (exponent - 14u) << 23);
  UNROLL
  for (uint32_t plane = 0; plane < 2; plane++) {
    uint64_t bytes = 0;
    UNROLL
    for (uint32_t i = 0; i < 8; i += 4) {  // byte 0 of q + 128 is low with its sign turned, byte 1 is high
      uint32_t two = pick_bytes<0, 4, 1, 5>(q[i], q[i + 1]), more = pick_bytes<0, 4, 1, 5>(q[i + 2], q[i + 3]);
      uint32_t four = plane ? pick_bytes<2, 3, 6, 7>(two, more) : pick_bytes<0, 1, 4, 5>(two, more) ^ 0x80808080u;
      bytes |= (uint64_t)four << (8 * i);
    }
    *(uint64_t*)(plane ? high : low) = bytes;
  }
}
template <class W, class S> DEVICE void put_codes(uint8_t* low, uint8_t* high, S* scale, int32_t* excess, const float* v) {
  uint32_t top = 0;
  UNROLL
  for (uint32_t i = 0; i < 8; i++) {
    uint32_t bits = bits_of(v[i]) & 0x7fffffffu;
    top = bits > top ? bits : top;
  }
  UNROLL
  for (uint32_t m = 1; m < 8; m <<= 1) {
    uint32_t other = shuffle_xor(top, m);
    top = other > top ? other : top;
  }
  put_codes_below<W>(low, high, scale, excess, v, top);
}

// This work-item's 8 values of row `row` of a run into LDS: bf16, or codes for scaled formats. A group is 8 work-items.
template <class W> DEVICE void put_x(const Lds& lds, uint32_t row, const float* v) {
  uint32_t group = tile_lane() / 8, unit = tile_lane() % 8, side = side_of(row, group);
  if constexpr (!W::SCALED) {
    uint32_t word[4];
    UNROLL
    for (uint32_t i = 0; i < 4; i++) word[i] = f32_to_bf16(v[2 * i]).bits | (uint32_t)f32_to_bf16(v[2 * i + 1]).bits << 16;
    *(words16*)(values_of(lds, row, group) + 8 * unit) = {{word[0], word[1], word[2], word[3]}};
  } else {
    put_codes<W>(plane_of(lds, row, 0, group) + 8 * unit, plane_of(lds, row, 1, group) + 8 * unit, lds.x_scale + side, lds.x_sum + side, v);
  }
}

// The run at the cursor, of all rows, into the wave's LDS.
template <class W, class X> DEVICE void stage(const Weights& w, const Lds& lds, uint32_t rows, const X& x, const Operand& o, const Cursor& c) {
  bool inside = c.matrix < w.matrices;
  uint32_t at = inside ? c.run * RUN_VALUES + 8 * tile_lane() : w.k, matrix = inside ? c.matrix : 0u, weight[4], word[4];
  load_unit(x(matrix, 0), at, w.k, word);
  if (o.norm) load_unit(o.norm, at, w.k, weight);
  ROLLED
  for (uint32_t row = 0; row < rows; row++) {
    float v[8];
    UNROLL
    for (uint32_t i = 0; i < 8; i++) v[i] = unit_value(word, i);
    if (row + 1u < rows) load_unit(x(matrix, row + 1u), at, w.k, word);
    if (o.norm) {
      float* of_lane = lds.sums + (tile_group() * ROWS + row) * COLS + tile_lane();
      float sum = *of_lane;
      UNROLL
      for (uint32_t i = 0; i < 8; i++) {
        sum = fma_f32(v[i], v[i], sum);
        v[i] *= unit_value(weight, i);
      }
      *of_lane = sum;
    }
    if (o.weights) {
      UNROLL
      for (uint32_t i = 0; i < 8; i++) v[i] *= o.weights[matrix];
    }
    put_x<W>(lds, row, v);
  }
}

// The sums of x^2 of the lanes become those of the wave.
DEVICE void gather_squares(const Lds& lds, uint32_t rows) {
  ROLLED
  for (uint32_t row = 0; row < rows; row++) {
    float sum[1] = {lds.sums[(tile_group() * ROWS + row) * COLS + tile_lane()]};
    lanes_sum<32>(sum);
    if (tile_lane() == 0) lds.squares[tile_group() * ROWS + row] = sum[0];
  }
  wave_sync();
}

// Groups of a run that are written out one after the other. sm_90: all, since it waits for all loads where ways join.
#if defined(TILE_MMA)
template <class W> constexpr uint32_t UNROLLED = RUN;
#else
template <class W> constexpr uint32_t UNROLLED = Walk<W>::SLOTS;
#endif

// The sums of all columns into LDS.
template <class W, class At, class X>
DEVICE void product(Walk<W>& walk, const Weights& w, const At& at, const Lds& lds, uint32_t rows, const X& x, const Operand& o) {
  if (o.norm) {
    for (uint32_t row = 0; row < rows; row++) lds.sums[(tile_group() * ROWS + row) * COLS + tile_lane()] = 0.0f;
  }
  Cursor c = first_run(w);
  ROLLED
  for (uint32_t left = turns_in(w); left; left--) {
    wave_sync();
    stage<W>(w, lds, rows, x, o, c);
    wave_sync();
    ROLLED
    for (uint32_t first = 0; first < RUN; first += UNROLLED<W>) {
      UNROLL
      for (uint32_t i = 0; i < UNROLLED<W>; i++) {
        uint32_t slot = i % Walk<W>::SLOTS;
        add_group(walk, lds, rows, first + i, slot);
        release(walk, w, at, first + i, slot, left == 1u);
      }
    }
    next_run(c, w);
  }
  if (o.norm) gather_squares(lds, rows);
  finish(walk, lds, rows);
  block_sync();
}

// 1 / sqrt(mean(x^2) + eps) of a row, or 1.
DEVICE float row_scale(const Lds& lds, const Weights& w, uint32_t wave, uint32_t row, const Operand& o) {
  if (!o.norm) return 1.0f;
  float sum = lds.squares[wave * ROWS + row];
  if (w.wide) {
    UNROLL
    for (uint32_t i = 1; i < WAVES; i++) sum += lds.squares[i * ROWS + row];
  }
  return rsqrt_exact(sum / (float)w.k + o.eps);
}

// The sum of an output, of this work-item's column; wave: whose columns they are, 0 if wide.
DEVICE float sum_of(const Weights& w, const Lds& lds, uint32_t wave, uint32_t row, const Operand& o) {
  const float* from = lds.sums + (wave * ROWS + row) * COLS + tile_lane();
  float sum = from[0];
  if (w.wide) {
    UNROLL
    for (uint32_t i = 1; i < WAVES; i++) sum += from[i * ROWS * COLS];
  }
  return sum * row_scale(lds, w, wave, row, o);
}

// f(wave, row) for the rows of a wave's outputs; wave: whose columns they are, 0 if wide.
template <class F> DEVICE void for_rows(bool wide, uint32_t rows, const F& f) {
  uint32_t wave = wide ? 0u : tile_group();
  ROLLED
  for (uint32_t row = wide ? tile_group() : 0u; row < rows; row += wide ? WAVES : 1u) f(wave, row);
}

// f(wave, column, row, sum) for each output.
template <class F> DEVICE void for_outputs(const Weights& w, const Lds& lds, uint32_t rows, const Operand& o, const F& f) {
  for_rows(w.wide, rows, [&](uint32_t wave, uint32_t row) { f(wave, tile_lane(), row, sum_of(w, lds, wave, row, o)); });
}

// Two blocks share a set of columns: half 0 has the first values of k, half 1 the others. An output is the sum of both, so that two devices which have half
// of the weights each get the same.
struct Halves {
  float* partial;      // [sets][2][N * COLS], N rows of x a block; as many a wave where the product is not wide
  uint32_t* arrivals;  // [sets], 0 before and after
};
DEVICE uint32_t first_half(uint32_t k) { return (k + 2 * GROUP - 1) / (2 * GROUP) * GROUP; }
DEVICE Weights half_of(uint32_t k, uint32_t matrices, uint32_t half, bool wide) {
  uint32_t first = first_half(k) < k ? first_half(k) : k;
  return {half ? k - first : first, k, half ? first : 0u, matrices, wide};
}

// for_outputs of the sums of both halves, in the block that comes second. `word`: LDS of the caller's. sum(wave, row): of this half. Where all outputs
// are wave 0's the others have no part in it.
template <uint32_t N = ROWS, class Sum, class F>
DEVICE void for_both(const Halves& h, uint32_t set, uint32_t half, bool wide, uint32_t rows, uint32_t* word, const Sum& sum, const F& f) {
  bool alone = wide && rows == 1u;
  if (alone && tile_group()) return;
  uint32_t each = (wide ? 1u : WAVES) * N * COLS;
  float* low = h.partial + (uint64_t)(2 * set) * each + tile_lane();
  auto at = [&](uint32_t wave, uint32_t row) { return (wave * N + row) * COLS; };
  auto meet = [&] {
    if (alone) wave_sync();
    else block_sync();
  };
  for_rows(wide, rows, [&](uint32_t wave, uint32_t row) { low[half * each + at(wave, row)] = sum(wave, row); });
  fence_device();
  meet();
  if (thread_id() == 0) *word = global_add(h.arrivals + set, 1u);
  meet();
  if (*word == 0) return;
  fence_device();
  if (thread_id() == 0) h.arrivals[set] = 0;
  for_rows(wide, rows, [&](uint32_t wave, uint32_t row) { f(wave, tile_lane(), row, low[at(wave, row)] + low[each + at(wave, row)]); });
}

}  // namespace wave_product
