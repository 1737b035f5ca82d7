#include "vmserve/group_driver.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <iterator>
#include <limits>
#include <utility>

#include "vmserve/errors.h"

namespace vmserve {
namespace {

// Marks that nobody asks for are forgotten once there are so many, if they are reached.
constexpr std::size_t kMostWaiting = 1024;

const PageDriver& first_of(const GroupDriver::Members& members) {
  if (members.empty() || members[0] == nullptr) throw MisuseError("a group of drivers needs one");
  const PageDriver& first = *members[0];
  for (const auto& member : members) {
    if (member != nullptr && member->frame_bytes() == first.frame_bytes() &&
        member->num_frames() == first.num_frames()) {
      continue;
    }
    throw MisuseError("the drivers of a group must have frames of one size and number");
  }
  return first;
}

// Adds the member to its error. An error of the first member reads as that of a single driver.
[[noreturn]] void rethrow(std::size_t member, const Error& error) {
  if (member == 0) throw;
  const std::string what = "rank " + std::to_string(member) + ": " + error.what();
  if (const auto* refusal = dynamic_cast<const DriverError*>(&error)) {
    throw DriverError(refusal->call, refusal->code, what, error.completed, refusal->sticky);
  }
  if (dynamic_cast<const OutOfMemoryError*>(&error) != nullptr) {
    throw OutOfMemoryError(what, error.completed);
  }
  // The first member took the same call, so the members no longer agree.
  throw DriverError("group", EIO, what, error.completed, /*sticky=*/true);
}

}  // namespace

GroupDriver::GroupDriver(Members members)
    : members_(std::move(members)),
      ledger_(first_of(members_).frame_bytes(), members_[0]->num_frames()) {}

void GroupDriver::check_usable() const {
  ledger_.check_process();
  if (failure_.empty()) return;
  throw DriverError("group", EIO, failure_, 0, /*sticky=*/true);
}

void GroupDriver::fail(const std::string& why) {
  failure_ = "the ranks' memories are no longer alike: " + why;
  throw DriverError("group", EIO, failure_, 0, /*sticky=*/true);
}

Address GroupDriver::address_of(std::size_t member, Address addr) const {
  const auto after = ranges_.upper_bound(addr);
  if (member < members_.size() && after != ranges_.begin()) {
    const auto& [base, range] = *std::prev(after);
    if (addr - base < range.bytes) return range.bases[member] + (addr - base);
  }
  throw MisuseError("the address is in no reservation or host memory of the group");
}

FrameRun GroupDriver::of_member(std::size_t, FrameRun run) const {
  return run;
}

MapRun GroupDriver::of_member(std::size_t member, MapRun run) const {
  run.addr = address_of(member, run.addr);
  return run;
}

AddressRun GroupDriver::of_member(std::size_t member, AddressRun run) const {
  run.addr = address_of(member, run.addr);
  return run;
}

AccessRun GroupDriver::of_member(std::size_t member, AccessRun run) const {
  run.addr = address_of(member, run.addr);
  return run;
}

CopyRun GroupDriver::of_member(std::size_t member, CopyRun run) const {
  run.dst = address_of(member, run.dst);
  run.src = address_of(member, run.src);
  return run;
}

template <typename Run, typename Note, typename Undo>
void GroupDriver::on_all(const std::vector<Run>& runs,
                         void (PageDriver::*call)(const std::vector<Run>&), Note note, Undo undo) {
  check_usable();
  std::vector<std::size_t> done;  // runs done by each member that was asked
  std::exception_ptr refusal;
  std::size_t common = runs.size();
  bool is_lost = false;
  for (std::size_t member = 0; member < members_.size(); ++member) {
    if (refusal != nullptr && common == 0) break;
    try {
      if (member == 0) {
        (members_[0].get()->*call)(runs);
      } else {
        std::vector<Run> own;
        own.reserve(common);
        for (std::size_t i = 0; i < common; ++i) own.push_back(of_member(member, runs[i]));
        (members_[member].get()->*call)(own);
      }
    } catch (const Error& error) {
      common = error.completed;
      try {
        rethrow(member, error);
      } catch (const DriverError& named) {
        is_lost = is_lost || named.sticky;
        refusal = std::current_exception();
      } catch (...) {
        refusal = std::current_exception();
      }
    } catch (const std::exception& error) {
      fail(error.what());  // not an error of the driver: how far it got is unknown
    }
    done.push_back(common);
  }
  for (std::size_t i = 0; i < common; ++i) note(runs[i]);
  if (refusal == nullptr) return;
  try {
    for (std::size_t member = 0; member < done.size(); ++member) {
      for (std::size_t i = done[member]; i > common; --i) undo(member, runs[i - 1]);
    }
  } catch (const std::exception& error) {
    if (!is_lost) fail(error.what());
  }
  if (is_lost) failure_ = "a rank of the group is lost";
  std::rethrow_exception(refusal);
}

Address GroupDriver::take(std::size_t bytes, const std::function<Address(PageDriver&)>& take,
                          const std::function<void(PageDriver&, Address)>& give) {
  Range range{bytes, {}, 0};
  range.bases.reserve(members_.size());
  for (std::size_t member = 0; member < members_.size(); ++member) {
    try {
      range.bases.push_back(take(*members_[member]));
    } catch (const Error& error) {
      try {
        for (std::size_t i = 0; i < member; ++i) give(*members_[i], range.bases[i]);
      } catch (const Error&) {
        // The members free it when they are destroyed.
      }
      rethrow(member, error);
    }
  }
  const Address addr = range.bases[0];
  ranges_.emplace(addr, std::move(range));
  return addr;
}

void GroupDriver::give(Address addr, const std::function<void(PageDriver&, Address)>& give) {
  const auto found = ranges_.find(addr);
  if (found == ranges_.end()) {
    give(*members_[0], addr);  // refuses, with the text of all drivers
    return;
  }
  Range& range = found->second;
  for (; range.num_given < members_.size(); ++range.num_given) {
    try {
      give(*members_[range.num_given], range.bases[range.num_given]);
    } catch (const Error& error) {
      rethrow(range.num_given, error);
    }
  }
  ranges_.erase(found);
}

Capabilities GroupDriver::capabilities() const {
  Capabilities all = members_[0]->capabilities();
  for (const auto& member : members_) {
    const Capabilities one = member->capabilities();
    all.unmap = all.unmap && one.unmap;
    all.read_only = all.read_only && one.read_only;
    all.zeros_backing = all.zeros_backing && one.zeros_backing;
    all.host_memory = all.host_memory && one.host_memory;
    all.asynchronous = all.asynchronous || one.asynchronous;
    all.copy_stream = all.copy_stream || one.copy_stream;
  }
  return all;
}

std::size_t GroupDriver::granularity() const {
  std::size_t most = 0;
  for (const auto& member : members_) most = std::max(most, member->granularity());
  return most;
}

Address GroupDriver::reserve(std::size_t bytes, Backing backing) {
  check_usable();
  const Address addr = take(
      bytes, [&](PageDriver& member) { return member.reserve(bytes, backing); },
      [](PageDriver& member, Address base) { member.free_reservation(base); });
  ledger_.note_reserved(addr, bytes, backing);
  return addr;
}

void GroupDriver::free_reservation(Address addr) {
  check_usable();
  ledger_.reservation_at(addr);
  give(addr, [](PageDriver& member, Address base) { member.free_reservation(base); });
  ledger_.note_freed(addr);
}

void GroupDriver::create(const std::vector<FrameRun>& runs) {
  on_all(
      runs, &PageDriver::create, [&](const FrameRun& run) { ledger_.note_created(run); },
      [&](std::size_t member, const FrameRun& run) { members_[member]->destroy({run}); });
}

void GroupDriver::destroy(const std::vector<FrameRun>& runs) {
  on_all(
      runs, &PageDriver::destroy, [&](const FrameRun& run) { ledger_.note_destroyed(run); },
      [&](std::size_t member, const FrameRun& run) { members_[member]->create({run}); });
}

void GroupDriver::map(const std::vector<MapRun>& runs) {
  on_all(
      runs, &PageDriver::map,
      [&](const MapRun& run) { ledger_.note_mapped(ledger_.check_mappable(run, 0), run); },
      [&](std::size_t member, const MapRun& run) {
        const std::size_t bytes = static_cast<std::size_t>(run.frames.count) * frame_bytes();
        members_[member]->unmap({of_member(member, AddressRun{run.addr, bytes})});
      });
}

void GroupDriver::unmap(const std::vector<AddressRun>& runs) {
  on_all(
      runs, &PageDriver::unmap,
      [&](const AddressRun& run) { ledger_.note_unmapped(ledger_.check_unmappable(run, 0), run); },
      [&](std::size_t member, const AddressRun& run) {
        const SegmentMap& segments = ledger_.check_unmappable(run, 0).segments;
        segments.for_each(run.addr, run.bytes, [&](Address addr, std::size_t part, Mapping first) {
          const auto count = static_cast<std::int64_t>(part / frame_bytes());
          const MapRun again{addr, {first.frame, count}, first.access};
          members_[member]->map({of_member(member, again)});
        });
      });
}

void GroupDriver::set_access(const std::vector<AccessRun>& runs) {
  on_all(
      runs, &PageDriver::set_access,
      [&](const AccessRun& run) { ledger_.note_access(ledger_.check_accessible(run, 0), run); },
      [&](std::size_t member, const AccessRun& run) {
        const SegmentMap& segments = ledger_.check_accessible(run, 0).segments;
        segments.for_each(run.addr, run.bytes, [&](Address addr, std::size_t part, Mapping first) {
          members_[member]->set_access({of_member(member, AccessRun{addr, part, first.access})});
        });
      });
}

void GroupDriver::zero(const std::vector<AddressRun>& runs) {
  const auto nothing = [](const auto&...) {};
  on_all(runs, &PageDriver::zero, nothing, nothing);
}

void GroupDriver::copies(const std::vector<CopyRun>& runs,
                         void (PageDriver::*call)(const std::vector<CopyRun>&)) {
  const auto nothing = [](const auto&...) {};
  on_all(runs, call, nothing, nothing);
}

void GroupDriver::copy(const std::vector<CopyRun>& runs) {
  copies(runs, &PageDriver::copy);
}

void GroupDriver::copy_out(const std::vector<CopyRun>& runs) {
  copies(runs, &PageDriver::copy_out);
}

void GroupDriver::copy_in(const std::vector<CopyRun>& runs) {
  copies(runs, &PageDriver::copy_in);
}

bool GroupDriver::advance(Marks& marks, Mark mark, AskReached reached) {
  const auto is_done = [&](const std::vector<Mark>& of_members) {
    for (std::size_t i = 0; i < members_.size(); ++i) {
      if (!(members_[i].get()->*reached)(of_members[i])) return false;
    }
    return true;
  };
  while (marks.num_reached < mark && !marks.waiting.empty() && is_done(marks.waiting.front())) {
    marks.waiting.pop_front();
    ++marks.num_reached;
  }
  return mark <= marks.num_reached;
}

Mark GroupDriver::note_mark(Marks& marks, AskMark ask, AskReached reached) {
  check_usable();
  if (marks.waiting.size() >= kMostWaiting) {
    advance(marks, std::numeric_limits<Mark>::max(), reached);
  }
  std::vector<Mark> of_members;
  of_members.reserve(members_.size());
  for (std::size_t member = 0; member < members_.size(); ++member) {
    try {
      of_members.push_back((members_[member].get()->*ask)());
    } catch (const Error& error) {
      rethrow(member, error);
    }
  }
  marks.waiting.push_back(std::move(of_members));
  return marks.num_reached + marks.waiting.size();
}

Mark GroupDriver::mark() {
  return note_mark(marks_, &PageDriver::mark, &PageDriver::reached);
}

bool GroupDriver::reached(Mark mark) {
  return advance(marks_, mark, &PageDriver::reached);
}

Mark GroupDriver::copy_mark() {
  if (!capabilities().copy_stream) return mark();
  return note_mark(copy_marks_, &PageDriver::copy_mark, &PageDriver::copy_reached);
}

bool GroupDriver::copy_reached(Mark mark) {
  if (!capabilities().copy_stream) return reached(mark);
  return advance(copy_marks_, mark, &PageDriver::copy_reached);
}

void GroupDriver::fence() {
  check_usable();
  for (std::size_t member = 0; member < members_.size(); ++member) {
    try {
      members_[member]->fence();
    } catch (const Error& error) {
      rethrow(member, error);
    }
  }
}

Address GroupDriver::alloc_host(std::size_t bytes) {
  check_usable();
  return take(
      bytes, [&](PageDriver& member) { return member.alloc_host(bytes); },
      [](PageDriver& member, Address base) { member.free_host(base); });
}

void GroupDriver::free_host(Address addr) {
  check_usable();
  give(addr, [](PageDriver& member, Address base) { member.free_host(base); });
}

Mapping GroupDriver::query(Address addr) const {
  const Mapping mapping = ledger_.query(addr);
  for (std::size_t member = 0; member < members_.size(); ++member) {
    const Mapping found = members_[member]->query(address_of(member, addr));
    if (found.frame == mapping.frame && found.access == mapping.access) continue;
    throw InvariantError("rank " + std::to_string(member) + " has frame " +
                         std::to_string(found.frame) + " where the group has " +
                         std::to_string(mapping.frame));
  }
  return mapping;
}

DriverStats GroupDriver::stats() const {
  DriverStats all = members_[0]->stats();
  for (const auto& member : members_) {
    const DriverStats one = member->stats();
    all.num_mappings = std::max(all.num_mappings, one.num_mappings);
    all.max_mappings = std::min(all.max_mappings, one.max_mappings);
    all.allocated_bytes = std::max(all.allocated_bytes, one.allocated_bytes);
  }
  return all;
}

std::int64_t GroupDriver::mapping_room() const {
  std::int64_t least = kUnlimitedMappings;
  for (const auto& member : members_) least = std::min(least, member->mapping_room());
  return least;
}

}  // namespace vmserve
