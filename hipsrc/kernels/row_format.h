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
