// Sequences, epochs and the public face. Plans are made in kv_memory_plan.cpp and carried out in
// kv_memory_apply.cpp; kv_memory_room.cpp finds pages, kv_memory_ahead.cpp keeps the mapper busy.
#include "vmserve/kv_memory.h"

#include <unistd.h>

#include <algorithm>

#include "vmserve/errors.h"
#include "vmserve/text.h"

namespace vmserve {
namespace {

// Of the mappings that there may be, the part that is kept for those who need them at once.
constexpr std::int64_t kReserveShare = 8;

std::int64_t round_up_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

// `text` is a function: nobody builds a message that nobody reads.
template <typename Text>
void require(bool holds, Text text) {
  if (!holds) throw MisuseError(text());
}

std::int64_t row_pages(const MemoryConfig& config) {
  return round_up_div(config.max_len + config.read_slack, config.page_tokens());
}

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
}

// Where mappings are limited slots grow in extents: an eighth of a slot's share of the pool, which
// may lie idle behind each, but no more pages than there is anything to gain by.
std::int64_t extent_pages(const PageDriver& driver, const MemoryConfig& config) {
  constexpr std::int64_t kMost = 32;
  const std::int64_t share = config.limit_pages / config.num_slots / 8;
  std::int64_t pages = 1;
  while (2 * pages <= std::min(share, kMost)) pages *= 2;
  return driver.mapping_room() == kUnlimitedMappings ? 1 : pages;
}

MemoryConfig validated(const PageDriver& driver, const MemoryConfig& config) {
  check_sizes(config);
  require(
      static_cast<std::size_t>(config.page_tokens() * config.token_bytes) == driver.frame_bytes(),
      [&] {
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
  return config;
}

}  // namespace

KVMemory::KVMemory(std::shared_ptr<PageDriver> driver, const MemoryConfig& config)
    : config_(validated(*driver, config)),
      pid_(::getpid()),
      driver_(std::move(driver)),
      pool_(config.max_pages, config.blocks_per_page, config.limit_pages, config.zero_policy,
            extent_pages(*driver_, config)),
      seqs_(static_cast<std::size_t>(config.max_seqs)),
      slots_(static_cast<std::size_t>(config.num_slots)) {
  config_.seal_read_only =
      config_.seal_read_only && config_.access_under_readers && driver_->capabilities().read_only;
  copies_beside_ = driver_->capabilities().copy_stream;
  const std::int64_t pages_per_slot = row_pages(config_);
  space_ = std::make_shared<AddressSpace>(
      driver_, AddressSpace::Shape{config_.num_groups, config_.num_slots, pages_per_slot,
                                   config_.max_pages});
  blocks_per_row_ = pages_per_slot * config_.blocks_per_page;
  tables_ = LazyArray<BlockId>(config_.max_seqs * blocks_per_row_);
  row_sizes_.resize(static_cast<std::size_t>(config_.max_seqs));
  const std::size_t block_bytes = static_cast<std::size_t>(config_.block_tokens) *
                                  static_cast<std::size_t>(config_.token_bytes);
  swap_ =
      std::make_unique<SwapSpace>(driver_, config_.num_groups, block_bytes, config_.swap_blocks);
  mapper_ = std::make_unique<Mapper>(driver_, config_.mapper);
  const std::int64_t most = driver_->stats().max_mappings;
  if (driver_->mapping_room() != kUnlimitedMappings) mapping_reserve_ = most / kReserveShare;
  if (config_.null_page) {
    commit_pages(1);
    pool_.hold(0);  // for ever
  }
  const std::int64_t ready = std::min(config_.ready_pages, pool_.limit()) - pool_.num_free();
  if (ready <= 0) return;
  try {
    create_pages(std::min(ready, pool_.limit() - pool_.num_committed()));
  } catch (const OutOfMemoryError& error) {
    last_error_ = error.what();  // the device has less now than the limit promises
  }
}

KVMemory::~KVMemory() {
  // In a fork the mapper's thread does not exist: joining it, or taking down what it was waiting
  // on, would wait for ever.
  if (::getpid() != pid_) static_cast<void>(mapper_.release());
}

std::unique_lock<std::mutex> KVMemory::enter() const {
  // NOTE: before the lock: in a fork, another thread of the parent may have held it for ever.
  require(::getpid() == pid_, [&] {
    return "this KV memory belongs to process " + std::to_string(pid_) +
           " and was used in its fork " + std::to_string(::getpid()) +
           ": start worker processes with the spawn method";
  });
  std::unique_lock<std::mutex> lock(mutex_);
  require(space_ != nullptr, [&] { return std::string("this KV memory is closed"); });
  return lock;
}

void KVMemory::require_alive() const {
  if (failure_.empty()) return;
  throw DriverError("kv memory", EIO, "the KV memory has failed and serves no more: " + failure_, 0,
                    /*sticky=*/true);
}

void KVMemory::fail_if_sticky(const Error& error) {
  const auto* refusal = dynamic_cast<const DriverError*>(&error);
  if (refusal != nullptr && refusal->sticky && failure_.empty()) failure_ = error.what();
}

const KVMemory::Sequence& KVMemory::open_seq(SeqId seq) const {
  require(seq >= 0 && seq < config_.max_seqs, [&] {
    return "sequence " + std::to_string(seq) + " is outside 0 .. " +
           std::to_string(config_.max_seqs - 1);
  });
  require(seqs_[seq].open, [&] { return "sequence " + std::to_string(seq) + " is not open"; });
  return seqs_[seq];
}

KVMemory::Sequence& KVMemory::open_seq(SeqId seq) {
  return const_cast<Sequence&>(std::as_const(*this).open_seq(seq));
}

std::int64_t KVMemory::pages_for(std::int64_t num_tokens) const {
  if (num_tokens == 0) return 0;
  return round_up_div(num_tokens + config_.read_slack, config_.page_tokens());
}

std::int64_t KVMemory::blocks_for(std::int64_t num_tokens) const {
  return round_up_div(num_tokens, config_.block_tokens);
}

std::int64_t KVMemory::num_pages(const Sequence& seq) const {
  return static_cast<std::int64_t>(seq.has.blocks.size()) / config_.blocks_per_page;
}

// -- sequences

std::optional<SeqId> KVMemory::open(Tenant tenant, View view, const std::string& salt,
                                    const std::vector<std::int32_t>& tokens) {
  const auto lock = enter();
  require_alive();
  if (num_open_ == config_.max_seqs) return std::nullopt;
  SeqId id = 0;
  while (seqs_[id].open) ++id;
  Sequence fresh;
  fresh.open = true;
  fresh.generation = seqs_[id].generation + 1;
  fresh.tenant = tenant;
  fresh.has.view = view;
  fresh.tokens = tokens;
  fresh.nameless = tokens.empty();
  fresh.root = prefix_root(tenant, weights_epoch_, salt);
  extend_digests(fresh);
  seqs_[id] = std::move(fresh);
  ++num_open_;
  return id;
}

void KVMemory::extend_digests(Sequence& seq) {
  if (!config_.prefix_caching || seq.nameless) return;
  const std::int32_t width = config_.block_tokens;
  const std::size_t full = seq.tokens.size() / static_cast<std::size_t>(width);
  while (seq.digests.size() < full) {
    const Digest& parent = seq.digests.empty() ? seq.root : seq.digests.back();
    seq.digests.push_back(
        prefix_next(parent, seq.tokens.data() + seq.digests.size() * width, width));
  }
}

void KVMemory::append_tokens(const std::vector<SeqId>& seqs,
                             const std::vector<std::int32_t>& tokens) {
  const auto lock = enter();
  require(seqs.size() == tokens.size(), [&] { return std::string("one token for each sequence"); });
  for (const SeqId seq : seqs) open_seq(seq);
  for (std::size_t i = 0; i < seqs.size(); ++i) {
    Sequence& seq = seqs_[seqs[i]];
    if (seq.nameless) continue;
    seq.tokens.push_back(tokens[i]);
    extend_digests(seq);
  }
}

std::int64_t KVMemory::num_matched(const Sequence& seq) const {
  if (seq.tokens.empty()) return 0;
  // One token at least is computed: its logits are what the caller wants.
  const auto most = (static_cast<std::int64_t>(seq.tokens.size()) - 1) / config_.block_tokens;
  const std::int64_t end = std::min(most, static_cast<std::int64_t>(seq.digests.size()));
  std::int64_t matched = 0;
  while (matched < end && pool_.find(seq.digests[matched]) != kNoBlock) ++matched;
  return matched;
}

std::int64_t KVMemory::match(SeqId id) const {
  const auto lock = enter();
  return num_matched(open_seq(id)) * config_.block_tokens;
}

void KVMemory::park(SlotId id, Epoch retire) {
  Slot& slot = slots_[id];
  slot.seq = kNoSeq;
  slot.retire = std::max(slot.retire, retire);
  slot.parked_at = ++parkings_;
}

void KVMemory::release(SeqId id) {
  const auto lock = enter();
  Sequence& seq = open_seq(id);
  if (!config_.deferred_reclamation && seq.has.slot != kNoSlot) settle_locked();
  // Tail first: it is the tail of a prefix that is evicted first.
  for (auto block = seq.has.blocks.rbegin(); block != seq.has.blocks.rend(); ++block) {
    if (*block == kNoBlock) continue;
    const PageId page = pool_.page_of(*block);
    may_reopen_ = may_reopen_ || pool_.refs(*block) > 1;
    pool_.drop_ref(*block, begun_);
    if (pool_.owner(page) == id) pool_.set_owner(page, kNoSeq);
  }
  for (const SwapId swap : seq.has.swap) {
    if (swap != kNoSwap) swap_->drop(swap);
  }
  const SlotId slot = seq.has.slot;
  const std::uint32_t generation = seq.generation;
  seq = Sequence{};
  seq.generation = generation;
  --num_open_;
  ++version_;
  write_table(id, 0);
  if (slot != kNoSlot) {
    park(slot, begun_);
    const bool is_over = slots_[slot].retire <= completed_ && !slots_[slot].in_repair;
    if (!config_.deferred_reclamation && is_over) truncate(slot, 0);
  }
  reopen_pages();
  shed();
}

void KVMemory::write_table(SeqId id, std::size_t from) {
  const std::vector<BlockId>& blocks = seqs_[id].has.blocks;
  BlockId* row = &tables_[id * blocks_per_row_];
  for (std::size_t i = from; i < blocks.size(); ++i) row[i] = std::max(blocks[i], BlockId{0});
  for (std::size_t i = blocks.size(); i < row_sizes_[id]; ++i) row[i] = 0;
  row_sizes_[id] = blocks.size();
}

// -- epochs

Epoch KVMemory::begun_epoch() const {
  const auto lock = enter();
  return begun_;
}

Epoch KVMemory::completed_epoch() const {
  const auto lock = enter();
  return completed_;
}

void KVMemory::complete(Epoch epoch) {
  const auto lock = enter();
  require(epoch <= begun_, [&] { return "epoch " + std::to_string(epoch) + " has not begun"; });
  complete_locked(epoch, /*sealed=*/true);
  absorb();
}

void KVMemory::abandon_epoch(Epoch epoch) {
  const auto lock = enter();
  require(epoch <= begun_, [&] { return "epoch " + std::to_string(epoch) + " has not begun"; });
  complete_locked(epoch, /*sealed=*/false);
}

bool KVMemory::is_copying() {
  const auto lock = enter();
  absorb();
  return !copying_.empty();
}

bool KVMemory::finish_copies() {
  const auto lock = enter();
  return finish_copies_locked();
}

void KVMemory::launched(Epoch epoch) {
  const auto lock = enter();
  require(epoch <= begun_, [&] { return "epoch " + std::to_string(epoch) + " has not begun"; });
  require_alive();
  const auto driving = mapper_->lock_driver();
  marks_.emplace_back(epoch, driver_->mark());
}

void KVMemory::complete_locked(Epoch epoch, bool sealed) {
  if (epoch <= completed_) return;
  completed_ = epoch;
  pool_.complete(epoch);
  std::vector<SeqId> grown;
  while (!records_.empty() && records_.front().epoch <= epoch) {
    const Record record = std::move(records_.front());
    records_.pop_front();
    for (const Written& written : record.written) {
      Sequence& seq = seqs_[written.seq];
      if (!seq.open || seq.generation != written.generation) continue;
      if (!sealed) {
        // What was to be written is worthless, and so is what is computed from it.
        if (written.start < written.length) {
          seq.has.seal_limit = std::min(seq.has.seal_limit, written.start);
        }
        continue;
      }
      seal(written.seq, written.length);
      grown.push_back(written.seq);
    }
  }
  if (config_.seal_read_only && failure_.empty()) seal_slots(grown);
  reopen_pages();
}

void KVMemory::seal(SeqId id, std::int64_t length) {
  Sequence& seq = seqs_[id];
  length = std::min(length, seq.has.seal_limit);
  if (seq.has.swapped || length <= seq.has.sealed) return;
  seq.has.sealed = length;
  publish(seq);
}

void KVMemory::publish(Sequence& seq) {
  const std::int64_t full = std::min(seq.has.sealed / config_.block_tokens,
                                     static_cast<std::int64_t>(seq.digests.size()));
  for (; seq.has.num_published < full; ++seq.has.num_published) {
    const BlockId block = seq.has.blocks[seq.has.num_published];
    if (block == kNoBlock || pool_.is_published(block)) continue;
    totals_.published_blocks += pool_.publish(block, seq.digests[seq.has.num_published]) ? 1 : 0;
  }
}

void KVMemory::clear_cache() {
  const auto lock = enter();
  ++weights_epoch_;
  pool_.clear_index();
  for (Sequence& seq : seqs_) {
    // What was computed with the old weights is not offered under any name.
    seq.digests.clear();
    seq.nameless = true;
  }
  ++version_;
  may_reopen_ = true;
  reopen_pages();
}

// -- the pool

std::int64_t KVMemory::trim(std::int64_t keep_pages, bool drop_idle_too) {
  const auto lock = enter();
  require(keep_pages >= 0, [&] { return std::string("keep_pages must not be negative"); });
  require_alive();
  settle_locked();
  finish_copies_locked();
  retry_repairs();
  if (drop_idle_too) drop_idle(keep_pages);
  if (swap_->num_used() == 0) {
    const auto driving = mapper_->lock_driver();
    driver_->fence();
    swap_->release_memory();
  }
  const std::int64_t idle = drop_idle_too ? pool_.count(PageState::kIdle) : 0;
  return give_back(
      std::min(pool_.num_free(), std::max<std::int64_t>(0, pool_.num_free() + idle - keep_pages)));
}

void KVMemory::set_limit(std::int64_t limit_pages) {
  const auto lock = enter();
  require(limit_pages > 0 && limit_pages <= config_.max_pages, [&] {
    return "the limit of " + with_commas(limit_pages) + " pages must lie between 1 and " +
           with_commas(config_.max_pages);
  });
  require_alive();
  settle_locked();
  finish_copies_locked();
  retry_repairs();
  pool_.set_limit(limit_pages);
  ++version_;
  give_back_excess();
}

std::int64_t KVMemory::compact() {
  const auto lock = enter();
  require_alive();
  settle_locked();
  retry_repairs();
  std::int64_t emptied = 0;
  for (auto& [tenant, pages] : loose_pages()) emptied += pack(std::move(pages));
  shed();
  return emptied;
}

std::int64_t KVMemory::run_mapper(std::int64_t max_commands) {
  const auto lock = enter();
  const std::int64_t count = mapper_->run(max_commands);
  absorb();
  return count;
}

void KVMemory::settle_mapper() {
  const auto lock = enter();
  settle_locked(/*counts=*/false);
}

// -- reading

std::vector<BlockId> KVMemory::blocks(SeqId seq) const {
  const auto lock = enter();
  return open_seq(seq).has.blocks;
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
  return open_seq(seq).has.length;
}

std::int64_t KVMemory::sealed(SeqId seq) const {
  const auto lock = enter();
  return open_seq(seq).has.sealed;
}

View KVMemory::view(SeqId seq) const {
  const auto lock = enter();
  return open_seq(seq).has.view;
}

bool KVMemory::swapped(SeqId seq) const {
  const auto lock = enter();
  return open_seq(seq).has.swapped;
}

std::optional<SlotId> KVMemory::slot(SeqId seq) const {
  const auto lock = enter();
  const SlotId slot = open_seq(seq).has.slot;
  return slot == kNoSlot ? std::nullopt : std::optional<SlotId>(slot);
}

std::vector<SlotId> KVMemory::slots(const std::vector<SeqId>& seqs) const {
  const auto lock = enter();
  std::vector<SlotId> slots;
  slots.reserve(seqs.size());
  for (const SeqId seq : seqs) slots.push_back(open_seq(seq).has.slot);
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
  return last_error_;
}

void KVMemory::require_usable() const {
  enter();
}

void KVMemory::close() {
  if (::getpid() != pid_) return;  // it is the parent's to close
  const std::lock_guard<std::mutex> lock(mutex_);
  mapper_.reset();
  swap_.reset();
  space_.reset();
}

bool KVMemory::closed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return space_ == nullptr;
}

std::shared_ptr<AddressSpace> KVMemory::address_space() const {
  const auto lock = enter();
  return space_;
}

}  // namespace vmserve
