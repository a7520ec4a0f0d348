// hotcache.h - where selected rows lie, and the decisions of the hot cache: hot_plan, and part GIVE of step_gemv (give.h).
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

constexpr uint32_t ORDER = 2048;  // misses that are kept in LDS
struct work {
  uint32_t scan[BLOCK_SCAN];
  uint32_t order[ORDER];  // position of the miss; where the round has one row the slot that it gets
  uint64_t entry[ORDER];  // of a round of one row, by its place in the row: of a miss first its source, then its position
  uint16_t place[ORDER];  // likewise: of a miss
  uint32_t evicted;       // likewise: slots given that held a row
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
// One row whose misses fit LDS, which have no duplicates: give_row.
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
template <class A> DEVICE uint32_t slot_at(const A& a, uint32_t hand, uint32_t at) {
  uint32_t c = hand + (at < a.slots ? at : 0u);
  return c >= a.slots ? c - a.slots : c;
}
template <class A> DEVICE slot_seen load_slot(const A& a, const round_of_group& g, uint32_t hand, uint32_t at) {
  uint32_t c = slot_at(a, hand, at);
  return {c, at < a.slots ? g.s.used[c] : g.h.tag, g.s.position_of[c]};
}

// Sums over the round, each below 2^21.
struct tally {
  uint32_t misses, recent, duplicates;
};

// Numbers the misses of a tile in order of their place, after those counted so far. A claim of an earlier row makes a duplicate; new misses are
// claimed, unless no row follows, and enter the fetch list. The plan gets the numbers. entry: as look_up_entries has it, where a work-item has few; of
// many it is read again.
template <uint32_t THREADS, uint32_t ITEMS, class A>
DEVICE void number_misses(const A& a, const round_of_group& g, uint32_t row, uint32_t first, const int32_t* position, const uint64_t* entry,
                          const looked_up& e, tally* n, work* w) {
  uint64_t* plan = (uint64_t*)a.plan + row * a.k;
  bool claims = g.last - g.first > 1u;
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
    if (m < ORDER) w->order[m] = p;
    plan[at] = (uint64_t)m << 4 | MISSED;
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
}

// Gives the misses in order the slots that this round does not use, in circular order from the hand. The hand stops behind the last slot given. Returns
// how many misses got one; at most one turn, so that a slot given is not considered again.
template <uint32_t THREADS, class A> DEVICE uint32_t give_slots(const A& a, const round_of_group& g, uint32_t misses, uint32_t hand, work* w) {
  static_assert(THREADS < 1u << 15, "the scan of a tile of slots counts in 16 bits");
  uint32_t given = 0;
  slot_seen v = load_slot(a, g, hand, thread_id()), next = load_slot(a, g, hand, THREADS + thread_id());
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
  ROLLED
  for (uint32_t m = given + thread_id(); m < misses; m += THREADS) {
    g.s.slot_of[m < ORDER ? (int32_t)w->order[m] : positions[m]] = NOWHERE;
    targets[m] = (uint64_t)(g.list + m) * a.row_bytes | STAGING;
  }
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

// fetch_counts while a round's misses are not listed: fetch_rows may begin, and reads the listed rows before their targets are known.
constexpr uint32_t UNLISTED = ~0u;

// The sources of a round's list are complete.
DEVICE void list_ends(uint32_t* fetch_count, uint32_t misses) {
  if (thread_id() != 0) return;
  fence_device();
  *fetch_count = misses;
}

// The misses are numbered: the list ends, they get slots, the plan their targets. Returns the number of slots given.
template <uint32_t THREADS, uint32_t ITEMS, class A>
DEVICE uint32_t give_round(const A& a, const round_of_group& g, uint32_t misses, uint32_t hand, uint32_t* fetch_count, work* w) {
  list_ends(fetch_count, misses);
  if (misses == 0) return 0;
  uint32_t given = give_slots<THREADS>(a, g, misses, hand, w);
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

// What number_misses and give_round do, in a round of one row whose entries are looked up, ITEMS a work-item: one scan counts misses and slots, so that
// neither waits for the other. Returns the number of slots given.
template <uint32_t THREADS, uint32_t ITEMS, class A>
DEVICE uint32_t give_row(const A& a, const round_of_group& g, uint32_t hand, uint32_t count, uint32_t* fetch_count, uint32_t* missed, work* w) {
  constexpr uint32_t SLOTS = 2, TILE = THREADS * SLOTS;
  static_assert(THREADS * ITEMS < 1u << 16 && THREADS * ITEMS >= ORDER, "a row is one tile, and the scan counts in 16 bits");
  uint64_t* plan = (uint64_t*)a.plan + g.list;
  uint32_t first = thread_id() * ITEMS, misses = 0, given = 0, evicted = 0, fresh = 0;
  int32_t position[ITEMS];
  uint64_t entry[ITEMS];
  slot_seen v[SLOTS];
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) entry[i] = plan[first + i < a.k ? first + i : 0u];
  UNROLL
  for (uint32_t i = 0; i < SLOTS; i++) v[i] = load_slot(a, g, hand, thread_id() * SLOTS + i);
  UNROLL
  for (uint32_t i = 0; i < ITEMS; i++) {
    if (first + i < count && ((uint32_t)entry[i] & MISSED)) {
      w->entry[first + i] = entry[i];
      fresh |= 1u << i;
    }
  }
  load_selected<ITEMS>(a, g.first, first, position);
  for (uint32_t tile = 0; tile == 0 || (tile < a.slots && given < misses); tile += TILE) {
    uint32_t open = 0, total;
    UNROLL
    for (uint32_t i = 0; i < SLOTS; i++) open |= v[i].used != g.h.tag ? 1u << i : 0u;
    uint32_t before = block_scan<THREADS>(bit_count(fresh) | bit_count(open) << 16, w->scan, &total), m = before & 0xffffu, rank = given + (before >> 16);
    if (tile == 0) misses = total & 0xffffu;
    ROLLED
    for (; fresh; fresh &= fresh - 1u, m++) {
      uint32_t i = lowest_bit(fresh), p = (uint32_t)pick<ITEMS>(position, i);
      uint64_t source = w->entry[first + i];
      if ((uint32_t)source & HELD) drop(g.s, (uint32_t)g.s.slot_of[p]);
      ((int32_t*)a.fetch_positions)[g.list + m] = (int32_t)p;
      ((uint64_t*)a.fetch_sources)[g.list + m] = source & ENTRY;
      w->entry[first + i] = p;
      w->place[m] = (uint16_t)(first + i);
    }
    UNROLL
    for (uint32_t i = 0; i < SLOTS; i++) {
      if ((open >> i & 1u) && rank < misses) {
        if (v[i].held >= 0) {
          g.s.slot_of[v[i].held] = NOWHERE;
          evicted++;
        }
        w->order[rank++] = v[i].slot;
      }
      v[i] = load_slot(a, g, hand, tile + TILE + thread_id() * SLOTS + i);
    }
    given = given + (total >> 16) < misses ? given + (total >> 16) : misses;
    block_sync();
    if (tile == 0) list_ends(fetch_count, misses);
  }
  *missed = misses;
  if (misses == 0) return 0;
  if (evicted) lds_add(&w->evicted, evicted);
  if (thread_id() == 0 && given) *g.hand = w->order[given - 1u] + 1u == a.slots ? 0u : w->order[given - 1u] + 1u;
  ROLLED
  for (uint32_t m = thread_id(); m < misses; m += THREADS) {
    uint32_t place = w->place[m], p = (uint32_t)w->entry[place], c = w->order[m];
    uint64_t target = m < given ? slot_reference(g.h, c) : (uint64_t)(g.list + m) * a.row_bytes | STAGING;
    g.s.slot_of[p] = m < given ? (int32_t)c : NOWHERE;
    if (m < given) {
      g.s.position_of[c] = (int32_t)p;
      g.s.used[c] = g.h.tag;
      g.s.filled[c] = g.h.tag;
    }
    ((uint64_t*)a.fetch_targets)[g.list + m] = target;
    plan[place] = target;
  }
  block_sync();
  if (thread_id() == 0 && w->evicted) global_add(g.counters + 4, (uint64_t)w->evicted);
  return given;
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
  if (thread_id() == 0) w->sums = w->evicted = 0;
  block_sync();
  bool single = is_single(a, g);
  for (uint32_t row = g.first; row < g.last; row++) {
    uint32_t count = (uint32_t)((const int32_t*)a.counts)[row];
    rows_selected += count;
    for (uint32_t tile = 0; tile < a.k; tile += TILE) {
      if (row != g.first || tile) load_selected<ITEMS>(a, row, tile + at, position);
      looked_up e = look_up_entries<ITEMS>(a, g, row, tile + at, count, position, entry);
      if (e.recent) lds_add(&w->sums, bit_count(e.recent));
      if (!single) number_misses<THREADS, ITEMS>(a, g, row, tile + at, position, entry, e, &n, w);
    }
    block_sync();  // claims, and pins of slots
  }
  n.recent = w->sums;
  if (single) given = give_row<THREADS, ITEMS>(a, g, hand, rows_selected, fetch_count, &n.misses, w);
  else given = give_round<THREADS, ITEMS>(a, g, n.misses, hand, fetch_count, w);
  add_counts(g, rows_selected, given, n);
}

}  // namespace hotcache
