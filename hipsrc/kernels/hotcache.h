// hotcache.h - where selected rows lie, and the decisions of the hot cache: hot_plan, and parts GIVE and PLACE of step_gemv.
// References, spaces, hot buffer, slot tables and rules: docs/decisions/0003-host-tier.md.
// Tables of a session and group, between two rounds: slot_of[p] == c >= 0 exactly where position_of[c] == p; no claims (values below -1).
// Round tags only ever compare as equal, so that they may wrap: a stale tag equal to the current one costs a miss or pins a slot for a round.
// A slot with filled == the current tag has used == the current tag: what a round fills stays pinned in it.
#pragma once
#include "scan.h"

namespace hotcache {

// Spaces: bits 0 and 1 of a reference (glm53/spec.py, Space). HOT is 0.
constexpr uint64_t EXTENT = 1, STAGING = 2, LINEAR = 3;
// Not a reference: bit 2 marks a plan entry of a row that was missed, until its target is known; bits 4 and up then hold the number of the miss.
constexpr uint64_t MISSED = 4;

constexpr int32_t NOWHERE = -1;  // slot_of: in no slot; position_of: free
// slot_of of a position that is miss m of the running round.
DEVICE int32_t claim_of(uint32_t miss) { return -2 - (int32_t)miss; }
DEVICE bool is_claim(int32_t slot) { return slot < NOWHERE; }

struct slot_table {
  int32_t* slot_of;      // [positions]
  int32_t* position_of;  // [slots]
  uint32_t* used;        // [slots]
  uint32_t* filled;      // [slots]
};

// index: session * groups + group. A: hot_plan_args, step_give_args or slots_args.
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

// What a look-up needs to know of the session.
struct hot_buffer {
  uint64_t base;       // slot 0 of plane 0
  uint32_t tag;        // of this round
  int32_t cached;      // positions below are looked up: the boundary, 0 while the history fits
  uint32_t ring_rows;  // of the session
  uint32_t modulus;    // of positions from `cached` on: more than any position while the history fits
  uint32_t row_bytes;
};

DEVICE hot_buffer open_buffer(const kv_state& state, uint32_t ring_rows, uint32_t row_bytes) {
  return {state.hot, state.round, state.full ? 0 : state.boundary, ring_rows, state.full ? 1u << 31 : ring_rows, row_bytes};
}
DEVICE uint64_t slot_reference(const hot_buffer& h, uint32_t slot) { return h.base + (uint64_t)(h.ring_rows + slot) * h.row_bytes; }

// The plan entry of a row: where it lies on the device, else MISSED. slot, filled: what the tables say, loaded at addresses that are always good, so
// that the loads of several rows are under way together. A find pins the slot. A fill of the current round is found only if this group is
// planned twice in a round: it counts as missed, for its bytes may not have come.
DEVICE uint64_t look_up(const hot_buffer& h, const slot_table& s, int32_t position, int32_t slot, uint32_t filled) {
  if (position >= h.cached) return h.base + (uint64_t)((uint32_t)position % h.modulus) * h.row_bytes;
  if (slot < 0 || filled == h.tag) return MISSED;
  s.used[slot] = h.tag;
  s.filled[slot] = 0;
  return slot_reference(h, (uint32_t)slot);
}

constexpr uint32_t ORDER = 2048;   // misses whose position, then slot, is kept in LDS
constexpr uint32_t WINDOW = 2048;  // slots from the hand whose tags are loaded beside the look-up
struct work {
  uint64_t scan[BLOCK_SCAN];
  uint32_t order[ORDER];
  uint32_t pinned[WINDOW / 32];  // those of the window that this block has pinned: their tags were loaded before
  uint32_t round, last;          // GIVE: of this row; whether its block came last
};

// What a block works on: one round of one group.
struct round_of_group {
  slot_table s;
  hot_buffer h;
  const uint64_t* table;  // of extents
  uint32_t* hand;
  uint64_t* counters;
  uint32_t first, last;  // query rows
  uint32_t list;         // first entry of this round's fetch list, and of its staging rows; rows * k < 2^21, so 32 bits hold every index
};

// The rows of the round; false if it has none.
template <class A> DEVICE bool open_rows(const A& a, uint32_t round, round_of_group* g) {
  g->first = (uint32_t)((const int32_t*)a.round_starts)[round];
  g->last = (uint32_t)((const int32_t*)a.round_starts)[round + 1u];
  g->list = g->first * a.k;
  return g->first < g->last;
}
// row: any of the round.
template <class A> DEVICE void open_session(const A& a, uint32_t row, round_of_group* g) {
  uint32_t session = (uint32_t)((const int32_t*)a.sessions)[row];
  uint64_t index = (uint64_t)session * a.groups + a.group;
  g->s = table_of(a, index);
  g->h = open_buffer(((const kv_state*)a.states)[session], a.ring_rows, a.row_bytes);
  g->table = (const uint64_t*)a.tables + (uint64_t)session * a.table_stride;
  g->hand = (uint32_t*)a.hands + index;
  g->counters = (uint64_t*)a.counters + index * 8u;
}

// ITEMS consecutive entries of a work-item.
constexpr uint32_t FOUND = ~0u, NEW_MISS = ~0u - 1u;
template <uint32_t ITEMS> struct entries {
  int32_t position[ITEMS];
  int32_t slot[ITEMS];     // slot_of
  uint64_t extent[ITEMS];  // address of the extent
  uint32_t miss[ITEMS];    // number of the miss; FOUND: none, or past the end of the row; NEW_MISS: no number yet
  uint32_t recent;         // of them past the boundary
};

// Sums over the round, each below 2^21.
struct tally {
  uint32_t misses, recent, duplicates;
};

// Tables of all items at once. Positions past the boundary may have no extent.
template <uint32_t ITEMS, class A> DEVICE void load_tables(const A& a, const round_of_group& g, entries<ITEMS>* e) {
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) {
    uint32_t extent = (uint32_t)e->position[i] / a.extent_rows;
    e->slot[i] = g.s.slot_of[e->position[i]];
    e->extent[i] = g.table[extent < a.table_stride ? extent : 0u];
  }
}

// ITEMS slots of a work-item, in circular order from the hand.
template <uint32_t ITEMS> struct slots_seen {
  uint32_t slot[ITEMS], used[ITEMS];
  int32_t held[ITEMS];
};
template <uint32_t ITEMS, class A> DEVICE void load_slots(const A& a, const round_of_group& g, uint32_t hand, uint32_t first, slots_seen<ITEMS>* v) {
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) {
    uint32_t c = hand + (first + i < a.slots ? first + i : 0u);
    v->slot[i] = c >= a.slots ? c - a.slots : c;
    v->used[i] = g.s.used[v->slot[i]];
    v->held[i] = g.s.position_of[v->slot[i]];
  }
}

// Entries [first, first + ITEMS) of a row are looked up in two steps: `load_selected` loads what can be loaded before the session is known.
template <uint32_t ITEMS, class A> DEVICE void load_selected(const A& a, uint32_t row, uint32_t first, entries<ITEMS>* e) {
  const int32_t* selected = (const int32_t*)a.selected + row * a.k;
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) e->position[i] = selected[first + i < a.k ? first + i : 0u];
}

// The plan gets what was found, and 0 past the row's end. alone: the round has this tile alone; then v gets the window of slots, as it was before, and
// w what was pinned of it. Else MISSED is left in the plan where nothing was found.
template <uint32_t ITEMS, class A>
DEVICE void look_up_entries(const A& a, const round_of_group& g, uint32_t row, uint32_t first, uint32_t count, bool alone, entries<ITEMS>* e,
                            uint32_t hand, slots_seen<ITEMS>* v, work* w) {
  uint64_t* plan = (uint64_t*)a.plan + row * a.k;
  uint32_t filled[ITEMS];
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) e->position[i] = first + i < count ? e->position[i] : 0;
  load_tables(a, g, e);
  if (alone) load_slots(a, g, hand, first, v);
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) filled[i] = g.s.filled[e->slot[i] >= 0 ? e->slot[i] : 0];
  e->recent = 0;
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) {
    bool inside = first + i < count, recent = inside && e->position[i] >= g.h.cached;
    uint64_t entry = inside ? look_up(g.h, g.s, e->position[i], e->slot[i], filled[i]) : 0u;
    e->miss[i] = entry == MISSED ? NEW_MISS : FOUND;
    e->recent += recent ? 1u : 0u;
    if ((!alone || entry != MISSED) && first + i < a.k) plan[first + i] = entry;
    if (!alone || !inside || recent || entry == MISSED) continue;
    uint32_t from_hand = (uint32_t)e->slot[i] - hand, place = (uint32_t)e->slot[i] < hand ? from_hand + a.slots : from_hand;
    if (place < WINDOW) lds_add(&w->pinned[place / 32u], 1u << place % 32u);  // a slot is found once a row
  }
}

// The same of a row that was looked up by another block.
template <uint32_t ITEMS, class A>
DEVICE void recall_misses(const A& a, const round_of_group& g, uint32_t row, uint32_t first, uint32_t count, entries<ITEMS>* e) {
  const uint64_t* plan = (const uint64_t*)a.plan + row * a.k;
  load_selected(a, row, first, e);
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) e->miss[i] = (uint32_t)plan[first + i < a.k ? first + i : 0u];
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) {
    e->miss[i] = first + i < count && (e->miss[i] & MISSED) ? NEW_MISS : FOUND;
    e->position[i] = e->miss[i] == NEW_MISS ? e->position[i] : 0;
  }
  e->recent = 0;
  load_tables(a, g, e);
}

// Numbers the misses of a tile in order of their place, after those counted so far. A claim of an earlier row makes a duplicate; new misses are
// claimed, unless no row follows, and enter the fetch list with their source.
template <uint32_t THREADS, uint32_t ITEMS, class A>
DEVICE void number_misses(const A& a, const round_of_group& g, entries<ITEMS>* e, tally* n, work* w) {
  uint32_t fresh = 0, duplicates = 0;
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) {
    if (e->miss[i] != NEW_MISS) continue;
    if (is_claim(e->slot[i])) {
      e->miss[i] = (uint32_t)(claim_of(0) - e->slot[i]);
      duplicates++;
    } else {
      if (e->slot[i] >= 0) drop(g.s, (uint32_t)e->slot[i]);
      fresh++;
    }
  }
  uint64_t total, before = block_scan<THREADS>((uint64_t)fresh | (uint64_t)e->recent << 21 | (uint64_t)duplicates << 42, w->scan, &total);
  const uint32_t mask = (1u << 21) - 1u;
  uint32_t m = n->misses + ((uint32_t)before & mask);
  n->misses += (uint32_t)total & mask;
  n->recent += (uint32_t)(total >> 21) & mask;
  n->duplicates += (uint32_t)(total >> 42);
  bool claims = g.last - g.first > 1u;
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) {
    if (e->miss[i] != NEW_MISS) continue;
    uint32_t p = (uint32_t)e->position[i];
    if (claims) g.s.slot_of[p] = claim_of(m);
    ((int32_t*)a.fetch_positions)[g.list + m] = (int32_t)p;
    ((uint64_t*)a.fetch_sources)[g.list + m] = e->extent[i] + (uint64_t)(p % a.extent_rows) * a.row_bytes;
    if (m < ORDER) w->order[m] = p;
    e->miss[i] = m++;
  }
}

// Gives the misses in order the slots that this round does not use, in circular order from the hand; `v` holds the first of them. The hand stops
// behind the last slot given. Returns how many misses got one; at most one turn, so that a slot given is not considered again.
template <uint32_t THREADS, uint32_t ITEMS, class A>
DEVICE uint32_t give_slots(const A& a, const round_of_group& g, uint32_t misses, uint32_t hand, slots_seen<ITEMS>* v, work* w) {
  const int32_t* positions = (const int32_t*)a.fetch_positions + g.list;
  uint32_t given = 0;
  for (uint32_t tile = 0; tile < a.slots && given < misses; tile += THREADS * ITEMS) {
    uint32_t first = tile + thread_id() * ITEMS, open = 0;  // unpinned below, of them holding a row above
    if (tile) load_slots(a, g, hand, first, v);
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) {
      v->used[i] = first + i < a.slots ? v->used[i] : g.h.tag;
      open += v->used[i] == g.h.tag ? 0u : v->held[i] >= 0 ? 0x10001u : 1u;
    }
    uint32_t total, before = block_scan<THREADS>(open, (uint32_t*)w->scan, &total), m = given + (before & 0xffffu), evicted = before >> 16;
    given = given + (total & 0xffffu) < misses ? given + (total & 0xffffu) : misses;
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) {
      if (v->used[i] == g.h.tag || m >= given) continue;
      uint32_t slot = v->slot[i], p = m < ORDER ? w->order[m] : (uint32_t)positions[m];
      if (v->held[i] >= 0) {
        g.s.slot_of[v->held[i]] = NOWHERE;
        evicted++;
      }
      g.s.slot_of[p] = (int32_t)slot;
      g.s.position_of[slot] = (int32_t)p;
      g.s.used[slot] = g.h.tag;
      g.s.filled[slot] = g.h.tag;
      if (m < ORDER) w->order[m] = slot;
      ((uint64_t*)a.fetch_targets)[g.list + m] = slot_reference(g.h, slot);
      m++;
      if (m == given) {
        *g.hand = slot + 1u == a.slots ? 0u : slot + 1u;
        g.counters[4] += evicted;
      }
    }
  }
  return given;
}

// Puts the targets of misses into the plan; those without a slot get a staging row and are not cached.
template <uint32_t ITEMS, class A>
DEVICE void complete(const A& a, const round_of_group& g, uint32_t row, uint32_t first, uint32_t given, const entries<ITEMS>& e, const work* w) {
  uint64_t* targets = (uint64_t*)a.fetch_targets + g.list;
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) {
    uint32_t m = e.miss[i];
    if (m == FOUND) continue;
    uint64_t target = (uint64_t)(g.list + m) * a.row_bytes | STAGING;
    if (m < given) {
      target = m < ORDER ? slot_reference(g.h, w->order[m]) : targets[m];
    } else {
      g.s.slot_of[e.position[i]] = NOWHERE;
      targets[m] = target;
    }
    ((uint64_t*)a.plan)[row * a.k + first + i] = target;
  }
}

// Several tiles: what a first pass left of them in the plan, numbered, and back.
template <uint32_t ITEMS, class A> DEVICE void keep_numbers(const A& a, uint32_t row, uint32_t first, const entries<ITEMS>& e) {
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) {
    if (e.miss[i] != FOUND) ((uint64_t*)a.plan)[row * a.k + first + i] = (uint64_t)e.miss[i] << 4 | MISSED;
  }
}
template <uint32_t ITEMS, class A> DEVICE void recall_numbers(const A& a, uint32_t row, uint32_t first, uint32_t count, entries<ITEMS>* e) {
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) {
    uint32_t at = row * a.k + (first + i < a.k ? first + i : 0u), entry = (uint32_t)((const uint64_t*)a.plan)[at];
    e->position[i] = ((const int32_t*)a.selected)[at];
    e->miss[i] = first + i < count && (entry & MISSED) ? entry >> 4 : FOUND;
  }
}

// Adds the counts of the block; nothing is written for a round without entries, which may be padding beside the round of the same session.
DEVICE void add_counts(const round_of_group& g, uint32_t rows_selected, uint32_t given, const tally& n) {
  if (thread_id() != 0 || rows_selected == 0) return;
  g.counters[0] += rows_selected - n.misses - n.recent - n.duplicates;
  g.counters[1] += given;
  g.counters[2] += n.recent;
  g.counters[3] += n.duplicates;
  g.counters[5] += n.misses - given;
}

// Misses get slots and the plan their targets; `v` holds the first slots from the hand. `e`: of a round of one tile. Returns the number of slots given.
template <uint32_t THREADS, uint32_t ITEMS, class A>
DEVICE uint32_t give_round(const A& a, const round_of_group& g, uint32_t misses, uint32_t hand, bool one_tile, slots_seen<ITEMS>* v, entries<ITEMS>* e,
                           work* w) {
  constexpr uint32_t TILE = THREADS * ITEMS;
  uint32_t at = thread_id() * ITEMS, given = give_slots<THREADS>(a, g, misses, hand, v, w);
  block_sync();
  for (uint32_t row = g.first; row < g.last; row++) {
    uint32_t count = one_tile ? 1u : (uint32_t)((const int32_t*)a.counts)[row];
    for (uint32_t tile = 0; tile < count; tile += TILE) {
      if (!one_tile) recall_numbers(a, row, tile + at, count, e);
      complete(a, g, row, tile + at, given, *e, w);
    }
  }
  return given;
}

// The window's tags are as this block has left them.
template <uint32_t ITEMS> DEVICE void recall_pins(const round_of_group& g, slots_seen<ITEMS>* v, const work* w) {
  static_assert(32 % ITEMS == 0, "the slots of a work-item share a word");
  uint32_t at = thread_id() * ITEMS, bits = w->pinned[at / 32u] >> at % 32u;
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) v->used[i] = bits >> i & 1u ? g.h.tag : v->used[i];
}

// One round, by a block of THREADS work-items with ITEMS entries and slots each at a time. Rows are numbered one after the other, so that each sees the
// claims of those before it; no slot is given before the last one was looked up. A round of one tile keeps its entries in registers.
template <uint32_t THREADS, uint32_t ITEMS, class A> DEVICE void plan_round(const A& a, uint32_t round, work* w) {
  constexpr uint32_t TILE = THREADS * ITEMS;
  static_assert(TILE < 1u << 15, "the scan of a tile of slots counts in 16 bits");
  static_assert(TILE == WINDOW, "the window is the first tile of slots");
  int32_t* fetch_count = (int32_t*)a.fetch_counts + round;
  round_of_group g;
  if (!open_rows(a, round, &g)) {
    if (thread_id() == 0) *fetch_count = 0;
    return;
  }
  bool one_tile = g.last - g.first == 1u && a.k <= TILE;
  uint32_t at = thread_id() * ITEMS, rows_selected = 0, given = 0;
  tally n = {0, 0, 0};
  entries<ITEMS> e;
  slots_seen<ITEMS> v;
  load_selected(a, g.first, at, &e);
  open_session(a, g.first, &g);
  uint32_t hand = *g.hand;
  if (thread_id() < WINDOW / 32u) w->pinned[thread_id()] = 0;
  block_sync();
  for (uint32_t row = g.first; row < g.last; row++) {
    uint32_t count = (uint32_t)((const int32_t*)a.counts)[row];
    rows_selected += count;
    for (uint32_t tile = 0; tile < a.k; tile += TILE) {
      if (row != g.first || tile) load_selected(a, row, tile + at, &e);
      look_up_entries(a, g, row, tile + at, count, one_tile, &e, hand, &v, w);
      number_misses<THREADS>(a, g, &e, &n, w);
      if (!one_tile) keep_numbers(a, row, tile + at, e);
    }
    block_sync();  // claims, and pins of slots
  }
  if (n.misses) {
    if (one_tile) recall_pins(g, &v, w);
    else load_slots(a, g, hand, at, &v);
    given = give_round<THREADS>(a, g, n.misses, hand, one_tile, &v, &e, w);
  }
  add_counts(g, rows_selected, given, n);
  if (thread_id() == 0) *fetch_count = (int32_t)n.misses;
}

constexpr uint32_t GIVE_THREADS = 256, GIVE_ITEMS = 8;
static_assert(GIVE_THREADS * GIVE_ITEMS == WINDOW, "a row is one tile, and the window the first tile of slots");

// Words of `arrivals` of a round: blocks that have come, what they have missed and what they found past the boundary. 0 between launches.
constexpr uint32_t ARRIVAL_WORDS = 4;

// The round of a query row; false if it is in none. The block of row 0 ends rounds without rows.
DEVICE bool find_round(const step_give_args& a, uint32_t row, round_of_group* g, work* w) {
  if (thread_id() == 0) w->round = ~0u;
  if (thread_id() < WINDOW / 32u) w->pinned[thread_id()] = 0;
  block_sync();
  for (uint32_t round = thread_id(); round < a.rounds; round += GIVE_THREADS) {
    uint32_t first = (uint32_t)((const int32_t*)a.round_starts)[round], last = (uint32_t)((const int32_t*)a.round_starts)[round + 1u];
    if (first <= row && row < last) w->round = round;
    if (row == 0 && first >= last) ((int32_t*)a.fetch_counts)[round] = 0;
  }
  block_sync();
  return w->round != ~0u && open_rows(a, w->round, g);
}

// True in the block that comes last of a round's: it sees what the others wrote, and `n` has their sums.
DEVICE bool last_of_round(const step_give_args& a, const round_of_group& g, tally* n, work* w) {
  uint32_t* arrivals = (uint32_t*)a.arrivals + w->round * ARRIVAL_WORDS;
  fence_device();
  block_sync();
  if (thread_id() == 0) {
    if (n->misses) global_add(arrivals + 1, n->misses);
    if (n->recent) global_add(arrivals + 2, n->recent);
    fence_device();
    w->last = global_add(arrivals, 1u) + 1u == g.last - g.first;
  }
  block_sync();
  if (!w->last) return false;
  fence_device();
  n->misses = arrivals[1];
  n->recent = arrivals[2];
  block_sync();
  if (thread_id() < 3) arrivals[thread_id()] = 0;
  return true;
}

// Part GIVE of step_gemv, for one query row and a block of 256 work-items: looks the row up. The last block of the round then numbers all misses, gives
// them slots and completes plan, fetch list and counters, as plan_round does. `w` is LDS of the caller's.
DEVICE void give_part(const step_give_args& a, uint32_t row, work* w) {
  constexpr uint32_t THREADS = GIVE_THREADS, ITEMS = GIVE_ITEMS;
  round_of_group g;
  entries<ITEMS> e;
  slots_seen<ITEMS> v;
  uint32_t at = thread_id() * ITEMS, count = (uint32_t)((const int32_t*)a.counts)[row], rows_selected = 0, given = 0;
  load_selected(a, row, at, &e);
  open_session(a, row, &g);
  uint32_t hand = *g.hand;
  if (!find_round(a, row, &g, w)) return;
  bool alone = g.last - g.first == 1u;
  look_up_entries(a, g, row, at, count, alone, &e, hand, &v, w);
  tally n = {0, 0, 0};
  if (!alone) {
    uint32_t misses = 0, recent = e.recent;
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) misses += e.miss[i] == NEW_MISS ? 1u : 0u;
    uint64_t total;
    block_scan<THREADS>((uint64_t)misses | (uint64_t)recent << 32, w->scan, &total);
    n = {(uint32_t)total, (uint32_t)(total >> 32), 0};
    if (!last_of_round(a, g, &n, w)) return;
    load_slots(a, g, hand, at, &v);
  }
  bool missed = alone || n.misses;
  n.misses = 0;
  for (uint32_t r = g.first; r < g.last; r++) {
    uint32_t of_row = (uint32_t)((const int32_t*)a.counts)[r];
    rows_selected += of_row;
    if (!missed) continue;
    if (!alone) recall_misses(a, g, r, at, of_row, &e);
    number_misses<THREADS>(a, g, &e, &n, w);
    if (!alone) keep_numbers(a, r, at, e);
    block_sync();  // claims
  }
  if (n.misses) {
    if (alone) recall_pins(g, &v, w);
    given = give_round<THREADS>(a, g, n.misses, hand, alone, &v, &e, w);
  }
  add_counts(g, rows_selected, given, n);
  if (thread_id() == 0) ((int32_t*)a.fetch_counts)[w->round] = (int32_t)n.misses;
}

// Part PLACE of step_gemv, for one query row and a block of 256 work-items.
DEVICE void place_part(const step_place_args& a, uint32_t row) {
  constexpr uint32_t THREADS = 256, ITEMS = 8;
  const int32_t* selected = (const int32_t*)a.selected + (uint64_t)row * a.k;
  const uint64_t* table = (const uint64_t*)a.tables + (uint64_t)((const int32_t*)a.sessions)[row] * a.table_stride;
  uint64_t* plan = (uint64_t*)a.plan + (uint64_t)row * a.k;
  uint32_t count = (uint32_t)((const int32_t*)a.counts)[row];
  for (uint32_t first = thread_id(); first < a.k; first += THREADS * ITEMS) {
    uint32_t position[ITEMS];
    uint64_t extent[ITEMS];
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) {
      uint32_t at = first + i * THREADS;
      position[i] = (uint32_t)selected[at < a.k ? at : 0u];
      position[i] = at < count ? position[i] : 0u;
    }
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) extent[i] = table[position[i] / a.extent_rows];
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) {
      uint32_t at = first + i * THREADS;
      uint64_t reference = (extent[i] + (uint64_t)(position[i] % a.extent_rows) * a.row_bytes) | EXTENT;
      if (at < a.k) plan[at] = at < count ? reference : 0u;
    }
  }
}

}  // namespace hotcache
