// Sequences, epochs and the public interface: planning and applying ops.
#include "vmserve/kv_memory.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "vmserve/memory/require.h"
#include "vmserve/text.h"

namespace vmserve {
namespace {

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
  require(config.state_bytes >= 0 && config.checkpoint_tokens >= 0 &&
              (!config.has_state() || (config.blocks_per_page == 1 && !config.null_page)),
          [&] {
            return std::string("a state is a page of one block, and no page is reserved for none");
          });
}

// Pages per extent if mappings are limited, else 1. An eighth of a slot's share of the pool, which
// may lie unused after each slot; at most 32, because more gains nothing.
std::int64_t extent_pages(const PageDriver& driver, const MemoryConfig& config) {
  constexpr std::int64_t kMost = 32;
  const std::int64_t share = config.limit_pages / config.num_slots / 8;
  std::int64_t pages = 1;
  while (2 * pages <= std::min(share, kMost)) pages *= 2;
  return driver.mapping_room() == kUnlimitedMappings ? 1 : pages;
}

MemoryConfig validated(const PageDriver& driver, MemoryConfig config) {
  check_sizes(config);
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

Ledger make_ledger(const PageDriver& driver, const MemoryConfig& config) {
  const MemoryConfig valid = validated(driver, config);
  return Ledger(valid, extent_pages(driver, valid), driver.capabilities().read_only);
}

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

KVMemory::KVMemory(std::shared_ptr<PageDriver> driver, const MemoryConfig& config)
    : pid_(::getpid()),
      ledger_(make_ledger(*driver, config)),
      work_(std::move(driver), ledger_),
      room_(ledger_, work_),
      ops_(ledger_, work_, room_),
      planner_(ledger_, work_, room_, ops_),
      background_(ledger_, work_) {
  if (config_.null_page) {
    room_.commit_pages(1);
    pool_.hold(0);  // for ever
  }
  const std::int64_t ready = std::min(config_.ready_pages, pool_.limit()) - pool_.num_free();
  if (ready <= 0) return;
  try {
    room_.create_pages(std::min(ready, pool_.limit() - pool_.num_committed()));
  } catch (const OutOfMemoryError& error) {
    work_.last_error = error.what();  // the device has less memory now than the limit promises
  }
}

KVMemory::~KVMemory() {
  if (::getpid() == pid_) {
    // Stops its threads before anything that they use is destroyed.
    if (background_.persistence() != nullptr) background_.persistence()->stop();
    return;
  }
  // A fork has no mapper thread: joining it would wait for ever.
  static_cast<void>(work_.mapper.release());
  background_.abandon_persistence();
}

std::unique_lock<std::mutex> KVMemory::enter() const {
  // NOTE: check before locking: in a fork, the lock may be held for ever by a thread of the parent.
  require(::getpid() == pid_, [&] {
    return "this KV memory belongs to process " + std::to_string(pid_) +
           " and was used in its fork " + std::to_string(::getpid()) +
           ": start worker processes with the spawn method";
  });
  std::unique_lock<std::mutex> lock(mutex_);
  require(work_.space != nullptr, [&] { return std::string("this KV memory is closed"); });
  return lock;
}

// -- sequences

std::optional<SeqId> KVMemory::open(Tenant tenant, View view, const std::string& salt,
                                    const std::vector<std::int32_t>& tokens) {
  const auto lock = enter();
  work_.require_alive();
  is_idle_ = false;
  if (ledger_.num_open == config_.max_seqs) return std::nullopt;
  SeqId id = 0;
  while (seqs_[id].open) ++id;
  Sequence fresh;
  fresh.open = true;
  fresh.generation = seqs_[id].generation + 1;
  fresh.tenant = tenant;
  fresh.kv.view = config_.has_state() ? View::kPaged : view;
  fresh.tokens = tokens;
  fresh.tokens_unknown = tokens.empty();
  const auto known = static_cast<std::int64_t>(tokens.size());
  fresh.last_checkpoint =
      std::max<std::int64_t>(0, known - 1) / config_.block_tokens * config_.block_tokens;
  fresh.root = prefix_root(tenant, generation_, salt);
  ledger_.extend_digests(fresh);
  seqs_[id] = std::move(fresh);
  ++ledger_.num_open;
  return id;
}

void KVMemory::append_tokens(const std::vector<SeqId>& seqs,
                             const std::vector<std::int32_t>& tokens) {
  const auto lock = enter();
  require(seqs.size() == tokens.size(),
          [&] { return std::string("append_tokens needs one token per sequence"); });
  for (const SeqId seq : seqs) ledger_.open_seq(seq);
  for (std::size_t i = 0; i < seqs.size(); ++i) {
    Sequence& seq = seqs_[seqs[i]];
    if (seq.tokens_unknown) continue;
    seq.tokens.push_back(tokens[i]);
    ledger_.extend_digests(seq);
  }
}

void KVMemory::keep(const std::vector<SeqId>& seqs, const std::vector<std::int64_t>& lengths) {
  const auto lock = enter();
  require(seqs.size() == lengths.size(),
          [&] { return std::string("keep needs one length per sequence"); });
  for (std::size_t i = 0; i < seqs.size(); ++i) {
    const Sequence& seq = ledger_.open_seq(seqs[i]);
    const std::int64_t blocks = seq.kv.view == View::kVirtual
                                    ? ledger_.pages_for(lengths[i]) * config_.blocks_per_page
                                    : ledger_.blocks_for(lengths[i]);
    require(!seq.kv.swapped && lengths[i] >= seq.kv.length &&
                blocks <= static_cast<std::int64_t>(seq.kv.blocks.size()),
            [&] {
              return "sequence " + std::to_string(seqs[i]) + " of " + with_commas(seq.kv.length) +
                     " tokens was not grown to " + with_commas(lengths[i]);
            });
  }
  background_.keep(seqs, lengths);
  ++ledger_.version;
}

std::int64_t KVMemory::match(SeqId id) const {
  const auto lock = enter();
  return ledger_.num_matched(ledger_.open_seq(id)) * config_.block_tokens;
}

std::vector<SeqId> KVMemory::open_seqs() const {
  const auto lock = enter();
  std::vector<SeqId> ids;
  for (SeqId id = 0; id < config_.max_seqs; ++id) {
    if (seqs_[id].open) ids.push_back(id);
  }
  return ids;
}

void KVMemory::release(SeqId id) {
  const auto lock = enter();
  Sequence& seq = ledger_.open_seq(id);
  if (!config_.deferred_reclamation && seq.kv.slot != kNoSlot) background_.drain_mapper();
  // Tail first, so that the tail of a prefix is evicted first.
  for (auto block = seq.kv.blocks.rbegin(); block != seq.kv.blocks.rend(); ++block) {
    if (*block == kNoBlock) continue;
    const PageId page = pool_.page_of(*block);
    ledger_.may_restore_access = ledger_.may_restore_access || pool_.refs(*block) > 1;
    pool_.drop_ref(*block, ledger_.begun);
    if (pool_.owner(page) == id) pool_.set_owner(page, kNoSeq);
  }
  for (const SwapId swap : seq.kv.swap) {
    if (swap != kNoSwap) work_.swap->drop(swap);
  }
  const SlotId slot = seq.kv.slot;
  const std::uint32_t generation = seq.generation;
  seq = Sequence{};
  seq.generation = generation;
  --ledger_.num_open;
  ++ledger_.version;
  ledger_.write_table(id, 0);
  if (slot != kNoSlot) {
    ledger_.park(slot, ledger_.begun);
    const bool is_over = slots_[slot].retire <= ledger_.completed && !slots_[slot].in_repair;
    if (!config_.deferred_reclamation && is_over) work_.truncate(slot, 0);
  }
  background_.restore_write_access();
  room_.try_give_back_excess();
}

// -- plans

Plan KVMemory::plan(const std::vector<Op>& ops) {
  const auto lock = enter();
  return assess(ops).plan;
}

const Assessed& KVMemory::assess(const std::vector<Op>& ops) {
  background_.apply_finished_work();
  // An empty plan must not invalidate an earlier one, and an attach relies on cached blocks that
  // were found.
  if (!ops.empty() && !Planner::has_attach(ops)) room_.try_give_back_excess();
  last_ops_ = ops;
  is_planned_ = true;
  merged_ops_ = planner_.merge_grows(ops);
  planner_.validate(merged_ops_);
  assessed_ = planner_.assess(merged_ops_);
  if (!assessed_.plan.fits() && assessed_.plan.lost_prefixes == 0 && is_holding_pages()) {
    // Wait for pages that the mapper or a repair holds.
    background_.drain_mapper();
    if (work_.failure.empty()) work_.retry_repairs();
    assessed_ = planner_.assess(merged_ops_);
  }
  return assessed_;
}

bool KVMemory::is_holding_pages() const {
  const Persistence* persistence = background_.persistence();
  return work_.has_mapper() || !work_.repairs.empty() ||
         (persistence != nullptr && persistence->is_restoring());
}

Epoch KVMemory::apply(const std::vector<Op>& ops, std::uint64_t version) {
  const auto lock = enter();
  const auto start = Clock::now();
  const Assessed now = assess_again(ops, version);
  Change change(ledger_, *work_.driver, now.packing != Packing::kNone, /*is_trial=*/false);
  try {
    stage(change, now);
    execute(change);
  } catch (const Error& error) {
    undo(change, &error);
    throw;
  } catch (...) {
    undo(change, nullptr);
    throw;
  }
  commit(change);
  ledger_.totals.map_seconds += change.counts.map_calls > 0 ? seconds_since(start) : 0;
  schedule_work(change);
  return ledger_.begun;
}

// Plans ops that are about to be applied. They are in merged_ops_ then. Throws unless they fit.
Assessed KVMemory::assess_again(const std::vector<Op>& ops, std::uint64_t version) {
  work_.require_alive();
  if (version != ledger_.version) refuse_stale();
  const bool is_planned = is_planned_ && assessed_.plan.version == version && last_ops_ == ops;
  if (!is_planned) merged_ops_ = planner_.merge_grows(ops);
  is_planned_ = false;  // a plan is applied once
  const std::vector<Op>& wanted = merged_ops_;
  planner_.validate(wanted);
  work_.retry_repairs();
  // Packing costs copies and cached blocks: check again whether it is needed.
  const bool holds = is_planned && assessed_.plan.fits() && assessed_.packing == Packing::kNone;
  Assessed now = holds ? assessed_ : planner_.assess(wanted);
  if (wait_for_mapper(wanted, now.plan)) now = planner_.assess(wanted);
  if (now.plan.needed_mappings > work_.mapping_room()) {
    background_.drain_mapper();  // replaces the mapper's upper bound by the mappings it made
    now = planner_.assess(wanted);
  }
  const Plan& plan = now.plan;
  if (plan.lost_prefixes > 0) refuse_stale();
  if (!plan.fits()) {
    throw OutOfMemoryError("the plan needs " + with_commas(plan.needed_pages) + " pages, " +
                           with_commas(plan.available_pages) + " can be had, and lacks " +
                           with_commas(plan.missing_slots) + " slots and " +
                           with_commas(plan.missing_swap_blocks) + " swap blocks; it needs " +
                           with_commas(plan.needed_mappings) + " memory mappings, " +
                           with_commas(plan.available_mappings) + " can be had");
  }
  return now;
}

void KVMemory::stage(Change& change, const Assessed& now) {
  room_.make_mapping_room(now.plan.needed_mappings);
  if (now.packing == Packing::kCompacted) room_.compact_all();
  ops_.stage(change, merged_ops_);
  work_.prepare(change);
}

void KVMemory::execute(Change& change) {
  ops_.assign_fresh(change);
  work_.execute(change);
}

void KVMemory::undo(Change& change, const Error* error) {
  ops_.rollback(change);
  if (error != nullptr) work_.fail_if_sticky(*error);
}

void KVMemory::schedule_work(const Change& change) {
  background_.schedule_work(change.grows);
  background_.restore_write_access();
  room_.try_give_back_excess();
  if (background_.persistence() != nullptr) background_.persistence()->write_behind();
}

// Waits for mapper commands that concern the ops; usually there are none. True if outcomes were
// applied, which may change what a plan needs.
bool KVMemory::wait_for_mapper(const std::vector<Op>& ops, const Plan& plan) {
  if (!work_.has_mapper()) return false;
  std::uint64_t until = 0;
  const std::int64_t at_hand = pool_.num_free();
  if (plan.needed_pages > at_hand) until = work_.mapper->last_id();
  for (const Op& op : ops) {
    const Sequence& seq = seqs_[op.seq];
    if (op.kind != OpKind::kGrow && op.kind != OpKind::kAttach) {
      until = work_.mapper->last_id();
    } else if (op.kind == OpKind::kAttach ||
               (seq.kv.view == View::kVirtual &&
                ledger_.pages_for(op.num_tokens) > ledger_.num_pages(seq))) {
      const bool has_slot = seq.kv.slot != kNoSlot;
      // Growth need not wait for kSeal commands on earlier pages. A new sequence waits only for
      // those of the slot that it takes.
      until = std::max(until, has_slot ? slots_[seq.kv.slot].last_map : work_.last_mapping);
    }
  }
  if (until == 0) return false;
  const auto start = Clock::now();
  if (work_.mapper->wait(until)) {
    ++ledger_.totals.mapper_waits;
    ledger_.totals.mapper_wait_seconds += seconds_since(start);
  }
  background_.apply_finished_work();
  return true;
}

void KVMemory::commit(Change& change) {
  ++ledger_.begun;
  ++ledger_.version;
  for (const PageId page : change.held) pool_.unhold(page);
  for (const BlockId block : change.matched) pool_.drop_ref(block, 0);
  background_.begin_copies(change);
  for (auto block = change.drops.rbegin(); block != change.drops.rend(); ++block) {
    pool_.drop_ref(*block, ledger_.begun);
  }
  // A conversion shares pages with the old blocks until these are dropped. A fork makes what its
  // parent has sealed read-only, though the child may have dropped what is before its window.
  ledger_.may_restore_access = ledger_.may_restore_access || !change.drops.empty() ||
                               !change.forked.empty() || change.counts.converted_to_virtual > 0;
  for (const SwapId swap : change.swap_drops) work_.swap->drop(swap);
  for (const Change::SavedSlot& slot : change.slots) {
    if (!slots_[slot.slot].active()) ledger_.park(slot.slot, ledger_.begun);
  }
  EpochRecord record{ledger_.begun, {}};
  bool drops_past = false;
  record.written.reserve(change.grows.size());
  for (const Op& op : change.grows) {
    Sequence& seq = seqs_[op.seq];
    const std::int64_t before = seq.kv.length;
    seq.kv.length = std::max(before, op.kept_tokens());
    // An attached prefix or a fork may lack more.
    const std::int64_t trimmed = seq.kv.num_trimmed * config_.block_tokens;
    seq.kv.first_needed = std::max({seq.kv.first_needed, op.first_token, trimmed});
    record.written.push_back({op.seq, seq.generation, before, seq.kv.length, seq.kv.first_needed});
    drops_past = drops_past || op.first_token > 0;
  }
  ledger_.records.push_back(std::move(record));
  for (const Forked& fork : change.forked) ledger_.inherit_prefix(fork);
  if (drops_past) ledger_.drop_unseen();
  for (const SeqId id : change.touched) ledger_.write_table(id, 0);
  MemoryCounters& counts = change.counts;
  counts.pages_zeroed = static_cast<std::int64_t>(change.zero_pages.size());
  counts.pages_mapped = static_cast<std::int64_t>(change.maps.size());
  counts.unhidden_calls = counts.map_calls + counts.access_calls;
  counts.forks = static_cast<std::int64_t>(change.forked.size());
  counts.swapped_out_blocks = static_cast<std::int64_t>(change.swap_out.size());
  counts.swapped_in_blocks = static_cast<std::int64_t>(change.swap_in.size());
  ledger_.totals.add(counts);
}

// -- epochs

Epoch KVMemory::begun_epoch() const {
  const auto lock = enter();
  return ledger_.begun;
}

Epoch KVMemory::completed_epoch() const {
  const auto lock = enter();
  return ledger_.completed;
}

void KVMemory::complete(Epoch epoch) {
  const auto lock = enter();
  require(epoch <= ledger_.begun,
          [&] { return "epoch " + std::to_string(epoch) + " has not begun"; });
  background_.complete(epoch, /*sealed=*/true);
  background_.apply_finished_work();
}

void KVMemory::abandon_epoch(Epoch epoch) {
  const auto lock = enter();
  require(epoch <= ledger_.begun,
          [&] { return "epoch " + std::to_string(epoch) + " has not begun"; });
  background_.complete(epoch, /*sealed=*/false);
}

bool KVMemory::is_copying() {
  const auto lock = enter();
  background_.apply_finished_work();
  return !background_.copies_in_flight().empty();
}

bool KVMemory::finish_copies() {
  const auto lock = enter();
  return background_.finish_copies();
}

void KVMemory::launched(Epoch epoch) {
  const auto lock = enter();
  require(epoch <= ledger_.begun,
          [&] { return "epoch " + std::to_string(epoch) + " has not begun"; });
  work_.require_alive();
  const auto driving = work_.lock();
  background_.record_mark(epoch);
}

void KVMemory::clear_cache() {
  const auto lock = enter();
  Persistence* const persistence = background_.persistence();
  generation_ = persistence == nullptr ? generation_ + 1 : persistence->begin_generation();
  pool_.clear_index();
  for (Sequence& seq : seqs_) {
    // Blocks that were computed before are never published.
    seq.digests.clear();
    seq.tokens_unknown = true;
  }
  ++ledger_.version;
  ledger_.may_restore_access = true;
  background_.restore_write_access();
}

// -- the pool

void KVMemory::finish_pending_work() {
  background_.drain_mapper();
  background_.finish_copies();
  work_.retry_repairs();
}

std::int64_t KVMemory::trim(std::int64_t keep_pages, bool drop_idle_too) {
  const auto lock = enter();
  require(keep_pages >= 0, [&] { return std::string("keep_pages must not be negative"); });
  work_.require_alive();
  finish_pending_work();
  if (drop_idle_too) room_.evict_idle(keep_pages);
  if (work_.swap->num_used() == 0) {
    const auto driving = work_.lock();
    work_.driver->fence();
    work_.swap->release_memory();
  }
  const std::int64_t idle = drop_idle_too ? pool_.count(PageState::kIdle) : 0;
  return room_.give_back(
      std::min(pool_.num_free(), std::max<std::int64_t>(0, pool_.num_free() + idle - keep_pages)));
}

void KVMemory::set_limit(std::int64_t limit_pages) {
  const auto lock = enter();
  require(limit_pages > 0 && limit_pages <= config_.max_pages, [&] {
    return "the limit of " + with_commas(limit_pages) + " pages must lie between 1 and " +
           with_commas(config_.max_pages);
  });
  work_.require_alive();
  finish_pending_work();
  pool_.set_limit(limit_pages);
  ++ledger_.version;
  room_.give_back_excess();
}

std::int64_t KVMemory::compact() {
  const auto lock = enter();
  work_.require_alive();
  background_.drain_mapper();
  work_.retry_repairs();
  std::int64_t emptied = 0;
  for (auto& [tenant, pages] : ledger_.compactable_pages())
    emptied += room_.compact(std::move(pages));
  room_.try_give_back_excess();
  return emptied;
}

std::int64_t KVMemory::run_mapper(std::int64_t max_commands) {
  const auto lock = enter();
  const std::int64_t count = work_.mapper->run(max_commands);
  background_.apply_finished_work();
  return count;
}

void KVMemory::settle_mapper() {
  const auto lock = enter();
  background_.drain_mapper(/*is_waited_for=*/false);
}

void KVMemory::enable_shadow() {
  const auto lock = enter();
  if (work_.space->has_shadow()) return;
  work_.require_alive();
  background_.drain_mapper();
  work_.retry_repairs();
  work_.space->reserve_shadow();
  std::vector<MapRun> runs;
  for (SlotId slot = 0; slot < config_.num_slots; ++slot) {
    for (std::int64_t i = 0; i < slots_[slot].size(); ++i) {
      const PageId page = slots_[slot].entries[i].page;
      for (std::int32_t group = 0; page != kNoPage && group < config_.num_groups; ++group) {
        runs.push_back({work_.space->shadow(group, slot, i),
                        {work_.space->frame(group, page), 1},
                        Access::kRead});
      }
    }
  }
  const auto driving = work_.lock();
  try {
    work_.driver->map(runs);
  } catch (...) {
    work_.space->free_shadow();
    throw;
  }
}

// -- reading

std::vector<BlockId> KVMemory::blocks(SeqId seq) const {
  const auto lock = enter();
  return ledger_.open_seq(seq).kv.blocks;
}

std::vector<PageId> KVMemory::slot_pages(SlotId slot) const {
  const auto lock = enter();
  require(slot >= 0 && slot < config_.num_slots, [&] {
    return "slot " + std::to_string(slot) + " is outside 0 .. " +
           std::to_string(config_.num_slots - 1);
  });
  std::vector<PageId> pages;
  for (const SlotEntry& entry : slots_[slot].entries) pages.push_back(entry.page);
  return pages;
}

std::int64_t KVMemory::length(SeqId seq) const {
  const auto lock = enter();
  return ledger_.open_seq(seq).kv.length;
}

std::int64_t KVMemory::sealed(SeqId seq) const {
  const auto lock = enter();
  return ledger_.open_seq(seq).kv.sealed;
}

View KVMemory::view(SeqId seq) const {
  const auto lock = enter();
  return ledger_.open_seq(seq).kv.view;
}

bool KVMemory::swapped(SeqId seq) const {
  const auto lock = enter();
  return ledger_.open_seq(seq).kv.swapped;
}

std::optional<SlotId> KVMemory::slot(SeqId seq) const {
  const auto lock = enter();
  const SlotId slot = ledger_.open_seq(seq).kv.slot;
  return slot == kNoSlot ? std::nullopt : std::optional<SlotId>(slot);
}

std::vector<SlotId> KVMemory::slots(const std::vector<SeqId>& seqs) const {
  const auto lock = enter();
  std::vector<SlotId> slots;
  slots.reserve(seqs.size());
  for (const SeqId seq : seqs) slots.push_back(ledger_.open_seq(seq).kv.slot);
  return slots;
}

std::int32_t KVMemory::block_refs(BlockId block) const {
  const auto lock = enter();
  require(block >= 0 && block < pool_.max_pages() * config_.blocks_per_page,
          [&] { return "block " + std::to_string(block) + " does not exist"; });
  return pool_.refs(block);
}

std::string KVMemory::last_error() const {
  const auto lock = enter();
  return work_.last_error;
}

void KVMemory::require_usable() const {
  enter();
}

void KVMemory::close() {
  if (::getpid() != pid_) return;  // the parent closes it
  if (background_.persistence() != nullptr) background_.persistence()->stop();
  const std::lock_guard<std::mutex> lock(mutex_);
  background_.end_persistence();
  work_.mapper.reset();
  work_.swap.reset();
  work_.space.reset();
}

bool KVMemory::closed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return work_.space == nullptr;
}

std::shared_ptr<AddressSpace> KVMemory::address_space() const {
  const auto lock = enter();
  return work_.space;
}

}  // namespace vmserve
