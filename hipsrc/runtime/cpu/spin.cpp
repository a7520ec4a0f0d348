// spin.cpp - see spin.h.
#include "spin.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <thread>

namespace glm53_cpu {
namespace {

thread_local void* this_strand = nullptr;

// Threads that outlive a kernel: the fibers that a thread has set up cost more than most kernels that wait. Never destroyed, as State is not.
class Threads {
 public:
  static Threads& all() {
    static Threads* threads = new Threads;
    return *threads;
  }
  void run(std::function<void()> job) {
    std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(std::move(job));
    if (idle_ >= jobs_.size()) arrived_.notify_one();
    else std::thread(&Threads::work, this).detach();
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      while (jobs_.empty()) {
        if (idle_ >= kept_most) return;
        idle_++;
        arrived_.wait(lock);
        idle_--;
      }
      std::function<void()> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
      job = nullptr;
      lock.lock();
    }
  }

  static constexpr size_t kept_most = 16;  // each has set up the stacks of the largest block that it ran
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<std::function<void()>> jobs_;
  size_t idle_ = 0;
};

}  // namespace

Strands::Strands(uint64_t blocks, Body body) : blocks_(blocks), body_(std::move(body)) {
  uint64_t count = std::min(blocks, resident_blocks);
  for (uint64_t i = 0; i < count; i++) {
    strands_.push_back(std::make_unique<Strand>());
    strands_.back()->owner = this;
  }
  serving_ = strands_.size();
  for (auto& strand : strands_) Threads::all().run([this, strand = strand.get()] { serve(strand); });
}

Strands::~Strands() {
  std::unique_lock<std::mutex> lock(mutex_);
  giving_up_ = true;
  for (auto& strand : strands_) strand->wake.notify_one();
  parked_.wait(lock, [&] { return serving_ == 0; });
}

void Strands::serve(Strand* strand) {
  this_strand = strand;
  std::unique_lock<std::mutex> lock(mutex_);
  strand->wake.wait(lock, [&] { return strand->running || giving_up_; });
  while (!giving_up_ && !failed_ && next_block_ < blocks_) {
    uint64_t block = next_block_++;
    lock.unlock();
    std::string message;
    int result = body_(block, &message);
    lock.lock();
    if (result != 0 && !failed_) {
      failed_ = true;
      message_ = message;
    }
  }
  strand->finished = true;
  strand->running = false;
  strand->gave_way = false;
  this_strand = nullptr;
  serving_--;
  parked_.notify_one();  // under the lock: ~Strands may end this object as soon as it is released
}

int Strands::give_way() {
  auto strand = static_cast<Strand*>(this_strand);
  if (!strand) return 1;
  Strands& owner = *strand->owner;
  std::unique_lock<std::mutex> lock(owner.mutex_);
  if (owner.giving_up_) return 1;
  strand->running = false;
  strand->gave_way = true;
  owner.parked_.notify_one();
  strand->wake.wait(lock, [&] { return strand->running || owner.giving_up_; });
  return owner.giving_up_ ? 1 : 0;
}

bool Strands::resume(uint64_t choice, bool* gave_way, bool* failed, std::string* message) {
  std::unique_lock<std::mutex> lock(mutex_);
  std::vector<Strand*> open;
  for (auto& strand : strands_) {
    if (!strand->finished) open.push_back(strand.get());
  }
  if (!open.empty()) {
    Strand* strand = open[choice % open.size()];
    strand->running = true;
    strand->gave_way = false;
    strand->wake.notify_one();
    parked_.wait(lock, [&] { return !strand->running; });
    *gave_way = strand->gave_way;
    if (strand->finished && open.size() == 1) open.clear();
  }
  *failed = failed_;
  *message = message_;
  return open.empty();
}

size_t Strands::unfinished() {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t count = 0;
  for (auto& strand : strands_) count += !strand->finished;
  return count;
}

void View::add(uint64_t address, uint64_t bytes) {
  bytes = std::min(bytes, left_bytes_);
  auto memory = reinterpret_cast<uint8_t*>(address);
  for (const Region& region : regions_) {
    if (region.memory == memory) return;
  }
  if (!bytes) return;
  left_bytes_ -= bytes;
  Region region{memory, std::vector<uint8_t>(memory, memory + bytes), {}, {}};
  region.mine = region.base;
  region.shared.resize(bytes);
  regions_.push_back(std::move(region));
}

void View::enter() {
  for (Region& region : regions_) {
    memcpy(region.shared.data(), region.memory, region.shared.size());
    memcpy(region.memory, region.mine.data(), region.mine.size());
  }
}

void View::leave() {
  for (Region& region : regions_) {
    memcpy(region.mine.data(), region.memory, region.mine.size());
    memcpy(region.memory, region.shared.data(), region.shared.size());
  }
}

void View::publish() {
  for (Region& region : regions_) {
    for (size_t i = 0; i < region.mine.size(); i++) {
      if (region.mine[i] != region.base[i]) region.memory[i] = region.mine[i];
    }
  }
}

}  // namespace glm53_cpu
