// step_experts.hip - the routed experts of a decode step (docs/decisions/0004-step-graph.md).
//   step_experts  act[pair] = T(T(silu(gate)) * up), gate and up = T(x[row] @ w[expert]^T), as matmul and silu_mul round
//   step_down     y = T(residual + T(T(sum over slots, weight * T(act @ down[expert]^T)) + T(shared_act @ shared_down^T))), as expert_sum rounds
// T = bf16: matrix tiles, whose order of additions expert_walk.h has, and expert_strips.h for step_experts on mma.sync. step_experts and the shared
// product divide k >= 1024 among the eight waves of a block (strips any k); a routed product of step_down belongs to one wave, which takes its groups
// in ascending order whatever k is.
// T = f32, for parity: chunk c (what 16 bytes of weights hold) belongs to lane c % LANES, LANES = 32 for k >= 1024, else 4; a lane adds its
// elements in ascending order by one chain of fma (q8g64: a chain over the chunk from 0, then fma(chunk sum, scale, lane sum); q4g64 likewise, from
// the chunk's start, see word_reader); then a butterfly over the lanes. Nothing of either order depends on the rows beside.
#include "portable.h"
#include "gemv.h"
#include "expert_strips.h"
#include "expert_tiles.h"

namespace step_moe {

namespace tiles = expert_tiles;
constexpr uint32_t THREADS = 256;
constexpr uint32_t EXPERT_COLS = 16, DOWN_COLS = 32;  // columns of a block of the grid
constexpr uint32_t TILE_COLS = 16;                    // of step_experts, gate and up
// Columns that a block of step_experts computes with T = bf16; where it is more than EXPERT_COLS the blocks between do nothing.
constexpr uint32_t BLOCK_COLS = tiles::RUNS ? EXPERT_COLS : 64;
constexpr uint32_t SLOTS_MAX = 16;

DEVICE uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

// One matrix [rows, k] of a weight.
template <class W> struct Rows {
  const uint8_t* codes;
  const uint16_t* scales;
  uint32_t k;
};
template <class W> DEVICE Rows<W> rows_of(const void* codes, const void* scales, uint64_t first, uint32_t k) {
  return {(const uint8_t*)codes + first * W::row_bytes(k), W::SCALED ? (const uint16_t*)scales + first * (k / WEIGHT_GROUP) : nullptr, k};
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

// Asks for the first bytes of a row of weights, where rows are whole pieces of 16 bytes.
constexpr uint32_t AHEAD_BYTES = 4096;
template <class W> DEVICE void prefetch_row(const void* codes, uint64_t row, uint32_t k) {
  uint32_t bytes = (uint32_t)W::row_bytes(k);
  if (gemv::rows_aligned<W>((const uint8_t*)codes, k)) prefetch((const uint8_t*)codes + row * bytes, least(bytes, AHEAD_BYTES));
}

// x @ w[row]^T, the same in each of LANES lanes.
template <uint32_t LANES, class W> DEVICE float row_product(const Rows<W>& w, uint32_t row, const float* x) {
  const uint8_t* codes = w.codes + row * W::row_bytes(w.k);
  bool aligned = gemv::rows_aligned<W>(codes, w.k);
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
    sum[0] = W::SCALED ? fma_f32(part, f16_value(w.scales[row * (w.k / WEIGHT_GROUP) + c * W::CHUNK / WEIGHT_GROUP]), sum[0]) : part;
  }
  lanes_sum<LANES>(sum);
  return sum[0];
}

// product(column, least(column, last), lane) for the columns of a block, by LANES lanes each; the lanes of a wave call it together.
template <uint32_t COLS, uint32_t LANES, class F> DEVICE void each_column(uint32_t last, const F& product) {
  for (uint32_t c = thread_id() / LANES; c < COLS; c += THREADS / LANES) product(c, c < last ? c : last, thread_id() % LANES);
}

template <uint32_t LANES, class W> DEVICE void experts_f32(const step_experts_args& a, uint32_t pair, uint32_t expert) {
  Rows<W> w = rows_of<W>(a.codes, a.scales, (uint64_t)expert * 2 * a.n, a.k);
  const float* x = (const float*)a.x + (uint64_t)(pair / a.slots) * a.k;
  uint32_t first = block_y() * EXPERT_COLS;
  each_column<EXPERT_COLS, LANES>(a.n - 1 - first, [&](uint32_t c, uint32_t row, uint32_t lane) {
    float gate = row_product<LANES>(w, first + row, x), up = row_product<LANES>(w, a.n + first + row, x);
    if (lane == 0 && c == row) ((float*)a.act)[(uint64_t)pair * a.n + first + c] = silu_f32(gate) * up;
  });
}

template <class W> DEVICE void down_f32(const Rows<W>& w, uint32_t first, uint32_t last, const float* x, float* to) {
  auto put = [&](uint32_t c, float sum, uint32_t lane) {
    if (lane == 0) to[c] = sum;
  };
  if (w.k >= gemv::LONG_K) {
    each_column<DOWN_COLS, 32>(last, [&](uint32_t c, uint32_t row, uint32_t lane) { put(c, row_product<32>(w, first + row, x), lane); });
  } else {
    each_column<DOWN_COLS, 4>(last, [&](uint32_t c, uint32_t row, uint32_t lane) { put(c, row_product<4>(w, first + row, x), lane); });
  }
}

// Pairs of one expert share a block, so that its weights are read once: counted in ascending order, each turn of eight has the block of its first
// pair. members[]: the pairs, after block_sync; each wave finds the same. Returns how many, 0 where another pair's block does the work.
DEVICE uint32_t find_members(const step_experts_args& a, uint32_t pair, uint32_t expert, uint32_t* members) {
  uint32_t pairs = a.rows * a.slots, seen = 0, lane = thread_id() % 32;  // seen: before this pair, and from it on in the upper half
  for (uint32_t base = 0; base < pairs; base += 32) {
    uint32_t other = base + lane, total;
    bool same = other < pairs && (uint32_t)((const int32_t*)a.ids)[other] == expert;
    uint32_t one = !same ? 0u : other < pair ? 1u : 0x10000u, rank = (seen + wave32_prefix(one, &total)) >> 16;
    if (one == 0x10000u && rank < tiles::ROWS) members[rank] = other;
    seen += total;
  }
  return (seen & 0xffffu) % tiles::ROWS == 0 ? least(seen >> 16, tiles::ROWS) : 0u;
}

// The waves that work on a product which is divided among them where k is long.
DEVICE uint32_t working_waves(uint32_t k) { return k >= tiles::LONG_K ? tiles::WAVES : 1u; }

// Rows of whole groups that 16-byte loads can read.
template <class W> DEVICE bool whole_groups(const Rows<W>& w) { return w.k % WEIGHT_GROUP == 0 && ((uint64_t)w.codes & 15u) == 0; }

// product() with what k and the addresses allow.
template <class W, class Row, class X, class Emit>
DEVICE void block_product(const Rows<W>& w, uint32_t count_tiles, const Row& row, const X& x, bool x_aligned, uint32_t count, const tiles::Lds& lds,
                          uint16_t* scales, const Emit& emit) {
  if constexpr (W::SCALED || tiles::RUNS) {
    if (W::SCALED || whole_groups(w)) {
      if (w.k >= tiles::LONG_K) {
        tiles::product<W, true, tiles::WAVES>(w.codes, w.scales, w.k, count_tiles, row, x, x_aligned, count, lds, scales, emit);
      } else {
        tiles::product<W, true, 1>(w.codes, w.scales, w.k, count_tiles, row, x, x_aligned, count, lds, scales, emit);
      }
      return;
    }
  }
  if constexpr (!W::SCALED) tiles::product<W, false, 0>(w.codes, w.scales, w.k, count_tiles, row, x, x_aligned, count, lds, scales, emit);
}

template <class W>
DEVICE void experts_tiles(const step_experts_args& a, uint32_t expert, const uint32_t* members, uint32_t count, const tiles::Lds& lds,
                          uint16_t* scales) {
  uint32_t waves = working_waves(a.k), first = block_y() * EXPERT_COLS, last = a.n - 1;
  uint32_t some = least((a.n - first + TILE_COLS - 1) / TILE_COLS, BLOCK_COLS / TILE_COLS);
  auto row = [&](uint32_t tile, uint32_t i) { return i / TILE_COLS * a.n + least(first + tile * TILE_COLS + i % TILE_COLS, last); };
  auto x = [&](uint32_t r) { return (const bf16*)a.x + (uint64_t)(members[r] / a.slots) * a.k; };
  auto emit = [&](uint32_t tile) {
    uint32_t r = thread_id() / TILE_COLS, c = thread_id() % TILE_COLS, column = first + tile * TILE_COLS + c;
    if (r >= count || column > last) return;
    const float* part = lds.sums + r * tiles::COLS + c;
    float gate = part[0], up = part[TILE_COLS];
    for (uint32_t i = 1; i < waves; i++) {
      part += tiles::ROWS * tiles::COLS;
      gate += part[0];
      up += part[TILE_COLS];
    }
    gate = rounded<bf16>::of(gate);
    store_f32((bf16*)a.act + (uint64_t)members[r] * a.n + column, rounded<bf16>::of(silu_f32(gate)) * rounded<bf16>::of(up));
  };
  Rows<W> w = rows_of<W>(a.codes, a.scales, (uint64_t)expert * 2 * a.n, a.k);
#if defined(TILE_MMA)
  if (W::SCALED || whole_groups(w)) {
    waves = tiles::WAVES;
    expert_strips::product<W>(w.codes, w.scales, w.k, [&](uint32_t i) { return row(0, i); }, a.n, x, count, lds.sums);
    block_sync();
    emit(0);
    return;
  }
#endif
  bool x_aligned = gemv::values_aligned((const bf16*)a.x, a.k, a.k);
  if constexpr (!W::SCALED || !tiles::RUNS) block_product(w, some, row, x, x_aligned, count, lds, scales, emit);
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
    previous_done();
    next_may_begin();
    uint32_t pair = block_x(), expert = (uint32_t)((const int32_t*)a.ids)[pair];
    if (nothing_outside<float>(a, pair, expert)) return;
    if (a.k >= gemv::LONG_K) experts_f32<32, W>(a, pair, expert);
    else experts_f32<4, W>(a, pair, expert);
  }
};
template <class W> struct Experts<bf16, W> {
  DEVICE void run(const step_experts_args& a) {
    constexpr bool STRIPS = tiles::RUNS && W::SCALED;
    SHARED(words16, x, STRIPS ? 1 : tiles::X_UNITS);
    SHARED(float, x_sums, STRIPS ? 1 : tiles::X_SUMS);
    SHARED(float, sums, tiles::SUMS);
    SHARED(uint16_t, scales, STRIPS ? 1 : tiles::SCALES);
    SHARED(uint32_t, members, tiles::ROWS);
    previous_done();
    next_may_begin();  // not before: step_down reads ids while this launch may be at work
    uint32_t pair = block_x(), expert = (uint32_t)((const int32_t*)a.ids)[pair];
    if (nothing_outside<bf16>(a, pair, expert)) return;
    if (block_y() * EXPERT_COLS % BLOCK_COLS) return;
    uint32_t count = 1;
    if (a.rows > 1) count = find_members(a, pair, expert, members);
    else if (thread_id() == 0) members[0] = pair;
    if (count == 0) return;
    uint32_t column = block_y() * EXPERT_COLS + thread_id() % EXPERT_COLS;
    if (STRIPS && thread_id() < 2 * EXPERT_COLS)
      prefetch_row<W>(a.codes, ((uint64_t)expert * 2 + thread_id() / EXPERT_COLS) * a.n + least(column, a.n - 1), a.k);
    tiles::Lds lds = {x, x_sums, sums};
    experts_tiles<W>(a, expert, members, count, lds, scales);
  }
};

// y of a column: sum of the products, rounded to T, times the weights; shared in T.
template <class T> DEVICE void store_y(const step_down_args& a, uint32_t row, uint32_t column, float sum, float shared) {
  float moe = rounded<T>::of(rounded<T>::of(sum) + shared);
  uint64_t at = (uint64_t)row * a.n + column;
  store_f32((T*)a.y + at, load_f32((const T*)a.residual + at) + moe);
}
DEVICE float weight_of(const step_down_args& a, uint32_t row, uint32_t slot) { return ((const float*)a.weights)[(uint64_t)row * a.slots + slot]; }

// The parts of the shared product in lds.sums.
template <class W> DEVICE void shared_tiles(const step_down_args& a, uint32_t row, const tiles::Lds& lds, uint16_t* scales) {
  uint32_t first = block_y() * DOWN_COLS;
  const bf16* x = (const bf16*)a.shared_act + (uint64_t)row * a.shared_k;
  block_product(
      rows_of<W>(a.shared_codes, a.shared_scales, 0, a.shared_k), 1, [&](uint32_t, uint32_t i) { return least(first + i, a.n - 1); },
      [&](uint32_t) { return x; }, gemv::values_aligned(x, 0, a.shared_k), 1, lds, scales, [](uint32_t) {});
}

// Wave w: the product of slot turn + w over all of k, into row 0 of its part of lds.sums; and block_sync.
template <class W, bool ALIGNED> DEVICE void slots_tiles(const step_down_args& a, uint32_t row, uint32_t turn, const tiles::Lds& lds) {
  uint32_t wave = tile_group(), count = least(a.slots - turn, tiles::WAVES);
  uint64_t pair = (uint64_t)row * a.slots + turn;
  uint32_t expert = wave < count ? (uint32_t)((const int32_t*)a.ids)[pair + wave] : a.experts;
  bool works = expert < a.experts;
  uint32_t first = block_y() * DOWN_COLS;
  Rows<W> w = rows_of<W>(a.codes, a.scales, (uint64_t)(works ? expert : 0u) * a.n, a.k);
  using Stream = tiles::Stream<W, ALIGNED, 1>;
  Stream s;
  auto w_row = [&](uint32_t, uint32_t i) { return least(first + i, a.n - 1); };
  Stream::begin(s, w.codes, w.scales, a.k, w_row, 0, works ? 1u : 0u);
  const bf16* x = (const bf16*)a.act + pair * a.k;
  tiles::Panel all = tiles::panel<W>(lds, count, tiles::ROWS, a.k), own = tiles::panel<W>(lds, 1, tiles::ROWS, a.k);
  own.lds.x += wave * (all.pitch / 8);
  own.lds.x_sums += wave * (all.chunk / tiles::GROUP);
  for (; all.first < a.k; all.first += all.chunk) {
    block_sync();
    tiles::stage<W>(all, [&](uint32_t r) { return x + (uint64_t)r * a.k; }, gemv::values_aligned(x, a.k, a.k));
    block_sync();
    own.first = all.first;
    Stream::advance(s, own, nullptr, w_row);
  }
  Stream::finish(s, own);
  block_sync();
}

template <class W> DEVICE void down_tiles(const step_down_args& a, const tiles::Lds& lds, uint16_t* scales) {
  constexpr uint32_t WAVE_SUMS = tiles::ROWS * tiles::COLS;
  uint32_t row = block_x(), column = block_y() * DOWN_COLS + thread_id();
  if (a.shared_format == WEIGHT_Q8G64) shared_tiles<q8g64_weights>(a, row, lds, scales);
  else shared_tiles<bf16_weights>(a, row, lds, scales);
  bool stores = thread_id() < DOWN_COLS && column < a.n;
  float shared = 0.0f, sum = 0.0f;
  if (stores) {
    shared = lds.sums[thread_id()];
    for (uint32_t w = 1; w < working_waves(a.shared_k); w++) shared += lds.sums[w * WAVE_SUMS + thread_id()];
  }
  for (uint32_t turn = 0; turn < a.slots; turn += tiles::WAVES) {
    if constexpr (W::SCALED) {
      slots_tiles<W, true>(a, row, turn, lds);
    } else {
      bool whole = tiles::RUNS && whole_groups(rows_of<W>(a.codes, a.scales, 0, a.k));
      if (!whole) slots_tiles<W, false>(a, row, turn, lds);
      if constexpr (tiles::RUNS) {
        if (whole) slots_tiles<W, true>(a, row, turn, lds);
      }
    }
    for (uint32_t slot = turn; stores && slot < least(a.slots, turn + tiles::WAVES); slot++) {
      sum = fma_f32(weight_of(a, row, slot), rounded<bf16>::of(lds.sums[(slot - turn) * WAVE_SUMS + thread_id()]), sum);
    }
  }
  if (stores) store_y<bf16>(a, row, column, sum, rounded<bf16>::of(shared));
}

// Asks for the block's rows of weights. ids are there: what wrote them was done when step_experts let this launch begin.
template <class W> DEVICE void prefetch_down(const step_down_args& a) {
  uint32_t first = block_y() * DOWN_COLS, i = thread_id() % DOWN_COLS, column = least(first + i, a.n - 1);
  for (uint32_t slot = thread_id() / DOWN_COLS; slot < a.slots; slot += THREADS / DOWN_COLS) {
    uint32_t expert = (uint32_t)((const int32_t*)a.ids)[(uint64_t)block_x() * a.slots + slot];
    if (expert < a.experts) prefetch_row<W>(a.codes, (uint64_t)expert * a.n + column, a.k);
  }
  if (thread_id() >= DOWN_COLS) return;
  if (a.shared_format == WEIGHT_Q8G64) prefetch_row<q8g64_weights>(a.shared_codes, column, a.shared_k);
  else prefetch_row<bf16_weights>(a.shared_codes, column, a.shared_k);
}

// Grid: rows, ceil(n / 32).
template <class T, class W> struct Down;
template <class W> struct Down<float, W> {
  template <class S> DEVICE void shared(const step_down_args& a, uint32_t first, uint32_t last, float* to) {
    const float* x = (const float*)a.shared_act + (uint64_t)block_x() * a.shared_k;
    down_f32(rows_of<S>(a.shared_codes, a.shared_scales, 0, a.shared_k), first, last, x, to);
  }
  DEVICE void run(const step_down_args& a) {
    SHARED(float, products, (SLOTS_MAX + 1) * DOWN_COLS);  // [slot, then shared][column]
    next_may_begin();
    previous_done();
    uint32_t row = block_x(), first = block_y() * DOWN_COLS, last = a.n - 1 - first, c = thread_id();
    float* common = products + SLOTS_MAX * DOWN_COLS;
    if (a.shared_format == WEIGHT_F32) shared<f32_weights>(a, first, last, common);
    else if (a.shared_format == WEIGHT_BF16) shared<bf16_weights>(a, first, last, common);
    else shared<q8g64_weights>(a, first, last, common);
    for (uint32_t slot = 0; slot < a.slots; slot++) {
      uint64_t pair = (uint64_t)row * a.slots + slot;
      uint32_t expert = (uint32_t)((const int32_t*)a.ids)[pair];
      float* to = products + slot * DOWN_COLS;
      if (expert < a.experts) down_f32(rows_of<W>(a.codes, a.scales, (uint64_t)expert * a.n, a.k), first, last, (const float*)a.act + pair * a.k, to);
      else if (c < DOWN_COLS) to[c] = 0.0f;
    }
    block_sync();
    if (c >= DOWN_COLS || c > last) return;
    float sum = 0.0f;
    for (uint32_t slot = 0; slot < a.slots; slot++) sum = fma_f32(weight_of(a, row, slot), products[slot * DOWN_COLS + c], sum);
    store_y<float>(a, row, first + c, sum, common[c]);
  }
};
template <class W> struct Down<bf16, W> {
  DEVICE void run(const step_down_args& a) {
    SHARED(words16, x, tiles::X_UNITS);
    SHARED(float, x_sums, tiles::X_SUMS);
    SHARED(float, sums, tiles::SUMS);
    SHARED(uint16_t, scales, tiles::SCALES);
    next_may_begin();
    prefetch_down<W>(a);
    previous_done();
    down_tiles<W>(a, {x, x_sums, sums}, scales);
  }
};

}  // namespace step_moe

#define STEP_EXPERTS(suffix, T, W, BLOCKS)                                                                \
  EARLY_KERNEL(step_experts_##suffix, step_experts_args, 256, BLOCKS) { step_moe::Experts<T, W>::run(a); } \
  EARLY_KERNEL(step_down_##suffix, step_down_args, 256, 2) { step_moe::Down<T, W>::run(a); }

// LAUNCH step_experts_f32_f32 block=256 cols=16
// LAUNCH step_down_f32_f32 block=256 cols=32 slots_max=16
STEP_EXPERTS(f32_f32, float, f32_weights, 2)
// LAUNCH step_experts_f32_bf16 block=256 cols=16
// LAUNCH step_down_f32_bf16 block=256 cols=32 slots_max=16
STEP_EXPERTS(f32_bf16, float, bf16_weights, 2)
// LAUNCH step_experts_f32_q4g64 block=256 cols=16
// LAUNCH step_down_f32_q4g64 block=256 cols=32 slots_max=16
STEP_EXPERTS(f32_q4g64, float, q4g64_weights, 2)
// LAUNCH step_experts_bf16_bf16 block=256 cols=16
// LAUNCH step_down_bf16_bf16 block=256 cols=32 slots_max=16
STEP_EXPERTS(bf16_bf16, bf16, bf16_weights, 2)
// LAUNCH step_experts_bf16_q8g64 block=256 cols=16
// LAUNCH step_down_bf16_q8g64 block=256 cols=32 slots_max=16
STEP_EXPERTS(bf16_q8g64, bf16, q8g64_weights, 3)
// LAUNCH step_experts_bf16_q4g64 block=256 cols=16
// LAUNCH step_down_bf16_q4g64 block=256 cols=32 slots_max=16
STEP_EXPERTS(bf16_q4g64, bf16, q4g64_weights, 3)
