// experts_rows.h - part of step_experts.hip: gate and up of 2 rows and more, of weights with scales, where there are TILE_MMA. Some pairs of an
// expert are a TURN: all sets of columns of a turn follow one another, turn after turn, and each block of the launch takes an equal share of that
// list, so that its rings (wave_stream.h) run empty once. A share is no longer than a turn: two turns have part in it at most. Blocks of part FETCH
// come before these.
#pragma once
#include "scan.h"
#include "wave_stream.h"

namespace step_moe {
#if defined(TILE_MMA)

template <class W> struct ExpertsRows {
  static constexpr uint32_t SET = wave_rows::SET, DEPTH = 2, SLOTS = 9;  // SLOTS: rows of x, of a run each, that a wave has room for
  static constexpr uint32_t RINGS = wave_stream::RINGS_BYTES<DEPTH>, X = WAVES * wave_rows::X_WAVE<SLOTS>, SUMS_BYTES = WAVES * SET * COLS * 4;
  static constexpr uint32_t SIDES = wave_rows::SIDES<SLOTS>;
  static constexpr uint32_t LDS = RINGS + X + SUMS_BYTES + SIDES * wave_rows::SIDE_BYTES<W> + 64;

  // How a set is multiplied. runs: of a wave, of each row; most: rows of a turn, all of whose x there is room for, if there is for one row's;
  // sets: of a turn.
  struct Shape {
    Weights w;
    uint32_t lead, stride, runs, most, sets;
    bool kept;
  };
  // The block's share: sets of columns [first, first + here) of the first turn, then those of the second up to `sets` in all.
  struct Share {
    uint32_t turn, first, here, sets;
  };
  // Of both turns: the expert, the number among the expert's turns, the pairs.
  struct Turns {
    uint32_t expert[2], number[2], rows[2], pairs[2][SET];
  };
  // Copies: the ring, and what comes next.
  struct Flow {
    wave_stream::Ring ring;
    wave_stream::Lane lane;
    wave_stream::Place place;
    Matrix matrix;
    uint32_t set, run, unit;
  };

  DEVICE Shape shape_of(const step_experts_args& a) {
    Shape s;
    s.w = {a.k, a.k, 0, 2, a.k >= LONG_K};  // matrices: turns, of x
    s.stride = s.w.wide ? WAVES : 1u;
    s.lead = s.w.wide ? tile_group() : 0u;
    s.runs = (runs_in(s.w) + s.stride - 1u) / s.stride;
    s.kept = s.runs <= SLOTS;
    s.most = s.kept ? least(SET, SLOTS / s.runs) : SET;
    uint32_t columns = (s.w.wide ? 1u : WAVES) * EXPERT_COLS;
    s.sets = (a.n + columns - 1u) / columns;
    return s;
  }
  DEVICE uint32_t id_of(const step_experts_args& a, uint32_t pair) { return (uint32_t)((const int32_t*)a.ids)[pair]; }
  DEVICE uint32_t turns_of(const Shape& s, uint32_t pairs) { return (pairs + s.most - 1u) / s.most; }

  // Turns are in the order of the work-items that count their experts. counts: LDS, a word an expert; scan: BLOCK_SCAN words. block_sync at the end.
  DEVICE Share find_share(const step_experts_args& a, const Shape& shape, uint32_t* counts, uint32_t* scan, Turns& turns) {
    uint32_t mine = 0, all;
    ROLLED
    for (uint32_t e = thread_id(); e < a.experts; e += THREADS) counts[e] = 0;
    block_sync();
    ROLLED
    for (uint32_t p = thread_id(); p < a.rows * a.slots; p += THREADS) {
      uint32_t expert = id_of(a, p);
      if (expert < a.experts) lds_add(counts + expert, 1u);
    }
    block_sync();
    ROLLED
    for (uint32_t e = thread_id(); e < a.experts; e += THREADS) mine += turns_of(shape, counts[e]);
    uint32_t before = block_scan<THREADS>(mine, scan, &all), each = all * shape.sets / a.blocks, rest = all * shape.sets % a.blocks;
    uint32_t block = block_x() - a.part_blocks;
    uint32_t begin = block * each + least(block, rest);
    Share share = {begin / shape.sets, begin % shape.sets, 0, each + (block < rest ? 1u : 0u)};
    share.here = least(share.sets, shape.sets - share.first);
    ROLLED
    for (uint32_t e = thread_id(); e < a.experts; e += THREADS) {
      uint32_t some = turns_of(shape, counts[e]);
      UNROLL
      for (uint32_t j = 0; j < 2; j++) {
        uint32_t number = share.turn + j - before;
        if (number >= some) continue;
        turns.expert[j] = e;
        turns.number[j] = number;
      }
      before += some;
    }
    block_sync();
    return share;
  }

  // By one wave: the pairs of turn j, ascending.
  DEVICE void find_pairs(const step_experts_args& a, const Shape& shape, Turns& turns, uint32_t j) {
    uint32_t pairs = a.rows * a.slots, seen = 0, skipped = turns.number[j] * shape.most, expert = turns.expert[j];
    ROLLED
    for (uint32_t base = 0; base < pairs; base += 32) {
      uint32_t pair = base + tile_lane(), total;
      bool member = pair < pairs && id_of(a, pair) == expert;
      uint32_t rank = seen + wave32_prefix(member ? 1u : 0u, &total) - skipped;
      if (member && rank < shape.most) turns.pairs[j][rank] = pair;
      seen += total;
    }
    if (tile_lane() == 0) turns.rows[j] = least(seen - skipped, shape.most);
  }

  DEVICE void clear_outside(const step_experts_args& a) {
    ROLLED
    for (uint32_t p = block_x() - a.part_blocks; p < a.rows * a.slots; p += a.blocks) {
      if (id_of(a, p) < a.experts) continue;
      for (uint32_t c = thread_id(); c < a.n; c += THREADS) store_f32((bf16*)a.act + (uint64_t)p * a.n + c, 0.0f);
    }
  }

  // The first column of a set of the share, of this wave.
  DEVICE uint32_t first_of(const Shape& shape, const Share& share, uint32_t set) {
    uint32_t number = set < share.here ? share.first + set : set - share.here;
    return (shape.w.wide ? number : number * WAVES + tile_group()) * EXPERT_COLS;
  }
  DEVICE wave_stream::Place place_of(const step_experts_args& a, const Shape& shape, const Share& share, uint32_t set) {
    uint32_t first = first_of(shape, share, set);
    return wave_stream::place<W>(shape.w, [&](uint32_t i) { return i / EXPERT_COLS * a.n + least(first + i % EXPERT_COLS, a.n - 1u); });
  }
  DEVICE void refill(const step_experts_args& a, const Shape& shape, const Share& share, const Turns& turns, Flow& flow, uint32_t slot) {
    if (flow.set == share.sets) {
      copies_commit();
      return;
    }
    wave_stream::copy_unit<W>(flow.ring, flow.lane, shape.w, flow.matrix, flow.place, shape.lead + flow.run * shape.stride, flow.unit, slot);
    if (++flow.unit < wave_stream::UNITS<W>) return;
    flow.unit = 0;
    if (++flow.run < shape.runs) return;
    flow.run = 0;
    if (++flow.set == share.sets) return;
    if (flow.set == share.here) flow.matrix = matrix_of<W>(a, turns.expert[1]);
    flow.place = place_of(a, shape, share, flow.set);
  }

  // The outputs of a set from column `first` on. Where all waves have a part of the sums, another one adds up from set to set.
  DEVICE void store(const step_experts_args& a, const Shape& shape, const float* sums, uint32_t set, uint32_t first, const uint32_t* pairs,
                    uint32_t rows) {
    bool wide = shape.w.wide;
    ROLLED
    for (uint32_t r = wide ? (tile_group() - set) % WAVES : 0u; r < rows; r += wide ? WAVES : 1u) {
      const float* from = sums + ((wide ? 0u : tile_group()) * SET + r) * COLS + tile_lane();
      float sum = from[0];
      UNROLL
      for (uint32_t i = 1; i < WAVES && wide; i++) sum += from[i * SET * COLS];
      float value = rounded<bf16>::of(sum * 1.0f), up = shuffle_xor(value, EXPERT_COLS);
      uint32_t column = first + tile_lane();
      if (tile_lane() >= EXPERT_COLS || column >= a.n) continue;
      store_f32((bf16*)a.act + (uint64_t)pairs[r] * a.n + column, rounded<bf16>::of(silu_f32(value)) * up);
    }
  }

  // All products of the share.
  DEVICE void multiply(const step_experts_args& a, const Shape& shape, const Share& share, const Turns& turns, Flow& flow, const wave_rows::Lds& lds,
                       float* sums) {
    auto x = [&](uint32_t j, uint32_t r) { return (const bf16*)a.x + (uint64_t)(turns.pairs[j][r] / a.slots) * a.k; };
    wave_rows::Walk<W, SET> walk;
    wave_rows::clear(walk);
    uint32_t set = 0, run = 0, slot = 0, j = 0, rows = turns.rows[0];
    ROLLED
    for (uint32_t left = share.sets * shape.runs; left; left--) {
      uint32_t of_all = shape.lead + run * shape.stride;
      wave_rows::Lds here = wave_stream::from_slot<SLOTS>(lds, shape.kept ? run * rows : 0u);
      if (!shape.kept || set == (j ? share.here : 0u)) {
        wave_rows::Asked<SET> asked;
        wave_rows::ask(asked, shape.w, x, 0, rows, {j, of_all});
        UNROLL
        for (uint32_t i = 0; i < SET; i++) {
          if (i == 0 || i < rows) wave_rows::put_row<W, SLOTS>(asked.word[i], here, i);
        }
      }
      wave_stream::add_run<W, DEPTH, SLOTS>(walk, flow.ring, flow.lane, here, slot, rows, wave_stream::groups_of_run(shape.w, of_all),
                                            [&](uint32_t to) { refill(a, shape, share, turns, flow, to); });
      if (++run < shape.runs) continue;
      run = 0;
      block_sync();  // the sums of the set before have been read
      UNROLL
      for (uint32_t i = 0; i < 4; i++) sums[(tile_group() * SET + part()) * COLS + load_row(i)] = walk.sum[0][i];
      wave_rows::clear(walk);
      block_sync();
      store(a, shape, sums, set, first_of(shape, share, set), turns.pairs[j], rows);
      if (++set != share.here || set == share.sets) continue;
      j = 1;
      rows = turns.rows[1];
    }
  }

  DEVICE void run(const step_experts_args& a) {
    SHARED(uint32_t, scan, BLOCK_SCAN);
    SHARED(Turns, found, 1);
    uint8_t* memory = lds_bytes();
    float* sums = (float*)(memory + RINGS + X);
    int32_t* x_sum = (int32_t*)(memory + RINGS + X + SUMS_BYTES);
    uint16_t* x_scale = (uint16_t*)(x_sum + (W::FORMAT == WEIGHT_Q4G64 ? SIDES : 0));
    wave_rows::Lds lds = {{nullptr, nullptr, (words16*)(memory + RINGS), nullptr, x_sum, nullptr, nullptr}, x_scale, tile_group()};
    Turns& turns = found[0];
    if (block_x() < a.part_blocks) {
      next_may_begin();
      static_assert(history_rows::FETCH_ROUNDS <= BLOCK_SCAN, "fits");
      history_rows::fetch_part(a.part_fetch, block_x(), a.part_blocks, a.rounds, scan);
      return;
    }
    previous_done();
    next_may_begin();
    Shape shape = shape_of(a);
    Share share = find_share(a, shape, (uint32_t*)memory, scan, turns);  // before the rings are there
    clear_outside(a);
    if (share.sets == 0) return;
    Matrix first = matrix_of<W>(a, turns.expert[0]);
    Flow flow = {wave_stream::ring_of_wave<DEPTH>(memory), wave_stream::lane_of<W>(), place_of(a, shape, share, 0), first, 0, 0, 0};
    ROLLED
    for (uint32_t slot = 0; slot < DEPTH; slot++) refill(a, shape, share, turns, flow, slot);
    if (tile_group() < (share.sets > share.here ? 2u : 1u)) find_pairs(a, shape, turns, tile_group());
    block_sync();
    multiply(a, shape, share, turns, flow, lds, sums);
  }
};
template <class W> DEVICE void experts_rows(const step_experts_args& a) { ExpertsRows<W>().run(a); }
#else
template <class W> DEVICE void experts_rows(const step_experts_args& a) { Experts<bf16, W>().run(a); }
#endif
}  // namespace step_moe
