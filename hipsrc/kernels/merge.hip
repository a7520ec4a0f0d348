// merge.hip - the selection of a pair of devices from the local lists of both sides (merge.h, docs/decisions/0006-pair.md), the same on both.
//   merge_lists      both lists in memory of this device
//   exchange_lists   posts this side's lists into the other's mailbox, receives the other's, merges
// selected[r]: the k best of both lists, positions ascending; a row with positions[r] < k is the identity. One block a row, k <= 2048.
// Method: the bits in which any two entries differ start the digits of a radix selection, 12 bits each, over entries in registers, until all of the
// last digit are wanted, or few have it, which are compared with one another; a chosen entry's place is its rank in its own list and, by binary
// search, in the other. Integers decide: exact.
// Words of a row in a mailbox: keys [k], ~positions [k], count; those past the count are neither posted nor waited for. A row without lists exchanges
// its count, so that neither side is ever more than one exchange ahead.
// exchange_lists rehearses (portable.h): a block goes through its code once before it waits for the launch before it; `live` is false then.
// A word that does not come within the budget raises error[0] (mailbox.h); the row then selects nothing, unless it is the identity.
#include "portable.h"
#include "mailbox.h"
#include "merge.h"
#include "scan.h"

namespace merge {

constexpr uint32_t THREADS = 1024;
constexpr uint32_t EACH = 2;  // neighbours of a list that a work-item holds
constexpr uint32_t K_MAX = EACH * THREADS;
constexpr uint32_t DIGIT_BITS = 12, BINS = 1u << DIGIT_BITS;
constexpr uint32_t WAVES = THREADS / 32;
constexpr uint32_t FEW = 64;  // entries that are compared with one another
static_assert(BINS == BINS_EACH * THREADS && BINS_EACH == 4, "the bins of a work-item are 16 bytes");
static_assert(WAVES == 32, "32 lanes see the result of every 32");

// What a work-item holds of both lists, 0: none: E entries of this side's, then of the other's, those of a list in ascending order.
template <uint32_t E> struct held_entries {
  uint64_t e[2 * E];
  uint32_t counts[2];  // of the lists, in every work-item
};

// One more than the highest bit that is set; 0: none.
DEVICE uint32_t bit_length(uint64_t v) {
  uint32_t high = (uint32_t)(v >> 32), word = high ? high : (uint32_t)v;
  UNROLL
  for (uint32_t i = 1; i < 32; i *= 2) word |= word >> i;
  return bit_count(word) + (high ? 32u : 0u);
}

// Entries of one list that the work-item holds. Loads do not wait for the count.
DEVICE void load_list(const void* list, uint32_t row, uint32_t k, uint64_t* e) {
  UNROLL
  for (uint32_t i = 0; i < EACH; i++) {
    uint32_t at = EACH * thread_id() + i;
    e[i] = ((const uint64_t*)list)[(uint64_t)row * k + (at < k ? at : 0u)];
  }
}
DEVICE void drop_past(uint32_t count, uint64_t* e) {
  UNROLL
  for (uint32_t i = 0; i < EACH; i++) e[i] = EACH * thread_id() + i < count ? e[i] : 0u;
}

// Of few entries, those that are `prefix` above bit `shift`, the one that `wanted` - 1 of them are above: each is compared with all.
template <uint32_t E> DEVICE uint64_t pick_among(const held_entries<E>& held, uint64_t prefix, uint32_t shift, uint32_t wanted) {
  SHARED(uint64_t, few, FEW);
  SHARED(uint64_t, picked, 1);
  SHARED(uint32_t, count, 1);
  if (thread_id() == 0) count[0] = 0;
  block_sync();
  UNROLL
  for (uint32_t i = 0; i < 2 * E; i++) {
    if (held.e[i] && held.e[i] >> shift == prefix) few[lds_add(count, 1u)] = held.e[i];
  }
  block_sync();
  uint32_t total = count[0];
  if (thread_id() < total) {
    uint64_t mine = few[thread_id()];
    uint32_t above = 0;
    ROLLED
    for (uint32_t i = 0; i < total; i++) above += few[i] > mine ? 1u : 0u;
    if (above == wanted - 1u) picked[0] = mine;
  }
  block_sync();
  return picked[0];
}

// The lowest entry of the k best; more than k entries are held. `known`: any of them.
template <uint32_t E> DEVICE uint64_t lowest_of(const held_entries<E>& held, uint64_t known, uint32_t k, words16* histogram, uint32_t* lds) {
  SHARED(uint64_t, differing, WAVES);
  SHARED(threshold, found, 1);
  uint32_t t = thread_id(), counts[BINS_EACH];
  uint64_t bits = 0;
  UNROLL
  for (uint32_t i = 0; i < 2 * E; i++) {
    uint64_t differs = held.e[i] ? held.e[i] ^ known : 0u;
    bits = differs > bits ? differs : bits;
  }
  bits = wave32_max(bits);
  if (t % 32 == 0) differing[t / 32] = bits;
  block_sync();
  uint32_t above = bit_length(wave32_max(differing[t % 32])), left = k;
  bool first = true, open = true;
  while (open) {
    uint32_t shift = above > DIGIT_BITS ? above - DIGIT_BITS : 0u;
    UNROLL
    for (uint32_t i = 0; i < 2 * E; i++) {
      bool counted = held.e[i] != 0 && (first || held.e[i] >> above == known >> above);
      if (counted) lds_add((uint32_t*)histogram + ((uint32_t)(held.e[i] >> shift) & (BINS - 1u)), 1u);
    }
    block_sync();
    words16* mine = histogram + (THREADS - 1u - t);
    words16 counted = *mine;
    *mine = {{0, 0, 0, 0}};
    UNROLL
    for (uint32_t i = 0; i < BINS_EACH; i++) counts[i] = counted.w[i];
    find_bin<THREADS>(counts, left, found, lds);
    known = ((known >> shift & ~(uint64_t)(BINS - 1u)) | found[0].bin) << shift;
    left = found[0].wanted;
    open = left != found[0].weight && shift;
    if (open && found[0].weight <= FEW) return pick_among(held, known >> shift, shift, left);
    above = shift;
    first = false;
  }
  return known;
}

// How many of the `total` ascending positions of a list lie below each of N others.
template <uint32_t N>
DEVICE void rank_among(const uint32_t* const (&lists)[N], const uint32_t (&totals)[N], const uint32_t (&position)[N], uint32_t (&ranks)[N]) {
  UNROLL
  for (uint32_t i = 0; i < N; i++) ranks[i] = 0;
  ROLLED
  for (uint32_t step = K_MAX; step; step /= 2) {
    UNROLL
    for (uint32_t i = 0; i < N; i++) {
      uint32_t next = ranks[i] + step;
      bool inside = next <= totals[i];
      uint32_t there = lists[i][inside ? next - 1u : 0u];
      ranks[i] = inside && there < position[i] ? next : ranks[i];
    }
  }
}

// Calls put(place, position) for the selected entries, at most K_MAX, places in order of position; returns how many they are. positions: LDS
// [2, K_MAX], of this side's list, then of the other's.
template <uint32_t E, class Put>
DEVICE uint32_t place_chosen(const held_entries<E>& held, uint64_t lowest, uint32_t* positions, uint32_t* lds, const Put& put) {
  constexpr uint32_t OTHER = 16;  // both lists are counted at once: this side's in the low half
  uint32_t chosen = 0, total;
  UNROLL
  for (uint32_t i = 0; i < 2 * E; i++) chosen |= held.e[i] >= lowest ? 1u << i : 0u;
  uint32_t low = bit_count(chosen & ((1u << E) - 1u)), high = bit_count(chosen >> E);
  uint32_t before = block_scan<THREADS>(low | high << OTHER, lds, &total);
  uint32_t totals[2] = {total & 0xffffu, total >> OTHER};
  UNROLL
  for (uint32_t side = 0; side < 2; side++) {
    uint32_t rank = side ? before >> OTHER : before & 0xffffu;
    UNROLL
    for (uint32_t i = side * E; i < (side + 1) * E; i++) {
      if ((chosen >> i & 1u) && rank < K_MAX) positions[side * K_MAX + rank++] = position_of(held.e[i]);
    }
  }
  block_sync();
  const uint32_t* others[EACH];
  uint32_t count = totals[0] + totals[1], counts[EACH], own[EACH], position[EACH], ranks[EACH];
  UNROLL
  for (uint32_t i = 0; i < EACH; i++) {  // of both lists as one
    uint32_t at = thread_id() + i * THREADS, side = at < totals[0] ? 0u : 1u;
    own[i] = side ? at - totals[0] : at;
    position[i] = positions[at < count ? side * K_MAX + own[i] : 0u];
    others[i] = positions + (1u - side) * K_MAX;
    counts[i] = side ? totals[0] : totals[1];
  }
  rank_among<EACH>(others, counts, position, ranks);
  UNROLL
  for (uint32_t i = 0; i < EACH; i++) {
    if (thread_id() + i * THREADS < count) put(own[i] + ranks[i], position[i]);
  }
  return count;
}

// The first position + 1 positions, or none.
DEVICE void write_identity(const merge_args& a, uint32_t row, int32_t position) {
  for (uint32_t i = thread_id(); i < a.k; i += THREADS) ((int32_t*)a.selected)[(uint64_t)row * a.k + i] = (int32_t)i <= position ? (int32_t)i : -1;
  if (thread_id() == 0) ((int32_t*)a.selected_counts)[row] = position < 0 ? 0 : position + 1;
}

// The work-item's part of the drawn selection, if there is one: to be asked for before the other side's list is waited for.
struct Draw {
  int32_t positions[EACH];
};
DEVICE Draw load_draw(const merge_args& a, uint32_t row) {
  Draw draw = {};
  if (!a.drawn) return draw;
  const int32_t* from = (const int32_t*)a.drawn + (uint64_t)((*(const uint32_t*)a.draw_index + row) % a.draws) * a.k;
  UNROLL
  for (uint32_t i = 0; i < EACH; i++) draw.positions[i] = from[thread_id() + i * THREADS < a.k ? thread_id() + i * THREADS : 0u];
  return draw;
}
// Writes it; returns its count.
DEVICE uint32_t write_drawn(const merge_args& a, uint32_t row, const Draw& draw, uint32_t* lds) {
  uint32_t some = 0, count;
  UNROLL
  for (uint32_t i = 0; i < EACH; i++) {
    if (thread_id() + i * THREADS >= a.k) break;
    ((int32_t*)a.selected)[(uint64_t)row * a.k + thread_id() + i * THREADS] = draw.positions[i];
    some += draw.positions[i] >= 0 ? 1u : 0u;
  }
  block_scan<THREADS>(some, lds, &count);
  return count;
}

// A row with scores from what is held. known: an entry of either list. histogram: zeros; positions: LDS, as place_chosen's.
template <uint32_t E>
DEVICE void merge_row(const merge_args& a, uint32_t row, const held_entries<E>& held, const Draw& draw, uint64_t known, words16* histogram,
                      uint32_t* positions, bool live) {
  SHARED(uint32_t, lds, BLOCK_SCAN);
  int32_t* selected = (int32_t*)a.selected + (uint64_t)row * a.k;
  uint64_t lowest = 1;  // all there are; they exceed k only if both sides have some
  if (held.counts[0] + held.counts[1] > a.k) lowest = lowest_of(held, known, a.k, histogram, lds);
  bool drawn = a.drawn != nullptr;
  uint32_t count = place_chosen(held, lowest, positions, lds, [&](uint32_t place, uint32_t position) {
    if (live && !drawn && place < a.k) selected[place] = (int32_t)position;
  });
  if (!live) return;
  if (drawn) {
    count = write_drawn(a, row, draw, lds);
  } else {
    for (uint32_t i = count + thread_id(); i < a.k; i += THREADS) selected[i] = -1;
  }
  if (thread_id() == 0) ((int32_t*)a.selected_counts)[row] = (int32_t)count;
}

DEVICE uint32_t count_of(const void* counts, uint32_t row, uint32_t k) {
  uint32_t count = (uint32_t)((const int32_t*)counts)[row];
  return count < k ? count : k;
}

DEVICE void merge_lists(const merge_args& a, uint32_t row) {
  SHARED(words16, histogram, THREADS);
  SHARED(uint32_t, positions, 2 * K_MAX);
  int32_t position = ((const int32_t*)a.positions)[row];
  if (position < (int32_t)a.k) {
    write_identity(a, row, position);
    return;
  }
  held_entries<EACH> held;
  load_list(a.entries, row, a.k, held.e);
  load_list(a.other_entries, row, a.k, held.e + EACH);
  held.counts[0] = count_of(a.counts, row, a.k);
  held.counts[1] = count_of(a.other_counts, row, a.k);
  UNROLL
  for (uint32_t side = 0; side < 2; side++) drop_past(held.counts[side], held.e + side * EACH);
  histogram[thread_id()] = {{0, 0, 0, 0}};
  merge_row(a, row, held, load_draw(a, row), ((const uint64_t*)a.entries)[(uint64_t)row * a.k], histogram, positions, true);
}

// This side's list as words of its row, those of neighbours side by side.
DEVICE void post_list(const merge_args& a, uint32_t row, uint32_t count, uint64_t* words, uint32_t number) {
  uint64_t e[EACH];
  UNROLL
  for (uint32_t i = 0; i < EACH; i++) {
    uint32_t at = i * THREADS + thread_id();
    e[i] = ((const uint64_t*)a.entries)[(uint64_t)row * a.k + (at < a.k ? at : 0u)];
  }
  if (thread_id() == 0) mailbox::post(words + 2u * a.k, number, count);
  UNROLL
  for (uint32_t i = 0; i < EACH; i++) {
    uint32_t at = i * THREADS + thread_id();
    if (at < count) mailbox::post(words + at, number, (uint32_t)(e[i] >> 32));
  }
  UNROLL
  for (uint32_t i = 0; i < EACH; i++) {
    uint32_t at = i * THREADS + thread_id();
    if (at < count) mailbox::post(words + a.k + at, number, (uint32_t)e[i]);
  }
}

// E entries of the other side's list of at most k, place_of(i) < k of it, 0 past its count; false, with the error raised, if a word did not come. All words
// are asked for at once. Patience is asked for after the first poll: a work-item that comes later than one that gave up does not wait.
template <uint32_t E, class Place>
DEVICE bool receive_list(const exchange_lists_args& a, const uint64_t* words, uint32_t k, uint32_t number, const Place& place_of, uint64_t* e,
                         uint32_t* count, bool live) {
  uint64_t polls = 0, most = 1;
  for (;;) {
    uint64_t top = load_word_system(words + 2u * k), high[E], low[E];
    UNROLL
    for (uint32_t i = 0; i < E; i++) {
      uint32_t at = place_of(i);
      high[i] = load_word_system(words + (at < k ? at : 0u));
      low[i] = load_word_system(words + k + (at < k ? at : 0u));
    }
    bool came = (uint32_t)(top >> 32) == number;
    *count = (uint32_t)top < k ? (uint32_t)top : k;
    UNROLL
    for (uint32_t i = 0; i < E; i++) {
      bool there = place_of(i) < *count;
      if (there && ((uint32_t)(high[i] >> 32) != number || (uint32_t)(low[i] >> 32) != number)) came = false;
      e[i] = there ? high[i] << 32 | (uint32_t)low[i] : 0u;
    }
    if (came || !live) return true;
    if (polls == 0) most = mailbox::patience(a.error, a.budget);
    if (++polls >= most) break;
    if (polls > QUICK_POLLS) give_way();
  }
  global_max((uint32_t*)a.error, number ? number : 1u);
  return false;
}

// Entries for a rehearsal: k of each list, keys that differ in their lowest digit.
DEVICE void make_up(held_entries<EACH>& held, uint32_t k) {
  UNROLL
  for (uint32_t i = 0; i < 2 * EACH; i++) {
    uint32_t at = i / EACH * K_MAX + EACH * thread_id() + i % EACH;
    held.e[i] = entry_of(at + 1u, at);
  }
  UNROLL
  for (uint32_t side = 0; side < 2; side++) {
    held.counts[side] = k;
    drop_past(k, held.e + side * EACH);
  }
}

DEVICE void exchange_row(const exchange_lists_args& a, uint32_t row) {
  SHARED(words16, histogram, THREADS);
  SHARED(uint32_t, positions, 2 * K_MAX);
  SHARED(uint32_t, missing, 1);
  const merge_args& lists = a.lists;
  uint32_t k = lists.k, number = 0;
  ROLLED
  for (uint32_t turn = REHEARSES ? 0u : 1u; turn < 2u; turn++) {
    bool live = turn == 1u;
    int32_t position = (int32_t)k;
    uint64_t at = (uint64_t)row * (2u * k + 1u), known = entry_of(1, 0);
    held_entries<EACH> held;
    Draw draw = {};
    if (live) {
      previous_done();
      number = mailbox::number_of(a.counter, a.per_step, a.index);
      at += mailbox::set_of(number, a.capacity);
      position = ((const int32_t*)lists.positions)[row];
      held.counts[0] = position < (int32_t)k ? 0u : count_of(lists.counts, row, k);
      post_list(lists, row, held.counts[0], (uint64_t*)a.outbox + at, number);
      load_list(lists.entries, row, k, held.e);
      drop_past(held.counts[0], held.e);
      draw = load_draw(lists, row);
      known = ((const uint64_t*)lists.entries)[(uint64_t)row * k];
    }
    histogram[thread_id()] = {{0, 0, 0, 0}};
    if (thread_id() == 0) missing[0] = 0;
    block_sync();  // all words of the block are on their way before any is waited for
    auto own = [](uint32_t i) { return EACH * thread_id() + i; };
    if (!receive_list<EACH>(a, (const uint64_t*)a.inbox + at, k, number, own, held.e + EACH, &held.counts[1], live)) missing[0] = 1;
    if (!live) make_up(held, k);
    block_sync();
    if (position < (int32_t)k) write_identity(lists, row, position);
    else if (missing[0]) write_identity(lists, row, -1);
    else merge_row(lists, row, held, draw, known, histogram, positions, live);
    if (!live) block_sync();
  }
}

}  // namespace merge

// Grid: rows.
// LAUNCH merge_lists block=1024 k_max=2048
KERNEL(merge_lists, merge_args, 1024) { merge::merge_lists(a, block_x()); }
// LAUNCH exchange_lists block=1024 k_max=2048
EARLY_KERNEL(exchange_lists, exchange_lists_args, 1024, 1) {
  next_may_begin();
  merge::exchange_row(a, block_x());
}
