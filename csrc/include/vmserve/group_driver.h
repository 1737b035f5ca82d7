// One driver over several alike: the memory of a group of ranks, with one book-keeper.
//
// Each call goes to every member with the same frames at the same offsets. Addresses are those of
// member 0; the group knows each member's own. A batch that a later member refuses halfway is
// undone on those that got further, so that all members are always in the same state. If undoing
// fails too, they differ: the group has failed, and every later call throws a sticky DriverError.
//
// NOTE: what zero and copy wrote on a member that got further stays written. Their targets are
// nobody's until the call has succeeded.
// NOTE: mapping_room() is that of the member with the least. Members of one process that share its
// limit would each count all of it: give each a share (HostOptions::max_map_count).
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "vmserve/driver.h"
#include "vmserve/frame_ledger.h"

namespace vmserve {

class GroupDriver final : public PageDriver {
 public:
  using Members = std::vector<std::shared_ptr<PageDriver>>;

  // Throws MisuseError unless there are members, with frames of one size and number.
  explicit GroupDriver(Members members);

  std::size_t num_members() const { return members_.size(); }
  // The member's own address of an address in a reservation or host memory of the group.
  Address address_of(std::size_t member, Address addr) const;

  Capabilities capabilities() const override;
  std::size_t granularity() const override;
  std::size_t frame_bytes() const override { return members_[0]->frame_bytes(); }
  std::int64_t num_frames() const override { return members_[0]->num_frames(); }

  Address reserve(std::size_t bytes, Backing backing) override;
  void free_reservation(Address addr) override;
  void create(const std::vector<FrameRun>& runs) override;
  void destroy(const std::vector<FrameRun>& runs) override;
  void map(const std::vector<MapRun>& runs) override;
  void unmap(const std::vector<AddressRun>& runs) override;
  void set_access(const std::vector<AccessRun>& runs) override;
  void zero(const std::vector<AddressRun>& runs) override;
  void copy(const std::vector<CopyRun>& runs) override;
  void copy_out(const std::vector<CopyRun>& runs) override;
  void copy_in(const std::vector<CopyRun>& runs) override;
  Mark copy_mark() override;
  bool copy_reached(Mark mark) override;
  void fence() override;
  Mark mark() override;
  bool reached(Mark mark) override;
  Address alloc_host(std::size_t bytes) override;
  void free_host(Address addr) override;
  // Throws InvariantError if the members differ.
  Mapping query(Address addr) const override;
  // Statistics of one member; where members can differ, of the one that holds the most or may hold
  // the least.
  DriverStats stats() const override;
  std::int64_t mapping_room() const override;

 private:
  // The same range in each member.
  struct Range {
    std::size_t bytes;
    std::vector<Address> bases;
    std::size_t num_given;  // members that gave it back; those that refused are asked again
  };
  // The members' marks for each mark of the group that is not reached yet.
  struct Marks {
    std::deque<std::vector<Mark>> waiting;
    Mark num_reached = 0;
  };
  using AskMark = Mark (PageDriver::*)();
  using AskReached = bool (PageDriver::*)(Mark);

  void check_usable() const;
  [[noreturn]] void fail(const std::string& why);
  // `run` as the member knows it.
  FrameRun of_member(std::size_t member, FrameRun run) const;
  MapRun of_member(std::size_t member, MapRun run) const;
  AddressRun of_member(std::size_t member, AddressRun run) const;
  AccessRun of_member(std::size_t member, AccessRun run) const;
  CopyRun of_member(std::size_t member, CopyRun run) const;
  // Runs the batch on all members. `note` is called for each run that all have done, in order;
  // then `undo(member, run)` for those that some members did and others refused.
  template <typename Run, typename Note, typename Undo>
  void on_all(const std::vector<Run>& runs, void (PageDriver::*call)(const std::vector<Run>&),
              Note note, Undo undo);
  void copies(const std::vector<CopyRun>& runs,
              void (PageDriver::*call)(const std::vector<CopyRun>&));
  Address take(std::size_t bytes, const std::function<Address(PageDriver&)>& take,
               const std::function<void(PageDriver&, Address)>& give);
  void give(Address addr, const std::function<void(PageDriver&, Address)>& give);
  Mark note_mark(Marks& marks, AskMark ask, AskReached reached);
  bool advance(Marks& marks, Mark mark, AskReached reached);

  Members members_;
  FrameLedger ledger_;  // what all members have done, at member 0's addresses
  std::map<Address, Range> ranges_;
  Marks marks_;
  Marks copy_marks_;
  std::string failure_;
};

}  // namespace vmserve
