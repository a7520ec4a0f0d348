// give.h - parts GIVE and PLACE of step_gemv: where the rows that a step has selected lie, in the hot cache or in extents.
#pragma once
#include "hotcache.h"

namespace hotcache {

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
    w->sums = w->evicted = 0;
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
  uint32_t at = thread_id() * ITEMS, rows_selected = 0, given = 0, *fetch_count = (uint32_t*)a.fetch_counts + w->round;
  int32_t position[ITEMS];
  bool missed = n.misses, single = is_single(a, g);
  n.misses = 0;
  for (uint32_t row = g.first; row < g.last; row++) {
    uint32_t count = (uint32_t)((const int32_t*)a.counts)[row];
    rows_selected += count;
    if (!missed) continue;
    if (single) {
      given = give_row<THREADS, ITEMS>(a, g, hand, rows_selected, fetch_count, &n.misses, w);
    } else {
      looked_up e = recall<ITEMS>(a, row, at, count, position);
      number_misses<THREADS, ITEMS>(a, g, row, at, position, nullptr, e, &n, w);
      block_sync();  // claims
    }
  }
  if (!missed || !single) given = give_round<THREADS, ITEMS>(a, g, n.misses, hand, fetch_count, w);
  add_counts(g, rows_selected, given, n);
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
  if (live) previous_done();
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

// `w`: LDS of the caller's. The rehearsal is of the same instructions, so that they come from memory while the launch before goes on. !live: nothing but
// that, some launches earlier, by a block of its own: then they come from the L2 cache when they are wanted.
DEVICE void give_part(const step_give_args& a, uint32_t block, bool live, give_work* w) {
  if (REHEARSES) make_world(a, &w->world);
  ROLLED
  for (uint32_t turn = REHEARSES ? 0u : 1u; turn < (live ? 2u : 1u); turn++) {
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
