// router.hip - sigmoid router with correction bias (DeepSeek-V3's "noaux_tc").
//   affinity = sigmoid(logit); choice = affinity + bias; pick the k experts of the largest choice, ties to the lowest id;
//   n_group > 1: a group's score is the sum of its two best choices, only the best topk_group groups (ties to the lowest) compete;
//   weight = affinity of the picked, divided by (their sum + 1e-20) if normalise, times scaling.
// One block a row, one work-item an expert: each counts how many experts go before it, which is its place. The order is total (NaN
// goes last, then lower ids first), so exactly k places are taken whatever the logits are; a NaN logit shows as a NaN weight if picked.
// Limits: experts <= 256, k <= 16, n_group <= 256, each group at least one expert.
#include "portable.h"
#include "scan.h"

namespace routing {

constexpr uint32_t THREADS = 256;
constexpr uint32_t SLOTS_MAX = 16;
constexpr uint32_t OUT_OF_GROUP = 0u;  // below the key of -inf

// Marks the experts of groups that do not compete.
DEVICE void drop_groups(const router_args& a, uint32_t* keys, uint32_t* group_keys) {
  uint32_t t = thread_id(), members = a.experts / a.n_group;
  if (t < a.n_group) {
    uint32_t best = 0, second = 0;
    for (uint32_t i = 0; i < members; i++) {
      uint32_t key = keys[t * members + i];
      if (key > best) {
        second = best;
        best = key;
      } else if (key > second) {
        second = key;
      }
    }
    group_keys[t] = order_key(members > 1u ? order_value(best) + order_value(second) : order_value(best));
  }
  block_sync();
  if (t < a.experts) {
    uint32_t group = t / members, before = 0;
    for (uint32_t g = 0; g < a.n_group; g++) {
      before += (group_keys[g] > group_keys[group] || (group_keys[g] == group_keys[group] && g < group)) ? 1u : 0u;
    }
    if (before >= a.topk_group) keys[t] = OUT_OF_GROUP;
  }
  block_sync();
}

// LDS of pick.
struct Scratch {
  uint32_t* keys;        // [THREADS], at a multiple of 16 bytes
  uint32_t* group_keys;  // [THREADS]
  float* picked;         // [SLOTS_MAX]
};

// The experts of one row, by a block of THREADS work-items. The scratch may be used again after a block_sync.
DEVICE void pick(const router_args& a, uint32_t row, const Scratch& lds) {
  uint32_t t = thread_id();
  float affinity = 0.0f;
  lds.keys[t] = OUT_OF_GROUP;
  if (t < a.experts) {
    affinity = sigmoid_f32(((const float*)a.logits)[(uint64_t)row * a.experts + t]);
    lds.keys[t] = order_key(affinity + ((const float*)a.bias)[t]);
  }
  block_sync();
  if (a.n_group > 1u) drop_groups(a, lds.keys, lds.group_keys);
  uint32_t place = 0, mine = lds.keys[t];
  for (uint32_t e = 0; e < a.experts; e += 4) {  // past the experts: OUT_OF_GROUP, and higher ids
    words16 four = *(const words16*)(lds.keys + e);
    UNROLL
    for (uint32_t i = 0; i < 4; i++) place += (four.w[i] > mine || (four.w[i] == mine && e + i < t)) ? 1u : 0u;
  }
  bool chosen = t < a.experts && place < a.k;
  if (chosen) lds.picked[place] = affinity;
  block_sync();
  if (!chosen) return;
  float weight = affinity;
  if (a.normalise) {
    float sum = 0.0f;
    for (uint32_t i = 0; i < a.k; i++) sum += lds.picked[i];
    weight = weight / (sum + 1e-20f);
  }
  uint64_t at = (uint64_t)row * a.k + place;
  ((int32_t*)a.ids)[at] = (int32_t)t;
  ((float*)a.weights)[at] = weight * a.scaling;
}

}  // namespace routing

// LAUNCH router block=256 experts_max=256 slots_max=16
KERNEL(router, router_args, 256) {
  SHARED(words16, keys, routing::THREADS / 4);
  SHARED(uint32_t, group_keys, routing::THREADS);
  SHARED(float, picked, routing::SLOTS_MAX);
  routing::pick(a, block_x(), {(uint32_t*)keys, group_keys, picked});
}
