// weights.hip - checkpoint tensors into the layouts that the forward pass reads.
//   dequant     y[r, c] = Y(f32(x[r, c]) * scale[r / 128, c / 128]); the last block of a side may be ragged; without a scale: a conversion
//   split_kv_b  kv_b [heads, nope + v, latent] -> wk [heads, latent, nope] (transposed), wv [heads, v, latent]; rows of a head are K then V
// Source of the layouts: the released FP8 checkpoints (128 x 128 blocks, e4m3) and DeepSeek-V2's absorbed MLA.

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
