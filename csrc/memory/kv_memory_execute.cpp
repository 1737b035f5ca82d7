// The driver's part of a change: clear, copy, map, and set access, as one transaction.
#include <algorithm>
#include <vector>

#include "vmserve/kv_memory.h"

namespace vmserve {
namespace {

// Appends a run, merged with the last one where the two are adjacent.
void append(std::vector<MapRun>& runs, const MapRun& run, std::size_t frame_bytes) {
  if (!runs.empty()) {
    MapRun& last = runs.back();
    const Address end = last.addr + static_cast<std::size_t>(last.frames.count) * frame_bytes;
    if (run.addr == end && run.frames.first == last.frames.first + last.frames.count &&
        run.access == last.access && run.prefault == last.prefault) {
      last.frames.count += run.frames.count;
      return;
    }
  }
  runs.push_back(run);
}

void append(std::vector<AccessRun>& runs, const AccessRun& run) {
  if (!runs.empty() && run.addr == runs.back().addr + runs.back().bytes) {
    runs.back().bytes += run.bytes;
    return;
  }
  runs.push_back(run);
}

void append(std::vector<CopyRun>& runs, const CopyRun& run) {
  if (!runs.empty()) {
    CopyRun& last = runs.back();
    if (run.dst == last.dst + last.bytes && run.src == last.src + last.bytes) {
      last.bytes += run.bytes;
      return;
    }
  }
  runs.push_back(run);
}

void append(std::vector<AddressRun>& runs, const AddressRun& run) {
  if (!runs.empty() && run.addr == runs.back().addr + runs.back().bytes) {
    runs.back().bytes += run.bytes;
    return;
  }
  runs.push_back(run);
}

}  // namespace

void KVMemory::map_runs(const Change& change, std::vector<MapRun>& runs) const {
  const std::size_t page_bytes = space_->page_bytes();
  for (std::int32_t group = 0; group < config_.num_groups; ++group) {
    for (const SlotMap& map : change.maps) {
      const PageId page = slots_[map.slot].entries[map.index].page;
      append(runs,
             {space_->slot(group, map.slot, map.index),
              {space_->frame(group, page), 1},
              map.read_only ? Access::kRead : Access::kReadWrite,
              !map.read_only},
             page_bytes);
    }
  }
  for (std::int32_t group = 0; space_->has_shadow() && group < config_.num_groups; ++group) {
    for (const SlotMap& map : change.maps) {
      const PageId page = slots_[map.slot].entries[map.index].page;
      append(runs,
             {space_->shadow(group, map.slot, map.index),
              {space_->frame(group, page), 1},
              Access::kRead,
              false},
             page_bytes);
    }
  }
}

std::vector<CopyRun> KVMemory::copy_runs(const Change& change) const {
  const auto block_bytes = static_cast<std::size_t>(config_.block_tokens * config_.token_bytes);
  std::vector<CopyRun> runs;
  for (std::int32_t group = 0; group < config_.num_groups; ++group) {
    for (const BlockCopy& copy : change.copies) {
      const BlockId block = seqs_[copy.seq].has.blocks[copy.index];
      append(runs, {space_->arena(group) + static_cast<std::size_t>(block) * block_bytes,
                    space_->arena(group) + static_cast<std::size_t>(copy.source) * block_bytes,
                    static_cast<std::size_t>(copy.num_tokens * config_.token_bytes)});
    }
  }
  return runs;
}

std::vector<CopyRun> KVMemory::swap_runs(const std::vector<SwapCopy>& copies, bool out) const {
  const auto block_bytes = static_cast<std::size_t>(config_.block_tokens * config_.token_bytes);
  std::vector<CopyRun> runs;
  for (std::int32_t group = 0; group < config_.num_groups; ++group) {
    for (const SwapCopy& copy : copies) {
      const Address block =
          space_->arena(group) + static_cast<std::size_t>(copy.block) * block_bytes;
      const Address swap = swap_->address(group, copy.swap);
      append(runs, out ? CopyRun{swap, block, block_bytes} : CopyRun{block, swap, block_bytes});
    }
  }
  return runs;
}

std::vector<AccessRun> KVMemory::access_runs(const Change& change, bool writable) const {
  std::vector<AccessRun> runs;
  const Access access = writable ? Access::kReadWrite : Access::kRead;
  for (const Change::SavedSlot& slot : change.slots) {
    std::vector<std::int64_t> indices = writable ? slot.made_writable : slot.made_read_only;
    std::sort(indices.begin(), indices.end());
    for (std::int32_t group = 0; group < config_.num_groups; ++group) {
      for (const std::int64_t index : indices) {
        append(runs, {space_->slot(group, slot.slot, index), space_->page_bytes(), access});
      }
    }
  }
  return runs;
}

void KVMemory::execute(Change& change) {
  for (SwapCopy& copy : change.swap_in) copy.block = seqs_[copy.seq].has.blocks[copy.index];
  std::vector<AddressRun> zeros;
  for (std::int32_t group = 0; group < config_.num_groups; ++group) {
    for (const PageId page : change.zero_pages) {
      append(zeros, {space_->arena(group, page), space_->page_bytes()});
    }
    const auto bytes = static_cast<std::size_t>(config_.block_tokens * config_.token_bytes);
    for (const BlockId block : change.zero_blocks) {
      append(zeros, {space_->arena(group) + static_cast<std::size_t>(block) * bytes, bytes});
    }
  }
  std::vector<MapRun> maps;
  map_runs(change, maps);
  const std::vector<AccessRun> writable = access_runs(change, /*writable=*/true);
  const std::vector<AccessRun> read_only = access_runs(change, /*writable=*/false);
  const std::vector<CopyRun> out = swap_runs(change.swap_out, /*out=*/true);
  const std::vector<CopyRun> in = swap_runs(change.swap_in, /*out=*/false);
  const std::vector<CopyRun> copies = copy_runs(change);
  change.counts.map_calls = static_cast<std::int64_t>(maps.size());
  change.counts.access_calls = static_cast<std::int64_t>(writable.size() + read_only.size());
  change.counts.copied_blocks = static_cast<std::int64_t>(change.copies.size());
  if (zeros.empty() && maps.empty() && change.counts.access_calls == 0 && out.empty() &&
      in.empty() && copies.empty()) {
    return;
  }
  const auto driving = mapper_->lock_driver();
  driver_->copy_out(out);  // before anything is written
  // NOTE: without a mark nobody would know when they end: refused, the change is undone, and what
  // was copied for nothing lies in host memory that the next copies take, behind these.
  if (!out.empty() && copies_beside_) change.copy_mark = driver_->copy_mark();
  driver_->zero(zeros);
  driver_->copy(copies);
  driver_->copy_in(in);
  change.tx.map(maps);
  change.tx.set_access(writable, Access::kRead);
  change.tx.set_access(read_only, Access::kReadWrite);
  change.counts.swap_copy_runs = static_cast<std::int64_t>(out.size() + in.size());
}

}  // namespace vmserve
