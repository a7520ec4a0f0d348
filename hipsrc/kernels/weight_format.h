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

struct f32_weights {
  static constexpr uint32_t FORMAT = WEIGHT_F32, CHUNK = 4;
  static constexpr bool SCALED = false;
  DEVICE uint64_t row_bytes(uint32_t k) { return (uint64_t)k * 4; }
  DEVICE void expand(const uint32_t word[4], float* v) {
    UNROLL
    for (uint32_t i = 0; i < 4; i++) v[i] = float_of(word[i]);
  }
};

struct bf16_weights {
  static constexpr uint32_t FORMAT = WEIGHT_BF16, CHUNK = 8;
  static constexpr bool SCALED = false;
  DEVICE uint64_t row_bytes(uint32_t k) { return (uint64_t)k * 2; }
  DEVICE void expand(const uint32_t word[4], float* v) {
    UNROLL
    for (uint32_t i = 0; i < 4; i++) {
      v[2 * i] = float_of(word[i] << 16);
      v[2 * i + 1] = float_of(word[i] & 0xffff0000u);
    }
  }
};

// Codes without their scale.
struct q8g64_weights {
  static constexpr uint32_t FORMAT = WEIGHT_Q8G64, CHUNK = 16;
  static constexpr bool SCALED = true;
  DEVICE uint64_t row_bytes(uint32_t k) { return k; }
  DEVICE void expand(const uint32_t word[4], float* v) {
    UNROLL
    for (uint32_t i = 0; i < 4; i++) {
      uint32_t biased = word[i] ^ 0x80808080u;  // code + 128
      UNROLL
      for (uint32_t j = 0; j < 4; j++) v[4 * i + j] = float_of(MAGIC_BITS | ((biased >> (8 * j)) & 0xffu)) - 8388736.0f;
    }
  }
};

struct q4g64_weights {
  static constexpr uint32_t FORMAT = WEIGHT_Q4G64, CHUNK = 32;
  static constexpr bool SCALED = true;
  DEVICE uint64_t row_bytes(uint32_t k) { return k / 2; }
  DEVICE void expand(const uint32_t word[4], float* v) {
    UNROLL
    for (uint32_t i = 0; i < 4; i++) {
      UNROLL
      for (uint32_t j = 0; j < 8; j++) v[8 * i + j] = float_of(MAGIC_BITS | ((word[i] >> (4 * j)) & 0xfu)) - 8388616.0f;
    }
  }
};
