// step_gemv_rows.h - step_gemv_* of the fast host build: step.hip's products with their norm, epilogues and parts, over step_products.h.
#pragma once

namespace {
namespace host {
namespace step_gemv {

using products::packed_floats;
constexpr uint32_t COLUMNS_MAX = step::COLS_SHORT;  // rows of weights a block

// Blocks of one call: x as f32 after the norm, and packed for the format that was needed last.
struct Work {
  float* x;       // [rows, k]
  float* packed;  // [rows, pitch]
  float* sums;    // [COLUMNS_MAX, rows]
  uint64_t pitch;
  uint32_t packed_format;  // of this batch; NONE: not packed
};
constexpr uint32_t NONE = ~0u;

// One of the four products, and a block's place in it.
struct Segment {
  const void *codes, *scales;
  void* y;
  uint32_t n, y_stride, format, epilogue, head_stride, rope_offset;
  uint32_t index, block;
};
DEVICE uint32_t blocks_of(const step_gemv_args& a, uint32_t i) {
  uint32_t groups = gemv::groups_of(a.k);
  return a.codes[i] ? (step::pairs_of(a.n[i], a.epilogue[i]) + groups - 1) / groups : 0u;
}
DEVICE Segment segment_of(const step_gemv_args& a, uint32_t block) {
  uint32_t i = 0;
  for (; i < 3 && block >= blocks_of(a, i); i++) block -= blocks_of(a, i);
  return {a.codes[i], a.scales[i], a.y[i], a.n[i], a.y_stride[i], a.format[i], a.epilogue[i], a.head_stride[i], a.rope_offset[i], i, block};
}

// Rows of x of one batch as f32, normed; `h` null: not wanted.
template <class T> void prepare(const step_gemv_args& a, uint64_t batch, T* h, const Work& w) {
  for (uint32_t r = 0; r < a.rows; r++) {
    const T* x = (const T*)a.x + batch * a.x_batch_stride + (uint64_t)r * a.x_stride;
    float* to = w.x + (uint64_t)r * a.k;
    if (a.norm) values::scale_row(x, (const T*)a.norm, values::rms_scale(x, a.k, a.eps), a.k, to);
    else for (uint32_t c = 0; c < a.k; c++) to[c] = load_f32(x + c);
    if (a.norm && h) {
      for (uint32_t c = 0; c < a.k; c++) store_f32(h + (uint64_t)r * a.k + c, to[c]);
    }
  }
}

// step::store_pair of a row whose pair is `first` and `second`.
template <class T>
DEVICE void store_pair(const step_gemv_args& a, const Segment& s, uint64_t at, uint32_t row, uint32_t col, float first, float second) {
  T* y = (T*)s.y + at;
  bool both = col + 1 < s.n;
  if (s.epilogue == step::STORE_F32) {
    ((float*)s.y)[at] = first;
    if (both) ((float*)s.y)[at + 1] = second;
    return;
  }
  float low = rounded<T>::of(first), high = rounded<T>::of(second);
  if (s.epilogue == step::SILU) {
    store_f32(y, rounded<T>::of(silu_f32(low)) * high);
    return;
  }
  if (s.epilogue == step::RESIDUAL) {
    const T* residual = (const T*)a.residual + at;
    low += load_f32(residual);
    if (both) high += load_f32(residual + 1);
  }
  uint32_t inside = s.epilogue == step::ROPE ? col % s.head_stride - s.rope_offset : a.rope_dim;
  if (inside < a.rope_dim) {
    int32_t position = ((const int32_t*)a.positions)[row];
    float sine, cosine;
    rope_angle<T>((float)(position < 0 ? 0 : position) * ((const float*)a.inv_freq)[inside / 2], &sine, &cosine);
    rope_store(y, low, high, sine, cosine);
    return;
  }
  store_f32(y, low);
  if (both) store_f32(y + 1, high);
}

// One block of a segment: its rows of weights times all rows of x.
template <class T, class W> void multiply(const step_gemv_args& a, const Segment& s, uint64_t batch, Work& w) {
  using R = products::reader<W>;
  if (w.packed_format != W::FORMAT) {
    for (uint32_t r = 0; r < a.rows; r++) products::pack<R>(w.x + (uint64_t)r * a.k, a.k, w.packed + r * w.pitch);
    w.packed_format = W::FORMAT;
  }
  bool silu = s.epilogue == step::SILU;
  uint32_t pairs = step::pairs_of(s.n, s.epilogue), begin = s.block * gemv::groups_of(a.k), end = begin + gemv::groups_of(a.k);
  if (end > pairs) end = pairs;
  uint64_t matrix = batch * (silu ? 2 * s.n : s.n);
  auto row = [&](uint32_t i) {
    uint32_t pair = begin + i / 2, n = silu ? pair + i % 2 * s.n : 2 * pair + i % 2;
    if (!silu && n >= s.n) n = s.n - 1;
    return products::weight_row<W>(s.codes, s.scales, matrix + n, a.k);
  };
  products::all_dots<R>(row, 2 * (end - begin), w.packed, w.pitch, a.rows, a.k, w.sums);
  for (uint32_t r = 0; r < a.rows; r++) {
    for (uint32_t p = begin; p < end; p++) {
      uint32_t col = silu ? p : 2 * p;
      const float* sums = w.sums + (uint64_t)(p - begin) * 2 * a.rows + r;
      store_pair<T>(a, s, batch * a.y_batch_stride + (uint64_t)r * s.y_stride + col, r, col, sums[0], sums[a.rows]);
    }
  }
}

// step::finish_rows for query row r; false after a failed touch.
template <class T> bool finish_row(const step_gemv_args& a, uint32_t r, Blocks& b) {
  const step_rows_args& p = a.part_rows;
  int32_t position = ((const int32_t*)a.positions)[r];
  uint64_t ref = ((const uint64_t*)p.refs)[r];
  uint32_t pairs = a.rope_dim / 2;
  auto turn = [&](const T* from, T* to) {
    for (uint32_t i = 0; i < pairs; i++) {
      float sine, cosine;
      rope_angle<T>((float)(position < 0 ? 0 : position) * ((const float*)a.inv_freq)[i], &sine, &cosine);
      rope_store(to + 2 * i, load_f32(from + 2 * i), load_f32(from + 2 * i + 1), sine, cosine);
    }
  };
  T* done = (T*)b.scratch(p.latent + p.rope > p.key_width ? p.latent + p.rope : p.key_width);
  if (!done) return false;
  if (ref != 0) {
    const T* row = (const T*)p.row + (uint64_t)r * (p.latent + p.rope);
    values::rms_norm_row(row, (const T*)p.row_norm, p.latent, p.row_eps, done);
    turn(row + p.latent, done + p.latent);
    uint8_t* target = (uint8_t*)b.row(ref, p.offsets, p.row_bytes);
    if (!target) return false;
    if (p.row_format != WEIGHT_Q8G64) memcpy(target, done, (p.latent + p.rope) * sizeof(T));
    else if (!stores::quantise_row(done, p.latent, p.rope, target)) global_max((uint32_t*)p.error, r + 1u);
  }
  if (!p.key || position < 0) return true;
  values::layer_norm_row((const T*)p.key + (uint64_t)r * p.key_width, (const T*)p.key_norm, (const T*)p.key_bias, p.key_width, p.key_eps, done);
  turn(done, done);
  uint32_t bytes = p.key_width * (uint32_t)sizeof(T);
  const uint64_t* table = (const uint64_t*)p.key_tables + (uint64_t)((const int32_t*)p.sessions)[r] * p.key_table_stride;
  uint8_t* target = stores::key_row(b, table, p.key_plane, p.key_extent_rows, bytes, (uint32_t)position, bytes);
  if (!target) return false;
  memcpy(target, done, bytes);
  return true;
}

// step::route_last after `count` blocks of segment 0.
inline void route_last(const step_gemv_args& a, uint32_t count) {
  const step_router_args& p = a.part_router;
  if (__atomic_fetch_add((uint32_t*)p.arrivals, count, __ATOMIC_ACQ_REL) + count != blocks_of(a, 0)) return;
  *(uint32_t*)p.arrivals = 0;
  router_args router = {a.y[0], p.bias, p.ids, p.weights, p.experts, p.k, p.n_group, p.topk_group, p.normalise, p.scaling};
  for (uint32_t row = 0; row < a.rows; row++) selections::pick(router, row);
}

// Product blocks [first, last) of one batch.
template <class T> void run_products(const step_gemv_args& a, uint64_t batch, uint32_t first, uint32_t last, Work& w) {
  w.packed_format = NONE;
  prepare<T>(a, batch, first == 0 ? (T*)a.h : nullptr, w);
  uint32_t routed = 0;
  for (uint32_t block = first; block < last; block++) {
    Segment s = segment_of(a, block);
    if (s.format == WEIGHT_Q8G64) multiply<T, q8g64_weights>(a, s, batch, w);
    else if (s.format == WEIGHT_Q4G64) multiply<T, q4g64_weights>(a, s, batch, w);
    else if (s.format == WEIGHT_BF16) multiply<T, bf16_weights>(a, s, batch, w);
    else multiply<T, f32_weights>(a, s, batch, w);
    routed += s.index == 0 ? 1u : 0u;
  }
  if (a.part == step::PART_ROUTER && routed) route_last(a, routed);
}

template <class T> bool run_part(const step_gemv_args& a, uint32_t block, Blocks& b) {
  if (a.part == step::PART_ROWS) return finish_row<T>(a, block, b);
  if (a.part != step::PART_FETCH) return b.run_fibers(block, block + 1);
  for (uint32_t round = 0; round < a.rounds; round++) {
    if (!fetches::fetch_round(a.part_fetch, a.part_fetch.plane_first, round, block, a.part_blocks, b)) return false;
  }
  return true;
}

// Grid: (part_blocks + blocks of all segments, 1, batch).
template <class T> bool run(const step_gemv_args& a, Blocks& b) {
  for (uint64_t block = b.first; block < b.last;) {
    uint64_t batch = block / b.grid.x, end = (batch + 1) * b.grid.x < b.last ? (batch + 1) * b.grid.x : b.last;
    uint32_t first = (uint32_t)(block % b.grid.x), last = first + (uint32_t)(end - block);
    for (; first < last && first < a.part_blocks; first++) {
      if (batch) continue;
      if (!run_part<T>(a, first, b)) return false;
    }
    if (first < last) {
      size_t pitch = packed_floats(a.k);
      Work w = {b.scratch(a.rows * (a.k + pitch + COLUMNS_MAX)), nullptr, nullptr, pitch, NONE};
      if (!w.x) return false;
      w.packed = w.x + (size_t)a.rows * a.k;
      w.sums = w.packed + a.rows * pitch;
      run_products<T>(a, batch, first - a.part_blocks, last - a.part_blocks, w);
    }
    block = end;
  }
  return true;
}

}  // namespace step_gemv

FAST_KERNEL(step_gemv_f32, step_gemv_args, step_gemv::run<float>);
FAST_KERNEL(step_gemv_bf16, step_gemv_args, step_gemv::run<bf16>);

}  // namespace host
}  // namespace
