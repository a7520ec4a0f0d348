// litmus.hip - small loops that show whether a machine keeps the promises the fast paths rely on.
//   message passing  the data words of round r are visible to whoever has seen sequence number r (release and acquire at system scope)
//   counter          the nodes of a graph run once each, in order, with the state that the last replay left
//   copy             a kernel reads registered host memory or a peer's memory
// Both sides of a message loop must be submitted before either is waited for; every wait is bounded by args.budget polls.

// Word i of round r: every bit depends on both, so that a stale or torn word shows.
DEVICE uint64_t litmus_word(uint64_t round, uint64_t i) {
  uint64_t v = round * 0x9e3779b97f4a7c15ul + i * 0xbf58476d1ce4e5b9ul;
  v ^= v >> 29;
  v *= 0x94d049bb133111ebul;
  return v ^ (v >> 32);
}

// One block. Rounds 1 to args.rounds: data words, sequence number, then wait for the echo before the words are written again.
// LAUNCH litmus_send block=64
SPIN_KERNEL(litmus_send, litmus_args, 64) {
  SHARED(uint32_t, echoed, 1);
  uint64_t* mailbox = (uint64_t*)a.mailbox;
  uint64_t* result = (uint64_t*)a.result;
  for (uint64_t round = 1; round <= a.rounds; round++) {
    for (uint32_t i = thread_id(); i < a.words; i += 64) store_system(mailbox + 1 + i, litmus_word(round, i));
    fence_system();
    block_sync();
    if (thread_id() == 0) {
      store_system(mailbox, round);
      echoed[0] = spin_until((const uint64_t*)a.reply, round, a.budget) ? 1u : 0u;
      if (echoed[0]) result[0] = round;
    }
    block_sync();
    if (!echoed[0]) return;
    block_sync();
  }
}

// One block. result[0]: rounds seen; result[1]: first round with a wrong word, 0 if none. rounds is below 2^32, so a round fits u32.
// LAUNCH litmus_receive block=64
SPIN_KERNEL(litmus_receive, litmus_args, 64) {
  SHARED(uint32_t, arrived, 1);
  SHARED(uint32_t, bad_words, 1);
  const uint64_t* mailbox = (const uint64_t*)a.mailbox;
  uint64_t* result = (uint64_t*)a.result;
  if (thread_id() == 0) bad_words[0] = 0;
  for (uint64_t round = 1; round <= a.rounds; round++) {
    if (thread_id() == 0) arrived[0] = spin_until(mailbox, round, a.budget) ? 1u : 0u;
    block_sync();
    if (!arrived[0]) return;
    fence_system();
    for (uint32_t i = thread_id(); i < a.words; i += 64) {
      if (load_system(mailbox + 1 + i) != litmus_word(round, i)) lds_add(bad_words, 1u);
    }
    block_sync();
    if (thread_id() == 0) {
      if (bad_words[0] && result[1] == 0) result[1] = round;
      result[0] = round;
      store_system((uint64_t*)a.reply, round);
    }
    block_sync();
  }
}

// LAUNCH counter_step block=32
KERNEL(counter_step, counter_args, 32) {
  if (thread_id() != 0) return;
  uint64_t* state = (uint64_t*)a.state;
  state[a.slot] = state[a.slot] * 6364136223846793005ul + ((const uint64_t*)a.step)[0];
}

// LAUNCH copy_words block=256 words=1024
KERNEL(copy_words, copy_words_args, 256) {
  const words16* x = (const words16*)a.x;
  words16* y = (words16*)a.y;
  uint64_t first = (uint64_t)block_x() * 1024;
  UNROLL
  for (uint32_t j = 0; j < 4; j++) {
    uint64_t i = first + j * 256 + thread_id();
    if (i < a.count) y[i] = x[i];
  }
}
