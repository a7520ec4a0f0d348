// exchange.hip - the sum of two devices' halves of a product, on both of them at once (docs/decisions/0006-pair.md). Struct: exchange_args.
// Each side stores its sums into the other's mailbox, uncached memory there, as words of a value and the number of the exchange: one 8-byte store each, so
// that a word says itself whether it has come, in any order. Two sets of words in turn: a side is at most one exchange ahead, since exchange i + 1 needs
// the other's words of i + 1, which it sends after it has read those of i. y = T(residual + (p0 + p1)); two values commute, so both sides get the same.
// Every wait is bounded by a.budget polls; a word that does not come sets error[0] to the exchange's number (0: 1), and later exchanges do not wait.

namespace exchange {

constexpr uint32_t THREADS = 256;

template <class T> DEVICE void add(const exchange_args& a) {
  uint32_t at = block_x() * THREADS + thread_id(), number = *(const uint32_t*)a.sequence + a.index;
  uint64_t set = (uint64_t)(number % 2) * a.capacity + at;
  float mine = at < a.count ? ((const float*)a.sums)[at] : 0.0f;
  if (at < a.count) store_word_system((uint64_t*)a.outbox + set, (uint64_t)number << 32 | bits_of(mine));
  block_sync();  // all words of the block are on their way before any is waited for
  if (at >= a.count) return;
  const uint64_t* inbox = (const uint64_t*)a.inbox + set;
  uint64_t budget = *(const uint32_t*)a.error ? 1u : a.budget, word = load_word_system(inbox);
  while ((uint32_t)(word >> 32) != number && --budget) {
    give_way();
    word = load_word_system(inbox);
  }
  if ((uint32_t)(word >> 32) != number) {
    global_max((uint32_t*)a.error, number ? number : 1u);
    return;
  }
  store_f32((T*)a.y + at, load_f32((const T*)a.residual + at) + (mine + float_of((uint32_t)word)));
}

}  // namespace exchange

// Grid: ceil(count / 256).
// LAUNCH exchange_sums_f32 block=256
SPIN_KERNEL(exchange_sums_f32, exchange_args, 256) { exchange::add<float>(a); }
// LAUNCH exchange_sums_bf16 block=256
SPIN_KERNEL(exchange_sums_bf16, exchange_args, 256) { exchange::add<bf16>(a); }
