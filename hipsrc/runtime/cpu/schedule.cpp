// schedule.cpp - who runs next. Unseeded: a worker thread and waiting hosts take the ready queues in turn. Seeded: steps run only inside
// API calls, on the calling thread, at queues drawn from the seed.
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "state.h"

namespace glm53_cpu {
namespace {

State* current = nullptr;
std::mutex current_mutex;

// A spinning kernel that waits in vain: looked at every so many steps; seeded mode gives up by steps, unseeded mode by time as well.
constexpr uint64_t spin_check_steps = 1024;
constexpr uint64_t spin_limit_steps = 32 * spin_check_steps;
constexpr uint64_t spin_limit_ns = 3'000'000'000ull;
constexpr size_t trace_bytes_kept = 1 << 20;

}  // namespace

State& state() {
  std::lock_guard<std::mutex> lock(current_mutex);
  if (!current) current = new State;  // never destroyed: other threads may be inside at process end
  return *current;
}

void replace_state() {
  std::lock_guard<std::mutex> lock(current_mutex);
  // In a forked child the parent's threads are gone and its locks may be held: that state is left behind as it is.
  if (current && current->process == getpid()) current->stop();
  current = nullptr;
}

uint64_t now_ns() {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count());
}

void State::start() {
  if (started) return;
  started = true;
  memory.configure(static_cast<int>(device_count), bytes_per_device);
  for (uint32_t i = 0; i < device_count; i++) {
    auto device = std::make_unique<Device>();
    device->index = static_cast<int>(i);
    for (int q = 0; q < queues_per_device; q++) {
      device->queues[q].device = device.get();
      device->queues[q].index = q;
    }
    auto stream = std::make_shared<Stream>();
    stream->device = device.get();
    stream->queue = &device->queues[device->streams_made++ % queues_per_device];
    device->null_stream = stream;
    device->streams.push_back(stream);
    devices.push_back(std::move(device));
  }
  worker = std::thread(&State::work, this);
}

void State::stop() {
  std::vector<std::shared_ptr<Op>> dropped;
  {
    std::unique_lock<std::mutex> lock(mutex);
    stopping = true;
    work_arrived.notify_all();
    changed.wait(lock, [&] { return !executing; });
    for (auto& device : devices) lose(*device, hipErrorDeinitialized, "", &dropped);
  }
  if (worker.joinable()) worker.join();
  dropped.clear();
  delete this;
}

void State::enqueue(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Op>& op) {
  Device& device = *stream->device;
  op->device = &device;
  op->id = ++ops_made;
  auto& streams_here = device.streams;
  streams_here.erase(std::remove_if(streams_here.begin(), streams_here.end(),
                                    [](const std::shared_ptr<Stream>& s) { return s->destroyed && (!s->last || s->last->done); }),
                     streams_here.end());
  if (stream == device.null_stream) {
    for (const auto& other : streams_here) {
      if (other != stream && other->blocking() && other->last && !other->last->done) op->after.push_back(other->last);
    }
  } else if (stream->blocking()) {
    const auto& last = device.null_stream->last;
    if (last && !last->done) op->after.push_back(last);
  }
  stream->last = op;
  stream->queue->ops.push_back(op);
  wake_worker();
}

// A host that waits runs the steps itself, so the worker is woken only when none does.
void State::wake_worker() {
  if (!seeded && !waiting_hosts && worker_idle) work_arrived.notify_one();
}

bool State::ready(const Queue& queue) const {
  if (queue.ops.empty()) return false;
  for (const auto& before : queue.ops.front()->after) {
    if (!before->done) return false;
  }
  return true;
}

Queue* State::choose() {
  size_t count = devices.size() * queues_per_device;
  std::vector<size_t> found;
  for (size_t i = 1; i <= count; i++) {
    size_t at = (last_queue + i) % count;
    if (!ready(devices[at / queues_per_device]->queues[at % queues_per_device])) continue;
    found.push_back(at);
    if (!seeded) break;
  }
  if (found.empty()) return nullptr;
  size_t at = found[0];
  if (seeded) {
    std::sort(found.begin(), found.end());
    // A queue of real hardware can stand still for long while others run: for some hundred steps one queue with work gets none unless
    // it is alone. Uniform draws would let every queue advance soon, and a missing event between two queues would never show.
    busy_queues.insert(found.begin(), found.end());
    if (starve_left == 0) {
      starve_left = 1 + random.below(96);
      starved_queue = random.below(4) != 0 ? *std::next(busy_queues.begin(), static_cast<long>(random.below(busy_queues.size()))) : count;
    }
    starve_left--;
    if (found.size() > 1) found.erase(std::remove(found.begin(), found.end(), starved_queue), found.end());
    if (random.below(8) == 0) favoured_queue = random.below(count);
    bool favour = random.below(4) != 0 && std::find(found.begin(), found.end(), favoured_queue) != found.end();
    at = favour ? favoured_queue : found[random.below(found.size())];
  }
  last_queue = at;
  return &devices[at / queues_per_device]->queues[at % queues_per_device];
}

// After a step in which a kernel only gave way: has everything that could change the memory it waits for come to rest?
bool State::stuck() {
  spin_steps++;
  if (spin_steps % spin_check_steps != 0) return false;
  uint64_t fingerprint = 0;
  for (const auto& device : devices) {
    for (const Queue& queue : device->queues) {
      if (!queue.ops.empty()) fingerprint = fingerprint * 31 + queue.ops.front()->fingerprint();
    }
  }
  if (fingerprint != spin_fingerprint || !waiting_hosts) {
    spin_fingerprint = fingerprint;
    spin_unchanged = 0;
    spin_changed_ns = now_ns();
    return false;
  }
  spin_unchanged += spin_check_steps;
  return spin_unchanged >= spin_limit_steps && (seeded || now_ns() - spin_changed_ns > spin_limit_ns);
}

bool State::run_step(std::unique_lock<std::mutex>& lock) {
  if (executing || devices.empty()) return false;
  Queue* queue = choose();
  if (!queue) return false;
  std::shared_ptr<Op> op = queue->ops.front();
  op->after.clear();
  executing = true;
  if (seeded && trace.size() < trace_bytes_kept) {
    trace += std::to_string(queue->device->index) + "." + std::to_string(queue->index) + " " + std::to_string(op->id) + " ";
    trace += std::string(op->label()) + "\n";
  }
  Step step;
  if (seeded) step.random = &random;
  step.fibers = fibers || seeded || !failures.empty();
  lock.unlock();
  bool finished = op->advance(step);
  lock.lock();
  executing = false;
  std::vector<std::shared_ptr<Op>> dropped;
  if (!finished && step.error == hipSuccess && op->spinning()) {
    if (stuck()) {
      step.fail(hipErrorLaunchFailure, std::string("kernel ") + op->label() +
                                           ": deadlock: it waits for a store that no queue and no host call can make any more");
    }
  } else {
    spin_steps = spin_unchanged = 0;
  }
  if (step.error != hipSuccess) {
    lose(*queue->device, step.error, step.message, &dropped);
  } else if (finished) {
    op->finished_ns = now_ns();
    op->done = true;
    if (!queue->ops.empty() && queue->ops.front() == op) queue->ops.pop_front();
  }
  changed.notify_all();
  if (!dropped.empty()) {
    op.reset();
    lock.unlock();
    dropped.clear();
    lock.lock();
  }
  return true;
}

void State::lose(Device& device, hipError_t error, const std::string& text, std::vector<std::shared_ptr<Op>>* dropped) {
  if (device.lost == hipSuccess) {
    device.lost = error;
    if (!text.empty()) message = "device " + std::to_string(device.index) + " is lost: " + text;
  }
  for (Queue& queue : device.queues) {
    for (auto& op : queue.ops) {
      op->done = true;
      op->error = error;
      op->finished_ns = now_ns();
      op->after.clear();
      dropped->push_back(op);
    }
    queue.ops.clear();
  }
  changed.notify_all();
  work_arrived.notify_one();  // what waited for this device on others may be ready now
}

void State::lose_now(std::unique_lock<std::mutex>& lock, Device& device, hipError_t error, const std::string& text) {
  std::vector<std::shared_ptr<Op>> dropped;
  changed.wait(lock, [&] { return !executing; });
  lose(device, error, text, &dropped);
  lock.unlock();
  dropped.clear();
  lock.lock();
}

void State::pump(std::unique_lock<std::mutex>& lock) {
  if (!seeded) return;
  if (pace_left == 0) {
    pace = static_cast<int>(random.below(4));
    pace_left = 1 + random.below(32);
  }
  pace_left--;
  uint64_t steps = random.below(pace == 3 ? 24 : pace == 2 ? 3 : 1);
  while (steps-- && run_step(lock)) {
  }
}

void State::wait(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Op>& op) {
  if (!op) return;
  waiting_hosts++;
  while (!op->done) {
    if (!run_step(lock)) {
      if (!op->done) changed.wait(lock);
    } else {
      rest(lock);
    }
  }
  waiting_hosts--;
  wake_worker();
}

void State::wait_device(std::unique_lock<std::mutex>& lock, Device& device) {
  for (Queue& queue : device.queues) {
    if (!queue.ops.empty()) wait(lock, std::shared_ptr<Op>(queue.ops.back()));
  }
}

void State::rest(std::unique_lock<std::mutex>& lock) {
  if (seeded || spin_steps < 64) return;
  lock.unlock();
  std::this_thread::sleep_for(std::chrono::microseconds(20));
  lock.lock();
}

void State::work() {
  std::unique_lock<std::mutex> lock(mutex);
  while (!stopping) {
    if (!seeded && run_step(lock)) {
      rest(lock);
      continue;
    }
    worker_idle = true;
    work_arrived.wait(lock);
    worker_idle = false;
  }
}

}  // namespace glm53_cpu
