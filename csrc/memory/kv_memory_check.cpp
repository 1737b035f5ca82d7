// Checks the laws of KVMemory and collects its statistics.
#include <algorithm>
#include <string>

#include "vmserve/errors.h"
#include "vmserve/kv_memory.h"
#include "vmserve/mix.h"

namespace vmserve {
namespace {

void law(bool holds, const std::string& broken) {
  if (!holds) throw InvariantError(broken);
}

// Reported if unlimited: exact in a double.
constexpr std::int64_t kMostMappings = std::int64_t{1} << 53;

std::string page_text(PageId page) {
  return "page " + std::to_string(page);
}

// Checks that references match the sequences' blocks, and that every sequence has what its length
// needs.
void check_references(const Ledger& ledger, const std::deque<InFlightCopies>& copies) {
  std::unordered_map<BlockId, std::int32_t> counted;
  for (SeqId id = 0; id < ledger.config.max_seqs; ++id) {
    const Sequence& seq = ledger.seqs[id];
    const std::string name = "sequence " + std::to_string(id);
    if (!seq.open || seq.kv.swapped) {
      law(seq.kv.blocks.empty() && seq.kv.slot == kNoSlot,
          name + " is closed or swapped out, but has blocks or a slot");
      continue;
    }
    const auto there = static_cast<std::int64_t>(seq.kv.blocks.size());
    const bool is_virtual = seq.kv.view == View::kVirtual;
    const std::int64_t least = is_virtual
                                   ? ledger.pages_for(seq.kv.length) * ledger.config.blocks_per_page
                                   : ledger.blocks_for(seq.kv.length);
    law(there >= least, name + " has " + std::to_string(there) + " blocks for " +
                            std::to_string(seq.kv.length) + " tokens");
    law(seq.kv.sealed <= seq.kv.length, name + " is sealed beyond its length");
    law(is_virtual ? there == 0 || seq.kv.slot != kNoSlot : seq.kv.slot == kNoSlot,
        name + " has a slot in the paged view, or none in the virtual view");
    for (std::int64_t i = 0; i < there; ++i) {
      const BlockId block = seq.kv.blocks[i];
      law(block != kNoBlock || i < seq.kv.num_trimmed, name + " has a hole");
      const BlockId shown = ledger.tables[id * ledger.blocks_per_row + i];
      law(shown == std::max(block, BlockId{0}),
          name + " has a block table that differs from its blocks");
      if (block == kNoBlock) continue;
      ++counted[block];
      law(ledger.pool.tenant(ledger.pool.page_of(block)) == seq.tenant,
          page_text(ledger.pool.page_of(block)) + " holds two tenants' blocks");
    }
  }
  std::int64_t distinct = 0;
  for (const auto& [block, count] : counted) {
    law(ledger.pool.refs(block) == count,
        "block " + std::to_string(block) + " has " + std::to_string(ledger.pool.refs(block)) +
            " references recorded and " + std::to_string(count) + " counted");
    ++distinct;
  }
  std::unordered_map<BlockId, std::int32_t> copied;
  std::int64_t num_copies = 0;
  for (const InFlightCopies& batch : copies) {
    for (const BlockId block : batch.blocks) ++copied[block];
    num_copies += static_cast<std::int64_t>(batch.blocks.size());
  }
  for (const auto& [block, count] : copied) {
    law(ledger.pool.copies(block) == count,
        "block " + std::to_string(block) + " has " + std::to_string(ledger.pool.copies(block)) +
            " copies recorded and " + std::to_string(count) + " run");
  }
  law(num_copies == ledger.pool.num_copies(), std::to_string(ledger.pool.num_copies()) +
                                                  " copies are recorded, " +
                                                  std::to_string(num_copies) + " run");
  for (const EpochRecord& record : ledger.records) {
    for (const WrittenRange& written : record.written) {
      const Sequence& seq = ledger.seqs[written.seq];
      law(seq.generation != written.generation || seq.kv.swapped ||
              seq.kv.num_trimmed * ledger.config.block_tokens <= written.first_seen,
          "sequence " + std::to_string(written.seq) + " lacks blocks that epoch " +
              std::to_string(record.epoch) + " reads");
    }
  }
  law(distinct == ledger.pool.num_used_blocks(), std::to_string(ledger.pool.num_used_blocks()) +
                                                     " blocks are used, " +
                                                     std::to_string(distinct) + " are referenced");
}

void check_slots(const Ledger& ledger, DriverWork& work) {
  std::unordered_map<PageId, std::int32_t> shown;
  for (SlotId id = 0; id < ledger.config.num_slots; ++id) {
    const Slot& slot = ledger.slots[id];
    const std::string name = "slot " + std::to_string(id);
    law(slot.size() <= work.space->shape().slot_pages,
        name + " shows more pages than it has room for");
    law(slot.num_pending == 0, name + " is still being mapped");
    law(slot.num_sealed <= slot.size(), name + " has more sealed entries than entries");
    for (std::int64_t i = 0; i < slot.size(); ++i) {
      const SlotEntry& entry = slot.entries[i];
      if (entry.page != kNoPage) ++shown[entry.page];
      law(i >= slot.num_sealed || entry.page == kNoPage || entry.read_only ||
              !work.driver->capabilities().read_only,
          name + " counts a writable page among the sealed ones");
    }
    if (!slot.active()) continue;
    const Sequence& seq = ledger.seqs[slot.seq];
    law(seq.open && seq.kv.slot == id && seq.kv.view == View::kVirtual,
        name + " is not the slot of its sequence");
    law(ledger.num_pages(seq) <= slot.size(), name + " shows less than its sequence has");
    for (std::int64_t i = 0; i < ledger.num_pages(seq); ++i) {
      const SlotEntry& entry = slot.entries[i];
      const std::int32_t width = ledger.config.blocks_per_page;
      for (std::int32_t j = 0; j < width; ++j) {
        const BlockId block = seq.kv.blocks[i * width + j];
        law(block == kNoBlock || block == ledger.pool.first_block(entry.page) + j,
            name + " shows other pages than its sequence has");
        law(block == kNoBlock || ledger.pool.refs(block) < 2 || entry.read_only ||
                (i + 1) * ledger.config.page_tokens() > seq.kv.sealed ||
                !ledger.config.seal_read_only || !work.last_error.empty(),
            page_text(entry.page) + " is sealed and shared but writable in a slot");
      }
      law(!entry.read_only || (i + 1) * ledger.config.page_tokens() <= seq.kv.length,
          name + " is read-only where its sequence writes");
      law(!entry.read_only || entry.page == kNoPage || ledger.config.seal_read_only ||
              ledger.may_restore_access || ledger.pool.has_unpublished() ||
              !ledger.is_exclusive(entry.page),
          page_text(entry.page) + " belongs to one sequence but is read-only in its slot");
    }
  }
  for (std::int64_t id = ledger.pool.next_committed(0); id >= 0;
       id = ledger.pool.next_committed(id + 1)) {
    const auto page = static_cast<PageId>(id);
    const auto it = shown.find(page);
    law(ledger.pool.maps(page) == (it == shown.end() ? 0 : it->second),
        page_text(page) + " counts its slots wrongly");
  }
}

void check_mappings(const Ledger& ledger, DriverWork& work) {
  const auto driving = work.lock();
  const auto expect = [&](Address addr, std::int32_t group, PageId page, bool is_read_only,
                          const char* where) {
    const Mapping found = work.driver->query(addr);
    // A driver that cannot trap writes reports the requested access.
    const Access access = is_read_only ? Access::kRead : Access::kReadWrite;
    law(found.frame == work.space->frame(group, page) && found.access == access,
        page_text(page) + " of group " + std::to_string(group) + " is not mapped as recorded in " +
            where);
  };
  std::int64_t num_mapped = 0;
  for (std::int32_t group = 0; group < ledger.config.num_groups; ++group) {
    for (std::int64_t id = ledger.pool.next_committed(0); id >= 0;
         id = ledger.pool.next_committed(id + 1)) {
      const auto page = static_cast<PageId>(id);
      if (work.repairs.empty())
        expect(work.space->arena(group, page), group, page, false, "the arena");
      ++num_mapped;
    }
    for (SlotId id = 0; id < ledger.config.num_slots; ++id) {
      const Slot& slot = ledger.slots[id];
      for (std::int64_t i = 0; i < slot.size(); ++i) {
        const SlotEntry& entry = slot.entries[i];
        if (entry.page == kNoPage) continue;
        if (!slot.in_repair) {
          expect(work.space->slot(group, id, i), group, entry.page, entry.read_only, "its slot");
        }
        ++num_mapped;
        if (!work.space->has_shadow()) continue;
        if (!slot.in_repair) {
          expect(work.space->shadow(group, id, i), group, entry.page, true, "the shadow");
        }
        ++num_mapped;
      }
    }
  }
  const std::int64_t mapped = work.driver->stats().mapped_frames;
  law(!work.repairs.empty() || mapped == num_mapped,
      std::to_string(mapped) + " frames are mapped, " + std::to_string(num_mapped) +
          " are recorded");
}

}  // namespace

MemoryStats KVMemory::stats() {
  const auto lock = enter();
  background_.apply_finished_work();
  MemoryStats s{};
  DriverStats driver;
  {
    const auto driving = work_.lock();
    driver = work_.driver->stats();
  }
  s.page_bytes = config_.num_groups * static_cast<std::int64_t>(work_.space->page_bytes());
  s.page_tokens = config_.page_tokens();
  s.block_tokens = config_.block_tokens;
  s.blocks_per_page = config_.blocks_per_page;
  s.limit_pages = pool_.limit();
  s.committed_pages = pool_.num_committed();
  s.free_pages = pool_.num_free();
  s.split_pages = pool_.count(PageState::kSplit);
  s.used_pages = pool_.count(PageState::kInUse) + s.split_pages;
  s.idle_pages = pool_.count(PageState::kIdle);
  s.waiting_pages = pool_.count(PageState::kWaiting);
  s.held_pages = pool_.count(PageState::kHeld);
  s.quarantined_pages = work_.num_quarantined();
  s.shared_pages = pool_.num_shared_pages();
  s.used_blocks = pool_.num_used_blocks();
  s.shared_blocks = pool_.num_shared_blocks();
  s.cached_blocks = pool_.num_cached_blocks();
  s.num_slots = config_.num_slots;
  s.num_seqs = ledger_.num_open;
  for (const Slot& slot : slots_) {
    const std::int64_t own = slot.active() ? ledger_.num_pages(seqs_[slot.seq]) : 0;
    s.used_slots += slot.active() ? 1 : 0;
    s.parked_slots += !slot.active() && !slot.empty() ? 1 : 0;
    s.parked_pages += slot.active() ? 0 : slot.size();
    s.spare_pages += slot.active() ? slot.size() - own : 0;
  }
  const std::int64_t block_bytes = config_.num_groups * config_.block_bytes();
  for (const Sequence& seq : seqs_) {
    if (!seq.open) continue;
    (seq.kv.view == View::kVirtual ? s.virtual_seqs : s.paged_seqs) += 1;
    s.swapped_seqs += seq.kv.swapped ? 1 : 0;
    if (seq.kv.swapped) continue;
    const auto there = static_cast<std::int64_t>(seq.kv.blocks.size());
    s.used_tokens += seq.kv.length;
    if (config_.has_state()) continue;
    s.tail_waste_bytes +=
        there * block_bytes - seq.kv.length * config_.token_bytes * config_.num_groups;
  }
  s.swap_blocks = work_.swap->num_used();
  s.swap_capacity_blocks = work_.swap->capacity();
  s.copying_blocks = pool_.num_copies();
  s.memfd_allocated_bytes = driver.allocated_bytes;
  s.num_mappings = driver.num_mappings;
  s.free_mappings = std::min(work_.available_mappings(driver.max_mappings / 2), kMostMappings);
  s.pending_repairs = static_cast<std::int64_t>(work_.repairs.size());
  s.health = !work_.failure.empty()   ? Health::kFailed
             : !work_.repairs.empty() ? Health::kDegraded
                                      : Health::kHealthy;
#define VMSERVE_COUNTER(type, name, what) s.name##_total = ledger_.totals.name;
#include "vmserve/stats.def"
  s.mapper_seconds_total = work_.mapper->cpu_seconds();
  if (Persistence* const persistence = background_.persistence()) {
    const StoreStats store = persistence->store().stats();
    s.persist_bytes = store.bytes;
    s.persist_waiting_blocks =
        persistence->num_waiting() + static_cast<std::int64_t>(ledger_.just_published.size());
    s.persist_written_blocks_total = store.written_blocks;
    s.persist_written_bytes_total = store.written_bytes;
    s.persist_read_bytes_total = store.read_bytes;
    s.persist_broken_blocks_total = store.broken_blocks;
    s.persist_refused_blocks_total = store.refused_writes;
    s.persist_evicted_blocks_total = store.evicted_blocks;
  }
  return s;
}

std::uint64_t KVMemory::fingerprint() const {
  const auto lock = enter();
  Mix mix;
  mix.add(ledger_.fingerprint(), work_.swap->num_used());
  for (SwapId id = 0; id < work_.swap->capacity(); ++id) mix.add(work_.swap->refs(id));
  return mix.value();
}

void KVMemory::check() {
  const auto lock = enter();
  background_.drain_mapper();
  pool_.check();
  check_references(ledger_, background_.copies_in_flight());
  check_slots(ledger_, work_);
  check_mappings(ledger_, work_);
}

}  // namespace vmserve
