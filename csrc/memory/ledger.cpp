#include "vmserve/memory/ledger.h"

#include <algorithm>
#include <utility>

#include "vmserve/memory/require.h"
#include "vmserve/mix.h"

namespace vmserve {

Ledger::Ledger(Books& all_books, std::size_t kind, const MemoryConfig& options,
               std::int64_t extent_pages, bool read_only)
    : books(all_books),
      number(kind),
      config(options),
      traps_writes(read_only),
      pool(config.max_pages, config.blocks_per_page, config.limit_pages, config.zero_policy,
           extent_pages),
      held(static_cast<std::size_t>(config.max_seqs)),
      slots(static_cast<std::size_t>(config.num_slots)),
      pages_per_slot(pages_for(config.max_len)),
      blocks_per_row(pages_per_slot * config.blocks_per_page),
      tables(config.max_seqs * blocks_per_row),
      row_sizes(static_cast<std::size_t>(config.max_seqs)) {}

std::int64_t Ledger::pages_for(std::int64_t num_tokens) const {
  if (num_tokens == 0 || config.has_state()) return std::min<std::int64_t>(num_tokens, 1);
  return round_up_div(num_tokens + config.read_slack, config.page_tokens());
}

std::int64_t Ledger::blocks_for(std::int64_t num_tokens) const {
  return round_up_div(num_tokens, config.block_span());
}

std::int64_t Ledger::num_pages(SeqId seq) const {
  return static_cast<std::int64_t>(held[seq].blocks.size()) / config.blocks_per_page;
}

std::int64_t Ledger::num_matched(const Sequence& seq, std::int64_t most,
                                 const std::function<bool(const Digest&)>& is_there) const {
  std::int64_t matched = 0;
  if (config.sees_all()) {
    while (matched < most && is_there(seq.digests[matched])) ++matched;
    return matched;
  }
  std::int64_t run_start = 0;  // start of the run of blocks there that ends here
  for (std::int64_t i = 0; i < most; ++i) {
    if (!is_there(seq.digests[i])) run_start = i + 1;
    const std::int64_t first = config.first_seen((i + 1) * config.block_tokens);
    if (first / config.block_tokens >= run_start) matched = i + 1;
  }
  return matched;
}

void Ledger::park(SlotId id, Epoch retire) {
  Slot& slot = slots[id];
  slot.seq = kNoSeq;
  slot.retire = std::max(slot.retire, retire);
  slot.parked_at = ++parkings;
}

void Ledger::write_table(SeqId id, std::size_t from) {
  const std::vector<BlockId>& blocks = held[id].blocks;
  BlockId* row = &tables[id * blocks_per_row];
  for (std::size_t i = from; i < blocks.size(); ++i) row[i] = std::max(blocks[i], BlockId{0});
  for (std::size_t i = blocks.size(); i < row_sizes[id]; ++i) row[i] = 0;
  row_sizes[id] = blocks.size();
}

void Ledger::publish_state(SeqId id) {
  const Sequence& seq = books.seqs[id];
  const BlockId block = held[id].blocks[0];
  const std::int64_t at = seq.kv.sealed;
  const std::int64_t full = at / config.block_tokens;
  const bool is_checkpoint = at % config.block_tokens == 0 &&
                             (at == seq.last_checkpoint ||
                              (config.checkpoint_tokens > 0 && at % config.checkpoint_tokens == 0));
  if (!is_checkpoint || at != seq.kv.length || pool.is_published(block) ||
      full > static_cast<std::int64_t>(seq.digests.size())) {
    return;
  }
  publish_block(block, seq.digests[full - 1]);
}

void Ledger::publish(SeqId id, std::int64_t index) {
  const BlockId block = held[id].blocks[index];
  if (block == kNoBlock || pool.is_published(block)) return;
  publish_block(block, books.seqs[id].digests[index]);
}

void Ledger::publish_block(BlockId block, const Digest& digest) {
  if (!pool.publish(block, digest)) return;
  ++totals.published_blocks;
  if (logs_published) just_published.push_back(digest);
}

std::vector<BlockId> Ledger::matched_blocks(const Sequence& seq, std::int64_t num_tokens,
                                            std::int64_t first_token) const {
  if (config.has_state()) return {pool.find(seq.digests[num_tokens / config.block_tokens - 1])};
  std::vector<BlockId> blocks(static_cast<std::size_t>(first_token / config.block_tokens),
                              kNoBlock);
  for (auto i = static_cast<std::int64_t>(blocks.size()); i < num_tokens / config.block_tokens;
       ++i) {
    blocks.push_back(pool.find(seq.digests[i]));
  }
  return blocks;
}

bool Ledger::takes_whole_page(std::int64_t block_index, bool dense) const {
  // Short sequences share split pages. A longer one takes whole pages from each page start on. Its
  // blocks fill them in order, so a conversion to the virtual view needs no copy.
  return !dense && config.blocks_per_page > 1 && block_index >= config.blocks_per_page &&
         block_index % config.blocks_per_page == 0;
}

// Whether the page has published blocks from its block `count` on.
bool Ledger::has_published_from(PageId page, std::int32_t count) const {
  for (std::int32_t j = count; j < config.blocks_per_page; ++j) {
    if (pool.is_published(pool.first_block(page) + j)) return true;
  }
  return false;
}

// Whether zeroing the page's other blocks, which happens at once, would race with a running epoch
// that may read them. (Writes by kernels would not: they are ordered after it.)
bool Ledger::zeroing_races_readers(PageId page) const {
  return config.zero_policy == ZeroPolicy::kAlways && pool.retire(page) > books.completed;
}

std::vector<BoundPage> Ledger::bind_pages(const std::vector<BlockId>& blocks,
                                          std::int64_t num_tokens, bool own,
                                          std::int32_t held) const {
  const std::int32_t width = config.blocks_per_page;
  const std::int64_t total = blocks_for(num_tokens);
  std::vector<BoundPage> bound;
  for (std::int64_t first = 0; first < total; first += width) {
    const auto count = static_cast<std::int32_t>(std::min<std::int64_t>(width, total - first));
    std::int32_t present = 0;
    bool in_order = true;
    const PageId page = blocks[first] == kNoBlock ? kNoPage : pool.page_of(blocks[first]);
    for (std::int32_t j = 0; j < count; ++j) {
      present += blocks[first + j] != kNoBlock ? 1 : 0;
      in_order = in_order && page != kNoPage && blocks[first + j] == pool.first_block(page) + j;
    }
    using Kind = BoundPage::Kind;
    const bool is_full = (first + width) * config.block_tokens <= num_tokens;
    // All blocks were dropped. A partial page needs memory anyway, for the tokens still to be
    // written.
    if (present == 0 && is_full) {
      bound.push_back({Kind::kHole, kNoPage, 0});
    } else if (in_order && is_full) {
      bound.push_back({Kind::kShare, page, count});
    } else if (in_order && pool.total_refs(page) == (own ? count : 0) &&
               !has_published_from(page, count) && pool.held(page) <= held &&
               !zeroing_races_readers(page) && pool.copying(page) == 0) {
      bound.push_back({Kind::kClaim, page, count});
    } else {
      bound.push_back({Kind::kCopy, kNoPage, count});
    }
  }
  return bound;
}

// Pages that compact_all() may take apart: used only by paged sequences, with unused, cached or
// reserved blocks. None while an epoch runs that may write them; none with a copy in flight.
std::unordered_map<Tenant, std::vector<PageId>> Ledger::compactable_pages() const {
  std::unordered_map<Tenant, std::vector<PageId>> pages;
  if (books.completed != books.begun) return pages;
  for (std::int64_t id = pool.next_committed(0); id >= 0; id = pool.next_committed(id + 1)) {
    const auto page = static_cast<PageId>(id);
    const std::int32_t used = pool.used(page);
    const bool is_compactable = used > 0 && used < config.blocks_per_page && pool.maps(page) == 0 &&
                                pool.held(page) == 0 && pool.copying(page) == 0;
    if (is_compactable) pages[pool.tenant(page)].push_back(page);
  }
  return pages;
}

// Pages that cannot be compacted yet: pages in use with gaps, while an epoch or a copy runs, and
// pages with a copy in flight.
std::int64_t Ledger::num_uncompactable_pages() const {
  if (books.completed == books.begun && pool.num_copies() == 0) return 0;
  std::int64_t pages = 0;
  for (std::int64_t id = pool.next_committed(0); id >= 0; id = pool.next_committed(id + 1)) {
    const auto page = static_cast<PageId>(id);
    const bool has_gaps = pool.used(page) > 0 && pool.used(page) < config.blocks_per_page;
    const bool has_free_blocks = has_gaps && pool.maps(page) == 0 && pool.held(page) == 0;
    const bool is_copied = pool.used(page) > 0 && pool.copying(page) > 0;
    pages += has_free_blocks || is_copied ? 1 : 0;
  }
  return pages;
}

// Unused blocks right after `block` in a page that is reserved for the sequence.
std::int64_t Ledger::num_own_blocks_after(SeqId id, BlockId block) const {
  const PageId page = pool.page_of(block);
  if (pool.owner(page) != id || !pool.is_at_rest(page)) return 0;
  const BlockId end = pool.first_block(page) + config.blocks_per_page;
  BlockId next = block + 1;
  while (next < end && pool.refs(next) == 0 && !pool.is_published(next)) ++next;
  return next - block - 1;
}

std::int64_t Ledger::num_past_blocks(const Sequence& seq, std::int64_t first_token) const {
  const bool is_virtual = seq.kv.view == View::kVirtual;
  const std::int64_t unit = is_virtual ? config.page_tokens() : config.block_tokens;
  return first_token / unit * unit / config.block_tokens;
}

bool Ledger::trim_front(SeqId id, std::int64_t first_token) {
  Held& own = held[id];
  if (config.has_state()) return false;
  const std::int64_t stop = std::min(num_past_blocks(books.seqs[id], first_token),
                                     static_cast<std::int64_t>(own.blocks.size()));
  if (stop <= own.num_trimmed) return false;
  for (std::int64_t i = own.num_trimmed; i < stop; ++i) {
    BlockId& block = own.blocks[i];
    if (block == kNoBlock) continue;
    const PageId page = pool.page_of(block);
    may_restore_access = may_restore_access || pool.refs(block) > 1;
    pool.drop_ref(block, books.begun);
    if (pool.owner(page) == id && pool.used(page) == 0) pool.set_owner(page, kNoSeq);
    block = kNoBlock;
  }
  own.num_trimmed = stop;
  write_table(id, 0);
  return true;
}

bool Ledger::drop_unseen(const EpochRecord& ended) {
  bool has_dropped = false;
  if (books.records.empty() && ended.written.empty()) return false;
  std::vector<bool> is_done(held.size());
  const auto drop = [&](const EpochRecord& record, bool is_last) {
    for (std::size_t i = 0; i < record.written.size(); ++i) {
      const WrittenRange& written = record.written[i];
      const bool is_same = books.seqs[written.seq].generation == written.generation;
      if (!is_same || is_done[written.seq]) continue;
      is_done[written.seq] = !is_last;
      has_dropped = trim_front(written.seq, first_seen(record, i)) || has_dropped;
    }
  };
  for (const EpochRecord& record : books.records) drop(record, /*is_last=*/false);
  drop(ended, /*is_last=*/true);
  return has_dropped;
}

bool Ledger::can_unmap(const Slot& slot) const {
  return !slot.active() && !slot.empty() && !slot.in_repair && slot.num_pending == 0 &&
         slot.retire <= books.completed;
}

// Pages of parked slots that a running epoch may still read.
std::int64_t Ledger::num_retiring_pages() const {
  std::int64_t pages = 0;
  for (const Slot& slot : slots) {
    pages += !slot.active() && slot.retire > books.completed ? slot.size() : 0;
  }
  return pages;
}

SlotId Ledger::oldest_parked() const {
  SlotId oldest = kNoSlot;
  for (SlotId id = 0; id < config.num_slots; ++id) {
    if (!can_unmap(slots[id])) continue;
    if (oldest == kNoSlot || slots[id].parked_at < slots[oldest].parked_at) oldest = id;
  }
  return oldest;
}

// Removes the entries without a driver call. A removed tail shortens the slot; else a hole remains.
void Ledger::remove_entries(SlotId id, std::int64_t first, std::int64_t count) {
  Slot& slot = slots[id];
  const bool is_tail = first + count == slot.size();
  slot.num_sealed = std::min(slot.num_sealed, first);
  for (std::int64_t i = first + count - 1; i >= first; --i) {
    const PageId page = slot.entries[i].page;
    slot.entries[i] = {kNoPage, false};
    if (page != kNoPage) pool.drop_map(page);
  }
  if (is_tail) slot.entries.resize(static_cast<std::size_t>(first));
}

std::uint64_t Ledger::fingerprint() const {
  Mix mix;
  mix.add(pool.fingerprint(), parkings, may_restore_access, slots.size());
  for (const Held& own : held) {
    mix.add(own.num_trimmed);
    for (const BlockId block : own.blocks) mix.add(block);
    for (const SwapId swap : own.swap) mix.add(swap);
  }
  for (const Slot& slot : slots) {
    mix.add(slot.seq, slot.num_pending, slot.num_sealed, slot.in_repair, slot.retire,
            slot.parked_at, slot.last_command, slot.last_map);
    for (const SlotEntry& entry : slot.entries) mix.add(entry.page, entry.read_only);
  }
#define VMSERVE_COUNTER(type, name, rule, what) mix.add(totals.name);
#include "vmserve/stats.def"
  mix.add(recent.pages_now, recent.newcomers_now, recent.newest_tenant);
  return mix.value();
}

// Whether no other sequence and no cached prefix uses the page.
bool Ledger::is_exclusive(PageId page) const {
  if (pool.shared(page) > 0) return false;
  for (std::int32_t j = 0; j < config.blocks_per_page; ++j) {
    if (pool.is_published(pool.first_block(page) + j)) return false;
  }
  return true;
}

}  // namespace vmserve
