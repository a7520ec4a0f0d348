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
// Not a reference: bit 2 marks a plan entry of a row that was missed, until its target is known. Bits 4 and up hold its source in an extent, bit 3 is
// set where a slot of this round has it; then, in a round of several rows, bits 4 and up hold the number of the miss.
constexpr uint64_t MISSED = 4, HELD = 8, ENTRY = ~(uint64_t)15;

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

// Address of a row by its session's table of extents, in which rows lie `stride_bytes` apart from the extent's start on: plane 0 where extents are
// plane-major.
DEVICE uint64_t extent_row(const uint64_t* table, uint32_t position, uint32_t extent_rows, uint32_t stride_bytes) {
  return table[position / extent_rows] + (uint64_t)(position % extent_rows) * stride_bytes;
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

constexpr uint32_t ORDER = 2048;  // misses whose position and entry are kept in LDS
struct work {
  uint32_t scan[BLOCK_SCAN];
  uint32_t order[ORDER];  // position of the miss
  uint32_t entry[ORDER];  // its place in the row, where the round has one row
  uint64_t arrived;       // GIVE: what has come of the round
  uint32_t round;         // of this row
  uint32_t sums;          // of the block's look-ups: GIVE: missed below, recent from bit 16 on; hot_plan: recent
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
// One row whose misses fit LDS: they have no duplicates, and each knows its entry.
template <class A> DEVICE bool is_single(const A& a, const round_of_group& g) { return g.last - g.first == 1u && a.k <= ORDER; }

// A work-item has ITEMS consecutive entries of a row at a time. What comes up for all of them is unrolled, so that its loads are under way together;
// what comes up for few goes over the bits of a mask: a round is one block, and most of its time is that of instructions which it fetches once.

// Positions of entries from `first` on: loaded before the session is known.
template <uint32_t ITEMS, class A> DEVICE void load_selected(const A& a, uint32_t row, uint32_t first, int32_t* position) {
  const int32_t* selected = (const int32_t*)a.selected + row * a.k;
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) position[i] = selected[first + i < a.k ? first + i : 0u];
}

// Bits of those of a work-item's entries, the first of which is `first`, that lie below `end`.
template <uint32_t ITEMS> DEVICE uint32_t bits_of_entries(uint32_t first, uint32_t end) {
  uint32_t count = end > first ? end - first : 0u;
  return (1u << (count < ITEMS ? count : ITEMS)) - 1u;
}

struct looked_up {
  uint32_t missed, held, recent;  // bits of entries; held: of missed, with a slot; recent: at or past the boundary
};

// Looks entries up; position as load_selected gives it. The plan gets what was found, 0 past the row's end, and of a miss its source, MISSED and HELD. A
// find pins the slot. A fill of the current round is found only if this group is planned twice in a round: it counts as missed, for its bytes may not
// have come. `entry` gets what the plan gets.
template <uint32_t ITEMS, class A>
DEVICE looked_up look_up_entries(const A& a, const round_of_group& g, uint32_t row, uint32_t first, uint32_t count, int32_t* position, uint64_t* entry) {
  uint64_t* plan = (uint64_t*)a.plan + row * a.k;
  uint32_t inside = bits_of_entries<ITEMS>(first, count), recent = 0, known = 0, held = 0, filled[ITEMS];
  int32_t slot[ITEMS];
  uint32_t rest[ITEMS];
  uint64_t extent[ITEMS];
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) position[i] = inside >> i & 1u ? position[i] : 0;
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) slot[i] = g.s.slot_of[position[i]];
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) {  // one division: of the place in the ring, or in the extent
    bool past = position[i] >= g.h.cached;
    uint32_t by = past ? g.h.modulus : a.extent_rows, quotient = (uint32_t)position[i] / by;
    rest[i] = (uint32_t)position[i] - quotient * by;
    recent |= past ? 1u << i : 0u;
    extent[i] = g.table[past ? 0u : quotient];
  }
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) filled[i] = g.s.filled[slot[i] >= 0 ? slot[i] : 0];
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) {
    known |= slot[i] >= 0 && filled[i] != g.h.tag ? 1u << i : 0u;
    held |= slot[i] >= 0 ? 1u << i : 0u;
  }
  uint32_t missed = inside & ~recent & ~known;
  looked_up e = {missed, missed & held, inside & recent};
  uint32_t found = inside & ~recent & known;
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) {
    entry[i] = 0;
    if (found >> i & 1u) {
      g.s.used[slot[i]] = g.h.tag;
      g.s.filled[slot[i]] = 0;
      entry[i] = slot_reference(g.h, (uint32_t)slot[i]);
    } else if (e.recent >> i & 1u) {
      entry[i] = g.h.base + (uint64_t)rest[i] * g.h.row_bytes;
    } else if (e.missed >> i & 1u) {
      entry[i] = extent[i] + (uint64_t)rest[i] * a.source_stride_bytes + a.source_offset_bytes;
      entry[i] |= e.held >> i & 1u ? MISSED | HELD : MISSED;
    }
    if (first + i < a.k) plan[first + i] = entry[i];
  }
  return e;
}

// Entries that have been looked up, by whichever block; position as look_up_entries had it.
template <uint32_t ITEMS, class A> DEVICE looked_up recall(const A& a, uint32_t row, uint32_t first, uint32_t count, int32_t* position) {
  const uint64_t* plan = (const uint64_t*)a.plan + row * a.k;
  uint32_t entry[ITEMS];
  looked_up e = {0, 0, 0};
  load_selected<ITEMS>(a, row, first, position);
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) entry[i] = (uint32_t)plan[first + i < a.k ? first + i : 0u];
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) {
    e.missed |= entry[i] & MISSED ? 1u << i : 0u;
    e.held |= entry[i] & HELD ? 1u << i : 0u;
  }
  e.missed &= bits_of_entries<ITEMS>(first, count);
  e.held &= e.missed;
  return e;
}

// v[i] of values in registers.
template <uint32_t ITEMS, class T> DEVICE T pick(const T* v, uint32_t i) {
  T picked = v[0];
  UNROLL
  for (uint32_t j = 1; j < ITEMS; j++) picked = i == j ? v[j] : picked;
  return picked;
}

// A slot, as it was when it was loaded; beyond the last one: in use.
struct slot_seen {
  uint32_t slot, used;
  int32_t held;
};
// at: from the hand on.
template <class A> DEVICE slot_seen load_slot(const A& a, const round_of_group& g, uint32_t hand, uint32_t at) {
  uint32_t c = hand + (at < a.slots ? at : 0u);
  c = c >= a.slots ? c - a.slots : c;
  return {c, at < a.slots ? g.s.used[c] : g.h.tag, g.s.position_of[c]};
}

// Sums over the round, each below 2^21.
struct tally {
  uint32_t misses, recent, duplicates;
};

// Numbers the misses of a tile in order of their place, after those counted so far. A claim of an earlier row makes a duplicate; new misses are
// claimed, unless no row follows, and enter the fetch list. The plan gets the numbers, but where a miss knows its entry. entry: as look_up_entries has
// it, where a work-item has few; of many it is read again.
template <uint32_t THREADS, uint32_t ITEMS, class A>
DEVICE void number_misses(const A& a, const round_of_group& g, uint32_t row, uint32_t first, const int32_t* position, const uint64_t* entry,
                          const looked_up& e, tally* n, work* w) {
  uint64_t* plan = (uint64_t*)a.plan + row * a.k;
  bool single = is_single(a, g), claims = g.last - g.first > 1u;
  uint32_t claimed = 0;
  if (claims && e.missed) {
    int32_t slot[ITEMS];
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) slot[i] = g.s.slot_of[e.missed >> i & 1u ? position[i] : 0];
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) claimed |= is_claim(slot[i]) ? 1u << i : 0u;
    claimed &= e.missed;
  }
  uint32_t fresh = e.missed & ~claimed;
  ROLLED
  for (uint32_t bits = e.held & fresh; bits; bits &= bits - 1u) drop(g.s, (uint32_t)g.s.slot_of[pick<ITEMS>(position, lowest_bit(bits))]);
  ROLLED
  for (uint32_t bits = claimed; bits; bits &= bits - 1u) {
    uint32_t i = lowest_bit(bits);
    plan[first + i] = (uint64_t)(uint32_t)(claim_of(0) - g.s.slot_of[pick<ITEMS>(position, i)]) << 4 | MISSED;
  }
  static_assert(THREADS * ITEMS < 1u << 16, "the scan of a tile of entries counts in 16 bits");
  uint32_t total, before = block_scan<THREADS>(bit_count(fresh) | bit_count(claimed) << 16, w->scan, &total);
  uint32_t m = n->misses + (before & 0xffffu);
  n->misses += total & 0xffffu;
  n->duplicates += total >> 16;
  ROLLED
  for (uint32_t bits = fresh; bits; bits &= bits - 1u) {
    uint32_t i = lowest_bit(bits), at = first + i, p = (uint32_t)pick<ITEMS>(position, i);
    if (claims) g.s.slot_of[p] = claim_of(m);
    ((int32_t*)a.fetch_positions)[g.list + m] = (int32_t)p;
    ((uint64_t*)a.fetch_sources)[g.list + m] = (ITEMS <= 2 ? pick<ITEMS>(entry, i) : plan[at]) & ENTRY;
    if (m < ORDER) {
      w->order[m] = p;
      w->entry[m] = at;
    }
    if (!single) plan[at] = (uint64_t)m << 4 | MISSED;
    m++;
  }
}

// Miss m gets slot c, which holds position `held`, or none below 0.
template <class A> DEVICE void give_slot(const A& a, const round_of_group& g, uint32_t m, uint32_t c, int32_t held, const work* w) {
  uint32_t p = m < ORDER ? w->order[m] : (uint32_t)((const int32_t*)a.fetch_positions)[g.list + m];
  uint64_t target = slot_reference(g.h, c);
  if (held >= 0) g.s.slot_of[held] = NOWHERE;
  g.s.slot_of[p] = (int32_t)c;
  g.s.position_of[c] = (int32_t)p;
  g.s.used[c] = g.h.tag;
  g.s.filled[c] = g.h.tag;
  ((uint64_t*)a.fetch_targets)[g.list + m] = target;
  if (is_single(a, g)) ((uint64_t*)a.plan)[g.list + w->entry[m]] = target;
}

// Gives the misses in order the slots that this round does not use, in circular order from the hand; `v` is the work-item's first one. The hand stops
// behind the last slot given. Returns how many misses got one; at most one turn, so that a slot given is not considered again.
template <uint32_t THREADS, class A>
DEVICE uint32_t give_slots(const A& a, const round_of_group& g, uint32_t misses, uint32_t hand, slot_seen v, work* w) {
  static_assert(THREADS < 1u << 15, "the scan of a tile of slots counts in 16 bits");
  uint32_t given = 0;
  slot_seen next = load_slot(a, g, hand, THREADS + thread_id());
  for (uint32_t tile = 0; tile < a.slots && given < misses; tile += THREADS) {
    slot_seen after = load_slot(a, g, hand, tile + 2 * THREADS + thread_id());  // a tile takes less time than its slots from memory
    uint32_t open = v.used == g.h.tag ? 0u : v.held >= 0 ? 0x10001u : 1u;  // unpinned below, of them holding a row above
    uint32_t total, before = block_scan<THREADS>(open, w->scan, &total), m = given + (before & 0xffffu);
    given = given + (total & 0xffffu) < misses ? given + (total & 0xffffu) : misses;
    if (open && m < given) {
      give_slot(a, g, m, v.slot, v.held, w);
      if (m + 1u == given) {
        *g.hand = v.slot + 1u == a.slots ? 0u : v.slot + 1u;
        global_add(g.counters + 4, (uint64_t)((before >> 16) + (open >> 16)));
      }
    }
    v = next;
    next = after;
  }
  return given;
}

// Puts the targets of misses into the plan; those without a slot get a staging row and are not cached.
template <uint32_t THREADS, uint32_t ITEMS, class A>
DEVICE void complete(const A& a, const round_of_group& g, uint32_t misses, uint32_t given, const work* w) {
  const int32_t* positions = (const int32_t*)a.fetch_positions + g.list;
  uint64_t *targets = (uint64_t*)a.fetch_targets + g.list, *plan = (uint64_t*)a.plan + g.list;
  bool single = is_single(a, g);
  ROLLED
  for (uint32_t m = given + thread_id(); m < misses; m += THREADS) {
    uint64_t target = (uint64_t)(g.list + m) * a.row_bytes | STAGING;
    g.s.slot_of[m < ORDER ? (int32_t)w->order[m] : positions[m]] = NOWHERE;
    targets[m] = target;
    if (single) plan[w->entry[m]] = target;
  }
  if (single) return;
  block_sync();  // targets
  uint32_t entries = (g.last - g.first) * a.k;
  ROLLED
  for (uint32_t first = thread_id(); first < entries; first += THREADS * ITEMS) {
    uint64_t entry[ITEMS];
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) entry[i] = plan[first + i * THREADS < entries ? first + i * THREADS : first];
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) {
      bool missed = first + i * THREADS < entries && ((uint32_t)entry[i] & MISSED);
      entry[i] = missed ? targets[(uint32_t)entry[i] >> 4] : 0u;
    }
    UNROLL
    for (uint32_t i = 0; i < ITEMS; i++) {
      if (entry[i]) plan[first + i * THREADS] = entry[i];
    }
  }
}

// Misses get slots, the plan their targets. Returns the number of slots given.
template <uint32_t THREADS, uint32_t ITEMS, class A>
DEVICE uint32_t give_round(const A& a, const round_of_group& g, uint32_t misses, uint32_t hand, slot_seen v, work* w) {
  uint32_t given = give_slots<THREADS>(a, g, misses, hand, v, w);
  complete<THREADS, ITEMS>(a, g, misses, given, w);
  return given;
}

// Adds the counts of the block; nothing is written for a round without entries, which may be padding beside the round of the same session.
DEVICE void add_counts(const round_of_group& g, uint32_t rows_selected, uint32_t given, const tally& n) {
  if (thread_id() != 0 || rows_selected == 0) return;
  global_add(g.counters + 0, (uint64_t)(rows_selected - n.misses - n.recent - n.duplicates));
  if (n.recent) global_add(g.counters + 2, (uint64_t)n.recent);
  if (n.misses == 0) return;
  global_add(g.counters + 1, (uint64_t)given);
  global_add(g.counters + 3, (uint64_t)n.duplicates);
  global_add(g.counters + 5, (uint64_t)(n.misses - given));
}

// fetch_counts while a round's misses are not listed: fetch_rows may begin, and reads the listed rows before their targets are known.
constexpr uint32_t UNLISTED = ~0u;

// The sources of a round's list are complete.
DEVICE void list_ends(uint32_t* fetch_count, uint32_t misses) {
  if (thread_id() != 0) return;
  fence_device();
  *fetch_count = misses;
}

// One round, by a block of THREADS work-items with ITEMS entries each at a time. Rows are numbered one after the other, so that each sees the claims
// of those before it; no slot is given before the last one was looked up.
template <uint32_t THREADS, uint32_t ITEMS, class A> DEVICE void plan_round(const A& a, uint32_t round, work* w) {
  constexpr uint32_t TILE = THREADS * ITEMS;
  uint32_t* fetch_count = (uint32_t*)a.fetch_counts + round;
  round_of_group g;
  if (!open_rows(a, round, &g)) {
    if (thread_id() == 0) *fetch_count = 0;
    return;
  }
  if (thread_id() == 0) {
    *fetch_count = UNLISTED;
    fence_device();
    next_may_begin();  // not before that
  }
  uint32_t at = thread_id() * ITEMS, rows_selected = 0, given = 0;
  int32_t position[ITEMS];
  uint64_t entry[ITEMS];
  tally n = {0, 0, 0};
  load_selected<ITEMS>(a, g.first, at, position);
  open_session(a, g.first, &g);
  uint32_t hand = *g.hand;
  if (thread_id() == 0) w->sums = 0;
  block_sync();
  for (uint32_t row = g.first; row < g.last; row++) {
    uint32_t count = (uint32_t)((const int32_t*)a.counts)[row];
    rows_selected += count;
    for (uint32_t tile = 0; tile < a.k; tile += TILE) {
      if (row != g.first || tile) load_selected<ITEMS>(a, row, tile + at, position);
      looked_up e = look_up_entries<ITEMS>(a, g, row, tile + at, count, position, entry);
      if (e.recent) lds_add(&w->sums, bit_count(e.recent));
      number_misses<THREADS, ITEMS>(a, g, row, tile + at, position, entry, e, &n, w);
    }
    block_sync();  // claims, and pins of slots
  }
  n.recent = w->sums;
  slot_seen v = load_slot(a, g, hand, thread_id());
  list_ends(fetch_count, n.misses);
  if (n.misses) given = give_round<THREADS, ITEMS>(a, g, n.misses, hand, v, w);
  add_counts(g, rows_selected, given, n);
}

// Part GIVE: a block looks GIVE_THREADS entries up; the round's last one has GIVE_ITEMS of a row at a time.
constexpr uint32_t GIVE_THREADS = 256, GIVE_ITEMS = 8;
static_assert(GIVE_THREADS * GIVE_ITEMS == ORDER, "a row is one tile, and its misses fit LDS");
DEVICE uint32_t give_blocks(const step_give_args& a) { return (a.k + GIVE_THREADS - 1u) / GIVE_THREADS; }  // of a row

// What a block adds to its round's word of `arrivals`, which is 0 between launches: itself, what it has missed and what it found past the boundary.
constexpr uint32_t ARRIVAL_WORDS = 4, ARRIVAL_MISSED = 21, ARRIVAL_RECENT = 42;

// The misses of rounds are not listed yet; before a block lets the next launch begin. Those of a round by the first block of its first row, without which
// the round does not end; those without rows by the first block of all.
DEVICE void lists_begin(const step_give_args& a, uint32_t block) {
  int32_t row = (int32_t)(block / give_blocks(a));
  if (block % give_blocks(a)) return;
  for (uint32_t round = thread_id(); round < a.rounds; round += GIVE_THREADS) {
    int32_t first = ((const int32_t*)a.round_starts)[round], last = ((const int32_t*)a.round_starts)[round + 1u];
    if (first < last && first == row) ((uint32_t*)a.fetch_counts)[round] = UNLISTED;
    if (first >= last && block == 0) ((uint32_t*)a.fetch_counts)[round] = 0;
  }
  fence_device();
  block_sync();
}

// The round of a query row; false if it is in none.
DEVICE bool find_round(const step_give_args& a, uint32_t row, round_of_group* g, work* w) {
  if (thread_id() == 0) {
    w->round = ~0u;
    w->sums = 0;
  }
  block_sync();
  ROLLED
  for (uint32_t round = thread_id(); round < a.rounds; round += GIVE_THREADS) {
    uint32_t first = (uint32_t)((const int32_t*)a.round_starts)[round], last = (uint32_t)((const int32_t*)a.round_starts)[round + 1u];
    if (first <= row && row < last) w->round = round;
  }
  block_sync();
  return w->round != ~0u && open_rows(a, w->round, g);
}

// True in the block that comes last of a round's: it sees what the others wrote, and `n` has the sums of all.
DEVICE bool last_of_round(const step_give_args& a, const round_of_group& g, tally* n, work* w) {
  constexpr uint32_t MASK = (1u << ARRIVAL_MISSED) - 1u;
  uint64_t* word = (uint64_t*)((uint32_t*)a.arrivals + w->round * ARRIVAL_WORDS);
  fence_device();
  block_sync();
  if (thread_id() == 0) {
    uint64_t own = 1u | (uint64_t)(w->sums & 0xffffu) << ARRIVAL_MISSED | (uint64_t)(w->sums >> 16) << ARRIVAL_RECENT;
    w->arrived = global_add(word, own) + own;
  }
  block_sync();
  uint64_t all = w->arrived;
  if (((uint32_t)all & MASK) != (g.last - g.first) * give_blocks(a)) return false;
  fence_device();
  n->misses = (uint32_t)(all >> ARRIVAL_MISSED) & MASK;
  n->recent = (uint32_t)(all >> ARRIVAL_RECENT);
  if (thread_id() == 0) *word = 0;
  return true;
}

// The rest of a round, when all its entries are looked up: `n` has the misses, duplicates among them, and the recent ones.
DEVICE void give_looked_up(const step_give_args& a, const round_of_group& g, uint32_t hand, tally n, work* w) {
  constexpr uint32_t THREADS = GIVE_THREADS, ITEMS = GIVE_ITEMS;
  uint32_t at = thread_id() * ITEMS, rows_selected = 0, given = 0;
  int32_t position[ITEMS];
  bool missed = n.misses;
  slot_seen v = {0, 0, 0};
  if (missed) v = load_slot(a, g, hand, thread_id());
  n.misses = 0;
  for (uint32_t row = g.first; row < g.last; row++) {
    uint32_t count = (uint32_t)((const int32_t*)a.counts)[row];
    rows_selected += count;
    if (!missed) continue;
    looked_up e = recall<ITEMS>(a, row, at, count, position);
    number_misses<THREADS, ITEMS>(a, g, row, at, position, nullptr, e, &n, w);
    block_sync();  // claims
  }
  list_ends((uint32_t*)a.fetch_counts + w->round, n.misses);
  if (n.misses) given = give_round<THREADS, ITEMS>(a, g, n.misses, hand, v, w);
  add_counts(g, rows_selected, given, n);
}

// What a row's look-ups will need is on its way to the cache: slots by position, tags by slot. `item` of `items` of the row's work-items.
constexpr uint32_t ASKED_LINES = 4096;  // a longer table comes as it is needed: other sessions' want room in the cache too
DEVICE void ask_tables(const step_give_args& a, const round_of_group& g, uint32_t item, uint32_t items) {
#if defined(TILE_MMA)
  auto ask = [&](const void* table, uint32_t words) {
    uint32_t lines = (words + 31u) / 32u;
    for (uint32_t i = item; i < lines && lines <= ASKED_LINES; i += items) ask_line((const uint8_t*)table + i * 128u);
  };
  ask(g.s.slot_of, (uint32_t)g.h.cached);
  ask(g.s.filled, a.slots);
  ask(g.s.used, a.slots);
#else
  (void)a, (void)g, (void)item, (void)items;
#endif
}

// Arguments in LDS, and what those of a rehearsal point at, 64 bytes each in the order of the fields: a row of eight entries, of which one is found, one
// recent and six are missed, and eight slots.
constexpr uint32_t WORLD_ARRAYS = 18, WORLD_WORDS = 16;
struct small_world {
  step_give_args args[2];  // of the rehearsal, of the part
  words16 arrays[WORLD_ARRAYS * WORLD_WORDS / 4];
};
struct give_work {
  work lds;
  small_world world;
};
static_assert(__builtin_offsetof(step_give_args, source_offset_bytes) == WORLD_ARRAYS * 8, "the pointers come first");
static_assert(sizeof(step_give_args) / 4 <= GIVE_THREADS, "a word a work-item");

DEVICE void make_world(const step_give_args& a, small_world* m) {
  uint32_t *words = (uint32_t*)m->arrays, *made = (uint32_t*)&m->args[0], t = thread_id();
  ROLLED
  for (uint32_t i = t; i < WORLD_ARRAYS * WORLD_WORDS; i += GIVE_THREADS) {
    uint32_t array = i / WORLD_WORDS, at = i % WORLD_WORDS, word = 0;
    if (array == 0) word = at;                                        // selected
    if (array == 1) word = 8;                                         // counts
    if (array == 3 || (array == 5 && at == 4)) word = at ? 1u : 0u;   // round_starts; the round of states
    if (array == 5 && at == 3) word = 7;                              // boundary
    if ((array == 6 || array == 7) && at) word = ~0u;                 // slot_of, position_of
    words[i] = word;
  }
  if (t < sizeof(step_give_args) / 4) {
    ((uint32_t*)&m->args[1])[t] = ((const uint32_t*)&a)[t];
    bool none = t == __builtin_offsetof(step_give_args, group) / 4 || t == __builtin_offsetof(step_give_args, source_stride_bytes) / 4;
    if (t >= 2 * WORLD_ARRAYS) made[t] = none || t < __builtin_offsetof(step_give_args, k) / 4 ? 0u : 8u;  // sources are multiples of 16
  }
  if (t < WORLD_ARRAYS) ((uint64_t*)made)[t] = (uint64_t)(words + t * WORLD_WORDS);
  block_sync();
}

// Part GIVE of step_gemv, for one stretch of a query row's entries and a block of 256 work-items: looks them up. The last block of the round then
// numbers all misses, gives them slots and completes plan, fetch list and counters, as plan_round does. One block cannot have a whole row: its
// multiprocessor would take longer for 2,048 entries at random places than the products beside it.
// Before the launch before has ended it reads what only a step's end, or this part of the step before, writes: sessions, rounds, states and hands.
DEVICE void give_stretch(const step_give_args& a, uint32_t block, bool live, work* w) {
  uint32_t row = block / give_blocks(a), at = (block - row * give_blocks(a)) * GIVE_THREADS + thread_id();
  round_of_group g;
  open_session(a, row, &g);
  uint32_t hand = *g.hand;
  bool any = find_round(a, row, &g, w);
  if (live) {
    ask_tables(a, g, at, give_blocks(a) * GIVE_THREADS);
    previous_done();
  }
  if (!any) return;
  uint32_t count = (uint32_t)((const int32_t*)a.counts)[row];
  int32_t position[1];
  uint64_t entry[1];
  load_selected<1>(a, row, at, position);
  looked_up e = look_up_entries<1>(a, g, row, at, count, position, entry);
  if (e.missed | e.recent) lds_add(&w->sums, e.missed | e.recent << 16);
  tally n = {0, 0, 0};
  if (last_of_round(a, g, &n, w)) give_looked_up(a, g, hand, n, w);
}

// `w`: LDS of the caller's. The rehearsal is of the same instructions, so that they come from memory while the launch before goes on.
DEVICE void give_part(const step_give_args& a, uint32_t block, give_work* w) {
  if (REHEARSES) make_world(a, &w->world);
  ROLLED
  for (uint32_t turn = REHEARSES ? 0u : 1u; turn < 2u; turn++) {
    give_stretch(REHEARSES ? w->world.args[turn] : a, turn ? block : 0u, turn, &w->lds);
    if (!turn) block_sync();
  }
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
