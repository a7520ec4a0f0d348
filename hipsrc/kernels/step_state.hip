// step_state.hip - the first and the last kernel of a decode step: what moves from step to step lives in device memory, so that a recorded step can
// be replayed. Rules: docs/decisions/0004-step-graph.md.
#include "portable.h"
#include "mailbox.h"

namespace step_state {

constexpr uint32_t THREADS = 256;
constexpr uint32_t COLS = 1024;  // embedding columns a block
constexpr uint32_t HEAD_WORDS = 3;  // of a record: step number, row error, exchange error

// With mail: a block posts its columns as words of 32 bits, then waits for as many of the other device's, and stores both.
template <class T> DEVICE void join(const step_begin_args& a, uint32_t r, uint32_t number) {
  constexpr uint32_t EACH = 4 / sizeof(T), WORDS = COLS / EACH, FLIGHT = WORDS / THREADS;
  uint32_t row = (a.hidden + a.other_hidden) / EACH, mine = a.hidden / EACH, others = a.other_hidden / EACH, first = block_y() * WORDS + thread_id();
  uint64_t set = mailbox::set_of(number, a.mail.capacity);
  uint32_t *x = (uint32_t*)a.x + (uint64_t)r * row, *own = x + (a.side ? others : 0u), *theirs = x + (a.side ? 0u : mine);
  UNROLL
  for (uint32_t j = 0; j < FLIGHT; j++) {
    uint32_t i = first + j * THREADS;
    if (i < mine) mailbox::post((uint64_t*)a.mail.outbox + set + (uint64_t)r * mine + i, number, own[i]);
  }
  block_sync();
  if (first >= others) return;
  uint32_t left = (others - first + THREADS - 1) / THREADS, word[FLIGHT];
  const uint64_t* inbox = (const uint64_t*)a.mail.inbox + set + (uint64_t)r * others + first;
  if (!mailbox::receive_all<FLIGHT>(inbox, THREADS, left < FLIGHT ? left : FLIGHT, number, a.mail.budget, a.mail.error, word)) return;
  UNROLL
  for (uint32_t j = 0; j < FLIGHT; j++) {
    if (j < left) theirs[first + j * THREADS] = word[j];
  }
}

template <class T, class W> DEVICE void begin(const step_begin_args& a) {
  uint32_t r = block_x(), number = a.mail.outbox ? mailbox::number_of(a.mail.counter, a.mail.per_step, a.mail.index) : 0u;
  uint32_t token = (uint32_t)((const int32_t*)a.tokens)[r];
  const W* row = (const W*)a.table + (uint64_t)(token < a.vocab ? token : 0) * a.hidden;
  T* x = (T*)a.x + (uint64_t)r * (a.hidden + a.other_hidden) + (a.side ? a.other_hidden : 0u);
  UNROLL
  for (uint32_t j = 0; j < COLS / THREADS; j++) {
    uint32_t c = block_y() * COLS + j * THREADS + thread_id();
    if (c < a.hidden) store_f32(x + c, token < a.vocab ? load_f32(row + c) : float_of(0x7fc00000u));
  }
  if (a.mail.outbox) {
    block_sync();  // a word may be of two work-items
    join<T>(a, r, number);
  }
  if (block_y() != 0 || thread_id() != 0) return;
  int32_t p = ((const int32_t*)a.positions)[r];
  uint32_t position = (uint32_t)p;
  uint64_t session = (uint64_t)((const int32_t*)a.sessions)[r], ref = 0;
  if (p < 0) ref = 0;
  else if (a.place == 1u) ref = hotcache::extent_row((const uint64_t*)a.tables + session * a.table_stride, position, a.extent_rows, a.row_bytes) | hotcache::EXTENT;
  else {
    const kv_state& state = ((const kv_state*)a.states)[session];
    ref = state.hot + (uint64_t)(state.full ? position : position % a.ring_rows) * a.row_bytes;
  }
  ((uint64_t*)a.refs)[r] = ref;
}

}  // namespace step_state

// LAUNCH step_begin_f32_f32 block=256 cols=1024
EARLY_KERNEL(step_begin_f32_f32, step_begin_args, 256, 1) {
  next_may_begin();
  previous_done();
  step_state::begin<float, float>(a);
}
// LAUNCH step_begin_f32_bf16 block=256 cols=1024
EARLY_KERNEL(step_begin_f32_bf16, step_begin_args, 256, 1) {
  next_may_begin();
  previous_done();
  step_state::begin<float, bf16>(a);
}
// LAUNCH step_begin_bf16_bf16 block=256 cols=1024
EARLY_KERNEL(step_begin_bf16_bf16, step_begin_args, 256, 1) {
  next_may_begin();
  previous_done();
  step_state::begin<bf16, bf16>(a);
}

// LAUNCH step_end block=256
KERNEL(step_end, step_end_args, 256) {
  uint32_t t = thread_id(), step = *(const uint32_t*)a.counter;
  for (uint32_t i = t; a.states && i < a.rounds; i += step_state::THREADS) {
    int32_t session = ((const int32_t*)a.round_sessions)[i];
    if (session < 0) continue;
    uint32_t* round = &((kv_state*)a.states)[session].round;
    *round = hotcache::next_tag(*round);
  }
  if (a.tokens) {
    uint32_t* record = (uint32_t*)a.ring + (uint64_t)(step & (a.ring_steps - 1u)) * a.record_words;
    uint32_t row_words = 2u + 2u * a.tops;
    if (t == 0) {
      record[0] = step;
      record[1] = *(const uint32_t*)a.error;
      record[2] = a.link_error ? *(const uint32_t*)a.link_error : 0u;  // it stays: exchanges after it do not wait
      *(uint32_t*)a.error = 0;  // it is of this step alone
    }
    for (uint32_t i = t; i < a.rows * row_words; i += step_state::THREADS) {
      uint32_t r = i / row_words, word = i % row_words, value;
      if (word == 0) value = ((const uint32_t*)a.tokens)[r];
      else if (word == 1) value = ((const uint32_t*)a.logprobs)[r];
      else if (word < 2u + a.tops) value = ((const uint32_t*)a.top_ids)[r * a.tops + word - 2u];
      else value = ((const uint32_t*)a.top_logprobs)[r * a.tops + word - 2u - a.tops];
      record[step_state::HEAD_WORDS + i] = value;
    }
    for (uint32_t r = t; r < a.rows; r += step_state::THREADS) {
      int32_t p = ((int32_t*)a.positions)[r];
      if (p >= 0) ((int32_t*)a.positions)[r] = p + 1;
      ((sample_row*)a.params)[r].position++;
    }
  }
  block_sync();
  if (t != 0) return;
  *(uint32_t*)a.counter = step + 1u;
  if (a.exchanged) *(uint32_t*)a.exchanged += a.exchanges;
}
