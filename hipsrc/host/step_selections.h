// step_selections.h - step_score_* and step_topk of the fast host build: step_select.hip's scores (in the order of indexer.hip), and its selection by
// other means, since integers alone decide it.
#pragma once

namespace {
namespace host {
namespace step_selections {

using step_select::BIN_SHIFT;
using step_select::BINS;

// First of the rows of keys of block `block`: whole tiles.
DEVICE uint32_t first_of(uint32_t n, uint32_t block, uint32_t blocks) {
  uint32_t at = (uint32_t)((uint64_t)n * block / blocks) / scores::TILE * scores::TILE;
  return block == blocks ? n : at;
}

// Blocks [begin, end) of one row.
template <class T> bool score_row(scores::Query& s, const step_score_args& a, Blocks& b, uint32_t row, uint32_t begin, uint32_t end) {
  int32_t position = ((const int32_t*)a.positions)[row];
  if (position < (int32_t)a.k) return true;
  uint32_t n = share::rows_of((uint32_t)position + 1u, a.extent_rows, a.side, a.sides), pitch = (a.dim + LANES - 1) / LANES * LANES, counted[BINS] = {};
  float* out = (float*)a.scores + (uint64_t)row * a.score_stride;
  scores::load_query<T>(s, a, row, pitch);
  for (uint32_t p = first_of(n, begin, a.blocks), last = first_of(n, end, a.blocks); p < last; p += scores::TILE) {
    uint32_t count = last - p < scores::TILE ? last - p : scores::TILE;
    if (!scores::load_keys<T>(s, a, b, p, count, pitch)) return false;
    scores::score_keys(s, a, pitch, count, out + p);
    for (uint32_t i = 0; i < count; i++) counted[step_select::bin_place(order_key(out[p + i]) >> BIN_SHIFT)]++;
  }
  uint32_t* histogram = (uint32_t*)a.histogram + (uint64_t)row * BINS;
  for (uint32_t i = 0; i < BINS; i++) {
    if (counted[i]) global_add(&histogram[i], counted[i]);
  }
  return true;
}

// Calls body(row, begin, end) for the stretch of blocks of each row. Grid: blocks, rows.
template <class Body> DEVICE bool each_row(const Blocks& b, const Body& body) {
  for (uint64_t block = b.first; block < b.last;) {
    uint64_t row = block / b.grid.x, end = (row + 1) * b.grid.x < b.last ? (row + 1) * b.grid.x : b.last;
    if (!body((uint32_t)row, (uint32_t)(block % b.grid.x), (uint32_t)(end - row * b.grid.x))) return false;
    block = end;
  }
  return true;
}

template <class T> bool score(const step_score_args& a, Blocks& b) {
  scores::Query s;
  return each_row(b, [&](uint32_t row, uint32_t begin, uint32_t end) { return score_row<T>(s, a, b, row, begin, end); });
}

// The list of a side: its rows `chosen`, `count` of them; keys: of all rows.
DEVICE void emit_list(const step_topk_args& a, uint32_t row, const uint32_t* keys, const int32_t* chosen, uint32_t count) {
  uint64_t* best = (uint64_t*)a.best + (uint64_t)row * a.k;
  for (uint32_t i = 0; i < count; i++) {
    best[i] = merge::entry_of(keys[chosen[i]], share::position_of((uint32_t)chosen[i], a.extent_rows, a.side, a.sides));
  }
  ((int32_t*)a.counts)[row] = (int32_t)count;
}

// The selection of a row: `count` positions, ascending.
DEVICE void emit(const step_topk_args& a, uint32_t row, const int32_t* chosen, uint32_t count) {
  for (uint32_t i = 0; i < a.k; i++) ((int32_t*)a.selected)[(uint64_t)row * a.k + i] = i < count ? chosen[i] : -1;
  ((int32_t*)a.counts)[row] = (int32_t)count;
}

// The selection of one row, by the call that has its block 0. What the blocks exchange on a device (entries, arrivals) stays as it is.
inline bool select(const step_topk_args& a, Blocks& b, uint32_t row) {
  int32_t position = ((const int32_t*)a.positions)[row];
  int32_t chosen[step_select::K_MAX];
  uint32_t n = share::rows_of(position < 0 ? 0u : (uint32_t)position + 1u, a.extent_rows, a.side, a.sides);
  if (a.sides != 1 && (position < (int32_t)a.k || n == 0)) {
    emit_list(a, row, nullptr, nullptr, 0);
    return true;
  }
  if (position < (int32_t)a.k) {
    for (int32_t i = 0; i <= position; i++) chosen[i] = i;
    emit(a, row, chosen, (uint32_t)(position + 1));
    return true;
  }
  uint32_t best = n < a.k ? n : a.k, bin = BINS, above = 0;
  const uint32_t* histogram = (const uint32_t*)a.histogram + (uint64_t)row * BINS;
  while (bin-- && above + histogram[step_select::bin_place(bin)] < best) above += histogram[step_select::bin_place(bin)];
  uint32_t wanted = best - above;
  memset((uint32_t*)a.cleared + (uint64_t)row * BINS, 0, BINS * sizeof(uint32_t));
  if (a.drawn) {
    const int32_t* drawn = (const int32_t*)a.drawn + (uint64_t)((*(const uint32_t*)a.draw_index + row) % a.draws) * a.k;
    uint32_t count = 0;
    for (uint32_t i = 0; i < a.k; i++) count += drawn[i] >= 0 ? 1u : 0u;
    emit(a, row, drawn, count);
    return true;
  }
  uint32_t* keys = (uint32_t*)b.scratch(3 * (size_t)n + 2);
  if (!keys) return false;
  uint32_t *inside = keys + n, count = 0, taken = 0;
  const float* scores = (const float*)a.scores + (uint64_t)row * a.score_stride;
  for (uint32_t p = 0; p < n; p++) {
    keys[p] = order_key(scores[p]);
    inside[count] = keys[p];
    count += keys[p] >> BIN_SHIFT == bin ? 1u : 0u;
  }
  uint32_t limit = selections::boundary(inside, count, wanted, inside + n + 1, &wanted);
  for (uint32_t p = 0; p < n && taken < best; p++) {
    uint32_t equal = keys[p] == limit && wanted ? 1u : 0u;
    wanted -= equal;
    chosen[taken] = (int32_t)p;
    taken += keys[p] > limit ? 1u : equal;
  }
  if (a.sides == 1) emit(a, row, chosen, a.k);
  else emit_list(a, row, keys, chosen, best);
  return true;
}

inline bool topk(const step_topk_args& a, Blocks& b) {
  return each_row(b, [&](uint32_t row, uint32_t begin, uint32_t) { return begin != 0 || select(a, b, row); });
}

}  // namespace step_selections

FAST_KERNEL(step_score_f32, step_score_args, step_selections::score<float>);
FAST_KERNEL(step_score_bf16, step_score_args, step_selections::score<bf16>);
FAST_KERNEL(step_topk, step_topk_args, step_selections::topk);

}  // namespace host
}  // namespace
