// mtp_rows.h - kernels of mtp.hip of the fast host build: joined norms in the order of rms_norm, rows and marks copied whole.
#pragma once

namespace {
namespace host {
namespace mtp_rows {

// Grid: (rows, 2).
template <class T> bool join_inputs(const join_inputs_args& a, Blocks& b) {
  for (uint64_t block = b.first; block < b.last; block++) {
    uint64_t r = block % b.grid.x, second = block / b.grid.x;
    const T* x = (const T*)(second ? a.hidden : a.x) + r * a.n;
    const T* weight = (const T*)(second ? a.hidden_norm : a.x_norm);
    values::rms_norm_row(x, weight, a.n, a.eps, (T*)a.y + (2 * r + second) * a.n);
  }
  return true;
}

// Grid: (blocks of MOVE_WORDS, rows moved, moves).
DEVICE bool move_rows(const move_rows_args& a, Blocks& b) {
  for (uint64_t block = b.first; block < b.last; block++) {
    uint64_t first = block % b.grid.x * mtp::MOVE_WORDS, n = block / b.grid.x % b.grid.y, m = block / b.grid.x / b.grid.y;
    uint64_t words = a.row_words[m];
    int32_t from = a.source_index ? ((const int32_t*)a.source_index)[n] : (int32_t)n;
    int32_t to = a.target_index ? ((const int32_t*)a.target_index)[n] : (int32_t)n;
    if (first >= words || from < 0 || to < 0) continue;
    uint64_t count = words - first < mtp::MOVE_WORDS ? words - first : mtp::MOVE_WORDS;
    memcpy((uint32_t*)a.target[m] + (uint64_t)to * words + first, (const uint32_t*)a.source[m] + (uint64_t)from * words + first, count * 4);
  }
  return true;
}

// Grid: (blocks of MARK_TOKENS, sessions).
DEVICE bool mark_drafts(const mark_drafts_args& a, Blocks& b) {
  for (uint64_t block = b.first; block < b.last; block++) {
    uint64_t first = block % b.grid.x * mtp::MARK_TOKENS, s = block / b.grid.x, left = a.vocab - first;
    uint64_t count = left < mtp::MARK_TOKENS ? left : mtp::MARK_TOKENS;
    int32_t slot = ((const int32_t*)a.slots)[s];
    if (slot < 0) continue;
    const uint8_t* from = (const uint8_t*)a.seen + (uint64_t)slot * a.vocab + first;
    for (uint64_t i = 0; i <= a.drafts; i++) {
      uint64_t row = s * (a.drafts + 1) + i;
      uint8_t* to = (uint8_t*)a.scratch + row * a.vocab + first;
      memcpy(to, from, count);
      uint64_t at = (uint64_t)((const int32_t*)a.tokens)[row] - first;  // what is no token of this block is past its end
      if (i && at < count) to[at] = 1;
      from = to;
    }
  }
  return true;
}

}  // namespace mtp_rows

FAST_KERNEL(join_inputs_f32, join_inputs_args, mtp_rows::join_inputs<float>);
FAST_KERNEL(join_inputs_bf16, join_inputs_args, mtp_rows::join_inputs<bf16>);
FAST_KERNEL(move_rows, move_rows_args, mtp_rows::move_rows);
FAST_KERNEL(mark_drafts, mark_drafts_args, mtp_rows::mark_drafts);

}  // namespace host
}  // namespace
