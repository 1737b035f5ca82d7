// A page driver from a shared library: the host's side of drivers_ext/include/vmserve_driver.h.
//
// The library is not trusted. A wrong version, a missing function or a false capability is refused
// on loading. An impossible answer of a call (an unaligned address, more completed runs than there
// were) is a sticky error, and no further call is made.
#pragma once

#include <sys/types.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "vmserve/driver.h"
#include "vmserve_driver.h"

namespace vmserve {

struct PluginConfig {
  std::string path;
  std::size_t frame_bytes = 0;
  std::int64_t num_frames = 0;
  std::vector<std::pair<std::string, std::string>> options;
};

// dlopen and dlclose. Pre: the path contains a slash, so that no search path applies.
class SharedLibrary {
 public:
  explicit SharedLibrary(const std::string& path);
  ~SharedLibrary();
  SharedLibrary(const SharedLibrary&) = delete;
  SharedLibrary& operator=(const SharedLibrary&) = delete;

  // Returns nullptr if there is no such symbol.
  void* symbol(const char* name) const;

 private:
  void* handle_;
  pid_t pid_;
};

class PluginDriver final : public PageDriver {
 public:
  // Throws MisuseError if the library cannot be loaded or breaks the ABI, and the error with which
  // its open() refuses.
  explicit PluginDriver(const PluginConfig& config);
  ~PluginDriver() override;
  PluginDriver(const PluginDriver&) = delete;
  PluginDriver& operator=(const PluginDriver&) = delete;

  // The library's own name.
  const std::string& name() const { return name_; }

  Capabilities capabilities() const override;
  std::size_t granularity() const override { return info_.granularity; }
  std::size_t frame_bytes() const override { return info_.frame_bytes; }
  std::int64_t num_frames() const override { return info_.num_frames; }

  Address reserve(std::size_t bytes, Backing backing) override;
  void free_reservation(Address addr) override;
  void create(const std::vector<FrameRun>& runs) override;
  void destroy(const std::vector<FrameRun>& runs) override;
  void map(const std::vector<MapRun>& runs) override;
  void unmap(const std::vector<AddressRun>& runs) override;
  void set_access(const std::vector<AccessRun>& runs) override;
  void zero(const std::vector<AddressRun>& runs) override;
  void copy(const std::vector<CopyRun>& runs) override;
  void fence() override;
  Mark mark() override;
  bool reached(Mark mark) override;
  Address alloc_host(std::size_t bytes) override;
  void free_host(Address addr) override;
  Mapping query(Address addr) const override;
  DriverStats stats() const override;

 private:
  bool can(std::uint64_t capability) const { return (info_.capabilities & capability) != 0; }
  // Throws unless this process may use the driver.
  void check_usable(const char* name) const;
  // Throws MisuseError unless the driver has the capability.
  void require(std::uint64_t capability, const char* name, const char* remedy) const;
  // Throws a sticky error: the plugin broke the ABI. No further call is made.
  [[noreturn]] void broken(const char* name, const std::string& what) const;
  // Calls `function(context, arguments..., error)` and translates its error. `num_runs` is the
  // limit of error.completed; 0 for calls without runs.
  template <typename... Parameters, typename... Arguments>
  void call(const char* name, std::size_t num_runs,
            std::int32_t (*function)(vmserve_driver_context*, Parameters...),
            Arguments... arguments) const;
  void check_status(const char* name, std::size_t num_runs, std::int32_t status,
                    vmserve_error& error) const;
  void check_table(const vmserve_driver* table, const std::string& path);
  void check_info(const PluginConfig& config) const;
  void open(const PluginConfig& config);

  SharedLibrary library_;
  vmserve_driver table_{};
  vmserve_driver_info info_{};
  vmserve_driver_context* context_ = nullptr;
  std::string name_;
  pid_t pid_;
  std::map<Address, std::size_t> reservations_;
  Mark last_mark_ = 0;
  mutable std::string defect_;  // how the plugin broke the ABI; empty if it did not
};

}  // namespace vmserve
