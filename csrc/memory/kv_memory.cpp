// The public interface: sequences, plans, epochs and the pool, over the books and all kinds.
#include "vmserve/kv_memory.h"

#include <unistd.h>

#include <algorithm>

#include "vmserve/memory/op_rules.h"
#include "vmserve/memory/require.h"
#include "vmserve/mix.h"
#include "vmserve/text.h"

namespace vmserve {
namespace {

void require_alike(const MemoryConfig& kind, const MemoryConfig& first) {
  require(first.sees_all() && (!kind.has_state() || kind.window == 0), [] {
    return std::string("the first kind of several sees all positions, and a state has no window");
  });
  require(kind.block_tokens == first.block_tokens &&
              (kind.has_state() || (kind.blocks_per_page == first.blocks_per_page &&
                                    kind.null_page == first.null_page)) &&
              kind.max_seqs == first.max_seqs && kind.num_slots == first.num_slots &&
              kind.max_len == first.max_len && kind.read_slack == first.read_slack &&
              kind.prefix_caching == first.prefix_caching,
          [] {
            return std::string(
                "kinds must have equal pages in tokens, slots, sequences, lengths and caching");
          });
}

std::int64_t page_bytes(const KindConfig& kind) {
  return kind.memory.num_groups * static_cast<std::int64_t>(kind.driver->frame_bytes());
}

// Bytes of a page of every kind that keeps tokens.
std::int64_t whole_page_bytes(const std::vector<KindConfig>& kinds) {
  std::int64_t bytes = 0;
  for (const KindConfig& kind : kinds) bytes += kind.memory.has_state() ? 0 : page_bytes(kind);
  return bytes > 0 ? bytes : page_bytes(kinds.front());
}

Books make_books(const std::vector<KindConfig>& kinds) {
  require(!kinds.empty(), [] { return std::string("a memory has at least one kind of layers"); });
  for (const KindConfig& kind : kinds) {
    require(kind.driver != nullptr, [] { return std::string("a kind of layers has no driver"); });
    check_sizes(kind.memory);
    if (kinds.size() > 1) require_alike(kind.memory, kinds.front().memory);
  }
  return Books(kinds.front().memory, kinds.size());
}

}  // namespace

KVMemory::KVMemory(std::vector<KindConfig> kinds, std::int64_t limit_pages)
    : pid_(::getpid()),
      books_(make_books(kinds)),
      whole_page_bytes_(whole_page_bytes(kinds)),
      most_pages_(round_up_div(kinds.front().memory.max_pages * page_bytes(kinds.front()),
                               whole_page_bytes_)),
      budget_(kinds_),
      own_ops_(kinds.size()) {
  require(limit_pages > 0 && limit_pages <= most_pages_, [&] {
    return "limit_pages is " + with_commas(limit_pages) + ": it must lie between 1 and " +
           with_commas(most_pages_);
  });
  budget_.set_limit(limit_pages * whole_page_bytes_);
  for (KindConfig& kind : kinds) {
    const std::int64_t pages = budget_.limit_bytes() / page_bytes(kind);
    require(pages > 0, [&] {
      return "a limit of " + with_commas(budget_.limit_bytes()) +
             " bytes does not hold a page of " + with_commas(page_bytes(kind)) +
             " bytes of one kind";
    });
    kind.memory.limit_pages = std::min(pages, kind.memory.max_pages);
    kind.memory = validated(*kind.driver, kind.memory);
    kinds_.push_back(std::make_unique<Kind>(kind, books_, kinds_.size()));
    has_states_ = has_states_ || kind.memory.has_state();
    if (kinds.size() > 1) kinds_.back()->pool.keep_found();
  }
  require(budget_.uncommitted_bytes() >= 0,
          [] { return std::string("the limit must hold the pages that are made at the start"); });
  budget_.share();
}

KVMemory::~KVMemory() {
  for (const auto& kind : kinds_) {
    if (::getpid() == pid_) {
      // Stops its threads before anything that they use is destroyed.
      if (kind->background.persistence() != nullptr) kind->background.persistence()->stop();
      continue;
    }
    // A fork has no mapper thread: joining it would wait for ever.
    static_cast<void>(kind->work.mapper.release());
    kind->background.abandon_persistence();
  }
}

std::unique_lock<std::mutex> KVMemory::enter() const {
  // NOTE: check before locking: in a fork, the lock may be held for ever by a thread of the parent.
  require(::getpid() == pid_, [&] {
    return "this KV memory belongs to process " + std::to_string(pid_) +
           " and was used in its fork " + std::to_string(::getpid()) +
           ": start worker processes with the spawn method";
  });
  std::unique_lock<std::mutex> lock(mutex_);
  require(!is_closed_, [&] { return std::string("this KV memory is closed"); });
  return lock;
}

void KVMemory::require_alive() const {
  for (const auto& kind : kinds_) kind->work.require_alive();
}

// -- sequences

std::optional<SeqId> KVMemory::open(Tenant tenant, View view, const std::string& salt,
                                    const std::vector<std::int32_t>& tokens) {
  const auto lock = enter();
  require_alive();
  is_idle_ = false;
  return books_.open(tenant, view, salt, tokens);
}

void KVMemory::append_tokens(const std::vector<SeqId>& seqs,
                             const std::vector<std::int32_t>& tokens) {
  const auto lock = enter();
  require(seqs.size() == tokens.size(),
          [&] { return std::string("append_tokens needs one token per sequence"); });
  for (const SeqId seq : seqs) books_.open_seq(seq);
  for (std::size_t i = 0; i < seqs.size(); ++i) books_.append_token(seqs[i], tokens[i]);
}

void KVMemory::keep(const std::vector<SeqId>& seqs, const std::vector<std::int64_t>& lengths) {
  const auto lock = enter();
  require(seqs.size() == lengths.size(),
          [&] { return std::string("keep needs one length per sequence"); });
  const Ledger& first = kinds_.front()->ledger;
  for (std::size_t i = 0; i < seqs.size(); ++i) {
    const Sequence& seq = books_.open_seq(seqs[i]);
    const std::int64_t length = std::min(lengths[i], first.config.max_len);
    const std::int64_t blocks = first.view(seq) == View::kVirtual
                                    ? first.pages_for(length) * first.config.blocks_per_page
                                    : first.blocks_for(length);
    require(!seq.kv.swapped && lengths[i] >= seq.kv.length && lengths[i] == length &&
                blocks <= static_cast<std::int64_t>(first.held[seqs[i]].blocks.size()),
            [&] {
              return "sequence " + std::to_string(seqs[i]) + " of " + with_commas(seq.kv.length) +
                     " tokens was not grown to " + with_commas(lengths[i]);
            });
  }
  std::vector<SeqId> ended;  // whose writing epochs have ended
  for (std::size_t i = 0; i < seqs.size(); ++i) {
    if (books_.lengthen(seqs[i], lengths[i])) continue;
    ended.push_back(seqs[i]);
    if (books_.seal(seqs[i], lengths[i])) publish(seqs[i]);
  }
  for (const auto& kind : kinds_) kind->background.seal_slots(ended);
  ++books_.version;
}

// Offers what was sealed of the sequence to the prefix cache.
void KVMemory::publish(SeqId id) {
  Sequence& seq = books_.seqs[id];
  const std::int64_t full = books_.num_publishable(seq);
  for (; seq.kv.num_published < full; ++seq.kv.num_published) {
    for (const auto& kind : kinds_) {
      if (!kind->config.has_state()) kind->ledger.publish(id, seq.kv.num_published);
    }
  }
  for (std::size_t k = 0; has_states_ && k < kinds_.size(); ++k) {
    if (kinds_[k]->config.has_state()) kinds_[k]->ledger.publish_state(id);
  }
}

std::int64_t KVMemory::num_matched(const Sequence& seq, bool stored) const {
  const auto of_kind = [&](const Kind& kind, std::int64_t most) {
    return kind.ledger.num_matched(seq, most, [&](const Digest& digest) {
      return stored ? kind.is_within_reach(digest) : kind.ledger.is_cached(digest);
    });
  };
  std::int64_t matched = books_.num_matchable(seq), before = -1;
  for (const auto& kind : kinds_) {
    if (kind->config.sees_all()) matched = of_kind(*kind, matched);
  }
  while (matched != before) {
    before = matched;
    for (const auto& kind : kinds_) {
      if (!kind->config.sees_all()) matched = of_kind(*kind, matched);
    }
  }
  return matched;
}

std::int64_t KVMemory::match(SeqId id) const {
  const auto lock = enter();
  return num_matched(books_.open_seq(id), /*stored=*/false) * kinds_.front()->config.block_tokens;
}

std::vector<SeqId> KVMemory::open_seqs() const {
  const auto lock = enter();
  std::vector<SeqId> ids;
  for (SeqId id = 0; id < static_cast<SeqId>(books_.seqs.size()); ++id) {
    if (books_.seqs[id].open) ids.push_back(id);
  }
  return ids;
}

void KVMemory::release(SeqId id) {
  const auto lock = enter();
  const bool parks = books_.open_seq(id).kv.slot != kNoSlot;
  for (const auto& kind : kinds_) {
    const bool unmaps = !kind->config.deferred_reclamation && !kind->config.has_state();
    if (parks && unmaps) kind->background.drain_mapper();
  }
  for (const auto& kind : kinds_) kind->release(id);
  const SlotId slot = books_.close(id);
  for (const auto& kind : kinds_) {
    if (slot != kNoSlot && !kind->config.has_state()) kind->park(slot);
    kind->background.restore_write_access();
  }
  budget_.try_give_back_excess();
}

// -- plans

void KVMemory::merge(const std::vector<Op>& ops) {
  is_planned_ = false;
  if (is_merged_alone_ = merge_grows(ops, books_, merged_); !is_merged_alone_) asked_ = ops;
  validate(merged_, books_, kinds_);
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    if (!kinds_[k]->config.sees_all()) own_ops_[k] = kinds_[k]->own_ops(merged_);
  }
}

const std::vector<Op>& KVMemory::ops_of(std::size_t k) const {
  return kinds_[k]->config.sees_all() ? merged_ : own_ops_[k];
}

Plan KVMemory::plan(const std::vector<Op>& ops) {
  const auto lock = enter();
  apply_finished_work();
  if (ops.empty()) return plan_of_nothing();  // leaves an earlier plan valid
  // An attach relies on cached blocks that were found.
  if (!has_attach(ops)) budget_.try_give_back_excess();
  merge(ops);
  Plan plan = assess(/*packs=*/false);
  if (plan.lost_prefixes == 0) {
    if (!plan.fits() && finish_background()) plan = assess(/*packs=*/false);
    if (!plan.fits() && give_up_past(/*from_slots=*/true)) plan = assess(/*packs=*/false);
    // A kind packs blocks by itself only if the ops do not fit in it alone.
    if (plan.needed_pages > plan.available_pages) plan = assess(/*packs=*/true);
    if (!plan.fits()) {
      const std::vector<bool> running = books_.running_seqs();
      plan.waiting_pages += std::any_of(kinds_.begin(), kinds_.end(), [&](const auto& kind) {
        return kind->will_give_up_past(running);
      });
    }
  }
  is_planned_ = true;
  planned_version_ = plan.version;
  return plan;
}

Plan KVMemory::plan_of_nothing() const {
  budget_.allow_all();
  return sum_up([](const Kind& kind) {
    Plan none;
    none.available_pages = kind.pool.num_available();
    none.waiting_pages = kind.pool.count(PageState::kWaiting);
    return none;
  });
}

Plan KVMemory::assess(bool packs) {
  budget_.allow_all();
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    Kind& kind = *kinds_[k];
    kind.ops.given_slots = k == 0 ? SlotChoices{} : kinds_.front()->assessed().taken_slots;
    kind.planner.packs_always = packs;
    kind.assess(ops_of(k));
  }
  return sum_up([](const Kind& kind) -> const Plan& { return kind.assessed().plan; });
}

// In whole pages, rounded so that the sum fits if its bytes do.
template <typename PlanOf>
Plan KVMemory::sum_up(PlanOf plan_of) const {
  Plan sum;
  sum.version = books_.version;
  for (const auto& kind : kinds_) {
    sum.lost_prefixes = std::max(sum.lost_prefixes, plan_of(*kind).lost_prefixes);
  }
  if (sum.lost_prefixes > 0) return sum;
  std::int64_t needed = 0, waiting = 0, available = budget_.available_bytes();
  std::int64_t room = kUnlimitedMappings;
  for (const auto& each : kinds_) {
    const Kind& kind = *each;
    const Plan& plan = plan_of(kind);
    const std::int64_t size = kind.page_bytes();
    // Of pages that the ops themselves give up.
    const std::int64_t own = plan.available_pages - plan.excess_pages - kind.pool.num_available();
    available += std::max<std::int64_t>(0, own) * size;
    needed += plan.needed_pages * size;
    waiting += plan.waiting_pages * size;
    sum.missing_slots = std::max(sum.missing_slots, plan.missing_slots);
    sum.missing_swap_blocks = std::max(sum.missing_swap_blocks, plan.missing_swap_blocks);
    sum.needed_mappings += plan.needed_mappings;
    room = std::min(room, kind.work.mapping_room());
  }
  sum.available_mappings = room;
  for (const auto& kind : kinds_) {
    if (room >= sum.needed_mappings) break;
    sum.available_mappings += std::max<std::int64_t>(
        0, kind->work.available_mappings(kUnlimitedMappings) - kind->work.mapping_room());
  }
  sum.available_mappings = std::max<std::int64_t>(0, sum.available_mappings);
  const std::int64_t whole = whole_page_bytes_;
  sum.excess_pages = round_up_div(std::max<std::int64_t>(0, -available), whole);
  available = std::max<std::int64_t>(0, available);
  sum.available_pages = available / whole;
  sum.waiting_pages = round_up_div(waiting, whole);
  const std::int64_t rounded = round_up_div(needed, whole);
  sum.needed_pages = needed <= available ? std::min(rounded, sum.available_pages)
                                         : std::max(rounded, sum.available_pages + 1);
  return sum;
}

// Waits for pages that mappers or repairs hold; false if there is neither.
bool KVMemory::finish_background() {
  bool has_waited = false;
  for (const auto& kind : kinds_) {
    if (!kind->is_holding_pages()) continue;
    has_waited = true;
    kind->background.drain_mapper();
    if (kind->work.failure.empty()) kind->work.retry_repairs();
  }
  if (has_waited) apply_finished_work();  // giving pages back may have waited for steps
  return has_waited;
}

Epoch KVMemory::apply(const std::vector<Op>& ops, std::uint64_t version) {
  const auto lock = enter();
  require_alive();
  if (version != books_.version) refuse_stale();
  const bool is_planned =
      is_planned_ && planned_version_ == version && (is_merged_alone_ ? merged_ : asked_) == ops;
  is_planned_ = false;  // a plan is applied once
  if (!is_planned) {
    merge(ops);
    for (const auto& kind : kinds_) kind->planner.packs_always = false;
  }
  budget_.allow_all();
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    Kind& kind = *kinds_[k];
    kind.ops.given_slots = k == 0 ? SlotChoices{} : kinds_.front()->assessed().taken_slots;
    kind.assess_again(ops_of(k), is_planned);
  }
  const Plan plan = sum_up([](const Kind& kind) -> const Plan& { return kind.assessed().plan; });
  if (plan.lost_prefixes > 0) refuse_stale();
  if (!plan.fits()) {
    throw OutOfMemoryError("the plan needs " + with_commas(plan.needed_pages) + " pages, " +
                           with_commas(plan.available_pages) + " can be had, and lacks " +
                           with_commas(plan.missing_slots) + " slots and " +
                           with_commas(plan.missing_swap_blocks) + " swap blocks; it needs " +
                           with_commas(plan.needed_mappings) + " memory mappings, " +
                           with_commas(plan.available_mappings) + " can be had");
  }
  std::vector<Change> changes;
  changes.reserve(kinds_.size());
  BooksChange books_change(books_);
  stage_and_execute(plan.needed_mappings, changes, books_change);
  commit(changes, books_change);
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    budget_.allow(*kinds_[k], budget_.uncommitted_bytes());
    kinds_[k]->background.schedule_work(Grows(ops_of(k)));
    kinds_[k]->background.restore_write_access();
  }
  budget_.try_give_back_excess();
  for (const auto& kind : kinds_) {
    if (Persistence* const persistence = kind->background.persistence()) {
      persistence->write_behind();
    }
  }
  return books_.begun;
}

// All kinds' changes, with their driver calls, or none.
void KVMemory::stage_and_execute(std::int64_t needed_mappings, std::vector<Change>& changes,
                                 BooksChange& books_change) {
  std::size_t at = 0;
  const auto undo = [&](const Error* error) {
    for (std::size_t k = changes.size(); k-- > 0;) {
      kinds_[k]->undo(changes[k], k == at ? error : nullptr);
    }
    books_change.undo();
  };
  try {
    make_mapping_room(needed_mappings);
    for (at = 0; at < kinds_.size(); ++at) {
      Kind& kind = *kinds_[at];
      changes.emplace_back(kind.ledger, *kind.work.driver,
                           kind.assessed().packing != Packing::kNone,
                           /*is_trial=*/false);
      kind.make_room_for_plan();
      kind.ops.given_slots.clear();
      kind.ops.begin(changes[at], ops_of(at));
    }
    Ops& first = kinds_.front()->ops;
    Change& first_change = changes.front();
    const std::vector<Op>& first_ops = ops_of(0);
    for (std::size_t i = 0; i < merged_.size(); ++i) {
      at = 0;
      const SlotId slot = first.stage(first_change, first_ops[i]);
      for (at = 1; at < kinds_.size(); ++at) {
        Ops& ops = kinds_[at]->ops;
        if (slot != kNoSlot) ops.given_slots = {{merged_[i].seq, slot}};
        ops.stage(changes[at], ops_of(at)[i]);
      }
      books_change.stage(merged_[i], slot);
    }
    std::vector<std::int64_t> needed;
    for (at = 0; at < kinds_.size(); ++at) {
      kinds_[at]->work.prepare(changes[at]);
      needed.push_back(kinds_[at]->ops.pages_for_fresh(changes[at]));
    }
    budget_.gather(needed);
    for (at = 0; at < kinds_.size(); ++at) {
      budget_.allow_beside(at, needed);
      kinds_[at]->execute(changes[at]);
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
void KVMemory::make_mapping_room(std::int64_t needed) {
  for (const auto& kind : kinds_) {
    while (kind->work.mapping_room() < needed) {
      const SlotId oldest = kind->ledger.oldest_parked();
      if (oldest == kNoSlot) break;
      kind->work.truncate(oldest, 0);
    }
  }
}

void KVMemory::commit(std::vector<Change>& changes, const BooksChange& books_change) {
  ++books_.begun;
  ++books_.version;
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    kinds_[k]->commit_pages(changes[k], !books_change.forked.empty());
  }
  std::vector<Grows> grows_of;
  for (std::size_t k = 0; k < kinds_.size(); ++k) grows_of.emplace_back(ops_of(k));
  const Grows& grows = grows_of.front();
  EpochRecord record{books_.begun, {}, {}};
  record.written.reserve(grows.size());
  record.first_seen.reserve(grows.size() * kinds_.size());
  for (std::size_t i = 0; i < grows.size(); ++i) {
    const Op& grow = grows[i];
    Sequence& seq = books_.seqs[grow.seq];
    const std::int64_t before = seq.kv.length;
    seq.kv.length = std::max(before, grow.kept_tokens());
    record.written.push_back({grow.seq, seq.generation, before, seq.kv.length});
    for (std::size_t k = 0; k < kinds_.size(); ++k) {
      record.first_seen.push_back(kinds_[k]->note_growth(grows_of[k][i]));
    }
  }
  books_.records.push_back(std::move(record));
  for (const Forked& fork : books_change.forked) {
    std::vector<std::int64_t> first;
    for (const auto& kind : kinds_) {
      first.push_back(kind->ledger.held[fork.child].num_trimmed * kind->config.block_tokens);
    }
    books_.inherit_prefix(fork, first);
  }
  for (std::size_t k = 0; k < kinds_.size(); ++k) kinds_[k]->commit_tables(changes[k]);
}

// -- epochs

Epoch KVMemory::begun_epoch() const {
  const auto lock = enter();
  return books_.begun;
}

Epoch KVMemory::completed_epoch() const {
  const auto lock = enter();
  return books_.completed;
}

void KVMemory::require_begun(Epoch epoch) const {
  require(epoch <= books_.begun,
          [&] { return "epoch " + std::to_string(epoch) + " has not begun"; });
}

// `sealed`: what they wrote is sealed; else it never is.
void KVMemory::end_epochs(Epoch epoch, bool sealed) {
  if (epoch <= books_.completed) return;
  books_.completed = epoch;
  for (const auto& kind : kinds_) kind->pool.complete(epoch);
  std::vector<SeqId> grown;
  EpochRecord ended{epoch, {}, {}};  // ranges of which the epoch reads only a part
  while (!books_.records.empty() && books_.records.front().epoch <= epoch) {
    const EpochRecord record = std::move(books_.records.front());
    books_.records.pop_front();
    grown.reserve(grown.size() + record.written.size());
    for (std::size_t i = 0; i < record.written.size(); ++i) {
      const WrittenRange& written = record.written[i];
      Sequence& seq = books_.seqs[written.seq];
      if (!seq.open || seq.generation != written.generation) continue;
      if (!sealed) {
        // The kernels failed: positions from here on, and all computed from them, must never be
        // sealed.
        if (written.start < written.length) {
          seq.kv.seal_limit = std::min(seq.kv.seal_limit, written.start);
        }
        continue;
      }
      if (books_.seal(written.seq, written.length)) publish(written.seq);
      grown.push_back(written.seq);
      const std::int64_t* seen = &record.first_seen[i * kinds_.size()];
      if (*std::max_element(seen, seen + kinds_.size()) == 0) continue;
      ended.written.push_back(written);
      ended.first_seen.insert(ended.first_seen.end(), seen, seen + kinds_.size());
    }
  }
  for (const auto& kind : kinds_) kind->background.end_epochs(grown, ended);
}

bool KVMemory::give_up_past(bool from_slots) {
  const bool has_windows = std::any_of(kinds_.begin(), kinds_.end(),
                                       [](const auto& kind) { return kind->config.window > 0; });
  if (!has_windows) return false;
  const std::vector<bool> running = books_.running_seqs();
  bool gave_any = false;
  for (const auto& kind : kinds_) gave_any = kind->give_up_past(running, from_slots) || gave_any;
  return gave_any;
}

void KVMemory::complete(Epoch epoch) {
  const auto lock = enter();
  require_begun(epoch);
  end_epochs(epoch, /*sealed=*/true);
  apply_finished_work();
  give_up_past(/*from_slots=*/false);
}

void KVMemory::abandon_epoch(Epoch epoch) {
  const auto lock = enter();
  require_begun(epoch);
  end_epochs(epoch, /*sealed=*/false);
}

void KVMemory::launched(Epoch epoch) {
  const auto lock = enter();
  require_begun(epoch);
  require_alive();
  std::vector<Mark> marks;
  for (const auto& kind : kinds_) {
    const auto driving = kind->work.lock();
    marks.push_back(kind->work.driver->mark());
  }
  marks_.emplace_back(epoch, std::move(marks));
}

// An epoch ends in all kinds at once: when the device has done all work that their drivers were
// asked for before its launch.
void KVMemory::apply_reached_marks() {
  for (; !marks_.empty(); marks_.pop_front()) {
    for (std::size_t k = 0; k < kinds_.size(); ++k) {
      DriverWork& work = kinds_[k]->work;
      try {
        const auto driving = work.lock();
        if (!work.driver->reached(marks_.front().second[k])) return;
      } catch (const Error& error) {
        return work.fail_if_sticky(error);
      }
    }
    end_epochs(marks_.front().first, /*sealed=*/true);
    give_up_past(/*from_slots=*/false);
  }
}

void KVMemory::apply_finished_work() {
  apply_reached_marks();
  for (const auto& kind : kinds_) kind->background.apply_finished_work();
}

bool KVMemory::is_copying() {
  const auto lock = enter();
  apply_finished_work();
  return std::any_of(kinds_.begin(), kinds_.end(),
                     [](const auto& kind) { return !kind->background.copies_in_flight().empty(); });
}

bool KVMemory::finish_copies() {
  const auto lock = enter();
  bool waited = false;
  for (const auto& kind : kinds_) waited = kind->background.finish_copies() || waited;
  return waited;
}

void KVMemory::clear_cache() {
  const auto lock = enter();
  std::uint64_t generation = books_.generation + 1;
  for (const auto& kind : kinds_) {
    if (Persistence* const persistence = kind->background.persistence()) {
      generation = std::max(generation, persistence->begin_generation());
    }
    kind->pool.clear_index();
  }
  books_.generation = generation;
  books_.clear_digests();
  ++books_.version;
  for (const auto& kind : kinds_) {
    kind->ledger.may_restore_access = true;
    kind->background.restore_write_access();
  }
}

// -- the pool

void KVMemory::finish_pending_work() {
  apply_reached_marks();
  for (const auto& kind : kinds_) kind->finish_pending_work();
}

std::int64_t KVMemory::trim(std::int64_t keep_pages, bool drop_idle) {
  const auto lock = enter();
  require(keep_pages >= 0, [&] { return std::string("keep_pages must not be negative"); });
  require_alive();
  finish_pending_work();
  const std::int64_t whole = whole_page_bytes_;
  const std::int64_t there = drop_idle ? budget_.reclaimable_bytes() : budget_.free_bytes();
  const std::int64_t kept = std::min(keep_pages, there / whole + 1) * whole;
  const std::int64_t bytes = std::max<std::int64_t>(0, there - kept);
  if (drop_idle) budget_.evict_until_free(bytes);
  for (const auto& kind : kinds_) kind->release_swap_memory();
  return budget_.return_free(bytes, std::vector<std::int64_t>(kinds_.size())) / whole;
}

void KVMemory::set_limit(std::int64_t limit_pages) {
  const auto lock = enter();
  require(limit_pages > 0 && limit_pages <= most_pages_, [&] {
    return "the limit of " + with_commas(limit_pages) + " pages must lie between 1 and " +
           with_commas(most_pages_);
  });
  require_alive();
  finish_pending_work();
  ++books_.version;
  budget_.set_limit(limit_pages * whole_page_bytes_);
  budget_.share();
  budget_.give_back_excess();
  budget_.share();
}

std::int64_t KVMemory::compact() {
  const auto lock = enter();
  require_alive();
  apply_reached_marks();
  std::int64_t emptied = 0;
  for (const auto& kind : kinds_) {
    kind->background.drain_mapper();
    kind->work.retry_repairs();
    for (auto& [tenant, pages] : kind->ledger.compactable_pages()) {
      emptied += kind->room.compact(std::move(pages));
    }
  }
  budget_.try_give_back_excess();
  return emptied;
}

std::int64_t KVMemory::run_mapper(std::int64_t max_commands) {
  const auto lock = enter();
  std::int64_t count = 0;
  for (const auto& kind : kinds_) count += kind->work.mapper->run(max_commands);
  apply_finished_work();
  return count;
}

void KVMemory::settle_mapper() {
  const auto lock = enter();
  apply_reached_marks();
  for (const auto& kind : kinds_) kind->background.drain_mapper(/*is_waited_for=*/false);
}

void KVMemory::enable_shadow(std::size_t kind) {
  const auto lock = enter();
  require_alive();
  kind_at(kind);
  kinds_[kind]->enable_shadow();
}

void KVMemory::require_usable() const {
  enter();
}

void KVMemory::close() {
  if (::getpid() != pid_) return;  // the parent closes it
  for (const auto& kind : kinds_) {
    if (kind->background.persistence() != nullptr) kind->background.persistence()->stop();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  is_closed_ = true;
  for (const auto& kind : kinds_) {
    kind->background.end_persistence();
    kind->work.mapper.reset();
    kind->work.swap.reset();
    kind->work.space.reset();
  }
}

bool KVMemory::closed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_closed_;
}

}  // namespace vmserve
