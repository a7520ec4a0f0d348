// matmul.hip - y[b, r, n] = Y(sum_k x[b, r, k] * w[b, n, k]), and with a residual Y(Y(sum) + residual[b, r, n]). X, Y: f32 or bf16, sums in f32.
// W: f32, bf16, q8g64, q4g64 (weight_format.h; values are code * scale, exact in f32). For prompt rows: decode rows have step.hip. The bits of a row
// depend on its own x and on w only, never on `rows` or on the row's place: 64 x 64 outputs a block, 4 x 4 a work-item, one fma chain over
// ascending k for each output.
// Any k, n and strides (k may be odd; nothing needs more alignment than its element); quantised: k and the strides of w are multiples of 64, codes
// at a multiple of 16. Residual has y's strides and may be y itself.
#include "weight_format.h"

template <class X, class W, class Y> DEVICE void matmul_store(const matmul_args& a, uint32_t batch, uint32_t row, uint32_t col, float sum) {
  uint64_t at = batch * a.y_batch_stride + (uint64_t)row * a.y_stride + col;
  if (a.residual) sum = rounded<Y>::of(sum) + load_f32((const Y*)a.residual + at);
  store_f32((Y*)a.y + at, sum);
}

constexpr uint32_t TILE_ROWS = 64, TILE_COLS = 64, TILE_K = 32;
constexpr uint32_t TILE_PITCH = TILE_ROWS + 4;  // multiple of 4 for 16-byte reads; off 64 so that the transposing stores spread over banks

// Brings a 64 x 32 tile of a row-major matrix into LDS as f32, transposed to [k][row]; zeros beyond its rows and its k.
template <class E> DEVICE void tile_load(float* lds, const E* source, uint64_t stride, uint32_t rows, uint32_t k0, uint32_t k) {
  uint32_t kk = thread_id() % 4 * 8, row = thread_id() / 4;  // 8 neighbouring k of one row
  const E* p = source + row * stride + k0 + kk;
  if (row < rows && k0 + kk + 8 <= k) {
    float v[8];
    UNROLL
    for (uint32_t j = 0; j < 8; j++) v[j] = load_f32(p + j);
    UNROLL
    for (uint32_t j = 0; j < 8; j++) lds[(kk + j) * TILE_PITCH + row] = v[j];
  } else {
    UNROLL
    for (uint32_t j = 0; j < 8; j++) lds[(kk + j) * TILE_PITCH + row] = (row < rows && k0 + kk + j < k) ? load_f32(p + j) : 0.0f;
  }
}

// The same of a weight matrix whose tile starts at element `at`; W: a reader of weight_format.h. A tile never straddles a group of 64.
template <class W>
DEVICE void tile_load_weights(float* lds, const void* codes, const uint16_t* scales, uint64_t at, uint64_t stride, uint32_t rows, uint32_t k0, uint32_t k) {
  if constexpr (W::SCALED) {
    uint32_t kk = thread_id() % 4 * 8, row = thread_id() / 4;
    float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (row < rows) W::load8(codes, scales, at + row * stride + k0 + kk, v);
    UNROLL
    for (uint32_t j = 0; j < 8; j++) lds[(kk + j) * TILE_PITCH + row] = v[j];
  } else {
    tile_load(lds, (const typename W::element*)codes + at, stride, rows, k0, k);
  }
}

// Adds TILE_K steps of k to the 4 x 4 outputs whose first x row and w row `xs` and `ws` point at.
DEVICE void tile_multiply(const float* xs, const float* ws, float acc[4][4]) {
  for (uint32_t kk = 0; kk < TILE_K; kk++) {
    UNROLL
    for (int i = 0; i < 4; i++) {
      UNROLL
      for (int j = 0; j < 4; j++) acc[i][j] = fma_f32(xs[kk * TILE_PITCH + i], ws[kk * TILE_PITCH + j], acc[i][j]);
    }
  }
}

// Grid: ceil(n / 64), ceil(rows / 64), batch.
template <class X, class W, class Y> DEVICE void matmul_tile(const matmul_args& a) {
  SHARED(float, xs, TILE_K * TILE_PITCH);
  SHARED(float, ws, TILE_K * TILE_PITCH);
  uint32_t batch = block_z(), row0 = block_y() * TILE_ROWS, col0 = block_x() * TILE_COLS;
  uint32_t row = thread_id() / 16 * 4, col = thread_id() % 16 * 4;  // first of this work-item's 4 x 4, inside the tile
  uint32_t rows = a.rows - row0 < TILE_ROWS ? a.rows - row0 : TILE_ROWS, cols = a.n - col0 < TILE_COLS ? a.n - col0 : TILE_COLS;
  const X* x = (const X*)a.x + batch * a.x_batch_stride + (uint64_t)row0 * a.x_stride;
  uint64_t at = batch * a.w_batch_stride + (uint64_t)col0 * a.w_stride;
  float acc[4][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}, {0, 0, 0, 0}, {0, 0, 0, 0}};
  for (uint32_t k0 = 0; k0 < a.k; k0 += TILE_K) {
    tile_load(xs, x, a.x_stride, rows, k0, a.k);
    tile_load_weights<W>(ws, a.w, (const uint16_t*)a.scales, at, a.w_stride, cols, k0, a.k);
    block_sync();
    if (row < rows && col < cols) tile_multiply(xs + row, ws + col, acc);
    block_sync();
  }
  UNROLL
  for (uint32_t i = 0; i < 4; i++) {
    UNROLL
    for (uint32_t j = 0; j < 4; j++) {
      if (row + i < rows && col + j < cols) matmul_store<X, W, Y>(a, batch, row0 + row + i, col0 + col + j, acc[i][j]);
    }
  }
}

#define MATMUL_TILE(suffix, X, W, Y) KERNEL(matmul_tile_##suffix, matmul_args, 256) { matmul_tile<X, W, Y>(a); }

// LAUNCH matmul_tile_f32_f32_f32 block=256 cols=64 rows=64
MATMUL_TILE(f32_f32_f32, float, f32_weights, float)
// LAUNCH matmul_tile_f32_bf16_f32 block=256 cols=64 rows=64
MATMUL_TILE(f32_bf16_f32, float, bf16_weights, float)
// LAUNCH matmul_tile_f32_q8g64_f32 block=256 cols=64 rows=64
MATMUL_TILE(f32_q8g64_f32, float, q8g64_weights, float)
// LAUNCH matmul_tile_f32_q4g64_f32 block=256 cols=64 rows=64
MATMUL_TILE(f32_q4g64_f32, float, q4g64_weights, float)
// LAUNCH matmul_tile_bf16_f32_f32 block=256 cols=64 rows=64
MATMUL_TILE(bf16_f32_f32, bf16, f32_weights, float)
// LAUNCH matmul_tile_bf16_bf16_f32 block=256 cols=64 rows=64
MATMUL_TILE(bf16_bf16_f32, bf16, bf16_weights, float)
// LAUNCH matmul_tile_bf16_q8g64_f32 block=256 cols=64 rows=64
MATMUL_TILE(bf16_q8g64_f32, bf16, q8g64_weights, float)
// LAUNCH matmul_tile_bf16_q4g64_f32 block=256 cols=64 rows=64
MATMUL_TILE(bf16_q4g64_f32, bf16, q4g64_weights, float)
// LAUNCH matmul_tile_bf16_bf16_bf16 block=256 cols=64 rows=64
MATMUL_TILE(bf16_bf16_bf16, bf16, bf16_weights, bf16)
// LAUNCH matmul_tile_bf16_q8g64_bf16 block=256 cols=64 rows=64
MATMUL_TILE(bf16_q8g64_bf16, bf16, q8g64_weights, bf16)
// LAUNCH matmul_tile_bf16_q4g64_bf16 block=256 cols=64 rows=64
MATMUL_TILE(bf16_q4g64_bf16, bf16, q4g64_weights, bf16)

// The halves of a product's k, which two devices may have computed: y = T(residual + (low + high)).
template <class T> DEVICE void join_halves(const join_halves_args& a) {
  uint64_t at = (uint64_t)block_x() * 1024 + thread_id();
  UNROLL
  for (uint32_t i = 0; i < 4; i++, at += 256) {
    if (at >= a.count) return;
    store_f32((T*)a.y + at, load_f32((const T*)a.residual + at) + (((const float*)a.low)[at] + ((const float*)a.high)[at]));
  }
}
// LAUNCH join_halves_f32 block=256 values=1024
KERNEL(join_halves_f32, join_halves_args, 256) { join_halves<float>(a); }
// LAUNCH join_halves_bf16 block=256 values=1024
KERNEL(join_halves_bf16, join_halves_args, 256) { join_halves<bf16>(a); }
