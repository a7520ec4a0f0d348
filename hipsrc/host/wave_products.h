// wave_products.h - the wave product of wave_product.h for the fast host build: bf16 x, weights in bf16, q8g64 or q4g64, in the order of the kernels
// without matrix tiles. Eight rows of weights go together; a lane of a register is a row of weights, of bf16 one of the eight chains of fma.
#pragma once

namespace {
namespace host {
namespace waves {

using products::WeightRow;
using products::weight_row;
using wave_product::GROUP;
using wave_product::LONG_K;
using wave_product::RUN;
using wave_product::WAVES;

typedef int16_t shorts8 __attribute__((vector_size(16)));

DEVICE uint32_t groups_in(uint32_t k) { return (k + GROUP - 1) / GROUP; }

// What is multiplied of rows of k values: [first, end), first a multiple of 64.
struct Span {
  uint32_t k, first, end;
};
DEVICE Span all_of(uint32_t k) { return {k, 0, k}; }
// As wave_product::half_of.
DEVICE Span half_of(uint32_t k, uint32_t half) {
  uint32_t first = wave_product::first_half(k) < k ? wave_product::first_half(k) : k;
  return {k, half ? first : 0u, half ? k : first};
}

// A row of x as the products read it, zeros past k. bf16 weights: [groups * 64] f32. Scaled formats, as put_x leaves them: integers q [groups * 64]
// i16, then of each group its scale f32, and 8 * sum of q i32, by which the unsigned codes of q4g64 sum to too much. q4g64 has the q of a group in
// the order of code_word below: 4 i + j at 16 j + i.
DEVICE size_t row_floats(uint32_t k) { return (size_t)groups_in(k) * GROUP; }
struct Row {
  const float* values;
  const int16_t* q;
  const float* scale;
  const int32_t* excess;
};
DEVICE Row row_at(const float* at, uint32_t k) {
  uint32_t groups = groups_in(k);
  return {at, (const int16_t*)at, at + groups * (GROUP / 2), (const int32_t*)(at + groups * (GROUP / 2 + 1))};
}

// The 64 values of a group: x, times norm if there is one, times `weight`.
DEVICE void load_group(const bf16* x, const bf16* norm, float weight, uint32_t at, uint32_t k, lanes8* v) {
  for (uint32_t u = 0; u < GROUP / LANES; u++, at += LANES) {
    v[u] = at < k ? load8(x + at) : all_lanes(0.0f);
    if (norm && at < k) v[u] *= load8(norm + at);
    v[u] *= all_lanes(weight);
  }
}

// A group as integers; the exponent and the rounding are those of put_x.
template <class W> DEVICE void quantise(const lanes8* v, int16_t* q, float* scale, int32_t* excess) {
  mask8 tops = {};
  UNROLL
  for (uint32_t u = 0; u < GROUP / LANES; u++) {
    mask8 bits = (mask8)v[u] & 0x7fffffff;
    tops = bits > tops ? bits : tops;
  }
  uint32_t top = 0;
  for (uint32_t i = 0; i < LANES; i++) top = (uint32_t)tops[i] > top ? (uint32_t)tops[i] : top;
  uint32_t exponent = (top + 0x20000u) >> 23;
  exponent = exponent > 27u ? exponent : 27u;
  constexpr uint32_t ZERO = 0x4b400080u;
  lanes8 up = all_lanes(float_of((268u - exponent) << 23));
  int16_t ascending[GROUP];
  int16_t* to = W::FORMAT == WEIGHT_Q4G64 ? ascending : q;
  mask8 all = {};
  UNROLL
  for (uint32_t u = 0; u < GROUP / LANES; u++) {
    mask8 some = (mask8)((words8)fma8(v[u], up, all_lanes(float_of(ZERO))) - ZERO);
    shorts8 few = __builtin_convertvector(some, shorts8);
    memcpy(to + u * LANES, &few, sizeof few);
    all += some;
  }
  *scale = float_of(top >= 0x7f800000u ? 0x7fc00000u : (exponent - 14u) << 23);
  if (W::FORMAT != WEIGHT_Q4G64) return;
  uint32_t sum = 0;
  for (uint32_t i = 0; i < LANES; i++) sum += (uint32_t)all[i];
  *excess = (int32_t)(sum << 3);
  for (uint32_t i = 0; i < GROUP / 4; i++) {
    for (uint32_t j = 0; j < 4; j++) q[GROUP / 4 * j + i] = ascending[4 * i + j];
  }
}

// x * weight, or x * norm * weight, of k values, a multiple of 8, into to [row_floats(k)].
template <class W> inline void prepare(const bf16* x, const bf16* norm, float weight, uint32_t k, float* to) {
  Row row = row_at(to, k);
  for (uint32_t g = 0; g < groups_in(k); g++) {
    lanes8 v[GROUP / LANES];
    load_group(x, norm, weight, g * GROUP, k, v);
    if constexpr (W::SCALED) quantise<W>(v, (int16_t*)row.q + g * GROUP, (float*)row.scale + g, (int32_t*)row.excess + g);
    else for (uint32_t u = 0; u < GROUP / LANES; u++) store8(to + g * GROUP + u * LANES, rounded8<bf16>(v[u]));
  }
}

// 1 / sqrt(mean(x^2) + eps), as wave_product::row_scale.
inline float norm_scale(const bf16* x, uint32_t k, float eps, bool wide) {
  constexpr uint32_t UNITS = wave_product::RUN_VALUES / LANES;  // of a run: as many as a wave has lanes
  uint32_t runs = (groups_in(k) + RUN - 1) / RUN, waves = wide ? WAVES : 1;
  float total = 0.0f;
  for (uint32_t wave = 0; wave < waves; wave++) {
    lanes8 sums[UNITS / LANES] = {};
    for (uint32_t run = wave; run < runs; run += waves) {
      for (uint32_t part = 0; part < UNITS / LANES; part++) {
        lanes8 v[LANES];
        for (uint32_t u = 0; u < LANES; u++) {
          uint32_t at = run * wave_product::RUN_VALUES + (part * LANES + u) * LANES;
          v[u] = at < k ? load8(x + at) : all_lanes(0.0f);
        }
        transpose8(v);
        for (uint32_t i = 0; i < LANES; i++) sums[part] = fma8(v[i], v[i], sums[part]);
      }
    }
    lanes8 s = (sums[0] + sums[2]) + (sums[1] + sums[3]);
    float sum = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
    total = wave ? total + sum : sum;
  }
  return rsqrt_exact(total / (float)k + eps);
}

#if defined(GLM53_HOST_AVX2)
// Lane i: the sum of part[i].
DEVICE mask8 sums8(const __m256i* part) {
  __m256i pair[4], four[2];
  for (uint32_t i = 0; i < 4; i++) pair[i] = _mm256_hadd_epi32(part[2 * i], part[2 * i + 1]);
  for (uint32_t i = 0; i < 2; i++) four[i] = _mm256_hadd_epi32(pair[2 * i], pair[2 * i + 1]);
  return (mask8)_mm256_add_epi32(_mm256_permute2x128_si256(four[0], four[1], 0x20), _mm256_permute2x128_si256(four[0], four[1], 0x31));
}
// Codes of a group as integers of 16 bits, in the order of q: those of part j < 4.
DEVICE __m256i code_word(q8g64_weights, const uint8_t* codes, uint32_t j) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(codes + 16 * j)));
}
DEVICE __m256i code_word(q4g64_weights, const uint8_t* codes, uint32_t j) {
  __m256i all = _mm256_loadu_si256((const __m256i*)codes);
  return j == 3 ? _mm256_srli_epi16(all, 12) : _mm256_and_si256(_mm256_srli_epi16(all, (int)(4 * j)), _mm256_set1_epi16(15));
}
// Sums of code * q over a group of eight rows of weights: |code| <= 128, |q| <= 32512.
template <class W> DEVICE mask8 code_sums(const WeightRow* rows, uint32_t group, const int16_t* q) {
  __m256i x[4], part[LANES];
  for (uint32_t j = 0; j < 4; j++) x[j] = _mm256_loadu_si256((const __m256i*)(q + 16 * j));
  UNROLL
  for (uint32_t c = 0; c < LANES; c++) {
    const uint8_t* codes = rows[c].codes + W::row_bytes(group * GROUP);
    __m256i product[4];
    UNROLL
    for (uint32_t j = 0; j < 4; j++) product[j] = _mm256_madd_epi16(code_word(W(), codes, j), x[j]);
    part[c] = _mm256_add_epi32(_mm256_add_epi32(product[0], product[1]), _mm256_add_epi32(product[2], product[3]));
  }
  return sums8(part);
}
#else
DEVICE int32_t code_at(q8g64_weights, const uint8_t* codes, uint32_t j, uint32_t i) { return (int8_t)codes[16 * j + i]; }
DEVICE int32_t code_at(q4g64_weights, const uint8_t* codes, uint32_t j, uint32_t i) { return codes[2 * i + j / 2] >> (j % 2 * 4) & 15; }
template <class W> DEVICE mask8 code_sums(const WeightRow* rows, uint32_t group, const int16_t* q) {
  mask8 sums = {};
  for (uint32_t c = 0; c < LANES; c++) {
    const uint8_t* codes = rows[c].codes + W::row_bytes(group * GROUP);
    uint32_t sum = 0;  // of a group that is not finite, sums may wrap round: its scale is NaN
    for (uint32_t j = 0; j < 4; j++) {
      for (uint32_t i = 0; i < 16; i++) sum += (uint32_t)(code_at(W(), codes, j, i) * q[16 * j + i]);
    }
    sums[c] = (int32_t)sum;
  }
  return sums;
}
#endif

// Scales of eight rows of weights, of `count` groups from `first` on.
DEVICE void run_scales(const WeightRow* rows, uint32_t first, uint32_t count, lanes8* scale) {
#if defined(GLM53_HOST_AVX2)
  if (count == RUN) {
    __m128i row[LANES], pair[4], four[4];
    for (uint32_t c = 0; c < LANES; c++) row[c] = _mm_loadl_epi64((const __m128i*)(rows[c].scales + first));
    for (uint32_t i = 0; i < 4; i++) pair[i] = _mm_unpacklo_epi16(row[2 * i], row[2 * i + 1]);
    for (uint32_t i = 0; i < 2; i++) {
      four[i] = _mm_unpacklo_epi32(pair[2 * i], pair[2 * i + 1]);
      four[i + 2] = _mm_unpackhi_epi32(pair[2 * i], pair[2 * i + 1]);
    }
    for (uint32_t i = 0; i < 2; i++) {
      scale[2 * i] = (lanes8)_mm256_cvtph_ps(_mm_unpacklo_epi64(four[2 * i], four[2 * i + 1]));
      scale[2 * i + 1] = (lanes8)_mm256_cvtph_ps(_mm_unpackhi_epi64(four[2 * i], four[2 * i + 1]));
    }
    return;
  }
#endif
  for (uint32_t g = 0; g < count; g++) {
    for (uint32_t c = 0; c < LANES; c++) scale[g][c] = products::scale_f32(rows[c].scales[first + g]);
  }
}

// The sums of one wave for eight rows of weights. add_run: groups [first, first + count) of a matrix, values before `end` alone.
template <class W, bool SCALED = W::SCALED> struct Sums {
  lanes8 sum = {};
  __attribute__((always_inline)) void add_run(const WeightRow* rows, const Row& x, uint32_t first, uint32_t count, uint32_t) {
    lanes8 scale[RUN];
    run_scales(rows, first, count, scale);
    for (uint32_t g = 0; g < count; g++) {
      mask8 all = code_sums<W>(rows, first + g, x.q + (first + g) * GROUP);
      if (W::FORMAT == WEIGHT_Q4G64) all -= x.excess[first + g];
      sum = fma8(__builtin_convertvector(all, lanes8), scale[g] * all_lanes(x.scale[first + g]), sum);
    }
  }
  __attribute__((always_inline)) lanes8 finish() const { return sum; }
};
template <class W> struct Sums<W, false> {
  lanes8 chains[LANES] = {};  // of each row of weights
  __attribute__((always_inline)) void add_run(const WeightRow* rows, const Row& x, uint32_t first, uint32_t count, uint32_t end) {
    uint32_t stop = (first + count) * GROUP < end ? (first + count) * GROUP : end;
    lanes8 part[LANES];
    UNROLL
    for (uint32_t c = 0; c < LANES; c++) part[c] = chains[c];
    ROLLED
    for (uint32_t at = first * GROUP; at < stop; at += LANES) {
      lanes8 v = load8(x.values + at);
      UNROLL
      for (uint32_t c = 0; c < LANES; c++) part[c] = fma8(v, load8((const bf16*)rows[c].codes + at), part[c]);
    }
    UNROLL
    for (uint32_t c = 0; c < LANES; c++) chains[c] = part[c];
  }
  __attribute__((always_inline)) lanes8 finish() const { return dot8_sums(chains); }
};

// Sums over `matrices` matrices, whose runs follow one another: eight rows of weights of each, times its row of x. A matrix without codes adds
// nothing.
template <class W> inline lanes8 eight_dots(const WeightRow (*rows)[LANES], const Row* x, uint32_t matrices, const Span& span, bool wide) {
  uint32_t begin = span.first / GROUP, groups = groups_in(span.end - span.first), per = (groups + RUN - 1) / RUN, waves = wide ? WAVES : 1;
  lanes8 total = {};
  for (uint32_t wave = 0; wave < waves; wave++) {
    Sums<W> sums;
    for (uint32_t matrix = 0, run = wave; groups; run += waves) {
      while (run >= per && matrix < matrices) {
        run -= per;
        matrix++;
      }
      if (matrix >= matrices) break;
      if (!rows[matrix][0].codes) continue;
      uint32_t first = begin + run * RUN, count = groups - run * RUN < RUN ? groups - run * RUN : RUN;
      // Likely the next to be multiplied: the eight rows after these.
      uint64_t ahead = LANES * W::row_bytes(span.k) + W::row_bytes(first * GROUP);
      for (uint32_t c = 0; c < LANES; c++) products::expect(rows[matrix][c].codes, ahead, (uint32_t)W::row_bytes(count * GROUP));
      sums.add_run(rows[matrix], x[matrix], first, count, span.end);
    }
    total = wave ? total + sums.finish() : sums.finish();
  }
  return total;
}

// sums[r * sums_pitch + i] of rows of weights row(i), i < count, and of `x_rows` prepared rows of x, one after the other. halves: as the sum of the
// two halves of k. Eight at a time: sums_pitch is at least `count` in whole eights.
template <class W, class At>
inline void dots(const At& row, uint32_t count, const float* x, uint32_t x_rows, uint32_t k, bool wide, bool halves, float* sums, size_t sums_pitch) {
  for (uint32_t i = 0; i < count; i += LANES) {
    WeightRow rows[1][LANES];
    for (uint32_t j = 0; j < LANES; j++) rows[0][j] = row(i + j < count ? i + j : count - 1);
    for (uint32_t r = 0; r < x_rows; r++) {
      Row of_x = row_at(x + r * row_floats(k), k);
      lanes8 sum = eight_dots<W>(rows, &of_x, 1, halves ? half_of(k, 0) : all_of(k), wide);
      if (halves) sum += eight_dots<W>(rows, &of_x, 1, half_of(k, 1), wide);
      store8(sums + r * sums_pitch + i, sum);
    }
  }
}

}  // namespace waves
}  // namespace host
}  // namespace
