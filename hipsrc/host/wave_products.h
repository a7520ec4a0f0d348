// wave_products.h - the wave product of gemv_tiles.h and expert_walk.h for the fast host build: bf16 x, weights in bf16, q8g64 or q4g64. Its eight
// chains of fma are the lanes of one register; eight rows of weights go together, so that x is read once for them.
#pragma once

namespace {
namespace host {
namespace waves {

using products::WeightRow;
using products::weight_row;
using wave_product::GROUP;
using wave_product::LONG_K;
using wave_product::WAVES;
static_assert(wave_product::ROWS == expert_walk::ROWS && LONG_K == expert_walk::LONG_K && WAVES == expert_walk::WAVES, "one order for both");

// Eight weights of a row from element `at` on, a multiple of 8, without their scale.
DEVICE lanes8 eight_weights(bf16_weights, const uint8_t* codes, uint32_t at) { return load8((const bf16*)codes + at); }
DEVICE lanes8 eight_weights(q8g64_weights, const uint8_t* codes, uint32_t at) {
#if defined(GLM53_HOST_AVX2)
  return (lanes8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(codes + at))));
#else
  lanes8 v;
  for (uint32_t i = 0; i < LANES; i++) v[i] = (float)(int8_t)codes[at + i];
  return v;
#endif
}
DEVICE lanes8 eight_weights(q4g64_weights, const uint8_t* codes, uint32_t at) {
  uint32_t word;
  memcpy(&word, codes + at / 2, sizeof word);
  words8 all = {word, word, word, word, word, word, word, word}, shift = {0, 4, 8, 12, 16, 20, 24, 28};
  return __builtin_convertvector((mask8)((all >> shift) & 0xfu) - 8, lanes8);
}

// Where a last group of less than 64 values stands, which bf16 alone has. BACK: it is the row's last 64 values, of which x has zeros in place of
// those that the group before had (gemv_tiles.h; k is at least 64). FRONT: it starts where the others end, with zeros past k (expert_walk.h).
enum class Last { BACK, FRONT };

// Values of a row of x in whole groups.
DEVICE uint32_t whole_of(uint32_t k) { return (k + GROUP - 1) / GROUP * GROUP; }
// x[0, k) is there; sets what is left of the last group.
DEVICE void end_row(float* x, uint32_t k, Last last) {
  uint32_t whole = k / GROUP * GROUP, rest = k - whole;
  if (rest == 0) return;
  if (last == Last::BACK) memmove(x + whole + GROUP - rest, x + whole, rest * sizeof(float));
  memset(x + whole + (last == Last::BACK ? 0 : rest), 0, (GROUP - rest) * sizeof(float));
}

// Groups begin, begin + stride, .. below `end` of eight rows of weights. ahead: bytes from a row to the one that is likely its successor.
template <class W>
DEVICE void add_groups(const WeightRow* rows, const float* x, uint32_t begin, uint32_t stride, uint32_t end, uint64_t ahead, lanes8* sums) {
  for (uint32_t g = begin; g < end; g += stride) {
    UNROLL
    for (uint32_t c = 0; c < LANES; c++) products::expect(rows[c].codes, ahead + W::row_bytes(g * GROUP), (uint32_t)W::row_bytes(GROUP));
    lanes8 part[LANES];
    UNROLL
    for (uint32_t c = 0; c < LANES; c++) part[c] = W::SCALED ? all_lanes(0.0f) : sums[c];
    ROLLED
    for (uint32_t at = g * GROUP; at < (g + 1) * GROUP; at += LANES) {
      lanes8 v = load8(x + at);
      UNROLL
      for (uint32_t c = 0; c < LANES; c++) part[c] = fma8(v, eight_weights(W(), rows[c].codes, at), part[c]);
    }
    UNROLL
    for (uint32_t c = 0; c < LANES; c++) sums[c] = W::SCALED ? fma8(part[c], all_lanes(products::scale_f32(rows[c].scales[g])), sums[c]) : part[c];
  }
}

// The last group of bf16 rows whose k is not a multiple of 64; x: of that group.
inline void add_last(const WeightRow* rows, const float* x, uint32_t k, Last last, lanes8* sums) {
  uint32_t rest = k % GROUP, count = last == Last::BACK ? GROUP : rest;
  bf16 room[LANES][GROUP] = {};
  WeightRow ends[LANES];
  for (uint32_t c = 0; c < LANES; c++) {
    memcpy(room[c], (const bf16*)rows[c].codes + (k - count), count * sizeof(bf16));
    ends[c] = {(const uint8_t*)room[c], nullptr};
  }
  add_groups<bf16_weights>(ends, x, 0, 1, 1, 0, sums);
}

// Sums of eight rows of weights. `shared`: the waves of a block share the groups where k is long.
template <class W> DEVICE lanes8 eight_dots(const WeightRow* rows, const float* x, uint32_t k, bool shared, Last last) {
  uint32_t groups = k / GROUP, stride = shared && k >= LONG_K ? WAVES : 1, rest = k % GROUP;
  lanes8 total = {};
  for (uint32_t wave = 0; wave < stride; wave++) {
    lanes8 sums[LANES] = {};
    add_groups<W>(rows, x, wave, stride, groups, LANES * W::row_bytes(k), sums);
    if (!W::SCALED && rest && groups % stride == wave) add_last(rows, x + groups * GROUP, k, last, sums);
    lanes8 ends = dot8_sums(sums);
    total = wave ? total + ends : ends;
  }
  return total;
}

// sums[r * sums_pitch + i] of rows of weights row(i), i < count, and of `x_rows` rows of x. Eight at a time: sums_pitch is at least `count` in whole
// eights.
template <class W, class Row>
inline void dots(const Row& row, uint32_t count, const float* x, size_t x_pitch, uint32_t x_rows, uint32_t k, bool shared, Last last, float* sums,
                 size_t sums_pitch) {
  for (uint32_t i = 0; i < count; i += LANES) {
    WeightRow rows[LANES];
    for (uint32_t j = 0; j < LANES; j++) rows[j] = row(i + j < count ? i + j : count - 1);
    for (uint32_t r = 0; r < x_rows; r++) {
      store8(sums + r * sums_pitch + i, eight_dots<W>(rows, x + r * x_pitch, k, shared, last));
    }
  }
}

}  // namespace waves
}  // namespace host
}  // namespace
