// mailbox.h - words between the two devices of a pair: a value of 32 bits and the number of its exchange in one 8-byte store, so that a word says itself
// whether it has come, in any order. A mailbox is uncached memory of the device that reads it. Two sets of `capacity` words in turn: a side is at most
// one exchange ahead where both send in each, since exchange i + 1 needs the other's words of i + 1, which it sends after it has read those of i. What a
// word of a set holds before the first exchange is a number of the other set, so that it is none that is waited for.
// Every wait is bounded by `budget` polls; a word that does not come sets error[0] to the number (0: 1), and later waits ask once.
#pragma once
#include "portable.h"

namespace mailbox {

// Of the exchange `index`, from 1, of a step, where each step has `per_step`; counter [1] u32: steps done. per_step 1: exchanges done before the step.
DEVICE uint32_t number_of(const void* counter, uint32_t per_step, uint32_t index) { return *(const uint32_t*)counter * per_step + index; }
DEVICE uint64_t set_of(uint32_t number, uint32_t capacity) { return (uint64_t)(number % 2) * capacity; }

// Of mail that has one set: odd, so that no word of a mailbox of zeros has it.
DEVICE uint32_t mail_number_of(const void* counter, uint32_t per_step, uint32_t index) { return 2u * number_of(counter, per_step, index) + 1u; }

DEVICE void post(uint64_t* word, uint32_t number, uint32_t value) { store_word_system(word, (uint64_t)number << 32 | value); }

// Polls of a wait.
DEVICE uint64_t patience(const void* error, uint64_t budget) { return *(const uint32_t*)error ? 1u : budget; }

// One poll of the words first[i * stride], i < count, all at once: have they come? values[i], i >= count, is values[0].
template <uint32_t N> DEVICE bool poll(const uint64_t* first, uint32_t stride, uint32_t count, uint32_t number, uint32_t (&values)[N]) {
  bool all = true;
  uint64_t got[N];
  UNROLL
  for (uint32_t i = 0; i < N; i++) got[i] = load_word_system(first + (uint64_t)(i < count ? i : 0u) * stride);
  UNROLL
  for (uint32_t i = 0; i < N; i++) {
    values[i] = (uint32_t)got[i];
    all = all && (uint32_t)(got[i] >> 32) == number;
  }
  return all;
}

// Waits for these words, 1 <= count <= N; false if one does not come. The error is asked for beside the first poll, which mostly is too early.
template <uint32_t N>
DEVICE bool receive_all(const uint64_t* first, uint32_t stride, uint32_t count, uint32_t number, uint64_t budget, void* error, uint32_t (&values)[N]) {
  uint32_t silent = *(const uint32_t*)error;
  if (poll<N>(first, stride, count, number, values)) return true;
  for (uint64_t polls = 1, most = silent ? 1u : budget; polls < most; polls++) {
    if (polls > QUICK_POLLS) give_way();
    if (poll<N>(first, stride, count, number, values)) return true;
  }
  global_max((uint32_t*)error, number ? number : 1u);
  return false;
}

// Waits for a word of this number; false if it does not come.
DEVICE bool receive(const uint64_t* word, uint32_t number, uint64_t polls, void* error, uint32_t* value) {
  uint32_t values[1];
  bool came = receive_all<1>(word, 0, 1, number, polls, error, values);
  *value = values[0];
  return came;
}

}  // namespace mailbox
