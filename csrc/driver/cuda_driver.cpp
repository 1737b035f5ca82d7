// The calls of PageDriver. cuda_frames.cpp opens and closes the driver and makes frames.
#include "vmserve/cuda_driver.h"

#include <string>
#include <utility>

#include "cuda_api.h"
#include "vmserve/errors.h"
#include "vmserve/text.h"

namespace vmserve {
namespace {

// Polls pending marks once there are so many.
constexpr std::size_t kManyPending = 32;

std::vector<AddressRun> mapped_ranges(const SegmentMap& segments) {
  std::vector<AddressRun> ranges;
  segments.for_each(segments.base(), segments.bytes(),
                    [&](Address addr, std::size_t bytes, Mapping first) {
                      if (first.frame == kNoFrame) return;
                      if (!ranges.empty() && ranges.back().addr + ranges.back().bytes == addr) {
                        ranges.back().bytes += bytes;
                      } else {
                        ranges.push_back({addr, bytes});
                      }
                    });
  return ranges;
}

}  // namespace

Capabilities CudaDriver::capabilities() const {
  Capabilities capabilities;
  capabilities.read_only = read_only_;
  capabilities.zeros_backing = false;
  capabilities.asynchronous = true;
  capabilities.copy_stream = true;
  return capabilities;
}

void CudaDriver::enter() {
  ledger_.check_process();
  if (!lost_.empty()) {
    throw DriverError("enter", lost_code_,
                      "the CUDA device is lost since this: " + lost_ + "; restart the process", 0,
                      /*sticky=*/true);
  }
  // Calls come from several threads, and the current context is a property of a thread.
  const cuda::Result result = api_->context_set_current(context_);
  if (result != cuda::kSuccess) {
    refuse(result, "cuCtxSetCurrent", "making the device current", "restart the process");
  }
}

void CudaDriver::refuse(cuda::Result result, const char* call, const std::string& doing,
                        const std::string& remedy, std::size_t completed) {
  const std::string what = std::string(call) + " failed while " + doing + ": " + api_->name(result);
  if (cuda::is_sticky(result)) lose(result, call, what, completed);
  throw DriverError(call, result, what + "; " + remedy, completed);
}

void CudaDriver::lose(cuda::Result result, const char* call, const std::string& what,
                      std::size_t completed) {
  if (lost_.empty()) {
    lost_ = what;
    lost_code_ = result;
  }
  throw DriverError(call, result, what + "; the device is lost: restart the process", completed,
                    /*sticky=*/true);
}

Address CudaDriver::reserve(std::size_t bytes, Backing backing) {
  enter();
  ledger_.check_reservable(bytes);
  if (backing == Backing::kZeros) {
    throw MisuseError(
        "CUDA cannot reserve addresses that read as zero: what is not mapped is a fault; "
        "reserve with Backing::kTrap (capabilities().zeros_backing is false)");
  }
  cuda::DevicePointer addr = 0;
  const cuda::Result result = api_->address_reserve(&addr, bytes, 0, 0, 0);
  if (result != cuda::kSuccess) {
    refuse(result, "cuMemAddressReserve", "reserving " + human_bytes(bytes) + " of address space",
           "lower max_num_seqs or max_model_len");
  }
  ledger_.note_reserved(addr, bytes, backing);
  return addr;
}

void CudaDriver::free_reservation(Address addr) {
  enter();
  FrameLedger::Reservation& reservation = ledger_.reservation_at(addr);
  // What is queued would find nothing mapped, which loses the device. What these calls say, the
  // next ones say, too.
  for (Stream const stream : {compute_stream(), copy_stream_}) api_->stream_synchronize(stream);
  for (const AddressRun& run : mapped_ranges(reservation.segments)) unmap_one(run, 0);
  const std::size_t bytes = reservation.segments.bytes();
  const cuda::Result result = api_->address_free(addr, bytes);
  if (result != cuda::kSuccess) {
    refuse(result, "cuMemAddressFree", "freeing " + human_bytes(bytes) + " of address space",
           "the addresses stay reserved");
  }
  ledger_.note_freed(addr);
}

cuda::Result CudaDriver::set_device_access(Address addr, std::size_t bytes, Access access) const {
  cuda::AccessDescriptor descriptor;
  descriptor.location.id = device_;
  descriptor.flags =
      access == Access::kRead && read_only_ ? cuda::kAccessRead : cuda::kAccessReadWrite;
  return api_->set_access(addr, bytes, &descriptor, 1);
}

void CudaDriver::undo_maps(Address addr, std::size_t bytes, std::size_t completed) {
  if (bytes == 0) return;
  const cuda::Result result = api_->unmap(addr, bytes);
  if (result == cuda::kSuccess) return;
  stray_maps_.push_back({addr, bytes});
  lose(result, "cuMemUnmap",
       "cuMemUnmap failed while undoing a map of " + human_bytes(bytes) + ": " + api_->name(result),
       completed);
}

void CudaDriver::map_handles(Address addr, const std::vector<Handle>& handles, std::size_t first,
                             std::size_t count, Access access, std::size_t completed) {
  for (std::size_t i = 0; i < count; ++i) {
    const cuda::Result result =
        api_->map(addr + i * frame_bytes(), frame_bytes(), 0, handles[first + i], 0);
    if (result == cuda::kSuccess) continue;
    undo_maps(addr, i * frame_bytes(), completed);
    refuse(result, "cuMemMap", "mapping " + human_bytes(frame_bytes()),
           "lower --kv-cache-memory or use larger pages (--kv-page-size)", completed);
  }
  const std::size_t bytes = count * frame_bytes();
  const cuda::Result result = set_device_access(addr, bytes, access);
  if (result == cuda::kSuccess) return;
  undo_maps(addr, bytes, completed);
  refuse(result, "cuMemSetAccess", "giving access to " + human_bytes(bytes),
         "lower --kv-cache-memory or use larger pages (--kv-page-size)", completed);
}

void CudaDriver::map_group(const std::vector<MapRun>& runs, std::size_t first, std::size_t stop) {
  std::vector<Handle> handles;
  for (std::size_t i = first; i < stop; ++i) {
    const FrameRun& frames = runs[i].frames;
    for (FrameId id = frames.first; id < frames.first + frames.count; ++id) {
      handles.push_back(handles_[id]);
    }
  }
  map_handles(runs[first].addr, handles, 0, handles.size(), runs[first].access, first);
  for (std::size_t i = first; i < stop; ++i) {
    ledger_.note_mapped(ledger_.check_mappable(runs[i], i), runs[i]);
  }
}

void CudaDriver::map(const std::vector<MapRun>& runs) {
  enter();
  // Adjacent runs with equal access form a group, which is mapped as a whole or not at all, and
  // gets one cuMemSetAccess. A run that cannot be mapped ends the group before it.
  std::size_t first = 0;
  const FrameLedger::Reservation* group = nullptr;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const FrameLedger::Reservation* reservation = nullptr;
    try {
      reservation = &ledger_.check_mappable(runs[i], i);
    } catch (const MisuseError&) {
      if (first < i) map_group(runs, first, i);
      throw;
    }
    const auto continues = [&](const MapRun& last, const MapRun& next) {
      const auto bytes = static_cast<std::size_t>(last.frames.count) * frame_bytes();
      return reservation == group && last.addr + bytes == next.addr && last.access == next.access;
    };
    if (first < i && !continues(runs[i - 1], runs[i])) {
      map_group(runs, first, i);
      first = i;
      // The group just mapped may have taken this run's addresses.
      reservation = &ledger_.check_mappable(runs[i], i);
    }
    group = reservation;
  }
  if (first < runs.size()) map_group(runs, first, runs.size());
}

void CudaDriver::unmap_one(const AddressRun& run, std::size_t completed) {
  FrameLedger::Reservation& reservation = ledger_.check_unmappable(run, completed);
  const cuda::Result result = api_->unmap(run.addr, run.bytes);
  if (result != cuda::kSuccess) {
    refuse(result, "cuMemUnmap", "unmapping " + human_bytes(run.bytes), "the memory stays mapped",
           completed);
  }
  ledger_.note_unmapped(reservation, run);
}

void CudaDriver::unmap(const std::vector<AddressRun>& runs) {
  enter();
  for (std::size_t i = 0; i < runs.size(); ++i) unmap_one(runs[i], i);
}

void CudaDriver::set_access_one(const AccessRun& run, std::size_t completed) {
  FrameLedger::Reservation& reservation = ledger_.check_accessible(run, completed);
  // Without read-only mappings, everything is writable already.
  const cuda::Result result =
      read_only_ ? set_device_access(run.addr, run.bytes, run.access) : cuda::kSuccess;
  if (result != cuda::kSuccess) {
    // CUDA does not document that a refused call changes nothing: restore the access.
    cuda::Result undone = cuda::kSuccess;
    reservation.segments.for_each(run.addr, run.bytes,
                                  [&](Address addr, std::size_t bytes, Mapping first) {
                                    if (undone == cuda::kSuccess)
                                      undone = set_device_access(addr, bytes, first.access);
                                  });
    const std::string doing = "changing the access of " + human_bytes(run.bytes);
    if (undone != cuda::kSuccess) {
      lose(undone, "cuMemSetAccess",
           "cuMemSetAccess failed while undoing after a failure in " + doing + ": " +
               api_->name(undone),
           completed);
    }
    refuse(result, "cuMemSetAccess", doing, "the access stays as it was", completed);
  }
  ledger_.note_access(reservation, run);
}

void CudaDriver::set_access(const std::vector<AccessRun>& runs) {
  enter();
  for (std::size_t i = 0; i < runs.size(); ++i) set_access_one(runs[i], i);
}

void CudaDriver::zero(const std::vector<AddressRun>& runs) {
  enter();
  if (!runs.empty()) own_work_ = marks_.last + 1;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    ledger_.check_zeroable(runs[i], i);
    const cuda::Result result =
        api_->memset_async(runs[i].addr, 0, runs[i].bytes, compute_stream());
    if (result != cuda::kSuccess) {
      refuse(result, "cuMemsetD8Async", "zeroing " + human_bytes(runs[i].bytes), "try again", i);
    }
  }
}

void CudaDriver::queue_copies(const std::vector<CopyRun>& runs, Stream stream) {
  for (std::size_t i = 0; i < runs.size(); ++i) {
    ledger_.check_copyable(runs[i], i);
    const cuda::Result result = api_->memcpy_async(runs[i].dst, runs[i].src, runs[i].bytes, stream);
    if (result != cuda::kSuccess) {
      refuse(result, "cuMemcpyAsync", "copying " + human_bytes(runs[i].bytes), "try again", i);
    }
  }
}

void CudaDriver::copy(const std::vector<CopyRun>& runs) {
  enter();
  if (!runs.empty()) own_work_ = marks_.last + 1;
  queue_copies(runs, compute_stream());
}

// -- copy stream

cuda::Result CudaDriver::follow(Stream behind, Stream before) {
  // One event is enough: a wait refers to its latest record at the time of the call.
  const cuda::Result result = api_->event_record(order_event_, before);
  return result != cuda::kSuccess ? result : api_->stream_wait_event(behind, order_event_, 0);
}

void CudaDriver::copy_out(const std::vector<CopyRun>& runs) {
  enter();
  if (runs.empty()) return;
  const cuda::Result result = follow(copy_stream_, compute_stream());
  if (result != cuda::kSuccess) {
    refuse(result, "cuStreamWaitEvent", "putting copies behind the kernels", "try again");
  }
  queue_copies(runs, copy_stream_);
}

// Whether all zero and copy calls are known to be done, from the marks.
bool CudaDriver::is_own_work_done() {
  return own_work_ <= marks_.last && is_reached(marks_, own_work_);
}

// Makes later work on the compute stream wait for the copies.
void CudaDriver::join_copies(std::size_t completed) {
  const cuda::Result result = follow(compute_stream(), copy_stream_);
  if (result == cuda::kSuccess || api_->stream_synchronize(copy_stream_) == cuda::kSuccess) return;
  lose(result, "cuStreamWaitEvent",
       "the kernels could not be put behind the copies to device memory: " + api_->name(result),
       completed);
}

void CudaDriver::copy_in(const std::vector<CopyRun>& runs) {
  enter();
  if (runs.empty()) return;
  if (!is_own_work_done()) {
    const cuda::Result result = follow(copy_stream_, compute_stream());
    if (result != cuda::kSuccess) {
      refuse(result, "cuStreamWaitEvent", "putting copies behind the kernels", "try again");
    }
  }
  try {
    queue_copies(runs, copy_stream_);
  } catch (const Error& error) {
    // Later users of the targets must not see a copy that arrives late.
    if (error.completed > 0) join_copies(error.completed);
    throw;
  }
  join_copies(runs.size());
}

// -- marks

void CudaDriver::retire(Marks& marks, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    idle_events_.push_back(marks.pending.front());
    marks.pending.pop_front();
  }
}

void CudaDriver::fence() {
  enter();
  for (Stream const stream : {compute_stream(), copy_stream_}) {
    const cuda::Result result = api_->stream_synchronize(stream);
    if (result == cuda::kSuccess) continue;
    refuse(result, "cuStreamSynchronize", "waiting for the device", "try again");
  }
  retire(marks_, marks_.pending.size());
  retire(copy_marks_, copy_marks_.pending.size());
  own_work_ = 0;
}

CudaDriver::Event CudaDriver::take_event(Marks& marks) {
  if (idle_events_.empty() && marks.pending.size() >= kManyPending &&
      api_->event_query(marks.pending.front()) == cuda::kSuccess) {
    retire(marks, 1);
  }
  if (!idle_events_.empty()) {
    Event event = idle_events_.back();
    idle_events_.pop_back();
    return event;
  }
  Event event = nullptr;
  const cuda::Result result = api_->event_create(&event, cuda::kEventDisableTiming);
  if (result != cuda::kSuccess) {
    refuse(result, "cuEventCreate", "making an event", "try again");
  }
  return event;
}

Mark CudaDriver::mark_stream(Marks& marks, Stream stream) {
  enter();
  Event const event = take_event(marks);
  const cuda::Result result = api_->event_record(event, stream);
  if (result != cuda::kSuccess) {
    idle_events_.push_back(event);
    refuse(result, "cuEventRecord", "marking a stream", "try again");
  }
  marks.pending.push_back(event);
  return ++marks.last;
}

bool CudaDriver::is_reached(Marks& marks, Mark mark) {
  enter();
  if (mark > marks.last) return false;
  const Mark oldest = marks.last - marks.pending.size() + 1;
  if (mark < oldest) return true;
  const std::size_t index = mark - oldest;
  const cuda::Result result = api_->event_query(marks.pending[index]);
  if (result == cuda::kNotReady) return false;
  if (result != cuda::kSuccess) {
    refuse(result, "cuEventQuery", "asking for a mark", "try again");
  }
  retire(marks, index + 1);  // marks are reached in order
  return true;
}

Mark CudaDriver::mark() {
  return mark_stream(marks_, compute_stream());
}

bool CudaDriver::reached(Mark mark) {
  return is_reached(marks_, mark);
}

Mark CudaDriver::copy_mark() {
  return mark_stream(copy_marks_, copy_stream_);
}

bool CudaDriver::copy_reached(Mark mark) {
  return is_reached(copy_marks_, mark);
}

Address CudaDriver::alloc_host(std::size_t bytes) {
  enter();
  if (bytes == 0) throw MisuseError("cannot allocate 0 bytes of host memory");
  void* p = nullptr;
  const cuda::Result result = api_->host_alloc(&p, bytes, cuda::kHostAllocPortable);
  if (result == cuda::kOutOfMemory) {
    throw OutOfMemoryError("the system has no " + human_bytes(bytes) +
                           " of page-locked memory to swap to (" + api_->name(result) +
                           "): lower --swap-space");
  }
  if (result != cuda::kSuccess) {
    refuse(result, "cuMemHostAlloc", "allocating " + human_bytes(bytes) + " of host memory",
           "lower --swap-space");
  }
  const auto addr = reinterpret_cast<Address>(p);
  ledger_.note_host_memory(addr, bytes);
  return addr;
}

void CudaDriver::free_host(Address addr) {
  enter();
  const std::size_t bytes = ledger_.host_bytes_at(addr);
  const cuda::Result result = api_->host_free(reinterpret_cast<void*>(addr));
  if (result != cuda::kSuccess) {
    refuse(result, "cuMemFreeHost", "freeing " + human_bytes(bytes) + " of host memory",
           "the memory stays allocated");
  }
  ledger_.note_host_memory_freed(addr);
}

DriverStats CudaDriver::stats() const {
  DriverStats stats;
  stats.created_frames = ledger_.created_frames();
  stats.mapped_frames = ledger_.mapped_frames();
  // Each frame has its own mapping, and CUDA documents no limit.
  stats.num_mappings = ledger_.mapped_frames();
  stats.max_mappings = std::numeric_limits<std::int64_t>::max();
  const auto held = ledger_.created_frames() + static_cast<std::int64_t>(stray_handles_.size());
  stats.allocated_bytes = held * static_cast<std::int64_t>(frame_bytes());
  return stats;
}

}  // namespace vmserve
