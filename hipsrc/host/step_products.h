// step_products.h - the orders of additions of gemv.h and step_experts.hip in eight lanes: weights in any format times few rows of x, for the fast
// host build. A step takes 4 chunks of 16 bytes from two streams: two rows of weights where an output has 4 lanes, two stretches of one row where it
// has 32. The chunks are transposed in registers, so that a lane of the register is a lane of the order; x is packed once to match.
#pragma once

namespace {
namespace host {
namespace products {

constexpr uint32_t STREAM_CHUNKS = 4;
constexpr uint32_t STREAM_BYTES = 16 * STREAM_CHUNKS;

// Word i of each lane's chunk, as values: value(word, j) is element j of the word. prepare: what x needs first; returns where a chunk's chain starts.
template <class W> struct reader;
template <> struct reader<f32_weights> {
  using weights = f32_weights;
  static constexpr uint32_t VALUES = 1;
  DEVICE lanes8 value(words8 word, uint32_t) { return (lanes8)word; }
  DEVICE float prepare(float*) { return 0.0f; }
};
template <> struct reader<bf16_weights> {
  using weights = bf16_weights;
  static constexpr uint32_t VALUES = 2;
  DEVICE lanes8 value(words8 word, uint32_t j) { return (lanes8)(j ? word & 0xffff0000u : word << 16); }
  DEVICE float prepare(float*) { return 0.0f; }
};
template <> struct reader<q8g64_weights> {
  using weights = q8g64_weights;
  static constexpr uint32_t VALUES = 4;
  DEVICE lanes8 value(words8 word, uint32_t j) { return __builtin_convertvector((mask8)(word << (24 - 8 * j)) >> 24, lanes8); }
  DEVICE float prepare(float*) { return 0.0f; }
};
template <> struct reader<q4g64_weights> {
  using weights = q4g64_weights;
  static constexpr uint32_t VALUES = 8;
  DEVICE lanes8 value(words8 word, uint32_t j) { return __builtin_convertvector((mask8)((word >> (4 * j)) & 0xfu) - 8, lanes8); }
  DEVICE float prepare(float*) { return 0.0f; }
};
// Of step_experts.hip: q4g64 with the offset of the codes taken out of x.
template <class W> struct expert_reader : reader<W> {};
template <> struct expert_reader<q4g64_weights> {
  using weights = q4g64_weights;
  static constexpr uint32_t VALUES = 8;
  DEVICE lanes8 value(words8 word, uint32_t j) {
    words8 pair = ((word >> (4 * (j % 4))) & 0x000f000fu) | 0x43004300u;
    return (lanes8)(j < 4 ? pair << 16 : pair);
  }
  DEVICE float prepare(float* x) { return step_moe::word_reader<q4g64_weights>::prepare(x); }
};

// Packed x: a step has its values [CHUNK][8], then the starts [8].
template <class R> constexpr uint32_t step_floats = (R::weights::CHUNK + 1) * LANES;
DEVICE uint32_t chunks_of(uint32_t k, uint32_t chunk) { return (k + chunk - 1) / chunk; }
// Steps of a row of x: of 4 chunks, each twice, where an output has 4 lanes, else (wide) of 8 chunks in whole rounds of 32.
DEVICE uint32_t steps_of(uint32_t k, uint32_t chunk, bool wide) {
  uint32_t chunks = chunks_of(k, chunk);
  return wide ? (chunks + 31) / 32 * 4 : (chunks + STREAM_CHUNKS - 1) / STREAM_CHUNKS;
}
// Room of one packed row in any format.
DEVICE size_t packed_floats(uint32_t k) { return ((size_t)k + 32 * gemv::CHUNK_MAX) * 5 / 2 + 64; }

template <class R> inline void pack(const float* x, uint32_t k, bool wide, float* to) {
  constexpr uint32_t CHUNK = R::weights::CHUNK;
  uint32_t steps = steps_of(k, CHUNK, wide), distinct = wide ? LANES : STREAM_CHUNKS;
  for (uint32_t s = 0; s < steps; s++, to += step_floats<R>) {
    for (uint32_t lane = 0; lane < distinct; lane++) {
      uint32_t first = (s * distinct + lane) * CHUNK;
      float v[CHUNK];
      for (uint32_t j = 0; j < CHUNK; j++) v[j] = first + j < k ? x[first + j] : 0.0f;
      float start = R::prepare(v);
      for (uint32_t j = 0; j < CHUNK; j++) to[j * LANES + lane] = v[j];
      to[CHUNK * LANES + lane] = start;
    }
    if (distinct == LANES) continue;
    for (uint32_t j = 0; j <= CHUNK; j++) __builtin_memcpy(to + j * LANES + STREAM_CHUNKS, to + j * LANES, STREAM_CHUNKS * sizeof(float));
  }
}

struct WeightRow {
  const uint8_t* codes;
  const uint16_t* scales;
};
// A row of k values, from value `first` on.
template <class W> DEVICE WeightRow weight_row(const void* codes, const void* scales, uint64_t row, uint32_t k, uint32_t first = 0) {
  return {(const uint8_t*)codes + row * W::row_bytes(k) + W::row_bytes(first),
          W::SCALED ? (const uint16_t*)scales + row * (k / WEIGHT_GROUP) + first / WEIGHT_GROUP : nullptr};
}

// Asks for the lines of memory of `bytes` bytes from from + ahead on, where there may be nothing: rows of weights are read eight at a time, before
// the processor sees a stream.
DEVICE void expect(const uint8_t* from, uint64_t ahead, uint32_t bytes) {
  UNROLL
  for (uint32_t i = 0; i < bytes; i += 64) __builtin_prefetch((const void*)((uintptr_t)from + ahead + i));
}

// Four chunks of each stream, transposed: word[i] has word i of chunks 0 to 3 of `low`, then of `high`.
DEVICE void load_words(const uint8_t* low, const uint8_t* high, words8 word[4]) {
#if defined(GLM53_HOST_AVX2)
  __m256 v[4], pair[4];
  for (uint32_t i = 0; i < 4; i++) {
    __m128 a = _mm_loadu_ps((const float*)(low + 16 * i)), b = _mm_loadu_ps((const float*)(high + 16 * i));
    v[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(a), b, 1);
  }
  pair[0] = _mm256_unpacklo_ps(v[0], v[1]);
  pair[1] = _mm256_unpackhi_ps(v[0], v[1]);
  pair[2] = _mm256_unpacklo_ps(v[2], v[3]);
  pair[3] = _mm256_unpackhi_ps(v[2], v[3]);
  for (uint32_t i = 0; i < 2; i++) {
    __m256d a = _mm256_castps_pd(pair[i]), b = _mm256_castps_pd(pair[i + 2]);
    word[2 * i] = (words8)_mm256_unpacklo_pd(a, b);
    word[2 * i + 1] = (words8)_mm256_unpackhi_pd(a, b);
  }
#else
  for (uint32_t i = 0; i < 4; i++) {
    for (uint32_t c = 0; c < STREAM_CHUNKS; c++) {
      uint32_t a, b;
      __builtin_memcpy(&a, low + 16 * c + 4 * i, 4);
      __builtin_memcpy(&b, high + 16 * c + 4 * i, 4);
      word[i][c] = a;
      word[i][c + STREAM_CHUNKS] = b;
    }
  }
#endif
}

DEVICE float scale_f32(uint16_t bits) {
#if defined(GLM53_HOST_AVX2)
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
#else
  return f16_value(bits);
#endif
}
// Scales of 4 chunks of a row from chunk c on (a multiple of 4), of which `count` exist.
template <class W> DEVICE void chunk_scales(const uint16_t* scales, uint32_t c, uint32_t count, float* to) {
  if (W::FORMAT == WEIGHT_Q8G64) {
    float scale = scale_f32(scales[c / 4]);
    for (uint32_t i = 0; i < STREAM_CHUNKS; i++) to[i] = scale;
  } else {
    float first = scale_f32(scales[c / 2]), second = count > 2 ? scale_f32(scales[c / 2 + 1]) : 0.0f;
    to[0] = to[1] = first;
    to[2] = to[3] = second;
  }
}

// sums[r] after one step.
template <class R, uint32_t ROWS>
DEVICE void add_step(const uint8_t* low, const uint8_t* high, lanes8 scale, const float* x, uint64_t pitch, lanes8* sums) {
  using W = typename R::weights;
  words8 word[4];
  load_words(low, high, word);
  lanes8 part[ROWS];
  UNROLL
  for (uint32_t r = 0; r < ROWS; r++) part[r] = W::SCALED ? load8(x + r * pitch + W::CHUNK * LANES) : sums[r];
  UNROLL
  for (uint32_t i = 0; i < 4; i++) {
    UNROLL
    for (uint32_t j = 0; j < R::VALUES; j++) {
      lanes8 w = R::value(word[i], j);
      UNROLL
      for (uint32_t r = 0; r < ROWS; r++) part[r] = fma8(load8(x + r * pitch + (i * R::VALUES + j) * LANES), w, part[r]);
    }
  }
  UNROLL
  for (uint32_t r = 0; r < ROWS; r++) sums[r] = W::SCALED ? fma8(part[r], scale, sums[r]) : part[r];
}

// A step whose streams end early: lanes of chunks that do not exist keep their sums.
template <class R, uint32_t ROWS>
inline void add_last(const uint8_t* low, const uint8_t* high, uint32_t low_chunks, uint32_t high_chunks, uint32_t low_bytes, uint32_t high_bytes,
                     lanes8 scale, const float* x, uint64_t pitch, lanes8* sums) {
  uint8_t room[2][STREAM_BYTES] = {};
  memcpy(room[0], low, low_bytes < STREAM_BYTES ? low_bytes : STREAM_BYTES);
  memcpy(room[1], high, high_bytes < STREAM_BYTES ? high_bytes : STREAM_BYTES);
  lanes8 after[ROWS];
  mask8 inside;
  for (uint32_t i = 0; i < STREAM_CHUNKS; i++) {
    inside[i] = i < low_chunks ? -1 : 0;
    inside[i + STREAM_CHUNKS] = i < high_chunks ? -1 : 0;
  }
  for (uint32_t r = 0; r < ROWS; r++) after[r] = sums[r];
  add_step<R, ROWS>(room[0], room[1], scale, x, pitch, after);
  for (uint32_t r = 0; r < ROWS; r++) sums[r] = inside ? after[r] : sums[r];
}

// 4 lanes an output: P pairs of rows of weights times ROWS rows of x. sums[row of weights][row of x].
template <class R, uint32_t P, uint32_t ROWS>
void short_dots(const WeightRow* rows, const float* x, uint64_t pitch, uint32_t k, float (*sums)[ROWS]) {
  using W = typename R::weights;
  uint32_t chunks = chunks_of(k, W::CHUNK), whole = (uint32_t)(W::row_bytes(k) / STREAM_BYTES), rest = (uint32_t)(W::row_bytes(k) % STREAM_BYTES);
  lanes8 sum[P][ROWS] = {};
  for (uint32_t s = 0; s < whole; s++) {
    UNROLL
    for (uint32_t p = 0; p < P; p++) {
      lanes8 scale = {};
      if (W::SCALED) {
        float both[LANES];
        chunk_scales<W>(rows[2 * p].scales, s * STREAM_CHUNKS, STREAM_CHUNKS, both);
        chunk_scales<W>(rows[2 * p + 1].scales, s * STREAM_CHUNKS, STREAM_CHUNKS, both + STREAM_CHUNKS);
        scale = load8(both);
      }
      const uint8_t *low = rows[2 * p].codes + s * STREAM_BYTES, *high = rows[2 * p + 1].codes + s * STREAM_BYTES;
      expect(low, 2 * P * W::row_bytes(k), STREAM_BYTES);
      expect(high, 2 * P * W::row_bytes(k), STREAM_BYTES);
      add_step<R, ROWS>(low, high, scale, x + (uint64_t)s * step_floats<R>, pitch, sum[p]);
    }
  }
  for (uint32_t p = 0; rest && p < P; p++) {
    uint32_t left = chunks - whole * STREAM_CHUNKS;
    float both[LANES] = {};
    if (W::SCALED) {
      chunk_scales<W>(rows[2 * p].scales, whole * STREAM_CHUNKS, left, both);
      chunk_scales<W>(rows[2 * p + 1].scales, whole * STREAM_CHUNKS, left, both + STREAM_CHUNKS);
    }
    add_last<R, ROWS>(rows[2 * p].codes + whole * STREAM_BYTES, rows[2 * p + 1].codes + whole * STREAM_BYTES, left, left, rest, rest, load8(both),
                      x + (uint64_t)whole * step_floats<R>, pitch, sum[p]);
  }
  for (uint32_t p = 0; p < P; p++) {
    for (uint32_t r = 0; r < ROWS; r++) {
      lanes8 v = sum[p][r];
      sums[2 * p][r] = (v[0] + v[2]) + (v[1] + v[3]);
      sums[2 * p + 1][r] = (v[4] + v[6]) + (v[5] + v[7]);
    }
  }
}

// 32 lanes an output: one row of weights, whose lanes lie in four registers.
template <class R, uint32_t ROWS> void long_dots(const WeightRow& row, const float* x, uint64_t pitch, uint32_t k, float* sums) {
  using W = typename R::weights;
  constexpr uint32_t Q = 4, BYTES = 2 * STREAM_BYTES;
  uint32_t bytes = (uint32_t)W::row_bytes(k), chunks = chunks_of(k, W::CHUNK), steps = (chunks + 31) / 32 * Q;
  lanes8 sum[Q][ROWS] = {};
  for (uint32_t s = 0; s < steps; s += Q) {
    UNROLL
    for (uint32_t q = 0; q < Q; q++) {
      uint32_t at = (s + q) * BYTES, c = (s + q) * LANES;
      if (c >= chunks) continue;
      uint32_t left = chunks - c, low = left < STREAM_CHUNKS ? left : STREAM_CHUNKS, high = left < LANES ? left - low : STREAM_CHUNKS;
      const float* packed = x + (uint64_t)(s + q) * step_floats<R>;
      float both[LANES] = {};
      if (W::SCALED) {
        chunk_scales<W>(row.scales, c, low, both);
        if (high) chunk_scales<W>(row.scales, c + STREAM_CHUNKS, high, both + STREAM_CHUNKS);
      }
      lanes8 scale = load8(both);
      if (at + BYTES <= bytes) {
        add_step<R, ROWS>(row.codes + at, row.codes + at + STREAM_BYTES, scale, packed, pitch, sum[q]);
      } else {
        uint32_t rest = bytes - at;
        add_last<R, ROWS>(row.codes + at, row.codes + (rest > STREAM_BYTES ? at + STREAM_BYTES : at), low, high, rest,
                          rest > STREAM_BYTES ? rest - STREAM_BYTES : 0u, scale, packed, pitch, sum[q]);
      }
    }
  }
  for (uint32_t r = 0; r < ROWS; r++) {
    lanes8 v = (sum[0][r] + sum[2][r]) + (sum[1][r] + sum[3][r]);
    sums[r] = ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
  }
}

// sums[i * ROWS + r] of rows of weights `row(i)`, i < count, and ROWS packed rows of x.
template <class R, uint32_t ROWS, class Row>
inline void dots(const Row& row, uint32_t count, const float* x, uint64_t pitch, uint32_t k, bool wide, float* sums) {
  if (wide) {
    for (uint32_t i = 0; i < count; i++) long_dots<R, ROWS>(row(i), x, pitch, k, sums + i * ROWS);
    return;
  }
  constexpr uint32_t P = 4 / ROWS;
  for (uint32_t i = 0; i < count; i += 2 * P) {
    WeightRow rows[2 * P];
    float some[2 * P][ROWS];
    for (uint32_t j = 0; j < 2 * P; j++) rows[j] = row(i + j < count ? i + j : count - 1);
    short_dots<R, P, ROWS>(rows, x, pitch, k, some);
    memcpy(sums + i * ROWS, some, sizeof(float) * ROWS * (count - i < 2 * P ? count - i : 2 * P));
  }
}

// The same for any number of rows of x: sums[i * x_rows + r].
template <class R, class Row>
inline void all_dots(const Row& row, uint32_t count, const float* x, uint64_t pitch, uint32_t x_rows, uint32_t k, bool wide, float* sums) {
  if (x_rows == 1) return dots<R, 1>(row, count, x, pitch, k, wide, sums);
  constexpr uint32_t STRIP = 128;
  float some[STRIP * 4];
  for (uint32_t i = 0; i < count; i += STRIP) {
    uint32_t strip = count - i < STRIP ? count - i : STRIP, taken = 0;
    auto part = [&](uint32_t j) { return row(i + j); };
    for (uint32_t r = 0; r < x_rows; r += taken) {
      const float* from = x + r * pitch;
      taken = x_rows - r >= 4 ? 4 : x_rows - r >= 2 ? 2 : 1;
      if (taken == 4) dots<R, 4>(part, strip, from, pitch, k, wide, some);
      else if (taken == 2) dots<R, 2>(part, strip, from, pitch, k, wide, some);
      else dots<R, 1>(part, strip, from, pitch, k, wide, some);
      for (uint32_t j = 0; j < strip; j++) {
        for (uint32_t t = 0; t < taken; t++) sums[(uint64_t)(i + j) * x_rows + r + t] = some[j * taken + t];
      }
    }
  }
}

}  // namespace products
}  // namespace host
}  // namespace
