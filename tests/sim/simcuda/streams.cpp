// Queues of work, and the order in which it runs: late.
#include <algorithm>

#include "sim.h"

namespace simcuda {

using namespace vmserve::cuda;

Result Simulator::stream_create(std::uint64_t* stream, unsigned flags) {
  if (flags > kStreamNonBlocking) return kInvalidValue;
  *stream = generation << 32 | (next_id++ << 4);  // 0, 1 and 2 mean default streams
  streams[*stream].blocking = flags == 0;
  return kSuccess;
}

Result Simulator::stream_destroy(std::uint64_t stream) {
  if (stream == kDefaultStream || !knows_stream(stream)) return kInvalidHandle;
  Stream& destroyed = streams[stream];
  destroyed.destroyed = true;  // its work still runs
  if (destroyed.queue.empty() && !destroyed.running) streams.erase(stream);
  return kSuccess;
}

bool Simulator::knows_stream(std::uint64_t stream) const {
  const auto it = streams.find(stream);
  return it != streams.end() && !it->second.destroyed;
}

void Simulator::enqueue(std::uint64_t stream, Work work) {
  Stream& queue = streams[stream];
  work.sequence = next_sequence_++;
  queue.last_sequence = work.sequence;
  queue.queue.push_back(std::move(work));
}

std::pair<std::uint64_t, std::uint64_t> Simulator::blocker(std::uint64_t id,
                                                           const Stream& stream) const {
  const Work& next = stream.queue.front();
  if (next.waits_for != nullptr && next.waits_for->completed < next.waits_until) {
    return {next.waits_stream, next.waits_until};
  }
  if (!stream.blocking) return {id, 0};
  // The legacy default stream and the blocking ones wait for what was queued before on the other.
  for (const auto& [other, candidate] : streams) {
    const bool ordered = id == kDefaultStream ? candidate.blocking && other != kDefaultStream
                                              : other == kDefaultStream;
    if (!ordered || other == id) continue;
    const bool earlier =
        !candidate.queue.empty() && candidate.queue.front().sequence < next.sequence;
    if (earlier || candidate.running) return {other, next.sequence - 1};
  }
  return {id, 0};
}

bool Simulator::may_run(std::uint64_t id, const Stream& stream) const {
  return !stream.queue.empty() && !stream.running && blocker(id, stream).second == 0;
}

void Simulator::run_next(std::unique_lock<std::mutex>& lock, std::uint64_t id) {
  Work work = std::move(streams[id].queue.front());
  streams[id].queue.pop_front();
  bool allowed = sticky == kSuccess;  // a lost device runs nothing more
  for (const Touch& touch : work.touches) {
    const std::string why = denial(touch);
    if (why.empty() || !allowed) continue;
    violate(work.name + " of " + std::to_string(touch.bytes) + " bytes, " +
            (touch.use == Use::kRead ? "reading" : "writing") + ": " + why);
    allowed = false;
  }
  if (allowed && work.outside_lock) {
    streams[id].running = true;
    lock.unlock();
    work.run();
    lock.lock();
    streams[id].running = false;
    changed.notify_all();
  } else if (work.run && !work.outside_lock && (allowed || work.touches.empty())) {
    work.run();  // records and waits end on a lost device too
  }
  const auto it = streams.find(id);
  if (it->second.destroyed && it->second.queue.empty()) streams.erase(it);
}

bool Simulator::step(std::unique_lock<std::mutex>& lock) {
  std::vector<std::uint64_t> ready;
  for (const auto& [id, stream] : streams) {
    if (may_run(id, stream)) ready.push_back(id);
  }
  if (ready.empty()) return false;
  run_next(lock, ready[random() % ready.size()]);
  return true;
}

void Simulator::run_until(std::unique_lock<std::mutex>& lock, std::uint64_t stream,
                          std::uint64_t sequence) {
  for (;;) {
    const auto it = streams.find(stream);
    if (it == streams.end()) return;
    if (it->second.running) {
      changed.wait(lock);
      continue;
    }
    if (it->second.queue.empty() || it->second.queue.front().sequence > sequence) return;
    const auto [other, until] = blocker(stream, it->second);
    if (until == 0) {
      run_next(lock, stream);
    } else {
      run_until(lock, other, until);
    }
  }
}

void Simulator::run_all(std::unique_lock<std::mutex>& lock) {
  while (pending_work() > 0) {
    if (!step(lock)) changed.wait(lock);
  }
}

std::uint64_t Simulator::pending_work() const {
  std::uint64_t pending = 0;
  for (const auto& [id, stream] : streams) {
    pending += stream.queue.size() + (stream.running ? 1 : 0);
  }
  return pending;
}

void Simulator::violate(const std::string& text) {
  violations.push_back(text);
  if (config.sticky_violations != 0 && sticky == kSuccess) sticky = kIllegalAddress;
}

}  // namespace simcuda
