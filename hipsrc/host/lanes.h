// lanes.h - eight f32 in one register for the host's fast kernels: GCC's vector extension, with AVX2 and FMA instructions where the extension has no
// word for them. Every operation rounds as its scalar counterpart in portable_host.h does, lane by lane.
#pragma once
#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define GLM53_HOST_AVX2 1
#endif

namespace {
namespace host {

typedef float lanes8 __attribute__((vector_size(32)));
typedef int32_t mask8 __attribute__((vector_size(32)));
typedef uint32_t words8 __attribute__((vector_size(32)));

constexpr uint32_t LANES = 8;

DEVICE lanes8 all_lanes(float v) { return lanes8{v, v, v, v, v, v, v, v}; }
DEVICE lanes8 load8(const float* p) {
  lanes8 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
DEVICE lanes8 load8(const bf16* p) {
#if defined(GLM53_HOST_AVX2)
  __m128i bits = _mm_loadu_si128((const __m128i*)p);
  return (lanes8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
#else
  lanes8 v;
  for (uint32_t i = 0; i < LANES; i++) v[i] = bf16_to_f32(p[i]);
  return v;
#endif
}
DEVICE void store8(float* p, lanes8 v) { __builtin_memcpy(p, &v, sizeof v); }

DEVICE lanes8 fma8(lanes8 a, lanes8 b, lanes8 c) {
#if defined(GLM53_HOST_AVX2)
  return (lanes8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  for (uint32_t i = 0; i < LANES; i++) c[i] = fma_f32(a[i], b[i], c[i]);
  return c;
#endif
}

// max_f32(a, b) of each lane.
DEVICE lanes8 max8(lanes8 a, lanes8 b) { return ((a > b) | (b != b)) ? a : b; }

// As store_f32 to each element of p.
DEVICE void round8(float* p, lanes8 v) { store8(p, v); }
DEVICE void round8(bf16* p, lanes8 v) {
  words8 u = (words8)v, magnitude = u & 0x7fffffffu;
  words8 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16, nan = (u >> 16) | 0x40u;
  words8 bits = (magnitude > 0x7f800000u) ? nan : rounded;
#if defined(GLM53_HOST_AVX2)
  __m256i packed = _mm256_packus_epi32((__m256i)bits, (__m256i)bits);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
  for (uint32_t i = 0; i < LANES; i++) p[i].bits = (uint16_t)bits[i];
#endif
}
// As rounded<T>::of in each lane.
template <class T> DEVICE lanes8 rounded8(lanes8 v) {
  if (sizeof(T) == 4) return v;
  bf16 bits[LANES];
  round8(bits, v);
  return load8(bits);
}

// Elements [0, count) of p, zeros beyond; count <= 8.
template <class T> DEVICE lanes8 load_part(const T* p, uint32_t count) {
  if (count >= LANES) return load8(p);
  lanes8 v = {};
  for (uint32_t i = 0; i < count; i++) v[i] = load_f32(p + i);
  return v;
}

// The sum at the end of dot8, of eight dot products at once: lane i of the result is that of p[i].
DEVICE lanes8 dot8_sums(const lanes8 p[8]) {
#if defined(GLM53_HOST_AVX2)
  __m256 half[4];  // of two products: partials 0 + 4, 1 + 5, 2 + 6, 3 + 7
  for (uint32_t i = 0; i < 4; i++) {
    __m256 a = (__m256)p[i], b = (__m256)p[i + 4];
    half[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  }
  __m256 pair[2];  // of four products: 04 + 26, 15 + 37
  for (uint32_t i = 0; i < 2; i++) {
    __m256d a = _mm256_castps_pd(half[2 * i]), b = _mm256_castps_pd(half[2 * i + 1]);
    pair[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
  }
  return (lanes8)_mm256_add_ps(_mm256_shuffle_ps(pair[0], pair[1], 0x88), _mm256_shuffle_ps(pair[0], pair[1], 0xdd));
#else
  lanes8 sums;
  for (uint32_t i = 0; i < LANES; i++) sums[i] = ((p[i][0] + p[i][4]) + (p[i][2] + p[i][6])) + ((p[i][1] + p[i][5]) + (p[i][3] + p[i][7]));
  return sums;
#endif
}

// Rows become columns.
DEVICE void transpose8(lanes8 v[8]) {
#if defined(GLM53_HOST_AVX2)
  __m256 pair[8], four[8];
  for (uint32_t i = 0; i < 4; i++) {
    pair[2 * i] = _mm256_unpacklo_ps((__m256)v[2 * i], (__m256)v[2 * i + 1]);
    pair[2 * i + 1] = _mm256_unpackhi_ps((__m256)v[2 * i], (__m256)v[2 * i + 1]);
  }
  for (uint32_t i = 0; i < 8; i += 4) {
    four[i] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0x44);
    four[i + 1] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0xee);
    four[i + 2] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0x44);
    four[i + 3] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0xee);
  }
  for (uint32_t i = 0; i < 4; i++) {
    v[i] = (lanes8)_mm256_permute2f128_ps(four[i], four[i + 4], 0x20);
    v[i + 4] = (lanes8)_mm256_permute2f128_ps(four[i], four[i + 4], 0x31);
  }
#else
  lanes8 turned[8];
  for (uint32_t i = 0; i < LANES; i++) {
    for (uint32_t j = 0; j < LANES; j++) turned[j][i] = v[i][j];
  }
  for (uint32_t i = 0; i < LANES; i++) v[i] = turned[i];
#endif
}

}  // namespace host
}  // namespace
