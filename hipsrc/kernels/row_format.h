// row_format.h - what writers and readers of history rows share: references, and the layout of quantised rows.
#pragma once
#include "portable.h"

constexpr uint32_t Q8_GROUP = 64;  // latent values of one scale in a q8g64 row

// Row references (docs/decisions/0003-host-tier.md): payload in bits 4 and up, space in bits 0 and 1. Sums are mod 2^64, so that an offset
// may stand for a distance backwards.
DEVICE uint64_t ref_payload(uint64_t ref) { return ref & ~(uint64_t)15; }
DEVICE uint32_t ref_space(uint64_t ref) { return (uint32_t)ref & 3u; }

// The four spaces without a variable index, which would put the argument struct into scratch memory.
DEVICE uint64_t space_offset(const uint64_t* offsets, uint32_t space) {
  uint64_t low = space & 1u ? offsets[1] : offsets[0], high = space & 1u ? offsets[3] : offsets[2];
  return space & 2u ? high : low;
}

template <class T> DEVICE T* row_pointer(uint64_t ref, const uint64_t* offsets, uint32_t row_bytes) {
  return pointer_from<T>(ref_payload(ref) + space_offset(offsets, ref_space(ref)), row_bytes);
}

// Bytes before the rope part of a q8g64 row: latent i8, then the scales.
DEVICE uint32_t q8_rope_offset(uint32_t latent) { return latent + latent / Q8_GROUP * 2; }

constexpr uint32_t ROW_UNIT = 8;  // values that a reader takes in one go

// A row format: bytes of a row, and its values [c, c + ROW_UNIT) as f32, c a multiple of ROW_UNIT; fewer where the row ends. Rows are multiples of
// 16 bytes at multiples of 16.
template <class T> struct plain_row {
  DEVICE uint32_t bytes(uint32_t latent, uint32_t rope) { return (latent + rope) * (uint32_t)sizeof(T); }
  DEVICE void load(const uint8_t* row, uint32_t latent, uint32_t rope, uint32_t c, float* to) {
    constexpr uint32_t PER_WORD = 16 / sizeof(T);
    UNROLL
    for (uint32_t i = 0; i < ROW_UNIT; i += PER_WORD) {
      if (c + i >= latent + rope) return;
      words16 word = *(const words16*)(row + (c + i) * sizeof(T));
      UNROLL
      for (uint32_t j = 0; j < PER_WORD; j++) {
        if (sizeof(T) == 4) to[i + j] = float_of(word.w[j]);
        else to[i + j] = float_of(j % 2 ? word.w[j / 2] & 0xffff0000u : word.w[j / 2] << 16);
      }
    }
  }
};

struct q8g64_row {
  DEVICE uint32_t bytes(uint32_t latent, uint32_t rope) { return q8_rope_offset(latent) + rope * 2; }
  DEVICE void load(const uint8_t* row, uint32_t latent, uint32_t rope, uint32_t c, float* to) {
    if (c < latent) {
      float scale = f16_to_f32(((const uint16_t*)(row + latent))[c / Q8_GROUP]);
      uint64_t values = *(const uint64_t*)(row + c);
      UNROLL
      for (uint32_t i = 0; i < ROW_UNIT; i++) to[i] = (float)(int8_t)(values >> (8 * i)) * scale;
      return;
    }
    const bf16* tail = (const bf16*)(row + q8_rope_offset(latent)) + (c - latent);
    uint32_t rest = latent + rope - c;
    UNROLL
    for (uint32_t i = 0; i < ROW_UNIT; i++) {
      if (i < rest) to[i] = bf16_to_f32(tail[i]);
    }
  }
};
