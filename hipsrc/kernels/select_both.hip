// select_both.hip - step_topk of a side of a pair, and the merge of both sides in the same launch (docs/decisions/0006-pair.md). The last block of a
// row posts every entry that may be selected, without choosing among them, waits for the other side's, and chooses once among all: the selection of
// step_topk, then exchange_lists. If there are more than SENT it chooses its best k first.
// Words of a row in a mailbox: keys [SENT], ~positions [SENT], count; as merge.hip. A row that is the identity exchanges its count.
// The block that waits is the last one at work on its row, and blocks start in the order of the rows on both devices: the lowest row that waits has
// its answer under way, however few blocks fit on a device at once.
#include "portable.h"
#include "mailbox.h"
#include "merge.h"
#include "scan.h"
#include "share.h"

namespace select_both {

using step_select::HELD;
using step_select::THREADS;
constexpr uint32_t SENT = HELD * THREADS;
static_assert(THREADS == merge::THREADS && step_select::K_MAX == merge::K_MAX, "one block does both");

// This side's entries: those that may be selected, or the best k; HELD a work-item, ascending, as *valid says, 0 where there is none.
DEVICE void own_entries(const step_topk_args& a, uint32_t row, const step_select::listing& from, const threshold& limit, words16* histogram,
                            uint64_t* e, uint32_t* valid, uint32_t* lds) {
  step_select::asked_entries asked = step_select::ask_entries(a, row, from);
  step_select::listed l = step_select::settle_entries(a, row, from, asked, valid, histogram, lds);
  if (l.count > SENT) {
    step_select::choose(a, row, l, limit, asked.held, 0, (uint32_t*)histogram, lds);
    block_sync();
    *valid = 0;
    UNROLL
    for (uint32_t i = 0; i < HELD; i++) {
      uint32_t at = HELD * thread_id() + i;
      e[i] = at < from.count ? ((const uint64_t*)a.best)[(uint64_t)row * a.k + at] : 0u;
      *valid |= at < from.count ? 1u << i : 0u;
    }
    return;
  }
  if (l.count) *valid = step_select::load_entries(l, HELD * thread_id(), asked.held);
  UNROLL
  for (uint32_t i = 0; i < HELD; i++) {
    uint32_t key = (uint32_t)(asked.held[i] >> step_select::POSITION_BITS), place = step_select::position_of(asked.held[i]);
    e[i] = *valid >> i & 1u ? merge::entry_of(key, share::position_of(place, a.extent_rows, a.side, a.sides)) : 0u;
  }
}

// Entries of a list in LDS, where work-items of a wave have neighbours, for mailboxes, and a work-item HELD of them, for the merge.
struct Staged {
  words16 *keys, *lows;  // [THREADS] each, of HELD keys and HELD ~positions
};

// Posts the entries one after the other, and their number. first: of the entries before the work-item's.
DEVICE void post_entries(const Staged& staged, uint64_t* words, uint32_t number, const uint64_t* e, uint32_t valid, uint32_t first, uint32_t count) {
  uint32_t *keys = (uint32_t*)staged.keys, *lows = (uint32_t*)staged.lows, at = first, t = thread_id();
  if (t == 0) mailbox::post(words + 2u * SENT, number, count);
  UNROLL
  for (uint32_t i = 0; i < HELD; i++) {
    if (!(valid >> i & 1u)) continue;
    keys[at] = (uint32_t)(e[i] >> 32);
    lows[at++] = (uint32_t)e[i];
  }
  block_sync();
  UNROLL
  for (uint32_t i = t; i < SENT; i += THREADS) {
    if (i >= count) continue;
    mailbox::post(words + i, number, keys[i]);
    mailbox::post(words + SENT + i, number, lows[i]);
  }
}

// The other side's; false if a word did not come. Leaves zeros in staged.keys.
DEVICE bool receive_entries(const Staged& staged, const exchange_lists_args& a, const uint64_t* words, uint32_t number, uint64_t* e, uint32_t* count) {
  uint32_t *keys = (uint32_t*)staged.keys, *lows = (uint32_t*)staged.lows, t = thread_id();
  bool came = merge::receive_list<HELD>(a, words, SENT, number, [&](uint32_t i) { return t + i * THREADS; }, e, count, true);
  UNROLL
  for (uint32_t i = 0; i < HELD; i++) {
    keys[t + i * THREADS] = (uint32_t)(e[i] >> 32);
    lows[t + i * THREADS] = (uint32_t)e[i];
  }
  block_sync();
  words16 high = staged.keys[t], low = staged.lows[t];
  staged.keys[t] = {{0, 0, 0, 0}};
  UNROLL
  for (uint32_t i = 0; i < HELD; i++) e[i] = (uint64_t)high.w[i] << 32 | low.w[i];
  return came;
}

// What is left of a row when its entries are listed: `from` its blocks, none where it has no scores.
DEVICE void exchange(const select_both_args& a, uint32_t row, int32_t position, const step_select::listing& from, const threshold& limit,
                     uint32_t number, uint32_t* lds) {
  SHARED(words16, histogram, THREADS);
  SHARED(words16, lows, THREADS);
  SHARED(uint64_t, known, 1);
  SHARED(uint32_t, missing, 1);
  static_assert(16 * THREADS == 4 * 2 * merge::K_MAX, "positions take the place of the lows");
  const merge_args& to = a.mail.lists;
  uint32_t valid = 0;
  Staged staged = {histogram, lows};
  merge::held_entries<HELD> held = {};
  uint64_t at = (uint64_t)row * (2u * SENT + 1u) + mailbox::set_of(number, a.mail.capacity);
  if (from.blocks) own_entries(a.topk, row, from, limit, histogram, held.e, &valid, lds);
  uint32_t first = block_scan<THREADS>(bit_count(valid), lds, &held.counts[0]);
  post_entries(staged, (uint64_t*)a.mail.outbox + at, number, held.e, valid, first, held.counts[0]);
  if (thread_id() == 0) {
    known[0] = (uint64_t)histogram[0].w[0] << 32 | lows[0].w[0];  // the first entry, if there is one
    missing[0] = 0;
  }
  block_sync();  // all words of the block are on their way before any is waited for
  uint64_t* theirs = held.e + HELD;
  if (!receive_entries(staged, a.mail, (const uint64_t*)a.mail.inbox + at, number, theirs, &held.counts[1])) missing[0] = 1;
  if (thread_id() == 0 && held.counts[0] == 0) known[0] = theirs[0];
  block_sync();
  if (position < (int32_t)to.k) merge::write_identity(to, row, position);
  else if (missing[0]) merge::write_identity(to, row, -1);
  else merge::merge_row<HELD>(to, row, held, merge::load_draw(to, row), known[0], histogram, (uint32_t*)lows, true);
}

DEVICE void select_row(const select_both_args& a, uint32_t row) {
  SHARED(uint32_t, lds, BLOCK_SCAN);
  SHARED(threshold, limit, 1);
  const step_topk_args& topk = a.topk;
  uint32_t number = mailbox::number_of(a.mail.counter, a.mail.per_step, a.mail.index);
  int32_t position = ((const int32_t*)topk.positions)[row];
  bool few = (uint64_t)topk.blocks * THREADS * step_select::EACH >= topk.score_stride;
  step_select::listing l = few ? step_select::list_row<step_select::EACH>(topk, row, limit, lds)
                               : step_select::list_row<step_select::EACH_LONG>(topk, row, limit, lds);
  bool scored = position >= (int32_t)topk.k && share::rows_of((uint32_t)position + 1u, topk.extent_rows, topk.side, topk.sides);
  if (l.blocks || (!scored && block_x() == 0)) exchange(a, row, position, l, limit[0], number, lds);
}

}  // namespace select_both

// Grid: (args.topk.blocks, rows).
// LAUNCH step_topk_both block=1024 k_max=2048 blocks_max=1024 sent=4096
SPIN_KERNEL(step_topk_both, select_both_args, 1024) { select_both::select_row(a, block_y()); }
