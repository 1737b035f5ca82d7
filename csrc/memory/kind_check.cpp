// Checks the laws of one kind of layers and collects its statistics.
#include <algorithm>
#include <string>

#include "vmserve/errors.h"
#include "vmserve/memory/kind.h"

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
  const MemoryConfig& config = ledger.config;
  for (SeqId id = 0; id < config.max_seqs; ++id) {
    const Sequence& seq = ledger.books.seqs[id];
    const Held& own = ledger.held[id];
    const std::string name = "sequence " + std::to_string(id);
    if (!seq.open || seq.kv.swapped) {
      law(own.blocks.empty() && seq.kv.slot == kNoSlot,
          name + " is closed or swapped out, but has blocks or a slot");
      continue;
    }
    const auto there = static_cast<std::int64_t>(own.blocks.size());
    const bool is_virtual = ledger.view(seq) == View::kVirtual;
    const SlotId slot = ledger.slot_of(seq);
    const std::int64_t least = is_virtual ? ledger.pages_for(seq.kv.length) * config.blocks_per_page
                                          : ledger.blocks_for(seq.kv.length);
    law(there >= least, name + " has " + std::to_string(there) + " blocks for " +
                            std::to_string(seq.kv.length) + " tokens");
    law(seq.kv.sealed <= seq.kv.length, name + " is sealed beyond its length");
    law(is_virtual ? there == 0 || slot != kNoSlot : slot == kNoSlot,
        name + " has a slot in the paged view, or none in the virtual view");
    law(config.has_state() ||
            own.num_trimmed <= config.first_seen(seq.kv.length) / config.block_tokens ||
            config.window == 0,
        name + " lacks blocks that its window shows");
    for (std::int64_t i = 0; i < there; ++i) {
      const BlockId block = own.blocks[i];
      law(block != kNoBlock || i < own.num_trimmed, name + " has a hole");
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
  for (const EpochRecord& record : ledger.books.records) {
    for (std::size_t i = 0; i < record.written.size(); ++i) {
      const WrittenRange& written = record.written[i];
      const Sequence& seq = ledger.books.seqs[written.seq];
      const std::int64_t trimmed = ledger.held[written.seq].num_trimmed * config.block_tokens;
      law(seq.generation != written.generation || seq.kv.swapped ||
              trimmed <= ledger.first_seen(record, i),
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
    const Sequence& seq = ledger.books.seqs[slot.seq];
    law(seq.open && seq.kv.slot == id && seq.kv.view == View::kVirtual,
        name + " is not the slot of its sequence");
    law(ledger.num_pages(slot.seq) <= slot.size(), name + " shows less than its sequence has");
    for (std::int64_t i = 0; i < ledger.num_pages(slot.seq); ++i) {
      const SlotEntry& entry = slot.entries[i];
      const std::int32_t width = ledger.config.blocks_per_page;
      for (std::int32_t j = 0; j < width; ++j) {
        const BlockId block = ledger.held[slot.seq].blocks[i * width + j];
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

MemoryStats Kind::stats() {
  MemoryStats s{};
  DriverStats driver;
  {
    const auto driving = work.lock();
    driver = work.driver->stats();
  }
  s.page_bytes = page_bytes();
  s.page_tokens = config.page_tokens();
  s.block_tokens = config.block_tokens;
  s.blocks_per_page = config.blocks_per_page;
  s.limit_pages = pool.limit();
  s.committed_pages = pool.num_committed();
  s.free_pages = pool.num_free();
  s.split_pages = pool.count(PageState::kSplit);
  s.used_pages = pool.count(PageState::kInUse) + s.split_pages;
  s.idle_pages = pool.count(PageState::kIdle);
  s.waiting_pages = pool.count(PageState::kWaiting);
  s.held_pages = pool.count(PageState::kHeld);
  s.quarantined_pages = work.num_quarantined();
  s.shared_pages = pool.num_shared_pages();
  s.used_blocks = pool.num_used_blocks();
  s.shared_blocks = pool.num_shared_blocks();
  s.cached_blocks = pool.num_cached_blocks();
  s.num_slots = config.num_slots;
  s.num_seqs = books_.num_open;
  for (const Slot& slot : slots_) {
    const std::int64_t own = slot.active() ? ledger.num_pages(slot.seq) : 0;
    s.used_slots += slot.active() ? 1 : 0;
    s.parked_slots += !slot.active() && !slot.empty() ? 1 : 0;
    s.parked_pages += slot.active() ? 0 : slot.size();
    s.spare_pages += slot.active() ? slot.size() - own : 0;
  }
  const std::int64_t block_bytes = config.num_groups * config.block_bytes();
  for (SeqId id = 0; id < config.max_seqs; ++id) {
    const Sequence& seq = seqs_[id];
    if (!seq.open) continue;
    (ledger.view(seq) == View::kVirtual ? s.virtual_seqs : s.paged_seqs) += 1;
    s.swapped_seqs += seq.kv.swapped ? 1 : 0;
    if (seq.kv.swapped) continue;
    const auto there = static_cast<std::int64_t>(held_[id].blocks.size());
    s.used_tokens += seq.kv.length;
    if (config.has_state()) continue;
    s.tail_waste_bytes +=
        there * block_bytes - seq.kv.length * config.token_bytes * config.num_groups;
  }
  s.swap_blocks = work.swap->num_used();
  s.swap_capacity_blocks = work.swap->capacity();
  s.copying_blocks = pool.num_copies();
  s.memfd_allocated_bytes = driver.allocated_bytes;
  s.num_mappings = driver.num_mappings;
  s.free_mappings = std::min(work.available_mappings(driver.max_mappings / 2), kMostMappings);
  s.pending_repairs = static_cast<std::int64_t>(work.repairs.size());
  s.health = !work.failure.empty()   ? Health::kFailed
             : !work.repairs.empty() ? Health::kDegraded
                                     : Health::kHealthy;
#define VMSERVE_COUNTER(type, name, rule, what) s.name##_total = ledger.totals.name;
#include "vmserve/stats.def"
  s.mapper_seconds_total = work.mapper->cpu_seconds();
  if (Persistence* const persistence = background.persistence()) {
    const StoreStats store = persistence->store().stats();
    s.persist_bytes = store.bytes;
    s.persist_waiting_blocks =
        persistence->num_waiting() + static_cast<std::int64_t>(ledger.just_published.size());
    s.persist_written_blocks_total = store.written_blocks;
    s.persist_written_bytes_total = store.written_bytes;
    s.persist_read_bytes_total = store.read_bytes;
    s.persist_broken_blocks_total = store.broken_blocks;
    s.persist_refused_blocks_total = store.refused_writes;
    s.persist_evicted_blocks_total = store.evicted_blocks;
  }
  return s;
}

void Kind::check() {
  background.drain_mapper();
  pool.check();
  check_references(ledger, background.copies_in_flight());
  check_slots(ledger, work);
  check_mappings(ledger, work);
}

}  // namespace vmserve
