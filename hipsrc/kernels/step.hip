// step.hip - step_gemv_*: what a decode step multiplies by weights, with what goes before and after it in the same launch. Struct: step_gemv_args.
//   h = T(norm * T(x * rsqrt(mean(x^2) + eps))), the bits of rms_norm, or x;  sum = h @ w^T
//   epilogue  STORE    y = T(sum)                     STORE_F32  y = sum
//             ROPE     the pair (2i, 2i + 1) of T(sum) turned as rope does
//             SILU     y[j] = T(T(silu(T(sum of row j))) * T(sum of row n + j))
//             RESIDUAL y = residual + (sum of the first half of k + sum of the rest), T = f32, of segment 0 alone, no norm; bf16: step_halves.hip
// One kernel for each T and format W of the weights. bf16: the wave product (wave_product.h): a block has 32 rows of weights where it is wide, else
// 256; for SILU half of each 32 are gate, half up. f32, which serves comparisons: gemv.h, a block has one row of x and COLS
// or COLS_SHORT rows of weights, pairs of which belong to a group of lanes. Parts ROWS, GIVE, FETCH and PLACE run in the first part_blocks blocks;
// launches with part ROUTER have kernels of their own, whose segment 0 has f32 weights: the last of its blocks to be done picks. A row of a negative
// position is computed like others, but part ROWS stores nothing of it.
#include "portable.h"
#include "fetch.h"
#include "give.h"
#include "stored.h"
#include "mailbox.h"
#include "share.h"
#include "step_router.h"

namespace step {

constexpr uint32_t PAIR = 2;  // rows of weights of a group of lanes
constexpr uint32_t COLS = gemv::THREADS / 32 * PAIR, COLS_SHORT = gemv::THREADS / 4 * PAIR;
constexpr uint32_t TILE_COLS = wave_product::COLS, TILE_COLS_SHORT = wave_product::WAVES * TILE_COLS;
static_assert(COLS == 16 && COLS_SHORT == 128 && TILE_COLS == 32 && TILE_COLS_SHORT == 256, "the LAUNCH lines below and glm53/ops/step.py");

constexpr uint32_t STORE = 0, STORE_F32 = 1, ROPE = 2, SILU = 3, RESIDUAL = 4;
constexpr uint32_t PART_ROWS = 1, PART_GIVE = 2, PART_FETCH = 3, PART_ROUTER = 4, PART_PLACE = 5;

// A block's place among the products.
struct Place {
  uint32_t index, block, batch;
};

DEVICE uint32_t pairs_of(uint32_t n, uint32_t epilogue) { return epilogue == SILU ? n : (n + 1) / 2; }

// bf16 x and weights with scales through rings in LDS, where there are any: one row, several ones. Parts and router have the LDS of the rings too.
#if defined(TILE_MMA)
template <class T, class W, bool ONE> constexpr bool by_one = ONE && W::SCALED && sizeof(T) == 2;
template <class T, class W, bool ONE> constexpr bool by_rings = !ONE && W::SCALED && sizeof(T) == 2;
constexpr uint32_t ROWS_LDS = wave_rows::LDS_BYTES<q8g64_weights, 8, true>, MANY_LDS = wave_rows::LDS_BYTES<q8g64_weights, 12, true>;
constexpr uint32_t FEW_LDS = wave_rows::LDS_BYTES<q8g64_weights, 4, true>;
static_assert(ROUTER_COLS * ROUTER_SPAN * 16 <= ROWS_LDS, "the router's weights wait there");
static_assert(wave_one::RING_UNITS >= X_UNITS, "the rings are the LDS of x of parts and router");
#else
template <class T, class W, bool ONE> constexpr bool by_one = false;
template <class T, class W, bool ONE> constexpr bool by_rings = false;
#endif

// Blocks of the products of one batch that segment i takes; those of one set of columns follow one another. bf16: a.blocks, so that a block finds its
// weights in few instructions: at a launch's start they come from memory.
template <class T> DEVICE uint32_t blocks_of(const step_gemv_args& a, uint32_t i) {
  if (sizeof(T) == 2) return a.blocks[i];
  uint32_t shift = a.wide ? 3 : 6, blocks = (pairs_of(a.n[i], a.epilogue[i]) + (1u << shift) - 1u) >> shift;  // of 2^shift pairs
  return !a.codes[i] ? 0u : blocks * a.rows;
}

template <class T> DEVICE Place place_of(const step_gemv_args& a, uint32_t block) {
  Place place = {0, block, 0};
  if (a.x_batch_stride) {  // segment 0 alone
    place.batch = block / blocks_of<T>(a, 0);
    place.block -= place.batch * blocks_of<T>(a, 0);
    return place;
  }
  UNROLL
  for (uint32_t i = 0; i < 3; i++) {
    uint32_t blocks = blocks_of<T>(a, i);
    if (place.index == i && place.block >= blocks) {
      place.block -= blocks;
      place.index = i + 1;
    }
  }
  return place;
}

// Number of block `block` among those of the products.
template <bool ROUTER> DEVICE uint32_t product_block(const step_gemv_args& a, uint32_t block) { return ROUTER ? block : block - a.part_blocks; }

DEVICE Segment segment_at(const step_gemv_args& args, const Place& place) {
  const step_gemv_args& a = kernel_args(args);
  uint32_t i = place.index;
  return {in_global((const uint8_t*)a.codes[i]), in_global((const uint16_t*)a.scales[i]), in_global((uint8_t*)a.y[i]), a.n[i], a.y_stride[i],
          a.epilogue[i], a.head_stride[i], a.rope_offset[i], i, place.block, place.batch};
}

// Turns the pair from column `col` on, if its columns turn, and stores it; low and high are values of T.
template <class T> DEVICE bool turn_pair(const step_gemv_args& a, const Segment& s, T* y, uint32_t row, uint32_t col, float low, float high) {
  uint32_t inside = col % s.head_stride - s.rope_offset;  // offsets and head strides are even
  if (inside >= a.rope_dim) return false;
  int32_t position = ((const int32_t*)a.positions)[row];
  float sine, cosine;
  rope_angle<T>((float)(position < 0 ? 0 : position) * ((const float*)a.inv_freq)[inside / 2], &sine, &cosine);
  rope_store(y, low, high, sine, cosine);
  return true;
}

DEVICE uint64_t output_at(const step_gemv_args& a, const Segment& s, uint32_t row, uint32_t col) {
  return s.batch * a.y_batch_stride + (uint64_t)row * s.y_stride + col;
}

// Stores the pair of sums of one row. first: of the columns, or of gate and up; col: the column of `first`.
template <class T> DEVICE void store_pair(const step_gemv_args& a, const Segment& s, uint32_t row, uint32_t col, float first, float second) {
  uint64_t at = output_at(a, s, row, col);
  T* y = (T*)s.y + at;
  bool both = col + 1 < s.n;
  if (sizeof(T) == 2 || s.epilogue == STORE_F32) {  // bf16: the router's logits
    ((float*)s.y)[at] = first;
    if (both) ((float*)s.y)[at + 1] = second;
    return;
  }
  float low = rounded<T>::of(first), high = rounded<T>::of(second);
  if (s.epilogue == SILU) {
    store_f32(y, rounded<T>::of(silu_f32(low)) * high);
    return;
  }
  if (s.epilogue == RESIDUAL) {
    const T* residual = (const T*)a.residual + at;
    low += load_f32(residual);
    if (both) high += load_f32(residual + 1);
  }
  if (s.epilogue == ROPE && turn_pair(a, s, y, row, col, low, high)) return;
  store_f32(y, low);
  if (both) store_f32(y + 1, high);
}

// One row of x times the block's pairs of rows of weights. RESIDUAL: the two halves of k one after the other, each as a product of its own.
template <class T, class W, bool ALIGNED> DEVICE void multiply_pairs(const step_gemv_args& a, const Segment& s, const Lds& lds) {
  constexpr uint32_t SPAN = gemv::span_of<T, 1>;
  uint32_t k = opaque(a.k), t = opaque_item(thread_id()), row = s.block % a.rows, block = s.block / a.rows;
  bool wide = a.wide;
  uint32_t pairs = pairs_of(s.n, s.epilogue), mine = block * gemv::groups_of(wide) + t / gemv::lanes_of(wide);
  uint32_t pair = mine < pairs ? mine : pairs - 1u;
  uint32_t first_row = s.epilogue == SILU ? pair : 2 * pair, second_row = s.epilogue == SILU ? s.n + pair : 2 * pair + 1;
  if (s.epilogue != SILU && second_row >= s.n) second_row = first_row;
  uint64_t matrix = (uint64_t)s.batch * (s.epilogue == SILU ? 2 * s.n : s.n);
  constexpr uint32_t DEPTH = !ALIGNED ? 1 : sizeof(T) == 2 ? 8 : gemv::depth_of<T, 1>;  // 8: the router has few blocks
  const T* x = (const T*)a.x + s.batch * a.x_batch_stride + (uint64_t)row * a.x_stride;
  T* h = a.h && s.index == 0 && block == 0 ? (T*)a.h + (uint64_t)row * k : nullptr;
  float total[PAIR] = {};
  uint32_t each = s.epilogue == RESIDUAL ? wave_product::first_half(k) : k;
  ROLLED
  for (uint32_t start = 0; start < k; start += each) {
    uint32_t count = k - start < each ? k - start : each;
    gemv::Walk<W, PAIR, DEPTH, ALIGNED> walk;
    walk.codes[0] = s.codes + (matrix + first_row) * W::row_bytes(k) + W::row_bytes(start);
    walk.codes[1] = s.codes + (matrix + second_row) * W::row_bytes(k) + W::row_bytes(start);
    walk.scales[0] = s.scales + (matrix + first_row) * (k / WEIGHT_GROUP) + start / WEIGHT_GROUP;
    walk.scales[1] = s.scales + (matrix + second_row) * (k / WEIGHT_GROUP) + start / WEIGHT_GROUP;
    gemv::begin(walk, count, wide, t);
    if (start == 0) previous_done();
    float sums[1][PAIR] = {}, scale[1];
    for (uint32_t first = 0; first < count; first += SPAN) {
      if (start + first) block_sync();
      gemv::stage<T, 1>(lds.x, x + start, a.x_stride, first, count, t);
      block_sync();
      if (a.norm) {
        if (first == 0) gemv::norm_scales<T, 1>(lds.x, x, a.x_stride, k, a.eps, lds.partial, scale, t);
        gemv::normalise<T, 1>(lds.x, (const T*)a.norm, scale, first, k, h, k, t);
        block_sync();
      }
      gemv::advance<T, 1>(walk, lds.x, first, sums);
    }
    gemv::finish<1>(walk, sums);
    UNROLL
    for (uint32_t i = 0; i < PAIR; i++) total[i] = start ? total[i] + sums[0][i] : sums[0][i];
  }
  if (t % gemv::lanes_of(wide) == 0 && mine < pairs) store_pair<T>(a, s, row, first_row, total[0], total[1]);
}

// Stores one sum of the columns of a block of WIDTH, which the 32 lanes have, the first ones again where it is narrow; they have one row. SILU: half
// of the columns are of gate, then half of up.
template <uint32_t WIDTH> DEVICE void store_sum(const step_gemv_args& a, const Segment& s, uint32_t block, uint32_t row, float sum) {
  constexpr uint32_t HALF = WIDTH / 2;
  uint32_t lane = tile_lane() % WIDTH, col = s.epilogue == SILU ? block * HALF + lane % HALF : block * WIDTH + lane;
  uint64_t at = output_at(a, s, row, col);
  bf16* y = (bf16*)s.y + at;
  bool inside = col < s.n;
  if (s.epilogue == STORE_F32) {
    if (inside) ((float*)s.y)[at] = sum;
    return;
  }
  float value = rounded<bf16>::of(sum);
  if (s.epilogue == SILU) {
    float up = shuffle_xor(value, HALF);
    if (inside && lane < HALF) store_f32(y, rounded<bf16>::of(silu_f32(value)) * up);
    return;
  }
  if (s.epilogue == ROPE) {
    float other = shuffle_xor(value, 1);
    uint32_t turned = col % s.head_stride - s.rope_offset;
    if (turned < a.rope_dim) {
      if (inside && lane % 2 == 0) turn_pair(a, s, y, row, col, value, other);
      return;
    }
  }
  if (inside) store_f32(y, value);
}

// The set of columns of a segment's block.
DEVICE uint32_t set_of(uint32_t block, uint32_t turns) { return turns == 1 ? block : block / turns; }

constexpr uint32_t FEW = 4;
// Up to N rows of x times the block's rows of weights. N: MOST through rings, else ROWS. Through rings the rows are a.turns equal shares, and a block of
// a launch with fewer blocks than sets of columns has several sets, one after the other; of one run a wave it makes x once.
template <class W, bool ROUTER, uint32_t MOST> DEVICE void multiply_tiles(const step_gemv_args& a, const Lds& lds) {
  using namespace wave_product;
  constexpr bool RINGS = by_rings<bf16, W, false>;
  constexpr uint32_t N = RINGS ? MOST : ROWS;
  constexpr bool SEVERAL = !ROUTER && N > FEW;
  constexpr uint32_t WINDOW = ROUTER && N > 8 ? 6 : 4;  // rows of x under way
  Place place = place_of<bf16>(a, product_block<ROUTER>(a, block_x()));
  uint32_t k = opaque(a.k), all = opaque(a.rows), turns = RINGS ? opaque(a.turns) : (all + N - 1) / N, set = set_of(place.block, turns);
  uint32_t each = !RINGS ? N : turns == 1 ? all : (all + turns - 1) / turns, first_row = (place.block - set * turns) * each;
  bool wide = a.wide;
  Segment s = segment_at(a, place);
  uint32_t span = s.epilogue == SILU ? TILE_COLS / 2 : TILE_COLS, matrix = s.batch * (s.epilogue == SILU ? 2 * s.n : s.n);
  Weights w = {k, k, 0, 1, wide};
  auto at = [&](uint32_t) { return Matrix{s.codes, s.scales}; };
  auto row_of_w = [&](uint32_t i) {
    uint32_t col = (wide ? set : set * WAVES + tile_group()) * span + i % span;
    return matrix + (col < s.n ? col : s.n - 1u) + (i < span ? 0u : s.n);
  };
  uint32_t rows = all - first_row < each ? all - first_row : each;
  const bf16* from = (const bf16*)a.x + s.batch * a.x_batch_stride + (uint64_t)first_row * a.x_stride;
  auto row_of_x = [&](uint32_t, uint32_t r) { return from + (uint64_t)r * a.x_stride; };
  Operand o = {(const bf16*)a.norm, a.eps, nullptr};
  uint32_t stored = set;
  auto store = [&](uint32_t wave, uint32_t, uint32_t r, float sum) {
    Place again = place_of<bf16>(a, product_block<ROUTER>(a, opaque(block_x())));  // once more, so that it takes no registers while the weights do
    store_sum<TILE_COLS>(a, segment_at(a, again), wide ? stored : stored * WAVES + wave, first_row + r, sum);
  };
#if defined(TILE_MMA)
  if constexpr (RINGS) {
    wave_rows::Lds part = wave_rows::rings_of<W, N>((uint8_t*)lds.x);
    wave_rows::Walk<W, N> walk;
    wave_rows::begin(walk, w, part, {s.codes, s.scales}, row_of_w);
    stored::x_is_there(a);
    auto outputs = [&] { wave_rows::for_outputs<W, N, true>(w, part, rows, o, store); };
    if constexpr (!SEVERAL) {
      wave_rows::product<WINDOW, true>(walk, w, part, rows, row_of_x, o, false, [] {});
      outputs();
      return;
    }
    uint32_t of_set = wide ? span : span * WAVES, sets = (s.n + of_set - 1) / of_set, further = set_of(blocks_of<bf16>(a, s.index), turns);
    bool more = true;
    ROLLED
    for (bool kept = false; more; kept = turns_in(w) == 1u) {
      stored = set;
      set += further;
      more = set < sets;
      wave_rows::product<WINDOW, true>(walk, w, part, rows, row_of_x, o, kept, [&] {
        if (more) wave_rows::begin(walk, w, part, {s.codes, s.scales}, row_of_w);
      });
      outputs();
      if (more) block_sync();
    }
    return;
  }
#endif
  wave_product::Lds part = {lds.x, lds.x_scale, nullptr, lds.sums, lds.partial};
  Walk<W> walk;
  begin(walk, w, at, row_of_w);
  stored::x_is_there(a);
  product(walk, w, at, part, rows, row_of_x, o);
  for_outputs(w, part, rows, o, store);
}

#if defined(TILE_MMA)
// One row of x times the block's rows of weights. T: tiles of 16 rows a wave; 1: wide.
template <class W, bool ROUTER, uint32_t T> DEVICE void multiply_one(const step_gemv_args& a, const wave_one::Lds& lds) {
  using namespace wave_product;
  bool wide = T == 1 || a.wide;
  Segment s = segment_at(a, place_of<bf16>(a, product_block<ROUTER>(a, block_x())));
  constexpr uint32_t WIDTH = wave_one::TILE_ROWS<T>;
  uint32_t span = s.epilogue == SILU ? WIDTH / 2 : WIDTH;
  uint32_t first = (wide ? s.block : s.block * WAVES + tile_group()) * span;
  uint32_t before = a.x_batch_stride ? s.batch * s.n : 0u, last = s.n - 1u, up = s.n;
  Weights w = {a.k, a.k, 0, 1, wide};
  auto at = [&](uint32_t) { return Matrix{s.codes, s.scales}; };
  wave_one::Walk<W, T> walk;
  wave_one::begin(walk, w, lds, at, [&](uint32_t i) {
    uint32_t col = first + (i < span ? i : i - span);
    return before + (col < last ? col : last) + (i < span ? 0u : up);
  });
  if (a.norm && 8 * thread_id() < a.k) ask_line((const bf16*)a.norm + 8 * thread_id());  // what the first runs need
  stored::x_is_there(a);
  const bf16* x = (const bf16*)a.x + s.batch * a.x_batch_stride;
  Operand o = {(const bf16*)a.norm, a.eps, nullptr};
  wave_one::product(walk, w, at, lds, [&](uint32_t) { return x; }, o);
  wave_one::for_outputs<T>(w, lds, o, [&](uint32_t wave, uint32_t, uint32_t row, float sum) {
    store_sum<WIDTH>(a, s, wide ? s.block : s.block * WAVES + wave, row, sum);
  });
}
#endif

template <class T, class W> DEVICE void multiply_scalar(const step_gemv_args& a, const Segment& s, const Lds& lds) {
  if constexpr (!W::SCALED && sizeof(T) == 4) {
    if (!gemv::rows_aligned<W>(s.codes, a.k)) {
      multiply_pairs<T, W, false>(a, s, lds);
      return;
    }
  }
  multiply_pairs<T, W, true>(a, s, lds);
}

// A packed row between the devices of a pair, words [rows, row_bytes / 4]: the owner posts what it has stored, the peer stores what it receives. One set
// of words is enough: the owner posts a layer's rows after the sum exchange of the layer before, which the peer takes part in after its rows have come.
DEVICE void post_row(const step_rows_args& p, uint32_t r, const uint8_t* row) {
  uint32_t words = p.row_bytes / 4, number = mailbox::mail_number_of(p.mail_counter, p.mail_per_step, p.mail_index);
  uint64_t* outbox = (uint64_t*)p.outbox + (uint64_t)r * words;
  for (uint32_t i = thread_id(); i < words; i += gemv::THREADS) mailbox::post(outbox + i, number, ((const uint32_t*)row)[i]);
}
DEVICE void receive_row(const step_rows_args& p, uint32_t r, uint8_t* row) {
  uint32_t words = p.row_bytes / 4, number = mailbox::mail_number_of(p.mail_counter, p.mail_per_step, p.mail_index), word;
  const uint64_t* inbox = (const uint64_t*)p.inbox + (uint64_t)r * words;
  for (uint32_t i = thread_id(); i < words; i += gemv::THREADS) {
    if (mailbox::receive(inbox + i, number, p.mail_budget, p.mail_error, &word)) ((uint32_t*)row)[i] = word;
  }
}

// Part ROWS for query row r: the history row, then the index key, each finished in LDS and stored from there. With an inbox the row comes from there.
template <class T> DEVICE void finish_rows(const step_gemv_args& a, uint32_t r, const Lds& lds) {
  const step_rows_args& p = a.part_rows;
  int32_t position = ((const int32_t*)a.positions)[r];
  uint64_t ref = ((const uint64_t*)p.refs)[r];
  const float* inv_freq = (const float*)a.inv_freq;
  T* done = (T*)lds.x;
  uint32_t pair = thread_id();
  float sine = 0, cosine = 1;
  if (pair < a.rope_dim / 2) rope_angle<T>((float)(position < 0 ? 0 : position) * inv_freq[pair], &sine, &cosine);
  if (ref != 0 && p.inbox) {
    receive_row(p, r, row_pointer<uint8_t>(ref, p.offsets, p.row_bytes));
  } else if (ref != 0) {
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
    if (p.outbox) post_row(p, r, target);
  }
  if (!p.key || position < 0 || !share::holds((uint32_t)position, p.key_extent_rows, p.key_side, p.key_sides)) return;
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
  append_values<256>(to, (const T*)done, (const uint64_t*)p.key_tables + (uint64_t)session * p.key_table_stride,
                     share::row_of((uint32_t)position, p.key_extent_rows, p.key_sides));
}

// ONE: the bias is on its way to LDS behind the weights; to be called before any is waited for.
static_assert(ROUTER_SPAN + routing::EXPERTS_MAX / 4 <= X_UNITS, "weights and bias in the LDS of x");
DEVICE float* bias_in(const Lds& lds) { return (float*)(lds.x + ROUTER_SPAN); }
DEVICE void ask_bias(const step_router_args& p, const Lds& lds) {
#if defined(TILE_MMA)
  if (thread_id() < p.experts) copy4_async(bias_in(lds) + thread_id(), in_global((const float*)p.bias) + thread_id());
#else
  (void)p, (void)lds;
#endif
}

// Part ROUTER, by every block of segment 0 when its logits are stored: the last one to come picks the experts of all rows, of ONE as a block.
static_assert(gemv::THREADS / 32 * routing::SCRATCH_WORDS * 4 <= X_UNITS * 16, "the picks of all waves work in the LDS of x");
static_assert(routing::SCRATCH_WORDS * 4 <= ROUTER_SPAN * 16, "beside the bias");
template <class T, bool ONE, bool HELD> DEVICE void route_last(const step_gemv_args& a, const Segment& s, const Lds& lds) {
  const step_router_args& p = a.part_router;
  uint32_t* words = (uint32_t*)lds.x;
  fence_device();
  block_sync();
  if (thread_id() == 0) words[0] = global_add((uint32_t*)p.arrivals, 1u);
  if (HELD) store_held_h(a, s, lds);
  block_sync();
  if (words[0] + 1u != blocks_of<T>(a, 0)) return;
  fence_device();
  if (thread_id() == 0) *(uint32_t*)p.arrivals = 0;
  void* bias = ONE ? bias_in(lds) : p.bias;
  router_args router = {s.y, bias, p.ids, p.weights, p.experts, p.k, p.n_group, p.topk_group, p.normalise, p.scaling};
  block_sync();  // words[0]
  if (ONE) {
    routing::pick<gemv::THREADS>(router, 0, routing::scratch_in(words));
    return;
  }
  words += tile_group() * routing::SCRATCH_WORDS;
  for (uint32_t row = tile_group(); row < a.rows; row += gemv::THREADS / 32) {
    wave_sync();
    routing::pick<32>(router, row, routing::scratch_in(words));
  }
}

template <class T> DEVICE void run_part(const step_gemv_args& a, const Lds& lds) {
  bool rehearses = a.part == PART_ROWS && block_x() >= a.rows;
  if (a.part == PART_GIVE || rehearses) return hotcache::give_part(a.part_give, block_x(), !rehearses, (hotcache::give_work*)lds.x);
  if (a.part == PART_FETCH) return history_rows::fetch_part(a.part_fetch, block_x(), a.part_blocks, a.rounds, (uint32_t*)lds.x);
  previous_done();
  if (a.part == PART_ROWS) finish_rows<T>(a, block_x(), lds);
  else hotcache::place_part(a.part_place, block_x());
}
static_assert(sizeof(hotcache::give_work) <= X_UNITS * 16, "GIVE works in the LDS of x");

// ONE: a.rows is 1. MOST: of multiply_tiles.
template <class T, class W, bool ROUTER, bool ONE = false, uint32_t MOST = 8> DEVICE void run(const step_gemv_args& a) {
  constexpr bool TILES = sizeof(T) == 2, RINGS = by_rings<T, W, ONE>, SMALL = by_one<T, W, ONE>, LITTLE = SMALL || RINGS;
  SHARED(words16, x_memory, (RINGS ? 1 : X_UNITS));
  SHARED(float, x_scale, (LITTLE ? wave_product::WAVES * wave_product::RUN : TILES ? wave_product::SIDE : 1));
  SHARED(float, sums, (LITTLE ? wave_product::WAVES * wave_product::COLS : TILES ? wave_product::SUMS : 1));
  SHARED(float, partial, PARTIALS);
  SHARED(float, scale, 1);
  words16* x = x_memory;
#if defined(TILE_MMA)
  if constexpr (RINGS) x = (words16*)lds_bytes();
#endif
  Lds lds = {x, x_scale, sums, partial, scale};
  if (!ROUTER && a.part == PART_GIVE && block_x() < a.part_blocks) {
    hotcache::lists_begin(a.part_give, block_x());
    if (TILES) stored::begin(a);
  }
  next_may_begin();
  if constexpr (!ROUTER) {
    if (block_x() < a.part_blocks) {
      run_part<T>(a, lds);
      return;
    }
  }
  if constexpr (TILES) {
    if (!ROUTER || block_x() >= blocks_of<T>(a, 0)) {
#if defined(TILE_MMA)
      if constexpr (SMALL) {
        SHARED(words16, planes, wave_one::X_UNITS);
        SHARED(uint64_t, scales, wave_product::WAVES * wave_product::COLS);
        wave_one::Lds part = {x, scales, planes, x_scale, nullptr, sums, partial};
        if (a.narrow) multiply_one<W, ROUTER, 1>(a, part);
        else multiply_one<W, ROUTER, 2>(a, part);
        if (!ROUTER) stored::end(a);
        return;
      }
#endif
      multiply_tiles<W, ROUTER, MOST>(a, lds);
      if (!ROUTER) stored::end(a);
      return;
    }
  }
  Segment s = segment_at(a, place_of<T>(a, product_block<ROUTER>(a, block_x())));
  if constexpr (SMALL && ROUTER) ask_bias(a.part_router, lds);
  if constexpr (TILES) multiply_router<SMALL, RINGS>(a, s, lds);
  else if (ROUTER && s.index == 0) multiply_scalar<T, f32_weights>(a, s, lds);
  else multiply_scalar<T, W>(a, s, lds);
  if (ROUTER && s.index == 0) route_last<T, SMALL, RINGS>(a, s, lds);
}

}  // namespace step

// Grid: part_blocks + batch * blocks of all segments. A block has cols rows of weights where the product is wide (k >= long_k), else cols_short, and
// one row of x if T is f32, `rows` if it is bf16. The router's segment 0: router_cols, router_cols_short and one row of x.
// LAUNCH step_gemv_f32_f32 block=256 cols=16 cols_short=128 long_k=1024 x_bytes=32768
EARLY_KERNEL(step_gemv_f32_f32, step_gemv_args, 256, 2) { step::run<float, f32_weights, false>(a); }
// LAUNCH step_gemv_f32_bf16 block=256 cols=16 cols_short=128 long_k=1024 x_bytes=32768
EARLY_KERNEL(step_gemv_f32_bf16, step_gemv_args, 256, 2) { step::run<float, bf16_weights, false>(a); }
// LAUNCH step_gemv_f32_q8g64 block=256 cols=16 cols_short=128 long_k=1024 x_bytes=32768
EARLY_KERNEL(step_gemv_f32_q8g64, step_gemv_args, 256, 2) { step::run<float, q8g64_weights, false>(a); }
// LAUNCH step_gemv_bf16_bf16 block=256 cols=32 cols_short=256 long_k=1024 x_bytes=32768 rows=8
EARLY_KERNEL(step_gemv_bf16_bf16, step_gemv_args, 256, 2) { step::run<bf16, bf16_weights, false>(a); }
// LAUNCH step_gemv_bf16_q8g64 block=256 cols=32 cols_short=256 long_k=1024 x_bytes=32768 rows=8
LDS_KERNEL(step_gemv_bf16_q8g64, step_gemv_args, 256, 2, step::ROWS_LDS) { step::run<bf16, q8g64_weights, false>(a); }
// LAUNCH step_gemv_router_f32_f32 block=256 cols=16 cols_short=128 long_k=1024 router_cols=16 router_cols_short=128 x_bytes=32768
EARLY_KERNEL(step_gemv_router_f32_f32, step_gemv_args, 256, 2) { step::run<float, f32_weights, true>(a); }
// LAUNCH step_gemv_router_f32_bf16 block=256 cols=16 cols_short=128 long_k=1024 router_cols=16 router_cols_short=128 x_bytes=32768
EARLY_KERNEL(step_gemv_router_f32_bf16, step_gemv_args, 256, 2) { step::run<float, bf16_weights, true>(a); }
// LAUNCH step_gemv_router_f32_q8g64 block=256 cols=16 cols_short=128 long_k=1024 router_cols=16 router_cols_short=128 x_bytes=32768
EARLY_KERNEL(step_gemv_router_f32_q8g64, step_gemv_args, 256, 2) { step::run<float, q8g64_weights, true>(a); }
// LAUNCH step_gemv_router_bf16_bf16 block=256 cols=32 cols_short=256 long_k=1024 router_cols=2 x_bytes=32768 rows=8
EARLY_KERNEL(step_gemv_router_bf16_bf16, step_gemv_args, 256, 2) { step::run<bf16, bf16_weights, true>(a); }
// LAUNCH step_gemv_router_bf16_q8g64 block=256 cols=32 cols_short=256 long_k=1024 router_cols=2 x_bytes=32768 rows=8
LDS_KERNEL(step_gemv_router_bf16_q8g64, step_gemv_args, 256, 2, step::ROWS_LDS) { step::run<bf16, q8g64_weights, true>(a); }
// Of more rows, on sm_90: the same bits.
// LAUNCH step_gemv_many_bf16_q8g64 block=256 cols=32 cols_short=256 long_k=1024 x_bytes=32768 rows=12
LDS_KERNEL(step_gemv_many_bf16_q8g64, step_gemv_args, 256, 2, step::MANY_LDS) { step::run<bf16, q8g64_weights, false, false, 12>(a); }
// LAUNCH step_gemv_few_bf16_q8g64 block=256 cols=32 cols_short=256 long_k=1024 x_bytes=32768 rows=4
LDS_KERNEL(step_gemv_few_bf16_q8g64, step_gemv_args, 256, 3, step::FEW_LDS) { step::run<bf16, q8g64_weights, false, false, 4>(a); }
// LAUNCH step_gemv_router_many_bf16_q8g64 block=256 cols=32 cols_short=256 long_k=1024 router_cols=2 x_bytes=32768 rows=12
LDS_KERNEL(step_gemv_router_many_bf16_q8g64, step_gemv_args, 256, 2, step::MANY_LDS) { step::run<bf16, q8g64_weights, true, false, 12>(a); }
// Of one row of x: the same bits. a.narrow: half of cols a block.
// LAUNCH step_gemv_one_bf16_q8g64 block=256 cols=32 cols_short=256 long_k=1024 x_bytes=32768 rows=1
EARLY_KERNEL(step_gemv_one_bf16_q8g64, step_gemv_args, 256, 3) { step::run<bf16, q8g64_weights, false, true>(a); }
// LAUNCH step_gemv_router_one_bf16_q8g64 block=256 cols=32 cols_short=256 long_k=1024 router_cols=2 x_bytes=32768 rows=1
EARLY_KERNEL(step_gemv_router_one_bf16_q8g64, step_gemv_args, 256, 3) { step::run<bf16, q8g64_weights, true, true>(a); }
