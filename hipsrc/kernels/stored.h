// stored.h - products that are stored before their launch ends. Launches overlap on some targets (REHEARSES): there the products of a launch with GIVE,
// of bf16 x, tell by a.tells when all of them are stored, and those of the launch after it, beside FETCH, wait for that by a.awaits, the same words, not for
// the last block of GIVE, whose chain of look-ups ends later. That launch ends after the one before all the same: its FETCH waits.
// Word ARRIVED counts blocks, 0 between launches; word STORED is 0 from before the next launch may begin on, then 1.
#pragma once

namespace stored {

constexpr uint32_t ARRIVED = 0, STORED = 1, POLLS = 4096;

DEVICE void arrive(const step_gemv_args& a) {
  uint32_t *word = (uint32_t*)a.tells, all = a.blocks[0] + a.blocks[1] + a.blocks[2] + a.blocks[3] + 1u;
  if (global_add(word + ARRIVED, 1u) + 1u != all) return;
  fence_device();
  ((volatile uint32_t*)word)[STORED] = 1;
  word[ARRIVED] = 0;
}

// Of a block of GIVE, before it lets the next launch begin: one more that arrives, so that nobody has told before.
DEVICE void begin(const step_gemv_args& a) {
  if (!REHEARSES || !a.tells || block_x() != 0 || thread_id() != 0) return;
  ((volatile uint32_t*)a.tells)[STORED] = 0;
  fence_device();
  arrive(a);
}

// Of a block of products, when it has stored them.
DEVICE void end(const step_gemv_args& a) {
  if (!REHEARSES || !a.tells) return;
  block_sync();
  if (thread_id() != 0) return;
  fence_device();
  arrive(a);
}

// In the place of previous_done(). Where nothing is told in time it is that.
DEVICE void x_is_there(const step_gemv_args& a) {
  if (!REHEARSES || !a.awaits) return previous_done();
  if (thread_id() == 0) {
    uint32_t polls = 0;
    while (load_system((const uint32_t*)a.awaits + STORED) == 0 && polls < POLLS) polls++;
    if (polls == POLLS) previous_done();
  }
  block_sync();
}

}  // namespace stored
