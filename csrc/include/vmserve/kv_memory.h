// KV memory: one pool of pages under two views.
//
// Glossary
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
//   * while more is committed than a lowered limit allows, nothing is free or idle after a plan, an
//     apply or a release (unless the driver refused to take pages back)
//   * each sequence has at least blocks_for(length) blocks or pages_for(length) pages
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "vmserve/kv_memory_types.h"
#include "vmserve/memory/background.h"
#include "vmserve/memory/ops.h"
#include "vmserve/memory/planner.h"
#include "vmserve/memory/room.h"

namespace vmserve {

// Thread-safe: one lock around every call. A mutation happens completely or not at all. A failed
// one may lose cached prefixes, never a sequence's state.
class KVMemory {
 public:
  KVMemory(std::shared_ptr<PageDriver> driver, const MemoryConfig& config);
  ~KVMemory();
  KVMemory(const KVMemory&) = delete;
  KVMemory& operator=(const KVMemory&) = delete;

  const MemoryConfig& config() const { return config_; }

  // Opens an empty sequence without memory or slot. Nullopt if max_seqs are open. `tokens`: token
  // ids known so far (the prompt). The prefix cache shares blocks between sequences of equal
  // tenant, salt and tokens. Without tokens, nothing is matched or published.
  std::optional<SeqId> open(Tenant tenant, View view, const std::string& salt,
                            const std::vector<std::int32_t>& tokens);

  // Counts the tokens of an empty sequence that are in the prefix cache: whole blocks, and at least
  // one token less than the sequence has. Read-only.
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

  // Makes published blocks outlive the process. Pre: prefix_caching; called at most once, before
  // the first sequence is opened. At most every `touch_seconds` the store is notified of the blocks
  // that were hit in the cache.
  void persist_to(std::shared_ptr<PageStore> store, double touch_seconds = kTouchSeconds);
  // Begins to read what the store has of an empty sequence's prefix and the cache has not, as far
  // as there are pages. True while that is under way; match() finds it when it is false. Evicts
  // nothing that the attaches in `beside` need, which the next plan will contain.
  bool restore(SeqId seq, const std::vector<Op>& beside);
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
  // pages too: they are evicted, oldest first. Returns the number of pages.
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
  std::vector<BlockId> blocks(SeqId seq) const;  // kNoBlock: dropped by a sliding window
  std::vector<PageId> slot_pages(SlotId slot) const;
  std::int64_t length(SeqId seq) const;
  std::int64_t sealed(SeqId seq) const;
  View view(SeqId seq) const;
  bool swapped(SeqId seq) const;
  std::optional<SlotId> slot(SeqId seq) const;
  std::vector<SlotId> slots(const std::vector<SeqId>& seqs) const;  // kNoSlot: paged or empty
  std::int32_t block_refs(BlockId block) const;

  // Block tables of all sequences, `[max_seqs, blocks_per_row()]`, always current; block 0 beyond a
  // sequence's end. Valid as long as this object.
  const BlockId* block_tables() const { return &ledger_.tables[0]; }
  std::int64_t blocks_per_row() const { return ledger_.blocks_per_row; }

  // Creates the shadow, a read-only copy of all slot mappings that reads as zero where nothing is
  // mapped. Later changes are mapped in both.
  void enable_shadow();

  MemoryStats stats();
  // Describes the pool in at most `max_cells` cells. O(pages).
  MemoryMap memory_map(std::int64_t max_cells);
  // The same of pages up to the last committed one, with `pages_per_cell` in a cell.
  MemoryMap committed_map(std::int64_t pages_per_cell);
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
  std::shared_ptr<AddressSpace> address_space() const;

 private:
  friend class KindsMemory;  // mutates several memories together, or none

  std::unique_lock<std::mutex> enter() const;  // refuses forks and a closed memory, then locks
  bool wait_for_mapper(const std::vector<Op>& ops, const Plan& plan);
  void finish_pending_work();  // mapper, copies to host memory, repairs. Pre: locked
  // The parts of plan() and apply(). Pre: locked.
  const Assessed& assess(const std::vector<Op>& ops);
  Assessed assess_again(const std::vector<Op>& ops, std::uint64_t version);
  // -- parts of restore(). Pre: locked
  std::int64_t num_within_reach(const Sequence& seq, std::int64_t most, std::int64_t window) const;
  void hold_found(const std::vector<Op>& attaches, std::vector<PageId>& held);
  bool is_holding_pages() const;                    // work in the background may give back pages
  void stage(Change& change, const Assessed& now);  // makes room and changes the ledger
  void execute(Change& change);                     // finds pages and makes the driver calls
  void undo(Change& change, const Error* error);
  void commit(Change& change);
  void schedule_work(const Change& change);
  MemoryMap draw_map(std::int64_t num_pages, std::int64_t pages_per_cell) const;
  std::int64_t num_pages_shown() const;  // up to the last committed one

  pid_t pid_;
  mutable std::mutex mutex_;
  Ledger ledger_;
  const MemoryConfig& config_ = ledger_.config;
  BlockPool& pool_ = ledger_.pool;
  std::vector<Sequence>& seqs_ = ledger_.seqs;
  std::vector<Slot>& slots_ = ledger_.slots;
  DriverWork work_;
  Room room_;
  Ops ops_;
  Planner planner_;
  // The last plan(). It is valid while its version is: background work only adds to what it counted
  // on.
  std::vector<Op> last_ops_, merged_ops_;
  bool is_planned_ = false;
  Assessed assessed_;
  Background background_;
  std::uint64_t generation_ = 0;  // in the digests of prefixes
  bool is_idle_ = false;
};

}  // namespace vmserve
