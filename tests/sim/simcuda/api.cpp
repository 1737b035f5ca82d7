// The exported functions of the driver API, as the documentation declares them.
#include <cstring>

#include "call.h"

namespace simcuda {

using namespace vmserve::cuda;

std::uint64_t& current_context() {
  thread_local std::uint64_t context = 0;
  return context;
}

Result admit(Simulator& sim, Lock& lock, const char* name, Context context) {
  ++sim.num_calls[name];
  if (sim.sticky != kSuccess) return sim.sticky;
  if (sim.fail_at > 0 && (sim.fail_name.empty() || sim.fail_name == name)) {
    const std::int64_t number = ++sim.calls_since_plan;
    if (sim.fail_forever ? number >= sim.fail_at : number == sim.fail_at) {
      ++sim.num_failed;
      if (is_sticky(sim.fail_result)) sim.sticky = sim.fail_result;
      return sim.fail_result;
    }
  }
  if (context == Context::kNeeded &&
      (sim.context_references == 0 || current_context() != context_of(sim))) {
    return kInvalidContext;
  }
  if (sim.config.pump_per_mille > 0 && sim.random() % 1000 < sim.config.pump_per_mille) {
    for (std::uint64_t steps = 1 + sim.random() % 3; steps > 0; --steps) sim.step(lock);
  }
  return kSuccess;
}

namespace {

constexpr Context kNeeded = Context::kNeeded;
constexpr Context kNotNeeded = Context::kNotNeeded;

EventPointer find_event(const Simulator& sim, void* event) {
  const auto it = sim.events.find(reinterpret_cast<std::uint64_t>(event));
  return it == sim.events.end() ? nullptr : it->second;
}

// "" in `why` of what may not be queued: the real call refuses what is not mapped at once.
Result queue(Simulator& sim, void* stream, Work work) {
  if (!sim.knows_stream(stream_of(stream))) return kInvalidHandle;
  for (const Touch& touch : work.touches) {
    if (!sim.denial(touch).empty()) return kInvalidValue;
  }
  sim.enqueue(stream_of(stream), std::move(work));
  return kSuccess;
}

}  // namespace

SIMCUDA_EXPORT Result cuInit(unsigned flags) {
  return call("cuInit", kNotNeeded, [&](Simulator& sim, Lock&) {
    if (flags != 0) return kInvalidValue;
    return sim.config.num_devices > 0 ? kSuccess : kNoDevice;
  });
}

SIMCUDA_EXPORT Result cuDeviceGet(Device* device, int ordinal) {
  return call("cuDeviceGet", kNotNeeded, [&](Simulator& sim, Lock&) {
    if (ordinal < 0 || ordinal >= static_cast<int>(sim.config.num_devices)) return kInvalidDevice;
    *device = ordinal;
    return kSuccess;
  });
}

SIMCUDA_EXPORT Result cuDeviceGetAttribute(int* value, int attribute, Device device) {
  return call("cuDeviceGetAttribute", kNotNeeded, [&](Simulator& sim, Lock&) {
    if (device < 0 || device >= static_cast<int>(sim.config.num_devices)) return kInvalidDevice;
    if (attribute != kAttributeVirtualMemory) return kInvalidValue;
    *value = static_cast<int>(sim.config.virtual_memory);
    return kSuccess;
  });
}

SIMCUDA_EXPORT Result cuDevicePrimaryCtxRetain(void** context, Device device) {
  return call("cuDevicePrimaryCtxRetain", kNotNeeded, [&](Simulator& sim, Lock&) {
    if (device < 0 || device >= static_cast<int>(sim.config.num_devices)) return kInvalidDevice;
    ++sim.context_references;
    *context = reinterpret_cast<void*>(context_of(sim));
    return kSuccess;
  });
}

SIMCUDA_EXPORT Result cuDevicePrimaryCtxRelease_v2(Device) {
  return call("cuDevicePrimaryCtxRelease_v2", kNotNeeded, [&](Simulator& sim, Lock&) {
    // A driver of an earlier configuration that closes late must not release this one's context.
    if (sim.context_references == 0 || current_context() != context_of(sim)) {
      return kInvalidContext;
    }
    --sim.context_references;
    return kSuccess;
  });
}

SIMCUDA_EXPORT Result cuCtxSetCurrent(void* context) {
  return call("cuCtxSetCurrent", kNotNeeded, [&](Simulator& sim, Lock&) {
    const auto wanted = reinterpret_cast<std::uint64_t>(context);
    const bool valid = wanted == 0 || (wanted == context_of(sim) && sim.context_references > 0);
    current_context() = valid ? wanted : 0;
    return valid ? kSuccess : kInvalidContext;
  });
}

SIMCUDA_EXPORT Result cuCtxSynchronize() {
  return call("cuCtxSynchronize", kNeeded, [&](Simulator& sim, Lock& lock) {
    sim.run_all(lock);
    return sim.sticky;
  });
}

SIMCUDA_EXPORT Result cuMemGetAllocationGranularity(std::size_t* bytes,
                                                    const AllocationProperties* properties,
                                                    int option) {
  return call("cuMemGetAllocationGranularity", kNotNeeded, [&](Simulator& sim, Lock&) {
    if (properties->location.id >= static_cast<int>(sim.config.num_devices)) return kInvalidDevice;
    if (option != kGranularityMinimum && option != kGranularityRecommended) return kInvalidValue;
    *bytes =
        option == kGranularityMinimum ? sim.config.granularity : sim.config.recommended_granularity;
    return kSuccess;
  });
}

SIMCUDA_EXPORT Result cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  return call("cuMemGetInfo_v2", kNeeded, [&](Simulator& sim, Lock&) {
    *free = sim.bytes_free();
    *total = sim.config.total_bytes;
    return kSuccess;
  });
}

SIMCUDA_EXPORT Result cuMemAddressReserve(DevicePointer* addr, std::size_t bytes,
                                          std::size_t alignment, DevicePointer,
                                          unsigned long long flags) {
  return call("cuMemAddressReserve", kNeeded, [&](Simulator& sim, Lock&) {
    return flags != 0 ? kInvalidValue : sim.reserve(addr, bytes, alignment);
  });
}

SIMCUDA_EXPORT Result cuMemAddressFree(DevicePointer addr, std::size_t bytes) {
  return call("cuMemAddressFree", kNeeded,
              [&](Simulator& sim, Lock&) { return sim.free_reservation(addr, bytes); });
}

SIMCUDA_EXPORT Result cuMemCreate(Handle* handle, std::size_t bytes,
                                  const AllocationProperties* properties,
                                  unsigned long long flags) {
  return call("cuMemCreate", kNeeded, [&](Simulator& sim, Lock&) {
    return flags != 0 ? kInvalidValue : sim.create(handle, bytes, *properties);
  });
}

SIMCUDA_EXPORT Result cuMemRelease(Handle handle) {
  return call("cuMemRelease", kNeeded, [&](Simulator& sim, Lock&) { return sim.release(handle); });
}

SIMCUDA_EXPORT Result cuMemMap(DevicePointer addr, std::size_t bytes, std::size_t offset,
                               Handle handle, unsigned long long flags) {
  return call("cuMemMap", kNeeded, [&](Simulator& sim, Lock&) {
    return flags != 0 ? kInvalidValue : sim.map(addr, bytes, offset, handle);
  });
}

SIMCUDA_EXPORT Result cuMemUnmap(DevicePointer addr, std::size_t bytes) {
  return call("cuMemUnmap", kNeeded, [&](Simulator& sim, Lock&) { return sim.unmap(addr, bytes); });
}

SIMCUDA_EXPORT Result cuMemSetAccess(DevicePointer addr, std::size_t bytes,
                                     const AccessDescriptor* descriptors, std::size_t count) {
  const Result result = call("cuMemSetAccess", kNeeded, [&](Simulator& sim, Lock&) {
    return count != 1 ? kInvalidValue : sim.set_access(addr, bytes, descriptors[0]);
  });
  Simulator& sim = Simulator::instance();
  const Lock lock(sim.mutex);
  if (result != kSuccess && sim.config.partial_access != 0) {
    sim.set_first_access(addr, descriptors[0]);
  }
  return result;
}

SIMCUDA_EXPORT Result cuMemHostAlloc(void** addr, std::size_t bytes, unsigned flags) {
  return call("cuMemHostAlloc", kNeeded, [&](Simulator& sim, Lock&) {
    return flags > 7 ? kInvalidValue : sim.host_alloc(addr, bytes);
  });
}

SIMCUDA_EXPORT Result cuMemFreeHost(void* addr) {
  return call("cuMemFreeHost", kNeeded, [&](Simulator& sim, Lock&) { return sim.host_free(addr); });
}

SIMCUDA_EXPORT Result cuMemsetD8Async(DevicePointer addr, unsigned char value, std::size_t bytes,
                                      void* stream) {
  return call("cuMemsetD8Async", kNeeded, [&](Simulator& sim, Lock&) {
    Work work;
    work.name = "memset";
    work.touches = {sim.touch(addr, bytes, Use::kWrite)};
    work.run = [=] { std::memset(reinterpret_cast<void*>(addr), value, bytes); };
    return queue(sim, stream, std::move(work));
  });
}

SIMCUDA_EXPORT Result cuMemcpyAsync(DevicePointer dst, DevicePointer src, std::size_t bytes,
                                    void* stream) {
  return call("cuMemcpyAsync", kNeeded, [&](Simulator& sim, Lock&) {
    Work work;
    work.name = "memcpy";
    work.touches = {sim.touch(dst, bytes, Use::kWrite), sim.touch(src, bytes, Use::kRead)};
    work.run = [=] {
      std::memmove(reinterpret_cast<void*>(dst), reinterpret_cast<void*>(src), bytes);
    };
    return queue(sim, stream, std::move(work));
  });
}

SIMCUDA_EXPORT Result cuLaunchHostFunc(void* stream, HostFunction function, void* data) {
  return call("cuLaunchHostFunc", kNeeded, [&](Simulator& sim, Lock&) {
    Work work;
    work.name = "host function";
    work.outside_lock = true;
    work.run = [=] { function(data); };
    return queue(sim, stream, std::move(work));
  });
}

SIMCUDA_EXPORT Result cuStreamCreate(void** stream, unsigned flags) {
  return call("cuStreamCreate", kNeeded, [&](Simulator& sim, Lock&) {
    std::uint64_t id = 0;
    const Result result = sim.stream_create(&id, flags);
    *stream = reinterpret_cast<void*>(id);
    return result;
  });
}

SIMCUDA_EXPORT Result cuStreamDestroy_v2(void* stream) {
  return call("cuStreamDestroy_v2", kNeeded,
              [&](Simulator& sim, Lock&) { return sim.stream_destroy(stream_of(stream)); });
}

SIMCUDA_EXPORT Result cuStreamSynchronize(void* stream) {
  return call("cuStreamSynchronize", kNeeded, [&](Simulator& sim, Lock& lock) {
    const std::uint64_t id = stream_of(stream);
    if (!sim.knows_stream(id)) return kInvalidHandle;
    // The legacy default stream's end is the end of all that was queued on the blocking ones.
    std::vector<std::pair<std::uint64_t, std::uint64_t>> ends;
    for (const auto& [other, candidate] : sim.streams) {
      if (other == id || (id == kDefaultStream && candidate.blocking)) {
        ends.emplace_back(other, candidate.last_sequence);
      }
    }
    for (const auto& [other, sequence] : ends) sim.run_until(lock, other, sequence);
    return sim.sticky;
  });
}

SIMCUDA_EXPORT Result cuStreamQuery(void* stream) {
  return call("cuStreamQuery", kNeeded, [&](Simulator& sim, Lock&) {
    const auto it = sim.streams.find(stream_of(stream));
    if (it == sim.streams.end() || it->second.destroyed) return kInvalidHandle;
    if (sim.sticky != kSuccess) return sim.sticky;
    return it->second.queue.empty() && !it->second.running ? kSuccess : kNotReady;
  });
}

SIMCUDA_EXPORT Result cuEventCreate(void** event, unsigned) {
  return call("cuEventCreate", kNeeded, [&](Simulator& sim, Lock&) {
    const std::uint64_t id = sim.generation << 32 | (sim.next_id++ << 4);
    sim.events[id] = std::make_shared<EventState>();
    *event = reinterpret_cast<void*>(id);
    return kSuccess;
  });
}

SIMCUDA_EXPORT Result cuEventDestroy_v2(void* event) {
  return call("cuEventDestroy_v2", kNeeded, [&](Simulator& sim, Lock&) {
    const bool known = sim.events.erase(reinterpret_cast<std::uint64_t>(event)) == 1;
    return known ? kSuccess : kInvalidHandle;
  });
}

SIMCUDA_EXPORT Result cuEventRecord(void* event, void* stream) {
  return call("cuEventRecord", kNeeded, [&](Simulator& sim, Lock&) {
    const EventPointer state = find_event(sim, event);
    const std::uint64_t id = stream_of(stream);
    if (state == nullptr || !sim.knows_stream(id)) return kInvalidHandle;
    sim.enqueue(id, Work{});
    Work& work = sim.streams[id].queue.back();
    const std::uint64_t sequence = work.sequence;
    work.name = "record";
    work.run = [=] { state->completed = sequence; };
    state->stream = id;
    state->recorded = sequence;
    return kSuccess;
  });
}

SIMCUDA_EXPORT Result cuEventQuery(void* event) {
  return call("cuEventQuery", kNeeded, [&](Simulator& sim, Lock&) {
    const EventPointer state = find_event(sim, event);
    if (state == nullptr) return kInvalidHandle;
    if (sim.sticky != kSuccess) return sim.sticky;
    return state->completed >= state->recorded ? kSuccess : kNotReady;
  });
}

SIMCUDA_EXPORT Result cuEventSynchronize(void* event) {
  return call("cuEventSynchronize", kNeeded, [&](Simulator& sim, Lock& lock) {
    const EventPointer state = find_event(sim, event);
    if (state == nullptr) return kInvalidHandle;
    sim.run_until(lock, state->stream, state->recorded);
    return sim.sticky;
  });
}

SIMCUDA_EXPORT Result cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  return call("cuStreamWaitEvent", kNeeded, [&](Simulator& sim, Lock&) {
    const EventPointer state = find_event(sim, event);
    if (state == nullptr) return kInvalidHandle;
    if (flags != 0) return kInvalidValue;
    Work work;
    work.name = "wait";
    work.waits_for = state;
    work.waits_until = state->recorded;
    work.waits_stream = state->stream;
    return queue(sim, stream, std::move(work));
  });
}

}  // namespace simcuda
