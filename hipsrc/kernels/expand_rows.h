// expand_rows.h - step_expand of several query rows, bf16 and q8g64 weights: the same bits (step_attention.hip), but a block has all columns of v of
// a head for up to EXPAND_ROWS rows, so that partial results are read once and weights once for these rows. Partial results of all its rows come
// through one ring of LDS, of which a work-item has what it copied itself.
#pragma once

#if defined(TILE_MMA)
namespace step_expansion {

constexpr uint32_t EXPAND_ROWS = 4, EXPAND_GROUPS = 4;  // rows of a block; blocks of a head, unless these would have more
constexpr uint32_t EXPAND_LDS = gemv::X_BYTES + RING * 4 + EXPAND_ROWS * 2 * SPLITS_MAX * 4;

DEVICE uint32_t rows_each(uint32_t rows) {
  uint32_t each = (rows + EXPAND_GROUPS - 1) / EXPAND_GROUPS;
  return each < EXPAND_ROWS ? each : EXPAND_ROWS;
}

// The rows of a block: how many splits of each are used.
struct Splits {
  uint32_t first, count, used[EXPAND_ROWS];

  DEVICE uint32_t of(const Splits& s, uint32_t row) {
    uint32_t used = s.used[0];
    UNROLL
    for (uint32_t r = 1; r < EXPAND_ROWS; r++) used = row == r ? s.used[r] : used;
    return used;
  }
};
// Splits [start, start + STAGE) of a row; row == count past the end.
struct Place {
  uint32_t row, start;
};
DEVICE Place settled(const Splits& s, Place at) {
  while (at.row < s.count && at.start >= Splits::of(s, at.row)) at = {at.row + 1, 0};
  return at;
}

DEVICE uint64_t first_split(const step_expand_args& a, uint32_t row) { return ((uint64_t)row * a.heads + block_z()) * a.splits; }

// stats [count][2, SPLITS_MAX]: 128 work-items a row.
DEVICE void weigh_rows(const step_expand_args& a, const Splits& s, float* stats) {
  uint32_t split = thread_id() % SPLITS_MAX, last = a.splits - 1;
  ROLLED
  for (uint32_t r = thread_id() / SPLITS_MAX; r < s.count; r += 256 / SPLITS_MAX) {
    const float *tops = (const float*)a.tops + first_split(a, s.first + r), *masses = (const float*)a.masses + first_split(a, s.first + r);
    uint32_t own = split < last ? split : last, used = Splits::of(s, r);
    float others[SPLITS_MAX / 32], own_top = tops[own], own_mass = masses[own], top = LOWEST;
    UNROLL
    for (uint32_t i = 0; i < SPLITS_MAX / 32; i++) others[i] = tops[split % 32 + 32 * i < last ? split % 32 + 32 * i : last];
    UNROLL
    for (uint32_t i = 0; i < SPLITS_MAX / 32; i++) top = max_f32(top, split % 32 + 32 * i < used ? others[i] : LOWEST);
    UNROLL
    for (uint32_t m = 16; m; m >>= 1) top = max_f32(top, shuffle_xor(top, m));
    float* of_row = stats + r * 2 * SPLITS_MAX + split;
    of_row[0] = split < used ? exp_f32(own_top - top) : 0.0f;
    of_row[SPLITS_MAX] = split < used ? own_mass : 0.0f;
  }
  block_sync();
}

// Asks for the splits at `at`; returns where the next ones are. A batch of copies even where there are none.
DEVICE Place copy_rows(const step_expand_args& a, const Splits& s, Place at, float* slot) {
  if (at.row < s.count) {
    uint32_t c = 2 * thread_id();
    const float* from = (const float*)a.partial + first_split(a, s.first + at.row) * a.latent + (c < a.latent ? c : 0u);
    UNROLL
    for (uint32_t i = 0; i < STAGE; i++) {
      uint32_t split = at.start + i < a.splits ? at.start + i : a.splits - 1;
      copy8_async(slot + i * LATENT_MAX, from + (uint64_t)split * a.latent);
    }
    at = settled(s, {at.row, at.start + STAGE});
  }
  copies_commit();
  return at;
}

// x of row `row`, staged for gemv.h among N rows; as f32, for each value is read by all outputs.
template <uint32_t N> DEVICE void store_row(const step_expand_args& a, words16* x, uint32_t row, bool used, const Joined<2>& joined) {
  uint32_t c = 2 * thread_id();
  if (c >= (a.latent + gemv::CHUNK_MAX - 1) / gemv::CHUNK_MAX * gemv::CHUNK_MAX) return;
  float* to = (float*)(x + row * (gemv::X_UNITS / N) + gemv::place_of(c / 4)) + c % 4;
  UNROLL
  for (uint32_t j = 0; j < 2; j++) to[j] = used && c < a.latent ? rounded<bf16>::of(joined.sum[j] * (1.0f / joined.mass)) : 0.0f;
}

template <uint32_t N> DEVICE void join_rows(const step_expand_args& a, const Splits& s, const float* stats, words16* x, float* ring, Place copied) {
  float* own = ring + 2 * thread_id();
  Joined<2> joined = {};
  ROLLED
  for (uint32_t r = 0; r < s.count; r++) {
    if (Splits::of(s, r) == 0) store_row<N>(a, x, r, false, joined);
  }
  Place at = settled(s, {0, 0});
  uint32_t slot = 0;
  ROLLED
  while (at.row < s.count) {
    copies_wait<STAGES - 1>();
    Columns<2> values[STAGE];
    UNROLL
    for (uint32_t i = 0; i < STAGE; i++) values[i] = load_columns<2>(own + slot + i * LATENT_MAX);
    add_partial<2>(values, at.start, Splits::of(s, at.row), stats + at.row * 2 * SPLITS_MAX, joined);
    copied = copy_rows(a, s, copied, own + slot);
    slot = slot + STAGE * LATENT_MAX < RING ? slot + STAGE * LATENT_MAX : 0u;
    Place next = settled(s, {at.row, at.start + STAGE});
    if (next.row != at.row) {
      store_row<N>(a, x, at.row, true, joined);
      joined = {};
    }
    at = next;
  }
  block_sync();
}

// N: at least as many as the rows of the block.
template <uint32_t N> DEVICE void expand_rows(const step_expand_args& a, uint8_t* memory) {
  using W = q8g64_weights;
  words16* x = (words16*)memory;
  float *ring = (float*)(memory + gemv::X_BYTES), *stats = ring + RING;
  uint32_t each = rows_each(a.rows), head = block_z(), lane = thread_id() % LANES;
  Splits s;
  s.first = block_x() * each;
  s.count = a.rows - s.first < each ? a.rows - s.first : each;
  gemv::Walk<W, 2, DEPTH, true> walk;
  auto start = [&](uint32_t first) {
    UNROLL
    for (uint32_t o = 0; o < 2; o++) {
      uint32_t n = first + thread_id() / LANES + o * TOGETHER<2>;
      uint64_t row = (uint64_t)head * a.v + (n < a.v ? n : a.v - 1);
      walk.codes[o] = (const uint8_t*)a.codes + row * a.latent;
      walk.scales[o] = (const uint16_t*)a.scales + row * (a.latent / WEIGHT_GROUP);
    }
    gemv::begin(walk, a.latent, false, thread_id());
  };
  start(0);
  previous_done();
  UNROLL
  for (uint32_t r = 0; r < EXPAND_ROWS; r++) {
    int32_t planned = ((const int32_t*)a.counts)[s.first + (r < s.count ? r : 0u)];
    s.used[r] = r < s.count && planned > 0 ? ((uint32_t)planned + SPLIT - 1) / SPLIT : 0u;
  }
  Place copied = settled(s, {0, 0});
  ROLLED
  for (uint32_t stage = 0; stage < STAGES; stage++) copied = copy_rows(a, s, copied, ring + 2 * thread_id() + stage * STAGE * LATENT_MAX);
  weigh_rows(a, s, stats);
  join_rows<N>(a, s, stats, x, ring, copied);
  ROLLED
  for (uint32_t first = 0; first < a.v; first += COLUMNS) {
    float sums[N][2] = {};
    uint32_t rounds = (walk.chunks + LANES - 1) / LANES;
    ROLLED
    for (uint32_t round = 0; round < rounds; round += DEPTH) {
      UNROLL
      for (uint32_t slot = 0; slot < DEPTH; slot++) {
        uint32_t chunk = (round + slot) * LANES + lane;
        if (chunk < walk.chunks) gemv::add_chunk<float, N>(walk, slot, x, chunk, sums);
        if (round + slot + DEPTH < rounds) gemv::load_round(walk, slot, round + slot + DEPTH);
      }
    }
    gemv::finish(walk, sums);
    if (first + COLUMNS < a.v) start(first + COLUMNS);
    UNROLL
    for (uint32_t r = 0; r < N; r++) {
      UNROLL
      for (uint32_t o = 0; o < 2; o++) {
        uint32_t n = first + thread_id() / LANES + o * TOGETHER<2>;
        if (r < s.count && lane == 0 && n < a.v) store_f32((bf16*)a.o + ((uint64_t)(s.first + r) * a.heads + head) * a.v + n, sums[r][o]);
      }
    }
  }
}

DEVICE void step_expand_many(const step_expand_args& a) {
  next_may_begin();
  uint32_t each = rows_each(a.rows);
  if (each <= 2) expand_rows<2>(a, lds_bytes());
  else if (each == 3) expand_rows<3>(a, lds_bytes());
  else expand_rows<4>(a, lds_bytes());
}

}  // namespace step_expansion
#endif
