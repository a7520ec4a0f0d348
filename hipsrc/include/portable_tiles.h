// portable_tiles.h - matrix tiles: D[16 x 16] f32 += A[16 x 16] * B[16 x 16], by groups of 32 work-items that run together (work-items 32g to
// 32g + 31 of a block, also where a wave has 64). T is bf16 or float. All 32 call each function together; nothing is exchanged outside it.
//
//   tile16<T> d;  tile_clear(d);  tile_add(d, a, b)  d.v[i], i < TILE_ELEMENTS: this work-item's elements; d.row(i), d.col(i): which they are
//   tile_a<T> a = tile_a<T>::load(p, stride)         element (row, k) of A at p[row * stride + k]
//                 tile_a<T>::runs([&](uint32_t row, uint32_t half) { return p; })   p: the 8 elements k = 8 * half.. of a row, or null: zeros
//                 tile_a<T>::make([&](uint32_t row, uint32_t k) { return f; })      f: a float, rounded to T
//   tile_b<T> b = tile_b<T>::load(p, stride)         element (k, col) of B at p[col * stride + k]
//                 tile_b<T>::transposed(p, stride)   element (k, col) of B at p[k * stride + col]; p in workgroup memory
//   bf16 on matrix tiles alone:
//   tile_pair(a, [&](uint32_t row) { return p; }), tile_pair(b, p, stride)   two tiles each, of 32 consecutive k at p; which k is in which tile is the
//                                                    pair's own: 16 bytes of memory at a time
//   tile_column_sum(d, &column)                      sum of a column's 16 rows in a fixed order; column >= 16: none for this work-item
//
// p is 16-byte aligned and stride a multiple of 16 bytes; A and, apart from `transposed`, B may lie in workgroup or global memory. For bf16 in
// workgroup memory a stride of 16 bytes more than a multiple of 128 meets no bank twice. B must be finite, also beside zeros of A. A tile_b may
// be no more than an address: the memory must not change before its last tile_add. tile_a<T>::WORDS: registers that a fragment takes.
//
// bf16: WMMA on gfx11 and gfx12, mma.sync on sm_90, whose sums over the 16 k are the hardware's. Elsewhere, and for float everywhere: a chain of fma
// in ascending k. An element of D depends on its row of A and its column of B alone.
#pragma once

constexpr uint32_t TILE = 16, TILE_LANES = 32, TILE_ELEMENTS = TILE * TILE / TILE_LANES;

DEVICE uint32_t tile_lane() { return thread_id() % TILE_LANES; }
DEVICE uint32_t tile_group() { return thread_id() / TILE_LANES; }

// Eight elements from 16-byte words: one wide load or two, whose offsets fit the instruction.
DEVICE void load8(const float* p, float* v) {
  const words16* from = (const words16*)p;
  UNROLL
  for (uint32_t i = 0; i < 2; i++) {
    words16 word = from[i];
    UNROLL
    for (uint32_t j = 0; j < 4; j++) v[4 * i + j] = float_of(word.w[j]);
  }
}
DEVICE void load8(const bf16* p, float* v) {
  words16 word = *(const words16*)p;
  UNROLL
  for (uint32_t i = 0; i < 8; i++) v[i] = float_of(i % 2 ? word.w[i / 2] & 0xffff0000u : word.w[i / 2] << 16);
}

// The scalar form: work-item l has row l / 2 of A and D, and columns 8 * (l % 2).. of D.
template <class T> struct tile_a {
  static constexpr uint32_t WORDS = TILE + 1;
  float v[TILE];
  bool live;  // not a row of zeros from `runs`: those cost nothing

  template <class F> DEVICE tile_a runs(const F& run) {
    tile_a a;
    a.live = false;
    UNROLL
    for (uint32_t half = 0; half < 2; half++) {
      const T* p = run(tile_lane() / 2, half);
      a.live = a.live || p;
      UNROLL
      for (uint32_t k = 0; k < 8; k++) a.v[8 * half + k] = 0.0f;
      if (p) load8(p, a.v + 8 * half);
    }
    return a;
  }
  DEVICE tile_a load(const T* p, uint32_t stride) {
    return runs([&](uint32_t row, uint32_t half) { return p + row * stride + 8 * half; });
  }
  template <class F> DEVICE tile_a make(const F& value) {
    tile_a a;
    a.live = true;
    UNROLL
    for (uint32_t k = 0; k < TILE; k++) a.v[k] = rounded<T>::of(value(tile_lane() / 2, k));
    return a;
  }
};

template <class T> struct tile_b {
  const T* at;  // k 0 of this work-item's first column
  uint32_t stride;
  bool k_apart;  // by stride, the columns side by side; else the reverse

  DEVICE tile_b load(const T* p, uint32_t stride) { return {p + tile_lane() % 2 * 8 * stride, stride, false}; }
  DEVICE tile_b transposed(const T* p, uint32_t stride) { return {p + tile_lane() % 2 * 8, stride, true}; }
};

template <class T> struct tile16 {
  float v[TILE_ELEMENTS];

  DEVICE uint32_t row(uint32_t) { return tile_lane() / 2; }
  DEVICE uint32_t col(uint32_t i) { return tile_lane() % 2 * 8 + i; }
};

template <class T> DEVICE void tile_clear(tile16<T>& d) {
  UNROLL
  for (uint32_t i = 0; i < TILE_ELEMENTS; i++) d.v[i] = 0.0f;
}

template <class T> DEVICE void tile_add(tile16<T>& d, const tile_a<T>& a, const tile_b<T>& b) {
  if (!a.live) return;
  UNROLL
  for (uint32_t piece = 0; piece < TILE; piece++) {
    float b8[8];
    if (b.k_apart) {
      load8(b.at + piece * b.stride, b8);
      UNROLL
      for (uint32_t i = 0; i < 8; i++) d.v[i] = fma_f32(a.v[piece], b8[i], d.v[i]);
    } else {
      uint32_t i = piece / 2, first = piece % 2 * 8;
      load8(b.at + i * b.stride + first, b8);
      UNROLL
      for (uint32_t k = 0; k < 8; k++) d.v[i] = fma_f32(a.v[first + k], b8[k], d.v[i]);
    }
    if (piece % 4 == 3) asm volatile("" ::: "memory");  // else the compiler puts all loads first and runs out of registers
  }
}

#if defined(TILE_MMA)  // m16n8k16: work-item l = 4g + t has, of A and of each half of B and D, rows or columns g (A, D: and g + 8), pairs at 2t
template <> struct tile_a<bf16> {
  static constexpr uint32_t WORDS = 4;
  uint32_t v[4];  // (row g, k 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8)

  template <class F> DEVICE tile_a runs(const F& run) {
    tile_a a;
    UNROLL
    for (uint32_t i = 0; i < 4; i++) {
      const bf16* p = run(tile_lane() / 4 + i % 2 * 8, i / 2);
      a.v[i] = p ? *(const uint32_t*)(p + tile_lane() % 4 * 2) : 0u;
    }
    return a;
  }
  DEVICE tile_a load(const bf16* p, uint32_t stride) {
    return runs([&](uint32_t row, uint32_t half) { return p + row * stride + 8 * half; });
  }
  template <class F> DEVICE tile_a make(const F& value) {
    tile_a a;
    UNROLL
    for (uint32_t i = 0; i < 4; i++) {
      uint32_t row = tile_lane() / 4 + i % 2 * 8, k = tile_lane() % 4 * 2 + i / 2 * 8;
      a.v[i] = pack_bf16(value(row, k), value(row, k + 1));
    }
    return a;
  }
};

template <> struct tile_b<bf16> {
  uint32_t v[4];  // columns 0 to 7: k 2t, 2t + 8; columns 8 to 15 likewise

  DEVICE tile_b load(const bf16* p, uint32_t stride) {
    tile_b b;
    UNROLL
    for (uint32_t i = 0; i < 4; i++) b.v[i] = *(const uint32_t*)(p + (tile_lane() / 4 + i / 2 * 8) * stride + tile_lane() % 4 * 2 + i % 2 * 8);
    return b;
  }
  DEVICE tile_b transposed(const bf16* p, uint32_t stride) {
    tile_b b;
    load_matrices_transposed(b.v, p + tile_lane() % 16 * stride + tile_lane() / 16 * 8);
    return b;
  }
};

template <> struct tile16<bf16> {
  float v[TILE_ELEMENTS];

  DEVICE uint32_t row(uint32_t i) { return tile_lane() / 4 + i / 2 % 2 * 8; }
  DEVICE uint32_t col(uint32_t i) { return i / 4 * 8 + tile_lane() % 4 * 2 + i % 2; }
};

DEVICE void tile_add(tile16<bf16>& d, const tile_a<bf16>& a, const tile_b<bf16>& b) {
  mma_16x8x16(d.v, a.v, b.v);
  mma_16x8x16(d.v + 4, a.v, b.v + 2);
}

// Work-item 4g + t has elements 8t to 8t + 7 of its rows and columns: four for each of the two tiles.
template <class F> DEVICE void tile_pair(tile_a<bf16>* a, const F& run) {
  UNROLL
  for (uint32_t i = 0; i < 2; i++) {
    const bf16* p = run(tile_lane() / 4 + i * 8);
    words16 word = {{0, 0, 0, 0}};
    if (p) word = *(const words16*)(p + tile_lane() % 4 * 8);
    UNROLL
    for (uint32_t j = 0; j < 4; j++) a[j / 2].v[j % 2 * 2 + i] = word.w[j];
  }
}
DEVICE void tile_pair(tile_b<bf16>* b, const bf16* p, uint32_t stride) {
  UNROLL
  for (uint32_t i = 0; i < 2; i++) {
    words16 word = *(const words16*)(p + (tile_lane() / 4 + i * 8) * stride + tile_lane() % 4 * 8);
    UNROLL
    for (uint32_t j = 0; j < 4; j++) b[j / 2].v[i * 2 + j % 2] = word.w[j];
  }
}

DEVICE float tile_column_sum(const tile16<bf16>& d, uint32_t* column) {
  uint32_t l = tile_lane(), high = l & 16u, odd = l & 8u;
  float a = d.v[0] + d.v[2], b = d.v[1] + d.v[3], c = d.v[4] + d.v[6], e = d.v[5] + d.v[7];  // columns 2t, 2t + 1, 2t + 8, 2t + 9
  float even = (high ? c : a) + shuffle_xor(high ? a : c, 16), next = (high ? e : b) + shuffle_xor(high ? b : e, 16);
  float sum = (odd ? next : even) + shuffle_xor(odd ? even : next, 8);
  sum += shuffle_xor(sum, 4);
  *column = l & 4u ? TILE : high / 2u + l % 4u * 2u + odd / 8u;
  return sum;
}
#elif defined(TILE_WMMA)
// TILE_WMMA 1: work-items l and l + 16 have row l of A and column l of B, all 16 k; of D column l, rows l / 16, l / 16 + 2, ..
// TILE_WMMA 2: l and l + 16 share the k, eight each; of D they have column l, rows 0 to 7 and 8 to 15.
constexpr uint32_t TILE_HALVES = TILE_WMMA == 1 ? 2 : 1;  // of 8 k, a fragment
DEVICE uint32_t tile_half(uint32_t i) { return TILE_WMMA == 1 ? i : tile_lane() / 16; }

template <> struct tile_a<bf16> {
  static constexpr uint32_t WORDS = 4 * TILE_HALVES;
  tile_words v;

  template <class F> DEVICE tile_a runs(const F& run) {
    tile_a a;
    UNROLL
    for (uint32_t i = 0; i < TILE_HALVES; i++) {
      const bf16* p = run(tile_lane() % 16, tile_half(i));
      words16 word = {{0, 0, 0, 0}};
      if (p) word = *(const words16*)p;
      UNROLL
      for (uint32_t j = 0; j < 4; j++) a.v[4 * i + j] = word.w[j];
    }
    return a;
  }
  DEVICE tile_a load(const bf16* p, uint32_t stride) {
    return runs([&](uint32_t row, uint32_t half) { return p + row * stride + 8 * half; });
  }
  template <class F> DEVICE tile_a make(const F& value) {
    tile_a a;
    UNROLL
    for (uint32_t i = 0; i < WORDS; i++) {
      uint32_t row = tile_lane() % 16, k = 8 * tile_half(i / 4) + 2 * (i % 4);
      a.v[i] = (uint32_t)f32_to_bf16(value(row, k)).bits | (uint32_t)f32_to_bf16(value(row, k + 1)).bits << 16;
    }
    return a;
  }
};

template <> struct tile_b<bf16> {
  tile_words v;

  DEVICE tile_b load(const bf16* p, uint32_t stride) { return {tile_a<bf16>::load(p, stride).v}; }
  DEVICE tile_b transposed(const bf16* p, uint32_t stride) {
    tile_b b;
    UNROLL
    for (uint32_t i = 0; i < tile_a<bf16>::WORDS; i++) {
      const bf16* pair = p + (8 * tile_half(i / 4) + 2 * (i % 4)) * stride + tile_lane() % 16;
      b.v[i] = (uint32_t)pair[0].bits | (uint32_t)pair[stride].bits << 16;
    }
    return b;
  }
};

template <> struct tile16<bf16> {
  float v[TILE_ELEMENTS];

  DEVICE uint32_t row(uint32_t i) { return TILE_WMMA == 1 ? 2 * i + tile_lane() / 16 : tile_lane() / 16 * 8 + i; }
  DEVICE uint32_t col(uint32_t) { return tile_lane() % 16; }
};

DEVICE void tile_add(tile16<bf16>& d, const tile_a<bf16>& a, const tile_b<bf16>& b) { wmma_16x16x16(d.v, a.v, b.v); }

template <class F> DEVICE void tile_pair(tile_a<bf16>* a, const F& run) {
  UNROLL
  for (uint32_t i = 0; i < 2; i++) {
    a[i] = tile_a<bf16>::runs([&](uint32_t row, uint32_t half) {
      const bf16* p = run(row);
      return p ? p + i * TILE + half * 8 : p;
    });
  }
}
DEVICE void tile_pair(tile_b<bf16>* b, const bf16* p, uint32_t stride) {
  UNROLL
  for (uint32_t i = 0; i < 2; i++) b[i] = tile_b<bf16>::load(p + i * TILE, stride);
}

DEVICE float tile_column_sum(const tile16<bf16>& d, uint32_t* column) {
  float sum = d.v[0];
  UNROLL
  for (uint32_t i = 1; i < TILE_ELEMENTS; i++) sum += d.v[i];
  *column = tile_lane();
  return sum + shuffle_xor(sum, 16);
}
#endif
