// fetch.h - rows between host extents and device memory: fetch_rows and the FETCH part of a decode step (lists of missed rows into hot slots or
// staging rows), gather_plane, scatter_plane, copy_back (rows.hip).
// What belongs to a row in an extent is one stretch of host memory, a run: a plane of it, or all planes of a selection group. 32 lanes move a piece of
// a run together. A run is cut where its host address is a multiple of 128 bytes, so that no line of 128 bytes is asked for twice: over the link,
// requests are what is dear, and the translation of a host address. Pieces are dealt to the blocks first, of which a short list takes as many as have
// something to do with all their lanes: the others end at once. Up to FETCH_FLIGHT loads of 16 bytes a work-item are under way before the first
// store.
#pragma once
#include "hotcache.h"
#include "row_format.h"

namespace history_rows {

constexpr uint32_t COPY_THREADS = 256;
constexpr uint32_t FETCH_LANES = 32, FETCH_TEAMS = COPY_THREADS / FETCH_LANES;  // of COPY_THREADS work-items
constexpr uint32_t FETCH_FLIGHT = 6;
constexpr uint32_t LINE_WORDS = 8;  // 16-byte words of a line

static_assert(FETCH_FLIGHT == 6, "move_runs and move_stretches count six pieces");

// 16 bytes into four registers and back, as one access each: nvcc makes four of one that goes element by element. An array of words16 would be copied
// as memory, and clang would put it into LDS.
DEVICE void load_words(const words16* from, uint32_t* to) {
  words16 word = *from;
  UNROLL
  for (uint32_t i = 0; i < 4; i++) to[i] = word.w[i];
}
DEVICE void store_words(words16* to, const uint32_t* from) { *to = {{from[0], from[1], from[2], from[3]}}; }

// What COPY_THREADS work-items move. Each kind of runs, R, adds the ends of entry e, host(r, e) and device(r, e), and where word `place` of a run
// with these ends is read and written: from(r, host, device, place) and to(r, host, device, place).
struct dealt_runs {
  static constexpr bool DEVICE_LATE = false;  // device(r, e) is known when the launch before is done, and `from` does not need it
  uint32_t words;   // 16-byte words of a row
  uint32_t run;     // of a run
  uint32_t pieces;  // of a run, wherever it begins in a line
  uint32_t stride;  // pieces between two of the same 32 lanes, where they are dealt one by one
};
DEVICE dealt_runs deal_runs(uint32_t row_bytes, uint32_t planes, uint32_t blocks) {
  uint32_t words = row_bytes / 16, run = planes * words;
  return {words, run, (run + LINE_WORDS - 1u + FETCH_LANES - 1u) / FETCH_LANES, blocks * FETCH_TEAMS};
}

// N pieces from `first` on, `apart` pieces from one to the next. No branch: clang sinks loads into one, behind the wait for the data of the row before.
// Lanes outside the run move its first or last word once more, to the same place.
template <uint32_t N, class R> DEVICE void move_pieces(const R& r, uint32_t first, uint32_t apart) {
  int32_t lane = (int32_t)(thread_id() % FETCH_LANES), last = (int32_t)r.run - 1, place[N];
  uint32_t word[N][4];
  uint64_t host[N], device[N];
  UNROLL
  for (uint32_t j = 0; j < N; j++) {
    uint32_t piece = first + j * apart, entry = piece / r.pieces;
    place[j] = (int32_t)((piece - entry * r.pieces) * FETCH_LANES) + lane;
    host[j] = R::host(r, entry);
    device[j] = R::DEVICE_LATE ? 0u : R::device(r, entry);
  }
  UNROLL
  for (uint32_t j = 0; j < N; j++) {
    place[j] -= (int32_t)((uint32_t)host[j] / 16u % LINE_WORDS);
    place[j] = place[j] < 0 ? 0 : place[j] > last ? last : place[j];
    load_words(R::from(r, host[j], device[j], (uint32_t)place[j]), word[j]);
  }
  if (R::DEVICE_LATE) {
    previous_done();
    UNROLL
    for (uint32_t j = 0; j < N; j++) device[j] = R::device(r, (first + j * apart) / r.pieces);
  }
  UNROLL
  for (uint32_t j = 0; j < N; j++) store_words(R::to(r, host[j], device[j], (uint32_t)place[j]), word[j]);
}

// Pieces [0, total) dealt to `blocks` blocks one by one, as is best where blocks are many; this one is number `block`.
template <class R> DEVICE void move_runs(const R& r, uint32_t total, uint32_t block, uint32_t blocks) {
  for (uint32_t first = thread_id() % COPY_THREADS / FETCH_LANES * blocks + block, done; first < total; first += done * r.stride) {
    uint32_t rest = (total - 1u - first) / r.stride;  // further pieces of these lanes
    done = rest >= 5 ? 6 : rest >= 3 ? 4 : rest + 1;
    if (done == 6) move_pieces<6>(r, first, r.stride);
    else if (done == 4) move_pieces<4>(r, first, r.stride);
    else if (rest == 2) move_pieces<3>(r, first, r.stride);
    else if (rest == 1) move_pieces<2>(r, first, r.stride);
    else move_pieces<1>(r, first, r.stride);
  }
}

// The same by few blocks: 32 lanes have the pieces of some runs that follow one another, all lanes together those of one stretch of the list, so that
// few pages of host memory are asked for at a time: the translation of an address that was not asked for lately costs as much as a row does.
template <class R> DEVICE void move_stretches(const R& r, uint32_t total, uint32_t block, uint32_t blocks) {
  uint32_t teams = blocks * FETCH_TEAMS, each = (total + teams - 1u) / teams, turns = (each + FETCH_FLIGHT - 1u) / FETCH_FLIGHT;
  uint32_t some = total ? (each + turns - 1u) / turns : 0u, first = (block * FETCH_TEAMS + thread_id() % COPY_THREADS / FETCH_LANES) * some;  // a turn
  ROLLED
  for (; first < total; first += teams * some) {
    uint32_t count = total - first < some ? total - first : some;
    if (count == 6) move_pieces<6>(r, first, 1);
    else if (count == 5) move_pieces<5>(r, first, 1);
    else if (count == 4) move_pieces<4>(r, first, 1);
    else if (count == 3) move_pieces<3>(r, first, 1);
    else if (count == 2) move_pieces<2>(r, first, 1);
    else move_pieces<1>(r, first, 1);
  }
}

// Fetch lists of rounds from `round` on, one after the other. A run: planes [plane_first, plane_first + planes) of a listed row.
constexpr uint32_t FETCH_ROUNDS = 32;
struct fetch_list : dealt_runs {
  static constexpr bool DEVICE_LATE = true;
  const fetch_args* a;   // read where it lies: the step's kernels have no registers to spare
  uint32_t round;
  const uint32_t* ends;  // LDS [FETCH_ROUNDS]: entries up to the end of each round; nullptr: of one round
  // Where an entry of all lists stands.
  DEVICE uint64_t place_of(const fetch_list& f, uint32_t entry) {
    uint32_t round = 0;
    if (f.ends) {
      UNROLL
      for (uint32_t step = FETCH_ROUNDS / 2; step; step /= 2) round += f.ends[round + step - 1u] <= entry ? step : 0u;
      entry -= round ? f.ends[round - 1u] : 0u;
    }
    return (uint64_t)((const int32_t*)f.a->round_starts)[f.round + round] * f.a->k + entry;
  }
  DEVICE uint64_t host(const fetch_list& f, uint32_t entry) {
    return ((const uint64_t*)f.a->sources)[place_of(f, entry)] + (uint64_t)f.a->plane_first * f.a->row_bytes;
  }
  DEVICE uint64_t device(const fetch_list& f, uint32_t entry) { return ((const uint64_t*)f.a->targets)[place_of(f, entry)]; }
  DEVICE const words16* from(const fetch_list& f, uint64_t host, uint64_t, uint32_t place) {
    return pointer_from<const words16>(host, f.run * 16u) + place;
  }
  DEVICE words16* to(const fetch_list& f, uint64_t, uint64_t target, uint32_t place) {
    uint32_t plane = place / f.words, word = place - plane * f.words;
    plane += f.a->plane_first;
    uint64_t staging = (uint64_t)f.a->staging + (uint64_t)(plane - f.a->staging_plane_first) * f.a->staging_plane_bytes;
    uint64_t row = ref_payload(target) + (ref_space(target) ? staging : plane * f.a->hot_plane_bytes);
    return pointer_from<words16>(row, f.words * 16u) + word;
  }
};

// Entries of a round's list, waited for where the launch before may still be at it: its rows can be read as soon as they are listed.
DEVICE uint32_t listed(const fetch_args& a, uint32_t round) {
  const uint32_t* count = (const uint32_t*)a.counts + round;
  uint32_t n = load_system(count);
  for (uint32_t polls = 0; n == hotcache::UNLISTED && polls < 4096; polls++) n = load_system(count);
  if (n != hotcache::UNLISTED) return n;
  previous_done();
  return load_system(count);
}

// `count` entries, dealt to `blocks` blocks of 256 work-items; this one is number `block`. PART: by move_stretches. The caller keeps them below 2^31
// words.
template <bool PART>
DEVICE void fetch_entries(const fetch_args& a, uint32_t round, const uint32_t* ends, uint32_t count, uint32_t block, uint32_t blocks) {
  fetch_list f = {{deal_runs(a.row_bytes, a.planes, blocks)}, &a, round, ends};
  uint32_t total = (int32_t)count > 0 ? count * f.pieces : 0u, busy = (total + FETCH_TEAMS - 1u) / FETCH_TEAMS;
  if (!PART && busy < blocks) f.stride = busy * FETCH_TEAMS;
  if (block >= busy) return;
  if (PART) move_stretches(f, total, block, busy < blocks ? busy : blocks);
  else move_runs(f, total, block, busy < blocks ? busy : blocks);
}

// What fetch_rows does, the lists of all rounds as one: few rows of many sessions are under way together. A block that has rows waits for what earlier
// launches wrote, but reads them before that; so does block 0 in any case, since the launch must not end before those have. TEAMS of COPY_THREADS a block.
// ends: LDS [FETCH_ROUNDS].
template <uint32_t TEAMS = 1> DEVICE void fetch_part(const fetch_args& a, uint32_t block, uint32_t blocks, uint32_t rounds, uint32_t* ends) {
  uint32_t team = block * TEAMS + (TEAMS == 1 ? 0u : thread_id() / COPY_THREADS), teams = blocks * TEAMS;
  if (rounds == 1) {
    if (thread_id() == 0) ends[0] = listed(a, 0);
    block_sync();
    fetch_entries<true>(a, 0, nullptr, ends[0], team, teams);
  }
  for (uint32_t round = 0; rounds > 1 && round < rounds; round += FETCH_ROUNDS) {
    uint32_t at = round + thread_id(), total;
    if (thread_id() < FETCH_ROUNDS) {
      uint32_t count = at < rounds ? listed(a, at) : 0u;
      ends[thread_id()] = count + wave32_prefix(count, &total);
    }
    block_sync();
    fetch_entries<true>(a, round, ends, ends[FETCH_ROUNDS - 1], team, teams);
    block_sync();
  }
  if (block == 0) previous_done();
}

}  // namespace history_rows
