// basic.hip - embeddings, norms, rotary embedding, gated activation. T: activations (f32 or bf16), W: weights; arithmetic in f32, rounded to T
// at the places where transformers rounds.
//   embed       y[r] = table[token[r]]
//   rms_norm    y = T(w * T(x / sqrt(mean(x^2) + eps)))
//   layer_norm  y = T((x - mean) / sqrt(var + eps) * w + bias), var of the centred values
//   rope        (a, b) = (x[2i], x[2i + 1]) -> (a cos - b sin, b cos + a sin), angle = f32(position) * inv_freq[i], cos and sin rounded to T
//   silu_mul    y = T(T(gate / (1 + exp(-gate))) * up)
// Limits: rows < 2^31; rows * width < 2^32 for silu_mul. Any width; nothing needs alignment beyond the element.

// Grid: rows, ceil(hidden / 1024). A token outside [0, vocab) gives a row of NaN: it shows at once, and no foreign memory is read.
template <class T, class W> DEVICE void embed_row(const embed_args& a) {
  uint32_t r = block_x();
  uint32_t token = (uint32_t)((const int32_t*)a.tokens)[r];
  const W* row = (const W*)a.table + (uint64_t)(token < a.vocab ? token : 0) * a.hidden;
  T* y = (T*)a.y + (uint64_t)r * a.hidden;
  UNROLL
  for (uint32_t j = 0; j < 4; j++) {
    uint32_t c = block_y() * 1024 + j * 256 + thread_id();
    if (c < a.hidden) store_f32(y + c, token < a.vocab ? load_f32(row + c) : float_of(0x7fc00000u));
  }
}
// LAUNCH embed_f32_f32 block=256 cols=1024
KERNEL(embed_f32_f32, embed_args, 256) { embed_row<float, float>(a); }
// LAUNCH embed_f32_bf16 block=256 cols=1024
KERNEL(embed_f32_bf16, embed_args, 256) { embed_row<float, bf16>(a); }
// LAUNCH embed_bf16_bf16 block=256 cols=1024
KERNEL(embed_bf16_bf16, embed_args, 256) { embed_row<bf16, bf16>(a); }

// One row by a block of 256 work-items; `sums` holds 256 / WAVE values of LDS. y may be x.
template <class T> DEVICE void rms_norm_values(const T* x, const T* weight, T* y, uint32_t width, float eps, float* sums) {
  float sum = 0;
  for (uint32_t c = thread_id(); c < width; c += 256) {
    float v = load_f32(x + c);
    sum = fma_f32(v, v, sum);
  }
  float mean = block_sum<256>(sum, sums) / (float)width;
  float scale = rsqrt_exact(mean + eps);
  for (uint32_t c = thread_id(); c < width; c += 256) store_f32(y + c, load_f32(weight + c) * rounded<T>::of(load_f32(x + c) * scale));
}

// Grid: rows.
template <class T> DEVICE void rms_norm_row(const norm_args& a) {
  SHARED(float, sums, 256 / WAVE);
  const T* x = (const T*)a.x + (uint64_t)block_x() * a.x_stride;
  rms_norm_values(x, (const T*)a.weight, (T*)a.y + (uint64_t)block_x() * a.y_stride, a.width, a.eps, sums);
}
// LAUNCH rms_norm_f32 block=256
KERNEL(rms_norm_f32, norm_args, 256) { rms_norm_row<float>(a); }
// LAUNCH rms_norm_bf16 block=256
KERNEL(rms_norm_bf16, norm_args, 256) { rms_norm_row<bf16>(a); }

// As rms_norm_values.
template <class T> DEVICE void layer_norm_values(const T* x, const T* weight, const T* bias, T* y, uint32_t width, float eps, float* sums) {
  float sum = 0;
  for (uint32_t c = thread_id(); c < width; c += 256) sum += load_f32(x + c);
  float mean = block_sum<256>(sum, sums) / (float)width;
  float squares = 0;
  for (uint32_t c = thread_id(); c < width; c += 256) {
    float v = load_f32(x + c) - mean;
    squares = fma_f32(v, v, squares);
  }
  float scale = rsqrt_exact(block_sum<256>(squares, sums) / (float)width + eps);
  for (uint32_t c = thread_id(); c < width; c += 256) {
    float v = (load_f32(x + c) - mean) * scale;
    store_f32(y + c, fma_f32(v, load_f32(weight + c), load_f32(bias + c)));
  }
}

// Grid: rows.
template <class T> DEVICE void layer_norm_row(const norm_args& a) {
  SHARED(float, sums, 256 / WAVE);
  const T* x = (const T*)a.x + (uint64_t)block_x() * a.x_stride;
  T* y = (T*)a.y + (uint64_t)block_x() * a.y_stride;
  layer_norm_values(x, (const T*)a.weight, (const T*)a.bias, y, a.width, a.eps, sums);
}
// LAUNCH layer_norm_f32 block=256
KERNEL(layer_norm_f32, norm_args, 256) { layer_norm_row<float>(a); }
// LAUNCH layer_norm_bf16 block=256
KERNEL(layer_norm_bf16, norm_args, 256) { layer_norm_row<bf16>(a); }

// Sine and cosine of an angle as T holds them.
template <class T> DEVICE void rope_angle(float angle, float* sine, float* cosine) {
  sincos_f32(angle, sine, cosine);
  *sine = rounded<T>::of(*sine);
  *cosine = rounded<T>::of(*cosine);
}
template <class T> DEVICE void rope_store(T* pair, float even, float odd, float sine, float cosine) {
  store_f32(pair, fma_f32(even, cosine, -(odd * sine)));
  store_f32(pair + 1, fma_f32(odd, cosine, even * sine));
}

// Grid: rows. In place. A work-item keeps its pair's sine and cosine from head to head where 256 is a multiple of dim / 2.
template <class T> DEVICE void rope_row(const rope_args& a) {
  T* x = (T*)a.x + (uint64_t)block_x() * a.row_stride + a.offset;
  float position = (float)((const int32_t*)a.positions)[block_x()];
  uint32_t pairs = a.dim / 2, known = ~0u;
  float sine = 0, cosine = 1;
  for (uint32_t i = thread_id(); i < a.heads * pairs; i += 256) {
    uint32_t head = i / pairs, pair = i % pairs;
    if (pair != known) {
      rope_angle<T>(position * ((const float*)a.inv_freq)[pair], &sine, &cosine);
      known = pair;
    }
    T* p = x + (uint64_t)head * a.head_stride + pair * 2;
    rope_store(p, load_f32(p), load_f32(p + 1), sine, cosine);
  }
}
// LAUNCH rope_f32 block=256
KERNEL(rope_f32, rope_args, 256) { rope_row<float>(a); }
// LAUNCH rope_bf16 block=256
KERNEL(rope_bf16, rope_args, 256) { rope_row<bf16>(a); }

// Grid: ceil(count / 1024).
template <class T> DEVICE void silu_mul_span(const silu_mul_args& a) {
  UNROLL
  for (uint32_t j = 0; j < 4; j++) {
    uint64_t i = (uint64_t)block_x() * 1024 + j * 256 + thread_id();
    if (i < a.count) {
      uint32_t row = (uint32_t)i / a.width;
      const T* gate = (const T*)a.x + i + (uint64_t)row * a.width;
      store_f32((T*)a.y + i, rounded<T>::of(silu_f32(load_f32(gate))) * load_f32(gate + a.width));
    }
  }
}
// LAUNCH silu_mul_f32 block=256 elements=1024
KERNEL(silu_mul_f32, silu_mul_args, 256) { silu_mul_span<float>(a); }
// LAUNCH silu_mul_bf16 block=256 elements=1024
KERNEL(silu_mul_bf16, silu_mul_args, 256) { silu_mul_span<bf16>(a); }
