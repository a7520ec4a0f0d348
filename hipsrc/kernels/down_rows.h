// down_rows.h - part of step_experts.hip: down of 2 rows and more where both formats have scales and both halves of k are here, on targets with
// TILE_MMA.
// The launch has as many blocks as run at once, each with a share of the work, and its rings (wave_stream.h) run on from one product to the next:
//   shared task   32 columns of the shared expert, both halves of k, for up to SET rows: its weights are read once for them
//   part          32 columns of a row's routed experts, one half of k; a block's parts are of one row, whose x is made once for all of them. Shares
//                 of all rows have the same columns at the same time, so that what several rows read is found in the cache
// Blocks with a part less than others take more shared tasks. Sums go to memory on the way, the arrivals at 32 columns of a row are counted when a
// block has done all it has to do (a fence would wait for the copies under way), and whoever comes last adds up.
#pragma once
#include "wave_stream.h"

namespace step_moe {
#if defined(TILE_MMA)

template <class W> struct DownRows {
  using S = q8g64_weights;             // the shared expert's
  static constexpr uint32_t EVEN = 2;  // shared tasks that take about as long as a part
  static constexpr uint32_t SET = wave_rows::SET, DEPTH = 2, SLOTS = 8;  // SLOTS: runs of x that a wave has room for
  static constexpr uint32_t RINGS = wave_stream::RINGS_BYTES<DEPTH>, X = WAVES * wave_rows::X_WAVE<SLOTS>;
  static constexpr uint32_t SUMS = 2 * WAVES * SET * COLS;  // of a shared task [half][wave][row][column]; of two parts in turn [wave][column]
  static constexpr uint32_t LDS = RINGS + X + SUMS * 4 + wave_rows::SIDES<SLOTS> * 6 + 64;
  static constexpr uint32_t HALF_WAVES = WAVES / 2;
  static constexpr bool ONE = W::FORMAT == WEIGHT_Q4G64;  // a wave's work-item has the sum of one column

  DEVICE float* sums() { return (float*)(lds_bytes() + RINGS + X); }
  DEVICE wave_rows::Lds x_lds() {
    int32_t* x_sum = (int32_t*)(sums() + SUMS);
    return {{nullptr, nullptr, (words16*)(lds_bytes() + RINGS), nullptr, x_sum, nullptr, nullptr}, (uint16_t*)(x_sum + wave_rows::SIDES<SLOTS>), tile_group()};
  }
  DEVICE uint32_t sets_in(const step_down_args& a) { return (a.n + COLS - 1u) / COLS; }
  DEVICE uint32_t groups_of_rows(const step_down_args& a) { return (a.rows + SET - 1u) / SET; }
  template <class V> DEVICE wave_stream::Place place(const step_down_args& a, const Weights& w, uint32_t set) {
    return wave_stream::place<V>(w, [&](uint32_t i) { return least(set * COLS + i, a.n - 1u); });
  }

  DEVICE Weights half(const step_down_args& a, uint32_t half) { return half_of(a.k, a.slots, half, true); }
  DEVICE uint32_t halves_in(const step_down_args& a) { return first_half(a.k) < a.k ? 2u : 1u; }

  // A block's share: parts [first, first + parts) of a row, by sets and halves; of all `shared` shared tasks first some of those that the blocks with
  // fewer parts have, mine + i * step below `spread`, `few` in number; then every block's share of the rest.
  struct Share {
    uint32_t row, first, parts, mine, step, few, spread, shared;
  };
  DEVICE Share share_of(const step_down_args& a) {
    uint32_t all = sets_in(a) * halves_in(a), blocks = a.blocks / a.rows, number = block_x() / a.rows, each = all / blocks, rest = all % blocks;
    Share s;
    s.row = block_x() % a.rows;
    s.first = number * each + least(number, rest);
    s.parts = number < blocks ? each + (number < rest ? 1u : 0u) : 0u;
    s.shared = sets_in(a) * groups_of_rows(a);
    s.step = a.blocks - rest * a.rows;
    s.mine = block_x() - rest * a.rows;
    s.spread = least(s.shared, EVEN * s.step);
    s.few = block_x() >= rest * a.rows && s.mine < s.spread ? (s.spread - 1u - s.mine) / s.step + 1u : 0u;
    return s;
  }
  DEVICE uint32_t shared_task(const step_down_args& a, const Share& s, uint32_t i) {
    return i < s.few ? s.mine + i * s.step : s.spread + block_x() + (i - s.few) * a.blocks;
  }

  // The sums of 32 columns of a row: of both halves of the routed experts, then of the shared one.
  DEVICE float* partial(const step_down_args& a, uint32_t at) { return (float*)a.partial + (uint64_t)(4u * at) * COLS + tile_lane(); }

  // Where item `item` of what the block has summed up lies: first its parts, then SET rows of each shared task. Returns false where there is no row.
  DEVICE bool item_of(const step_down_args& a, const Share& share, uint32_t item, uint32_t& at) {
    if (item < share.parts) {
      at = share.row * sets_in(a) + (share.first + item) / halves_in(a);
      return true;
    }
    uint32_t task = shared_task(a, share, (item - share.parts) / SET), row = task % groups_of_rows(a) * SET + (item - share.parts) % SET;
    at = row * sets_in(a) + task / groups_of_rows(a);
    return row < a.rows;
  }
  DEVICE void add_up(const step_down_args& a, uint32_t at) {
    const float* from = partial(a, at);
    uint32_t row = at / sets_in(a), column = at % sets_in(a) * COLS + tile_lane();
    float first = from[0] + from[2 * COLS], second = (halves_in(a) == 2u ? from[COLS] : 0.0f) + from[3 * COLS], both = first + second;
    uint64_t y = (uint64_t)row * a.n + column;
    if (column < a.n) store_f32((bf16*)a.y + y, load_f32((const bf16*)a.residual + y) + both);
    if (tile_lane() == 0) ((uint32_t*)a.arrivals)[at] = 0;
  }
  // All sums of the block are in memory. tasks: its shared ones.
  DEVICE void finish(const step_down_args& a, const Share& share, uint32_t tasks) {
    uint32_t* last = (uint32_t*)sums();  // of THREADS items, where they lie, if this block came last
    uint32_t items = share.parts + SET * tasks;
    fence_device();
    ROLLED
    for (uint32_t base = 0; base < items; base += THREADS) {
      uint32_t at = 0;
      block_sync();
      bool there = base + thread_id() < items && item_of(a, share, base + thread_id(), at);
      last[thread_id()] = there && global_add((uint32_t*)a.arrivals + at, 1u) == halves_in(a) ? at : ~0u;
      fence_device();
      block_sync();
      ROLLED
      for (uint32_t i = tile_group(); i < least(THREADS, items - base); i += WAVES) {
        if (last[i] != ~0u) add_up(a, last[i]);
      }
    }
  }

  // The runs of a share's parts, in the order of copies or of products: of part `part`, with w, `left` runs to come, this wave's next one at c.
  struct Step {
    uint32_t part, left;
    Weights w;
    Cursor c;
  };
  DEVICE uint32_t half_of_part(const step_down_args& a, const Share& share, uint32_t part) {
    return halves_in(a) == 2u ? (share.first + part) % 2u : 0u;
  }
  DEVICE uint32_t set_of_part(const step_down_args& a, const Share& share, uint32_t part) { return (share.first + part) / halves_in(a); }
  DEVICE void start(const step_down_args& a, const Share& share, Step& s) {
    s.w = half(a, half_of_part(a, share, s.part));
    s.left = turns_in(s.w);
    s.c = first_run(s.w);
  }
  // Returns whether it is another part.
  DEVICE bool advance(const step_down_args& a, const Share& share, Step& s) {
    next_run(s.c, s.w);
    if (--s.left) return false;
    s.part++;
    start(a, share, s);
    return true;
  }

  // What a wave knows on the way. id: the expert of slot tile_lane(); slot: of the next product; step, place, unit: of the copies for parts.
  struct Flow {
    wave_stream::Ring ring;
    wave_stream::Lane lane;
    uint32_t id, slot;
    Step step;
    wave_stream::Place place;
    uint32_t unit;
  };
  DEVICE void place_ahead(const step_down_args& a, const Share& share, Flow& flow) {
    flow.place = place<W>(a, flow.step.w, set_of_part(a, share, flow.step.part));
  }
  DEVICE void refill_routed(const step_down_args& a, const Share& share, Flow& flow, uint32_t to) {
    if (flow.step.part >= share.parts || flow.step.c.matrix >= a.slots) {
      copies_commit();
      if (flow.step.part >= share.parts) return;
    } else {
      uint32_t expert = shuffle_from(flow.id, flow.step.c.matrix);
      uint64_t before = (uint64_t)(expert < a.experts ? expert : 0u) * a.n;
      Matrix from = {(const uint8_t*)a.codes + before * W::row_bytes(a.k), (const uint16_t*)a.scales + before * (a.k / WEIGHT_GROUP)};
      wave_stream::copy_unit<W>(flow.ring, flow.lane, flow.step.w, from, flow.place, flow.step.c.run, flow.unit, to);
    }
    if (++flow.unit < wave_stream::UNITS<W>) return;
    flow.unit = 0;
    if (advance(a, share, flow.step)) place_ahead(a, share, flow);
  }

  // Run `number` of this wave's part of the shared expert. Where a half has few runs each half has half of the waves.
  struct Piece {
    uint32_t half, run;
  };
  DEVICE bool shares_waves(const step_down_args& a) { return runs_in(half_of(a.shared_k, 1, 0, true)) <= HALF_WAVES; }
  DEVICE uint32_t pieces(const step_down_args& a) {
    return shares_waves(a) ? 1u : turns_in(half_of(a.shared_k, 1, 0, true)) + turns_in(half_of(a.shared_k, 1, 1, true));
  }
  DEVICE Piece piece(const step_down_args& a, uint32_t number) {
    if (shares_waves(a)) return {tile_group() / HALF_WAVES, tile_group() % HALF_WAVES};
    uint32_t of_first = turns_in(half_of(a.shared_k, 1, 0, true)), half = number < of_first ? 0u : 1u;
    return {half, tile_group() + WAVES * (number - half * of_first)};
  }

  // The product of shared task `task` into LDS.
  template <class Refill>
  DEVICE void multiply_shared(const step_down_args& a, uint32_t task, Flow& flow, const wave_stream::Lane& lane, const Refill& refill) {
    uint32_t first = task % groups_of_rows(a) * SET, rows = least(SET, a.rows - first), each = pieces(a);
    wave_rows::Lds lds = x_lds();
    wave_rows::Walk<S, SET> walk;
    wave_rows::clear(walk);
    ROLLED
    for (uint32_t number = 0; number < each; number++) {
      Piece p = piece(a, number);
      Weights w = half_of(a.shared_k, 1, p.half, true);
      auto x = [&](uint32_t, uint32_t r) { return (const bf16*)a.shared_act + (uint64_t)(first + r) * a.shared_k + w.first; };
      wave_rows::Asked<SET> asked;
      wave_rows::ask(asked, w, x, 0, rows, {0, p.run});
      UNROLL
      for (uint32_t r = 0; r < SET; r++) {
        if (r == 0 || r < rows) wave_rows::put_row<S, SLOTS>(asked.word[r], lds, r);
      }
      wave_stream::add_run<S, DEPTH, SLOTS>(walk, flow.ring, lane, lds, flow.slot, rows, wave_stream::groups_of_run(w, p.run), refill);
      if (number + 1u < each && piece(a, number + 1u).half == p.half) continue;
      float* to = sums() + (p.half * WAVES + (shares_waves(a) ? tile_group() % HALF_WAVES : tile_group())) * SET * COLS;
      UNROLL
      for (uint32_t r = 0; r < 4; r++) to[part() * COLS + load_row(r)] = walk.sum[0][r];
      wave_rows::clear(walk);
    }
  }
  DEVICE void store_shared(const step_down_args& a, uint32_t task) {
    uint32_t row = task % groups_of_rows(a) * SET + tile_group(), waves = shares_waves(a) ? HALF_WAVES : WAVES;
    if (tile_group() >= SET || row >= a.rows) return;
    float* to = partial(a, row * sets_in(a) + task / groups_of_rows(a)) + 2 * COLS;
    UNROLL
    for (uint32_t half = 0; half < 2; half++) {
      const float* from = sums() + (half * WAVES * SET + tile_group()) * COLS + tile_lane();
      float sum = from[0];
      ROLLED
      for (uint32_t wave = 1; wave < waves; wave++) sum += from[wave * SET * COLS];
      to[half * COLS] = (sum + 0.0f) * 1.0f;  // 0: of waves without a run
    }
  }

  // The block's shared tasks; returns how many. The rings are then full of what comes after them. Weights of the first ones are asked for before the
  // launches before are done.
  DEVICE uint32_t shared(const step_down_args& a, const Share& share, Flow& flow) {
    uint32_t each = pieces(a), ahead = 0, task_ahead = shared_task(a, share, 0), piece_ahead = 0, unit_ahead = 0, filled = 0, done = 0, task;
    Matrix matrix = {(const uint8_t*)a.shared_codes, (const uint16_t*)a.shared_scales};
    wave_stream::Lane lane = wave_stream::lane_of<S>();
    auto refill = [&](uint32_t to) {
      if (task_ahead >= share.shared) {
        refill_routed(a, share, flow, to);
        return;
      }
      Piece p = piece(a, piece_ahead);
      Weights w = half_of(a.shared_k, 1, p.half, true);
      wave_stream::copy_unit<S>(flow.ring, lane, w, matrix, place<S>(a, w, task_ahead / groups_of_rows(a)), p.run, unit_ahead, to);
      if (++unit_ahead < wave_stream::UNITS<S>) return;
      unit_ahead = 0;
      if (++piece_ahead < each) return;
      piece_ahead = 0;
      task_ahead = shared_task(a, share, ++ahead);
    };
    ROLLED
    for (; filled < DEPTH && task_ahead < share.shared; filled++) refill(filled);
    previous_done();
    if (tile_lane() < a.slots) flow.id = (uint32_t)((const int32_t*)a.ids)[share.row * a.slots + tile_lane()];
    ROLLED
    for (; filled < DEPTH; filled++) refill(filled);
    ROLLED
    for (; (task = shared_task(a, share, done)) < share.shared; done++) {
      if (done) block_sync();  // the sums of the task before have been read
      multiply_shared(a, task, flow, lane, refill);
      block_sync();
      store_shared(a, task);
    }
    return done;
  }

  // A run's x of the share's row: act times weight; zeros for an expert outside.
  struct Unit {
    uint32_t word[4], expert;
    float factor;
  };
  DEVICE Unit ask(const step_down_args& a, const Share& share, const Weights& w, const Cursor& c) {
    bool inside = c.matrix < a.slots;
    uint32_t pair = share.row * a.slots + (inside ? c.matrix : 0u), at = inside ? c.run * RUN_VALUES + 8 * tile_lane() : w.k;
    Unit u;
    load_unit((const bf16*)a.act + (uint64_t)pair * a.k + w.first, at, w.k, u.word);
    u.factor = ((const float*)a.weights)[pair];
    u.expert = (uint32_t)((const int32_t*)a.ids)[pair];
    return u;
  }
  DEVICE void put(const step_down_args& a, const Unit& u, const wave_rows::Lds& lds) {
    float v[8];
    UNROLL
    for (uint32_t i = 0; i < 8; i++) v[i] = (u.expert < a.experts ? unit_value(u.word, i) : 0.0f) * u.factor;
    wave_stream::put_values<W, SLOTS>(lds, v);
  }
  // All x of the row, four runs at a time: those of the first half, then those of the second.
  DEVICE void put_all(const step_down_args& a, const Share& share, const wave_rows::Lds& lds) {
    constexpr uint32_t AT_ONCE = 4;
    uint32_t slot = 0;
    ROLLED
    for (uint32_t number = 0; number < halves_in(a); number++) {
      Weights w = half(a, number);
      Cursor c = first_run(w);
      uint32_t turns = turns_in(w);
      ROLLED
      for (uint32_t first = 0; first < turns; first += AT_ONCE) {
        Unit u[AT_ONCE];
        UNROLL
        for (uint32_t i = 0; i < AT_ONCE; i++) {
          u[i] = ask(a, share, w, c);
          next_run(c, w);
        }
        UNROLL
        for (uint32_t i = 0; i < AT_ONCE; i++) {
          if (first + i < turns) put(a, u[i], wave_stream::from_slot<SLOTS>(lds, slot + first + i));
        }
      }
      slot += turns;
    }
  }

  // The sums of a part. Another wave adds up from part to part.
  DEVICE void store_part(const step_down_args& a, const Share& share, uint32_t part, const float* of_part) {
    if (part % WAVES != tile_group()) return;
    const float* from = of_part + tile_lane();
    float sum = from[0];
    UNROLL
    for (uint32_t wave = 1; wave < WAVES; wave++) sum += from[wave * COLS];
    partial(a, share.row * sets_in(a) + set_of_part(a, share, part))[half_of_part(a, share, part) * COLS] = sum * 1.0f;
  }

  DEVICE void routed(const step_down_args& a, const Share& share, Flow& flow) {
    wave_rows::Lds lds = x_lds();
    wave_rows::Walk<W, SET> walk;
    wave_rows::clear(walk);
    uint32_t turns = turns_in(half(a, 0)), turn = 0;
    bool kept = turns + (halves_in(a) == 2u ? turns_in(half(a, 1)) : 0u) <= SLOTS;
    Step s;
    s.part = 0;
    start(a, share, s);
    if (kept) put_all(a, share, lds);
    block_sync();  // the sums of the last shared task have been read
    ROLLED
    while (s.part < share.parts) {
      uint32_t part = s.part, groups = s.c.matrix < a.slots ? wave_stream::groups_of_run(s.w, s.c.run) : 0u;
      wave_rows::Lds x = wave_stream::from_slot<SLOTS>(lds, kept ? (half_of_part(a, share, part) ? turns : 0u) + turn : 0u);
      if (!kept) put(a, ask(a, share, s.w, s.c), x);
      turn++;
      bool done = advance(a, share, s);
      auto refill = [&](uint32_t to) { refill_routed(a, share, flow, to); };
      if constexpr (ONE) wave_stream::add_run_of_one<DEPTH, SLOTS>(walk.sum[0][0], flow.ring, flow.lane, x, flow.slot, groups, refill);
      else wave_stream::add_run<W, DEPTH, SLOTS>(walk, flow.ring, flow.lane, x, flow.slot, 1, groups, refill);
      if (!done) continue;
      float* of_part = sums() + part % 2 * WAVES * COLS;
      UNROLL
      for (uint32_t i = 0; i < 4; i++) {
        if (ONE ? i == 0 : wave_product::part() == 0) of_part[tile_group() * COLS + load_row(ONE ? wave_product::part() : i)] = walk.sum[0][i];
      }
      wave_rows::clear(walk);
      turn = 0;
      block_sync();  // whoever comes to the next part but one has seen all leave this one
      store_part(a, share, part, of_part);
    }
  }

  DEVICE void run(const step_down_args& a) {
    next_may_begin();
    Share share = share_of(a);
    Flow flow;
    flow.ring = wave_stream::ring_of_wave<DEPTH>(lds_bytes());
    flow.lane = wave_stream::lane_of<W>();
    flow.id = flow.slot = flow.unit = flow.step.part = 0;
    start(a, share, flow.step);
    place_ahead(a, share, flow);
    uint32_t tasks = shared(a, share, flow);
    if (share.parts) routed(a, share, flow);
    finish(a, share, tasks);
  }
};
template <class W> DEVICE void down_rows(const step_down_args& a) { DownRows<W>().run(a); }
#else
template <class W> DEVICE void down_rows(const step_down_args& a) { Down<bf16, W>().run(a); }
#endif
}  // namespace step_moe
