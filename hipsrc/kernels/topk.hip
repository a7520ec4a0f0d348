// topk.hip - exact selection of the best-scored positions.
//   topk: the min(k, positions[r] + 1) positions p <= positions[r] with the largest scores[r, p], ties to the lowest position, ascending.
// On a side of a pair (share.h) it writes the list of the best of the positions that the side holds, for merge.hip; a score's column is the row of its
// position there.
// Method: radix selection of the k-th largest order key (four passes of eight bits over LDS histograms), then one compaction in position
// order. Integer counts only, so the result is exact and the same on every target. -0 equals +0; NaN counts as -inf.
// A row whose context is no longer than k is the identity and reads no score, or has an empty list. One block a row.
#include "portable.h"
#include "merge.h"
#include "scan.h"
#include "share.h"

namespace topk_select {

constexpr uint32_t THREADS = SCAN_THREADS;
constexpr uint32_t ITEMS = 8;  // consecutive positions a work-item in the compaction; a tile is THREADS * ITEMS < 2^16 positions

// Order key of the k-th largest of scores[0, n) and how many scores of that very key belong to the selection. k < n.
DEVICE selection<uint32_t> boundary(const float* scores, uint32_t n, uint32_t k) {
  SHARED(uint32_t, histogram, 256);
  SHARED(uint32_t, lds, SCAN_THREADS + SCAN_GROUP);
  SHARED(selection<uint32_t>, found, 1);
  uint32_t t = thread_id();
  selection<uint32_t> s = {0u, k};
  for (int32_t shift = 24; shift >= 0; shift -= 8) {
    histogram[t] = 0;
    block_sync();
    for (uint32_t p = t; p < n; p += THREADS) {
      uint32_t key = order_key(scores[p]);
      if (shares_prefix(key, s.prefix, (uint32_t)shift)) lds_add(&histogram[(key >> shift) & 255u], 1u);
    }
    block_sync();
    select_digit(&s, (uint32_t)shift, histogram, lds, found);
  }
  return s;
}

// Calls put(place, column, key) for the columns above the boundary, and the first `s.wanted` on it, in ascending order.
template <class Put> DEVICE void compact(const float* scores, uint32_t n, selection<uint32_t> s, const Put& put) {
  SHARED(uint32_t, lds, SCAN_THREADS + SCAN_GROUP);
  uint32_t above = 0, equal = 0;  // in the tiles before
  for (uint32_t tile = 0; tile < n; tile += THREADS * ITEMS) {
    uint32_t first = tile + thread_id() * ITEMS;
    uint32_t counts = 0;  // above in the low half, equal in the high half
    uint32_t keys[ITEMS];
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) {
      keys[i] = first + i < n ? order_key(scores[first + i]) : 0u;  // 0 is below every key
      counts += (keys[i] > s.prefix ? 1u : 0u) + (keys[i] == s.prefix ? 0x10000u : 0u);
    }
    uint32_t total;
    uint32_t before = block_prefix(counts, lds, &total);
    uint32_t a = above + (before & 0xffffu), e = equal + (before >> 16);
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) {
      bool is_above = keys[i] > s.prefix, is_equal = keys[i] == s.prefix;
      if (is_above || (is_equal && e < s.wanted)) put(a + (e < s.wanted ? e : s.wanted), first + i, keys[i]);
      a += is_above ? 1u : 0u;
      e += is_equal ? 1u : 0u;
    }
    above += total & 0xffffu;
    equal += total >> 16;
  }
}

// The list of a side; n: positions of both sides.
DEVICE void list_row(const topk_args& a, uint32_t row, uint32_t n) {
  uint32_t held = n <= a.k ? 0u : share::rows_of(n, a.extent_rows, a.side, a.sides);
  uint64_t* best = (uint64_t*)a.best + (uint64_t)row * a.k;
  const float* scores = (const float*)a.scores + (uint64_t)row * a.score_stride;
  auto put = [&](uint32_t place, uint32_t column, uint32_t key) {
    best[place] = merge::entry_of(key, share::position_of(column, a.extent_rows, a.side, a.sides));
  };
  if (thread_id() == 0) ((int32_t*)a.counts)[row] = (int32_t)(held < a.k ? held : a.k);
  if (held <= a.k) {
    for (uint32_t i = thread_id(); i < held; i += THREADS) put(i, i, order_key(scores[i]));
    return;
  }
  compact(scores, held, boundary(scores, held, a.k), put);
}

DEVICE void select_row(const topk_args& a, uint32_t row, uint32_t n) {
  int32_t* selected = (int32_t*)a.selected + (uint64_t)row * a.k;
  if (thread_id() == 0) ((int32_t*)a.counts)[row] = (int32_t)(n < a.k ? n : a.k);
  if (n <= a.k) {
    for (uint32_t i = thread_id(); i < a.k; i += THREADS) selected[i] = i < n ? (int32_t)i : -1;
    return;
  }
  const float* scores = (const float*)a.scores + (uint64_t)row * a.score_stride;
  compact(scores, n, boundary(scores, n, a.k), [&](uint32_t place, uint32_t column, uint32_t) { selected[place] = (int32_t)column; });
}

}  // namespace topk_select

// LAUNCH topk block=256
KERNEL(topk, topk_args, 256) {
  uint32_t row = block_x();
  int32_t position = ((const int32_t*)a.positions)[row];
  uint32_t n = position < 0 ? 0u : (uint32_t)position + 1u;
  if (a.sides == 1) topk_select::select_row(a, row, n);
  else topk_select::list_row(a, row, n);
}
