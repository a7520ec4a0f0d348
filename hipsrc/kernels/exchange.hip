// exchange.hip - values of the two devices of a pair on both of them at once (docs/decisions/0006-pair.md), as words of mailboxes (mailbox.h).
//   exchange_sums  y = T(residual + (p0 + p1)): the halves of a product; two values commute, so both sides get the same bits
//   exchange_parts whole = the columns of side 0, then those of side 1
//   join_parts     the same of parts that were copied
// A work-item has words THREADS apart, FLIGHT of them under way at once. All words of a block are on their way before any is waited for: on the host
// a work-item that waits holds up its block.
#include "portable.h"
#include "mailbox.h"

namespace exchange {

constexpr uint32_t THREADS = 256;
constexpr uint32_t SUMS_FLIGHT = 4, PARTS_FLIGHT = 8;  // six blocks share a row of 6,144 sums; parts of logits have 12 times as many words

template <class T> DEVICE void add(const exchange_args& a) {
  constexpr uint32_t FLIGHT = SUMS_FLIGHT;
  uint32_t first = block_x() * (THREADS * FLIGHT) + thread_id(), stride = a.blocks * (THREADS * FLIGHT);
  uint32_t number = mailbox::number_of(a.counter, a.per_step, a.index);
  uint64_t set = mailbox::set_of(number, a.capacity);
  const float* sums = (const float*)a.sums;
  ROLLED
  for (uint32_t at = first; at < a.count; at += stride) {
    float mine[FLIGHT];
    UNROLL
    for (uint32_t j = 0; j < FLIGHT; j++) mine[j] = sums[at + j * THREADS < a.count ? at + j * THREADS : at];
    UNROLL
    for (uint32_t j = 0; j < FLIGHT; j++) {
      if (at + j * THREADS < a.count) mailbox::post((uint64_t*)a.outbox + set + at + j * THREADS, number, bits_of(mine[j]));
    }
  }
  block_sync();
  ROLLED
  for (uint32_t at = first; at < a.count; at += stride) {
    uint32_t left = (a.count - at + THREADS - 1) / THREADS, theirs[FLIGHT];
    float mine[FLIGHT], residual[FLIGHT];
    UNROLL
    for (uint32_t j = 0; j < FLIGHT; j++) {
      uint32_t i = j < left ? at + j * THREADS : at;
      mine[j] = sums[i];
      residual[j] = load_f32((const T*)a.residual + i);
    }
    const uint64_t* inbox = (const uint64_t*)a.inbox + set + at;
    if (!mailbox::receive_all<FLIGHT>(inbox, THREADS, left < FLIGHT ? left : FLIGHT, number, a.budget, a.error, theirs)) return;
    UNROLL
    for (uint32_t j = 0; j < FLIGHT; j++) {
      if (j < left) store_f32((T*)a.y + at + j * THREADS, residual[j] + (mine[j] + float_of(theirs[j])));
    }
  }
}

// Where word i of a part of rows of `part` words lies in the whole, whose rows have `row` words; the part begins at word `first` of each.
DEVICE uint64_t place_of(uint32_t i, uint32_t part, uint32_t row, uint32_t first) {
  uint32_t r = i / part;
  return (uint64_t)r * row + first + (i - r * part);
}

DEVICE void parts(const exchange_parts_args& a) {
  constexpr uint32_t FLIGHT = PARTS_FLIGHT;
  uint32_t first = block_x() * (THREADS * FLIGHT) + thread_id(), stride = a.blocks * (THREADS * FLIGHT);
  uint32_t number = mailbox::number_of(a.counter, a.per_step, a.index), row = a.my_words + a.other_words;
  uint32_t mine = a.rows * a.my_words, others = a.rows * a.other_words;
  uint64_t set = mailbox::set_of(number, a.capacity);
  const uint32_t* from = (const uint32_t*)a.mine;
  uint32_t* whole = (uint32_t*)a.whole;
  ROLLED
  for (uint32_t at = first; at < mine; at += stride) {
    uint32_t word[FLIGHT];
    UNROLL
    for (uint32_t j = 0; j < FLIGHT; j++) word[j] = from[at + j * THREADS < mine ? at + j * THREADS : at];
    UNROLL
    for (uint32_t j = 0; j < FLIGHT; j++) {
      uint32_t i = at + j * THREADS;
      if (i >= mine) continue;
      mailbox::post((uint64_t*)a.outbox + set + i, number, word[j]);
      whole[place_of(i, a.my_words, row, a.side ? a.other_words : 0u)] = word[j];
    }
  }
  block_sync();
  ROLLED
  for (uint32_t at = first; at < others; at += stride) {
    uint32_t left = (others - at + THREADS - 1) / THREADS, word[FLIGHT];
    const uint64_t* inbox = (const uint64_t*)a.inbox + set + at;
    if (!mailbox::receive_all<FLIGHT>(inbox, THREADS, left < FLIGHT ? left : FLIGHT, number, a.budget, a.error, word)) return;
    UNROLL
    for (uint32_t j = 0; j < FLIGHT; j++) {
      if (j < left) whole[place_of(at + j * THREADS, a.other_words, row, a.side ? 0u : a.my_words)] = word[j];
    }
  }
}

}  // namespace exchange

// Grid: args.blocks, at most blocks_max.
// LAUNCH exchange_sums_f32 block=256 words=1024 blocks_max=16
SPIN_KERNEL(exchange_sums_f32, exchange_args, 256) { exchange::add<float>(a); }
// LAUNCH exchange_sums_bf16 block=256 words=1024 blocks_max=16
SPIN_KERNEL(exchange_sums_bf16, exchange_args, 256) { exchange::add<bf16>(a); }
// LAUNCH exchange_parts block=256 words=2048 blocks_max=64
SPIN_KERNEL(exchange_parts, exchange_parts_args, 256) { exchange::parts(a); }

// Grid: (ceil(row words / 256), rows).
// LAUNCH join_parts block=256
KERNEL(join_parts, join_parts_args, 256) {
  uint32_t word = block_x() * exchange::THREADS + thread_id(), row = a.low_words + a.high_words;
  uint64_t r = block_y();
  if (word >= row) return;
  const uint32_t *low = (const uint32_t*)a.low + r * a.low_words, *high = (const uint32_t*)a.high + r * a.high_words;
  ((uint32_t*)a.whole)[r * row + word] = word < a.low_words ? low[word] : high[word - a.low_words];
}
