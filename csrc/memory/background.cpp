// Submits mapper commands and applies their outcomes. Pages and addresses of a command stay
// reserved until its outcome is applied.
#include "vmserve/memory/background.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "vmserve/errors.h"

namespace vmserve {
namespace {

// Maximum of pages per unmap command: a new sequence waits for one command at most.
constexpr std::int64_t kReclaimBatch = 64;
// Decay of recent demand per step.
constexpr double kRemembered = 0.998;
// At most 1/8 of the pool is kept free for demand like that of recent steps.
constexpr std::int64_t kMostAhead = 8;
// Pages by which the pool grows at a time, if config.grow_pages are not more.
constexpr std::int64_t kMostGrown = 16;
// Share of the newest step in the mean of their seconds, and what is no step but a pause.
constexpr double kNewestStep = 0.125;
constexpr double kLongestStep = 1.0;

}  // namespace

void Background::end_epochs(const std::vector<SeqId>& grown, const EpochRecord& ended) {
  if (ledger_.drop_unseen(ended)) ++books_.version;
  seal_slots(grown);
  restore_write_access();
}

void Background::apply_finished_work() {
  if (!copies_in_flight_.empty()) apply_finished_copies();
  for (Outcome& outcome : work_.mapper->take_outcomes()) apply_outcome(std::move(outcome));
  if (persistence_ != nullptr) persistence_->apply_finished();
}

void Background::apply_finished_copies() {
  try {
    while (!copies_in_flight_.empty()) {
      {
        const auto driving = work_.lock();
        if (!work_.driver->copy_reached(copies_in_flight_.front().mark)) return;
      }
      end_oldest_copies();
    }
  } catch (const Error& error) {
    work_.fail_if_sticky(error);
  }
}

void Background::end_oldest_copies() {
  for (const BlockId block : copies_in_flight_.front().blocks) pool_.end_copy(block);
  copies_in_flight_.pop_front();
}

bool Background::finish_copies() {
  if (copies_in_flight_.empty()) return false;
  try {
    const auto driving = work_.lock();
    work_.driver->fence();
  } catch (const Error& error) {
    work_.last_error = error.what();
    work_.fail_if_sticky(error);
    return false;
  }
  while (!copies_in_flight_.empty()) end_oldest_copies();
  return true;
}

void Background::apply_outcome(Outcome outcome) {
  if (!outcome.done) {
    work_.last_error = outcome.error;
    if (outcome.sticky && work_.failure.empty()) work_.failure = outcome.error;
  }
  (outcome.waited ? ledger_.totals.unhidden_calls : ledger_.totals.hidden_calls) +=
      outcome.num_calls;
  work_.pending_mappings -= outcome.command.num_mappings;
  switch (outcome.command.kind) {
    case Command::Kind::kMap:
      apply_map(outcome);
      break;
    case Command::Kind::kUnmap:
      apply_unmap(outcome);
      break;
    case Command::Kind::kGrow:
      apply_grow(outcome);
      break;
    case Command::Kind::kSeal:
      ledger_.totals.access_calls += outcome.num_calls;
      if (!outcome.done) undo_seal(outcome.command, std::move(outcome.unfinished));
      break;
  }
}

void Background::drain_mapper(bool is_waited_for) {
  if (persistence_ != nullptr) persistence_->finish_restores();
  std::uint64_t settled = 0;
  do {
    settled = work_.mapper->last_id();
    work_.mapper->wait(settled, is_waited_for);
    apply_finished_work();
  } while (work_.mapper->last_id() != settled);
}

void Background::schedule_work(const Grows& grows) {
  if (!work_.has_mapper() || !work_.failure.empty()) return;
  const auto num_growing = static_cast<std::int64_t>(grows.size());
  if (config_.lookahead_tokens > 0) {
    const std::int64_t ahead = lookahead_tokens(num_growing);
    for (const Op& op : grows) {
      if (ledger_.slot_of(seqs_[op.seq]) != kNoSlot) map_lookahead(op.seq, op.num_tokens, ahead);
    }
  }
  update_recent_demand();
  grow_ahead(num_growing);
  evict_ahead();
  reclaim_ahead();
  map_eager_slots();
}

// Tokens to map ahead, so that the mapper is in time if all growing sequences need a page together.
// Twice as many steps as the mapper needs for one page of each; at most one page.
std::int64_t Background::lookahead_tokens(std::int64_t num_growing) {
  const double now =
      std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  const double taken = now - std::exchange(last_step_at_, now);
  // Not a pause between requests.
  if (taken < kLongestStep) step_seconds_ += kNewestStep * (taken - step_seconds_);
  const double needed = static_cast<double>(num_growing) * work_.mapper->map_seconds();
  const double steps = step_seconds_ > 0 ? 2 * needed / step_seconds_ : 0;
  const std::int64_t most = std::max(config_.lookahead_tokens, config_.page_tokens());
  return std::clamp(static_cast<std::int64_t>(std::min(steps, 1e9)), config_.lookahead_tokens,
                    most);
}

void Background::map_lookahead(SeqId id, std::int64_t target, std::int64_t least) {
  const Sequence& seq = seqs_[id];
  const Slot& slot = slots_[seq.kv.slot];
  if (slot.num_pending > 0 || slot.in_repair) return;
  // Decoding grows by one token per step. A prompt computed in chunks grows by chunks of the same
  // size as this one.
  const std::int64_t unread = static_cast<std::int64_t>(seq.tokens.size()) - seq.kv.length;
  const std::int64_t ahead = std::max(least, std::min(target - seq.kv.sealed, unread));
  const std::int64_t want = ledger_.pages_for(std::min(seq.kv.length + ahead, config_.max_len));
  const std::int64_t count = std::min(want - slot.size(), pool_.num_free());
  if (count > 0 && work_.may_map_ahead(count)) submit_map(seq.kv.slot, count, seq.tenant);
}

void Background::submit_map(SlotId slot_id, std::int64_t count, Tenant tenant) {
  Slot& slot = slots_[slot_id];
  Command command;
  command.kind = Command::Kind::kMap;
  command.slot = slot_id;
  command.first_index = slot.size();
  PageId previous = slot.empty() ? kNoPage : slot.entries.back().page;
  std::vector<PageId> zeroed;
  for (std::int64_t i = 0; i < count; ++i) {
    const PageId page = pool_.take_page(previous, /*grows=*/true);  // held
    previous = page;
    command.pages.push_back(page);
    if (pool_.needs_zero(page, tenant)) zeroed.push_back(page);
    pool_.add_map(page, static_cast<std::int32_t>(slot.size()));
    slot.entries.push_back({page, false});
  }
  const std::size_t bytes = work_.space->page_bytes();
  const auto add = [&](Address start, std::int32_t group, Access access, bool prefault) {
    for (std::int64_t i = 0; i < count; ++i) {
      const FrameId frame = work_.space->frame(group, command.pages[i]);
      if (i > 0 && command.pages[i] == command.pages[i - 1] + 1) {
        ++command.map.back().frames.count;
        continue;
      }
      command.map.push_back(
          {start + static_cast<std::size_t>(i) * bytes, {frame, 1}, access, prefault});
    }
  };
  for (std::int32_t group = 0; group < config_.num_groups; ++group) {
    for (const PageId page : zeroed)
      command.zero.push_back({work_.space->arena(group, page), bytes});
    add(work_.space->slot(group, slot_id, command.first_index), group, Access::kReadWrite, true);
    if (work_.space->has_shadow()) {
      add(work_.space->shadow(group, slot_id, command.first_index), group, Access::kRead, false);
    }
  }
  for (const PageId page : zeroed) command.runs.push_back({page, 1});
  slot.num_pending = count;
  ledger_.recent.pages_now += count;
  if (!slot.active()) slot.parked_at = ++ledger_.parkings;
  slot.last_command = slot.last_map = work_.submit(std::move(command));
}

void Background::apply_map(const Outcome& outcome) {
  const Command& command = outcome.command;
  Slot& slot = slots_[command.slot];
  const auto count = static_cast<std::int64_t>(command.pages.size());
  slot.num_pending = 0;
  if (outcome.done) {
    for (const PageRun& run : command.runs) {
      pool_.mark_zero(run.first);
      ++ledger_.totals.pages_zeroed;
    }
    for (const PageId page : command.pages) pool_.unhold(page);
    ledger_.totals.pages_mapped += count;
    ledger_.totals.map_calls += static_cast<std::int64_t>(command.map.size());
    return;
  }
  ledger_.remove_entries(command.slot, command.first_index, count);
  if (outcome.unfinished.steps.empty()) {
    for (const PageId page : command.pages) pool_.unhold(page);
    return;
  }
  Repair repair;
  repair.steps = outcome.unfinished.steps;
  repair.held = command.pages;
  repair.slots = {command.slot};
  work_.add_repair(std::move(repair), outcome.unfinished.error);
}

// Whether a new sequence can take the slot without loss: its pages are neither used nor cached.
bool Background::is_free_for_newcomer(const Slot& slot) const {
  return !slot.empty() &&
         std::all_of(slot.entries.begin(), slot.entries.end(), [&](const SlotEntry& entry) {
           return entry.page != kNoPage && pool_.used(entry.page) == 0 &&
                  pool_.cached(entry.page) == 0;
         });
}

// Keeps config.eager_slots slots with eager_pages pages mapped. If eager_pages is 0, keeps one slot
// more than the new sequences of recent steps, with as many pages as they took. If no slot is
// empty, unmaps the one parked longest ago.
void Background::map_eager_slots() {
  const bool learns = config_.eager_pages == 0;
  const std::int64_t most = work_.space->shape().slot_pages;
  const std::int64_t pages =
      std::min(most, learns ? static_cast<std::int64_t>(std::ceil(ledger_.recent.first_pages))
                            : config_.eager_pages);
  if (config_.eager_slots == 0 || pages == 0) return;
  const auto recent = static_cast<std::int64_t>(std::ceil(ledger_.recent.step_newcomers));
  std::int64_t missing = learns ? std::min<std::int64_t>(config_.eager_slots, recent + 1)
                                : std::int64_t{config_.eager_slots};
  std::vector<SlotId> empty;
  std::vector<SlotId> parked;
  for (SlotId id = 0; id < config_.num_slots; ++id) {
    const Slot& slot = slots_[id];
    if (slot.active() || slot.in_repair) continue;
    if (slot.empty()) {
      if (slot.retire <= books_.completed) empty.push_back(id);
    } else if (slot.size() >= pages && is_free_for_newcomer(slot)) {
      --missing;
    } else if (learns && ledger_.can_unmap(slot)) {
      parked.push_back(id);
    }
  }
  if (missing <= 0) return;
  std::sort(parked.begin(), parked.end(),
            [&](SlotId a, SlotId b) { return slots_[a].parked_at < slots_[b].parked_at; });
  const auto reserve =
      static_cast<std::int64_t>(config_.reclaim_share * static_cast<double>(pool_.limit()));
  for (; missing > 0; --missing) {
    if (pool_.num_free() - pages < std::min(reserve, pages) || !work_.may_map_ahead(pages)) return;
    if (empty.empty()) {
      if (parked.empty()) return;
      const SlotId oldest = parked.front();
      parked.erase(parked.begin());
      reclaim(oldest, slots_[oldest].size());
      empty.push_back(oldest);
    }
    submit_map(empty.front(), pages, ledger_.recent.newest_tenant);
    empty.erase(empty.begin());
  }
}

void Background::update_recent_demand() {
  ledger_.recent.step_pages = std::max(static_cast<double>(ledger_.recent.pages_now),
                                       ledger_.recent.step_pages * kRemembered);
  ledger_.recent.step_newcomers = std::max(static_cast<double>(ledger_.recent.newcomers_now),
                                           ledger_.recent.step_newcomers * kRemembered);
  ledger_.recent.pages_now = ledger_.recent.newcomers_now = 0;
}

// Free pages to keep: twice the recent demand of a step, plus the pages of eager slots. Twice,
// because the mapper may still be busy when the next step comes.
std::int64_t Background::target_free_pages() const {
  const bool learns = config_.eager_slots > 0 && config_.eager_pages == 0;
  const double recent =
      2 * ledger_.recent.step_pages + (learns ? 2 * ledger_.recent.first_pages : 0);
  return std::min(static_cast<std::int64_t>(recent), pool_.limit() / kMostAhead);
}

void Background::grow_ahead(std::int64_t num_growing) {
  const std::int64_t growable = pool_.limit() - pool_.num_committed();
  std::int64_t wanted =
      std::max({target_free_pages(), config_.ready_pages, (config_.grow_pages + 1) / 2});
  // All sequences may need a page in the same step, if any are kept ready at all.
  if (config_.ready_pages > 0) {
    wanted = std::max(wanted, std::min(num_growing, pool_.limit() / kMostAhead));
  }
  if (is_growing_ || growable <= 0) return;
  if (pool_.num_free() >= wanted && !pool_.lacks_extent()) return;
  Command command;
  command.kind = Command::Kind::kGrow;
  // Contains one whole extent wherever it begins.
  const std::int64_t extents = pool_.lacks_extent() ? 2 * pool_.extent_pages() : 0;
  // Maps are queued after it.
  const std::int64_t missing = std::min(wanted - pool_.num_free(), kMostGrown);
  const std::int64_t count = std::max({config_.grow_pages, missing, extents});
  command.runs = pool_.lowest_absent(std::min(growable, count));
  for (std::int32_t group = 0; group < config_.num_groups; ++group) {
    for (const PageRun& run : command.runs) {
      const FrameRun in_group{work_.space->frame(group, run.first), run.count};
      command.create.push_back(in_group);
      command.map.push_back({work_.space->arena(group, run.first), in_group, Access::kReadWrite});
    }
  }
  for (const PageRun& run : command.runs) pool_.commit_held(run);
  is_growing_ = true;
  work_.submit(std::move(command));
}

void Background::apply_grow(Outcome& outcome) {
  is_growing_ = false;
  const std::vector<PageRun>& runs = outcome.command.runs;
  if (outcome.done) {
    for (const PageRun& run : runs) {
      for (PageId page = run.first; page < run.first + run.count; ++page) pool_.unhold(page);
      ledger_.totals.pages_committed += run.count;
    }
    ledger_.totals.arena_map_calls += static_cast<std::int64_t>(outcome.command.map.size());
    return;
  }
  if (outcome.unfinished.steps.empty()) {
    for (const PageRun& run : runs) pool_.uncommit(run);
    return;
  }
  Repair repair;
  repair.steps = std::move(outcome.unfinished.steps);
  repair.created = runs;
  work_.add_repair(std::move(repair), outcome.unfinished.error);
}

// Evicts cached pages before a step has to wait, when the pool has its full size. Evicting several
// pages of a prefix together frees one run. Takes the oldest pages not mapped in slots. If these
// are too few, unmaps the slot parked longest ago.
void Background::evict_ahead() {
  // The mapper's unmapped pages were the oldest, but returned as the newest idle pages. NOTE: they
  // are not evicted on return, because a plan may rely on blocks cached in them.
  const std::vector<PageId> reclaimed = std::exchange(reclaimed_, {});
  if (pool_.num_committed() < pool_.limit()) return;
  for (const PageId page : reclaimed) {
    if (pool_.num_free() >= target_free_pages()) break;
    const bool is_idle = pool_.state(page) == PageState::kIdle && pool_.maps(page) == 0;
    if (is_idle) ledger_.totals.evicted_blocks += pool_.drop_cached(page);
  }
  std::int64_t wanted = target_free_pages() - pool_.num_free();
  PageId page = pool_.oldest_idle();
  for (std::int64_t looked = 0; wanted > 0 && page != kNoPage && looked < kReclaimBatch; ++looked) {
    const PageId next = pool_.next_idle(page);
    if (pool_.maps(page) == 0) {
      ledger_.totals.evicted_blocks += pool_.drop_cached(page);
      --wanted;
    }
    page = next;
  }
  const SlotId oldest = wanted > 0 ? ledger_.oldest_parked() : kNoSlot;
  if (oldest != kNoSlot) reclaim(oldest, std::max(wanted, pool_.extent_pages()));
}

// Unmaps the oldest pages of parked slots before a step has to wait. Cached blocks stay readable in
// the arena.
void Background::reclaim_ahead() {
  const auto threshold =
      static_cast<std::int64_t>(config_.reclaim_share * static_cast<double>(pool_.limit()));
  const std::int64_t unmapped = pool_.count(PageState::kIdle) - pool_.num_idle_mapped();
  const std::int64_t at_hand = pool_.num_free() + unmapped + pool_.limit() - pool_.num_committed();
  std::int64_t wanted = std::min(threshold - at_hand, kReclaimBatch);
  if (pool_.num_idle_mapped() == 0) wanted = 0;
  if (work_.mapping_room() < work_.mapping_reserve) wanted = kReclaimBatch;
  if (wanted <= 0) return;
  const SlotId oldest = ledger_.oldest_parked();
  if (oldest != kNoSlot) reclaim(oldest, wanted);
}

// Unmaps the slot's last `num_pages` pages.
void Background::reclaim(SlotId slot, std::int64_t num_pages) {
  const std::int64_t first = std::max<std::int64_t>(0, slots_[slot].size() - num_pages);
  Command command;
  command.kind = Command::Kind::kUnmap;
  command.slot = slot;
  command.unmap = work_.entry_ranges(slot, first, slots_[slot].size() - first);
  command.pages = detach_pages(slot, first);
  slots_[slot].last_map = work_.submit(std::move(command));
  slots_[slot].last_command = slots_[slot].last_map;
}

std::vector<PageId> Background::detach_pages(SlotId id, std::int64_t first) {
  std::vector<PageId> pages;
  const Slot& slot = slots_[id];
  // Tail first: eviction order.
  for (std::int64_t i = slot.size() - 1; i >= first; --i) {
    if (slot.entries[i].page == kNoPage) continue;
    pool_.hold(slot.entries[i].page);
    pages.push_back(slot.entries[i].page);
  }
  ledger_.remove_entries(id, first, slot.size() - first);
  ++books_.version;
  return pages;
}

void Background::apply_unmap(Outcome& outcome) {
  if (outcome.done) {
    for (const PageId page : outcome.command.pages) {
      pool_.unhold(page);
      reclaimed_.push_back(page);
    }
    ledger_.totals.pages_unmapped += static_cast<std::int64_t>(outcome.command.pages.size());
    ledger_.totals.unmap_calls += static_cast<std::int64_t>(outcome.command.unmap.size());
    return;
  }
  Repair repair;
  repair.steps = std::move(outcome.unfinished.steps);
  repair.held = outcome.command.pages;
  repair.slots = {outcome.command.slot};
  work_.add_repair(std::move(repair), outcome.error);
}

// Makes fully sealed pages read-only in the slot: a stray write then traps instead of corrupting
// another sequence's result.
void Background::seal_slots(const std::vector<SeqId>& seqs) {
  if (!config_.seal_read_only || !work_.failure.empty()) return;
  Command command;
  command.kind = Command::Kind::kSeal;
  const std::size_t bytes = work_.space->page_bytes();
  for (const SeqId id : seqs) {
    const Sequence& seq = seqs_[id];
    if (ledger_.slot_of(seq) == kNoSlot) continue;
    Slot& slot = slots_[seq.kv.slot];
    if (slot.in_repair) continue;
    const std::int64_t stop =
        std::min(seq.kv.sealed / config_.page_tokens(), slot.size() - slot.num_pending);
    // Shared (read-only) and dropped pages lie anywhere among writable ones.
    const auto is_writable = [&](std::int64_t i) {
      return slot.entries[i].page != kNoPage && !slot.entries[i].read_only;
    };
    while (slot.num_sealed < stop) {
      const std::int64_t first = slot.num_sealed;
      for (; slot.num_sealed < stop && is_writable(slot.num_sealed); ++slot.num_sealed) {
        SlotEntry& entry = slot.entries[slot.num_sealed];
        entry.read_only = true;
        command.sealed.emplace_back(seq.kv.slot, slot.num_sealed);
        command.pages.push_back(entry.page);
      }
      const std::int64_t count = slot.num_sealed - first;
      for (std::int32_t group = 0; count > 0 && group < config_.num_groups; ++group) {
        command.access.push_back({work_.space->slot(group, seq.kv.slot, first),
                                  static_cast<std::size_t>(count) * bytes, Access::kRead});
      }
      while (slot.num_sealed < stop && !is_writable(slot.num_sealed)) ++slot.num_sealed;
    }
  }
  if (command.sealed.empty()) return;
  if (!work_.has_mapper()) return seal_now(command);
  std::vector<SlotId> touched;
  for (const auto& entry : command.sealed) touched.push_back(entry.first);
  const std::uint64_t id = work_.submit(std::move(command));
  for (const SlotId slot : touched) slots_[slot].last_command = id;
}

void Background::seal_now(const Command& command) {
  Transaction tx(*work_.driver);
  const auto driving = work_.lock();
  try {
    tx.set_access(command.access, Access::kReadWrite);
    ledger_.totals.access_calls += static_cast<std::int64_t>(command.access.size());
    ledger_.totals.unhidden_calls += static_cast<std::int64_t>(command.access.size());
  } catch (const Error& error) {
    // Only a safeguard is lost: the pages stay writable.
    work_.last_error = error.what();
    work_.fail_if_sticky(error);
    undo_seal(command, tx.rollback());
  }
}

// Without seal_read_only, a sequence may write again what it wrote. Pages that were read-only
// because they were shared or published become writable when one sequence owns them. If the driver
// refuses, the next change tries again.
void Background::restore_write_access() {
  if (config_.seal_read_only || !work_.failure.empty()) return;
  if (!ledger_.may_restore_access && !pool_.has_unpublished()) return;
  if (!config_.access_under_readers && books_.completed != books_.begun) return;
  ledger_.may_restore_access = false;
  pool_.clear_has_unpublished();
  std::vector<std::pair<SlotId, std::int64_t>> reopened;
  std::vector<AccessRun> runs;
  for (SlotId id = 0; id < config_.num_slots; ++id) {
    const Slot& slot = slots_[id];
    const std::int64_t size = slot.active() ? ledger_.num_pages(slot.seq) : 0;
    if (slot.in_repair) {  // the repair may still make it read-only
      ledger_.may_restore_access = true;
      continue;
    }
    for (std::int64_t i = 0; i < size; ++i) {
      const std::int64_t first = i;
      const auto is_exclusive_page = [&](const SlotEntry& entry) {
        return entry.page != kNoPage && entry.read_only && ledger_.is_exclusive(entry.page);
      };
      for (; i < size && is_exclusive_page(slot.entries[i]); ++i) reopened.emplace_back(id, i);
      const auto bytes = static_cast<std::size_t>(i - first) * work_.space->page_bytes();
      for (std::int32_t group = 0; bytes > 0 && group < config_.num_groups; ++group) {
        runs.push_back({work_.space->slot(group, id, first), bytes, Access::kReadWrite});
      }
    }
  }
  if (reopened.empty()) return;
  Transaction tx(*work_.driver);
  const auto driving = work_.lock();
  try {
    tx.set_access(runs, Access::kRead);
  } catch (const Error& error) {
    ledger_.may_restore_access = true;
    work_.last_error = error.what();
    work_.fail_if_sticky(error);
    Unfinished unfinished = tx.rollback();
    if (unfinished.steps.empty()) return;
    Repair repair{std::move(unfinished.steps), {}, {}, {}};
    for (const auto& entry : reopened) repair.slots.push_back(entry.first);
    return work_.add_repair(std::move(repair), unfinished.error);
  }
  for (const auto& [slot, index] : reopened) {
    slots_[slot].entries[index].read_only = false;
    slots_[slot].num_sealed = std::min(slots_[slot].num_sealed, index);
  }
  ledger_.totals.access_calls += static_cast<std::int64_t>(runs.size());
  ledger_.totals.unhidden_calls += static_cast<std::int64_t>(runs.size());
}

void Background::undo_seal(const Command& command, Unfinished unfinished) {
  Repair repair;
  for (std::size_t i = 0; i < command.sealed.size(); ++i) {
    const auto& [slot, index] = command.sealed[i];
    if (index < slots_[slot].size() && slots_[slot].entries[index].page == command.pages[i]) {
      slots_[slot].entries[index].read_only = false;
      slots_[slot].num_sealed = std::min(slots_[slot].num_sealed, index);
    }
    repair.slots.push_back(slot);
  }
  if (unfinished.steps.empty()) return;
  repair.steps = std::move(unfinished.steps);
  work_.add_repair(std::move(repair), unfinished.error);
}

void Background::persist_to(std::shared_ptr<PageStore> store, double touch_seconds) {
  persistence_ = std::make_unique<Persistence>(ledger_, work_, copies_in_flight_, std::move(store),
                                               touch_seconds);
}

void Background::begin_copies(const Change& change) {
  if (!change.copy_mark) return;
  InFlightCopies copies{*change.copy_mark, {}};
  copies.blocks.reserve(change.swap_out.size());
  for (const SwapCopy& copy : change.swap_out) {
    copies.blocks.push_back(copy.block);
    pool_.begin_copy(copy.block);
  }
  copies_in_flight_.push_back(std::move(copies));
}

}  // namespace vmserve
