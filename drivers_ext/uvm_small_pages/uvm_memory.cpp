#include "uvm_memory.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>

namespace uvm {

using vmserve_plugin::Failure;
using vmserve_plugin::misuse;

namespace {

constexpr unsigned char kUntouched = 0xA5;

std::string hex(std::uint32_t value) {
  char text[16];
  std::snprintf(text, sizeof(text), "0x%02x", value);
  return text;
}

// Range of the buffer that is not kUntouched any more.
struct Change {
  std::size_t first;
  std::size_t stop;
};

Change changed(const std::vector<unsigned char>& buffer) {
  const auto differs = [](unsigned char byte) { return byte != kUntouched; };
  const auto first = std::find_if(buffer.begin(), buffer.end(), differs);
  const auto last = std::find_if(buffer.rbegin(), buffer.rend(), differs);
  return {static_cast<std::size_t>(first - buffer.begin()),
          static_cast<std::size_t>(last.base() - buffer.begin())};
}

}  // namespace

void probe(const DeviceTable& table, const std::string& module_path) {
  const struct {
    std::uint32_t number;
    std::size_t status_at;
  } expected[] = {
      {kGetHandle, offsetof(GetHandle, status)},
      {kMapHandle, offsetof(MapHandle, status)},
      {kFreeHandle, offsetof(FreeHandle, status)},
      {kCleanUpRange, offsetof(CleanUpRange, status)},
  };
  for (const auto& [number, status_at] : expected) {
    // Larger than any parameters, so that no module writes past its end.
    std::vector<unsigned char> buffer(512, kUntouched);
    const std::int32_t code = table.probe(module_path.c_str(), number, buffer.data());
    if (code != 0) {
      throw Failure{VMSERVE_REFUSED,
                    module_path + " does not answer ioctl " + std::to_string(number) + " (" +
                        std::strerror(code) +
                        "): small pages need the modified nvidia-uvm module, "
                        "see drivers_ext/uvm_small_pages/README.md",
                    "ioctl", code};
    }
    std::uint32_t status = 0;
    std::memcpy(&status, buffer.data() + status_at, sizeof(status));
    const auto [first, stop] = changed(buffer);
    if (first < status_at || stop > status_at + sizeof(status) || status != kIllegalAction) {
      throw Failure{VMSERVE_REFUSED,
                    module_path + " answers ioctl " + std::to_string(number) +
                        ", but not as the modified nvidia-uvm module does (are its built-in tests "
                        "enabled, or is it another version?): small pages would corrupt memory",
                    "ioctl", 0};
    }
  }
}

Memory::Memory(const DeviceTable& table, Device* device, const Uuid& gpu, std::uint64_t frame_bytes,
               std::int64_t num_frames)
    : table_(table),
      device_(device),
      gpu_(gpu),
      frames_(frame_bytes, num_frames),
      handles_(static_cast<std::size_t>(num_frames), 0),
      fresh_(static_cast<std::size_t>(num_frames), false) {}

Memory::~Memory() {
  // Reservations first: a handle must not be freed while an address maps it.
  bool all_hidden = true;
  while (!frames_.reservations().empty()) {
    const std::uint64_t address = frames_.reservations().begin()->first;
    try {
      free_reservation(address);
    } catch (const Failure&) {
      all_hidden = false;
      frames_.remove_reservation(address);
    }
  }
  for (const Handle handle : held_) {
    // Else leave handles to the module, which may free them when the process ends.
    if (!all_hidden) break;
    FreeHandle request{handle, frames_.frame_bytes(), gpu_, kUntouched};
    table_.ioctl(device_, kFreeHandle, &request);
  }
  vmserve_error ignored{};
  for (const auto& [address, bytes] : host_.all()) table_.free_host(device_, address, &ignored);
}

std::int64_t Memory::allocated_bytes() const {
  return static_cast<std::int64_t>(held_.size() * frames_.frame_bytes());
}

template <typename Function, typename... Arguments>
void Memory::call(Function function, Arguments... arguments) {
  vmserve_error error{};
  error.struct_size = sizeof(error);
  const std::int32_t status = function(device_, arguments..., &error);
  if (status != VMSERVE_OK) throw Failure{status, error.message, error.call, error.code};
}

template <typename Parameters>
void Memory::ioctl(std::uint32_t number, Parameters& parameters, const char* name) {
  parameters.status = ~kOk;  // a status that is not written is no success
  const std::int32_t code = table_.ioctl(device_, number, &parameters);
  if (code != 0) {
    throw Failure{VMSERVE_REFUSED,
                  std::string(name) + " (ioctl " + std::to_string(number) +
                      ") failed: " + std::strerror(code),
                  name, code};
  }
  if (parameters.status == kOk) return;
  const bool no_memory = number == kGetHandle && parameters.status == kNoMemory;
  throw Failure{no_memory ? VMSERVE_OUT_OF_MEMORY : VMSERVE_REFUSED,
                std::string(name) + " (ioctl " + std::to_string(number) +
                    ") failed with NV status " + hex(parameters.status) +
                    (no_memory ? ": the GPU has no memory left; lower --kv-cache-memory" : ""),
                name, static_cast<std::int32_t>(parameters.status)};
}

Memory::Handle Memory::get_handle() {
  const auto hidden = std::find_if(spare_.begin(), spare_.end(), [&](Handle handle) {
    return num_leftovers_.count(handle) == 0;
  });
  if (hidden != spare_.end()) {
    const Handle handle = *hidden;
    spare_.erase(hidden);
    return handle;
  }
  GetHandle request{frames_.frame_bytes(), gpu_, 0, 0};
  ioctl(kGetHandle, request, "get handle");
  if (request.handle % frames_.frame_bytes() != 0 || held_.count(request.handle) != 0) {
    throw Failure{VMSERVE_STICKY,
                  "the module gave out a handle that is not aligned to the frame or in use: its "
                  "state is corrupt, reload it",
                  "get handle", 0};
  }
  held_.insert(request.handle);
  return request.handle;
}

void Memory::free_handle(Handle handle) {
  FreeHandle request{handle, frames_.frame_bytes(), gpu_, 0};
  ioctl(kFreeHandle, request, "free handle");
  held_.erase(handle);
  spare_.erase(handle);
}

void Memory::drop_handle(Handle handle) {
  spare_.insert(handle);
  if (num_leftovers_.count(handle) != 0) return;
  try {
    free_handle(handle);
  } catch (const Failure&) {
    // Kept as a spare handle, counted in allocated_bytes().
  }
}

std::uint64_t Memory::reserve(std::uint64_t bytes) {
  frames_.check_reserve(bytes);
  const std::uint64_t whole = (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  std::uint64_t address = 0;
  call(table_.reserve, whole, &address);
  if (address % kBlockBytes != 0) {
    // The module counts a range's blocks from its start: it would map at other addresses.
    call(table_.free_reservation, address);
    throw Failure{VMSERVE_REFUSED, "the managed allocation does not start on 2 MiB", "reserve", 0};
  }
  frames_.add_reservation(address, bytes);
  return address;
}

void Memory::clean_up(std::uint64_t address, std::uint64_t bytes) {
  CleanUpRange request{address, bytes, gpu_, 0};
  ioctl(kCleanUpRange, request, "clean up range");
}

void Memory::free_reservation(std::uint64_t address) {
  const std::uint64_t bytes = frames_.reservation_bytes(address);
  // Callers wait for their own work, but do not know about the zeroing of new frames.
  if (zeroing_) fence();
  // The module clears whole managed allocations, so there is no unmap.
  clean_up(address, (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes);
  vmserve_error error{};
  error.struct_size = sizeof(error);
  if (table_.free_reservation(device_, address, &error) != VMSERVE_OK) {
    throw Failure{VMSERVE_STICKY,
                  std::string("the range was cleaned up but not freed: ") + error.message,
                  "free reservation", error.code};
  }
  frames_.remove_reservation(address);
  for (auto it = leftovers_.lower_bound(address);
       it != leftovers_.end() && it->first < address + bytes;
       it = leftovers_.lower_bound(address)) {
    forget_leftover(it->first);
  }
}

void Memory::create(const vmserve_frame_run* runs, std::uint64_t count) {
  frames_.check_create(runs, count);
  std::vector<Handle> taken;
  try {
    for (std::uint64_t i = 0; i < count; ++i) {
      for (std::int64_t n = 0; n < runs[i].count; ++n) taken.push_back(get_handle());
    }
  } catch (const Failure&) {
    for (const Handle handle : taken) drop_handle(handle);
    throw;
  }
  auto next = taken.begin();
  for (std::uint64_t i = 0; i < count; ++i) {
    for (std::int64_t id = runs[i].first; id < runs[i].first + runs[i].count; ++id) {
      handles_[at(id)] = *next++;
      fresh_[at(id)] = true;
    }
    frames_.set_exists(runs[i], true);
  }
}

void Memory::destroy(const vmserve_frame_run& run) {
  frames_.check_destroy(run);
  const Handle first = handles_[at(run.first)];
  if (num_leftovers_.count(first) != 0) {
    spare_.insert(first);
  } else {
    free_handle(first);
  }
  // From here on the run cannot be undone, so finish it. Handles that the module does not take back
  // wait for the next create().
  for (std::int64_t id = run.first + 1; id < run.first + run.count; ++id) {
    drop_handle(handles_[at(id)]);
  }
  frames_.set_exists(run, false);
}

void Memory::show(std::uint64_t address, Handle handle) {
  MapHandle request{address, handle, gpu_, frames_.frame_bytes(), 0};
  ioctl(kMapHandle, request, "map handle");
  forget_leftover(address);  // the entry was overwritten
}

void Memory::leave_behind(const vmserve_map_run& run, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const Handle handle = handles_[at(run.first + i)];
    leftovers_[run.address + static_cast<std::uint64_t>(i) * frames_.frame_bytes()] = handle;
    ++num_leftovers_[handle];
  }
}

void Memory::forget_leftover(std::uint64_t address) {
  const auto it = leftovers_.find(address);
  if (it == leftovers_.end()) return;
  const Handle handle = it->second;
  leftovers_.erase(it);
  if (--num_leftovers_[handle] != 0) return;
  num_leftovers_.erase(handle);
  if (spare_.count(handle) != 0) drop_handle(handle);
}

void Memory::zero_new_frames(const vmserve_map_run& run) {
  const std::uint64_t frame = frames_.frame_bytes();
  for (std::int64_t i = 0; i < run.count;) {
    std::int64_t stop = i;
    while (stop < run.count && fresh_[at(run.first + stop)]) ++stop;
    if (stop > i) {
      zeroing_ = true;
      call(table_.zero, run.address + static_cast<std::uint64_t>(i) * frame,
           static_cast<std::uint64_t>(stop - i) * frame);
    }
    i = stop + 1;
  }
  for (std::int64_t i = 0; i < run.count; ++i) fresh_[at(run.first + i)] = false;
}

void Memory::map(const vmserve_map_run& run) {
  frames_.check_map(run);
  std::int64_t shown = 0;
  try {
    for (; shown < run.count; ++shown) {
      show(run.address + static_cast<std::uint64_t>(shown) * frames_.frame_bytes(),
           handles_[at(run.first + shown)]);
    }
    zero_new_frames(run);
  } catch (const Failure&) {
    leave_behind(run, shown);
    throw;
  }
  frames_.mapped(run);
}

void Memory::set_access(const vmserve_access_run& run) {
  frames_.check_set_access(run);
  frames_.set_access(run);
}

void Memory::zero(const vmserve_address_run& run) {
  frames_.check_usable(run.address, run.bytes, /*writable=*/true);
  call(table_.zero, run.address, run.bytes);
}

void Memory::copy(const vmserve_copy_run& run) {
  if (!host_.contains(run.dst, run.bytes)) frames_.check_usable(run.dst, run.bytes, true);
  if (!host_.contains(run.src, run.bytes)) frames_.check_usable(run.src, run.bytes, false);
  call(table_.copy, run.dst, run.src, run.bytes);
}

void Memory::fence() {
  call(table_.fence);
  zeroing_ = false;
}

std::uint64_t Memory::mark() {
  std::uint64_t mark = 0;
  call(table_.mark, &mark);
  return mark;
}

bool Memory::reached(std::uint64_t mark) {
  std::uint32_t reached = 0;
  call(table_.reached, mark, &reached);
  return reached != 0;
}

std::uint64_t Memory::alloc_host(std::uint64_t bytes) {
  if (bytes == 0) misuse("cannot allocate 0 bytes of host memory");
  std::uint64_t address = 0;
  call(table_.alloc_host, bytes, &address);
  host_.add(address, bytes);
  return address;
}

void Memory::free_host(std::uint64_t address) {
  host_.bytes(address);
  call(table_.free_host, address);
  host_.remove(address);
}

}  // namespace uvm
