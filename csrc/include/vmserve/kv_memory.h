// KV memory: one pool of pages under two views.
//
// Glossary
//   block      block_tokens tokens of every layer; what the paged view and the prefix cache share
//   page       blocks_per_page blocks; one frame per layer group, mapped together.
//              block id = page id x blocks_per_page + its place in the page
//   arena      where each committed page is mapped, at page id x page bytes, while committed
//   slot       a contiguous range of addresses; pages are mapped there a second time, in order
//   sequence   an ordered list of blocks. In the virtual view they fill whole pages, which its slot
//              shows in order; in the paged view they lie anywhere and a block table names them
//   spare      a page that a slot shows beyond its sequence: mapped ahead of need (look-ahead,
//              eager), or left by an earlier sequence (a *parked* slot). Whoever grows into it
//              needs no map call
//   epoch      one step: begun by apply(), over with complete(). Kernels of a begun epoch may
//              touch what its sequences own, launched or not
//   sealed     positions that a completed epoch has written; they never change again
//   published  a sealed block that the prefix cache names by the digest of all tokens up to its end
//   copied     being copied to host memory beside the kernels, where the driver can: nobody writes
//              to the block, has it again or packs its page before the copy has ended
//
// What a page is (see block_pool.h for the ledger)
//   absent  -> free -> in use -> waiting(epoch) -> idle -> free -> absent
//   free     committed and nobody's
//   in use   a sequence references one of its blocks
//   waiting  given up, but an epoch that could read it is not complete, or a copy reads it
//   idle     evictable: cached blocks, or spare in a slot; in order of last use
//   held     a mapper's command or a repair has it
//
// Laws, executed by check()
//   * refs(block) = the sequences that list it
//   * a digest names one published block; a published block without references is cached
//   * blocks of one page belong to one tenant
//   * the pages of a virtual sequence are those that its slot shows first, in order; every slot
//     entry is mapped in every group with the recorded access; committed pages are mapped writable
//     in the arena; nothing else is mapped
//   * a page in a slot is not read-only where its sequence may still write: every read-only entry
//     of a live sequence lies wholly below its sealed length
//   * without seal_read_only, a live sequence's page is read-only only while somebody shares it, or
//     the prefix cache names it
//   * a block is copied as often as the copies that run have it
//   * committed = free + in use + waiting + idle + held, and committed <= max_pages
//   * while more is committed than a lowered limit allows, nothing is free or idle after a plan, an
//     apply or a release (unless the driver refused to take it back)
//   * blocks_for(length) blocks, or pages_for(length) pages, at least, belong to each sequence
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "vmserve/kv_memory_types.h"
#include "vmserve/memory/ahead.h"
#include "vmserve/memory/ops.h"
#include "vmserve/memory/planner.h"
#include "vmserve/memory/room.h"

namespace vmserve {

// Thread-safe: one lock around every call. Every mutation happens as a whole or not at all; what a
// failed one may cost is cached prefixes, never a sequence's state.
class KVMemory {
 public:
  KVMemory(std::shared_ptr<PageDriver> driver, const MemoryConfig& config);
  ~KVMemory();
  KVMemory(const KVMemory&) = delete;
  KVMemory& operator=(const KVMemory&) = delete;

  const MemoryConfig& config() const { return config_; }

  // An empty sequence, without memory or slot; nothing when max_seqs are open. `tokens` are those
  // known so far (the prompt): the prefix cache shares between sequences of equal tenant, salt and
  // tokens. Without tokens nothing is matched or published.
  std::optional<SeqId> open(Tenant tenant, View view, const std::string& salt,
                            const std::vector<std::int32_t>& tokens);

  // How many tokens of the (empty) sequence are in the prefix cache: whole blocks, at most one
  // token less than the sequence has. Read-only.
  std::int64_t match(SeqId seq) const;

  // Read-only. What the ops need and what there is.
  Plan plan(const std::vector<Op>& ops);

  // Pre: `version` is that of the last plan(), which fitted, and nothing was mutated since.
  // Begins an epoch and returns it. Throws OutOfMemoryError (the system has less than the limit
  // promises) or DriverError; then no sequence changed and no epoch was begun.
  Epoch apply(const std::vector<Op>& ops, std::uint64_t version);

  // The epochs up to `epoch` are over: what they wrote is sealed and published.
  void complete(Epoch epoch);
  // They are over, but what they wrote is worthless (the kernels failed): nothing is sealed.
  void abandon_epoch(Epoch epoch);
  // The epoch's work has been given to the device: it is complete when the device has done it,
  // which every later call looks for (an asynchronous driver's events).
  void launched(Epoch epoch);
  // Waits until the copies to host memory that run have ended. False if there are none, or if the
  // driver cannot wait: then they go on.
  bool finish_copies();
  bool is_copying();
  Epoch begun_epoch() const;
  Epoch completed_epoch() const;

  // Tokens that became known (sampled), one for each sequence.
  void append_tokens(const std::vector<SeqId>& seqs, const std::vector<std::int32_t>& tokens);

  // The sequence is gone; its blocks stay cached where they are published, its slot is parked.
  // Never fails for the driver's sake and, with deferred reclamation, calls it not at all.
  void release(SeqId seq);

  // Cached blocks are forgotten and none that is published so far is found again (new weights).
  void clear_cache();

  // Gives free pages above `keep_pages` back to the system, highest ids first; with `drop_idle`
  // free and idle ones, which are evicted for it, oldest first. Returns how many pages went back.
  std::int64_t trim(std::int64_t keep_pages, bool drop_idle);

  // A lower limit gives back what is free or idle above it at once, the rest as soon as it is.
  // The limit holds even when giving back throws DriverError; trim() then tries again.
  void set_limit(std::int64_t limit_pages);

  // Moves blocks of paged sequences so that fewer pages hold them, unless an epoch runs; returns
  // how many pages it emptied.
  std::int64_t compact();

  // Runs up to `max_commands` of the mapper's commands here and now; how many there were.
  // With MapperMode::kManual nobody else does.
  std::int64_t run_mapper(std::int64_t max_commands);
  // Waits until the mapper has nothing to do.
  void settle_mapper();

  // -- reading
  std::vector<BlockId> blocks(SeqId seq) const;  // kNoBlock where given up
  std::vector<PageId> slot_pages(SlotId slot) const;
  std::int64_t length(SeqId seq) const;
  std::int64_t sealed(SeqId seq) const;
  View view(SeqId seq) const;
  bool swapped(SeqId seq) const;
  std::optional<SlotId> slot(SeqId seq) const;
  std::vector<SlotId> slots(const std::vector<SeqId>& seqs) const;  // kNoSlot where there is none
  std::int32_t block_refs(BlockId block) const;

  // Block tables of all sequences, `[max_seqs, blocks_per_row()]`, kept current: block 0 beyond the
  // end. It stays valid until this object goes.
  const BlockId* block_tables() const { return &ledger_.tables[0]; }
  std::int64_t blocks_per_row() const { return ledger_.blocks_per_row; }

  // Makes the shadow (a read-only view of the slots that reads as zero where nothing is mapped),
  // which is kept in step from then on.
  void enable_shadow();

  MemoryStats stats();
  // A picture of the pool in at most `max_cells` cells. Takes time in proportion to the pages.
  MemoryMap memory_map(std::int64_t max_cells);
  std::string last_error() const;  // why the newest repair was needed; empty if none was
  void check();
  // A number of the whole state: equal before and after a plan().
  std::uint64_t fingerprint() const;

  // Throws MisuseError in a fork of the process, and once the memory is closed.
  void require_usable() const;
  // Post: every other call throws MisuseError. The memory itself goes with its last tensor.
  void close();
  bool closed() const;

  // For tensors over the memory, which keep it alive.
  std::shared_ptr<AddressSpace> address_space() const;

 private:
  std::unique_lock<std::mutex> enter() const;  // refuses a fork and a closed memory, then locks
  bool wait_for_mapper(const std::vector<Op>& ops, const Plan& plan);
  void commit(Change& change);

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
  // The last plan(), which holds while its version does: what happens behind callers brings more
  // than it counted on.
  std::vector<Op> asked_, planned_;
  Assessed assessed_;
  Ahead ahead_;
  std::uint64_t weights_epoch_ = 0;
};

}  // namespace vmserve
