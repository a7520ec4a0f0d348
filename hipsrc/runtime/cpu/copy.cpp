// copy.cpp - see copy.h.
#include "copy.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace glm53_cpu {
namespace {

constexpr uint64_t piece_bytes_fair = 4ull << 20;  // unseeded: others get a turn after so much
constexpr uint64_t word_bytes = 16;                // cuts lie at multiples of this: engines do not tear aligned words
constexpr uint64_t cuts_most = 6;

uint8_t* bytes_at(uint64_t address) { return reinterpret_cast<uint8_t*>(address); }

uint64_t extent(uint64_t width, uint64_t height, uint64_t pitch) { return height ? (height - 1) * pitch + width : 0; }

std::string gone(const char* side, uint64_t address, uint64_t bytes) {
  char out[160];
  snprintf(out, sizeof out, "copy: its %s 0x%llx (%llu bytes) was freed before the copy ran", side,
           static_cast<unsigned long long>(address), static_cast<unsigned long long>(bytes));
  return out;
}

}  // namespace

Side side_of(const Memory& memory, uint64_t address, uint64_t bytes) {
  Side side;
  Place place = memory.find(address);
  if (place.known()) {
    side.valid = bytes <= place.room;
    side.device = place.on_device();
    side.alias = place.alias;
    if (side.device) side.owner = place.block->device;
    return side;
  }
  side.pageable = true;
  side.valid = !memory.out_of_bounds(address) && host_range_mapped(address, bytes);
  return side;
}

void Pieces::plan(Random* random, uint64_t total) {
  std::vector<uint64_t> cuts = {0, total};
  if (random) {
    for (uint64_t i = random->below(cuts_most + 1); i; i--) cuts.push_back(random->below(total) / word_bytes * word_bytes);
  } else {
    for (uint64_t at = piece_bytes_fair; at < total; at += piece_bytes_fair) cuts.push_back(at);
  }
  std::sort(cuts.begin(), cuts.end());
  for (size_t i = cuts.size() - 1; i; i--) {
    if (cuts[i] != cuts[i - 1]) pieces_.emplace_back(cuts[i - 1], cuts[i]);
  }
  if (!random) return;
  for (size_t i = pieces_.size(); i > 1; i--) std::swap(pieces_[i - 1], pieces_[random->below(i)]);
}

std::pair<uint64_t, uint64_t> Pieces::take() {
  auto piece = pieces_.back();
  pieces_.pop_back();
  return piece;
}

bool CopyOp::begin(Step& step) {
  begun_ = true;
  uint64_t target_bytes = extent(shape_.width, shape_.height, shape_.target_pitch);
  uint64_t source_bytes = extent(shape_.width, shape_.height, shape_.source_pitch);
  if (!side_of(memory_, shape_.target, target_bytes).valid) {
    step.fail(hipErrorIllegalAddress, gone("target", shape_.target, target_bytes));
  } else if (staged_.empty() && !side_of(memory_, shape_.source, source_bytes).valid) {
    step.fail(hipErrorIllegalAddress, gone("source", shape_.source, source_bytes));
  }
  if (step.error == hipSuccess) pieces_.plan(step.random, shape_.width * shape_.height);
  return step.error == hipSuccess;
}

bool CopyOp::advance(Step& step) {
  if (!begun_ && !begin(step)) return true;
  if (pieces_.empty()) return true;
  std::pair<uint64_t, uint64_t> piece = pieces_.take();
  for (uint64_t at = piece.first; at < piece.second;) {
    uint64_t row = at / shape_.width, column = at % shape_.width;
    uint64_t bytes = std::min(shape_.width - column, piece.second - at);
    const uint8_t* source = staged_.empty() ? bytes_at(shape_.source + row * shape_.source_pitch + column) : staged_.data() + at;
    memmove(bytes_at(shape_.target + row * shape_.target_pitch + column), source, bytes);
    at += bytes;
  }
  return pieces_.empty();
}

bool FillOp::advance(Step& step) {
  if (!begun_) {
    begun_ = true;
    if (!side_of(memory_, target_, bytes_).valid) {
      step.fail(hipErrorIllegalAddress, gone("target", target_, bytes_));
      return true;
    }
    pieces_.plan(step.random, bytes_);
  }
  if (pieces_.empty()) return true;
  std::pair<uint64_t, uint64_t> piece = pieces_.take();
  memset(bytes_at(target_ + piece.first), value_, piece.second - piece.first);
  return pieces_.empty();
}

}  // namespace glm53_cpu
