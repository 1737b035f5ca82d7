// The interface to the memory system. No other code talks to it.
//
// Glossary
//   frame        one unit of physical memory of `frame_bytes()`. A page of the KV memory is one
//                frame per layer group; the driver knows nothing of groups.
//   reservation  a range of addresses without memory behind it.
//   mapping      a frame made visible at an address. One frame may be mapped many times (aliases).
//   run          adjacent frames at adjacent addresses; one system call where the system allows.
//   mark         a point in the device's order of work; reached when all work before it is done.
//
// Laws for every implementation
//   * A batched call executes its runs in order. If it throws, `Error::completed` runs are done
//     and the others, the failing one included, had no effect: the caller can undo exactly.
//   * A broken precondition throws MisuseError and a refusal of the system DriverError or
//     OutOfMemoryError; nothing ever aborts the process or is dropped in silence.
//   * Calls are not thread-safe; one owner serialises them. They may come from several threads.
//   * map, unmap, set_access, create and destroy take effect at once without waiting. The caller
//     guarantees that no work in flight uses the addresses (see mark). zero and copy are work: they
//     are executed in the order of calls, after kernels started before them and before kernels
//     started later. copy_out and copy_in copy to and from host memory and can have an order of
//     their own.
//   * After a DriverError that is `sticky` the device is lost: every later call may fail.
//   * A driver belongs to the process that made it: calls in a fork of it throw MisuseError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace vmserve {

using Address = std::uintptr_t;
using FrameId = std::int64_t;

constexpr FrameId kNoFrame = -1;

enum class Access : std::uint8_t { kNone, kRead, kReadWrite };

// What an unmapped address of a reservation shows.
enum class Backing : std::uint8_t {
  kTrap,   // any access is a fault
  kZeros,  // reads give zero, writes are a fault
};

struct FrameRun {
  FrameId first;
  std::int64_t count;
};

struct MapRun {
  Address addr;
  FrameRun frames;
  Access access;
  // A hint: the range is about to be touched, so fill the page tables now, in one call instead of
  // one fault per granule.
  bool prefault = false;
};

struct AddressRun {
  Address addr;
  std::size_t bytes;
};

struct AccessRun {
  Address addr;
  std::size_t bytes;
  Access access;
};

struct CopyRun {
  Address dst;
  Address src;
  std::size_t bytes;
};

// What is mapped at one address.
struct Mapping {
  FrameId frame = kNoFrame;
  Access access = Access::kNone;
};

// Optional abilities of an implementation. Calls that need an absent one are misuse.
struct Capabilities {
  bool unmap = true;          // without it, frames stay where they were mapped: never multi-tenant
  bool read_only = true;      // Access::kRead traps writes; without it, kRead maps writable
  bool zeros_backing = true;  // Backing::kZeros
  bool host_memory = true;    // alloc_host(), a target and a source of copy()
  bool asynchronous = false;  // zero and copy may still be running when the call returns
  bool copy_stream = false;   // copy_out and copy_in run in parallel to kernels; else as copy()
};

using Mark = std::uint64_t;

struct DriverStats {
  std::int64_t created_frames = 0;
  std::int64_t mapped_frames = 0;    // a frame mapped twice counts twice
  std::int64_t num_mappings = 0;     // as the system counts them: runs, and gaps between them
  std::int64_t max_mappings = 0;     // the driver refuses to go above this
  std::int64_t allocated_bytes = 0;  // physical memory behind the frames now
};

constexpr std::int64_t kUnlimitedMappings = std::numeric_limits<std::int64_t>::max();

class PageDriver {
 public:
  virtual ~PageDriver() = default;

  virtual Capabilities capabilities() const { return {}; }

  // Sizes and addresses of frames are multiples of this.
  virtual std::size_t granularity() const = 0;
  virtual std::size_t frame_bytes() const = 0;
  // Frames are numbered 0 <= id < num_frames().
  virtual std::int64_t num_frames() const = 0;

  // Pre:  bytes > 0, a multiple of frame_bytes().
  // Post: [result, result + bytes) is reserved with `backing`; no memory is used.
  virtual Address reserve(std::size_t bytes, Backing backing) = 0;

  // Pre:  addr came from reserve() and was not freed.
  // Post: what was queued on the device is over, and the range is gone with every mapping in it.
  virtual void free_reservation(Address addr) = 0;

  // Pre:  the frames do not exist, and none is twice in the batch.
  // Post: they exist, are mapped nowhere and read as zero; their memory is really there (or, if
  //       it is not, OutOfMemoryError was thrown and none of the batch exists).
  virtual void create(const std::vector<FrameRun>& runs) = 0;

  // Pre:  the frames exist and are mapped nowhere.
  // Post: they do not exist; their memory is back with the system.
  virtual void destroy(const std::vector<FrameRun>& runs) = 0;

  // Pre:  the frames exist; the addresses lie in one reservation, frame-aligned from its start,
  //       and nothing is mapped there; access is kRead or kReadWrite.
  // Post: they show the frames.
  virtual void map(const std::vector<MapRun>& runs) = 0;

  // Pre:  whole frames, all mapped.
  // Post: the addresses show their reservation's backing again and stay reserved.
  virtual void unmap(const std::vector<AddressRun>& runs) = 0;

  // Pre:  whole frames, all mapped; access is kRead or kReadWrite.
  virtual void set_access(const std::vector<AccessRun>& runs) = 0;

  // Pre:  the addresses are mapped writable. Post: they read as zero.
  virtual void zero(const std::vector<AddressRun>& runs) = 0;

  // Pre:  dst is mapped writable, src is mapped, or they lie in host memory; no overlap.
  virtual void copy(const std::vector<CopyRun>& runs) = 0;

  // copy_out and copy_in may run in parallel to kernels. Both are executed in the order of calls.
  // copy_out: from device to host memory, after all work requested before. Later work, kernels
  // included, does not wait for it: until a copy_mark() after it is reached, nothing may write its
  // sources. Only copy_out and copy_in may use its targets until then.
  // Pre: as for copy().
  virtual void copy_out(const std::vector<CopyRun>& runs) { copy(runs); }
  // From host to device memory, after all zero() and copy() calls before; it need not wait for
  // kernels. Later work waits for it on the device, even if the call throws. Pre: as for copy(),
  // and no kernel that was started before uses its targets.
  virtual void copy_in(const std::vector<CopyRun>& runs) { copy(runs); }
  // A mark after all copy_out() and copy_in() calls so far, and whether it is reached. Like mark()
  // and reached(), which do not cover these calls.
  virtual Mark copy_mark() { return mark(); }
  virtual bool copy_reached(Mark mark) { return reached(mark); }

  // Waits for all work requested before, including copy_out and copy_in.
  virtual void fence() = 0;

  // A mark after all work requested so far. Marks are reached in order.
  virtual Mark mark() = 0;
  // Whether all work before the mark is done. Never waits.
  virtual bool reached(Mark mark) = 0;

  // Allocates host memory for swapping, page-locked if the device needs that; its content is
  // undefined. Pre: bytes > 0. Post: the memory is allocated (or OutOfMemoryError was thrown).
  virtual Address alloc_host(std::size_t bytes) = 0;
  // Pre:  addr came from alloc_host(); no copy of it is running.
  virtual void free_host(Address addr) = 0;

  // What is mapped at `addr`; frame == kNoFrame when nothing is.
  // Pre: addr lies in a reservation.
  virtual Mapping query(Address addr) const = 0;

  virtual DriverStats stats() const = 0;

  // How many more mappings are possible, for all drivers of the process together if the system
  // counts them so. May be called in parallel to another thread's call.
  virtual std::int64_t mapping_room() const { return kUnlimitedMappings; }
};

}  // namespace vmserve
