#include "vmserve/kinds_memory.h"

#include <algorithm>
#include <limits>
#include <tuple>

#include "vmserve/errors.h"
#include "vmserve/memory/require.h"
#include "vmserve/mix.h"
#include "vmserve/text.h"

namespace vmserve {
namespace {

void require_alike(const KindConfig& kind, const KindConfig& first) {
  const MemoryConfig &a = kind.memory, &b = first.memory;
  require(kind.window >= 0 && first.window == 0, [] {
    return std::string("the first kind has no window, others none or a positive one");
  });
  require(!b.has_state() && (!a.has_state() || kind.window == 0),
          [] { return std::string("a state has no window, and is not the first kind"); });
  require(a.block_tokens == b.block_tokens &&
              (a.has_state() ||
               (a.blocks_per_page == b.blocks_per_page && a.null_page == b.null_page)) &&
              a.max_seqs == b.max_seqs && a.num_slots == b.num_slots && a.max_len == b.max_len &&
              a.read_slack == b.read_slack && a.prefix_caching == b.prefix_caching,
          [] {
            return std::string(
                "kinds must have equal pages in tokens, slots, sequences, lengths and caching");
          });
}

}  // namespace

KindsMemory::KindsMemory(const std::vector<KindConfig>& kinds, std::int64_t limit_pages) {
  require(!kinds.empty(), [] { return std::string("a memory has at least one kind of layers"); });
  for (const KindConfig& kind : kinds) {
    require_alike(kind, kinds.front());
    kinds_.push_back(std::make_unique<KVMemory>(kind.driver, kind.memory));
    kinds_.back()->pool_.keep_found();
    windows_.push_back(kind.memory.has_state() ? kWindowOfState : kind.window);
  }
  limit_bytes_ = limit_pages * whole_page_bytes();
  const auto locks = enter();
  require(limit_pages > 0 && uncommitted_bytes() >= 0,
          [] { return std::string("the limit must hold the pages that are made at the start"); });
  share_limit();
}

// One call at a time. NOTE: in a fork of the process the lock may be held for ever: check first.
std::unique_lock<std::mutex> KindsMemory::lock_calls() const {
  require_usable();
  return std::unique_lock<std::mutex>(mutex_);
}

KindsMemory::Locks KindsMemory::enter() const {
  Locks locks;
  for (const auto& kind : kinds_) locks.push_back(kind->enter());
  return locks;
}

// -- the limit

std::int64_t KindsMemory::page_bytes(const KVMemory& kind) const {
  return kind.config_.num_groups * static_cast<std::int64_t>(kind.work_.space->page_bytes());
}

std::int64_t KindsMemory::whole_page_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& kind : kinds_) bytes += kind->config_.has_state() ? 0 : page_bytes(*kind);
  return bytes;
}

std::int64_t KindsMemory::uncommitted_bytes() const {
  std::int64_t bytes = limit_bytes_;
  for (const auto& kind : kinds_) bytes -= kind->pool_.num_committed() * page_bytes(*kind);
  return bytes;
}

std::int64_t KindsMemory::free_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& kind : kinds_) bytes += kind->pool_.num_free() * page_bytes(*kind);
  return bytes;
}

std::int64_t KindsMemory::reclaimable_bytes() const {
  std::int64_t bytes = free_bytes();
  for (const auto& kind : kinds_) {
    bytes += kind->pool_.count(PageState::kIdle) * page_bytes(*kind);
  }
  return bytes;
}

void KindsMemory::allow(KVMemory& kind, std::int64_t bytes) const {
  const std::int64_t more = std::max<std::int64_t>(0, bytes) / page_bytes(kind);
  kind.pool_.set_limit(std::min(kind.pool_.num_committed() + more, kind.config_.max_pages));
}

void KindsMemory::share_limit() {
  for (const auto& kind : kinds_) allow(*kind, uncommitted_bytes());
}

// Evicts the page that was used least recently. One without cached blocks goes first, those that
// their pool keeps last; of equally old ones, that of the kind with the largest pages.
bool KindsMemory::evict_oldest() {
  using Age = std::tuple<bool, bool, Epoch, std::int64_t>;
  std::vector<std::pair<Age, KVMemory*>> oldest;
  for (const auto& kind : kinds_) {
    const PageId page = kind->pool_.oldest_idle();
    if (page == kNoPage) continue;
    const Age age{kind->pool_.cached(page) > 0, kind->pool_.is_kept(page), kind->pool_.retire(page),
                  -page_bytes(*kind)};
    oldest.emplace_back(age, kind.get());
  }
  std::sort(oldest.begin(), oldest.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  return std::any_of(oldest.begin(), oldest.end(),
                     [](const auto& candidate) { return candidate.second->room_.evict_oldest(); });
}

void KindsMemory::return_free(std::int64_t bytes, const std::vector<std::int64_t>& needed) {
  for (std::size_t k = 0; k < kinds_.size() && bytes > 0; ++k) {
    const std::int64_t size = page_bytes(*kinds_[k]);
    const std::int64_t spare = kinds_[k]->pool_.num_free() - needed[k];
    if (spare > 0)
      bytes -= kinds_[k]->room_.give_back(std::min(spare, round_up_div(bytes, size))) * size;
  }
}

void KindsMemory::gather(const std::vector<std::int64_t>& needed) {
  // Above a lowered limit, sequences may leave nothing to give back. A caller that needs no page
  // goes on all the same.
  bool is_short = false;
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    is_short = is_short || needed[k] > kinds_[k]->pool_.num_free();
  }
  if (!is_short) return;
  // Bytes that must be returned, and those that kinds have free beyond what they need.
  const auto missing = [&] {
    std::pair<std::int64_t, std::int64_t> bytes{-uncommitted_bytes(), 0};
    for (std::size_t k = 0; k < kinds_.size(); ++k) {
      const std::int64_t spare = kinds_[k]->pool_.num_free() - needed[k];
      (spare < 0 ? bytes.first : bytes.second) += std::abs(spare) * page_bytes(*kinds_[k]);
    }
    return bytes;
  };
  for (auto bytes = missing(); bytes.first > bytes.second; bytes = missing()) {
    if (!evict_oldest()) break;
  }
  return_free(missing().first, needed);
  const std::int64_t left = missing().first;
  if (left <= 0) return;
  throw OutOfMemoryError("needs " + with_commas(left) + " bytes that other kinds of layers hold" +
                         (last_error_text().empty() ? "" : " (" + last_error_text() + ")"));
}

void KindsMemory::give_back_excess() {
  const std::int64_t excess = -uncommitted_bytes();
  if (excess <= 0) return;
  while (free_bytes() < excess && evict_oldest()) {
  }
  return_free(excess, std::vector<std::int64_t>(kinds_.size()));
}

void KindsMemory::try_give_back_excess() {
  const bool has_failed = std::any_of(
      kinds_.begin(), kinds_.end(), [](const auto& kind) { return !kind->work_.failure.empty(); });
  if (has_failed) return;
  try {
    give_back_excess();
  } catch (const Error& error) {
    kinds_[0]->work_.last_error = error.what();
  }
}

// -- sequences

std::optional<SeqId> KindsMemory::open(Tenant tenant, View view, const std::string& salt,
                                       const std::vector<std::int32_t>& tokens) {
  const auto lock = lock_calls();
  std::optional<SeqId> id;
  for (const auto& kind : kinds_) id = kind->open(tenant, view, salt, tokens);
  return id;
}

std::int64_t KindsMemory::match(SeqId id) const {
  const auto lock = lock_calls();
  const auto locks = enter();
  return num_matched(id, /*stored=*/false) * kinds_[0]->config_.block_tokens;
}

std::int64_t KindsMemory::num_matched(SeqId id, bool stored) const {
  const auto of_kind = [&](std::size_t k, std::int64_t most) {
    const KVMemory& kind = *kinds_[k];
    const Sequence& seq = kind.ledger_.open_seq(id);
    return stored ? kind.num_within_reach(seq, most, windows_[k])
                  : kind.ledger_.num_matched(seq, most, windows_[k]);
  };
  const Ledger& first = kinds_[0]->ledger_;
  std::int64_t matched = first.num_matchable(first.open_seq(id)), before = -1;
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    if (windows_[k] == 0) matched = of_kind(k, matched);
  }
  while (matched != before) {
    before = matched;
    for (std::size_t k = 0; k < kinds_.size(); ++k) {
      if (windows_[k] > 0) matched = of_kind(k, matched);
    }
  }
  return matched;
}

void KindsMemory::keep(const std::vector<SeqId>& seqs, const std::vector<std::int64_t>& lengths) {
  const auto lock = lock_calls();
  for (const auto& kind : kinds_) kind->keep(seqs, lengths);  // the first refuses, or none
}

void KindsMemory::append_tokens(const std::vector<SeqId>& seqs,
                                const std::vector<std::int32_t>& tokens) {
  const auto lock = lock_calls();
  for (const auto& kind : kinds_) kind->append_tokens(seqs, tokens);
}

void KindsMemory::release(SeqId seq) {
  const auto lock = lock_calls();
  for (const auto& kind : kinds_) kind->release(seq);
  const auto locks = enter();
  try_give_back_excess();
}

// -- plans

std::vector<Op> KindsMemory::ops_of(std::size_t k, const std::vector<Op>& ops) const {
  std::vector<Op> own = ops;
  if (windows_[k] == 0) return own;
  for (Op& op : own) {
    // The first position that the next query sees.
    const bool attaches = op.kind == OpKind::kAttach;
    if (!attaches && op.kind != OpKind::kGrow) continue;
    const std::int64_t next =
        attaches ? op.num_tokens : kinds_[k]->ledger_.open_seq(op.seq).kv.length;
    op.first_token = std::max({op.first_token, std::int64_t{0}, next + 1 - windows_[k]});
  }
  return own;
}

std::uint64_t KindsMemory::state_version() const {
  std::uint64_t version = 0;
  for (const auto& kind : kinds_) version += kind->ledger_.version;
  return version;
}

Plan KindsMemory::sum_up(const std::vector<Plan>& plans) const {
  Plan sum;
  std::int64_t needed = 0, waiting = 0;
  const std::int64_t available = uncommitted_bytes() + reclaimable_bytes();
  std::int64_t room = kUnlimitedMappings;
  for (std::size_t k = 0; k < plans.size(); ++k) {
    const KVMemory& kind = *kinds_[k];
    const std::int64_t size = page_bytes(kind);
    // Pages that a kind's own ops give up are for that kind only.
    const std::int64_t own = plans[k].available_pages - kind.pool_.num_available();
    needed +=
        std::max<std::int64_t>(0, plans[k].needed_pages - std::max<std::int64_t>(0, own)) * size;
    waiting += plans[k].waiting_pages * size;
    sum.missing_slots = std::max(sum.missing_slots, plans[k].missing_slots);
    sum.missing_swap_blocks = std::max(sum.missing_swap_blocks, plans[k].missing_swap_blocks);
    sum.lost_prefixes = std::max(sum.lost_prefixes, plans[k].lost_prefixes);
    sum.needed_mappings += plans[k].needed_mappings;
    room = std::min(room, kind.work_.mapping_room());
  }
  sum.available_mappings = room;
  for (const auto& kind : kinds_) {
    if (room >= sum.needed_mappings) break;
    sum.available_mappings += std::max<std::int64_t>(
        0, kind->work_.available_mappings(kUnlimitedMappings) - kind->work_.mapping_room());
  }
  sum.available_mappings = std::max<std::int64_t>(0, sum.available_mappings);
  const std::int64_t whole = whole_page_bytes();
  sum.excess_pages = round_up_div(std::max<std::int64_t>(0, -available), whole);
  sum.available_pages = std::max<std::int64_t>(0, available) / whole;
  sum.waiting_pages = round_up_div(waiting, whole);
  const std::int64_t rounded = round_up_div(needed, whole);
  sum.needed_pages = needed <= std::max<std::int64_t>(0, available)
                         ? std::min(rounded, sum.available_pages)
                         : std::max(rounded, sum.available_pages + 1);
  sum.version = state_version();
  return sum;
}

// Lets each kind have all that remains if the others keep only what sequences use.
void KindsMemory::allow_all() const {
  const std::int64_t available = uncommitted_bytes() + reclaimable_bytes();
  for (const auto& kind : kinds_) {
    const BlockPool& pool = kind->pool_;
    const std::int64_t own = pool.num_free() + pool.count(PageState::kIdle);
    allow(*kind, available - own * page_bytes(*kind));
  }
}

std::vector<Plan> KindsMemory::assess(const std::vector<Op>& ops, bool packs) {
  last_ops_ = ops;
  is_planned_ = true;
  slots_.clear();
  allow_all();
  std::vector<Plan> plans;
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    kinds_[k]->ops_.given_slots = slots_;
    kinds_[k]->planner_.packs_always = packs;
    const Assessed& assessed = kinds_[k]->assess(ops_of(k, ops));
    if (k == 0) slots_ = assessed.taken_slots;
    plans.push_back(assessed.plan);
  }
  return plans;
}

// Waits for pages that mappers or repairs hold; false if there is neither.
bool KindsMemory::finish_background() {
  bool has_waited = false;
  for (const auto& kind : kinds_) {
    if (!kind->is_holding_pages()) continue;
    has_waited = true;
    kind->background_.drain_mapper();
    if (kind->work_.failure.empty()) kind->work_.retry_repairs();
  }
  return has_waited;
}

Plan KindsMemory::plan(const std::vector<Op>& ops) {
  const auto lock = lock_calls();
  const auto locks = enter();
  apply_reached_marks();
  for (const auto& kind : kinds_) kind->background_.apply_finished_work();
  if (!ops.empty()) {
    if (!Planner::has_attach(ops)) try_give_back_excess();
    Plan plan = sum_up(assess(ops));
    if (plan.lost_prefixes > 0) return plan;
    // A kind waits for its mapper, and packs blocks, only if the ops do not fit in it alone.
    if (!plan.fits() && finish_background()) plan = sum_up(assess(ops));
    if (!plan.fits() && give_up_past(/*from_slots=*/true)) plan = sum_up(assess(ops));
    if (!plan.fits()) plan = sum_up(assess(ops, /*packs=*/true));
    if (!plan.fits() && will_give_up_past()) ++plan.waiting_pages;
    return plan;
  }
  // Leaves an earlier plan valid.
  allow_all();
  std::vector<Plan> plans;
  for (const auto& kind : kinds_) {
    Plan none;
    none.available_pages = kind->pool_.num_available();
    none.waiting_pages = kind->pool_.count(PageState::kWaiting);
    plans.push_back(none);
  }
  return sum_up(plans);
}

Epoch KindsMemory::apply(const std::vector<Op>& ops, std::uint64_t version) {
  const auto lock = lock_calls();
  const auto locks = enter();
  if (version != state_version()) refuse_stale();
  if (!is_planned_ || last_ops_ != ops) assess(ops);
  allow_all();
  std::vector<Assessed> now;
  std::vector<Plan> plans;
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    kinds_[k]->ops_.given_slots = slots_;
    now.push_back(kinds_[k]->assess_again(ops_of(k, ops), kinds_[k]->ledger_.version));
    plans.push_back(now[k].plan);
  }
  is_planned_ = false;  // a plan is applied once
  const Plan plan = sum_up(plans);
  if (!plan.fits()) {
    throw OutOfMemoryError("the plan needs " + with_commas(plan.needed_pages) + " pages and " +
                           with_commas(plan.needed_mappings) + " memory mappings, " +
                           with_commas(plan.available_pages) + " and " +
                           with_commas(plan.available_mappings) + " can be had");
  }
  std::vector<std::unique_ptr<Change>> changes;
  stage_and_execute(now, plan.needed_mappings, changes);
  for (std::size_t k = 0; k < kinds_.size(); ++k) kinds_[k]->commit(*changes[k]);
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    kinds_[k]->ops_.given_slots.clear();
    allow(*kinds_[k], uncommitted_bytes());
    kinds_[k]->schedule_work(*changes[k]);
  }
  try_give_back_excess();
  return kinds_[0]->ledger_.begun;
}

// All kinds' changes, with their driver calls, or none.
void KindsMemory::stage_and_execute(const std::vector<Assessed>& now, std::int64_t needed_mappings,
                                    std::vector<std::unique_ptr<Change>>& changes) {
  std::vector<std::int64_t> needed;
  std::size_t at = 0;
  const auto undo = [&](const Error* error) {
    for (std::size_t k = changes.size(); k-- > 0;) {
      kinds_[k]->undo(*changes[k], k == at ? error : nullptr);
    }
  };
  try {
    make_mapping_room(needed_mappings);
    for (at = 0; at < kinds_.size(); ++at) {
      KVMemory& kind = *kinds_[at];
      changes.push_back(std::make_unique<Change>(kind.ledger_, *kind.work_.driver,
                                                 now[at].packing != Packing::kNone,
                                                 /*is_trial=*/false));
      kind.stage(*changes.back(), now[at]);
      needed.push_back(kind.ops_.pages_for_fresh(*changes.back()));
    }
    gather(needed);
    for (at = 0; at < kinds_.size(); ++at) {
      std::int64_t bytes = uncommitted_bytes();
      for (std::size_t j = at + 1; j < kinds_.size(); ++j) {
        const std::int64_t more = needed[j] - kinds_[j]->pool_.num_free();
        bytes -= std::max<std::int64_t>(0, more) * page_bytes(*kinds_[j]);
      }
      allow(*kinds_[at], bytes);
      kinds_[at]->execute(*changes[at]);
    }
  } catch (const Error& error) {
    undo(&error);
    throw;
  } catch (...) {
    undo(nullptr);
    throw;
  }
}

// Unmaps parked slots of all kinds, oldest first in each, until the mappings are possible.
void KindsMemory::make_mapping_room(std::int64_t needed) {
  for (const auto& kind : kinds_) {
    while (kind->work_.mapping_room() < needed) {
      const SlotId oldest = kind->ledger_.oldest_parked();
      if (oldest == kNoSlot) break;
      kind->work_.truncate(oldest, 0);
    }
  }
}

// -- the pool

std::int64_t KindsMemory::trim(std::int64_t keep_pages, bool drop_idle) {
  const auto lock = lock_calls();
  require(keep_pages >= 0, [] { return std::string("keep_pages must not be negative"); });
  std::vector<std::int64_t> keep;
  {
    const auto locks = enter();
    for (const auto& kind : kinds_) kind->finish_pending_work();
    const std::int64_t total = drop_idle ? reclaimable_bytes() : free_bytes();
    std::int64_t bytes = total - keep_pages * whole_page_bytes();
    while (drop_idle && free_bytes() < bytes && evict_oldest()) {
    }
    for (const auto& kind : kinds_) {
      const std::int64_t size = page_bytes(*kind);
      const std::int64_t count =
          std::clamp<std::int64_t>(round_up_div(bytes, size), 0, kind->pool_.num_free());
      keep.push_back(kind->pool_.num_free() - count);
      bytes -= count * size;
    }
  }
  std::int64_t returned = 0;
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    returned += kinds_[k]->trim(keep[k], false) * page_bytes(*kinds_[k]);
  }
  return returned / whole_page_bytes();
}

void KindsMemory::set_limit(std::int64_t limit_pages) {
  const auto lock = lock_calls();
  const auto locks = enter();
  const std::int64_t most = kinds_[0]->config_.max_pages;
  require(limit_pages > 0 && limit_pages <= most, [&] {
    return "the limit of " + with_commas(limit_pages) + " pages must lie between 1 and " +
           with_commas(most);
  });
  for (const auto& kind : kinds_) {
    kind->work_.require_alive();
    kind->finish_pending_work();
    ++kind->ledger_.version;
  }
  limit_bytes_ = limit_pages * whole_page_bytes();
  give_back_excess();
  share_limit();
}

void KindsMemory::settle_mapper() {
  const auto lock = lock_calls();
  for (const auto& kind : kinds_) kind->settle_mapper();
}

// -- reading

namespace {

// Adds up gauges of kinds by the rules of stats.def: `add` for each kind, `end` after the last.
struct OF_FIRST {
  static void add(std::int64_t& sum, std::int64_t own, const MemoryStats&, bool is_first) {
    if (is_first) sum = own;
  }
  static void end(std::int64_t&, std::int64_t, const MemoryStats&) {}
};
struct SUM {
  template <typename Number>
  static void add(Number& sum, Number own, const MemoryStats&, bool) {
    sum += own;
  }
  template <typename Number>
  static void end(Number&, std::int64_t, const MemoryStats&) {}
};
struct LEAST {
  static void add(std::int64_t& sum, std::int64_t own, const MemoryStats&, bool is_first) {
    sum = is_first ? own : std::min(sum, own);
  }
  static void end(std::int64_t&, std::int64_t, const MemoryStats&) {}
};
struct WHOLE_PAGES {
  static void add(std::int64_t& sum, std::int64_t own, const MemoryStats& of, bool) {
    sum += own * of.page_bytes;
  }
  static void end(std::int64_t& sum, std::int64_t whole, const MemoryStats&) { sum /= whole; }
};
struct WHOLE_BLOCKS {
  static void add(std::int64_t& sum, std::int64_t own, const MemoryStats& of, bool) {
    sum += own * (of.page_bytes / of.blocks_per_page);
  }
  static void end(std::int64_t& sum, std::int64_t whole, const MemoryStats& first) {
    sum /= whole / first.blocks_per_page;
  }
};

}  // namespace

MemoryStats KindsMemory::stats() {
  const auto lock = lock_calls();
  MemoryStats sum, first;
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    const MemoryStats own = kinds_[k]->stats();
    if (k == 0) first = own;
    sum.health = std::max(sum.health, own.health);
#define VMSERVE_GAUGE(type, name, rule, what) rule::add(sum.name, own.name, own, k == 0);
#define VMSERVE_COUNTER(type, name, what) sum.name##_total += own.name##_total;
#include "vmserve/stats.def"
  }
  const std::int64_t whole = whole_page_bytes();
#define VMSERVE_GAUGE(type, name, rule, what) rule::end(sum.name, whole, first);
#include "vmserve/stats.def"
  // Each kind counts these for the same sequences.
  sum.forks_total = first.forks_total;
  sum.converted_to_virtual_total = first.converted_to_virtual_total;
  sum.converted_to_paged_total = first.converted_to_paged_total;
  sum.prefix_query_blocks_total = first.prefix_query_blocks_total;
  sum.prefix_hit_blocks_total = first.prefix_hit_blocks_total;
  sum.adopted_slots_total = first.adopted_slots_total;
  sum.persist_evicted_blocks_total = first.persist_evicted_blocks_total;  // one limit for all
  sum.page_bytes = whole;
  sum.limit_pages = limit_bytes_ / whole;
  return sum;
}

MemoryMap KindsMemory::memory_map(std::int64_t max_cells) {
  require(max_cells >= 1, [] { return std::string("a memory map has at least one cell"); });
  const auto lock = lock_calls();
  std::int64_t absent = 0, total = 0;
  {
    const auto locks = enter();
    absent = std::max<std::int64_t>(0, uncommitted_bytes()) / page_bytes(*kinds_[0]);
    for (const auto& kind : kinds_) total += kind->num_pages_shown();
  }
  total += absent;
  const std::int64_t width = std::max<std::int64_t>(1, round_up_div(total, max_cells));
  MemoryMap sum;
  for (const auto& kind : kinds_) {
    MemoryMap own = kind->committed_map(width);
    if (sum.slots.empty()) sum.slots = std::move(own.slots);
    sum.num_pages += own.num_pages;
    sum.cells.insert(sum.cells.end(), own.cells.begin(), own.cells.end());
    sum.counts.resize(kNumPageCodes);
    for (std::size_t code = 0; code < kNumPageCodes; ++code) sum.counts[code] += own.counts[code];
  }
  sum.num_pages += absent;
  sum.pages_per_cell = width;
  sum.counts[static_cast<int>(PageUse::kAbsent)] += absent;
  sum.cells.insert(sum.cells.end(), static_cast<std::size_t>(round_up_div(absent, width)),
                   static_cast<std::uint8_t>(PageUse::kAbsent));
  return sum;
}

std::string KindsMemory::last_error_text() const {
  for (const auto& kind : kinds_) {
    if (!kind->work_.last_error.empty()) return kind->work_.last_error;
  }
  return "";
}

std::string KindsMemory::last_error() const {
  const auto lock = lock_calls();
  const auto locks = enter();
  return last_error_text();
}

std::uint64_t KindsMemory::fingerprint() const {
  const auto lock = lock_calls();
  {
    const auto locks = enter();
    allow_all();  // the kinds' limits follow from the rest
  }
  Mix mix;
  mix.add(limit_bytes_);
  for (const auto& kind : kinds_) mix.add(kind->fingerprint());
  return mix.value();
}

void KindsMemory::check() {
  const auto lock = lock_calls();
  for (const auto& kind : kinds_) kind->check();
  const auto locks = enter();
  const auto law = [](bool holds, const std::string& broken) {
    if (!holds) throw InvariantError(broken);
  };
  const Ledger& first = kinds_[0]->ledger_;
  for (std::size_t k = 1; k < kinds_.size(); ++k) {
    const Ledger& other = kinds_[k]->ledger_;
    law(other.begun == first.begun && other.completed == first.completed,
        "kind " + std::to_string(k) + " counts other epochs");
    for (SeqId id = 0; id < first.config.max_seqs; ++id) {
      const Sequence &a = first.seqs[id], &b = other.seqs[id];
      const std::string name = "sequence " + std::to_string(id);
      law(a.open == b.open && a.kv.length == b.kv.length && a.kv.sealed == b.kv.sealed &&
              a.kv.swapped == b.kv.swapped &&
              (other.config.has_state() || (a.kv.view == b.kv.view && a.kv.slot == b.kv.slot)),
          name + " differs between kinds");
      const std::int64_t seen =
          std::max<std::int64_t>(0, windows_[k] == 0 ? 0 : b.kv.length + 1 - windows_[k]);
      law(b.kv.num_trimmed <= seen / other.config.block_tokens,
          name + " lacks blocks that its window shows");
    }
  }
}

void KindsMemory::close() {
  for (const auto& kind : kinds_) kind->close();
}

}  // namespace vmserve
