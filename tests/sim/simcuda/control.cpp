// The tests' side: configuration, the plan of failures, counts, and kernels to launch.
#include <dlfcn.h>

#include <algorithm>
#include <cstring>

#include "call.h"

namespace simcuda {

using namespace vmserve::cuda;

namespace {

struct Name {
  Result result;
  const char* name;
};

constexpr Name kNames[] = {
    {kSuccess, "CUDA_SUCCESS"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
    {kDeinitialized, "CUDA_ERROR_DEINITIALIZED"},
    {kNoDevice, "CUDA_ERROR_NO_DEVICE"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
    {kEccUncorrectable, "CUDA_ERROR_ECC_UNCORRECTABLE"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
    {kNotReady, "CUDA_ERROR_NOT_READY"},
    {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {kContextIsDestroyed, "CUDA_ERROR_CONTEXT_IS_DESTROYED"},
    {kAssert, "CUDA_ERROR_ASSERT"},
    {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED"},
    {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED"},
    {kUnknown, "CUDA_ERROR_UNKNOWN"},
};

// A kernel may be queued on addresses that nothing is mapped at: only running it is a fault.
std::int32_t launch(void* stream, Work work) {
  Simulator& sim = Simulator::instance();
  if (!sim.knows_stream(stream_of(stream))) return kInvalidHandle;
  sim.enqueue(stream_of(stream), std::move(work));
  return kSuccess;
}

}  // namespace

SIMCUDA_EXPORT Result cuGetErrorName(Result error, const char** text) {
  for (const Name& entry : kNames) {
    if (entry.result != error) continue;
    *text = entry.name;
    return kSuccess;
  }
  *text = nullptr;
  return kInvalidValue;
}

// How other clients find functions, NVIDIA's own Python bindings among them: the newest version of
// a name that the simulator has.
SIMCUDA_EXPORT Result cuGetProcAddress_v2(const char* symbol, void** function, int, std::uint64_t,
                                          int* status) {
  Dl_info self{};
  ::dladdr(reinterpret_cast<void*>(&cuGetErrorName), &self);
  void* const library = ::dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  *function = ::dlsym(library, (std::string(symbol) + "_v2").c_str());
  if (*function == nullptr) *function = ::dlsym(library, symbol);
  ::dlclose(library);
  const bool found = *function != nullptr;
  if (status != nullptr) *status = found ? 0 : 1;
  return found ? kSuccess : static_cast<Result>(500);  // CUDA_ERROR_NOT_FOUND
}

// Forgets everything of before, whatever is still alive.
SIMCUDA_EXPORT void simcuda_configure(const Config* config) {
  Simulator& sim = Simulator::instance();
  const Lock lock(sim.mutex);
  sim.configure(*config);
}

// The call-th call from now on (of `name` only, unless that is null) returns `result`: once, or
// that and every later one. call 0: none does.
SIMCUDA_EXPORT void simcuda_set_fault(std::int64_t call, const char* name, std::int32_t result,
                                      std::int32_t forever) {
  Simulator& sim = Simulator::instance();
  const Lock lock(sim.mutex);
  sim.fail_at = call;
  sim.fail_name = name == nullptr ? "" : name;
  sim.fail_result = static_cast<Result>(result);
  sim.fail_forever = forever != 0;
  sim.calls_since_plan = 0;
  sim.num_failed = 0;
}

// Every call of `name` sleeps so long, in the place of the configuration's latency.
SIMCUDA_EXPORT void simcuda_set_cost(const char* name, std::uint64_t nanoseconds) {
  Simulator& sim = Simulator::instance();
  const Lock lock(sim.mutex);
  sim.costs_ns[name] = nanoseconds;
}

SIMCUDA_EXPORT std::int64_t simcuda_num_failed() {
  Simulator& sim = Simulator::instance();
  const Lock lock(sim.mutex);
  return sim.num_failed;
}

// Calls of `name` since configure(), of all when it is null.
SIMCUDA_EXPORT std::int64_t simcuda_num_calls(const char* name) {
  Simulator& sim = Simulator::instance();
  const Lock lock(sim.mutex);
  std::int64_t total = 0;
  for (const auto& [called, count] : sim.num_calls) {
    if (name == nullptr || called == name) total += count;
  }
  return total;
}

// Runs up to `steps` pieces of queued work, in the seed's order; returns how many.
SIMCUDA_EXPORT std::int64_t simcuda_pump(std::int64_t steps) {
  Simulator& sim = Simulator::instance();
  Lock lock(sim.mutex);
  std::int64_t done = 0;
  while (done < steps && sim.step(lock)) ++done;
  return done;
}

SIMCUDA_EXPORT void simcuda_counts(Counts* counts) {
  Simulator& sim = Simulator::instance();
  const Lock lock(sim.mutex);
  *counts = sim.counts();
}

// The violations, a line each, as much as fits; returns how many bytes all of them have.
SIMCUDA_EXPORT std::uint64_t simcuda_violations(char* text, std::uint64_t bytes) {
  Simulator& sim = Simulator::instance();
  const Lock lock(sim.mutex);
  std::string all;
  for (const std::string& violation : sim.violations) all += violation + "\n";
  std::memcpy(text, all.data(), std::min<std::uint64_t>(bytes, all.size()));
  return all.size();
}

// The CUmemAccess_flags of what is mapped at `addr`; -1 when nothing is.
SIMCUDA_EXPORT std::int32_t simcuda_access(DevicePointer addr) {
  Simulator& sim = Simulator::instance();
  const Lock lock(sim.mutex);
  return sim.access_at(addr);
}

// A kernel that writes `value` to [addr, addr + bytes).
SIMCUDA_EXPORT std::int32_t simcuda_launch_write(void* stream, DevicePointer addr,
                                                 std::uint64_t bytes, std::uint8_t value) {
  Simulator& sim = Simulator::instance();
  const Lock lock(sim.mutex);
  Work work;
  work.name = "kernel";
  work.touches = {sim.touch(addr, bytes, Use::kWrite)};
  work.run = [=] { std::memset(reinterpret_cast<void*>(addr), value, bytes); };
  return launch(stream, std::move(work));
}

// A kernel that reads [addr, addr + bytes); a byte other than `expected` is a violation, but no
// fault of the device.
SIMCUDA_EXPORT std::int32_t simcuda_launch_read(void* stream, DevicePointer addr,
                                                std::uint64_t bytes, std::uint8_t expected) {
  Simulator& sim = Simulator::instance();
  const Lock lock(sim.mutex);
  Work work;
  work.name = "kernel";
  work.touches = {sim.touch(addr, bytes, Use::kRead)};
  work.run = [=, &sim] {
    const auto* const data = reinterpret_cast<const std::uint8_t*>(addr);
    const auto* const wrong =
        std::find_if(data, data + bytes, [=](std::uint8_t byte) { return byte != expected; });
    if (wrong == data + bytes) return;
    sim.violations.push_back("kernel read " + std::to_string(*wrong) + " at byte " +
                             std::to_string(wrong - data) + " of " + std::to_string(bytes) +
                             ", not " + std::to_string(expected));
  };
  return launch(stream, std::move(work));
}

// Part of what a kernel does: it writes `low`, or reads bytes that lie in low .. high.
struct Span {
  DevicePointer addr;
  std::uint64_t bytes;
  std::uint8_t low;
  std::uint8_t high;
  std::uint8_t zero_too;  // reading 0 is right as well
  std::uint8_t writes;
  std::uint32_t unused;
};

// One kernel that does all the spans, in their order. `label` names it in violations.
SIMCUDA_EXPORT std::int32_t simcuda_launch_spans(void* stream, const char* label, const Span* spans,
                                                 std::uint64_t count) {
  Simulator& sim = Simulator::instance();
  const Lock lock(sim.mutex);
  Work work;
  work.name = label;
  std::vector<Span> todo(spans, spans + count);
  for (const Span& span : todo) {
    work.touches.push_back(
        sim.touch(span.addr, span.bytes, span.writes ? Use::kWrite : Use::kRead));
  }
  work.run = [&sim, name = work.name, todo = std::move(todo)] {
    for (std::size_t i = 0; i < todo.size(); ++i) {
      const Span& span = todo[i];
      auto* const data = reinterpret_cast<std::uint8_t*>(span.addr);
      if (span.writes) {
        std::memset(data, span.low, span.bytes);
        continue;
      }
      const auto* const wrong = std::find_if(data, data + span.bytes, [&](std::uint8_t byte) {
        return (byte < span.low || byte > span.high) && (byte != 0 || !span.zero_too);
      });
      if (wrong == data + span.bytes) continue;
      sim.violations.push_back(name + " read " + std::to_string(*wrong) + " at byte " +
                               std::to_string(wrong - data) + " of " + std::to_string(span.bytes) +
                               " in span " + std::to_string(i) + ", not " +
                               std::to_string(span.low) + " to " + std::to_string(span.high));
    }
  };
  return launch(stream, std::move(work));
}

// A kernel that fails with `result` when it runs: sticky from then on.
SIMCUDA_EXPORT std::int32_t simcuda_launch_failure(void* stream, std::int32_t result) {
  Simulator& sim = Simulator::instance();
  const Lock lock(sim.mutex);
  Work work;
  work.name = "kernel";
  work.run = [=, &sim] { sim.sticky = static_cast<Result>(result); };
  return launch(stream, std::move(work));
}

}  // namespace simcuda
