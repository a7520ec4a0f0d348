// graph.cpp - see graph.h.
#include "graph.h"

#include <algorithm>

#include "copy.h"
#include "kernel.h"

namespace glm53_cpu {

constexpr int nodes_per_step = 32;

std::shared_ptr<Op> work_of(const Node& node) {
  if (auto kernel = std::dynamic_pointer_cast<KernelOp>(node.work)) return kernel->copy();
  if (auto copy = std::dynamic_pointer_cast<CopyOp>(node.work)) return copy->copy();
  if (auto fill = std::dynamic_pointer_cast<FillOp>(node.work)) return fill->copy();
  return nullptr;
}

void GraphOp::begin() {
  begun_ = true;
  const auto& nodes = exec_->nodes;
  running_.resize(nodes.size());
  followers_.resize(nodes.size());
  for (size_t i = 0; i < nodes.size(); i++) {
    waiting_for_.push_back(static_cast<int>(nodes[i].after.size()));
    for (int before : nodes[i].after) followers_[before].push_back(static_cast<int>(i));
    if (nodes[i].after.empty()) open_.push_back(static_cast<int>(i));
  }
}

void GraphOp::finish(int node) {
  running_[node].reset();
  open_.erase(std::find(open_.begin(), open_.end(), node));
  for (int next : followers_[node]) {
    if (--waiting_for_[next] == 0) open_.push_back(next);
  }
}

// Unseeded, several nodes run in one step: others get a turn often enough, and a step costs as much as a small kernel.
bool GraphOp::advance(Step& step) {
  if (!begun_) begin();
  int most = step.random ? 1 : nodes_per_step;
  for (int i = 0; i < most && !open_.empty(); i++) {
    if (!advance_node(step)) break;
  }
  return step.error != hipSuccess || open_.empty();
}

// True if the node was finished.
bool GraphOp::advance_node(Step& step) {
  int node = open_[step.random ? step.random->below(open_.size()) : turn_++ % open_.size()];
  std::shared_ptr<Op>& op = running_[node];
  if (!op) {
    op = work_of(exec_->nodes[node]);
    if (op) op->device = device;
  }
  bool finished = !op || op->advance(step);
  spinning_ = !finished && op->spinning();
  if (step.error == hipSuccess && finished) finish(node);
  return finished;
}

uint64_t GraphOp::fingerprint() const {
  uint64_t sum = 0;
  for (const auto& op : running_) {
    if (op) sum = sum * 31 + op->fingerprint();
  }
  return sum;
}

hipError_t submit(State& s, const std::shared_ptr<Stream>& stream, const std::shared_ptr<Op>& op) {
  if (!stream->capture) {
    if (stream == stream->device->null_stream) {
      hipError_t error = forbid_null_stream(s, *stream->device);
      if (error != hipSuccess) return error;
    }
    s.enqueue(stream, op);
    return hipSuccess;
  }
  if (stream->capture->invalidated) return hipErrorStreamCaptureInvalidated;
  Graph& graph = *stream->capture->graph;
  graph.nodes.push_back({op, stream->capture_tail, s.new_handle()});
  stream->capture_tail = {static_cast<int>(graph.nodes.size()) - 1};
  return hipSuccess;
}

hipError_t begin_capture(State& s, const std::shared_ptr<Stream>& stream, hipStreamCaptureMode mode) {
  if (stream == stream->device->null_stream) return hipErrorStreamCaptureUnsupported;
  if (mode != hipStreamCaptureModeGlobal && mode != hipStreamCaptureModeThreadLocal && mode != hipStreamCaptureModeRelaxed) {
    return hipErrorInvalidValue;
  }
  if (stream->capture) return hipErrorIllegalState;
  auto capture = std::make_shared<Capture>();
  capture->graph = std::make_shared<Graph>();
  capture->graph->device = stream->device;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->origin = stream;
  capture->streams.push_back(stream);
  stream->capture = capture;
  stream->capture_tail.clear();
  s.captures.push_back(capture);
  return hipSuccess;
}

// Work of a forked stream that the origin has not waited for.
static bool unjoined(const Capture& capture) {
  const auto& nodes = capture.graph->nodes;
  std::vector<char> seen(nodes.size());
  std::vector<int> pending = capture.origin->capture_tail;
  while (!pending.empty()) {
    int node = pending.back();
    pending.pop_back();
    if (seen[node]) continue;
    seen[node] = 1;
    pending.insert(pending.end(), nodes[node].after.begin(), nodes[node].after.end());
  }
  return std::count(seen.begin(), seen.end(), 0) != 0;
}

hipError_t end_capture(State& s, const std::shared_ptr<Stream>& stream, std::shared_ptr<Graph>* graph) {
  std::shared_ptr<Capture> capture = stream->capture;
  if (!capture) return hipErrorIllegalState;
  if (capture->origin != stream) return hipErrorStreamCaptureUnmatched;
  if (capture->mode != hipStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id()) {
    return hipErrorStreamCaptureWrongThread;
  }
  hipError_t error = hipSuccess;
  if (capture->invalidated) error = hipErrorStreamCaptureInvalidated;
  else if (unjoined(*capture)) error = hipErrorStreamCaptureUnjoined;
  for (const auto& member : capture->streams) {
    member->capture.reset();
    member->capture_tail.clear();
  }
  s.captures.erase(std::find(s.captures.begin(), s.captures.end(), capture));
  if (error == hipSuccess) *graph = capture->graph;
  return error;
}

void capture_record(const std::shared_ptr<Stream>& stream, Event& event) {
  event.record.reset();
  event.capture = stream->capture;
  event.capture_nodes = stream->capture_tail;
}

hipError_t capture_wait(State& s, const std::shared_ptr<Stream>& stream, Event& event) {
  bool event_live = event.capture && std::find(s.captures.begin(), s.captures.end(), event.capture) != s.captures.end();
  if (!event_live) {
    // Recorded outside of any capture, or in one that has ended.
    stream->capture->invalidated = true;
    return hipErrorStreamCaptureIsolation;
  }
  if (stream->capture && stream->capture != event.capture) {
    stream->capture->invalidated = event.capture->invalidated = true;
    return hipErrorStreamCaptureMerge;
  }
  if (event.capture->invalidated) return hipErrorStreamCaptureInvalidated;
  if (stream == stream->device->null_stream) {
    event.capture->invalidated = true;
    return hipErrorStreamCaptureImplicit;
  }
  if (stream->device != event.capture->graph->device) {
    event.capture->invalidated = true;
    s.message = "capture on device " + std::to_string(event.capture->graph->device->index) + " reached a stream of device " +
                std::to_string(stream->device->index) + ": graphs of several devices are refused; capture one graph per device";
    return hipErrorStreamCaptureUnsupported;
  }
  if (!stream->capture) {
    stream->capture = event.capture;
    event.capture->streams.push_back(stream);
  }
  for (int node : event.capture_nodes) {
    auto& tail = stream->capture_tail;
    if (std::find(tail.begin(), tail.end(), node) == tail.end()) tail.push_back(node);
  }
  return hipSuccess;
}

hipError_t forbid_while_capturing(State& s) {
  hipError_t error = hipSuccess;
  for (const auto& capture : s.captures) {
    bool mine = capture->thread == std::this_thread::get_id();
    bool forbids = capture->mode == hipStreamCaptureModeGlobal || (capture->mode == hipStreamCaptureModeThreadLocal && mine);
    if (!forbids) continue;
    capture->invalidated = true;
    error = hipErrorStreamCaptureUnsupported;
  }
  return error;
}

hipError_t forbid_null_stream(State& s, const Device& device) {
  hipError_t error = hipSuccess;
  for (const auto& capture : s.captures) {
    bool blocking = std::any_of(capture->streams.begin(), capture->streams.end(), [](const auto& stream) { return stream->blocking(); });
    if (capture->graph->device != &device || !blocking) continue;
    capture->invalidated = true;
    error = hipErrorStreamCaptureImplicit;
  }
  return error;
}

}  // namespace glm53_cpu
