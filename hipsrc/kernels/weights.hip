// weights.hip - checkpoint tensors into the layouts that the forward pass reads.
//   dequant     y[r, c] = Y(f32(x[r, c]) * scale[r / 128, c / 128]); the last block of a side may be ragged; without a scale: a conversion
//   split_kv_b  kv_b [heads, nope + v, latent] -> wk [heads, latent, nope] (transposed), wv [heads, v, latent]; rows of a head are K then V
//   quantise    x or x * block scale -> codes and f16 scales of q8g64 or q4g64 (weight_format.h)
//   fill_random weights from a counter-based generator, for benchmarks on shapes whose checkpoint is not at hand
// Source of the layouts: the released FP8 checkpoints (128 x 128 blocks, e4m3) and DeepSeek-V2's absorbed MLA.
#include "weight_format.h"

struct e4m3 {
  uint8_t bits;
};
DEVICE float load_f32(const e4m3* p) { return e4m3_to_f32(p->bits); }

constexpr uint32_t DEQUANT_COLS = 2048;  // 256 work-items with 8 neighbouring columns each; 8 divides 128, so one scale serves all 8

template <class X, class Y> DEVICE void dequant_columns(const dequant_args& a) {
  uint32_t row = block_x();
  uint32_t first = block_y() * DEQUANT_COLS + thread_id() * 8;
  if (first >= a.cols) return;
  uint32_t count = a.cols - first < 8 ? a.cols - first : 8;
  uint32_t scale_cols = (a.cols + 127) / 128;
  float scale = a.scale ? ((const float*)a.scale)[(uint64_t)(row / 128) * scale_cols + first / 128] : 1.0f;
  const X* x = (const X*)a.x + (uint64_t)row * a.cols + first;
  Y* y = (Y*)a.y + (uint64_t)row * a.cols + first;
  for (uint32_t j = 0; j < count; j++) store_f32(y + j, load_f32(x + j) * scale);
}

// Grid: rows, ceil(cols / 2048).
#define DEQUANT(name, X, Y) KERNEL(name, dequant_args, 256) { dequant_columns<X, Y>(a); }
// LAUNCH dequant_f8_f32 block=256 cols=2048
DEQUANT(dequant_f8_f32, e4m3, float)
// LAUNCH dequant_f8_bf16 block=256 cols=2048
DEQUANT(dequant_f8_bf16, e4m3, bf16)
// LAUNCH dequant_bf16_f32 block=256 cols=2048
DEQUANT(dequant_bf16_f32, bf16, float)
// LAUNCH dequant_f32_bf16 block=256 cols=2048
DEQUANT(dequant_f32_bf16, float, bf16)
// LAUNCH dequant_bf16_bf16 block=256 cols=2048
DEQUANT(dequant_bf16_bf16, bf16, bf16)
// LAUNCH dequant_f32_f32 block=256 cols=2048
DEQUANT(dequant_f32_f32, float, float)

constexpr uint32_t SPLIT_TILE = 32;

// A 32 x 32 tile of one head goes through LDS so that both the reads and the transposed writes are contiguous.
template <class W> DEVICE void split_tile(const split_kv_b_args& a) {
  SHARED(W, tile, SPLIT_TILE * (SPLIT_TILE + 1));
  uint32_t head = block_z(), height = a.nope + a.v;
  uint32_t d0 = block_y() * SPLIT_TILE, l0 = block_x() * SPLIT_TILE;
  uint32_t lane = thread_id() % SPLIT_TILE, group = thread_id() / SPLIT_TILE;
  const W* source = (const W*)a.kv_b + (uint64_t)head * height * a.latent;
  for (uint32_t i = group; i < SPLIT_TILE; i += 8) {
    if (d0 + i < height && l0 + lane < a.latent) tile[i * (SPLIT_TILE + 1) + lane] = source[(uint64_t)(d0 + i) * a.latent + l0 + lane];
  }
  block_sync();
  W* wk = (W*)a.wk + (uint64_t)head * a.latent * a.nope;
  W* wv = (W*)a.wv + (uint64_t)head * a.v * a.latent;
  for (uint32_t i = group; i < SPLIT_TILE; i += 8) {
    uint32_t d = d0 + lane, l = l0 + i;  // transposed: lanes along d
    if (d < a.nope && l < a.latent) wk[(uint64_t)l * a.nope + d] = tile[lane * (SPLIT_TILE + 1) + i];
    d = d0 + i, l = l0 + lane;  // straight: lanes along the latent
    if (d >= a.nope && d < height && l < a.latent) wv[(uint64_t)(d - a.nope) * a.latent + l] = tile[i * (SPLIT_TILE + 1) + lane];
  }
}

// Grid: ceil(latent / 32), ceil((nope + v) / 32), heads.
// LAUNCH split_kv_b_f32 block=256 tile=32
KERNEL(split_kv_b_f32, split_kv_b_args, 256) { split_tile<float>(a); }
// LAUNCH split_kv_b_bf16 block=256 tile=32
KERNEL(split_kv_b_bf16, split_kv_b_args, 256) { split_tile<bf16>(a); }

// Quantising. A work-item takes a group of 64 columns into registers, so that the order of its sums is that of the columns on every target.
//   q8g64  scale = f16(amax / 127), one f16 step up where a value would round past 127 (among f16 subnormals alone), code = rint(x / scale)
//   q4g64  extreme = the first value of largest magnitude; of the scales f16(extreme * f / -8), f = 1 - i / 35 for i = 0..7, the one with the least sum of
//          squared errors, ties to the larger f; code = rint(x / scale) + 8 in 0..15. docs/decisions/0005-weight-formats.md has the reasons.
// Division rounds to nearest, rint ties to even. Scale 0: codes of zero.
constexpr uint32_t Q4_TRIES = 8;

DEVICE float element_of(const float*, const words16& word, uint32_t i) { return float_of(word.w[i]); }
DEVICE float element_of(const bf16*, const words16& word, uint32_t i) { return float_of(i % 2 ? word.w[i / 2] & 0xffff0000u : word.w[i / 2] << 16); }
DEVICE float element_of(const e4m3*, const words16& word, uint32_t i) { return e4m3_to_f32((uint8_t)(word.w[i / 4] >> (8 * (i % 4)))); }

// The 64 values of a group, and the bits of its largest magnitude, which order as the values do with NaN above infinity; *extreme: the first
// value of that magnitude.
template <class X> DEVICE uint32_t load_group(const X* x, float scale, float* v, float* extreme) {
  constexpr uint32_t PER_WORD = 16 / sizeof(X);
  UNROLL
  for (uint32_t i = 0; i < WEIGHT_GROUP / PER_WORD; i++) {
    words16 word = ((const words16*)x)[i];
    UNROLL
    for (uint32_t j = 0; j < PER_WORD; j++) v[i * PER_WORD + j] = element_of(x, word, j) * scale;
  }
  uint32_t top = 0;
  *extreme = 0;
  UNROLL
  for (uint32_t i = 0; i < WEIGHT_GROUP; i++) {
    uint32_t magnitude = bits_of(v[i]) & 0x7fffffffu;
    if (magnitude > top) {
      top = magnitude;
      *extreme = v[i];
    }
  }
  return top;
}

DEVICE float code_of(float x, float scale, float low, float high) { return min_f32(max_f32(rint_f32(x / scale), low), high); }

struct q8g64_writer {
  static constexpr uint32_t BYTES = 64;
  // f16 bits of the group's scale; 0x7c00 if there is none.
  DEVICE uint16_t scale_of(const float*, uint32_t top, float) {
    float amax = float_of(top);
    uint16_t bits = f32_to_f16(amax / 127.0f);
    if (top && bits < 0x7c00u && amax >= 127.5f * f16_to_f32(bits)) bits++;
    return bits;
  }
  DEVICE void store(const float* v, float scale, uint8_t* codes) {
    UNROLL
    for (uint32_t i = 0; i < BYTES / 4; i++) {
      uint32_t word = 0;
      UNROLL
      for (uint32_t j = 0; j < 4; j++) {
        float q = scale == 0.0f ? 0.0f : code_of(v[4 * i + j], scale, -127.0f, 127.0f);
        word |= ((uint32_t)(int32_t)q & 0xffu) << (8 * j);
      }
      ((uint32_t*)codes)[i] = word;
    }
  }
};

struct q4g64_writer {
  static constexpr uint32_t BYTES = 32;
  DEVICE uint16_t scale_of(const float* v, uint32_t, float extreme) {
    uint16_t best = f32_to_f16(extreme * -0.125f);
    if ((best & 0x7c00u) == 0x7c00u) return 0x7c00u;
    float least = 3.402823466e38f;
    for (uint32_t i = 0; i < Q4_TRIES; i++) {
      uint16_t bits = f32_to_f16(extreme * ((float)(35 - i) / -280.0f));
      float scale = f16_to_f32(bits);
      if (scale == 0.0f) break;  // and so are all smaller ones
      float error = 0.0f;
      UNROLL
      for (uint32_t j = 0; j < WEIGHT_GROUP; j++) {
        float off = fma_f32(code_of(v[j], scale, -8.0f, 7.0f), scale, -v[j]);
        error = fma_f32(off, off, error);
      }
      if (error < least) {
        least = error;
        best = bits;
      }
    }
    return best & 0x7fffu ? best : 0;
  }
  DEVICE void store(const float* v, float scale, uint8_t* codes) {
    UNROLL
    for (uint32_t i = 0; i < BYTES / 4; i++) {
      uint32_t word = 0;
      UNROLL
      for (uint32_t j = 0; j < 8; j++) {
        float q = scale == 0.0f ? 0.0f : code_of(v[8 * i + j], scale, -8.0f, 7.0f);
        word |= (uint32_t)((int32_t)q + 8) << (4 * j);
      }
      ((uint32_t*)codes)[i] = word;
    }
  }
};

// Grid: ceil(groups / 256). What cannot be stored leaves zeros.
template <class X, class F> DEVICE void quantise_group(const quantise_args& a) {
  uint32_t group = block_x() * 256 + thread_id();
  if (group >= a.groups) return;
  uint32_t row = group / a.row_groups, column = group % a.row_groups * WEIGHT_GROUP;
  float block_scale = 1.0f;
  if (a.block_scale) block_scale = ((const float*)a.block_scale)[(uint64_t)(row / 128) * ((a.row_groups + 1) / 2) + column / 128];
  float v[WEIGHT_GROUP], extreme;
  uint32_t top = load_group((const X*)a.x + (uint64_t)group * WEIGHT_GROUP, block_scale, v, &extreme);
  uint16_t bits = top < 0x7f800000u ? F::scale_of(v, top, extreme) : (uint16_t)0x7c00u;
  if (bits == 0x7c00u) {
    global_max((uint32_t*)a.error, 1 + row);
    bits = 0;
  }
  ((uint16_t*)a.scales)[group] = bits;
  F::store(v, f16_to_f32(bits), (uint8_t*)a.codes + (uint64_t)group * F::BYTES);
}

#define QUANTISE(name, X, F) KERNEL(name, quantise_args, 256) { quantise_group<X, F>(a); }
// LAUNCH quantise_f8_q8g64 block=256
QUANTISE(quantise_f8_q8g64, e4m3, q8g64_writer)
// LAUNCH quantise_bf16_q8g64 block=256
QUANTISE(quantise_bf16_q8g64, bf16, q8g64_writer)
// LAUNCH quantise_f32_q8g64 block=256
QUANTISE(quantise_f32_q8g64, float, q8g64_writer)
// LAUNCH quantise_f8_q4g64 block=256
QUANTISE(quantise_f8_q4g64, e4m3, q4g64_writer)
// LAUNCH quantise_bf16_q4g64 block=256
QUANTISE(quantise_bf16_q4g64, bf16, q4g64_writer)
// LAUNCH quantise_f32_q4g64 block=256
QUANTISE(quantise_f32_q4g64, float, q4g64_writer)

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014) over a counter.
DEVICE uint64_t counter_hash(uint64_t seed, uint64_t counter) {
  uint64_t z = seed + (counter + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

DEVICE words16 random_word(uint64_t seed, uint64_t i) {
  uint64_t low = counter_hash(seed, 2 * i), high = counter_hash(seed, 2 * i + 1);
  words16 word = {{(uint32_t)low, (uint32_t)(low >> 32), (uint32_t)high, (uint32_t)(high >> 32)}};
  return word;
}

// Grid: ceil(16-byte words / 256). The last word of an array may be cut short.
template <class W> DEVICE void fill_plain(const fill_random_args& a) {
  using E = typename W::element;
  uint64_t i = (uint64_t)block_x() * 256 + thread_id(), first = i * W::CHUNK;
  if (first >= a.count) return;
  words16 word = random_word(a.seed, i);
  UNROLL
  for (uint32_t j = 0; j < W::CHUNK; j++) {
    int32_t number = sizeof(E) == 4 ? (int32_t)word.w[j % 4] >> 8 : (int32_t)(int16_t)(word.w[j / 2 % 4] >> (16 * (j % 2)));
    if (first + j < a.count) store_f32((E*)a.codes + first + j, fma_f32((float)number, a.step, a.mean));
  }
}

template <class W> DEVICE void fill_quantised(const fill_random_args& a) {
  uint64_t i = (uint64_t)block_x() * 256 + thread_id(), first = i * W::CHUNK;
  if (first >= a.count) return;
  words16 word = random_word(a.seed, i);
  if (W::FORMAT == WEIGHT_Q8G64) {
    UNROLL
    for (uint32_t j = 0; j < 16; j++) {  // -128, which quantising never gives, becomes -127
      if (((word.w[j / 4] >> (8 * (j % 4))) & 0xffu) == 0x80u) word.w[j / 4] |= 1u << (8 * (j % 4));
    }
  }
  ((words16*)a.codes)[i] = word;
  if (first % WEIGHT_GROUP) return;
  uint32_t sign = W::FORMAT == WEIGHT_Q4G64 ? (uint32_t)(counter_hash(~a.seed, first / WEIGHT_GROUP) >> 63) << 15 : 0;  // codes of 4 bits have a mean
  ((uint16_t*)a.scales)[first / WEIGHT_GROUP] = (uint16_t)(a.scale | sign);
}

// LAUNCH fill_random_f32 block=256
KERNEL(fill_random_f32, fill_random_args, 256) { fill_plain<f32_weights>(a); }
// LAUNCH fill_random_bf16 block=256
KERNEL(fill_random_bf16, fill_random_args, 256) { fill_plain<bf16_weights>(a); }
// LAUNCH fill_random_q8g64 block=256
KERNEL(fill_random_q8g64, fill_random_args, 256) { fill_quantised<q8g64_weights>(a); }
// LAUNCH fill_random_q4g64 block=256
KERNEL(fill_random_q4g64, fill_random_args, 256) { fill_quantised<q4g64_weights>(a); }
