// step_expert_rows.h - step_experts_* and step_down_* of the fast host build, f32 over step_products.h, bf16 over wave_products.h.
#pragma once

namespace {
namespace host {
namespace step_experts {

// What a call's blocks have, whose neighbours differ in grid.x: body(x, first column, last). each: blocks side by side that share their columns.
template <class Body> DEVICE void each_stretch(const Blocks& b, uint32_t each, uint32_t columns, uint32_t n, const Body& body) {
  uint32_t count = b.grid.x;
  for (uint32_t x = 0; x < count; x++) {
    uint64_t first = b.first > x ? (b.first - x + count - 1) / count : 0, end = b.last > x ? (b.last - x + count - 1) / count : 0;
    first = (first + each - 1) / each * columns;
    end = (end + each - 1) / each * columns;
    if (end > n) end = n;
    if (first < end) body(x, (uint32_t)first, (uint32_t)end);
  }
}

constexpr uint32_t STRIP = 64;  // columns at once

// Grid: columns of part FETCH and then pairs, ceil(n / EXPERT_COLS).
template <class T, class W> bool experts(const step_experts_args& a, Blocks& b) {
  constexpr bool TILES = sizeof(T) == 2;
  float* room = b.scratch(TILES ? waves::row_floats(a.k) : products::packed_floats(a.k));
  if (!room) return false;
  uint32_t row_of_room = ~0u, before = b.grid.x - a.rows * a.slots;
  for (uint64_t i = b.first; before && i < b.last; i++) {
    uint32_t block = (uint32_t)(i % b.grid.x * b.grid.y + i / b.grid.x);
    for (uint32_t round = 0; block < a.part_blocks && round < a.rounds; round++) {
      if (!fetches::fetch_round(a.part_fetch, round, block, a.part_blocks, b)) return false;
    }
  }
  each_stretch(b, 1, step_moe::EXPERT_COLS, a.n, [&](uint32_t x, uint32_t first, uint32_t end) {
    if (x < before) return;
    uint32_t pair = x - before;
    T* act = (T*)a.act + (uint64_t)pair * a.n;
    uint32_t expert = (uint32_t)((const int32_t*)a.ids)[pair], row = pair / a.slots;
    if (expert >= a.experts) {
      for (uint32_t c = first; c < end; c++) store_f32(act + c, 0.0f);
      return;
    }
    if (row != row_of_room) {
      const T* x = (const T*)a.x + (uint64_t)row * a.k;
      if constexpr (TILES) waves::prepare<W>(x, nullptr, 1.0f, a.k, room);
      else products::pack<products::expert_reader<W>>(x, a.k, a.k >= gemv::LONG_K, room);
      row_of_room = row;
    }
    for (uint32_t c0 = first; c0 < end; c0 += STRIP) {
      float sums[2 * STRIP];
      uint32_t count = end - c0 < STRIP ? end - c0 : STRIP;
      auto of = [&](uint32_t i) {
        return products::weight_row<W>(a.codes, a.scales, (uint64_t)expert * 2 * a.n + i % 2 * a.n + c0 + i / 2, a.k);
      };
      if constexpr (TILES) waves::dots<W>(of, 2 * count, room, 1, a.k, a.k >= waves::LONG_K, false, sums, 0);
      else products::dots<products::expert_reader<W>, 1>(of, 2 * count, room, 0, a.k, a.k >= gemv::LONG_K, sums);
      for (uint32_t c = 0; c < count; c++) {
        float gate = rounded<T>::of(sums[2 * c]);
        store_f32(act + c0 + c, rounded<T>::of(silu_f32(gate)) * rounded<T>::of(sums[2 * c + 1]));
      }
    }
  });
  return true;
}

// As step_moe::down_part.
DEVICE waves::Span down_part(const step_down_args& a, uint32_t k, uint32_t half) { return a.residual ? waves::half_of(k, half) : waves::all_of(k); }

// T = f32: columns [first, first + count) of one row, count <= COLUMNS. room: packed x of one matrix.
constexpr uint32_t COLUMNS = 256;
template <class W> void down_half(const step_down_args& a, uint32_t half, uint32_t row, uint32_t first, uint32_t count, float* room, float* sums) {
  float product[COLUMNS], shared[COLUMNS];
  auto multiply = [&](auto weights, const void* codes, const void* scales, uint64_t matrix, const float* x, uint32_t k, float* to) {
    using V = decltype(weights);
    waves::Span part = down_part(a, k, half);
    uint32_t values = part.end - part.first;
    products::pack<products::expert_reader<V>>(x + part.first, values, true, room);
    auto of = [&](uint32_t i) { return products::weight_row<V>(codes, scales, matrix + first + i, k, part.first); };
    products::dots<products::expert_reader<V>, 1>(of, count, room, 0, values, true, to);
  };
  auto multiply_shared = [&](auto weights) {
    multiply(weights, a.shared_codes, a.shared_scales, 0, (const float*)a.shared_act + (uint64_t)row * a.shared_k, a.shared_k, shared);
  };
  if (a.shared_format == WEIGHT_Q8G64) multiply_shared(q8g64_weights());
  else if (a.shared_format == WEIGHT_BF16) multiply_shared(bf16_weights());
  else multiply_shared(f32_weights());
  for (uint32_t slot = 0; slot < a.slots; slot++) {
    uint64_t pair = (uint64_t)row * a.slots + slot;
    uint32_t expert = (uint32_t)((const int32_t*)a.ids)[pair];
    if (expert < a.experts) multiply(W(), a.codes, a.scales, (uint64_t)expert * a.n, (const float*)a.act + pair * a.k, a.k, product);
    else memset(product, 0, sizeof product);
    for (uint32_t c = 0; c < count; c++) sums[c] = fma_f32(((const float*)a.weights)[pair], product[c], sums[c]);
  }
  for (uint32_t c = 0; c < count; c++) sums[c] += shared[c];
}
template <class W> void down_columns(const step_down_args& a, uint32_t row, uint32_t first, uint32_t count, float* room) {
  float sums[2][COLUMNS] = {};
  for (uint32_t half = 0; half < (a.residual ? 2u : 1u); half++) down_half<W>(a, half, row, first, count, room, sums[half]);
  for (uint32_t c = 0; c < count; c++) {
    uint64_t at = (uint64_t)row * a.n + first + c;
    ((float*)a.y)[at] = a.residual ? ((const float*)a.residual)[at] + (sums[0][c] + sums[1][c]) : sums[0][c];
  }
}

// T = bf16: columns [first, end) of one row. room: x of the shared expert and of the routed ones, as the wave product reads it.
template <class W, class S> void down_tiles(const step_down_args& a, uint32_t row, uint32_t first, uint32_t end, float* room) {
  const int32_t* ids = (const int32_t*)a.ids + (uint64_t)row * a.slots;
  waves::Row shared_x = waves::row_at(room, a.shared_k), x[step_moe::SLOTS_MAX];
  waves::prepare<S>((const bf16*)a.shared_act + (uint64_t)row * a.shared_k, nullptr, 1.0f, a.shared_k, room);
  for (uint32_t slot = 0; slot < a.slots; slot++) {
    uint64_t pair = (uint64_t)row * a.slots + slot;
    float* to = room + waves::row_floats(a.shared_k) + slot * waves::row_floats(a.k);
    waves::prepare<W>((const bf16*)a.act + pair * a.k, nullptr, ((const float*)a.weights)[pair], a.k, to);
    x[slot] = waves::row_at(to, a.k);
  }
  for (uint32_t c = first; c < end; c += LANES) {
    waves::WeightRow shared[1][LANES], routed[step_moe::SLOTS_MAX][LANES];
    for (uint32_t i = 0; i < LANES; i++) {
      uint32_t column = c + i < end ? c + i : end - 1;
      shared[0][i] = waves::weight_row<S>(a.shared_codes, a.shared_scales, column, a.shared_k);
      for (uint32_t slot = 0; slot < a.slots; slot++) {
        uint32_t expert = (uint32_t)ids[slot];
        routed[slot][i] = {nullptr, nullptr};  // an id outside adds nothing
        if (expert < a.experts) routed[slot][i] = waves::weight_row<W>(a.codes, a.scales, (uint64_t)expert * a.n + column, a.k);
      }
    }
    lanes8 sum = {};
    for (uint32_t half = 0; half < (a.residual ? 2u : 1u); half++) {
      lanes8 of_shared = waves::eight_dots<S>(shared, &shared_x, 1, down_part(a, a.shared_k, half), true);
      lanes8 of_half = waves::eight_dots<W>(routed, x, a.slots, down_part(a, a.k, half), true) + of_shared;
      sum = half ? sum + of_half : of_half;
    }
    for (uint32_t i = 0; i < LANES && c + i < end; i++) {
      uint64_t at = (uint64_t)row * a.n + c + i;
      if (a.residual) store_f32((bf16*)a.y + at, load_f32((const bf16*)a.residual + at) + sum[i]);
      else ((float*)a.y)[at] = sum[i];
    }
  }
}

// Grid: rows, ceil(n / 32); with T = bf16 and a residual twice that, of which the first of two does what both have.
template <class T, class W> bool down(const step_down_args& a, Blocks& b) {
  constexpr bool TILES = sizeof(T) == 2;
  uint32_t k = a.k > a.shared_k ? a.k : a.shared_k;
  float* room = b.scratch(TILES ? waves::row_floats(a.shared_k) + a.slots * waves::row_floats(a.k) : products::packed_floats(k));
  if (!room) return false;
  each_stretch(b, TILES && a.residual ? 2 : 1, step_moe::DOWN_COLS, a.n, [&](uint32_t row, uint32_t first, uint32_t end) {
    if constexpr (TILES) {
      if (a.shared_format == WEIGHT_Q8G64) down_tiles<W, q8g64_weights>(a, row, first, end, room);
      else down_tiles<W, bf16_weights>(a, row, first, end, room);
    } else {
      for (uint32_t c = first; c < end; c += COLUMNS) down_columns<W>(a, row, c, end - c < COLUMNS ? end - c : COLUMNS, room);
    }
  });
  return true;
}

}  // namespace step_experts

#define FAST_STEP_EXPERTS(suffix, T, W)                                                       \
  FAST_KERNEL(step_experts_##suffix, step_experts_args, step_experts::experts<T, W>);         \
  FAST_KERNEL(step_down_##suffix, step_down_args, step_experts::down<T, W>);

FAST_STEP_EXPERTS(f32_f32, float, f32_weights)
FAST_STEP_EXPERTS(f32_bf16, float, bf16_weights)
FAST_STEP_EXPERTS(f32_q4g64, float, q4g64_weights)
FAST_STEP_EXPERTS(bf16_bf16, bf16, bf16_weights)
FAST_STEP_EXPERTS(bf16_q8g64, bf16, q8g64_weights)
FAST_STEP_EXPERTS(bf16_q4g64, bf16, q4g64_weights)

FAST_KERNEL(step_experts_one_bf16_q8g64, step_experts_args, step_experts::experts<bf16, q8g64_weights>);
FAST_KERNEL(step_experts_one_bf16_q4g64, step_experts_args, step_experts::experts<bf16, q4g64_weights>);

}  // namespace host
}  // namespace
