// step_experts.hip - the routed experts of a decode step (docs/decisions/0004-step-graph.md).
//   step_experts  act[pair] = T(T(silu(gate)) * up), gate and up = T(x[row] @ w[expert]^T)
//   step_down     y = T(residual + sum over slots of (weight * act) @ down[expert]^T + shared_act @ shared_down^T); no residual: the f32 sum alone
// step_down adds routed and shared sums, in f32, of each half of their k (Halves), then both halves; without a residual, and with a.mail, on a device
// of a pair, k is such a half; a.mail: each block adds what the other device has of its outputs (sum_mail.h).
// T = bf16: the wave product (wave_product.h); step_down takes weight * act as x, slot after slot as one long k, all of it wide.
// T = f32, for parity: chunk c (what 16 bytes of weights hold) belongs to lane c % LANES, LANES = 32 for k >= 1024 and in step_down, else 4; a lane adds
// its elements in ascending order by one chain of fma (q8g64: a chain over the chunk from 0, then fma(chunk sum, scale, lane sum); q4g64 likewise, from
// the chunk's start, see word_reader); then a butterfly over the lanes. Nothing of either order depends on the rows beside.
#include "portable.h"
#include "fetch.h"
#include "gemv.h"
#include "sum_mail.h"
#include "wave_rows.h"

namespace step_moe {

using namespace wave_product;
constexpr uint32_t EXPERT_COLS = COLS / 2, DOWN_COLS = COLS;  // columns of a block of the grid
constexpr uint32_t SLOTS_MAX = 16;

DEVICE uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

// Values [.., k) of the rows, `pitch` values apart, of a matrix.
template <class W> struct Rows {
  const uint8_t* codes;
  const uint16_t* scales;
  uint32_t k, pitch;
};
// What `of` takes of the rows from `row` on.
template <class W> DEVICE Rows<W> rows_of(const void* codes, const void* scales, uint64_t row, const Weights& of) {
  return {(const uint8_t*)codes + row * W::row_bytes(of.pitch) + W::row_bytes(of.first),
          W::SCALED ? (const uint16_t*)scales + row * (of.pitch / WEIGHT_GROUP) + of.first / WEIGHT_GROUP : nullptr, of.k, of.pitch};
}

// T = f32. A chunk of weights as floats, and what x needs before it meets them (returns where the chain of the chunk starts).
template <class W> struct word_reader {
  DEVICE void expand(const uint32_t* word, float* v) { W::expand(word, v); }
  DEVICE float prepare(float*) { return 0.0f; }
};
// q4g64: p = ((word >> s) & 0x000f000f) | 0x43004300 is, with u and v the codes in its low and high half: float(p << 16) = 128 + u; float(p) =
// 128 + v + (0x4300 + u) / 65536. The code u that hides in the second is taken out of x: with x_u' = x_u - x_v / 65536 the sum x_u' * float(p << 16)
// + x_v * float(p) is x_u * (u - 8) + x_v * (v - 8) + 136 x_u' + 136.26184.. x_v, and the last two terms, summed over the chunk with a minus sign,
// are where its chain starts.
template <> struct word_reader<q4g64_weights> {
  DEVICE void expand(const uint32_t* word, float* v) {
    UNROLL
    for (uint32_t i = 0; i < 16; i++) {
      uint32_t p = and_or(word[i / 4] >> (4 * (i % 4)), 0x000f000fu, 0x43004300u);
      v[i / 4 * 8 + i % 4] = float_of(p << 16);
      v[i / 4 * 8 + i % 4 + 4] = float_of(p);
    }
  }
  DEVICE float prepare(float* x) {
    float start = 0.0f;
    UNROLL
    for (uint32_t i = 0; i < 32; i += 8) {
      UNROLL
      for (uint32_t j = 0; j < 4; j++) {
        x[i + j] = fma_f32(x[i + j + 4], -1.52587890625e-5f, x[i + j]);  // 1 / 65536
        start = fma_f32(-136.0f, x[i + j], start);
        start = fma_f32(-136.2618408203125f, x[i + j + 4], start);  // 136 + (0x4300 + 8) / 65536
      }
    }
    return start;
  }
};

// x @ w[row]^T, the same in each of LANES lanes.
template <uint32_t LANES, class W> DEVICE float row_product(const Rows<W>& w, uint32_t row, const float* x) {
  const uint8_t* codes = w.codes + row * W::row_bytes(w.pitch);
  bool aligned = gemv::rows_aligned<W>(codes, w.pitch);
  float sum[1] = {0.0f};
  ROLLED
  for (uint32_t c = thread_id() % LANES; c * W::CHUNK < w.k; c += LANES) {
    uint32_t word[4];
    float v[W::CHUNK], value[W::CHUNK];
    if (W::SCALED || aligned) load16(codes + c * 16, word);
    else gemv::load_elements<W>(codes, w.k, c, word);
    word_reader<W>::expand(word, value);
    UNROLL
    for (uint32_t j = 0; j < W::CHUNK; j++) v[j] = W::SCALED || c * W::CHUNK + j < w.k ? x[c * W::CHUNK + j] : 0.0f;
    float part = word_reader<W>::prepare(v);
    if (!W::SCALED) part = sum[0];
    UNROLL
    for (uint32_t j = 0; j < W::CHUNK; j++) part = fma_f32(v[j], value[j], part);
    sum[0] = W::SCALED ? fma_f32(part, f16_value(w.scales[row * (w.pitch / WEIGHT_GROUP) + c * W::CHUNK / WEIGHT_GROUP]), sum[0]) : part;
  }
  lanes_sum<LANES>(sum);
  return sum[0];
}

// product(column, least(column, last), lane) for the columns of a block, by LANES lanes each; the lanes of a wave call it together.
template <uint32_t COLS, uint32_t LANES, class F> DEVICE void each_column(uint32_t last, const F& product) {
  for (uint32_t c = thread_id() / LANES; c < COLS; c += THREADS / LANES) product(c, c < last ? c : last, thread_id() % LANES);
}

template <uint32_t LANES, class W> DEVICE void experts_f32(const step_experts_args& a, uint32_t pair, uint32_t expert) {
  Rows<W> w = rows_of<W>(a.codes, a.scales, (uint64_t)expert * 2 * a.n, {a.k, a.k, 0, 1, LANES == 32});
  const float* x = (const float*)a.x + (uint64_t)(pair / a.slots) * a.k;
  uint32_t first = block_y() * EXPERT_COLS;
  each_column<EXPERT_COLS, LANES>(a.n - 1 - first, [&](uint32_t c, uint32_t row, uint32_t lane) {
    float gate = row_product<LANES>(w, first + row, x), up = row_product<LANES>(w, a.n + first + row, x);
    if (lane == 0 && c == row) ((float*)a.act)[(uint64_t)pair * a.n + first + c] = silu_f32(gate) * up;
  });
}

template <class W> DEVICE void down_f32(const Rows<W>& w, uint32_t first, uint32_t last, const float* x, float* to) {
  each_column<DOWN_COLS, 32>(last, [&](uint32_t c, uint32_t row, uint32_t lane) {
    float sum = row_product<32>(w, first + row, x);
    if (lane == 0) to[c] = sum;
  });
}

// Pairs of one expert share a block, so that its weights are read once: counted in ascending order, each turn of ROWS has the block of its first
// pair. members[]: the pairs, after block_sync; each wave finds the same. Returns how many, 0 where another pair's block does the work.
DEVICE uint32_t find_members(const step_experts_args& a, uint32_t pair, uint32_t expert, uint32_t* members) {
  constexpr uint32_t AHEAD = 4;  // loads at once
  uint32_t pairs = a.rows * a.slots, seen = 0, lane = thread_id() % 32;  // seen: before this pair, and from it on in the upper half
  ROLLED
  for (uint32_t base = 0; base < pairs; base += 32 * AHEAD) {
    uint32_t ids[AHEAD];
    UNROLL
    for (uint32_t i = 0; i < AHEAD; i++) {
      uint32_t other = base + 32 * i + lane;
      ids[i] = (uint32_t)((const int32_t*)a.ids)[least(other, pairs - 1u)];
    }
    UNROLL
    for (uint32_t i = 0; i < AHEAD; i++) {
      uint32_t other = base + 32 * i + lane, total;
      uint32_t one = other >= pairs || ids[i] != expert ? 0u : other < pair ? 1u : 0x10000u, rank = (seen + wave32_prefix(one, &total)) >> 16;
      if (one == 0x10000u && rank < ROWS) members[rank] = other;
      seen += total;
    }
  }
  return (seen & 0xffffu) % ROWS == 0 ? least(seen >> 16, ROWS) : 0u;
}

// The outputs of 16 columns from first(wave) on, gate and up side by side; sum(wave, row of the members).
template <class First, class Sum>
DEVICE void store_act(const step_experts_args& a, bool wide, const uint32_t* members, uint32_t count, const First& first, const Sum& sum) {
  for_rows(wide, count, [&](uint32_t wave, uint32_t r) {
    float value = rounded<bf16>::of(sum(wave, r)), up = shuffle_xor(value, EXPERT_COLS);
    uint32_t lane = tile_lane(), column = first(wave) + lane;
    if (lane < EXPERT_COLS && column < a.n) store_f32((bf16*)a.act + (uint64_t)members[r] * a.n + column, rounded<bf16>::of(silu_f32(value)) * up);
  });
}

template <class W> DEVICE Matrix matrix_of(const step_experts_args& a, uint32_t expert) {
  uint64_t before = (uint64_t)expert * 2 * a.n;
  return {(const uint8_t*)a.codes + before * W::row_bytes(a.k), (const uint16_t*)a.scales + (W::SCALED ? before * (a.k / WEIGHT_GROUP) : 0)};
}

// k < LONG_K: the blocks of eight times the columns are worked on by the first of them, each wave its own.
template <class W> DEVICE void experts_tiles(const step_experts_args& a, uint32_t expert, const uint32_t* members, uint32_t count, const Lds& lds) {
  Weights w = {a.k, a.k, 0, 1, a.k >= LONG_K};
  if (!w.wide && block_y() % WAVES) return;
  uint32_t last = a.n - 1;
  auto first = [&](uint32_t wave) { return (w.wide ? block_y() : block_y() + wave) * EXPERT_COLS; };
  auto at = [&](uint32_t) { return matrix_of<W>(a, expert); };
  Walk<W> walk;
  begin(walk, w, at, [&](uint32_t i) { return i / EXPERT_COLS * a.n + least(first(tile_group()) + i % EXPERT_COLS, last); });
  block_sync();  // members
  product(walk, w, at, lds, count, [&](uint32_t, uint32_t r) { return (const bf16*)a.x + (uint64_t)(members[r] / a.slots) * a.k; }, {});
  store_act(a, w.wide, members, count, first, [&](uint32_t wave, uint32_t r) { return sum_of(w, lds, wave, r, {}); });
}

// Part FETCH, in the first blocks of a grid of pairs and columns. True: this was one of them; else `pair` is that of the block.
DEVICE bool was_part(const step_experts_args& a, uint32_t* pair, uint32_t* ends) {
  uint32_t columns = (a.n + EXPERT_COLS - 1) / EXPERT_COLS, before = (a.part_blocks + columns - 1) / columns, block = block_x() * columns + block_y();
  *pair = block_x() - before;
  if (block_x() >= before) return false;
  next_may_begin();
  if (block < a.part_blocks) history_rows::fetch_part(a.part_fetch, block, a.part_blocks, a.rounds, ends);
  return true;
}

template <class T> DEVICE bool nothing_outside(const step_experts_args& a, uint32_t pair, uint32_t expert) {
  if (expert < a.experts) return false;
  uint32_t column = block_y() * EXPERT_COLS + thread_id();
  if (thread_id() < EXPERT_COLS && column < a.n) store_f32((T*)a.act + (uint64_t)pair * a.n + column, 0.0f);
  return true;
}

// Grid: pairs, ceil(n / EXPERT_COLS).
template <class T, class W> struct Experts;
template <class W> struct Experts<float, W> {
  DEVICE void run(const step_experts_args& a) {
    SHARED(uint32_t, ends, history_rows::FETCH_ROUNDS);
    uint32_t pair;
    if (was_part(a, &pair, ends)) return;
    previous_done();
    next_may_begin();
    uint32_t expert = (uint32_t)((const int32_t*)a.ids)[pair];
    if (nothing_outside<float>(a, pair, expert)) return;
    if (a.k >= gemv::LONG_K) experts_f32<32, W>(a, pair, expert);
    else experts_f32<4, W>(a, pair, expert);
  }
};
template <class W> struct Experts<bf16, W> {
  DEVICE void run(const step_experts_args& a) {
    SHARED(words16, x, WAVES * X_BYTES / 16);
    SHARED(float, x_scale, SIDE);
    SHARED(int32_t, x_sum, (W::FORMAT == WEIGHT_Q4G64 ? SIDE : 1));
    SHARED(float, sums, SUMS);
    SHARED(uint32_t, members, (ROWS > history_rows::FETCH_ROUNDS ? ROWS : history_rows::FETCH_ROUNDS));
    uint32_t pair;
    if (was_part(a, &pair, members)) return;
    previous_done();
    next_may_begin();
    uint32_t expert = (uint32_t)((const int32_t*)a.ids)[pair];
    if (nothing_outside<bf16>(a, pair, expert)) return;
    uint32_t count = 1;
    if (a.rows > 1) count = find_members(a, pair, expert, members);
    else if (thread_id() == 0) members[0] = pair;
    if (count == 0) return;
    experts_tiles<W>(a, expert, members, uniform(count), {x, x_scale, x_sum, sums, nullptr});
  }
};

#if defined(TILE_MMA)
// One row of x. k < LONG_K: as experts_tiles.
template <class W> DEVICE void experts_one(const step_experts_args& a) {
  SHARED(words16, ring, wave_one::RING_UNITS);
  SHARED(uint64_t, scales, WAVES * COLS);
  SHARED(words16, planes, wave_one::X_UNITS);
  SHARED(float, x_scale, WAVES * RUN);
  SHARED(int32_t, x_sum, WAVES * RUN);
  SHARED(float, sums, WAVES * COLS);
  previous_done();
  next_may_begin();
  uint32_t pair = block_x(), expert = (uint32_t)((const int32_t*)a.ids)[pair];
  if (nothing_outside<bf16>(a, pair, expert)) return;
  Weights w = {a.k, a.k, 0, 1, a.k >= LONG_K};
  if (!w.wide && block_y() % WAVES) return;
  uint32_t first = (w.wide ? block_y() : block_y() + tile_group()) * EXPERT_COLS, last = a.n - 1;
  uint64_t before = (uint64_t)expert * 2 * a.n;
  Matrix matrix = {(const uint8_t*)a.codes + before * W::row_bytes(a.k), (const uint16_t*)a.scales + before * (a.k / WEIGHT_GROUP)};
  auto at = [&](uint32_t) { return matrix; };
  wave_one::Lds lds = {ring, scales, planes, x_scale, x_sum, sums, nullptr};
  wave_one::Walk<W> walk;
  wave_one::begin(walk, w, lds, at, [&](uint32_t i) { return i / EXPERT_COLS * a.n + least(first + i % EXPERT_COLS, last); });
  wave_one::product(walk, w, at, lds, [&](uint32_t) { return (const bf16*)a.x; }, {});
  wave_one::for_outputs(w, lds, {}, [&](uint32_t wave, uint32_t lane, uint32_t, float sum) {
    float value = rounded<bf16>::of(sum), up = shuffle_xor(value, EXPERT_COLS);
    uint32_t column = (w.wide ? block_y() : block_y() + wave) * EXPERT_COLS + lane;
    if (lane < EXPERT_COLS && column < a.n) store_f32((bf16*)a.act + (uint64_t)pair * a.n + column, rounded<bf16>::of(silu_f32(value)) * up);
  });
}
#else
template <class W> DEVICE void experts_one(const step_experts_args& a) { Experts<bf16, W>::run(a); }
#endif

DEVICE float weight_of(const step_down_args& a, uint32_t row, uint32_t slot) { return ((const float*)a.weights)[(uint64_t)row * a.slots + slot]; }

// Are both halves of k here?
DEVICE bool has_both(const step_down_args& a) { return a.residual && !a.mail.outbox; }
// What step_down multiplies at once of `matrices` matrices: half of k, or all of it where that is a half.
DEVICE Weights down_part(const step_down_args& a, uint32_t k, uint32_t matrices, uint32_t half) {
  return has_both(a) ? half_of(k, matrices, half, true) : Weights{k, k, 0, matrices, true};
}

// The outputs of a block of T = bf16, WIDTH columns from `first` on of row `row`; sum(wave, row) of what was multiplied here. word: LDS of the
// caller's. number: of the exchange with the other device, if there is one.
template <uint32_t WIDTH, class Sum>
DEVICE void store_down(const step_down_args& a, uint32_t number, uint32_t row, uint32_t first, uint32_t half, uint32_t* word, const Sum& sum) {
  uint32_t y = row * a.n + first;
  bool inside = first + tile_lane() < a.n && tile_lane() < WIDTH;
  if (a.mail.outbox) {
    auto at = [&](uint32_t, uint32_t) { return inside ? y + tile_lane() : sum_mail::OUTSIDE; };
    sum_mail::add_other(a.mail, number, true, 1, a.residual, a.y, at, sum);
    return;
  }
  if (!a.residual) {
    if (tile_group() == 0 && inside) ((float*)a.y)[y + tile_lane()] = sum(0, 0);
    return;
  }
  Halves halves = {(float*)a.partial, (uint32_t*)a.arrivals};
  uint32_t set = row * ((a.n + DOWN_COLS - 1) / DOWN_COLS) + first / DOWN_COLS;
  for_both(halves, set, half, true, 1, word, sum, [&](uint32_t, uint32_t lane, uint32_t, float both) {
    if (inside) store_f32((bf16*)a.y + y + lane, load_f32((const bf16*)a.residual + y + lane) + both);
  });
}

// Weights of the shared expert, S, are asked for before the launches before are done.
template <class W, class S> DEVICE void down_tiles(const step_down_args& a, const Lds& lds, uint32_t* word) {
  bool both = has_both(a);
  uint32_t row = block_x(), half = both ? block_y() % 2 : 0u, first = (both ? block_y() / 2 : block_y()) * DOWN_COLS, last = a.n - 1;
  auto column = [&](uint32_t i) { return least(first + i, last); };
  Weights common = down_part(a, a.shared_k, 1, half), routed = down_part(a, a.k, a.slots, half);
  auto shared_at = [&](uint32_t) { return Matrix{(const uint8_t*)a.shared_codes, (const uint16_t*)a.shared_scales}; };
  Walk<S> shared;
  begin(shared, common, shared_at, column);
  previous_done();
  const int32_t* ids = (const int32_t*)a.ids + (uint64_t)row * a.slots;
  auto outside = [&](uint32_t slot) { return (uint32_t)ids[slot] >= a.experts; };
  auto at = [&](uint32_t slot) {
    uint64_t matrix = (uint64_t)(outside(slot) ? 0u : (uint32_t)ids[slot]) * a.n;
    return Matrix{(const uint8_t*)a.codes + matrix * W::row_bytes(a.k), (const uint16_t*)a.scales + (W::SCALED ? matrix * (a.k / WEIGHT_GROUP) : 0)};
  };
  Walk<W> walk;
  const bf16* shared_act = (const bf16*)a.shared_act + (uint64_t)row * a.shared_k + common.first;
  product(shared, common, shared_at, lds, 1, [&](uint32_t, uint32_t) { return shared_act; }, {});
  float of_shared = tile_group() == 0 ? sum_of(common, lds, 0, 0, {}) : 0.0f;
  block_sync();
  begin(walk, routed, at, column);
  const bf16* act = (const bf16*)a.act + (uint64_t)row * a.slots * a.k + routed.first;
  auto x = [&](uint32_t slot, uint32_t) { return outside(slot) ? nullptr : act + (uint64_t)slot * a.k; };
  product(walk, routed, at, lds, 1, x, {nullptr, 0.0f, (const float*)a.weights + (uint64_t)row * a.slots});
  auto sum = [&](uint32_t, uint32_t) { return sum_of(routed, lds, 0, 0, {}) + of_shared; };
  store_down<DOWN_COLS>(a, sum_mail::number_of(a.mail), row, first, half, word, sum);
}

#if defined(TILE_MMA)
// down_tiles where both formats have scales: every block has one row. of_waves [WAVES * COLS]: for the sums of the shared expert. T: tiles of 16
// rows a wave; 1: on a side of a pair.
template <class W, class S, uint32_t T> DEVICE void down_one(const step_down_args& a, const wave_one::Lds& lds, float* of_waves, uint32_t* word) {
  constexpr uint32_t WIDTH = wave_one::TILE_ROWS<T>;
  bool both = T == 2 && has_both(a);
  uint32_t row = block_x(), half = both ? block_y() % 2 : 0u, first = (both ? block_y() / 2 : block_y()) * WIDTH, last = a.n - 1;
  auto column = [&](uint32_t i) { return least(first + i, last); };
  Weights common = down_part(a, a.shared_k, 1, half), routed = down_part(a, a.k, a.slots, half);
  auto shared_at = [&](uint32_t) { return Matrix{(const uint8_t*)a.shared_codes, (const uint16_t*)a.shared_scales}; };
  wave_one::Walk<S, T> shared;
  wave_one::begin(shared, common, lds, shared_at, column);
  previous_done();
  const int32_t* ids = (const int32_t*)a.ids + (uint64_t)row * a.slots;
  uint32_t number = sum_mail::number_of(a.mail);
  uint32_t id = tile_lane() < a.slots ? (uint32_t)ids[tile_lane()] : 0u;  // of slot tile_lane()
  const bf16* shared_act = (const bf16*)a.shared_act + (uint64_t)row * a.shared_k + common.first;
  auto at = [&](uint32_t slot) {
    uint32_t expert = shuffle_from(id, slot);
    uint64_t before = (uint64_t)(expert < a.experts ? expert : 0u) * a.n;
    return Matrix{(const uint8_t*)a.codes + before * W::row_bytes(a.k), (const uint16_t*)a.scales + before * (a.k / WEIGHT_GROUP)};
  };
  wave_one::Walk<W, T> walk;
  wave_one::add_runs(shared, common, shared_at, lds, [&](uint32_t) { return shared_act; }, {}, [&](uint32_t slot) {
    if (slot == 0) wave_one::place(walk, routed, at, column);
    wave_one::fill(walk, routed, lds, at, slot);
  });
  wave_sync();
  float of_shared = lds.sums[tile_group() * COLS + tile_lane()];
  const bf16* act = (const bf16*)a.act + (uint64_t)row * a.slots * a.k + routed.first;
  auto x = [&](uint32_t slot) { return shuffle_from(id, slot) < a.experts ? act + (uint64_t)slot * a.k : nullptr; };
  Operand weighed = {nullptr, 0.0f, (const float*)a.weights + (uint64_t)row * a.slots};
  wave_one::add_runs(walk, routed, at, lds, x, weighed, [](uint32_t) { copies_commit(); });
  of_waves[tile_group() * COLS + tile_lane()] = of_shared;
  block_sync();
  store_down<WIDTH>(a, number, row, first, half, word, [&](uint32_t, uint32_t) {
    wave_one::Lds beside = lds;
    beside.sums = of_waves;
    return wave_one::sum_of<T>(routed, lds, 0, {}) + wave_one::sum_of<T>(common, beside, 0, {});
  });
}
#endif

// Grid: rows, ceil(n / 32), with T = bf16 and both halves of k twice that: side by side. T = f32: one after the other.
// NARROW: on a side of a pair, where there are matrix tiles blocks of half the columns, the shared expert in q8g64.
template <class T, class W, bool NARROW = false> struct Down;
template <class W> struct Down<float, W, false> {
  template <class S> DEVICE void shared(const step_down_args& a, const Weights& part, uint32_t first, uint32_t last, float* to) {
    const float* x = (const float*)a.shared_act + (uint64_t)block_x() * a.shared_k + part.first;
    down_f32(rows_of<S>(a.shared_codes, a.shared_scales, 0, part), first, last, x, to);
  }
  // The products of one half.
  DEVICE void multiply(const step_down_args& args, uint32_t half, uint32_t first, uint32_t last, float* products) {
    const step_down_args& a = kernel_args(args);
    Weights common = down_part(a, a.shared_k, 1, half), routed = down_part(a, a.k, a.slots, half);
    float* to = products + SLOTS_MAX * DOWN_COLS;
    if (a.shared_format == WEIGHT_F32) shared<f32_weights>(a, common, first, last, to);
    else if (a.shared_format == WEIGHT_BF16) shared<bf16_weights>(a, common, first, last, to);
    else shared<q8g64_weights>(a, common, first, last, to);
    ROLLED
    for (uint32_t slot = 0; slot < a.slots; slot++) {
      uint64_t pair = (uint64_t)block_x() * a.slots + slot;
      uint32_t expert = (uint32_t)((const int32_t*)a.ids)[pair];
      const float* x = (const float*)a.act + pair * a.k + routed.first;
      to = products + slot * DOWN_COLS;
      if (expert < a.experts) down_f32(rows_of<W>(a.codes, a.scales, (uint64_t)expert * a.n, routed), first, last, x, to);
      else if (thread_id() < DOWN_COLS) to[thread_id()] = 0.0f;
    }
  }
  DEVICE void run(const step_down_args& a) {
    SHARED(float, products, (SLOTS_MAX + 1) * DOWN_COLS);  // [slot, then shared][column]
    next_may_begin();
    previous_done();
    uint32_t row = block_x(), first = block_y() * DOWN_COLS, last = a.n - 1 - first, c = thread_id();
    uint32_t halves = a.residual ? 2u : 1u;
    float total = 0.0f;
    ROLLED
    for (uint32_t half = 0; half < halves; half++) {
      if (half) block_sync();
      multiply(a, opaque(half), first, last, products);
      block_sync();
      if (c >= DOWN_COLS) continue;
      float sum = 0.0f;
      for (uint32_t slot = 0; slot < a.slots; slot++) sum = fma_f32(weight_of(a, row, slot), products[slot * DOWN_COLS + c], sum);
      sum += products[SLOTS_MAX * DOWN_COLS + c];
      total = half ? total + sum : sum;
    }
    if (c >= DOWN_COLS || c > last) return;
    uint64_t at = (uint64_t)row * a.n + first + c;
    ((float*)a.y)[at] = a.residual ? ((const float*)a.residual)[at] + total : total;
  }
};
template <class W, bool NARROW> struct Down<bf16, W, NARROW> {
  DEVICE void run(const step_down_args& a) {
    SHARED(words16, x, WAVES * X_BYTES / 16);
    SHARED(float, x_scale, SIDE);
    SHARED(int32_t, x_sum, (W::FORMAT == WEIGHT_Q4G64 ? SIDE : 1));
    SHARED(float, sums, SUMS);
    SHARED(uint32_t, word, 1);
    next_may_begin();
    Lds lds = {x, x_scale, x_sum, sums, nullptr};
    if (NARROW || a.shared_format == WEIGHT_Q8G64) {
#if defined(TILE_MMA)
      if constexpr (W::SCALED) {
        static_assert(wave_one::RING_UNITS * 16 <= WAVES * X_BYTES && wave_one::X_UNITS * 16 + 16 * WAVES * COLS <= SUMS * 4, "fits");
        float* rest = sums + 2 * WAVES * COLS;
        wave_one::Lds one = {x, (uint64_t*)rest, (words16*)(rest + 2 * WAVES * COLS), x_scale, x_sum, sums, nullptr};
        down_one<W, q8g64_weights, NARROW ? 1 : 2>(a, one, sums + WAVES * COLS, word);
        return;
      }
#endif
      down_tiles<W, q8g64_weights>(a, lds, word);
    } else {
      down_tiles<W, bf16_weights>(a, lds, word);
    }
  }
};

}  // namespace step_moe

#include "experts_rows.h"
#include "down_rows.h"

#define STEP_EXPERTS(suffix, T, W)                                                                   \
  EARLY_KERNEL(step_experts_##suffix, step_experts_args, 256, 2) { step_moe::Experts<T, W>::run(a); } \
  EARLY_KERNEL(step_down_##suffix, step_down_args, 256, 3) { step_moe::Down<T, W>::run(a); }

// LAUNCH step_experts_f32_f32 block=256 cols=16
// LAUNCH step_down_f32_f32 block=256 cols=32 slots_max=16
STEP_EXPERTS(f32_f32, float, f32_weights)
// LAUNCH step_experts_f32_bf16 block=256 cols=16
// LAUNCH step_down_f32_bf16 block=256 cols=32 slots_max=16
STEP_EXPERTS(f32_bf16, float, bf16_weights)
// LAUNCH step_experts_f32_q4g64 block=256 cols=16
// LAUNCH step_down_f32_q4g64 block=256 cols=32 slots_max=16
STEP_EXPERTS(f32_q4g64, float, q4g64_weights)
// LAUNCH step_experts_bf16_bf16 block=256 cols=16
// LAUNCH step_down_bf16_bf16 block=256 cols=32 slots_max=16
STEP_EXPERTS(bf16_bf16, bf16, bf16_weights)
// resident: blocks that share a multiprocessor of sm_90, where so many of them share the work of the launch. step_down_rows: of 2 rows and more, shared
// expert in q8g64, both halves of k.
#define STEP_EXPERTS_ROWS(suffix, W)                                                                                            \
  LDS_KERNEL(step_experts_##suffix, step_experts_args, 256, 2, step_moe::ExpertsRows<W>::LDS) { step_moe::experts_rows<W>(a); } \
  LDS_KERNEL(step_down_rows_##suffix, step_down_args, 256, 2, step_moe::DownRows<W>::LDS) { step_moe::down_rows<W>(a); }        \
  EARLY_KERNEL(step_down_##suffix, step_down_args, 256, 3) { step_moe::Down<bf16, W>::run(a); }
// LAUNCH step_experts_bf16_q8g64 block=256 cols=16 resident=2
// LAUNCH step_down_rows_bf16_q8g64 block=256 cols=32 slots_max=16 resident=2
// LAUNCH step_down_bf16_q8g64 block=256 cols=32 slots_max=16
STEP_EXPERTS_ROWS(bf16_q8g64, q8g64_weights)
// LAUNCH step_experts_bf16_q4g64 block=256 cols=16 resident=2
// LAUNCH step_down_rows_bf16_q4g64 block=256 cols=32 slots_max=16 resident=2
// LAUNCH step_down_bf16_q4g64 block=256 cols=32 slots_max=16
STEP_EXPERTS_ROWS(bf16_q4g64, q4g64_weights)
// Of one row: the same bits.
// LAUNCH step_experts_one_bf16_q8g64 block=256 cols=16
EARLY_KERNEL(step_experts_one_bf16_q8g64, step_experts_args, 256, 4) { step_moe::experts_one<q8g64_weights>(a); }
// LAUNCH step_experts_one_bf16_q4g64 block=256 cols=16
EARLY_KERNEL(step_experts_one_bf16_q4g64, step_experts_args, 256, 4) { step_moe::experts_one<q4g64_weights>(a); }
// On a side of a pair, where half of cols a block make blocks that all run at once on sm_90: the same bits.
// LAUNCH step_down_narrow_bf16_q8g64 block=256 cols=32 slots_max=16
EARLY_KERNEL(step_down_narrow_bf16_q8g64, step_down_args, 256, 3) { step_moe::Down<bf16, q8g64_weights, true>::run(a); }
// LAUNCH step_down_narrow_bf16_q4g64 block=256 cols=32 slots_max=16
EARLY_KERNEL(step_down_narrow_bf16_q4g64, step_down_args, 256, 3) { step_moe::Down<bf16, q4g64_weights, true>::run(a); }
