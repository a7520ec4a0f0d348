// step_halves_rows.h - step_halves_* of the fast host build. Of two blocks that share their columns, the first does what both have.
#pragma once

namespace {
namespace host {
namespace step_halves {

// Blocks [first, last) of part FETCH.
inline bool run_fetch(const step_gemv_args& a, uint32_t first, uint32_t last, Blocks& b) {
  for (uint32_t block = first; block < last; block++) {
    for (uint32_t round = 0; round < a.rounds; round++) {
      if (!fetches::fetch_round(a.part_fetch, round, block, a.part_blocks, b)) return false;
    }
  }
  return true;
}

// Grid: part_blocks + 2 * blocks of 8 rows of x and one set of columns.
template <class W> bool run(const step_gemv_args& a, Blocks& b) {
  uint32_t first = (uint32_t)b.first, last = (uint32_t)b.last;
  if (first < a.part_blocks) {
    uint32_t end = last < a.part_blocks ? last : a.part_blocks;
    if (!run_fetch(a, first, end, b)) return false;
    first = end;
  }
  first = (first - a.part_blocks + 1) / 2;
  last = last > a.part_blocks ? (last - a.part_blocks + 1) / 2 : 0;
  if (first >= last) return true;
  constexpr uint32_t ROWS = wave_product::ROWS, COLUMNS_MAX = wave_product::WAVES * wave_product::COLS;
  bool wide = a.wide;
  uint32_t turns = (a.rows + ROWS - 1) / ROWS, columns = wide ? wave_product::COLS : COLUMNS_MAX, n = a.n[0];
  size_t pitch = waves::row_floats(a.k);
  float *x = b.scratch(a.rows * (pitch + COLUMNS_MAX)), *sums = x + a.rows * pitch;
  if (!x) return false;
  for (uint32_t r = 0; r < a.rows; r++) waves::prepare<W>((const bf16*)a.x + (uint64_t)r * a.x_stride, nullptr, 1.0f, a.k, x + r * pitch);
  for (uint32_t block = first, taken; block < last; block += taken) {  // those of one set of columns together: some rows of x
    uint32_t set = block / turns, turn = block % turns, row = turn * ROWS, column = set * columns;
    uint32_t count = n - column < columns ? n - column : columns;
    taken = turns - turn < last - block ? turns - turn : last - block;
    uint32_t rows = taken * ROWS < a.rows - row ? taken * ROWS : a.rows - row;
    auto of = [&](uint32_t i) { return waves::weight_row<W>(a.codes[0], a.scales[0], column + i, a.k); };
    waves::dots<W>(of, count, x + row * pitch, rows, a.k, wide, true, sums, COLUMNS_MAX);
    for (uint32_t r = 0; r < rows; r++) {
      uint64_t at = (uint64_t)(row + r) * a.y_stride[0] + column;
      for (uint32_t c = 0; c < count; c++) store_f32((bf16*)a.y[0] + at + c, load_f32((const bf16*)a.residual + at + c) + sums[r * COLUMNS_MAX + c]);
    }
  }
  return true;
}

}  // namespace step_halves

FAST_KERNEL(step_halves_bf16_bf16, step_gemv_args, step_halves::run<bf16_weights>);
FAST_KERNEL(step_halves_bf16_q8g64, step_gemv_args, step_halves::run<q8g64_weights>);
FAST_KERNEL(step_halves_one_bf16_q8g64, step_gemv_args, step_halves::run<q8g64_weights>);

}  // namespace host
}  // namespace
