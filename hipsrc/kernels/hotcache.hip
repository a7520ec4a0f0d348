// hotcache.hip - where rows lie: references of rows to write, plans of rows to read, and the decisions of the hot cache of the host tier.
// References, spaces, hot buffer and slot tables: docs/decisions/0003-host-tier.md.
//   place_extent, place_hot, place_linear   reference of the row that each query row is about to write
//   plan_extent, plan_linear                references of the selected rows where no look-up is needed
//   hot_plan                                one round of one selection group: hits, misses, evictions, plan, fetch list
//   finish_round, next_round                the round tag moves on, for the sessions of a step or for one session
//   forget, abandon, seed                   changes to all slot tables of one session, between rounds
// Tables of a session and group, between two launches: slot_of[p] == c >= 0 exactly where position_of[c] == p; no claims (values below -1).
// Round tags only ever compare as equal, so that they may wrap: a stale tag equal to the current one costs a miss or pins a slot for a round.
#include "portable.h"
#include "scan.h"

namespace hotcache {

constexpr uint32_t THREADS = SCAN_THREADS;
constexpr uint32_t ITEMS = 4;  // consecutive entries a work-item: their loads are under way together, and a scan serves TILE entries; 8 spill on gfx9
constexpr uint32_t TILE = THREADS * ITEMS;
constexpr uint32_t PLACE_THREADS = 64;

// Spaces: bits 0 and 1 of a reference (glm53/spec.py, Space). HOT is 0.
constexpr uint64_t EXTENT = 1, STAGING = 2, LINEAR = 3;
// Not a reference: bit 2 marks a plan entry as miss number `entry >> 4` of the round until its target is known.
constexpr uint64_t MISSED = 4;
constexpr uint64_t NEW_MISS = 8;  // a miss that has no number yet

constexpr int32_t NOWHERE = -1;  // slot_of: in no slot; position_of: free
// slot_of of a position that is miss m of the running launch.
DEVICE int32_t claim_of(uint32_t miss) { return -2 - (int32_t)miss; }
DEVICE bool is_claim(int32_t slot) { return slot < NOWHERE; }

struct slot_table {
  int32_t* slot_of;      // [positions]
  int32_t* position_of;  // [slots]
  uint32_t* used;        // [slots]
  uint32_t* filled;      // [slots]
};

// index: session * groups + group. A: hot_plan_args or slots_args.
template <class A> DEVICE slot_table table_of(const A& a, uint64_t index) {
  return {(int32_t*)a.slot_of + index * a.positions, (int32_t*)a.position_of + index * a.slots, (uint32_t*)a.used + index * a.slots,
          (uint32_t*)a.filled + index * a.slots};
}

// Slot c holds nothing any more. Its tag of use stays: a slot read in this round stays pinned.
DEVICE void drop(const slot_table& s, uint32_t c) {
  s.position_of[c] = NOWHERE;
  s.filled[c] = 0;
}

// Address of plane 0 of a row by its session's table of extents.
DEVICE uint64_t extent_row(const uint64_t* table, uint32_t position, uint32_t extent_rows, uint32_t row_bytes) {
  return table[position / extent_rows] + (uint64_t)(position % extent_rows) * row_bytes;
}

DEVICE uint32_t next_tag(uint32_t round) { return round + 1u == 0u ? 1u : round + 1u; }

// What a block of hot_plan works on.
struct round_of_group {
  slot_table s;
  uint64_t hot;        // slot 0 of plane 0
  uint32_t tag;        // of this round
  int32_t cached;      // positions below are looked up: the boundary, 0 while the history fits
  uint32_t ring_rows;  // modulus of the others: more than any position while the history fits
  const uint64_t* table;  // of extents
  uint64_t index;         // session * groups + group
  uint32_t list;  // first entry of this round's fetch list, and of its staging rows; rows * k < 2^21, so 32 bits hold every index
};

// Entries of one work-item, by what became of them.
struct tally {
  uint32_t recent, duplicates, evictions;
};

// Looks up one row: references of what lies on the device, numbers of what is missed. New misses, counted from `misses` on, are claimed and
// enter the fetch list in order of their place in the row. Returns the number of misses after the row. A find pins the slot. A fill of the
// current round is found only if this group is planned twice in a round: it is dropped, for its bytes may not have come.
// Loads of all items come before the first store, at addresses that are always good, so that they are under way together.
DEVICE uint32_t look_up_row(const hot_plan_args& a, const round_of_group& g, uint32_t row, uint32_t count, uint32_t misses, tally* n, uint32_t* lds) {
  const int32_t* selected = (const int32_t*)a.selected + row * a.k;
  uint64_t* plan = (uint64_t*)a.plan + row * a.k;
  for (uint32_t tile = 0; tile < count; tile += TILE) {
    uint32_t first = tile + thread_id() * ITEMS, missed = 0;
    int32_t position[ITEMS], slot[ITEMS];
    uint32_t filled[ITEMS];
    uint64_t entry[ITEMS];
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) position[i] = selected[first + i < count ? first + i : count - 1u];
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) slot[i] = g.s.slot_of[position[i] < g.cached ? position[i] : 0];
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) filled[i] = g.s.filled[slot[i] >= 0 ? slot[i] : 0];
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) {
      entry[i] = 0;
      if (first + i >= count) continue;
      if (position[i] >= g.cached) {
        entry[i] = g.hot + (uint64_t)((uint32_t)position[i] % g.ring_rows) * a.row_bytes;
        n->recent++;
      } else if (slot[i] >= 0 && filled[i] != g.tag) {
        g.s.used[slot[i]] = g.tag;
        g.s.filled[slot[i]] = 0;
        entry[i] = g.hot + (uint64_t)(a.ring_rows + (uint32_t)slot[i]) * a.row_bytes;
      } else if (is_claim(slot[i])) {
        entry[i] = (uint64_t)(uint32_t)(claim_of(0) - slot[i]) << 4 | MISSED;
        n->duplicates++;
      } else {
        if (slot[i] >= 0) drop(g.s, (uint32_t)slot[i]);
        entry[i] = NEW_MISS;
        missed++;
      }
    }
    uint32_t total, m = misses + block_prefix(missed, lds, &total);
    misses += total;
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) {
      if (entry[i] == NEW_MISS) {
        g.s.slot_of[position[i]] = claim_of(m);
        ((int32_t*)a.fetch_positions)[g.list + m] = position[i];
        entry[i] = (uint64_t)m << 4 | MISSED;
        m++;
      }
      if (first + i < count) plan[first + i] = entry[i];
    }
  }
  for (uint32_t i = count + thread_id(); i < a.k; i += THREADS) plan[i] = 0;
  return misses;
}

// Gives the misses in order the slots that this round does not use, in circular order from the hand. The hand stops behind the last slot given.
// Returns how many misses got one; at most one turn, so that a slot given is not considered again.
DEVICE uint32_t give_slots(const hot_plan_args& a, const round_of_group& g, uint32_t misses, tally* n, uint32_t* lds) {
  uint32_t* hand_at = (uint32_t*)a.hands + g.index;
  const int32_t* positions = (const int32_t*)a.fetch_positions + g.list;
  uint32_t hand = *hand_at, given = 0;
  for (uint32_t tile = 0; tile < a.slots && given < misses; tile += TILE) {
    uint32_t first = tile + thread_id() * ITEMS, unpinned = 0, slot[ITEMS], used[ITEMS];
    int32_t evicted[ITEMS], position[ITEMS];
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) {
      uint32_t c = hand + (first + i < a.slots ? first + i : 0u);
      slot[i] = c >= a.slots ? c - a.slots : c;
      used[i] = g.s.used[slot[i]];
    }
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) {
      used[i] = first + i < a.slots ? used[i] : g.tag;
      unpinned += used[i] != g.tag ? 1u : 0u;
    }
    uint32_t total, first_miss = given + block_prefix(unpinned, lds, &total), m = first_miss;
    given = given + total < misses ? given + total : misses;
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) {
      position[i] = positions[m < misses ? m : 0u];
      evicted[i] = g.s.position_of[slot[i]];
      m += used[i] != g.tag ? 1u : 0u;
    }
    m = first_miss;
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) {
      if (used[i] == g.tag || m >= given) continue;
      if (evicted[i] >= 0) {
        g.s.slot_of[evicted[i]] = NOWHERE;
        n->evictions++;
      }
      g.s.slot_of[position[i]] = (int32_t)slot[i];
      g.s.position_of[slot[i]] = position[i];
      g.s.used[slot[i]] = g.tag;
      g.s.filled[slot[i]] = g.tag;
      ((uint64_t*)a.fetch_targets)[g.list + m] = g.hot + (uint64_t)(a.ring_rows + slot[i]) * a.row_bytes;
      m++;
      if (m == given) *hand_at = slot[i] + 1u == a.slots ? 0u : slot[i] + 1u;
    }
  }
  return given;
}

// Completes the fetch list: where each miss comes from, and a staging row for those without a slot, which are not cached.
// As above, the loads of all items come before the first store: otherwise each would wait for the one before it.
DEVICE void complete_list(const hot_plan_args& a, const round_of_group& g, uint32_t given, uint32_t misses) {
  const int32_t* positions = (const int32_t*)a.fetch_positions + g.list;
  for (uint32_t tile = 0; tile < misses; tile += TILE) {
    uint32_t first = tile + thread_id(), p[ITEMS];
    uint64_t source[ITEMS];
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) p[i] = (uint32_t)positions[first + i * THREADS < misses ? first + i * THREADS : 0u];
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) source[i] = extent_row(g.table, p[i], a.extent_rows, a.row_bytes);
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) {
      uint32_t m = first + i * THREADS;
      if (m >= misses) continue;
      ((uint64_t*)a.fetch_sources)[g.list + m] = source[i];
      if (m < given) continue;
      g.s.slot_of[p[i]] = NOWHERE;
      ((uint64_t*)a.fetch_targets)[g.list + m] = (uint64_t)(g.list + m) * a.row_bytes | STAGING;
    }
  }
}

// Puts the targets of misses into the plan entries [g.list, end) that wait for them.
DEVICE void complete_plan(const hot_plan_args& a, const round_of_group& g, uint32_t end) {
  uint64_t* plan = (uint64_t*)a.plan;
  for (uint32_t tile = g.list; tile < end; tile += TILE) {
    uint32_t first = tile + thread_id();
    uint64_t entry[ITEMS], target[ITEMS];
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) entry[i] = first + i * THREADS < end ? plan[first + i * THREADS] : 0u;
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) target[i] = ((const uint64_t*)a.fetch_targets)[g.list + (entry[i] & MISSED ? (uint32_t)(entry[i] >> 4) : 0u)];
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) {
      if (entry[i] & MISSED) plan[first + i * THREADS] = target[i];
    }
  }
}

// Adds the counts of the block; nothing is written for a round without entries, which may be padding beside the round of the same session.
DEVICE void count(const hot_plan_args& a, const round_of_group& g, uint32_t entries, uint32_t misses, uint32_t given, tally n) {
  SHARED(uint64_t, lds, SCAN_THREADS + SCAN_GROUP);
  uint64_t packed = (uint64_t)n.recent | (uint64_t)n.duplicates << 21 | (uint64_t)n.evictions << 42, total;  // sums below 2^21 each
  block_prefix(packed, lds, &total);
  if (thread_id() != 0 || entries == 0) return;
  uint64_t mask = (1u << 21) - 1u, recent = total & mask, duplicates = total >> 21 & mask;
  uint64_t* counters = (uint64_t*)a.counters + g.index * 8u;
  counters[0] += entries - misses - recent - duplicates;
  counters[1] += given;
  counters[2] += recent;
  counters[3] += duplicates;
  counters[4] += total >> 42;
  counters[5] += misses - given;
}

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

// Grid: rounds. Four passes with the block in step: look up and pin every row, give slots, complete the fetch list, put targets into the plan. A row
// sees the claims of the rows before it, and no slot is given before the last row was looked up.
// LAUNCH hot_plan block=256
KERNEL(hot_plan, hot_plan_args, 256) {
  SHARED(uint32_t, lds, SCAN_THREADS + SCAN_GROUP);
  uint32_t first = (uint32_t)((const int32_t*)a.round_starts)[block_x()], last = (uint32_t)((const int32_t*)a.round_starts)[block_x() + 1u];
  int32_t* fetch_count = (int32_t*)a.fetch_counts + block_x();
  if (first >= last) {
    if (thread_id() == 0) *fetch_count = 0;
    return;
  }
  hotcache::round_of_group g;
  uint32_t session = (uint32_t)((const int32_t*)a.sessions)[first];
  const kv_state& state = ((const kv_state*)a.states)[session];
  g.index = (uint64_t)session * a.groups + a.group;
  g.s = hotcache::table_of(a, g.index);
  g.table = (const uint64_t*)a.tables + (uint64_t)session * a.table_stride;
  g.hot = state.hot;
  g.tag = state.round;
  g.cached = state.full ? 0 : state.boundary;
  g.ring_rows = state.full ? 1u << 31 : a.ring_rows;
  g.list = first * a.k;
  uint32_t misses = 0, entries = 0;
  hotcache::tally n = {0, 0, 0};
  for (uint32_t row = first; row < last; row++) {
    uint32_t count = (uint32_t)((const int32_t*)a.counts)[row];
    misses = hotcache::look_up_row(a, g, row, count, misses, &n, lds);
    entries += count;
    block_sync();
  }
  uint32_t given = hotcache::give_slots(a, g, misses, &n, lds);
  hotcache::complete_list(a, g, given, misses);
  hotcache::count(a, g, entries, misses, given, n);
  if (thread_id() == 0) *fetch_count = (int32_t)misses;
  if (misses == 0) return;
  block_sync();
  hotcache::complete_plan(a, g, last * a.k);
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
