// Slots, plans and the public mutations. The steps they are made of are in kv_memory_steps.cpp,
// the laws and the statistics in kv_memory_check.cpp.
#include "vmserve/kv_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "vmserve/errors.h"
#include "vmserve/text.h"

namespace vmserve {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::int64_t round_up_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

void require(bool holds, const std::string& what) {
  if (!holds) throw MisuseError(what);
}

std::int64_t slot_pages(const MemoryConfig& config) {
  return round_up_div(config.max_len + config.read_slack, config.page_tokens);
}

MemoryConfig validated(const PageDriver& driver, const MemoryConfig& config) {
  require(config.num_groups > 0 && config.num_slots > 0 && config.page_tokens > 0 &&
              config.token_bytes > 0 && config.max_len > 0 && config.grow_pages > 0,
          "groups, slots, page_tokens, token_bytes, max_len and grow_pages must be positive");
  require(config.read_slack >= 0, "read_slack must not be negative");
  require(static_cast<std::size_t>(config.page_tokens * config.token_bytes) == driver.frame_bytes(),
          "a page of " + with_commas(config.page_tokens) + " tokens of " +
              with_commas(config.token_bytes) + " bytes is not the driver's frame of " +
              with_commas(static_cast<std::int64_t>(driver.frame_bytes())) + " bytes");
  require(config.limit_pages > 0 && config.limit_pages <= config.max_pages,
          "limit_pages is " + with_commas(config.limit_pages) + ": it must lie between 1 and " +
              with_commas(config.max_pages));
  require(config.num_groups * config.max_pages <= driver.num_frames(),
          "the driver has " + with_commas(driver.num_frames()) + " frames, " +
              with_commas(config.num_groups) + " groups of " + with_commas(config.max_pages) +
              " pages need more");
  return config;
}

}  // namespace

KVMemory::KVMemory(std::shared_ptr<PageDriver> driver, const MemoryConfig& config)
    : config_(validated(*driver, config)),
      pid_(::getpid()),
      pool_(config.max_pages, config.limit_pages, config.zero_policy),
      slots_(static_cast<std::size_t>(config.num_slots)) {
  space_ = std::make_shared<AddressSpace>(
      std::move(driver), AddressSpace::Shape{config_.num_groups, config_.num_slots,
                                             slot_pages(config_), config_.max_pages});
}

std::unique_lock<std::mutex> KVMemory::enter() const {
  // NOTE: before the lock: in a fork, another thread of the parent may have held it for ever.
  require(::getpid() == pid_, "this KV memory belongs to process " + std::to_string(pid_) +
                                  " and was used in its fork " + std::to_string(::getpid()) +
                                  ": start worker processes with the spawn method");
  std::unique_lock<std::mutex> lock(mutex_);
  require(space_ != nullptr, "this KV memory is closed");
  return lock;
}

const KVMemory::Slot& KVMemory::used_slot(SlotId slot) const {
  require(
      slot >= 0 && slot < config_.num_slots,
      "slot " + std::to_string(slot) + " is outside 0 .. " + std::to_string(config_.num_slots - 1));
  require(slots_[slot].used, "slot " + std::to_string(slot) + " is not allocated");
  return slots_[slot];
}

KVMemory::Slot& KVMemory::healthy_slot(SlotId slot) {
  if (used_slot(slot).in_repair) {
    throw DriverError(
        "repair", EBUSY,
        "slot " + std::to_string(slot) + " has mappings that could not be undone: " + last_error_);
  }
  return slots_[slot];
}

std::optional<SlotId> KVMemory::lowest_unused_slot() const {
  for (SlotId slot = 0; slot < config_.num_slots; ++slot) {
    if (!slots_[slot].used && !slots_[slot].in_repair) return slot;
  }
  return std::nullopt;
}

std::int64_t KVMemory::pages_for(std::int64_t num_tokens) const {
  if (num_tokens == 0) return 0;
  return round_up_div(num_tokens + config_.read_slack, config_.page_tokens);
}

std::vector<Growth> KVMemory::merged(const std::vector<Growth>& growths) const {
  std::vector<Growth> result;
  std::vector<std::int32_t> position(slots_.size(), -1);
  for (const Growth& growth : growths) {
    used_slot(growth.slot);
    require(growth.num_tokens >= 0 && growth.num_tokens <= config_.max_len,
            "slot " + std::to_string(growth.slot) + " cannot hold " +
                with_commas(growth.num_tokens) + " tokens: max_len is " +
                with_commas(config_.max_len));
    std::int32_t& at = position[growth.slot];
    if (at < 0) {
      at = static_cast<std::int32_t>(result.size());
      result.push_back(growth);
    } else {
      result[at].num_tokens = std::max(result[at].num_tokens, growth.num_tokens);
    }
  }
  return result;
}

std::int64_t KVMemory::missing_pages(const std::vector<Growth>& growths) const {
  std::int64_t missing = 0;
  for (const Growth& growth : growths) {
    const auto have = static_cast<std::int64_t>(slots_[growth.slot].pages.size());
    missing += std::max<std::int64_t>(0, pages_for(growth.num_tokens) - have);
  }
  return missing;
}

std::optional<SlotId> KVMemory::alloc_slot(Tenant tenant) {
  const auto lock = enter();
  retry_repairs();
  const auto slot = lowest_unused_slot();
  if (slot) {
    slots_[*slot].used = true;
    slots_[*slot].tenant = tenant;
  }
  return slot;
}

Plan KVMemory::plan(const std::vector<Growth>& growths) const {
  const auto lock = enter();
  return Plan{missing_pages(merged(growths)), pool_.num_available(), version_};
}

void KVMemory::apply(const std::vector<Growth>& growths, std::uint64_t version) {
  const auto lock = enter();
  require(version == version_,
          "the plan is stale: something was mapped or released since; plan again");
  retry_repairs();
  const std::vector<Growth> wanted = merged(growths);
  for (const Growth& growth : wanted) healthy_slot(growth.slot);

  const auto start = Clock::now();
  Change change(space_->driver());
  std::vector<Extension> extensions;
  std::vector<SlotId> touched;
  try {
    ensure_free(change, missing_pages(wanted));
    for (const Growth& growth : wanted) {
      const auto have = static_cast<std::int64_t>(slots_[growth.slot].pages.size());
      const std::int64_t count = pages_for(growth.num_tokens) - have;
      if (count <= 0) continue;
      touched.push_back(growth.slot);
      extensions.push_back(extend(change, growth.slot, have, count));
    }
    zero_pages(change, extensions);
    map_pages(change, extensions, Access::kReadWrite);
    space_->driver().fence();
  } catch (...) {
    abandon(change, touched);
    throw;
  }
  for (const Extension& extension : extensions) attach(extension);
  for (const Growth& growth : wanted) {
    Slot& slot = slots_[growth.slot];
    slot.length = std::max(slot.length, growth.num_tokens);
  }
  finish(change, seconds_since(start));
}

void KVMemory::release(SlotId slot_id) {
  const auto lock = enter();
  used_slot(slot_id);
  retry_repairs();
  Slot& slot = slots_[slot_id];
  const auto num_pages = static_cast<std::int64_t>(slot.pages.size());
  const std::vector<AddressRun> ranges = slot_ranges(slot_id, num_pages);
  Repair repair;
  try {
    space_->driver().unmap(ranges);
  } catch (const DriverError& error) {
    repair.steps.assign(ranges.begin() + static_cast<std::ptrdiff_t>(error.completed),
                        ranges.end());
    last_error_ = error.what();
  }
  forget_access_repairs(ranges);
  totals_.unmapped += num_pages;
  totals_.unmap_calls += static_cast<std::int64_t>(ranges.size() - repair.steps.size());
  std::vector<PageId> pages = std::move(slot.pages);
  const bool was_in_repair = slot.in_repair;
  slot = Slot{};
  slot.in_repair = was_in_repair;
  ++version_;
  if (!repair.steps.empty()) {
    slot.in_repair = true;
    repair.held = std::move(pages);
    repair.slots = {slot_id};
    repairs_.push_back(std::move(repair));
    return;
  }
  for (const PageId page : pages) pool_.drop(page);
  const std::int64_t excess = std::min(pool_.num_free(), pool_.num_committed() - pool_.limit());
  if (excess <= 0) return;
  try {
    give_back(excess);
  } catch (const DriverError& error) {
    last_error_ = error.what();  // the next release or trim tries again
  }
}

std::optional<SlotId> KVMemory::fork_slot(SlotId src, std::int64_t num_tokens) {
  const auto lock = enter();
  used_slot(src);
  retry_repairs();
  const Slot& source = healthy_slot(src);
  require(num_tokens >= 0 && num_tokens <= source.length,
          "cannot fork slot " + std::to_string(src) + " at " + with_commas(num_tokens) +
              " tokens: it holds " + with_commas(source.length));
  const auto dst = lowest_unused_slot();
  if (!dst) return std::nullopt;
  const std::int64_t num_shared = num_tokens / config_.page_tokens;
  const std::int64_t partial = num_tokens % config_.page_tokens;

  const auto start = Clock::now();
  Change change(space_->driver());
  slots_[*dst].tenant = source.tenant;
  Extension prefix{
      *dst, source.tenant, 0, {source.pages.begin(), source.pages.begin() + num_shared}};
  Extension tail;
  try {
    const std::int64_t num_fresh = pages_for(num_tokens) - num_shared;
    ensure_free(change, num_fresh);
    tail = extend(change, *dst, num_shared, num_fresh);
    zero_pages(change, {tail});
    if (partial > 0) copy_partial_page(tail.pages[0], source.pages[num_shared], partial);
    make_readonly(change, src, num_shared);
    map_pages(change, {prefix}, Access::kRead);
    map_pages(change, {tail}, Access::kReadWrite);
    space_->driver().fence();
  } catch (...) {
    slots_[*dst].tenant = 0;
    abandon(change, {src, *dst});
    throw;
  }
  Slot& forked = slots_[*dst];
  forked.used = true;
  forked.length = num_tokens;
  forked.num_readonly = num_shared;
  forked.pages.assign(prefix.pages.begin(), prefix.pages.end());
  for (const PageId page : prefix.pages) pool_.share(page);
  attach(tail);
  slots_[src].num_readonly = std::max(source.num_readonly, num_shared);
  finish(change, seconds_since(start));
  return dst;
}

std::int64_t KVMemory::trim(std::int64_t keep_pages) {
  const auto lock = enter();
  require(keep_pages >= 0, "keep_pages must not be negative");
  retry_repairs();
  return give_back(std::max<std::int64_t>(0, pool_.num_free() - keep_pages));
}

void KVMemory::set_limit(std::int64_t limit_pages) {
  const auto lock = enter();
  require(limit_pages > 0 && limit_pages <= config_.max_pages,
          "the limit of " + with_commas(limit_pages) + " pages must lie between 1 and " +
              with_commas(config_.max_pages));
  retry_repairs();
  pool_.set_limit(limit_pages);
  ++version_;
  give_back(
      std::max<std::int64_t>(0, std::min(pool_.num_free(), pool_.num_committed() - limit_pages)));
}

std::vector<PageId> KVMemory::block_table(SlotId slot) const {
  const auto lock = enter();
  return used_slot(slot).pages;
}

std::int64_t KVMemory::slot_length(SlotId slot) const {
  const auto lock = enter();
  return used_slot(slot).length;
}

std::string KVMemory::last_error() const {
  const auto lock = enter();
  return last_error_;
}

void KVMemory::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
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
