#include "vmserve/transaction.h"

#include "vmserve/errors.h"

namespace vmserve {
namespace {

struct StepRunner {
  PageDriver& driver;
  void operator()(const Create& step) const { driver.create({step.frames}); }
  void operator()(const Destroy& step) const { driver.destroy({step.frames}); }
  void operator()(const MapRun& run) const { driver.map({run}); }
  void operator()(const AddressRun& run) const { driver.unmap({run}); }
  void operator()(const AccessRun& run) const { driver.set_access({run}); }
};

}  // namespace

Unfinished run_steps(PageDriver& driver, const std::vector<UndoStep>& steps) {
  Unfinished unfinished;
  for (const UndoStep& step : steps) {
    try {
      std::visit(StepRunner{driver}, step);
    } catch (const Error& error) {
      if (unfinished.steps.empty()) unfinished.error = error.what();
      unfinished.steps.push_back(step);
    }
  }
  return unfinished;
}

template <typename Run, typename Call, typename Inverse>
void Transaction::execute(const std::vector<Run>& runs, Call call, Inverse inverse) {
  if (runs.empty()) return;
  undo_.reserve(undo_.size() + runs.size());  // logging completed runs must not throw
  const auto log = [&](std::size_t completed) {
    for (std::size_t i = 0; i < completed; ++i) undo_.emplace_back(inverse(runs[i]));
  };
  try {
    call();
  } catch (const Error& error) {
    log(error.completed);
    throw;
  }
  log(runs.size());
}

void Transaction::create(const std::vector<FrameRun>& runs) {
  execute(runs, [&] { driver_.create(runs); }, [](const FrameRun& run) { return Destroy{run}; });
}

void Transaction::destroy(const std::vector<FrameRun>& runs) {
  execute(runs, [&] { driver_.destroy(runs); }, [](const FrameRun& run) { return Create{run}; });
}

void Transaction::map(const std::vector<MapRun>& runs) {
  const std::size_t frame = driver_.frame_bytes();
  execute(
      runs, [&] { driver_.map(runs); },
      [frame](const MapRun& run) {
        return AddressRun{run.addr, static_cast<std::size_t>(run.frames.count) * frame};
      });
}

void Transaction::unmap(const std::vector<MapRun>& runs) {
  std::vector<AddressRun> ranges;
  ranges.reserve(runs.size());
  for (const MapRun& run : runs) {
    ranges.push_back(
        {run.addr, static_cast<std::size_t>(run.frames.count) * driver_.frame_bytes()});
  }
  execute(runs, [&] { driver_.unmap(ranges); }, [](const MapRun& run) { return run; });
}

void Transaction::set_access(const std::vector<AccessRun>& runs, Access before) {
  execute(
      runs, [&] { driver_.set_access(runs); },
      [before](const AccessRun& run) { return AccessRun{run.addr, run.bytes, before}; });
}

Unfinished Transaction::rollback() {
  const std::vector<UndoStep> steps(undo_.rbegin(), undo_.rend());
  undo_.clear();
  return run_steps(driver_, steps);
}

}  // namespace vmserve
