// KV memory: one pool of pages under two views, for one kind of layers or several.
//
// Glossary
//   kind       layers whose sequences keep the same positions: all, those of a sliding window, or
//              the state after the last. Each kind has its own pages, arena, slots and driver, of
//              its own size; one limit in bytes holds for all (memory/budget.h)
//   whole page one page of every kind but states: page_tokens tokens of all layers. The unit of
//              plans, limits and statistics, because it is what a sequence takes within its
//              windows. States count as the whole pages of as many bytes
//   block      block_tokens tokens of every layer; the unit of the paged view and the prefix cache
//   page       blocks_per_page blocks; one frame per layer group, mapped together.
//              block id = page id x blocks_per_page + its index in the page
//   arena      where every committed page is mapped, at page id x page bytes
//   slot       a contiguous address range; pages are mapped there a second time, in order
//   sequence   an ordered list of blocks. In the virtual view they fill whole pages, which its slot
//              shows in order. In the paged view they lie anywhere and a block table names them
//   spare      a page that a slot shows beyond its sequence: mapped before it is needed
//              (look-ahead, eager), or left by an earlier sequence (a *parked* slot). A sequence
//              that grows into it needs no map call
//   epoch      one step: begun by apply(), ended by complete(). Kernels of a begun epoch may use
//              all memory of its sequences, before and after they are launched
//   sealed     positions that a completed epoch has written; they never change again
//   published  a sealed block that the prefix cache finds by the digest of all tokens up to its end
//   state      instead of K and V: one block for all tokens of a sequence, always in the paged
//              view. Its kernels start a sequence's first step from zeros, whatever the block holds
//   checkpoint a position at which a state is published; the next step writes to a copy
//   copied     being copied to host memory while kernels run. Until the copy ends, the block is
//              not written, not handed out again, and its page is not compacted
//
// States of a page (BlockPool in block_pool.h)
//   absent  -> free -> in use -> waiting(epoch) -> idle -> free -> absent
//   free     committed and unused
//   in use   a sequence references one of its blocks
//   waiting  released, but a running epoch or copy may still read it
//   idle     evictable: it has cached blocks, or is a spare in a slot; in order of last use
//   held     reserved for a mapper command or a repair
//
// Laws, executed by check()
//   * refs(block) = number of sequences that list it
//   * a digest names one published block; a published block without references is cached
//   * all blocks of a page belong to one tenant
//   * the first pages of a slot are those of its sequence, in order. Every slot entry is mapped in
//     every group with the recorded access; committed pages are mapped writable in the arena;
//     nothing else is mapped
//   * every read-only entry of a live sequence lies wholly below its sealed length: a page is
//     writable where its sequence may still write
//   * without seal_read_only, a live sequence's page is read-only only while it is shared or
//     published
//   * a sequence has the blocks that its running epochs read or write
//   * copies(block) = number of copies in flight that read it
//   * committed = free + in use + waiting + idle + held, and committed <= max_pages
//   * bytes committed in all kinds <= the limit. Above a lowered one, nothing is free or idle after
//     a plan without attach, an apply or a release (unless a driver refused to take pages back)
//   * each sequence has at least blocks_for(length) blocks or pages_for(length) pages, and a kind
//     with a window those that the next token sees through it
//   * epochs end in all kinds at once
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "vmserve/kv_memory_types.h"
#include "vmserve/memory/budget.h"
#include "vmserve/memory/kind.h"

namespace vmserve {

// Thread-safe: one lock around every call. A mutation happens completely, in all kinds, or not at
// all. A failed one may lose cached prefixes, never a sequence's state.
class KVMemory {
 public:
  // Pre: kinds differ in drivers, groups, bytes, windows, states and highest limits alone; the
  // first sees all positions if there are several. `limit_pages`: whole pages, in the place of the
  // kinds'.
  KVMemory(std::vector<KindConfig> kinds, std::int64_t limit_pages);
  ~KVMemory();
  KVMemory(const KVMemory&) = delete;
  KVMemory& operator=(const KVMemory&) = delete;

  const MemoryConfig& config(std::size_t kind = 0) const;  // throws MisuseError for no kind

  // Opens an empty sequence without memory or slot. Nullopt if max_seqs are open. `tokens`: token
  // ids known so far (the prompt). The prefix cache shares blocks between sequences of equal
  // tenant, salt and tokens. Without tokens, nothing is matched or published.
  std::optional<SeqId> open(Tenant tenant, View view, const std::string& salt,
                            const std::vector<std::int32_t>& tokens);

  // Counts the tokens of an empty sequence that are in the prefix cache of all kinds: whole blocks,
  // and at least one token less than the sequence has. Read-only.
  std::int64_t match(SeqId seq) const;

  // Counts what the ops need and what is available. Changes nothing that callers can see.
  Plan plan(const std::vector<Op>& ops);

  // Begins an epoch with the ops and returns it. Pre: `version` is that of the last plan(), which
  // fitted, and nothing was mutated since. Throws DriverError, or OutOfMemoryError if the system
  // has less than the limit promises. Then no sequence changed and no epoch began.
  Epoch apply(const std::vector<Op>& ops, std::uint64_t version);

  // Ends all epochs up to `epoch`: what they wrote is sealed and published.
  void complete(Epoch epoch);
  // Ends them without sealing what they wrote, because the kernels failed.
  void abandon_epoch(Epoch epoch);
  // Notes that the epoch's kernels are launched. It completes when the device has executed them,
  // which later calls check (asynchronous drivers).
  void launched(Epoch epoch);
  // Waits until all copies to host memory have ended. False if none is in flight, or if the driver
  // cannot wait; then the copies continue.
  bool finish_copies();
  bool is_copying();
  Epoch begun_epoch() const;
  Epoch completed_epoch() const;

  // Adds drafted positions that were accepted to the sequences' lengths: lengths[i] is between the
  // length of seqs[i] and what it was grown to. They are sealed with the epoch that wrote them.
  void keep(const std::vector<SeqId>& seqs, const std::vector<std::int64_t>& lengths);

  // Appends newly known (sampled) token ids, one per sequence.
  void append_tokens(const std::vector<SeqId>& seqs, const std::vector<std::int32_t>& tokens);

  // The open sequences, in order: an owner that lost track of its own finds them here.
  std::vector<SeqId> open_seqs() const;

  // Closes the sequence. Its published blocks stay cached and its slot is parked. Never fails
  // because of the driver; with deferred reclamation, does not call it.
  void release(SeqId seq);

  // Makes published blocks outlive the process, in a store for each kind. Pre: prefix_caching;
  // called at most once, before the first sequence is opened. At most every `touch_seconds` a store
  // is notified of the blocks that were hit in the cache.
  void persist_to(const std::vector<std::shared_ptr<PageStore>>& stores,
                  double touch_seconds = kTouchSeconds);
  // Begins to read what the store has of an empty sequence's prefix and the cache has not, as far
  // as there are pages. True while that is under way; match() finds it when it is false. Evicts
  // nothing that the attaches in `attaching` need, which the next plan will contain.
  bool restore(SeqId seq, const std::vector<Op>& attaching);
  // Waits for everything that is being read, and helps.
  void finish_restores();
  // Notes that no step runs: until the next sequence is opened, blocks are written without a call.
  void write_when_idle();
  // Waits until all published blocks are written, for `seconds` at most. False if some are not.
  bool flush(double seconds);
  // Why something was not kept or found, returned once; empty if there is nothing new.
  std::string persist_message();
  // Executes up to `max_jobs` reads and writes on this thread, for tests; returns their number.
  std::int64_t run_store(std::int64_t max_jobs);

  // Clears the prefix cache. Blocks published before are never found again, nor are those in the
  // store, which removes them.
  void clear_cache();

  // Returns free pages above `keep_pages` to the system, highest ids first. With `drop_idle`, idle
  // pages are evicted for that, oldest first. Returns the number of pages.
  std::int64_t trim(std::int64_t keep_pages, bool drop_idle);

  // Sets the limit of the pool. Above a lower limit, free and idle pages are returned at once,
  // other pages when they become free. The limit holds even if the call throws DriverError; trim()
  // tries again.
  void set_limit(std::int64_t limit_pages);

  // Moves blocks of paged sequences into fewer pages, unless an epoch runs. Returns the number of
  // pages that became empty.
  std::int64_t compact();

  // Executes up to `max_commands` mapper commands on this thread; returns their number. With
  // MapperMode::kManual no other thread does.
  std::int64_t run_mapper(std::int64_t max_commands);
  // Waits until the mapper is idle.
  void settle_mapper();

  // -- reading
  std::int64_t length(SeqId seq) const;
  std::int64_t sealed(SeqId seq) const;
  View view(SeqId seq) const;
  bool swapped(SeqId seq) const;
  std::optional<SlotId> slot(SeqId seq) const;
  std::vector<SlotId> slots(const std::vector<SeqId>& seqs) const;  // kNoSlot: paged or empty
  // kNoBlock: dropped by a sliding window
  std::vector<BlockId> blocks(SeqId seq, std::size_t kind = 0) const;
  std::vector<PageId> slot_pages(SlotId slot, std::size_t kind = 0) const;
  std::int32_t block_refs(BlockId block, std::size_t kind = 0) const;

  // Block tables of all sequences, `[max_seqs, blocks_per_row()]`, always current; block 0 beyond a
  // sequence's end. Valid as long as this object.
  const BlockId* block_tables(std::size_t kind) const { return &kind_at(kind).ledger.tables[0]; }
  std::int64_t blocks_per_row(std::size_t kind) const {
    return kind_at(kind).ledger.blocks_per_row;
  }

  // Creates the shadow, a read-only copy of all slot mappings that reads as zero where nothing is
  // mapped. Later changes are mapped in both.
  void enable_shadow(std::size_t kind);

  // Gauges and counters of all kinds, as stats.def says.
  MemoryStats stats();
  // Of each kind, in pages of its own.
  std::vector<MemoryStats> kind_stats();
  // Describes the pool in at most `max_cells` cells and one for each kind: the kinds' pages one
  // after the other. What no kind has committed follows the pages of the first, in pages of its
  // size. Slots are the first kind's. O(pages).
  MemoryMap memory_map(std::int64_t max_cells);
  std::string last_error() const;  // text of the last driver error; empty if none
  void check();
  // A hash of the whole state: equal before and after plan().
  std::uint64_t fingerprint() const;

  // Throws MisuseError in a fork of the process, or after close().
  void require_usable() const;
  // Closes the memory: later calls throw MisuseError. The memory is freed with its last tensor.
  void close();
  bool closed() const;

  // The memory itself, whose ownership tensors share.
  std::shared_ptr<AddressSpace> address_space(std::size_t kind) const;

 private:
  std::unique_lock<std::mutex> enter() const;  // refuses forks and a closed memory, then locks
  const Kind& kind_at(std::size_t kind) const;
  void require_alive() const;
  void require_begun(Epoch epoch) const;
  void apply_finished_work();
  void apply_reached_marks();
  void end_epochs(Epoch epoch, bool sealed);
  void publish(SeqId seq);
  bool give_up_past(bool from_slots);
  void finish_pending_work();
  // Blocks of the longest prefix on which all kinds agree. `stored`: counting those of the stores.
  std::int64_t num_matched(const Sequence& seq, bool stored) const;
  // -- parts of plan() and apply()
  void merge(const std::vector<Op>& ops);
  const std::vector<Op>& ops_of(std::size_t kind) const;
  Plan assess(bool packs);
  template <typename PlanOf>
  Plan sum_up(PlanOf plan_of) const;
  Plan plan_of_nothing() const;
  bool finish_background();
  void make_mapping_room(std::int64_t needed);
  void stage_and_execute(std::int64_t needed_mappings, std::vector<Change>& changes,
                         BooksChange& books_change);
  void commit(std::vector<Change>& changes, const BooksChange& books_change);

  pid_t pid_;
  mutable std::mutex mutex_;
  Books books_;
  const std::int64_t whole_page_bytes_;
  const std::int64_t most_pages_;  // highest possible limit
  Kinds kinds_;
  Budget budget_;
  bool has_states_ = false;
  bool is_closed_ = false;
  // The last plan(). It is valid while its version is: background work only adds to what it counted
  // on.
  std::vector<Op> merged_;
  bool is_merged_alone_ = false;          // they are what was asked for
  std::vector<Op> asked_;                 // else
  std::vector<std::vector<Op>> own_ops_;  // of kinds that do not see all
  bool is_planned_ = false;
  std::uint64_t planned_version_ = 0;
  // For each launched epoch, a mark of each kind's driver.
  std::deque<std::pair<Epoch, std::vector<Mark>>> marks_;
  bool is_idle_ = false;
};

}  // namespace vmserve
