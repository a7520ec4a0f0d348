// step.hip - step_gemv: what a decode step multiplies by weights, with what goes before and after it in the same launch. Struct: step_gemv_args.
//   h = T(norm * T(x * rsqrt(mean(x^2) + eps))), the bits of rms_norm, or x;  sum = h @ w^T as gemv.h adds
//   epilogue  STORE    y = T(sum)                     STORE_F32  y = sum
//             ROPE     the pair (2i, 2i + 1) of T(sum) turned as rope does
//             SILU     y[j] = T(T(silu(T(sum of row j))) * T(sum of row n + j))
//             RESIDUAL y = T(residual + T(sum))
// A block has COLS rows of weights where k >= 1024, else COLS_SHORT; a group of lanes has a pair of them: neighbours, or gate and up. A block walks
// over all rows of x, so that weights come from memory once and from a cache after that; f32 x, which serves comparisons, one row at a time.
// Parts ROWS, GIVE and FETCH run in the first part_blocks blocks, ROUTER in the last of segment 0's blocks to be done. A row of a negative
// position is computed like others, but stored nowhere.
#include "portable.h"
#include "fetch.h"
#include "gemv.h"
#include "hotcache.h"

namespace step {

constexpr uint32_t PAIR = 2;  // rows of weights of a group of lanes
// Rows of x that share a walk over the weights. 4 take more registers than two blocks a processor leave; waves of 64 have too few scalar ones for 2.
constexpr uint32_t ROWS_MAX = WAVE == 64 ? 1 : 2;
constexpr uint32_t COLS = gemv::THREADS / 32 * PAIR, COLS_SHORT = gemv::THREADS / 4 * PAIR;
static_assert(COLS == 16 && COLS_SHORT == 128, "the LAUNCH lines below and glm53/ops/step.py");

constexpr uint32_t STORE = 0, STORE_F32 = 1, ROPE = 2, SILU = 3, RESIDUAL = 4;
constexpr uint32_t PART_ROWS = 1, PART_GIVE = 2, PART_FETCH = 3, PART_ROUTER = 4;

// The block's LDS: x, or what the block's part needs; and the partial sums of norms.
struct Lds {
  words16* x;      // [gemv::X_UNITS]
  float* partial;  // [ROWS_MAX * THREADS / WAVE]
};

// One of the four products, and the block's place in it.
struct Segment {
  const uint8_t* codes;
  const uint16_t* scales;
  uint8_t* y;
  uint32_t n, y_stride, format, epilogue, head_stride, rope_offset;
  uint32_t index, block;
};

DEVICE uint32_t pairs_of(uint32_t n, uint32_t epilogue) { return epilogue == SILU ? n : (n + 1) / 2; }

DEVICE uint32_t blocks_of(const step_gemv_args& a, uint32_t i, uint32_t groups) { return (pairs_of(a.n[i], a.epilogue[i]) + groups - 1) / groups; }

// The segment of block `block` of the products; an index into the arrays of the arguments would put them into scratch memory.
DEVICE Segment segment_of(const step_gemv_args& a, uint32_t block) {
  Segment s = {};
  uint32_t groups = gemv::groups_of(a.k);
  bool found = false;
  UNROLL
  for (uint32_t i = 0; i < 4; i++) {
    uint32_t blocks = a.codes[i] ? blocks_of(a, i, groups) : 0u;
    if (!found && block < blocks) {
      s = {in_global((const uint8_t*)a.codes[i]), in_global((const uint16_t*)a.scales[i]), in_global((uint8_t*)a.y[i]), a.n[i], a.y_stride[i],
           a.format[i], a.epilogue[i], a.head_stride[i], a.rope_offset[i], i, block};
      found = true;
    }
    block -= blocks;
  }
  return s;
}

// Stores the pair of sums of one row. first: of the columns, or of gate and up; col: the column of `first`.
template <class T> DEVICE void store_pair(const step_gemv_args& a, const Segment& s, uint32_t row, uint32_t col, float first, float second) {
  uint64_t at = block_z() * a.y_batch_stride + (uint64_t)row * s.y_stride + col;
  T* y = (T*)s.y + at;
  bool both = col + 1 < s.n;
  float low = rounded<T>::of(first), high = rounded<T>::of(second);
  if (s.epilogue == STORE_F32) {
    ((float*)s.y)[at] = first;
    if (both) ((float*)s.y)[at + 1] = second;
    return;
  }
  if (s.epilogue == SILU) {
    store_f32(y, rounded<T>::of(silu_f32(low)) * high);
    return;
  }
  if (s.epilogue == RESIDUAL) {
    const T* residual = (const T*)a.residual + at;
    low += load_f32(residual);
    if (both) high += load_f32(residual + 1);
  }
  if (s.epilogue == ROPE) {
    uint32_t inside = col % s.head_stride - s.rope_offset;  // offsets and head strides are even
    if (inside < a.rope_dim) {
      int32_t position = ((const int32_t*)a.positions)[row];
      float sine, cosine;
      rope_angle<T>((float)(position < 0 ? 0 : position) * ((const float*)a.inv_freq)[inside / 2], &sine, &cosine);
      rope_store(y, low, high, sine, cosine);
      return;
    }
  }
  store_f32(y, low);
  if (both) store_f32(y + 1, high);
}

// ROWS rows of x from `row` on, times the block's columns.
template <class T, class W, uint32_t ROWS, bool ALIGNED>
DEVICE void multiply(const step_gemv_args& a, const Segment& s, uint32_t row, const Lds& lds) {
  // Opaque: else what groups of rows and formats share is computed before all of them, and takes registers that the loops need.
  uint32_t k = opaque(a.k), t = opaque_item(thread_id());
  constexpr uint32_t SPAN = gemv::span_of<T, ROWS>;
  uint32_t pairs = pairs_of(s.n, s.epilogue), mine = s.block * gemv::groups_of(k) + t / gemv::lanes_of(k), pair = mine < pairs ? mine : pairs - 1u;
  uint32_t first_row = s.epilogue == SILU ? pair : 2 * pair, second_row = s.epilogue == SILU ? s.n + pair : 2 * pair + 1;
  if (s.epilogue != SILU && second_row >= s.n) second_row = first_row;
  uint64_t matrix = (uint64_t)block_z() * (s.epilogue == SILU ? 2 * s.n : s.n);
  gemv::Walk<W, PAIR, ALIGNED ? gemv::depth_of<T, ROWS> : 1, ALIGNED> walk;
  walk.codes[0] = s.codes + (matrix + first_row) * W::row_bytes(k);
  walk.codes[1] = s.codes + (matrix + second_row) * W::row_bytes(k);
  walk.scales[0] = s.scales + (matrix + first_row) * (k / WEIGHT_GROUP);
  walk.scales[1] = s.scales + (matrix + second_row) * (k / WEIGHT_GROUP);
  gemv::begin(walk, k, t);

  const T* x = (const T*)a.x + block_z() * a.x_batch_stride + (uint64_t)row * a.x_stride;
  T* h = a.h && s.index == 0 && s.block == 0 ? (T*)a.h + (uint64_t)row * k : nullptr;
  float sums[ROWS][PAIR] = {}, scale[ROWS];
  for (uint32_t first = 0; first < k; first += SPAN) {
    if (first) block_sync();
    gemv::stage<T, ROWS>(lds.x, x, a.x_stride, first, k, t);
    block_sync();
    if (a.norm) {
      if (first == 0) gemv::norm_scales<T, ROWS>(lds.x, x, a.x_stride, k, a.eps, lds.partial, scale, t);
      gemv::normalise<T, ROWS>(lds.x, (const T*)a.norm, scale, first, k, h, k, t);
      block_sync();
    }
    gemv::advance<T, ROWS>(walk, lds.x, first, sums);
  }
  gemv::finish<ROWS>(walk, sums);
  float low = 0, high = 0;
  UNROLL
  for (uint32_t r = 0; r < ROWS; r++) {
    if (walk.lane == r) {
      low = sums[r][0];
      high = sums[r][1];
    }
  }
  if (walk.lane < ROWS && mine < pairs) store_pair<T>(a, s, row + walk.lane, first_row, low, high);
}

template <class T, class W> DEVICE void multiply_rows(const step_gemv_args& a, const Segment& s, const Lds& lds) {
  bool aligned = W::SCALED || gemv::rows_aligned<W>(s.codes, a.k);
  uint32_t taken = 0;
  for (uint32_t row = 0; row < a.rows; row += taken) {
    if (row) block_sync();  // the rows before are still being read
    if constexpr (!W::SCALED) {
      if (!aligned) {
        taken = 1;
        multiply<T, W, 1, false>(a, s, row, lds);
        continue;
      }
    }
    taken = a.rows - row < ROWS_MAX || sizeof(T) == 4 ? 1 : ROWS_MAX;
    if constexpr (ROWS_MAX > 1 && sizeof(T) == 2) {
      if (taken > 1) multiply<T, W, ROWS_MAX, true>(a, s, row, lds);
    }
    if (taken == 1) multiply<T, W, 1, true>(a, s, row, lds);
  }
}

// Part ROWS for query row r: the history row, then the index key, each finished in LDS and stored from there.
template <class T> DEVICE void finish_rows(const step_gemv_args& a, uint32_t r, const Lds& lds) {
  const step_rows_args& p = a.part_rows;
  int32_t position = ((const int32_t*)a.positions)[r];
  uint64_t ref = ((const uint64_t*)p.refs)[r];
  const float* inv_freq = (const float*)a.inv_freq;
  T* done = (T*)lds.x;
  uint32_t pair = thread_id();
  float sine = 0, cosine = 1;
  if (pair < a.rope_dim / 2) rope_angle<T>((float)(position < 0 ? 0 : position) * inv_freq[pair], &sine, &cosine);
  if (ref != 0) {
    const T* row = (const T*)p.row + (uint64_t)r * (p.latent + p.rope);
    rms_norm_values(row, (const T*)p.row_norm, done, p.latent, p.row_eps, lds.partial);
    if (pair < a.rope_dim / 2) {
      const T* from = row + p.latent + 2 * pair;
      rope_store(done + p.latent + 2 * pair, load_f32(from), load_f32(from + 1), sine, cosine);
    }
    block_sync();
    uint8_t* target = row_pointer<uint8_t>(ref, p.offsets, p.row_bytes);
    if (p.row_format == WEIGHT_Q8G64) history_rows::store_q8g64<256>((const T*)done, p.latent, p.rope, target, (uint32_t*)p.error, r + 1u);
    else history_rows::store_plain<256>((const T*)done, p.latent + p.rope, target);
    block_sync();
  }
  if (!p.key || position < 0) return;
  const T* key = (const T*)p.key + (uint64_t)r * p.key_width;
  layer_norm_values(key, (const T*)p.key_norm, (const T*)p.key_bias, done, p.key_width, p.key_eps, lds.partial);
  block_sync();
  if (pair < a.rope_dim / 2) {
    T* turned = done + 2 * pair;
    rope_store(turned, load_f32(turned), load_f32(turned + 1), sine, cosine);
  }
  block_sync();
  append_args to = {};
  to.width = p.key_width;
  to.extent_rows = p.key_extent_rows;
  to.plane = p.key_plane;
  to.row_bytes = p.key_width * (uint32_t)sizeof(T);
  uint32_t session = (uint32_t)((const int32_t*)p.sessions)[r];
  append_values<256>(to, (const T*)done, (const uint64_t*)p.key_tables + (uint64_t)session * p.key_table_stride, (uint32_t)position);
}

// Part ROUTER, by every block of segment 0 when its logits are stored: the last one to come picks the experts of all rows.
DEVICE void route_last(const step_gemv_args& a, const Segment& s, const Lds& lds) {
  const step_router_args& p = a.part_router;
  uint32_t* words = (uint32_t*)lds.x;
  fence_device();
  block_sync();
  if (thread_id() == 0) words[0] = global_add((uint32_t*)p.arrivals, 1u);
  block_sync();
  if (words[0] + 1u != blocks_of(a, 0, gemv::groups_of(a.k))) return;
  fence_device();
  block_sync();
  if (thread_id() == 0) *(uint32_t*)p.arrivals = 0;
  router_args router = {s.y, p.bias, p.ids, p.weights, p.experts, p.k, p.n_group, p.topk_group, p.normalise, p.scaling};
  for (uint32_t row = 0; row < a.rows; row++) {
    routing::pick(router, row, {words, words + routing::THREADS, (float*)(words + 2 * routing::THREADS)});
    block_sync();
  }
}

template <class T> DEVICE void run_part(const step_gemv_args& a, const Lds& lds) {
  if (block_z()) return;
  if (a.part == PART_ROWS) finish_rows<T>(a, block_x(), lds);
  else if (a.part == PART_GIVE) hotcache::give_part(a.part_give, block_x(), (hotcache::work*)lds.x);
  else history_rows::fetch_part(a.part_fetch, block_x(), a.part_blocks, a.rounds);
}
static_assert(sizeof(hotcache::work) <= gemv::X_BYTES, "GIVE works in the LDS of x");

template <class T> DEVICE void run(const step_gemv_args& a) {
  SHARED(words16, x, gemv::X_UNITS);
  SHARED(float, partial, ROWS_MAX * gemv::THREADS / WAVE);
  Lds lds = {x, partial};
  if (block_x() < a.part_blocks) {
    run_part<T>(a, lds);
    return;
  }
  Segment s = segment_of(a, block_x() - a.part_blocks);
  s.n = in_item(s.n);
  s.y_stride = in_item(s.y_stride);
  s.head_stride = in_item(s.head_stride);
  s.rope_offset = in_item(s.rope_offset);
  if (s.format == WEIGHT_Q8G64) multiply_rows<T, q8g64_weights>(a, s, lds);
  else if (s.format == WEIGHT_Q4G64) multiply_rows<T, q4g64_weights>(a, s, lds);
  else if (s.format == WEIGHT_BF16) multiply_rows<T, bf16_weights>(a, s, lds);
  else multiply_rows<T, f32_weights>(a, s, lds);
  if (a.part == PART_ROUTER && s.index == 0) route_last(a, s, lds);
}

}  // namespace step

// Grid: (part_blocks + blocks of all segments, 1, batch). cols: rows of weights a block where k >= long_k, else cols_short.
// LAUNCH step_gemv_f32 block=256 cols=16 cols_short=128 long_k=1024 x_bytes=32768
KERNEL(step_gemv_f32, step_gemv_args, 256) { step::run<float>(a); }
// LAUNCH step_gemv_bf16 block=256 cols=16 cols_short=128 long_k=1024 x_bytes=32768
KERNEL(step_gemv_bf16, step_gemv_args, 256) { step::run<bf16>(a); }
