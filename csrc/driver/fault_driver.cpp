#include "vmserve/fault_driver.h"

#include <algorithm>
#include <cerrno>
#include <string>

#include "vmserve/errors.h"

namespace vmserve {

void FaultInjectingDriver::arm(std::int64_t call, bool forever, int code, bool sticky) {
  if (call < 1) throw MisuseError("the call to fail is counted from 1");
  const std::lock_guard<std::mutex> lock(mutex_);
  num_calls_ = 0;
  fail_at_ = call;
  forever_ = forever;
  code_ = code;
  sticky_ = sticky;
}

void FaultInjectingDriver::disarm() {
  const std::lock_guard<std::mutex> lock(mutex_);
  fail_at_ = 0;
}

std::int64_t FaultInjectingDriver::num_calls() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_calls_;
}

std::map<std::string, std::int64_t> FaultInjectingDriver::num_refused() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_refused_;
}

void FaultInjectingDriver::count_call(const char* name, std::size_t completed) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++num_calls_;
  const bool fails = fail_at_ > 0 && (forever_ ? num_calls_ >= fail_at_ : num_calls_ == fail_at_);
  if (!fails) return;
  ++num_refused_[name];
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

Capabilities FaultInjectingDriver::capabilities() const {
  Capabilities capabilities = inner_->capabilities();
  capabilities.copy_stream = capabilities.copy_stream || late_copies_;
  return capabilities;
}

std::int64_t FaultInjectingDriver::run_copies(std::int64_t count) {
  std::int64_t done = 0;
  for (; done < count && !late_.empty(); ++done) {
    inner_->copy({late_.front()});
    late_.pop_front();
    ++num_copied_;
  }
  return done;
}

void FaultInjectingDriver::copy_out(const std::vector<CopyRun>& runs) {
  std::size_t asked = runs.size();
  // Also copies at once, so that misuse is refused at once. The late copy reads the source again.
  const auto defer = [&] {
    const auto stop = runs.begin() + static_cast<std::ptrdiff_t>(asked);
    if (late_copies_) late_.insert(late_.end(), runs.begin(), stop);
  };
  try {
    one_by_one("copy_out", runs, &PageDriver::copy_out);
  } catch (const Error& error) {
    asked = error.completed;
    defer();
    throw;
  }
  defer();
}

void FaultInjectingDriver::copy_in(const std::vector<CopyRun>& runs) {
  if (late_copies_ && !runs.empty()) run_copies(std::numeric_limits<std::int64_t>::max());
  one_by_one("copy_in", runs, &PageDriver::copy_in);
}

Mark FaultInjectingDriver::copy_mark() {
  count_call("copy_mark", 0);
  return late_copies_ ? num_copied_ + late_.size() : inner_->copy_mark();
}

bool FaultInjectingDriver::copy_reached(Mark mark) {
  return late_copies_ ? mark <= num_copied_ : inner_->copy_reached(mark);
}

void FaultInjectingDriver::fence() {
  count_call("fence", 0);
  run_copies(std::numeric_limits<std::int64_t>::max());
  num_reached_ = num_marks_;
  inner_->fence();
}

Mark FaultInjectingDriver::mark() {
  count_call("mark", 0);
  return late_marks_ ? ++num_marks_ : inner_->mark();
}

bool FaultInjectingDriver::reached(Mark mark) {
  return late_marks_ ? mark <= num_reached_ : inner_->reached(mark);
}

void FaultInjectingDriver::reach_marks(std::int64_t count) {
  num_reached_ = std::min(num_marks_, num_reached_ + static_cast<Mark>(count));
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
