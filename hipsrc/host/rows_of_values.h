// rows_of_values.h - norms, RoPE, SiLU, embedding and expert sums of the fast host build: row by row, in the orders of basic.hip and experts.hip.
#pragma once

namespace {
namespace host {
namespace values {

constexpr uint32_t THREADS = 256;

// block_sum<256> of one value a work-item: halving distance inside a wave, waves ascending. Overwrites v.
DEVICE float block_total(float v[THREADS]) {
  for (uint32_t w = 0; w < THREADS; w += WAVE) {
    for (uint32_t m = WAVE / 2; m; m >>= 1) {
      for (uint32_t i = 0; i < m; i++) v[w + i] += v[w + i + m];
    }
  }
  float total = v[0];
  for (uint32_t w = WAVE; w < THREADS; w += WAVE) total += v[w];
  return total;
}

// Calls body(lane, first column, columns) for each turn of the block over `width`: lane i takes column first + i.
template <class Body> DEVICE void turns(uint32_t width, const Body& body) {
  for (uint32_t first = 0; first < width; first += THREADS) body(first, width - first < THREADS ? width - first : THREADS);
}

// 1 / sqrt(mean(x^2) + eps).
template <class T> DEVICE float rms_scale(const T* x, uint32_t width, float eps) {
  alignas(32) float sums[THREADS] = {};
  turns(width, [&](uint32_t first, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
      float v = load_f32(x + first + i);
      sums[i] = fma_f32(v, v, sums[i]);
    }
  });
  float mean = block_total(sums) / (float)width;
  return rsqrt_exact(mean + eps);
}
// y = T(weight * T(x * scale)); y may be x.
template <class T, class Y> DEVICE void scale_row(const T* x, const T* weight, float scale, uint32_t width, Y* y) {
  uint32_t c = 0;
  for (; c + LANES <= width; c += LANES) {
    lanes8 v = load8(weight + c) * rounded8<T>(load8(x + c) * all_lanes(scale));
    round8(y + c, sizeof(T) == sizeof(Y) ? v : rounded8<T>(v));
  }
  for (; c < width; c++) store_f32(y + c, rounded<T>::of(load_f32(weight + c) * rounded<T>::of(load_f32(x + c) * scale)));
}
template <class T> DEVICE void rms_norm_row(const T* x, const T* weight, uint32_t width, float eps, T* y) {
  scale_row(x, weight, rms_scale(x, width, eps), width, y);
}

template <class T> bool rms_norm(const norm_args& a, Blocks& b) {
  for (uint64_t r = b.first; r < b.last; r++) {
    rms_norm_row((const T*)a.x + r * a.x_stride, (const T*)a.weight, a.width, a.eps, (T*)a.y + r * a.y_stride);
  }
  return true;
}

template <class T> DEVICE void layer_norm_row(const T* x, const T* weight, const T* bias, uint32_t width, float eps, T* y) {
  alignas(32) float sums[THREADS] = {};
  turns(width, [&](uint32_t first, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) sums[i] += load_f32(x + first + i);
  });
  float mean = block_total(sums) / (float)width;
  memset(sums, 0, sizeof sums);
  turns(width, [&](uint32_t first, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
      float v = load_f32(x + first + i) - mean;
      sums[i] = fma_f32(v, v, sums[i]);
    }
  });
  float scale = rsqrt_exact(block_total(sums) / (float)width + eps);
  uint32_t c = 0;
  for (; c + LANES <= width; c += LANES) {
    lanes8 v = (load8(x + c) - all_lanes(mean)) * all_lanes(scale);
    round8(y + c, fma8(v, load8(weight + c), load8(bias + c)));
  }
  for (; c < width; c++) {
    float v = (load_f32(x + c) - mean) * scale;
    store_f32(y + c, fma_f32(v, load_f32(weight + c), load_f32(bias + c)));
  }
}

template <class T> bool layer_norm(const norm_args& a, Blocks& b) {
  for (uint64_t r = b.first; r < b.last; r++) {
    layer_norm_row((const T*)a.x + r * a.x_stride, (const T*)a.weight, (const T*)a.bias, a.width, a.eps, (T*)a.y + r * a.y_stride);
  }
  return true;
}

// Sines and cosines of a row once, then its heads.
template <class T> bool rope(const rope_args& a, Blocks& b) {
  constexpr uint32_t PAIRS = 64;
  uint32_t pairs = a.dim / 2;
  for (uint64_t r = b.first; r < b.last; r++) {
    T* x = (T*)a.x + r * a.row_stride + a.offset;
    float position = (float)((const int32_t*)a.positions)[r];
    for (uint32_t first = 0; first < pairs; first += PAIRS) {
      uint32_t count = pairs - first < PAIRS ? pairs - first : PAIRS;
      alignas(32) float sine[PAIRS], cosine[PAIRS];
      for (uint32_t i = 0; i < count; i++) {
        sincos_f32(position * ((const float*)a.inv_freq)[first + i], &sine[i], &cosine[i]);
        sine[i] = rounded<T>::of(sine[i]);
        cosine[i] = rounded<T>::of(cosine[i]);
      }
      for (uint32_t head = 0; head < a.heads; head++) {
        T* p = x + (uint64_t)head * a.head_stride + first * 2;
        for (uint32_t i = 0; i < count; i++) {
          float even = load_f32(p + 2 * i), odd = load_f32(p + 2 * i + 1);
          store_f32(p + 2 * i, fma_f32(even, cosine[i], -(odd * sine[i])));
          store_f32(p + 2 * i + 1, fma_f32(odd, cosine[i], even * sine[i]));
        }
      }
    }
  }
  return true;
}

template <class T> bool silu_mul(const silu_mul_args& a, Blocks& b) {
  uint64_t i = b.first * 1024, end = b.last * 1024 < a.count ? b.last * 1024 : a.count;
  for (; i < end; i++) {
    uint32_t row = (uint32_t)i / a.width;
    const T* gate = (const T*)a.x + i + (uint64_t)row * a.width;
    store_f32((T*)a.y + i, rounded<T>::of(silu_f32(load_f32(gate))) * load_f32(gate + a.width));
  }
  return true;
}

// Grid: rows, column blocks of 1024.
template <class T, class W> bool embed(const embed_args& a, Blocks& b) {
  for (uint64_t block = b.first; block < b.last; block++) {
    uint64_t r = block % b.grid.x;
    uint32_t first = (uint32_t)(block / b.grid.x) * 1024, end = a.hidden < first + 1024 ? a.hidden : first + 1024;
    uint32_t token = (uint32_t)((const int32_t*)a.tokens)[r];
    const W* row = (const W*)a.table + (uint64_t)(token < a.vocab ? token : 0) * a.hidden;
    T* y = (T*)a.y + r * a.hidden;
    for (uint32_t c = first; c < end; c++) store_f32(y + c, token < a.vocab ? load_f32(row + c) : float_of(0x7fc00000u));
  }
  return true;
}

// Grid: column blocks of 256, rows.
template <class T> bool expert_sum(const expert_sum_args& a, Blocks& b) {
  for (uint64_t block = b.first; block < b.last; block++) {
    uint64_t row = block / b.grid.x;
    uint32_t first = (uint32_t)(block % b.grid.x) * experts::THREADS, end = a.width - first < experts::THREADS ? a.width : first + experts::THREADS;
    alignas(32) float sums[experts::THREADS] = {};
    for (uint32_t slot = 0; slot < a.k; slot++) {
      uint64_t pair = row * a.k + slot;
      float weight = ((const float*)a.weights)[pair];
      const T* out = (const T*)a.expert_out + pair * a.width + first;
      for (uint32_t i = 0; i < end - first; i++) sums[i] = fma_f32(weight, load_f32(out + i), sums[i]);
    }
    for (uint32_t c = first; c < end; c++) {
      uint64_t at = row * a.width + c;
      ((float*)a.sum)[at] = sums[c - first] + ((const float*)a.sum)[at];
    }
  }
  return true;
}

// Grid: blocks of 1024 values.
template <class T> bool join_halves(const join_halves_args& a, Blocks& b) {
  const float *low = (const float*)a.low, *high = (const float*)a.high;
  for (uint64_t i = b.first * 1024, end = b.last * 1024 < a.count ? b.last * 1024 : a.count; i < end; i++) {
    store_f32((T*)a.y + i, load_f32((const T*)a.residual + i) + (low[i] + high[i]));
  }
  return true;
}

// Grid: (blocks of 256 words, rows).
DEVICE bool join_parts(const join_parts_args& a, Blocks& b) {
  uint64_t columns = b.grid.x, words = a.low_words + a.high_words;
  for (uint64_t block = b.first; block < b.last; block++) {
    uint64_t r = block / columns, first = block % columns * 256, end = first + 256 < words ? first + 256 : words;
    const uint32_t *low = (const uint32_t*)a.low + r * a.low_words, *high = (const uint32_t*)a.high + r * a.high_words;
    for (uint64_t i = first; i < end; i++) ((uint32_t*)a.whole)[r * words + i] = i < a.low_words ? low[i] : high[i - a.low_words];
  }
  return true;
}

}  // namespace values

FAST_KERNEL(rms_norm_f32, norm_args, values::rms_norm<float>);
FAST_KERNEL(rms_norm_bf16, norm_args, values::rms_norm<bf16>);
FAST_KERNEL(layer_norm_f32, norm_args, values::layer_norm<float>);
FAST_KERNEL(layer_norm_bf16, norm_args, values::layer_norm<bf16>);
FAST_KERNEL(rope_f32, rope_args, values::rope<float>);
FAST_KERNEL(rope_bf16, rope_args, values::rope<bf16>);
FAST_KERNEL(silu_mul_f32, silu_mul_args, values::silu_mul<float>);
FAST_KERNEL(silu_mul_bf16, silu_mul_args, values::silu_mul<bf16>);
FAST_KERNEL(embed_f32_f32, embed_args, values::embed<float, float>);
FAST_KERNEL(embed_f32_bf16, embed_args, values::embed<float, bf16>);
FAST_KERNEL(embed_bf16_bf16, embed_args, values::embed<bf16, bf16>);
FAST_KERNEL(expert_sum_f32, expert_sum_args, values::expert_sum<float>);
FAST_KERNEL(expert_sum_bf16, expert_sum_args, values::expert_sum<bf16>);
FAST_KERNEL(join_halves_f32, join_halves_args, values::join_halves<float>);
FAST_KERNEL(join_halves_bf16, join_halves_args, values::join_halves<bf16>);
FAST_KERNEL(join_parts, join_parts_args, values::join_parts);

}  // namespace host
}  // namespace
