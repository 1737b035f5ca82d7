// The only code that talks to the memory system, behind one small interface.
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
//   * map, unmap, set_access, create and destroy take effect at once and wait for nobody: that no
//     work in flight uses the addresses is the caller's to know (see mark). zero and copy are
//     work: they happen in the order of the calls, after the kernels started before them and
//     before those started after. Copies to and from host memory can have an order of their own,
//     beside that one: copy_out and copy_in.
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

// What an address of a reservation shows while nothing is mapped there.
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
  // A hint: the range is about to be touched, so fill the page tables now, in one call in place
  // of a fault per granule.
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

// What an implementation can do beyond the mandatory core. What an absent one excludes is misuse.
struct Capabilities {
  bool unmap = true;          // without it, frames stay where they were mapped: never multi-tenant
  bool read_only = true;      // Access::kRead traps writes; without it, kRead maps writable
  bool zeros_backing = true;  // Backing::kZeros
  bool host_memory = true;    // alloc_host(), a target and a source of copy()
  bool asynchronous = false;  // zero and copy may still be running when the call returns
  bool copy_stream = false;   // copy_out and copy_in run beside the kernels; else they are copy()
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
  // Post: the range is gone, and every mapping in it.
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

  // Copies that may run beside the kernels. They are done in the order of their calls, both kinds
  // in one.
  // copy_out: from device memory to host memory, once all work asked for before it is done. What
  // is asked for later, kernels too, does not wait for it: until a copy_mark() behind it is reached
  // nobody writes its sources, and of its targets nobody but copy_out and copy_in has use.
  // Pre: as copy().
  virtual void copy_out(const std::vector<CopyRun>& runs) { copy(runs); }
  // From host memory to device memory, once what zero() and copy() were asked for before is done;
  // it need not wait for kernels. What is asked for later waits for it, on the device, whether or
  // not the call throws. Pre: as copy(), and no kernel that was started before uses its targets.
  virtual void copy_in(const std::vector<CopyRun>& runs) { copy(runs); }
  // A mark behind all copy_out() and copy_in() so far, and whether it is reached: as mark() and
  // reached(), which know nothing of them.
  virtual Mark copy_mark() { return mark(); }
  virtual bool copy_reached(Mark mark) { return reached(mark); }

  // Waits until all work asked for before is done, copies of either kind too.
  virtual void fence() = 0;

  // A mark behind all work that was given to the device so far: marks are reached in their order.
  virtual Mark mark() = 0;
  // Whether everything before the mark is done. Never waits.
  virtual bool reached(Mark mark) = 0;

  // Memory of the host, page-locked where the device wants it so, to swap to; its content is
  // undefined. Pre: bytes > 0. Post: the memory is really there (or OutOfMemoryError was thrown).
  virtual Address alloc_host(std::size_t bytes) = 0;
  // Pre: addr came from alloc_host(), no copy on it is running.
  virtual void free_host(Address addr) = 0;

  // What is mapped at `addr`; frame == kNoFrame when nothing is.
  // Pre: addr lies in a reservation.
  virtual Mapping query(Address addr) const = 0;

  virtual DriverStats stats() const = 0;

  // How many mappings more there can be, of all drivers of the process together where the system
  // counts them so. May be asked beside a call of another thread.
  virtual std::int64_t mapping_room() const { return kUnlimitedMappings; }
};

}  // namespace vmserve
