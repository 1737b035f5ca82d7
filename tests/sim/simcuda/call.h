// What every exported call goes through: the count, the plan of failures, the lost device, the
// context of the thread, and the chance that queued work runs now.
#pragma once

#include <chrono>
#include <mutex>
#include <thread>

#include "sim.h"

#define SIMCUDA_EXPORT extern "C" __attribute__((visibility("default")))

namespace simcuda {

using Lock = std::unique_lock<std::mutex>;

enum class Context { kNeeded, kNotNeeded };

// The simulated context current in this thread; it names the configuration it was made under.
std::uint64_t& current_context();
inline std::uint64_t context_of(const Simulator& sim) {
  return sim.generation << 8 | 1;
}

Result admit(Simulator& sim, Lock& lock, const char* name, Context context);

template <typename Body>
Result call(const char* name, Context context, Body body) {
  Simulator& sim = Simulator::instance();
  Lock lock(sim.mutex);
  const auto cost = sim.costs_ns.find(name);
  const std::uint64_t nanoseconds =
      cost == sim.costs_ns.end() ? sim.config.latency_ns : cost->second;
  if (nanoseconds > 0) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::nanoseconds(nanoseconds));
    lock.lock();
  }
  const Result refused = admit(sim, lock, name, context);
  return refused != vmserve::cuda::kSuccess ? refused : body(sim, lock);
}

// A handle as the simulator counts streams: the legacy default stream has three names.
inline std::uint64_t stream_of(void* handle) {
  const auto id = reinterpret_cast<std::uint64_t>(handle);
  return id <= 2 ? kDefaultStream : id;
}

}  // namespace simcuda
