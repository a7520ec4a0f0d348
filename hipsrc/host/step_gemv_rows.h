// step_gemv_rows.h - step_gemv_* of the fast host build: step.hip's products with their norm, epilogues and parts. f32 x goes over step_products.h,
// bf16 x over wave_products.h, the router's logits of bf16 x over step_router_rows.h.
#pragma once

namespace {
namespace host {
namespace step_gemv {

using products::packed_floats;
using step::Segment;
constexpr uint32_t PAIR_COLUMNS = step::COLS_SHORT, TILE_COLUMNS = step::TILE_COLS_SHORT;  // at most, of a block
constexpr uint32_t NONE = ~0u;

// What the blocks of one call share: x of one batch as the products read it. f32: packed for the format that was needed last.
struct Work {
  float* x;       // [rows, x_pitch]: f32 after the norm; bf16: of the wave product
  float* packed;  // [rows, packed_pitch]: f32 x, of RESIDUAL each half by itself, or the router's
  float* scale;   // [rows], bf16: what the norm multiplies sums by
  float* sums;    // [PAIR_COLUMNS, rows], of RESIDUAL two of these, or [rows, TILE_COLUMNS]
  float* angles;  // [rows, rope_dim] sine and cosine of each pair, when they were needed
  size_t x_pitch, packed_pitch;
  uint32_t batch, packed_format;  // NONE: of none
  bool angles_known;
};

// Blocks of one set of columns, which follow one another: each has some rows of x.
struct Stretch {
  uint32_t set, first_row, rows;
};

template <class T> DEVICE const T* row_of_x(const step_gemv_args& a, uint32_t batch, uint32_t r) {
  return (const T*)a.x + batch * a.x_batch_stride + (uint64_t)r * a.x_stride;
}

// Rows of x of one batch; T = bf16: for weights W by the wave product.
template <class T, class W> void prepare(const step_gemv_args& a, uint32_t batch, Work& w) {
  if (w.batch == batch) return;
  w.batch = batch;
  w.packed_format = NONE;
  for (uint32_t r = 0; r < a.rows; r++) {
    const T* x = row_of_x<T>(a, batch, r);
    float* to = w.x + r * w.x_pitch;
    if constexpr (sizeof(T) == 2) {
      waves::prepare<W>(x, (const bf16*)a.norm, 1.0f, a.k, to);
      if (a.norm) w.scale[r] = waves::norm_scale(x, a.k, a.eps, a.wide);
    } else if (a.norm) {
      values::scale_row(x, (const T*)a.norm, values::rms_scale(x, a.k, a.eps), a.k, to);
    } else {
      memcpy(to, x, a.k * sizeof(float));
    }
  }
}

// As step::turn_pair.
template <class T>
DEVICE bool turn_pair(const step_gemv_args& a, const Segment& s, Work& w, T* y, uint32_t row, uint32_t col, float low, float high) {
  uint32_t inside = col % s.head_stride - s.rope_offset;
  if (inside >= a.rope_dim) return false;
  for (uint32_t r = 0; !w.angles_known && r < a.rows; r++) {
    int32_t position = ((const int32_t*)a.positions)[r];
    float* to = w.angles + (size_t)r * a.rope_dim;
    for (uint32_t i = 0; i < a.rope_dim; i += 2) {
      rope_angle<T>((float)(position < 0 ? 0 : position) * ((const float*)a.inv_freq)[i / 2], to + i, to + i + 1);
    }
  }
  w.angles_known = true;
  const float* angle = w.angles + (size_t)row * a.rope_dim + inside / 2 * 2;
  rope_store(y, low, high, angle[0], angle[1]);
  return true;
}

// Stores the normed rows of f32 x of a stretch, which the first blocks of segment 0 do.
DEVICE void store_h(const step_gemv_args& a, const Stretch& t, const Work& w) {
  for (uint32_t r = t.first_row; r < t.first_row + t.rows; r++) memcpy((float*)a.h + (uint64_t)r * a.k, w.x + r * w.x_pitch, a.k * sizeof(float));
}

// Pairs of rows of weights by gemv.h, times the rows of f32 x of a stretch.
template <class W> void multiply_pairs(const step_gemv_args& a, const Segment& s, const Stretch& t, Work& w) {
  using R = products::reader<W>;
  prepare<float, W>(a, s.batch, w);
  if (a.norm && a.h && s.index == 0 && t.set == 0) store_h(a, t, w);
  bool silu = s.epilogue == step::SILU, halves = s.epilogue == step::RESIDUAL, wide = a.wide;
  waves::Span span[2] = {halves ? waves::half_of(a.k, 0) : waves::all_of(a.k), waves::half_of(a.k, 1)};
  uint32_t spans = halves && span[1].first < a.k ? 2 : 1;
  size_t second = packed_floats(span[0].end);  // of a packed row, where its second half starts
  for (uint32_t r = 0; w.packed_format != W::FORMAT && r < a.rows; r++) {
    for (uint32_t i = 0; i < spans; i++) {
      products::pack<R>(w.x + r * w.x_pitch + span[i].first, span[i].end - span[i].first, wide, w.packed + r * w.packed_pitch + i * second);
    }
  }
  w.packed_format = W::FORMAT;
  uint32_t pairs = step::pairs_of(s.n, s.epilogue), begin = t.set * gemv::groups_of(wide), end = begin + gemv::groups_of(wide);
  if (end > pairs) end = pairs;
  uint64_t matrix = (uint64_t)s.batch * (silu ? 2 * s.n : s.n);
  size_t products = (size_t)2 * (end - begin) * t.rows;
  for (uint32_t i = 0; i < spans; i++) {
    auto row = [&](uint32_t p) {
      uint32_t pair = begin + p / 2, n = silu ? pair + p % 2 * s.n : 2 * pair + p % 2;
      if (!silu && n >= s.n) n = s.n - 1;
      return products::weight_row<W>(s.codes, s.scales, matrix + n, a.k, span[i].first);
    };
    const float* x = w.packed + t.first_row * w.packed_pitch + i * second;
    products::all_dots<R>(row, 2 * (end - begin), x, w.packed_pitch, t.rows, span[i].end - span[i].first, wide, w.sums + i * products);
  }
  for (size_t p = 0; spans == 2 && p < products; p++) w.sums[p] += w.sums[products + p];
  for (uint32_t r = 0; r < t.rows; r++) {
    for (uint32_t p = begin; p < end; p++) {
      const float* sums = w.sums + (size_t)(p - begin) * 2 * t.rows + r;
      uint32_t at_row = t.first_row + r, col = silu ? p : 2 * p;
      if (s.epilogue == step::ROPE) {
        float* y = (float*)s.y + step::output_at(a, s, at_row, col);
        if (turn_pair(a, s, w, y, at_row, col, sums[0], sums[t.rows])) continue;
      }
      step::store_pair<float>(a, s, at_row, col, sums[0], sums[t.rows]);
    }
  }
}

// As step::store_sum does: columns [first, first + count) of one row; for SILU sums[2 * i] is of gate and sums[2 * i + 1] of up. Rounds the sums.
DEVICE void store_row(const step_gemv_args& a, const Segment& s, Work& w, uint32_t row, uint32_t first, uint32_t count, float* sums) {
  uint64_t at = step::output_at(a, s, row, first);
  if (s.epilogue == step::STORE_F32) {
    memcpy((float*)s.y + at, sums, count * sizeof(float));
    return;
  }
  bf16* y = (bf16*)s.y + at;
  bool silu = s.epilogue == step::SILU;
  for (uint32_t i = 0; i < (silu ? 2 * count : count); i += LANES) store8(sums + i, rounded8<bf16>(load8(sums + i)));
  if (silu) {
    for (uint32_t c = 0; c < count; c++) store_f32(y + c, rounded<bf16>::of(silu_f32(sums[2 * c])) * sums[2 * c + 1]);
    return;
  }
  for (uint32_t c = 0; c < count; c++) {
    if (s.epilogue == step::ROPE && turn_pair(a, s, w, y + c, row, first + c, sums[c], sums[c + 1])) {
      c++;
      continue;
    }
    store_f32(y + c, sums[c]);
  }
}

// A set of columns by the wave product, times the rows of x of a stretch.
template <class W> void multiply_tiles(const step_gemv_args& a, const Segment& s, const Stretch& t, Work& w) {
  prepare<bf16, W>(a, s.batch, w);
  bool silu = s.epilogue == step::SILU, wide = a.wide;
  uint32_t columns = (wide ? step::TILE_COLS : step::TILE_COLS_SHORT) / (silu ? 2 : 1), first = t.set * columns;
  uint32_t count = s.n - first < columns ? s.n - first : columns, products = silu ? 2 * count : count;
  uint64_t matrix = (uint64_t)s.batch * (silu ? 2 * s.n : s.n) + first;
  auto row = [&](uint32_t i) { return waves::weight_row<W>(s.codes, s.scales, matrix + (silu ? i / 2 + i % 2 * s.n : i), a.k); };
  waves::dots<W>(row, products, w.x + t.first_row * w.x_pitch, t.rows, a.k, wide, false, w.sums, TILE_COLUMNS);
  for (uint32_t r = 0; r < t.rows; r++) {
    float* sums = w.sums + (size_t)r * TILE_COLUMNS;
    for (uint32_t i = 0; a.norm && i < products; i += LANES) store8(sums + i, load8(sums + i) * all_lanes(w.scale[t.first_row + r]));
    store_row(a, s, w, t.first_row + r, first, count, sums);
  }
}

// step::multiply_router for blocks [first, last) of segment 0, and their share of h.
DEVICE void multiply_router(const step_gemv_args& a, const Segment& s, uint32_t first, uint32_t last, Work& w) {
  uint32_t blocks = (s.n + step::ROUTER_COLS - 1) / step::ROUTER_COLS, end = last * step::ROUTER_COLS < s.n ? last * step::ROUTER_COLS : s.n;
  uint32_t share = (a.k + blocks - 1) / blocks, from = first * share, to = last * share < a.k ? last * share : a.k;  // of h
  for (uint32_t r = 0; r < a.rows; r++) {
    const bf16* x = row_of_x<bf16>(a, 0, r);
    w.sums[r] = step_router::prepare(x, (const bf16*)a.norm, a.k, a.eps, w.packed + a.rows * w.packed_pitch, w.packed + r * w.packed_pitch);
    if (a.h && from < to) values::scale_row(x + from, (const bf16*)a.norm + from, w.sums[r], to - from, (bf16*)a.h + (uint64_t)r * a.k + from);
  }
  for (uint32_t column = first * step::ROUTER_COLS; column < end; column++) {
    const float* weights = (const float*)s.codes + (uint64_t)column * a.k;
    for (uint32_t r = 0; r < a.rows; r++) {
      ((float*)s.y)[(uint64_t)r * s.y_stride + column] = step_router::dot(w.packed + r * w.packed_pitch, weights, a.k) * w.sums[r];
    }
  }
}

// step::post_row.
DEVICE void post_row(const step_rows_args& p, uint32_t r, const uint8_t* row) {
  uint32_t words = p.row_bytes / 4, number = mailbox::mail_number_of(p.mail_counter, p.mail_per_step, p.mail_index);
  uint64_t* outbox = (uint64_t*)p.outbox + (uint64_t)r * words;
  for (uint32_t i = 0; i < words; i++) mailbox::post(outbox + i, number, ((const uint32_t*)row)[i]);
}

// step::finish_rows for query row r, which waits for no mail; false after a failed touch.
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
    if (p.outbox) post_row(p, r, target);
  }
  if (!p.key || position < 0 || !share::holds((uint32_t)position, p.key_extent_rows, p.key_side, p.key_sides)) return true;
  values::layer_norm_row((const T*)p.key + (uint64_t)r * p.key_width, (const T*)p.key_norm, (const T*)p.key_bias, p.key_width, p.key_eps, done);
  turn(done, done);
  uint32_t bytes = p.key_width * (uint32_t)sizeof(T);
  const uint64_t* table = (const uint64_t*)p.key_tables + (uint64_t)((const int32_t*)p.sessions)[r] * p.key_table_stride;
  uint32_t place = share::row_of((uint32_t)position, p.key_extent_rows, p.key_sides);
  uint8_t* target = stores::key_row(b, table, p.key_plane, p.key_extent_rows, bytes, place, bytes);
  if (!target) return false;
  memcpy(target, done, bytes);
  return true;
}

// step::route_last after `count` blocks of segment 0.
template <class T> void route_last(const step_gemv_args& a, uint32_t count) {
  const step_router_args& p = a.part_router;
  if (__atomic_fetch_add((uint32_t*)p.arrivals, count, __ATOMIC_ACQ_REL) + count != step::blocks_of<T>(a, 0)) return;
  *(uint32_t*)p.arrivals = 0;
  router_args router = {a.y[0], p.bias, p.ids, p.weights, p.experts, p.k, p.n_group, p.topk_group, p.normalise, p.scaling};
  for (uint32_t row = 0; row < a.rows; row++) selections::pick(router, row);
}

// Product blocks [first, last).
template <class T, class W, bool ROUTER> void run_products(const step_gemv_args& a, uint32_t first, uint32_t last, Work& w) {
  constexpr bool TILES = sizeof(T) == 2;
  uint32_t routed = 0;
  for (uint32_t block = first, taken; block < last; block += taken) {
    step::Place place = step::place_of<T>(a, block);
    Segment s = step::segment_at(a, place);
    bool router = ROUTER && s.index == 0;
    uint32_t turns = router && TILES ? step::blocks_of<T>(a, 0) : TILES ? (a.rows + wave_product::ROWS - 1) / wave_product::ROWS : a.rows, turn = place.block % turns;
    taken = turns - turn < last - block ? turns - turn : last - block;
    if (router) routed += taken;
    if (router && TILES) {
      multiply_router(a, s, turn, turn + taken, w);
      continue;
    }
    uint32_t rows = TILES ? wave_product::ROWS : 1;
    Stretch t = {place.block / turns, turn * rows, taken * rows};
    if (t.rows > a.rows - t.first_row) t.rows = a.rows - t.first_row;
    if constexpr (TILES) multiply_tiles<W>(a, s, t, w);
    else if (router) multiply_pairs<f32_weights>(a, s, t, w);
    else multiply_pairs<W>(a, s, t, w);
  }
  if (routed) route_last<T>(a, routed);
}

// hotcache::place_part for query row r.
inline void place_row(const step_place_args& a, uint32_t r) {
  const int32_t* selected = (const int32_t*)a.selected + (uint64_t)r * a.k;
  const uint64_t* table = (const uint64_t*)a.tables + (uint64_t)((const int32_t*)a.sessions)[r] * a.table_stride;
  uint64_t* plan = (uint64_t*)a.plan + (uint64_t)r * a.k;
  uint32_t count = (uint32_t)((const int32_t*)a.counts)[r];
  for (uint32_t i = 0; i < a.k; i++) {
    plan[i] = i < count ? hotcache::extent_row(table, (uint32_t)selected[i], a.extent_rows, a.row_bytes) | hotcache::EXTENT : 0u;
  }
}

// Blocks [first, last) of the part.
template <class T> bool run_part(const step_gemv_args& a, uint32_t first, uint32_t last, Blocks& b) {
  if (a.part == step::PART_GIVE) return b.run_fibers(first, last);
  for (uint32_t block = first; block < last; block++) {
    if (a.part == step::PART_PLACE) place_row(a.part_place, block);
    if (a.part == step::PART_ROWS && !finish_row<T>(a, block, b)) return false;
    for (uint32_t round = 0; a.part == step::PART_FETCH && round < a.rounds; round++) {
      if (!fetches::fetch_round(a.part_fetch, round, block, a.part_blocks, b)) return false;
    }
  }
  return true;
}

// Grid: part_blocks + batch * blocks of all segments; the router's kernels have no part blocks.
template <class T, class W, bool ROUTER> bool run(const step_gemv_args& a, Blocks& b) {
  uint32_t first = (uint32_t)b.first, last = (uint32_t)b.last, parts = ROUTER ? 0 : a.part_blocks;
  if (first < parts) {
    uint32_t end = last < parts ? last : parts;
    if (!run_part<T>(a, first, end, b)) return false;
    first = end;
  }
  if (first >= last) return true;
  constexpr bool TILES = sizeof(T) == 2;
  bool halves = a.epilogue[0] == step::RESIDUAL;
  size_t x_pitch = TILES ? waves::row_floats(a.k) : a.k, packed_pitch = TILES ? (ROUTER ? step_router::row_floats(a.k) : 0) : packed_floats(a.k);
  if (!TILES && halves) packed_pitch = 2 * packed_floats(waves::half_of(a.k, 0).end);
  size_t columns = TILES ? TILE_COLUMNS : halves ? 2 * PAIR_COLUMNS : PAIR_COLUMNS, rows = a.rows, spare = TILES && ROUTER ? a.k : 0;
  float* room = b.scratch(rows * (x_pitch + packed_pitch + 1 + columns + a.rope_dim) + spare + 2 * LANES);
  if (!room) return false;
  float *packed = room + rows * x_pitch, *scale = packed + rows * packed_pitch + spare, *sums = scale + rows + LANES;
  Work w = {room, packed, scale, sums, sums + rows * columns + LANES, x_pitch, packed_pitch, NONE, NONE, false};
  run_products<T, W, ROUTER>(a, first - parts, last - parts, w);
  return true;
}

}  // namespace step_gemv

#define FAST_STEP_GEMV(suffix, T, W)                                                        \
  FAST_KERNEL(step_gemv_##suffix, step_gemv_args, step_gemv::run<T, W, false>);             \
  FAST_KERNEL(step_gemv_router_##suffix, step_gemv_args, step_gemv::run<T, W, true>);

FAST_STEP_GEMV(f32_f32, float, f32_weights)
FAST_STEP_GEMV(f32_bf16, float, bf16_weights)
FAST_STEP_GEMV(f32_q8g64, float, q8g64_weights)
FAST_STEP_GEMV(bf16_bf16, bf16, bf16_weights)
FAST_STEP_GEMV(bf16_q8g64, bf16, q8g64_weights)
FAST_STEP_GEMV(one_bf16_q8g64, bf16, q8g64_weights)

}  // namespace host
}  // namespace
