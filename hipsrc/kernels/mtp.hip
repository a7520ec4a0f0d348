// mtp.hip - speculative decoding with the MTP layer: what lies between its passes and the verify pass of the main model. A round has S sessions of
// k <= 5 drafts each and R = S * (k + 1) verify rows; row s * (k + 1) + i of session s has the token drawn last (i = 0) or draft i.
//   join_inputs     y = [rms_norm(x) | rms_norm(hidden)], the bits of rms_norm (basic.hip)
//   accept_drafts   a = drafts before the first that the target did not draw itself; rows, parameters and the record of the round (step_state.hip)
//   move_rows       rows of several arrays, by index
//   advance_drafts  what was drawn as draft i becomes row i of the verify pass and the input of draft i + 1
//   mark_drafts     penalty marks as a draw behind drafts sees them
// All that changes lies in device memory and every grid is fixed, so that a recorded round can be replayed.
// Method: exact-match speculative decoding. The target draws by a counter (seed, position), so its draw for a position is a function of the tokens
// before it alone, and what was drawn behind drafts that it drew itself is what would have been drawn one token at a time.
#include "portable.h"

namespace mtp {

constexpr uint32_t THREADS = 256;
constexpr uint32_t ACCEPT_THREADS = 128;
constexpr uint32_t DRAFTS_MAX = 5;
constexpr uint32_t MOVE_WORDS = 1024;  // of a row, a block
constexpr uint32_t MARK_TOKENS = 4096;  // a block
constexpr uint32_t PARAM_WORDS = sizeof(sample_row) / 4;  // held one by one: a struct that lives across the barrier would be put into memory
constexpr uint32_t POSITION = __builtin_offsetof(sample_row, position) / 4, SEEN_ROW = __builtin_offsetof(sample_row, seen_row) / 4;
static_assert(MOVE_WORDS == 4 * THREADS && MARK_TOKENS == 16 * THREADS, "a work-item has 16 bytes");

DEVICE int32_t token_of(int32_t drawn) { return drawn < 0 ? 0 : drawn; }
DEVICE bool aligned16(uint64_t bits) { return (bits & 15u) == 0; }

// Grid: (rows, 2).
template <class T> DEVICE void join_inputs(const join_inputs_args& a) {
  SHARED(float, sums, THREADS / WAVE);
  uint64_t r = block_x();
  bool second = block_y() != 0;
  const T* x = (const T*)(second ? a.hidden : a.x) + r * a.n;
  const T* weight = (const T*)(second ? a.hidden_norm : a.x_norm);
  rms_norm_values(x, weight, (T*)a.y + (2 * r + second) * a.n, a.n, a.eps, sums);
}

// Drafts of the session whose rows start at `first` that the target drew as well, up to the first that it did not. Loads wait for none before them.
DEVICE uint32_t matching_drafts(const accept_args& a, uint32_t first) {
  int32_t draft[DRAFTS_MAX], position[DRAFTS_MAX], drawn[DRAFTS_MAX];
  UNROLL
  for (uint32_t i = 0; i < DRAFTS_MAX; i++) {
    uint32_t row = first + (i < a.drafts ? i : 0u);
    drawn[i] = ((const int32_t*)a.drawn)[row];
    draft[i] = ((const int32_t*)a.tokens)[row + 1];
    position[i] = ((const int32_t*)a.positions)[row + 1];
  }
  uint32_t count = 0;
  bool all = true;
  UNROLL
  for (uint32_t i = 0; i < DRAFTS_MAX; i++) {
    all = all && i < a.drafts && position[i] >= 0 && drawn[i] >= 0 && drawn[i] == draft[i];
    count += all;
  }
  return count;
}

// What the session leaves in the record: accepted, then of each row token, log-probability, `tops` ids and `tops` log-probabilities.
DEVICE void write_record(const accept_args& a, uint32_t* record, uint32_t first, uint32_t accepted) {
  uint32_t row_words = 2u + 2u * a.tops, words = (a.drafts + 1u) * row_words;
  uint32_t* own = record + step_state::HEAD_WORDS + (uint64_t)block_x() * (1u + words);
  if (thread_id() == 0) own[0] = accepted;
  for (uint32_t i = thread_id(); i < words; i += ACCEPT_THREADS) {
    uint32_t r = first + i / row_words, word = i % row_words, value;
    if (word == 0) value = ((const uint32_t*)a.drawn)[r];
    else if (word == 1) value = ((const uint32_t*)a.logprobs)[r];
    else if (word < 2u + a.tops) value = ((const uint32_t*)a.top_ids)[r * a.tops + word - 2u];
    else value = ((const uint32_t*)a.top_logprobs)[r * a.tops + word - 2u - a.tops];
    own[1u + i] = value;
  }
}

// Grid: sessions. All that is read of what is written here is read before the barrier.
DEVICE void accept(const accept_args& a) {
  uint32_t t = thread_id(), s = block_x(), first = s * (a.drafts + 1u);
  int32_t n = ((const int32_t*)a.positions)[first], slot = ((const int32_t*)a.slots)[s];
  uint32_t settings[PARAM_WORDS];
  UNROLL
  for (uint32_t i = 0; i < PARAM_WORDS; i++) settings[i] = ((const uint32_t*)a.params)[(uint64_t)first * PARAM_WORDS + i];
  bool penalises = (int32_t)settings[SEEN_ROW] >= 0;
  uint32_t step = *(const uint32_t*)a.counter, matching = matching_drafts(a, first);
  int32_t drawn = t <= a.drafts ? ((const int32_t*)a.drawn)[first + t] : 0;
  uint32_t accepted = n < 0 ? 0u : matching;
  block_sync();
  uint32_t* record = (uint32_t*)a.ring + (uint64_t)(step & (a.ring_steps - 1u)) * a.record_words;
  if (s == 0 && t == 0) {
    record[0] = step;
    record[1] = *(const uint32_t*)a.error;
    record[2] = a.link_error ? *(const uint32_t*)a.link_error : 0u;
    *(uint32_t*)a.error = 0;  // it is of this pass alone
  }
  if (t == 0) {
    ((int32_t*)a.accepted)[s] = (int32_t)accepted;
    ((int32_t*)a.last)[s] = (int32_t)(first + accepted);
  }
  if (t <= a.drafts) {
    uint32_t r = first + t;
    bool front = n >= 0 && t <= accepted;
    ((int32_t*)a.front_tokens)[r] = front ? token_of(drawn) : 0;
    ((int32_t*)a.front_positions)[r] = front ? n + 1 + (int32_t)t : -1;
    if (t == accepted) ((int32_t*)a.tokens)[first] = token_of(drawn);
    if (n >= 0) {
      int32_t position = n + (int32_t)(accepted + 1u + t);
      ((int32_t*)a.positions)[r] = position;
      ((sample_row*)a.params)[r].position = (uint32_t)position + 1u;
    }
    bool marked = front && a.seen && penalises && slot >= 0 && (uint32_t)drawn < a.vocab;
    if (marked) ((uint8_t*)a.seen)[(uint64_t)slot * a.vocab + (uint32_t)drawn] = 1;
  }
  if (t < a.drafts) {
    if (n >= 0) settings[POSITION] = (uint32_t)n + accepted + 2u + t;
    settings[SEEN_ROW] = (uint32_t)(penalises ? slot : -1);
    uint32_t* params = (uint32_t*)a.draft_params + ((uint64_t)t * a.sessions + s) * PARAM_WORDS;
    UNROLL
    for (uint32_t i = 0; i < PARAM_WORDS; i++) params[i] = settings[i];
  }
  write_record(a, record, first, accepted);
}

// Grid: (blocks of MOVE_WORDS, rows moved, moves).
DEVICE void move_rows(const move_rows_args& args) {
  const move_rows_args& a = kernel_args(args);
  uint32_t n = block_y(), m = block_z(), words = a.row_words[m], first = block_x() * MOVE_WORDS;
  if (first >= words) return;
  int32_t from = a.source_index ? ((const int32_t*)a.source_index)[n] : (int32_t)n;
  int32_t to = a.target_index ? ((const int32_t*)a.target_index)[n] : (int32_t)n;
  if (from < 0 || to < 0) return;
  const uint32_t* source = (const uint32_t*)in_global(a.source[m]) + (uint64_t)from * words;
  uint32_t* target = (uint32_t*)in_global(a.target[m]) + (uint64_t)to * words;
  if (aligned16((uint64_t)a.source[m] | (uint64_t)a.target[m] | 4u * (uint64_t)words)) {
    uint32_t c = first + 4u * thread_id();
    if (c < words) *(words16*)(target + c) = *(const words16*)(source + c);
    return;
  }
  uint32_t v[4];
  UNROLL
  for (uint32_t j = 0; j < 4; j++) {
    uint32_t c = first + j * THREADS + thread_id();
    v[j] = source[c < words ? c : first];
  }
  UNROLL
  for (uint32_t j = 0; j < 4; j++) {
    uint32_t c = first + j * THREADS + thread_id();
    if (c < words) target[c] = v[j];
  }
}

// One block.
DEVICE void advance(const advance_args& a) {
  for (uint32_t s = thread_id(); s < a.sessions; s += THREADS) {
    int32_t token = token_of(((const int32_t*)a.drawn)[s]), position = ((const int32_t*)a.draft_positions)[s];
    ((int32_t*)a.tokens)[(uint64_t)s * (a.drafts + 1u) + a.draft] = token;
    ((int32_t*)a.draft_tokens)[s] = token;
    if (position >= 0) ((int32_t*)a.draft_positions)[s] = position + 1;
  }
}

// Grid: (blocks of MARK_TOKENS, sessions). A work-item reads its marks once and writes them for each row of the session, one mark more each time.
DEVICE void mark_drafts(const mark_drafts_args& a) {
  uint32_t s = block_y(), first = block_x() * MARK_TOKENS;
  int32_t slot = ((const int32_t*)a.slots)[s], tokens[DRAFTS_MAX + 1];
  UNROLL
  for (uint32_t i = 1; i <= DRAFTS_MAX; i++) tokens[i] = ((const int32_t*)a.tokens)[s * (a.drafts + 1u) + (i <= a.drafts ? i : 0u)];
  if (slot < 0) return;
  const uint8_t* seen = (const uint8_t*)a.seen + (uint64_t)slot * a.vocab;
  uint8_t* scratch = (uint8_t*)a.scratch + (uint64_t)s * (a.drafts + 1u) * a.vocab;
  if (aligned16((uint64_t)a.seen | (uint64_t)a.scratch | a.vocab)) {
    uint32_t c = first + 16u * thread_id();
    if (c >= a.vocab) return;
    words16 marks = *(const words16*)(seen + c);
    UNROLL
    for (uint32_t i = 0; i <= DRAFTS_MAX; i++) {
      if (i > a.drafts) break;
      uint32_t at = i ? (uint32_t)tokens[i] - c : 16u;  // the byte to mark, if it is one of these 16
      UNROLL
      for (uint32_t w = 0; w < 4; w++) marks.w[w] |= at / 4u == w ? 1u << (8u * (at & 3u)) : 0u;
      *(words16*)(scratch + (uint64_t)i * a.vocab + c) = marks;
    }
    return;
  }
  uint32_t end = a.vocab - first < MARK_TOKENS ? a.vocab : first + MARK_TOKENS;
  ROLLED
  for (uint32_t c = first + thread_id(); c < end; c += THREADS) {
    uint8_t mark = seen[c];
    UNROLL
    for (uint32_t i = 0; i <= DRAFTS_MAX; i++) {
      if (i > a.drafts) break;
      if (i && (uint32_t)tokens[i] == c) mark = 1;
      scratch[(uint64_t)i * a.vocab + c] = mark;
    }
  }
}

}  // namespace mtp

// LAUNCH join_inputs_f32 block=256
KERNEL(join_inputs_f32, join_inputs_args, 256) { mtp::join_inputs<float>(a); }
// LAUNCH join_inputs_bf16 block=256
KERNEL(join_inputs_bf16, join_inputs_args, 256) { mtp::join_inputs<bf16>(a); }
// LAUNCH accept_drafts block=128 drafts_max=5
KERNEL(accept_drafts, accept_args, 128) { mtp::accept(a); }
// LAUNCH move_rows block=256 words=1024
KERNEL(move_rows, move_rows_args, 256) { mtp::move_rows(a); }
// LAUNCH advance_drafts block=256
KERNEL(advance_drafts, advance_args, 256) { mtp::advance(a); }
// LAUNCH mark_drafts block=256 tokens=4096 drafts_max=5
KERNEL(mark_drafts, mark_drafts_args, 256) { mtp::mark_drafts(a); }
