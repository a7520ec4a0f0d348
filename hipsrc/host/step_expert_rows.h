// step_expert_rows.h - step_experts_* and step_down_* of the fast host build, f32 over step_products.h, bf16 over wave_products.h.
#pragma once

namespace {
namespace host {
namespace step_experts {

// One row of x as the products of T and W read it. `room` holds room_of(k).
DEVICE size_t room_of(uint32_t k) { return waves::whole_of(k) + products::packed_floats(k); }
template <class T, class W> DEVICE const float* pack_row(const T* x, uint32_t k, float* room) {
  for (uint32_t c = 0; c < k; c++) room[c] = load_f32(x + c);
  if constexpr (sizeof(T) == 2) {
    waves::end_row(room, k, waves::Last::FRONT);
    return room;
  } else {
    products::pack<products::expert_reader<W>>(room, k, room + k);
    return room + k;
  }
}

// x @ row(i)^T for i < count, `sums` in whole eights. shared: the waves of a block share the groups of bf16 where k is long.
template <class T, class W, class Row>
DEVICE void dots(const Row& row, uint32_t count, const float* x, uint32_t k, bool shared, float* sums) {
  if constexpr (sizeof(T) == 2) waves::dots<W>(row, count, x, 0, 1, k, shared, waves::Last::FRONT, sums, 0);
  else products::dots<products::expert_reader<W>, 1>(row, count, x, 0, k, sums);
}

// Grid: pairs, ceil(n / EXPERT_COLS).
template <class T, class W> bool experts(const step_experts_args& a, Blocks& b) {
  constexpr uint32_t COLS = step_moe::EXPERT_COLS, STRIP = 64;
  float* room = b.scratch(room_of(a.k));
  if (!room) return false;
  // Neighbouring blocks are pairs: they are taken pair by pair, so that each x is packed once.
  uint32_t pairs = b.grid.x;
  for (uint32_t pair = 0; pair < pairs; pair++) {
    uint64_t y = b.first > pair ? (b.first - pair + pairs - 1) / pairs : 0, y_end = b.last > pair ? (b.last - pair + pairs - 1) / pairs : 0;
    if (y >= y_end) continue;
    uint32_t first = (uint32_t)y * COLS, end = (uint32_t)y_end * COLS < a.n ? (uint32_t)y_end * COLS : a.n;
    T* act = (T*)a.act + (uint64_t)pair * a.n;
    uint32_t expert = (uint32_t)((const int32_t*)a.ids)[pair];
    if (expert >= a.experts) {
      for (uint32_t c = first; c < end; c++) store_f32(act + c, 0.0f);
      continue;
    }
    const float* x = pack_row<T, W>((const T*)a.x + (uint64_t)(pair / a.slots) * a.k, a.k, room);
    for (uint32_t c0 = first; c0 < end; c0 += STRIP) {
      float sums[2 * STRIP];
      uint32_t count = end - c0 < STRIP ? end - c0 : STRIP;
      auto row = [&](uint32_t i) {
        return products::weight_row<W>(a.codes, a.scales, (uint64_t)expert * 2 * a.n + i % 2 * a.n + c0 + i / 2, a.k);
      };
      dots<T, W>(row, 2 * count, x, a.k, true, sums);
      for (uint32_t c = 0; c < count; c++) {
        float gate = rounded<T>::of(sums[2 * c]);
        store_f32(act + c0 + c, rounded<T>::of(silu_f32(gate)) * rounded<T>::of(sums[2 * c + 1]));
      }
    }
  }
  return true;
}

// to[c] = T(x @ w[first + c]^T), `to` in whole eights.
template <class T, class W>
DEVICE void down_rows(const void* codes, const void* scales, uint64_t first, uint32_t count, const T* x, uint32_t k, bool shared, float* room,
                      float* to) {
  const float* packed = pack_row<T, W>(x, k, room);
  dots<T, W>([&](uint32_t i) { return products::weight_row<W>(codes, scales, first + i, k); }, count, packed, k, shared, to);
  for (uint32_t c = 0; c < count; c++) to[c] = rounded<T>::of(to[c]);
}

// Columns [first, first + count) of one row; `to` [slots + 1][COLUMNS] are the products, the shared one last.
constexpr uint32_t COLUMNS = 256;
template <class T, class W> void down_columns(const step_down_args& a, uint32_t row, uint32_t first, uint32_t count, float* room, float* to) {
  const T* act = (const T*)a.shared_act + (uint64_t)row * a.shared_k;
  float* shared = to + a.slots * COLUMNS;
  auto product = [&](auto weights) {
    down_rows<T, decltype(weights)>(a.shared_codes, a.shared_scales, first, count, act, a.shared_k, true, room, shared);
  };
  if (a.shared_format == WEIGHT_Q8G64) product(q8g64_weights());
  else if (sizeof(T) == 2 || a.shared_format == WEIGHT_BF16) product(bf16_weights());
  else if constexpr (sizeof(T) == 4) product(f32_weights());
  float sums[COLUMNS] = {};
  for (uint32_t slot = 0; slot < a.slots; slot++) {
    uint64_t pair = (uint64_t)row * a.slots + slot;
    uint32_t expert = (uint32_t)((const int32_t*)a.ids)[pair];
    float weight = ((const float*)a.weights)[pair];
    float* product = to + slot * COLUMNS;
    if (expert < a.experts) {
      down_rows<T, W>(a.codes, a.scales, (uint64_t)expert * a.n + first, count, (const T*)a.act + pair * a.k, a.k, false, room, product);
    } else {
      memset(product, 0, count * sizeof(float));
    }
    for (uint32_t c = 0; c < count; c++) sums[c] = fma_f32(weight, product[c], sums[c]);
  }
  for (uint32_t c = 0; c < count; c++) {
    float moe = rounded<T>::of(rounded<T>::of(sums[c]) + shared[c]);
    uint64_t at = (uint64_t)row * a.n + first + c;
    store_f32((T*)a.y + at, load_f32((const T*)a.residual + at) + moe);
  }
}

// Grid: rows, ceil(n / 32).
template <class T, class W> bool down(const step_down_args& a, Blocks& b) {
  constexpr uint32_t COLS = step_moe::DOWN_COLS;
  uint32_t k = a.k > a.shared_k ? a.k : a.shared_k, rows = b.grid.x;
  size_t packed = room_of(k);
  float* room = b.scratch(packed + (a.slots + 1) * COLUMNS);
  if (!room) return false;
  for (uint32_t row = 0; row < rows; row++) {
    uint64_t y = b.first > row ? (b.first - row + rows - 1) / rows : 0, y_end = b.last > row ? (b.last - row + rows - 1) / rows : 0;
    uint32_t first = (uint32_t)y * COLS, end = (uint32_t)y_end * COLS < a.n ? (uint32_t)y_end * COLS : a.n;
    for (uint32_t c = first; c < end; c += COLUMNS) down_columns<T, W>(a, row, c, end - c < COLUMNS ? end - c : COLUMNS, room, room + packed);
  }
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

}  // namespace host
}  // namespace
