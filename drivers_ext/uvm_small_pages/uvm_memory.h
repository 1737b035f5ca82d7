// Frames over the modified module: handles, where they are mapped, and what could not be undone.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "uvm_device.h"
#include "vmserve_frame_table.h"

namespace uvm {

// Throws Failure unless the module at the path is the modified one. Safe with any module
// (README.md).
void probe(const DeviceTable& table, const std::string& module_path);

class Memory {
 public:
  Memory(const DeviceTable& table, Device* device, const Uuid& gpu, std::uint64_t frame_bytes,
         std::int64_t num_frames);
  // Releases all reservations and handles, as far as the module allows.
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  const vmserve_plugin::FrameTable& frames() const { return frames_; }
  // Physical memory held, with spare handles.
  std::int64_t allocated_bytes() const;

  // As in vmserve_driver.h; each takes one run and throws Failure.
  std::uint64_t reserve(std::uint64_t bytes);
  void free_reservation(std::uint64_t address);
  void create(const vmserve_frame_run* runs, std::uint64_t count);
  void destroy(const vmserve_frame_run& run);
  void map(const vmserve_map_run& run);
  void set_access(const vmserve_access_run& run);
  void zero(const vmserve_address_run& run);
  void copy(const vmserve_copy_run& run);
  void fence();
  std::uint64_t mark();
  bool reached(std::uint64_t mark);
  std::uint64_t alloc_host(std::uint64_t bytes);
  void free_host(std::uint64_t address);

 private:
  using Handle = std::uint64_t;

  // Calls the device's function with the arguments; throws the error that it returns.
  template <typename Function, typename... Arguments>
  void call(Function function, Arguments... arguments);
  // Throws unless the ioctl was routed and its status is kOk.
  template <typename Parameters>
  void ioctl(std::uint32_t number, Parameters& parameters, const char* name);

  Handle get_handle();
  void free_handle(Handle handle);
  // Frees it, or keeps it for the next create() if an address still maps it or the module refuses.
  void drop_handle(Handle handle);
  void show(std::uint64_t address, Handle handle);
  void clean_up(std::uint64_t address, std::uint64_t bytes);
  // Records that the module still maps the run's first `count` frames although the run failed.
  void leave_behind(const vmserve_map_run& run, std::int64_t count);
  void forget_leftover(std::uint64_t address);
  void zero_new_frames(const vmserve_map_run& run);
  std::size_t at(std::int64_t id) const { return static_cast<std::size_t>(id); }

  const DeviceTable& table_;
  Device* device_;
  Uuid gpu_;
  vmserve_plugin::FrameTable frames_;
  vmserve_plugin::HostRanges host_;
  std::vector<Handle> handles_;                   // by frame
  std::vector<bool> fresh_;                       // by frame: not zeroed since it was created
  bool zeroing_ = false;                          // new frames were zeroed since the last fence
  std::set<Handle> held_;                         // every handle
  std::set<Handle> spare_;                        // those without a frame
  std::map<std::uint64_t, Handle> leftovers_;     // by address: mapped by the module only
  std::map<Handle, std::int64_t> num_leftovers_;  // by handle; none is zero
};

}  // namespace uvm
