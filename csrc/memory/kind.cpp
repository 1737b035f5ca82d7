#include "vmserve/memory/kind.h"

#include <algorithm>
#include <chrono>

#include "vmserve/memory/require.h"
#include "vmserve/mix.h"
#include "vmserve/text.h"

namespace vmserve {
namespace {

// Pages per extent if mappings are limited, else 1. An eighth of a slot's share of the pool, which
// may lie unused after each slot; at most 32, because more gains nothing.
std::int64_t extent_pages(const PageDriver& driver, const MemoryConfig& config) {
  constexpr std::int64_t kMost = 32;
  const std::int64_t share = config.limit_pages / config.num_slots / 8;
  std::int64_t pages = 1;
  while (2 * pages <= std::min(share, kMost)) pages *= 2;
  return driver.mapping_room() == kUnlimitedMappings ? 1 : pages;
}

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

void check_sizes(const MemoryConfig& config) {
  require(config.num_groups > 0 && config.num_slots > 0 && config.max_seqs > 0 &&
              config.block_tokens > 0 && config.blocks_per_page > 0 && config.token_bytes > 0 &&
              config.max_len > 0 && config.grow_pages > 0,
          [&] {
            return std::string(
                "groups, slots, sequences, block_tokens, blocks_per_page, token_bytes, max_len and "
                "grow_pages must be positive");
          });
  require(
      config.read_slack >= 0 && config.lookahead_tokens >= 0 && config.eager_slots >= 0 &&
          config.eager_pages >= 0 && config.swap_blocks >= 0 && config.ready_pages >= 0,
      [&] {
        return std::string(
            "read_slack, ready_pages, lookahead_tokens, eager_slots, eager_pages and swap_blocks "
            "must not be negative");
      });
  require(config.reclaim_share >= 0 && config.reclaim_share < 1,
          [&] { return std::string("reclaim_share must lie between 0 and 1"); });
  require(config.state_bytes >= 0 && config.checkpoint_tokens >= 0 && config.window >= 0 &&
              (!config.has_state() || (config.blocks_per_page == 1 && !config.null_page)),
          [&] {
            return std::string("a state is a page of one block, and no page is reserved for none");
          });
}

MemoryConfig validated(const PageDriver& driver, MemoryConfig config) {
  require(static_cast<std::size_t>(config.bytes_of(config.page_tokens())) == driver.frame_bytes(),
          [&] {
            if (config.has_state()) {
              return "a state of " + with_commas(config.state_bytes) +
                     " bytes is not the driver's frame of " +
                     with_commas(static_cast<std::int64_t>(driver.frame_bytes())) + " bytes";
            }
            return "a page of " + with_commas(config.page_tokens()) + " tokens of " +
                   with_commas(config.token_bytes) + " bytes is not the driver's frame of " +
                   with_commas(static_cast<std::int64_t>(driver.frame_bytes())) + " bytes";
          });
  require(config.limit_pages > 0 && config.limit_pages <= config.max_pages, [&] {
    return "limit_pages is " + with_commas(config.limit_pages) + ": it must lie between 1 and " +
           with_commas(config.max_pages);
  });
  require(config.num_groups * config.max_pages <= driver.num_frames(), [&] {
    return "the driver has " + with_commas(driver.num_frames()) + " frames, " +
           with_commas(config.num_groups) + " groups of " + with_commas(config.max_pages) +
           " pages need more";
  });
  require(driver.capabilities().host_memory || config.swap_blocks == 0, [&] {
    return std::string("this driver has no host memory to swap to: leave the swap space at 0");
  });
  config.seal_read_only =
      config.seal_read_only && config.access_under_readers && driver.capabilities().read_only;
  if (config.has_state()) {  // it has no slots
    config.lookahead_tokens = 0;
    config.eager_slots = 0;
  }
  return config;
}

Kind::Kind(const KindConfig& kind, Books& books, std::size_t number)
    : ledger(books, number, kind.memory, extent_pages(*kind.driver, kind.memory),
             kind.driver->capabilities().read_only),
      work(kind.driver, ledger),
      room(ledger, work),
      ops(ledger, work, room),
      planner(ledger, work, room, ops),
      background(ledger, work) {
  if (config.null_page) {
    room.commit_pages(1);
    pool.hold(0);  // for ever
  }
  const std::int64_t ready = std::min(config.ready_pages, pool.limit()) - pool.num_free();
  if (ready <= 0) return;
  try {
    room.create_pages(std::min(ready, pool.limit() - pool.num_committed()));
  } catch (const OutOfMemoryError& error) {
    work.last_error = error.what();  // the device has less memory now than the limit promises
  }
}

// -- parts of a plan

std::vector<Op> Kind::own_ops(std::vector<Op> merged) const {
  if (config.sees_all()) return merged;
  for (Op& op : merged) {
    if (op.kind != OpKind::kAttach && op.kind != OpKind::kGrow) continue;
    const std::int64_t length =
        op.kind == OpKind::kAttach ? op.num_tokens : seqs_[op.seq].kv.length;
    op.first_token = std::max(op.first_token, config.first_seen(length));
  }
  return merged;
}

void Kind::assess(const std::vector<Op>& own) {
  assessed_ = planner.assess(own);
}

void Kind::assess_again(const std::vector<Op>& own, bool is_planned) {
  work.retry_repairs();
  // Packing costs copies and cached blocks: check again whether it is needed.
  const Plan& planned = assessed_.plan;
  const bool holds = is_planned && assessed_.packing == Packing::kNone && planned.fits();
  if (!holds) assess(own);
  if (wait_for_mapper(own, assessed_.plan)) assess(own);
  if (assessed_.plan.needed_mappings > work.mapping_room()) {
    background.drain_mapper();  // replaces the mapper's upper bound by the mappings it made
    assess(own);
  }
}

// Waits for mapper commands that concern the ops; usually there are none. True if outcomes were
// applied, which may change what a plan needs.
bool Kind::wait_for_mapper(const std::vector<Op>& own, const Plan& plan) {
  if (!work.has_mapper()) return false;
  std::uint64_t until = 0;
  if (plan.needed_pages > pool.num_free()) until = work.mapper->last_id();
  for (const Op& op : own) {
    const Sequence& seq = seqs_[op.seq];
    if (op.kind != OpKind::kGrow && op.kind != OpKind::kAttach) {
      until = work.mapper->last_id();
    } else if (op.kind == OpKind::kAttach ||
               (ledger.view(seq) == View::kVirtual &&
                ledger.pages_for(op.num_tokens) > ledger.num_pages(op.seq))) {
      const SlotId slot = ledger.slot_of(seq);
      // Growth need not wait for kSeal commands on earlier pages. A new sequence waits only for
      // those of the slot that it takes.
      until = std::max(until, slot != kNoSlot ? slots_[slot].last_map : work.last_mapping);
    }
  }
  if (until == 0) return false;
  const auto start = Clock::now();
  if (work.mapper->wait(until)) {
    ++ledger.totals.mapper_waits;
    ledger.totals.mapper_wait_seconds += seconds_since(start);
  }
  background.apply_finished_work();
  return true;
}

bool Kind::is_holding_pages() const {
  const Persistence* persistence = background.persistence();
  return work.has_mapper() || !work.repairs.empty() ||
         (persistence != nullptr && persistence->is_restoring());
}

// -- parts of a mutation

void Kind::make_room_for_plan() {
  room.make_mapping_room(assessed_.plan.needed_mappings);
  if (assessed_.packing == Packing::kCompacted) room.compact_all();
}

void Kind::execute(Change& change) {
  const auto start = Clock::now();
  ops.assign_fresh(change);
  work.execute(change);
  if (change.counts.map_calls > 0) change.counts.map_seconds = seconds_since(start);
}

void Kind::undo(Change& change, const Error* error) {
  ops.rollback(change);
  if (error != nullptr) work.fail_if_sticky(*error);
}

void Kind::commit_pages(Change& change, bool has_forks) {
  for (const PageId page : change.held) pool.unhold(page);
  for (const BlockId block : change.matched) pool.drop_ref(block, 0);
  background.begin_copies(change);
  for (auto block = change.drops.rbegin(); block != change.drops.rend(); ++block) {
    pool.drop_ref(*block, books_.begun);
  }
  // A conversion shares pages with the old blocks until these are dropped. A fork makes what its
  // parent has sealed read-only, though the child may have dropped what is before its window.
  ledger.may_restore_access = ledger.may_restore_access || !change.drops.empty() || has_forks ||
                              change.counts.converted_to_virtual > 0;
  for (const SwapId swap : change.swap_drops) work.swap->drop(swap);
  for (const Change::SavedSlot& slot : change.slots) {
    if (!slots_[slot.slot].active()) ledger.park(slot.slot, books_.begun);
  }
}

std::int64_t Kind::note_growth(const Op& grow) {
  Held& own = held_[grow.seq];
  // An attached prefix or a fork may lack more.
  const std::int64_t trimmed = own.num_trimmed * config.block_tokens;
  own.first_needed = std::max({own.first_needed, grow.first_token, trimmed});
  return own.first_needed;
}

void Kind::commit_tables(const Change& change) {
  if (change.drops_past) ledger.drop_unseen();
  for (const SeqId id : change.touched) ledger.write_table(id, 0);
  MemoryCounters counts = change.counts;
  counts.pages_zeroed = static_cast<std::int64_t>(change.zero_pages.size());
  counts.pages_mapped = static_cast<std::int64_t>(change.maps.size());
  counts.unhidden_calls = counts.map_calls + counts.access_calls;
  counts.swapped_out_blocks = static_cast<std::int64_t>(change.swap_out.size());
  counts.swapped_in_blocks = static_cast<std::int64_t>(change.swap_in.size());
  ledger.totals.add(counts);
}

void Kind::release(SeqId id) {
  Held& own = held_[id];
  // Tail first, so that the tail of a prefix is evicted first.
  for (auto block = own.blocks.rbegin(); block != own.blocks.rend(); ++block) {
    if (*block == kNoBlock) continue;
    const PageId page = pool.page_of(*block);
    ledger.may_restore_access = ledger.may_restore_access || pool.refs(*block) > 1;
    pool.drop_ref(*block, books_.begun);
    if (pool.owner(page) == id) pool.set_owner(page, kNoSeq);
  }
  for (const SwapId swap : own.swap) {
    if (swap != kNoSwap) work.swap->drop(swap);
  }
  own = Held{};
  ledger.write_table(id, 0);
}

void Kind::park(SlotId slot) {
  ledger.park(slot, books_.begun);
  const bool is_over = slots_[slot].retire <= books_.completed && !slots_[slot].in_repair;
  if (!config.deferred_reclamation && is_over) work.truncate(slot, 0);
}

// Growth would drop them too late. Dropping at the end of each step helps to find prefixes of
// sequences of blocks, but not of slots. Slots drop pages when these are needed
// (docs/log/2026-11-24.md).
bool Kind::give_up_past(const std::vector<bool>& running, bool from_slots) {
  if (config.window == 0) return false;
  bool gave = false;
  for (SeqId id = 0; id < config.max_seqs; ++id) {
    const SeqState& kv = seqs_[id].kv;
    if (!seqs_[id].open || running[id] || kv.swapped) continue;
    if (kv.view == View::kVirtual && !from_slots) continue;
    if (!ledger.trim_front(id, config.first_seen(kv.length))) continue;
    ++books_.version;
    gave = true;
  }
  if (gave) background.restore_write_access();
  return gave;
}

bool Kind::will_give_up_past(const std::vector<bool>& running) const {
  for (SeqId id = 0; id < config.max_seqs && config.window > 0; ++id) {
    const Sequence& seq = seqs_[id];
    if (!running[id] || seq.kv.swapped) continue;
    const std::int64_t first = config.first_seen(seq.kv.length);
    if (held_[id].num_trimmed < ledger.num_past_blocks(seq, first)) return true;
  }
  return false;
}

void Kind::finish_pending_work() {
  background.drain_mapper();
  background.finish_copies();
  work.retry_repairs();
}

void Kind::release_swap_memory() {
  if (work.swap->num_used() > 0) return;
  const auto driving = work.lock();
  work.driver->fence();
  work.swap->release_memory();
}

void Kind::hold_found(const std::vector<Op>& attaches, std::vector<PageId>& held) {
  for (const Op& op : attaches) {
    background.persistence()->hold_cached(seqs_[op.seq], planner.first_block(op),
                                          op.num_tokens / config.block_tokens, held);
  }
}

void Kind::enable_shadow() {
  if (work.space->has_shadow()) return;
  background.drain_mapper();
  work.retry_repairs();
  work.space->reserve_shadow();
  std::vector<MapRun> runs;
  for (SlotId slot = 0; slot < config.num_slots; ++slot) {
    for (std::int64_t i = 0; i < slots_[slot].size(); ++i) {
      const PageId page = slots_[slot].entries[i].page;
      for (std::int32_t group = 0; page != kNoPage && group < config.num_groups; ++group) {
        runs.push_back({work.space->shadow(group, slot, i),
                        {work.space->frame(group, page), 1},
                        Access::kRead});
      }
    }
  }
  const auto driving = work.lock();
  try {
    work.driver->map(runs);
  } catch (...) {
    work.space->free_shadow();
    throw;
  }
}

std::uint64_t Kind::fingerprint() const {
  Mix mix;
  mix.add(ledger.fingerprint(), work.swap->num_used());
  for (SwapId id = 0; id < work.swap->capacity(); ++id) mix.add(work.swap->refs(id));
  return mix.value();
}

}  // namespace vmserve
