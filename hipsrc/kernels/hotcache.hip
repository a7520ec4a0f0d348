// hotcache.hip - where rows lie: references of rows to write, plans of rows to read, and the decisions of the hot cache of the host tier.
// References, spaces, hot buffer and slot tables: docs/decisions/0003-host-tier.md.
//   place_extent, place_hot, place_linear   reference of the row that each query row is about to write
//   plan_extent, plan_linear                references of the selected rows where no look-up is needed
//   hot_plan                                one round of one selection group: hits, misses, evictions, plan, fetch list
//   finish_round, next_round                the round tag moves on, for the sessions of a step or for one session
//   forget, abandon, seed                   changes to all slot tables of one session, between rounds
#include "portable.h"
#include "hotcache.h"

namespace hotcache {

constexpr uint32_t PLAN_THREADS = 1024, PLAN_ITEMS = 2;
constexpr uint32_t PLACE_THREADS = 64;

template <class A> DEVICE bool row_of(const A& a, uint32_t* row, uint32_t* position) {
  *row = block_x() * PLACE_THREADS + thread_id();
  if (*row >= a.rows) return false;
  int32_t p = ((const int32_t*)a.positions)[*row];
  if (p < 0) ((uint64_t*)a.refs)[*row] = 0;
  *position = (uint32_t)p;
  return p >= 0;
}

}  // namespace hotcache

// Grid: ceil(rows / 64).
// LAUNCH place_extent block=64
KERNEL(place_extent, place_args, 64) {
  uint32_t row, p;
  if (!hotcache::row_of(a, &row, &p)) return;
  const uint64_t* table = (const uint64_t*)a.tables + (uint64_t)((const int32_t*)a.sessions)[row] * a.table_stride;
  ((uint64_t*)a.refs)[row] = hotcache::extent_row(table, p, a.extent_rows, a.row_bytes) | hotcache::EXTENT;
}

// LAUNCH place_hot block=64
KERNEL(place_hot, place_args, 64) {
  uint32_t row, p;
  if (!hotcache::row_of(a, &row, &p)) return;
  const kv_state& state = ((const kv_state*)a.states)[((const int32_t*)a.sessions)[row]];
  ((uint64_t*)a.refs)[row] = state.hot + (uint64_t)(state.full ? p : p % a.ring_rows) * a.row_bytes;
}

// LAUNCH place_linear block=64
KERNEL(place_linear, place_args, 64) {
  uint32_t row, p;
  if (!hotcache::row_of(a, &row, &p)) return;
  ((uint64_t*)a.refs)[row] = (uint64_t)p * a.row_bytes | hotcache::LINEAR;
}

// Grid: ceil(k / 256), rows.
// LAUNCH plan_extent block=256
KERNEL(plan_extent, plan_args, 256) {
  uint32_t i = block_x() * 256u + thread_id(), row = block_y();
  if (i >= a.k) return;
  uint64_t at = (uint64_t)row * a.k + i, reference = 0;
  if ((int32_t)i < ((const int32_t*)a.counts)[row]) {
    uint32_t p = (uint32_t)((const int32_t*)a.selected)[at];
    const uint64_t* table = (const uint64_t*)a.tables + (uint64_t)((const int32_t*)a.sessions)[row] * a.table_stride;
    reference = hotcache::extent_row(table, p, a.extent_rows, a.row_bytes) | hotcache::EXTENT;
  }
  ((uint64_t*)a.plan)[at] = reference;
}

// LAUNCH plan_linear block=256
KERNEL(plan_linear, plan_args, 256) {
  uint32_t i = block_x() * 256u + thread_id(), row = block_y();
  if (i >= a.k) return;
  uint64_t at = (uint64_t)row * a.k + i;
  bool planned = (int32_t)i < ((const int32_t*)a.counts)[row];
  ((uint64_t*)a.plan)[at] = planned ? (uint64_t)(uint32_t)((const int32_t*)a.selected)[at] * a.row_bytes | hotcache::LINEAR : 0u;
}

// Grid: rounds.
// LAUNCH hot_plan block=1024
EARLY_KERNEL(hot_plan, hot_plan_args, 1024, 1) {
  SHARED(hotcache::work, lds, 1);
  previous_done();
  hotcache::plan_round<hotcache::PLAN_THREADS, hotcache::PLAN_ITEMS>(a, block_x(), lds);
}

// Grid: ceil(rounds / 64). Sessions differ; a negative one is padding.
// LAUNCH finish_round block=64
KERNEL(finish_round, finish_round_args, 64) {
  uint32_t i = block_x() * 64u + thread_id();
  if (i >= a.rounds) return;
  int32_t session = ((const int32_t*)a.round_sessions)[i];
  if (session < 0) return;
  uint32_t* round = &((kv_state*)a.states)[session].round;
  *round = hotcache::next_tag(*round);
}

// One work-item: the second half of an abandoned round, when every block of `abandon` has read the tag.
// LAUNCH next_round block=64
KERNEL(next_round, slots_args, 64) {
  if (thread_id() != 0) return;
  uint32_t* round = &((kv_state*)a.states)[a.session].round;
  *round = hotcache::next_tag(*round);
}

// Grid: ceil(slots / 256), groups.
// LAUNCH forget block=256
KERNEL(forget, slots_args, 256) {
  uint32_t c = block_x() * 256u + thread_id();
  if (c >= a.slots) return;
  hotcache::slot_table s = hotcache::table_of(a, (uint64_t)a.session * a.groups + block_y());
  int32_t p = s.position_of[c];
  if (p < 0 || p < a.first || p >= a.last) return;
  s.slot_of[p] = hotcache::NOWHERE;
  hotcache::drop(s, c);
}

// Grid: ceil(max(slots, last) / 256), groups.
// LAUNCH abandon block=256
KERNEL(abandon, slots_args, 256) {
  uint32_t i = block_x() * 256u + thread_id();
  hotcache::slot_table s = hotcache::table_of(a, (uint64_t)a.session * a.groups + block_y());
  if (i < a.slots && s.filled[i] == ((const kv_state*)a.states)[a.session].round) {
    int32_t p = s.position_of[i];
    if (p >= 0) s.slot_of[p] = hotcache::NOWHERE;
    hotcache::drop(s, i);
  }
  if ((int32_t)i < a.last && hotcache::is_claim(s.slot_of[i])) s.slot_of[i] = hotcache::NOWHERE;
}

// Grid: ceil((last - first) / 256), groups. A work-item reads only its own position and slot, and clears only what no other one sets.
// LAUNCH seed block=256
KERNEL(seed, slots_args, 256) {
  uint32_t i = block_x() * 256u + thread_id(), count = (uint32_t)(a.last - a.first);
  if (i >= count) return;
  hotcache::slot_table s = hotcache::table_of(a, (uint64_t)a.session * a.groups + block_y());
  uint32_t c = a.slot + i, p = (uint32_t)a.first + i;
  int32_t evicted = s.position_of[c], earlier = s.slot_of[p];
  if (evicted >= 0 && (evicted < a.first || evicted >= a.last)) s.slot_of[evicted] = hotcache::NOWHERE;
  if (earlier >= 0 && (uint32_t)earlier - a.slot >= count) hotcache::drop(s, (uint32_t)earlier);
  s.slot_of[p] = (int32_t)c;
  s.position_of[c] = (int32_t)p;
  s.used[c] = 0;
  s.filled[c] = 0;
}
