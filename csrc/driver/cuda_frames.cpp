// CudaDriver: opening, closing, and the creation and release of frames.
#include <algorithm>
#include <string>
#include <utility>

#include "cuda_api.h"
#include "vmserve/cuda_driver.h"
#include "vmserve/errors.h"
#include "vmserve/text.h"

namespace vmserve {
namespace {

// Frames are cleared in pieces of this size: large enough to use the full memory bandwidth.
constexpr std::size_t kScratchBytes = std::size_t{64} << 20;

[[noreturn]] void refuse_device(const cuda::Api& api, cuda::Result result, const char* call,
                                const std::string& doing) {
  throw DriverError(call, result,
                    std::string(call) + " failed while " + doing + ": " + api.name(result) +
                        "; check nvidia-smi and CUDA_VISIBLE_DEVICES, or run on the CPU",
                    0, cuda::is_sticky(result));
}

int find_device(const cuda::Api& api, int ordinal) {
  cuda::Result result = api.init(0);
  if (result != cuda::kSuccess) refuse_device(api, result, "cuInit", "starting the CUDA driver");
  int device = 0;
  result = api.device_get(&device, ordinal);
  if (result != cuda::kSuccess) {
    refuse_device(api, result, "cuDeviceGet", "looking for CUDA device " + std::to_string(ordinal));
  }
  int supported = 0;
  result = api.device_get_attribute(&supported, cuda::kAttributeVirtualMemory, device);
  if (result != cuda::kSuccess) {
    refuse_device(api, result, "cuDeviceGetAttribute", "asking for virtual memory management");
  }
  if (supported == 0) {
    throw DriverError("cuDeviceGetAttribute", cuda::kNotSupported,
                      "CUDA device " + std::to_string(ordinal) +
                          " has no virtual memory management: use a GPU that has, or the CPU");
  }
  return device;
}

cuda::AllocationProperties properties(int device) {
  cuda::AllocationProperties properties;
  properties.location.id = device;
  return properties;
}

std::size_t ask_granularity(const cuda::Api& api, int device, int option) {
  const cuda::AllocationProperties asked = properties(device);
  std::size_t bytes = 0;
  const cuda::Result result = api.granularity(&bytes, &asked, option);
  if (result != cuda::kSuccess) {
    refuse_device(api, result, "cuMemGetAllocationGranularity", "asking for the page size");
  }
  return bytes;
}

// Retries once: closing has no caller that could handle a transient failure.
template <typename Call>
cuda::Result attempt(Call call) {
  const cuda::Result result = call();
  return result == cuda::kSuccess || cuda::is_sticky(result) ? result : call();
}

}  // namespace

CudaGranularity cuda_granularity(int device, const std::string& library) {
  const std::shared_ptr<const cuda::Api> api = cuda::Api::load(library);
  const int found = find_device(*api, device);
  return {ask_granularity(*api, found, cuda::kGranularityMinimum),
          ask_granularity(*api, found, cuda::kGranularityRecommended)};
}

CudaDriver::CudaDriver(CudaOptions options, Unopened)
    : options_(std::move(options)),
      api_(cuda::Api::load(options_.library)),
      ledger_(options_.frame_bytes, options_.num_frames),
      handles_(options_.num_frames) {}

// Delegates, so that the object is complete and the destructor runs if open() throws.
CudaDriver::CudaDriver(CudaOptions options) : CudaDriver(std::move(options), Unopened{}) {
  open();
}

CudaDriver::~CudaDriver() {
  // CUDA cannot be used after a fork; everything belongs to the parent process.
  if (context_ != nullptr && ledger_.in_own_process()) close();
}

void CudaDriver::open_device() {
  device_ = find_device(*api_, options_.device);
  granularity_ = ask_granularity(
      *api_, device_,
      options_.recommended_granularity ? cuda::kGranularityRecommended : cuda::kGranularityMinimum);
  if (frame_bytes() == 0 || frame_bytes() % granularity_ != 0) {
    throw MisuseError("frame_bytes is " + std::to_string(frame_bytes()) +
                      ": it must be a positive multiple of the granularity, " +
                      std::to_string(granularity_));
  }
  constexpr auto kMost = static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max());
  if (static_cast<std::size_t>(num_frames()) > kMost / frame_bytes()) {
    throw MisuseError("num_frames is " + with_commas(num_frames()) + ": frames of " +
                      human_bytes(frame_bytes()) + " may be " +
                      with_commas(static_cast<std::int64_t>(kMost / frame_bytes())) + " at most");
  }
  // torch uses the primary context too, so addresses and streams are valid for both.
  const cuda::Result result = api_->primary_context_retain(&context_, device_);
  if (result != cuda::kSuccess) {
    context_ = nullptr;
    refuse_device(*api_, result, "cuDevicePrimaryCtxRetain", "opening the device's context");
  }
}

void CudaDriver::open() {
  open_device();
  enter();
  cuda::Result result = cuda::kSuccess;
  for (Stream* const stream : {&clear_stream_, &copy_stream_}) {
    result = api_->stream_create(stream, cuda::kStreamNonBlocking);
    if (result == cuda::kSuccess) continue;
    *stream = nullptr;
    refuse(result, "cuStreamCreate", "making a stream", "free device memory");
  }
  order_event_ = take_event(marks_);
  scratch_frames_ = std::min(std::max<std::size_t>(kScratchBytes / frame_bytes(), 1),
                             static_cast<std::size_t>(num_frames()));
  cuda::DevicePointer addr = 0;
  const std::size_t bytes = scratch_frames_ * frame_bytes();
  result = api_->address_reserve(&addr, bytes, 0, 0, 0);
  if (result != cuda::kSuccess) {
    refuse(result, "cuMemAddressReserve", "reserving " + human_bytes(bytes) + " of address space",
           "restart the process");
  }
  scratch_ = addr;
  read_only_ = probe_read_only();
}

bool CudaDriver::probe_read_only() {
  const cuda::AllocationProperties asked = properties(device_);
  std::vector<Handle> frame(1);
  cuda::Result result = api_->create(&frame[0], frame_bytes(), &asked, 0);
  if (result != cuda::kSuccess) {
    refuse(result, "cuMemCreate", "taking " + human_bytes(frame_bytes()), "free device memory");
  }
  stray_handles_ = frame;  // until it is released below
  map_handles(scratch_, frame, 0, 1, Access::kReadWrite, 0);
  cuda::AccessDescriptor reading;
  reading.location.id = device_;
  reading.flags = cuda::kAccessRead;
  result = api_->set_access(scratch_, frame_bytes(), &reading, 1);
  undo_maps(scratch_, frame_bytes(), 0);
  release_strays();
  if (cuda::is_sticky(result)) {
    refuse(result, "cuMemSetAccess", "trying a read-only mapping", "restart the process");
  }
  // Any refusal means that read-only mappings are not supported; they are optional.
  return result == cuda::kSuccess;
}

void CudaDriver::check_headroom(std::uint64_t bytes) {
  std::size_t available = 0;
  std::size_t total = 0;
  const cuda::Result result = api_->memory_info(&available, &total);
  if (result != cuda::kSuccess) {
    refuse(result, "cuMemGetInfo", "asking for the free device memory", "try again");
  }
  if (available >= options_.spare_bytes && bytes <= available - options_.spare_bytes) return;
  throw OutOfMemoryError("growing the KV cache by " + human_bytes(bytes) +
                         " would leave less than " + human_bytes(options_.spare_bytes) +
                         " of CUDA device " + std::to_string(options_.device) +
                         " to others: " + human_bytes(available) + " of " + human_bytes(total) +
                         " are free; lower --kv-cache-memory or free device memory");
}

void CudaDriver::clear(const std::vector<Handle>& handles, std::size_t first, std::size_t count) {
  const std::size_t bytes = count * frame_bytes();
  map_handles(scratch_, handles, first, count, Access::kReadWrite, 0);
  const cuda::Result set = api_->memset_async(scratch_, 0, bytes, clear_stream_);
  cuda::Result waited = cuda::kSuccess;
  if (set == cuda::kSuccess) {
    waited = api_->stream_synchronize(clear_stream_);
    // To unmap under a running memset would be a device fault: wait, or leave it mapped.
    if (waited != cuda::kSuccess && api_->stream_synchronize(clear_stream_) != cuda::kSuccess) {
      stray_maps_.push_back({scratch_, bytes});
      lose(waited, "cuStreamSynchronize",
           "cuStreamSynchronize failed while clearing new frames: " + api_->name(waited));
    }
  }
  const cuda::Result unmapped = api_->unmap(scratch_, bytes);
  if (unmapped != cuda::kSuccess) undo_maps(scratch_, bytes, 0);
  if (set != cuda::kSuccess) {
    refuse(set, "cuMemsetD8Async", "clearing new frames", "try again");
  }
  if (waited != cuda::kSuccess) {
    refuse(waited, "cuStreamSynchronize", "clearing new frames", "try again");
  }
  if (unmapped != cuda::kSuccess) {
    refuse(unmapped, "cuMemUnmap", "clearing new frames", "try again");
  }
}

std::vector<CudaDriver::Handle> CudaDriver::make_frames(std::size_t count) {
  const cuda::AllocationProperties asked = properties(device_);
  std::vector<Handle> handles;
  handles.reserve(count);
  try {
    while (handles.size() < count) {
      Handle handle = 0;
      const cuda::Result result = api_->create(&handle, frame_bytes(), &asked, 0);
      if (result != cuda::kSuccess) {
        refuse(result, "cuMemCreate", "taking " + human_bytes(count * frame_bytes()),
               "lower --kv-cache-memory or free device memory");
      }
      handles.push_back(handle);
    }
    for (std::size_t done = 0; done < count; done += scratch_frames_) {
      clear(handles, done, std::min(scratch_frames_, count - done));
    }
  } catch (const Error&) {
    stray_handles_.insert(stray_handles_.end(), handles.begin(), handles.end());
    release_strays();
    throw;
  }
  return handles;
}

void CudaDriver::release_strays() noexcept {
  const auto released = [&](Handle handle) { return api_->release(handle) == cuda::kSuccess; };
  stray_handles_.erase(std::remove_if(stray_handles_.begin(), stray_handles_.end(), released),
                       stray_handles_.end());
}

void CudaDriver::keep(const FrameRun& run, const std::vector<Handle>& handles, std::size_t first) {
  for (std::int64_t i = 0; i < run.count; ++i) {
    handles_[run.first + i] = handles[first + static_cast<std::size_t>(i)];
  }
  ledger_.note_created(run);
}

void CudaDriver::create(const std::vector<FrameRun>& runs) {
  enter();
  ledger_.check_creatable(runs);
  std::size_t count = 0;
  for (const FrameRun& run : runs) count += static_cast<std::size_t>(run.count);
  if (count == 0) return;
  release_strays();
  check_headroom(count * frame_bytes());
  std::vector<Handle> handles;
  try {
    handles = make_frames(count);
  } catch (const DriverError& error) {
    if (error.sticky || error.code != cuda::kOutOfMemory) throw;
    throw OutOfMemoryError(error.what());
  }
  std::size_t used = 0;
  for (const FrameRun& run : runs) {
    keep(run, handles, used);
    used += static_cast<std::size_t>(run.count);
  }
}

void CudaDriver::destroy_one(const FrameRun& run, std::size_t completed) {
  ledger_.check_destroyable(run, completed);
  for (std::int64_t done = 0; done < run.count; ++done) {
    const cuda::Result result = api_->release(handles_[run.first + done]);
    if (result == cuda::kSuccess) continue;
    const std::string doing =
        "giving back " + with_commas(run.count) + " frames of " + human_bytes(frame_bytes());
    if (done > 0) {
      const FrameRun gone{run.first, done};
      ledger_.note_destroyed(gone);
      try {
        keep(gone, make_frames(static_cast<std::size_t>(done)), 0);
      } catch (const Error& error) {
        lose(result, "cuMemRelease",
             "cuMemRelease failed while " + doing + ": " + api_->name(result) +
                 ", and so did making anew what was released before (" + error.what() + ")",
             completed);
      }
    }
    refuse(result, "cuMemRelease", doing, "the memory stays with the KV cache", completed);
  }
  ledger_.note_destroyed(run);
}

void CudaDriver::destroy(const std::vector<FrameRun>& runs) {
  enter();
  release_strays();
  for (std::size_t i = 0; i < runs.size(); ++i) destroy_one(runs[i], i);
}

void CudaDriver::give_back_memory() noexcept {
  for (const AddressRun& run : stray_maps_) {
    attempt([&] { return api_->unmap(run.addr, run.bytes); });
  }
  for (const auto& [base, reservation] : ledger_.reservations()) {
    const SegmentMap& segments = reservation.segments;
    segments.for_each(base, segments.bytes(), [&](Address addr, std::size_t bytes, Mapping first) {
      if (first.frame != kNoFrame) attempt([&] { return api_->unmap(addr, bytes); });
    });
    attempt([&, start = base] { return api_->address_free(start, segments.bytes()); });
  }
  const PageSet& created = ledger_.created();
  for (FrameId id = created.lowest(); id >= 0; id = created.lowest(id + 1)) {
    attempt([&] { return api_->release(handles_[id]); });
  }
  for (const Handle handle : stray_handles_) {
    attempt([&] { return api_->release(handle); });
  }
  if (scratch_ != 0) {
    attempt([&] { return api_->address_free(scratch_, scratch_frames_ * frame_bytes()); });
  }
  for (const auto& [addr, bytes] : ledger_.host_memory()) {
    attempt([&, start = addr] { return api_->host_free(reinterpret_cast<void*>(start)); });
  }
}

void CudaDriver::close() noexcept {
  const auto ended = [&](Stream stream) {
    const cuda::Result result = attempt([&] { return api_->stream_synchronize(stream); });
    return result == cuda::kSuccess || cuda::is_sticky(result);
  };
  attempt([&] { return api_->context_set_current(context_); });
  bool all_ended = ended(compute_stream());
  for (Stream const stream : {clear_stream_, copy_stream_}) {
    if (stream != nullptr) all_ended = ended(stream) && all_ended;
  }
  if (all_ended) give_back_memory();
  retire(marks_, marks_.pending.size());
  retire(copy_marks_, copy_marks_.pending.size());
  if (order_event_ != nullptr) idle_events_.push_back(order_event_);
  for (Event const event : idle_events_) {
    attempt([&] { return api_->event_destroy(event); });
  }
  for (Stream const stream : {clear_stream_, copy_stream_}) {
    if (stream != nullptr) attempt([&] { return api_->stream_destroy(stream); });
  }
  attempt([&] { return api_->primary_context_release(device_); });
}

}  // namespace vmserve
