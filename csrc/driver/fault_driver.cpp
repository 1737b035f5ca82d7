#include "vmserve/fault_driver.h"

#include <cerrno>
#include <string>

#include "vmserve/errors.h"

namespace vmserve {

void FaultInjectingDriver::arm(std::int64_t call, bool forever, int code, bool sticky) {
  if (call < 1) throw MisuseError("the call to fail is counted from 1");
  num_calls_ = 0;
  fail_at_ = call;
  forever_ = forever;
  code_ = code;
  sticky_ = sticky;
}

void FaultInjectingDriver::count_call(const char* name, std::size_t completed) {
  ++num_calls_;
  const bool fails = fail_at_ > 0 && (forever_ ? num_calls_ >= fail_at_ : num_calls_ == fail_at_);
  if (!fails) return;
  const std::string what =
      std::string("injected fault: ") + name + " is call " + std::to_string(num_calls_);
  const std::string call(name);
  if (code_ == ENOMEM && !sticky_ && (call == "create" || call == "alloc_host")) {
    throw OutOfMemoryError(what, completed);
  }
  throw DriverError(call, code_, what, completed, sticky_);
}

template <typename Run>
void FaultInjectingDriver::one_by_one(const char* name, const std::vector<Run>& runs,
                                      void (PageDriver::*call)(const std::vector<Run>&)) {
  for (std::size_t i = 0; i < runs.size(); ++i) {
    count_call(name, i);
    try {
      (inner_.get()->*call)({runs[i]});
    } catch (Error& error) {
      error.completed = i;
      throw;
    }
  }
}

Address FaultInjectingDriver::reserve(std::size_t bytes, Backing backing) {
  count_call("reserve", 0);
  return inner_->reserve(bytes, backing);
}

void FaultInjectingDriver::fence() {
  count_call("fence", 0);
  inner_->fence();
}

Mark FaultInjectingDriver::mark() {
  count_call("mark", 0);
  return inner_->mark();
}

Address FaultInjectingDriver::alloc_host(std::size_t bytes) {
  count_call("alloc_host", 0);
  return inner_->alloc_host(bytes);
}

void FaultInjectingDriver::free_host(Address addr) {
  count_call("free_host", 0);
  inner_->free_host(addr);
}

void FaultInjectingDriver::create(const std::vector<FrameRun>& runs) {
  count_call("create", 0);
  inner_->create(runs);
}

void FaultInjectingDriver::destroy(const std::vector<FrameRun>& runs) {
  one_by_one("destroy", runs, &PageDriver::destroy);
}

void FaultInjectingDriver::map(const std::vector<MapRun>& runs) {
  one_by_one("map", runs, &PageDriver::map);
}

void FaultInjectingDriver::unmap(const std::vector<AddressRun>& runs) {
  one_by_one("unmap", runs, &PageDriver::unmap);
}

void FaultInjectingDriver::set_access(const std::vector<AccessRun>& runs) {
  one_by_one("set_access", runs, &PageDriver::set_access);
}

void FaultInjectingDriver::zero(const std::vector<AddressRun>& runs) {
  one_by_one("zero", runs, &PageDriver::zero);
}

void FaultInjectingDriver::copy(const std::vector<CopyRun>& runs) {
  one_by_one("copy", runs, &PageDriver::copy);
}

}  // namespace vmserve
