// mailbox.h - words between the two devices of a pair: a value of 32 bits and the number of its exchange in one 8-byte store, so that a word says itself
// whether it has come, in any order. A mailbox is uncached memory of the device that reads it. Two sets of `capacity` words in turn: a side is at most
// one exchange ahead where both send in each, since exchange i + 1 needs the other's words of i + 1, which it sends after it has read those of i.
// Every wait is bounded by `budget` polls; a word that does not come sets error[0] to the number (0: 1), and later waits ask once.
#pragma once
#include "portable.h"

namespace mailbox {

// Of the exchange `index`, from 1, of a step, where each step has `per_step`; counter [1] u32: steps done.
DEVICE uint32_t number_of(const void* counter, uint32_t per_step, uint32_t index) { return *(const uint32_t*)counter * per_step + index; }
DEVICE uint64_t set_of(uint32_t number, uint32_t capacity) { return (uint64_t)(number % 2) * capacity; }

DEVICE void post(uint64_t* word, uint32_t number, uint32_t value) { store_word_system(word, (uint64_t)number << 32 | value); }

// Polls of a wait.
DEVICE uint64_t patience(const void* error, uint64_t budget) { return *(const uint32_t*)error ? 1u : budget; }

// Waits for a word of this number; false if it does not come.
DEVICE bool receive(const uint64_t* word, uint32_t number, uint64_t polls, void* error, uint32_t* value) {
  uint64_t got = load_word_system(word);
  while ((uint32_t)(got >> 32) != number && --polls) {
    give_way();
    got = load_word_system(word);
  }
  *value = (uint32_t)got;
  if ((uint32_t)(got >> 32) == number) return true;
  global_max((uint32_t*)error, number ? number : 1u);
  return false;
}

}  // namespace mailbox
