// pool.cpp - see pool.h.
#include "pool.h"

#include <algorithm>
#include <chrono>

namespace glm53_cpu {
namespace {

constexpr uint64_t wake_ns = 40000;  // work that is left is worth a helper's waking from here on

uint64_t clock_ns() {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count());
}

}  // namespace

void Pool::set_threads(unsigned threads) { threads_ = threads; }

void Pool::share(const Body& body, uint64_t total) {
  for (;;) {
    uint64_t first = next_.fetch_add(chunk_, std::memory_order_relaxed);
    if (first >= total || failed_.load(std::memory_order_relaxed)) return;
    if (!body(first, std::min(first + chunk_, total))) failed_.store(true, std::memory_order_relaxed);
  }
}

void Pool::serve(uint64_t seen) {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stopping_ || round_ != seen; });
    if (stopping_) return;
    seen = round_;
    const Body* body = body_;
    uint64_t total = total_;
    lock.unlock();
    share(*body, total);
    lock.lock();
    if (--busy_ == 0) idle_.notify_one();
  }
}

bool Pool::run(uint64_t total, const Body& body) {
  static const unsigned processors = std::max(1u, std::thread::hardware_concurrency());  // a system call each time
  unsigned threads = threads_ ? threads_.load() : processors;
  if (threads != helpers_.size() + 1 && !(threads == 1 && helpers_.empty())) stop();
  if (threads == 1 || total == 1) return body(0, total);
  // The first share tells how long the launch takes: a short one is over before a helper has woken.
  uint64_t chunk = std::max<uint64_t>(1, total / (8ull * threads)), begin = clock_ns();
  if (!body(0, chunk)) return false;
  if ((clock_ns() - begin) * static_cast<double>(total - chunk) / static_cast<double>(chunk) < wake_ns) return body(chunk, total);
  if (helpers_.empty()) {
    for (unsigned i = 1; i < threads; i++) helpers_.emplace_back(&Pool::serve, this, round_);
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    body_ = &body;
    total_ = total;
    chunk_ = chunk;
    next_ = chunk;
    failed_ = false;
    busy_ = static_cast<unsigned>(helpers_.size());
    round_++;
  }
  wake_.notify_all();
  share(body, total);
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [&] { return busy_ == 0; });
  return !failed_;
}

void Pool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
  helpers_.clear();
  stopping_ = false;
}

}  // namespace glm53_cpu
