// step_halves.hip - y = T(residual + x @ w^T) of a decode step for T = bf16, where two blocks share a set of columns and each has half of k: the order in
// which a pair of devices, which have half of the weights each, adds. Struct: step_gemv_args, segment 0, no norm; part FETCH. The wave product
// (wave_product.h), wide where the first half of k is at least LONG_K.
#include "portable.h"
#include "fetch.h"
#include "wave_one.h"

namespace step_halves {

using namespace wave_product;

template <class W> DEVICE void run(const step_gemv_args& a) {
  SHARED(words16, x, WAVES * X_BYTES / 16);
  SHARED(float, x_scale, SIDE);
  SHARED(float, sums, SUMS);
  SHARED(uint32_t, word, 1);
  next_may_begin();
  if (block_x() < a.part_blocks) {
    previous_done();
    history_rows::fetch_part(a.part_fetch, block_x(), a.part_blocks, a.rounds);
    return;
  }
  uint32_t block = block_x() - a.part_blocks, half = block % 2, turns = (a.rows + ROWS - 1) / ROWS, set = block / 2 / turns;
  uint32_t first_row = (block / 2 - set * turns) * ROWS, rows = a.rows - first_row < ROWS ? a.rows - first_row : ROWS, last = a.n[0] - 1u;
  bool wide = a.wide;
  uint32_t column = (wide ? set : set * WAVES + tile_group()) * COLS;
  Weights w = half_of(a.k, 1, half, wide);
  auto at = [&](uint32_t) { return Matrix{(const uint8_t*)a.codes[0], (const uint16_t*)a.scales[0]}; };
  Walk<W> walk;
  begin(walk, w, at, [&](uint32_t i) { return column + i < last ? column + i : last; });
  previous_done();
  const bf16* from = (const bf16*)a.x + (uint64_t)first_row * a.x_stride + w.first;
  Lds lds = {x, x_scale, nullptr, sums, nullptr};
  product(walk, w, at, lds, rows, [&](uint32_t, uint32_t r) { return from + (uint64_t)r * a.x_stride; }, {});
  auto sum = [&](uint32_t wave, uint32_t row) { return sum_of(w, lds, wave, row, {}); };
  Halves halves = {(float*)a.partial, (uint32_t*)a.arrivals};
  for_both(halves, block / 2, half, wide, rows, word, sum, [&](uint32_t wave, uint32_t lane, uint32_t row, float both) {
    uint32_t to = (wide ? set : set * WAVES + wave) * COLS + lane;
    uint64_t index = (uint64_t)(first_row + row) * a.y_stride[0] + to;
    if (to <= last) store_f32((bf16*)a.y[0] + index, load_f32((const bf16*)a.residual + index) + both);
  });
}

#if defined(TILE_MMA)
// One row of x.
template <class W> DEVICE void run_one(const step_gemv_args& a) {
  SHARED(words16, ring, wave_one::RING_UNITS);
  SHARED(uint64_t, scales, WAVES * COLS);
  SHARED(words16, planes, wave_one::X_UNITS);
  SHARED(float, x_scale, WAVES * RUN);
  SHARED(float, sums, WAVES * COLS);
  SHARED(uint32_t, word, 1);
  next_may_begin();
  if (block_x() < a.part_blocks) {
    previous_done();
    history_rows::fetch_part(a.part_fetch, block_x(), a.part_blocks, a.rounds);
    return;
  }
  uint32_t block = block_x() - a.part_blocks, half = block % 2, set = block / 2, last = a.n[0] - 1u;
  bool wide = a.wide;
  uint32_t column = (wide ? set : set * WAVES + tile_group()) * COLS;
  Weights w = half_of(a.k, 1, half, wide);
  auto at = [&](uint32_t) { return Matrix{(const uint8_t*)a.codes[0], (const uint16_t*)a.scales[0]}; };
  wave_one::Lds lds = {ring, scales, planes, x_scale, nullptr, sums, nullptr};
  wave_one::Walk<W> walk;
  wave_one::begin(walk, w, lds, at, [&](uint32_t i) { return column + i < last ? column + i : last; });
  previous_done();
  const bf16* x = (const bf16*)a.x + w.first;
  wave_one::product(walk, w, at, lds, [&](uint32_t) { return x; }, {});
  auto sum = [&](uint32_t wave, uint32_t) { return wave_one::sum_of(w, lds, wave, {}); };
  for_both({(float*)a.partial, (uint32_t*)a.arrivals}, set, half, wide, 1, word, sum, [&](uint32_t wave, uint32_t lane, uint32_t, float both) {
    uint32_t to = (wide ? set : set * WAVES + wave) * COLS + lane;
    if (to <= last) store_f32((bf16*)a.y[0] + to, load_f32((const bf16*)a.residual + to) + both);
  });
}
#else
template <class W> DEVICE void run_one(const step_gemv_args& a) { run<W>(a); }
#endif

}  // namespace step_halves

// Grid: part_blocks + 2 * blocks of 8 rows of x and cols columns where half of k is at least long_k, else cols_short.
// LAUNCH step_halves_bf16_bf16 block=256 cols=32 cols_short=256 long_k=1024
EARLY_KERNEL(step_halves_bf16_bf16, step_gemv_args, 256, 2) { step_halves::run<bf16_weights>(a); }
// LAUNCH step_halves_bf16_q8g64 block=256 cols=32 cols_short=256 long_k=1024
EARLY_KERNEL(step_halves_bf16_q8g64, step_gemv_args, 256, 3) { step_halves::run<q8g64_weights>(a); }
// Of one row of x: the same bits.
// LAUNCH step_halves_one_bf16_q8g64 block=256 cols=32 cols_short=256 long_k=1024
EARLY_KERNEL(step_halves_one_bf16_q8g64, step_gemv_args, 256, 3) { step_halves::run_one<q8g64_weights>(a); }
