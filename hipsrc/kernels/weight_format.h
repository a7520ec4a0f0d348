// weight_format.h - how the weights of a matrix [n, k] lie in memory, and 16 bytes of them as f32. Formats: WeightFormat in glm53/spec.py.
//   f32, bf16   codes are the values
//   q8g64       int8 codes; value = code * scale, one f16 scale a row and 64 columns
//   q4g64       two codes a byte, the even column in the low nibble; value = (code - 8) * scale; the scale may be negative
// A CHUNK is what 16 bytes hold; chunks never straddle a group of 64. Quantised: k is a multiple of 64.
#pragma once
#include "portable.h"

constexpr uint32_t WEIGHT_F32 = 0, WEIGHT_BF16 = 1, WEIGHT_Q8G64 = 2, WEIGHT_Q4G64 = 3;
constexpr uint32_t WEIGHT_GROUP = 64;

// 8388608 + u as a float holds u < 2^23 in its low bits: one instruction makes a float of bits, one subtraction makes it exact.
constexpr uint32_t MAGIC_BITS = 0x4b000000u;

// value(word, j): value j of the chunk in `word`, j a constant after unrolling. expand: all of them.
template <class W> DEVICE void expand_chunk(const uint32_t word[4], float* v) {
  UNROLL
  for (uint32_t j = 0; j < W::CHUNK; j++) v[j] = W::value(word, j);
}

struct f32_weights {
  using element = float;
  static constexpr uint32_t FORMAT = WEIGHT_F32, CHUNK = 4;
  static constexpr bool SCALED = false;
  DEVICE uint64_t row_bytes(uint32_t k) { return (uint64_t)k * 4; }
  DEVICE float value(const uint32_t word[4], uint32_t j) { return float_of(word[j]); }
  DEVICE void expand(const uint32_t word[4], float* v) { expand_chunk<f32_weights>(word, v); }
};

struct bf16_weights {
  using element = bf16;
  static constexpr uint32_t FORMAT = WEIGHT_BF16, CHUNK = 8;
  static constexpr bool SCALED = false;
  DEVICE uint64_t row_bytes(uint32_t k) { return (uint64_t)k * 2; }
  DEVICE float value(const uint32_t word[4], uint32_t j) { return float_of(j % 2 ? word[j / 2] & 0xffff0000u : word[j / 2] << 16); }
  DEVICE void expand(const uint32_t word[4], float* v) { expand_chunk<bf16_weights>(word, v); }
};

// Codes without their scale.
struct q8g64_weights {
  static constexpr uint32_t FORMAT = WEIGHT_Q8G64, CHUNK = 16;
  static constexpr bool SCALED = true;
  DEVICE uint64_t row_bytes(uint32_t k) { return k; }
  DEVICE float value(const uint32_t word[4], uint32_t j) {
    uint32_t biased = word[j / 4] ^ 0x80808080u;  // code + 128
    return float_of(with_byte(biased, j % 4, MAGIC_BITS)) - 8388736.0f;
  }
  DEVICE void expand(const uint32_t word[4], float* v) { expand_chunk<q8g64_weights>(word, v); }
  // Eight values from element `at` on, a multiple of 8, with their scale; exact: a code has 8 bits, a scale 11.
  DEVICE void load8(const void* codes, const uint16_t* scales, uint64_t at, float* v) {
    float scale = f16_to_f32(scales[at / WEIGHT_GROUP]);
    uint64_t bytes = *(const uint64_t*)((const uint8_t*)codes + at);
    UNROLL
    for (uint32_t j = 0; j < 8; j++) v[j] = (float)(int8_t)(bytes >> (8 * j)) * scale;
  }
};

struct q4g64_weights {
  static constexpr uint32_t FORMAT = WEIGHT_Q4G64, CHUNK = 32;
  static constexpr bool SCALED = true;
  DEVICE uint64_t row_bytes(uint32_t k) { return k / 2; }
  // A code stays where it lies among the low 20 bits, one shift brings the upper three codes there: 8388608 + code * 16^place, and one exact fma.
  DEVICE float value(const uint32_t word[4], uint32_t j) {
    uint32_t place = j % 8 < 5 ? j % 8 : j % 8 - 3, codes = j % 8 < 5 ? word[j / 8] : word[j / 8] >> 12;
    float unit = float_of((127u - 4u * place) << 23);  // 16^-place
    return fma_f32(float_of(and_or(codes, 0xfu << (4 * place), MAGIC_BITS)), unit, -8388608.0f * unit - 8.0f);
  }
  DEVICE void expand(const uint32_t word[4], float* v) { expand_chunk<q4g64_weights>(word, v); }
  DEVICE void load8(const void* codes, const uint16_t* scales, uint64_t at, float* v) {
    float scale = f16_to_f32(scales[at / WEIGHT_GROUP]);
    const uint32_t word[4] = {*(const uint32_t*)((const uint8_t*)codes + at / 2), 0, 0, 0};
    UNROLL
    for (uint32_t j = 0; j < 8; j++) v[j] = value(word, j) * scale;
  }
};
