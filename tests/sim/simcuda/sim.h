// A simulated CUDA driver library for tests: device memory is a memfd, addresses are mmap'ed, and
// streams run late, in an order that a seed chooses.
//
// All state is in one Simulator behind one lock. Work that was queued runs only when something
// pumps: a call that waits, chance at any call, or the control functions. What work touches is
// checked against the mappings when it is queued and again when it runs, so that a use after
// unmap, or of an address that shows another allocation by then, is recorded and never a crash.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "../../../csrc/driver/cuda_api.h"

namespace simcuda {

using vmserve::cuda::AccessDescriptor;
using vmserve::cuda::AllocationProperties;
using vmserve::cuda::DevicePointer;
using vmserve::cuda::Handle;
using vmserve::cuda::Result;
using HostFunction = void (*)(void*);

// Mirrored by tests/sim/simcuda.py.
struct Config {
  std::uint64_t seed;
  std::uint64_t granularity;
  std::uint64_t recommended_granularity;
  std::uint64_t total_bytes;
  std::uint64_t latency_ns;      // slept in every call
  std::uint32_t pump_per_mille;  // chance that a call lets some queued work run
  std::uint32_t read_only;       // whether PROT_READ is accepted
  std::uint32_t virtual_memory;  // whether the device claims virtual memory management
  std::uint32_t num_devices;
  std::uint32_t sticky_violations;  // a violation is CUDA_ERROR_ILLEGAL_ADDRESS from then on
  std::uint32_t partial_access;     // a cuMemSetAccess that fails has changed its first mapping
};

// Mirrored by tests/sim/simcuda.py.
struct Counts {
  std::uint64_t allocations;
  std::uint64_t allocated_bytes;
  std::uint64_t handles;
  std::uint64_t mappings;
  std::uint64_t reservations;
  std::uint64_t host_blocks;
  std::uint64_t streams;
  std::uint64_t events;
  std::uint64_t contexts;
  std::uint64_t pending_work;
};

struct Allocation {
  std::uint64_t offset;  // in the memfd
  std::uint64_t bytes;
  int references;  // of the handle; 0: released
  int num_mappings;
};

struct Mapped {
  std::uint64_t bytes;
  Handle allocation;
  int access;        // a CUmemAccess_flags
  std::uint64_t id;  // never used twice
};

enum class Use { kRead, kWrite };

// What a queued piece of work will touch, and what was there when it was queued.
struct Touch {
  DevicePointer addr;
  std::uint64_t bytes;
  Use use;
  std::vector<std::uint64_t> ids;  // of the mappings or host blocks in the range; empty: a hole
};

struct EventState {
  std::uint64_t stream = 0;     // of the last record
  std::uint64_t recorded = 0;   // sequence number of the last record, 0: never recorded
  std::uint64_t completed = 0;  // sequence number of the last record that ran
};
using EventPointer = std::shared_ptr<EventState>;

struct Work {
  std::string name;
  std::uint64_t sequence = 0;
  std::vector<Touch> touches;
  std::function<void()> run;
  bool outside_lock = false;  // a host function, which may be Python
  // A wait for this event's record; null for other work.
  EventPointer waits_for;
  std::uint64_t waits_until = 0;
  std::uint64_t waits_stream = 0;
};

struct Stream {
  bool blocking = true;  // ordered with the legacy default stream
  bool destroyed = false;
  bool running = false;  // its host function runs, outside the lock
  std::deque<Work> queue;
  std::uint64_t last_sequence = 0;
};

constexpr std::uint64_t kDefaultStream = 0;

class Simulator {
 public:
  static Simulator& instance();

  // memory.cpp. Pre for all below: the lock is held.
  void configure(const Config& config);
  Result reserve(DevicePointer* addr, std::size_t bytes, std::size_t alignment);
  Result free_reservation(DevicePointer addr, std::size_t bytes);
  Result create(Handle* handle, std::size_t bytes, const AllocationProperties& properties);
  Result release(Handle handle);
  Result map(DevicePointer addr, std::size_t bytes, std::size_t offset, Handle handle);
  Result unmap(DevicePointer addr, std::size_t bytes);
  Result set_access(DevicePointer addr, std::size_t bytes, const AccessDescriptor& descriptor);
  // What set_access() does to the first mapping of the range alone.
  void set_first_access(DevicePointer addr, const AccessDescriptor& descriptor);
  Result host_alloc(void** addr, std::size_t bytes);
  Result host_free(void* addr);
  // -1: nothing is mapped there.
  int access_at(DevicePointer addr) const;
  // The mappings or host blocks in the range now; no ids when there is a hole in it.
  Touch touch(DevicePointer addr, std::uint64_t bytes, Use use) const;
  // "" or why work may not do this now.
  std::string denial(const Touch& touch) const;

  // streams.cpp
  Result stream_create(std::uint64_t* stream, unsigned flags);
  Result stream_destroy(std::uint64_t stream);
  bool knows_stream(std::uint64_t stream) const;
  void enqueue(std::uint64_t stream, Work work);
  // Runs one piece of work that may run, chosen by the seed; false if there is none.
  bool step(std::unique_lock<std::mutex>& lock);
  // Runs what must run for the stream's work up to `sequence` to be done, and nothing else.
  void run_until(std::unique_lock<std::mutex>& lock, std::uint64_t stream, std::uint64_t sequence);
  void run_all(std::unique_lock<std::mutex>& lock);
  std::uint64_t pending_work() const;

  void violate(const std::string& text);
  Counts counts() const;
  std::uint64_t bytes_free() const { return config.total_bytes - allocated_bytes; }

  std::mutex mutex;
  std::condition_variable changed;
  Config config{};
  std::mt19937_64 random;
  Result sticky = vmserve::cuda::kSuccess;
  std::vector<std::string> violations;
  std::map<std::uint64_t, Stream> streams;
  std::map<std::uint64_t, EventPointer> events;
  std::uint64_t generation = 0;  // of configure(): handles of an older one mean nothing
  int context_references = 0;
  std::uint64_t next_id = 1;

  // The plan: call `fail_at` from now on, of `fail_name` only unless that is empty, fails.
  std::int64_t fail_at = 0;
  bool fail_forever = false;
  std::string fail_name;
  Result fail_result = vmserve::cuda::kSuccess;
  std::int64_t calls_since_plan = 0;
  std::int64_t num_failed = 0;
  std::map<std::string, std::uint64_t, std::less<>> costs_ns;  // of a call, by function
  std::map<std::string, std::int64_t> num_calls;

 private:
  struct Span {
    std::uint64_t bytes;
    std::uint64_t id;
  };
  using Spans = std::map<DevicePointer, Span>;

  bool reserved(DevicePointer addr, std::uint64_t bytes) const;
  const Mapped* mapping_at(DevicePointer addr, DevicePointer* start) const;
  // Whether [addr, addr + bytes) is whole mappings, one after another.
  bool whole_mappings(DevicePointer addr, std::uint64_t bytes) const;
  void drop_mapping(DevicePointer addr);
  void destroy_if_unused(Handle handle);
  bool may_run(std::uint64_t id, const Stream& stream) const;
  // The stream, and how far, that has to go before this one's next work may run.
  std::pair<std::uint64_t, std::uint64_t> blocker(std::uint64_t id, const Stream& stream) const;
  void run_next(std::unique_lock<std::mutex>& lock, std::uint64_t id);
  void clear();

  int fd_ = -1;
  std::map<std::uint64_t, std::uint64_t> free_ranges_;  // of the memfd: offset to bytes
  std::uint64_t allocated_bytes = 0;
  Spans reservations_;
  Spans host_blocks_;
  std::map<Handle, Allocation> allocations_;
  std::map<DevicePointer, Mapped> mappings_;
  std::uint64_t next_sequence_ = 1;
};

}  // namespace simcuda
