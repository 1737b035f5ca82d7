#include "vmserve/plugin_driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "vmserve/errors.h"

namespace vmserve {
namespace {

constexpr const char* kRebuild = "; rebuild it against this version's vmserve_driver.h";

std::uint32_t abi(Access access) {
  switch (access) {
    case Access::kNone:
      return VMSERVE_ACCESS_NONE;
    case Access::kRead:
      return VMSERVE_READ;
    case Access::kReadWrite:
      return VMSERVE_READ_WRITE;
  }
  return VMSERVE_ACCESS_NONE;
}

vmserve_frame_run abi(const FrameRun& run) {
  return {run.first, run.count};
}

vmserve_map_run abi(const MapRun& run) {
  return {run.addr, run.frames.first, run.frames.count, abi(run.access), run.prefault ? 1U : 0U};
}

vmserve_address_run abi(const AddressRun& run) {
  return {run.addr, run.bytes};
}

vmserve_access_run abi(const AccessRun& run) {
  return {run.addr, run.bytes, abi(run.access), 0};
}

vmserve_copy_run abi(const CopyRun& run) {
  return {run.dst, run.src, run.bytes};
}

template <typename Run>
auto abi(const std::vector<Run>& runs) {
  std::vector<decltype(abi(runs[0]))> converted;
  converted.reserve(runs.size());
  for (const Run& run : runs) converted.push_back(abi(run));
  return converted;
}

template <typename T>
T sized() {
  T value{};
  value.struct_size = sizeof(T);
  return value;
}

// Names of the mandatory functions that the table lacks: "map, query".
std::string missing_functions(const vmserve_driver& table) {
  const std::pair<const char*, bool> mandatory[] = {
      {"open", table.open != nullptr},
      {"close", table.close != nullptr},
      {"reserve", table.reserve != nullptr},
      {"free_reservation", table.free_reservation != nullptr},
      {"create", table.create != nullptr},
      {"destroy", table.destroy != nullptr},
      {"map", table.map != nullptr},
      {"set_access", table.set_access != nullptr},
      {"zero", table.zero != nullptr},
      {"copy", table.copy != nullptr},
      {"query", table.query != nullptr},
      {"stats", table.stats != nullptr},
  };
  std::string names;
  for (const auto& [name, there] : mandatory) {
    if (!there) names += (names.empty() ? "" : ", ") + std::string(name);
  }
  return names;
}

}  // namespace

SharedLibrary::SharedLibrary(const std::string& path) : handle_(nullptr), pid_(::getpid()) {
  if (path.find('/') == std::string::npos) {
    throw MisuseError("the driver plugin '" + path +
                      "' is not a path: write ./ before a file of the working directory");
  }
  handle_ = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle_ == nullptr) {
    const char* reason = ::dlerror();
    throw MisuseError("cannot load the driver plugin " + path + ": " +
                      (reason == nullptr ? "unknown reason" : reason));
  }
}

SharedLibrary::~SharedLibrary() {
  // After a fork, the library's own clean-up would release what the parent still uses.
  if (::getpid() == pid_) ::dlclose(handle_);
}

void* SharedLibrary::symbol(const char* name) const {
  return ::dlsym(handle_, name);
}

PluginDriver::PluginDriver(const PluginConfig& config)
    : library_(config.path), name_(config.path), pid_(::getpid()) {
  using Entry = const vmserve_driver* (*)(std::uint32_t);
  const auto entry = reinterpret_cast<Entry>(library_.symbol(VMSERVE_DRIVER_ENTRY));
  if (entry == nullptr) {
    throw MisuseError(config.path + " is no driver plugin: it does not export " +
                      VMSERVE_DRIVER_ENTRY);
  }
  check_table(entry(VMSERVE_DRIVER_ABI_VERSION), config.path);
  open(config);
}

PluginDriver::~PluginDriver() {
  if (context_ == nullptr || ::getpid() != pid_) return;
  vmserve_error error = sized<vmserve_error>();
  // Ignores errors: close() must work anyway.
  if (can(VMSERVE_IS_ASYNCHRONOUS)) table_.fence(context_, &error);
  table_.close(context_);
}

void PluginDriver::check_table(const vmserve_driver* table, const std::string& path) {
  if (table == nullptr) {
    throw MisuseError("the driver plugin " + path + " offers no table for ABI version " +
                      std::to_string(VMSERVE_DRIVER_ABI_VERSION) + kRebuild);
  }
  if (table->abi_version != VMSERVE_DRIVER_ABI_VERSION) {
    throw MisuseError("the driver plugin " + path + " speaks ABI version " +
                      std::to_string(table->abi_version) + ", this vmserve version " +
                      std::to_string(VMSERVE_DRIVER_ABI_VERSION) + kRebuild);
  }
  if (table->struct_size < sizeof(vmserve_driver)) {
    throw MisuseError("the driver plugin " + path + " has a table of " +
                      std::to_string(table->struct_size) + " bytes, ABI version 1 needs " +
                      std::to_string(sizeof(vmserve_driver)) + kRebuild);
  }
  std::memcpy(&table_, table, sizeof(table_));
  const std::string missing = missing_functions(table_);
  if (!missing.empty()) {
    throw MisuseError("the driver plugin " + path + " lacks mandatory functions: " + missing);
  }
  if (table_.name != nullptr) name_ = table_.name;
}

void PluginDriver::open(const PluginConfig& config) {
  std::vector<vmserve_option> options;
  for (const auto& [key, value] : config.options) options.push_back({key.c_str(), value.c_str()});
  auto request = sized<vmserve_driver_config>();
  request.abi_version = VMSERVE_DRIVER_ABI_VERSION;
  request.frame_bytes = config.frame_bytes;
  request.num_frames = config.num_frames;
  request.options = options.data();
  request.num_options = options.size();
  info_ = sized<vmserve_driver_info>();
  auto error = sized<vmserve_error>();
  vmserve_driver_context* context = nullptr;
  std::int32_t status = VMSERVE_OK;
  try {
    status = table_.open(&request, &context, &info_, &error);
  } catch (...) {
    broken("open", "let an exception escape");
  }
  check_status("open", 0, status, error);
  context_ = context;
  try {
    check_info(config);
  } catch (const Error&) {
    table_.close(context_);
    throw;
  }
}

void PluginDriver::check_info(const PluginConfig& config) const {
  const std::pair<std::uint64_t, std::vector<std::pair<const char*, bool>>> sections[] = {
      {VMSERVE_CAN_UNMAP, {{"unmap", table_.unmap != nullptr}}},
      {VMSERVE_CAN_HOST_MEMORY,
       {{"alloc_host", table_.alloc_host != nullptr}, {"free_host", table_.free_host != nullptr}}},
      {VMSERVE_IS_ASYNCHRONOUS,
       {{"fence", table_.fence != nullptr},
        {"mark", table_.mark != nullptr},
        {"reached", table_.reached != nullptr}}},
  };
  for (const auto& [capability, functions] : sections) {
    for (const auto& [function, there] : functions) {
      if (can(capability) && !there) {
        throw MisuseError("the driver plugin " + name_ + " claims a capability without its " +
                          "function " + function);
      }
    }
  }
  if (context_ == nullptr) {
    throw MisuseError("the driver plugin " + name_ + " opened without a context");
  }
  if (info_.frame_bytes != config.frame_bytes || info_.num_frames != config.num_frames) {
    throw MisuseError(
        "the driver plugin " + name_ + " opened with " + std::to_string(info_.num_frames) +
        " frames of " + std::to_string(info_.frame_bytes) + " bytes in place of " +
        std::to_string(config.num_frames) + " of " + std::to_string(config.frame_bytes));
  }
  if (info_.granularity == 0 || info_.frame_bytes % info_.granularity != 0) {
    throw MisuseError("the driver plugin " + name_ + " has a granularity of " +
                      std::to_string(info_.granularity) + " bytes, which does not divide the " +
                      "frame of " + std::to_string(info_.frame_bytes));
  }
}

Capabilities PluginDriver::capabilities() const {
  Capabilities found;
  found.unmap = can(VMSERVE_CAN_UNMAP);
  found.read_only = can(VMSERVE_CAN_READ_ONLY);
  found.zeros_backing = can(VMSERVE_CAN_ZEROS_BACKING);
  found.host_memory = can(VMSERVE_CAN_HOST_MEMORY);
  found.asynchronous = can(VMSERVE_IS_ASYNCHRONOUS);
  return found;
}

void PluginDriver::check_usable(const char* name) const {
  if (::getpid() != pid_) {
    throw MisuseError("this KV memory belongs to process " + std::to_string(pid_) +
                      " and was used in its fork " + std::to_string(::getpid()) +
                      ": start worker processes with the spawn method");
  }
  if (!defect_.empty()) throw DriverError(name, EPROTO, defect_, 0, /*sticky=*/true);
}

void PluginDriver::require(std::uint64_t capability, const char* name, const char* remedy) const {
  if (can(capability)) return;
  throw MisuseError(name_ + ": " + name + " is not among this driver's capabilities; " + remedy);
}

void PluginDriver::broken(const char* name, const std::string& what) const {
  defect_ = "the driver plugin " + name_ + " broke its contract: " + name + " " + what +
            "; nothing more is asked of it: report this to its author";
  throw DriverError(name, EPROTO, defect_, 0, /*sticky=*/true);
}

void PluginDriver::check_status(const char* name, std::size_t num_runs, std::int32_t status,
                                vmserve_error& error) const {
  if (status == VMSERVE_OK) return;
  error.message[sizeof(error.message) - 1] = '\0';
  error.call[sizeof(error.call) - 1] = '\0';
  // The failing run is not done. Calls without runs, and create, are done completely or not at all.
  const std::uint64_t most = num_runs == 0 ? 0 : num_runs - 1;
  if (error.completed > most) {
    broken(name, "failed with " + std::to_string(error.completed) + " of " +
                     std::to_string(num_runs) + " runs completed");
  }
  const char* text = error.message[0] == '\0' ? "it gave no reason" : error.message;
  const std::string what = name_ + ": " + name + ": " + text;
  const std::string call = error.call[0] == '\0' ? name : error.call;
  switch (status) {
    case VMSERVE_MISUSE:
      throw MisuseError(what, error.completed);
    case VMSERVE_REFUSED:
      throw DriverError(call, error.code, what, error.completed);
    case VMSERVE_OUT_OF_MEMORY:
      throw OutOfMemoryError(what, error.completed);
    case VMSERVE_STICKY:
      throw DriverError(call, error.code, what, error.completed, /*sticky=*/true);
    default:
      broken(name, "returned the unknown status " + std::to_string(status));
  }
}

template <typename... Parameters, typename... Arguments>
void PluginDriver::call(const char* name, std::size_t num_runs,
                        std::int32_t (*function)(vmserve_driver_context*, Parameters...),
                        Arguments... arguments) const {
  auto error = sized<vmserve_error>();
  std::int32_t status = VMSERVE_OK;
  // NOTE: the ABI forbids exceptions, but a C++ plugin can let one escape, which must not take down
  // the engine.
  try {
    status = function(context_, arguments..., &error);
  } catch (...) {
    broken(name, "let an exception escape");
  }
  check_status(name, num_runs, status, error);
}

Address PluginDriver::reserve(std::size_t bytes, Backing backing) {
  check_usable("reserve");
  if (backing == Backing::kZeros) {
    require(VMSERVE_CAN_ZEROS_BACKING, "zeros_backing", "reserve with Backing.TRAP");
  }
  const std::uint32_t kind =
      backing == Backing::kZeros ? VMSERVE_BACKING_ZEROS : VMSERVE_BACKING_TRAP;
  std::uint64_t address = 0;
  call("reserve", 0, table_.reserve, bytes, kind, &address);
  if (address == 0 || address % granularity() != 0 || address + bytes < address) {
    broken("reserve", "returned a range that is not aligned to the granularity of " +
                          std::to_string(granularity()) + " bytes, or is no range");
  }
  const auto next = reservations_.lower_bound(address);
  const bool overlaps_next = next != reservations_.end() && next->first - address < bytes;
  const bool overlaps_last =
      next != reservations_.begin() && address - std::prev(next)->first < std::prev(next)->second;
  if (overlaps_next || overlaps_last)
    broken("reserve", "returned a range that is reserved already");
  reservations_.emplace(address, bytes);
  return address;
}

void PluginDriver::free_reservation(Address addr) {
  check_usable("free_reservation");
  call("free_reservation", 0, table_.free_reservation, addr);
  reservations_.erase(addr);
}

void PluginDriver::create(const std::vector<FrameRun>& runs) {
  check_usable("create");
  if (!runs.empty()) call("create", 0, table_.create, abi(runs).data(), runs.size());
}

void PluginDriver::destroy(const std::vector<FrameRun>& runs) {
  check_usable("destroy");
  if (!runs.empty()) call("destroy", runs.size(), table_.destroy, abi(runs).data(), runs.size());
}

void PluginDriver::map(const std::vector<MapRun>& runs) {
  check_usable("map");
  if (!runs.empty()) call("map", runs.size(), table_.map, abi(runs).data(), runs.size());
}

void PluginDriver::unmap(const std::vector<AddressRun>& runs) {
  check_usable("unmap");
  require(VMSERVE_CAN_UNMAP, "unmap", "free the whole reservation");
  if (!runs.empty()) call("unmap", runs.size(), table_.unmap, abi(runs).data(), runs.size());
}

void PluginDriver::set_access(const std::vector<AccessRun>& runs) {
  check_usable("set_access");
  if (runs.empty()) return;
  call("set_access", runs.size(), table_.set_access, abi(runs).data(), runs.size());
}

void PluginDriver::zero(const std::vector<AddressRun>& runs) {
  check_usable("zero");
  if (!runs.empty()) call("zero", runs.size(), table_.zero, abi(runs).data(), runs.size());
}

void PluginDriver::copy(const std::vector<CopyRun>& runs) {
  check_usable("copy");
  if (!runs.empty()) call("copy", runs.size(), table_.copy, abi(runs).data(), runs.size());
}

void PluginDriver::fence() {
  check_usable("fence");
  if (can(VMSERVE_IS_ASYNCHRONOUS)) call("fence", 0, table_.fence);
}

Mark PluginDriver::mark() {
  check_usable("mark");
  if (!can(VMSERVE_IS_ASYNCHRONOUS)) return ++last_mark_;
  Mark mark = 0;
  call("mark", 0, table_.mark, &mark);
  if (mark < last_mark_) broken("mark", "returned a mark before the last one");
  return last_mark_ = mark;
}

bool PluginDriver::reached(Mark mark) {
  check_usable("reached");
  if (!can(VMSERVE_IS_ASYNCHRONOUS)) return mark <= last_mark_;
  std::uint32_t reached = 0;
  call("reached", 0, table_.reached, mark, &reached);
  if (reached > 1) broken("reached", "answered neither 0 nor 1");
  return reached == 1;
}

Address PluginDriver::alloc_host(std::size_t bytes) {
  check_usable("alloc_host");
  require(VMSERVE_CAN_HOST_MEMORY, "host_memory", "set --swap-space 0");
  std::uint64_t address = 0;
  call("alloc_host", 0, table_.alloc_host, bytes, &address);
  if (address == 0 || address + bytes < address) broken("alloc_host", "returned no range");
  return address;
}

void PluginDriver::free_host(Address addr) {
  check_usable("free_host");
  require(VMSERVE_CAN_HOST_MEMORY, "host_memory", "set --swap-space 0");
  call("free_host", 0, table_.free_host, addr);
}

Mapping PluginDriver::query(Address addr) const {
  check_usable("query");
  vmserve_mapping mapping{};
  call("query", 0, table_.query, addr, &mapping);
  const bool mapped = mapping.frame != VMSERVE_NO_FRAME;
  const bool known = mapping.access == VMSERVE_READ || mapping.access == VMSERVE_READ_WRITE;
  if (mapping.frame < VMSERVE_NO_FRAME || mapping.frame >= num_frames() ||
      (mapped ? !known : mapping.access != VMSERVE_ACCESS_NONE)) {
    broken("query", "answered frame " + std::to_string(mapping.frame) + " with access " +
                        std::to_string(mapping.access));
  }
  if (!mapped) return {};
  return {mapping.frame, mapping.access == VMSERVE_READ ? Access::kRead : Access::kReadWrite};
}

DriverStats PluginDriver::stats() const {
  check_usable("stats");
  auto found = sized<vmserve_driver_stats>();
  call("stats", 0, table_.stats, &found);
  const std::int64_t least = std::min(
      {found.created_frames, found.mapped_frames, found.num_mappings, found.allocated_bytes});
  if (least < 0 || found.created_frames > num_frames() || found.num_mappings > found.max_mappings) {
    broken("stats", "answered numbers that cannot be");
  }
  return {found.created_frames, found.mapped_frames, found.num_mappings, found.max_mappings,
          found.allocated_bytes};
}

}  // namespace vmserve
