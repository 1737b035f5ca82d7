// Pages of GPU memory by CUDA's virtual memory management. The driver library is loaded at run
// time.
//
// A frame is one physical allocation (cuMemCreate). Adjacent maps share one cuMemSetAccess, and one
// cuMemUnmap unmaps a run of whole mappings. zero and copy go to the compute stream, copy_out and
// copy_in to a stream of the driver's own. Events order the two streams.
//
// CUDA has no backing for unmapped addresses, so Backing::kZeros is refused. Whether a mapping can
// be read-only is tried once; if not, kRead maps writable and capabilities().read_only is false.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "vmserve/driver.h"
#include "vmserve/frame_ledger.h"
#include "vmserve/lazy_array.h"

namespace vmserve {

namespace cuda {
struct Api;
enum Result : int;
}  // namespace cuda

struct CudaOptions {
  std::size_t frame_bytes = 0;
  std::int64_t num_frames = 0;
  int device = 0;
  // The CUstream of the kernels, which zero, copy and mark also use; 0 is the legacy default
  // stream. It must outlive the driver.
  std::uintptr_t stream = 0;
  std::string library = "libcuda.so.1";
  // Device memory left for others when the pool grows: torch's weights and activations, libraries.
  std::uint64_t spare_bytes = std::uint64_t{256} << 20;
  // Frames must be multiples of the device's recommended granularity instead of its minimum.
  bool recommended_granularity = false;
};

struct CudaGranularity {
  std::size_t minimum;
  std::size_t recommended;
};

// Reads the granularities of a device without making a driver. Throws DriverError.
CudaGranularity cuda_granularity(int device, const std::string& library);

class CudaDriver final : public PageDriver {
 public:
  // Throws DriverError if there is no library, device or virtual memory management.
  explicit CudaDriver(CudaOptions options);
  // Waits for the device, then releases everything. If waiting fails, memory that may be in use
  // stays mapped until the process ends.
  ~CudaDriver() override;
  CudaDriver(const CudaDriver&) = delete;
  CudaDriver& operator=(const CudaDriver&) = delete;

  Capabilities capabilities() const override;
  std::size_t granularity() const override { return granularity_; }
  std::size_t frame_bytes() const override { return options_.frame_bytes; }
  std::int64_t num_frames() const override { return options_.num_frames; }

  Address reserve(std::size_t bytes, Backing backing) override;
  // Not batched: after a throw, the mappings that stats() no longer counts are gone.
  void free_reservation(Address addr) override;
  void create(const std::vector<FrameRun>& runs) override;
  // NOTE: if a release fails after others of the same run, the released frames are made again: they
  // exist and read as zero.
  void destroy(const std::vector<FrameRun>& runs) override;
  void map(const std::vector<MapRun>& runs) override;
  void unmap(const std::vector<AddressRun>& runs) override;
  void set_access(const std::vector<AccessRun>& runs) override;
  void zero(const std::vector<AddressRun>& runs) override;
  void copy(const std::vector<CopyRun>& runs) override;
  void copy_out(const std::vector<CopyRun>& runs) override;
  void copy_in(const std::vector<CopyRun>& runs) override;
  Mark copy_mark() override;
  bool copy_reached(Mark mark) override;
  void fence() override;
  Mark mark() override;
  bool reached(Mark mark) override;
  Address alloc_host(std::size_t bytes) override;
  void free_host(Address addr) override;
  Mapping query(Address addr) const override { return ledger_.query(addr); }
  DriverStats stats() const override;

 private:
  using Handle = std::uint64_t;
  using Event = void*;
  using Stream = void*;
  struct Unopened {};
  // Marks of one stream.
  struct Marks {
    std::deque<Event> pending;  // not known to be reached; oldest first
    Mark last = 0;
  };

  // Does not touch the device. The destructor undoes a partial open().
  CudaDriver(CudaOptions options, Unopened);
  void open();
  void open_device();
  bool probe_read_only();

  // Called first by every call: checks the process and that the device is not lost, and makes the
  // context current.
  void enter();
  // Throws DriverError; if the result is sticky, the device is lost.
  [[noreturn]] void refuse(cuda::Result result, const char* call, const std::string& doing,
                           const std::string& remedy, std::size_t completed = 0);
  // Every later call throws: device and ledger disagree, or the device is lost.
  [[noreturn]] void lose(cuda::Result result, const char* call, const std::string& what,
                         std::size_t completed = 0);

  cuda::Result set_device_access(Address addr, std::size_t bytes, Access access) const;
  // Maps handles to [addr, addr + count frames), or changes nothing.
  void map_handles(Address addr, const std::vector<Handle>& handles, std::size_t first,
                   std::size_t count, Access access, std::size_t completed);
  void undo_maps(Address addr, std::size_t bytes, std::size_t completed);
  void map_group(const std::vector<MapRun>& runs, std::size_t first, std::size_t stop);
  void unmap_one(const AddressRun& run, std::size_t completed);
  void set_access_one(const AccessRun& run, std::size_t completed);
  void destroy_one(const FrameRun& run, std::size_t completed);

  void check_headroom(std::uint64_t bytes);
  // Makes handles of frames that read as zero: all of them or none.
  std::vector<Handle> make_frames(std::size_t count);
  void clear(const std::vector<Handle>& handles, std::size_t first, std::size_t count);
  void keep(const FrameRun& run, const std::vector<Handle>& handles, std::size_t first);
  void release_strays() noexcept;

  Stream compute_stream() const { return reinterpret_cast<Stream>(options_.stream); }
  // Queues copies on `stream`. Throws with the number of runs that were queued.
  void queue_copies(const std::vector<CopyRun>& runs, Stream stream);
  // Makes later work on `behind` wait for the work on `before`, or changes nothing.
  cuda::Result follow(Stream behind, Stream before);
  void join_copies(std::size_t completed);
  bool is_own_work_done();
  Event take_event(Marks& marks);
  Mark mark_stream(Marks& marks, Stream stream);
  bool is_reached(Marks& marks, Mark mark);
  void retire(Marks& marks, std::size_t count);
  void close() noexcept;
  void give_back_memory() noexcept;

  CudaOptions options_;
  std::shared_ptr<const cuda::Api> api_;
  FrameLedger ledger_;
  LazyArray<Handle> handles_;  // of existing frames

  int device_ = 0;
  void* context_ = nullptr;
  std::size_t granularity_ = 0;
  bool read_only_ = false;

  // New frames are cleared here, on a stream of its own that waits for no running step.
  void* clear_stream_ = nullptr;
  Address scratch_ = 0;
  std::size_t scratch_frames_ = 0;

  // Stream of copy_out and copy_in, and the event that orders the two streams.
  Stream copy_stream_ = nullptr;
  Event order_event_ = nullptr;

  Marks marks_;  // of the compute stream
  Marks copy_marks_;
  std::vector<Event> idle_events_;
  // All zero and copy calls so far are before this mark, which may not exist yet.
  Mark own_work_ = 0;

  // Mappings and handles that could not be released: tried again later, at the latest on closing.
  std::vector<AddressRun> stray_maps_;
  std::vector<Handle> stray_handles_;
  std::string lost_;  // why the device is lost; empty if it is not
  int lost_code_ = 0;
};

}  // namespace vmserve
