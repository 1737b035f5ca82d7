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
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "vmserve/address_space.h"
#include "vmserve/block_pool.h"
#include "vmserve/driver.h"
#include "vmserve/errors.h"
#include "vmserve/kv_memory_types.h"
#include "vmserve/lazy_array.h"
#include "vmserve/mapper.h"
#include "vmserve/prefix_digest.h"
#include "vmserve/slot_table.h"
#include "vmserve/swap_space.h"
#include "vmserve/transaction.h"

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
  const BlockId* block_tables() const { return &tables_[0]; }
  std::int64_t blocks_per_row() const { return blocks_per_row_; }

  // Makes the shadow (a read-only view of the slots that reads as zero where nothing is mapped),
  // which is kept in step from then on.
  void enable_shadow();

  MemoryStats stats();
  // A picture of the pool in at most `max_cells` cells. Takes time in proportion to the pages.
  MemoryMap memory_map(std::int64_t max_cells);
  std::string last_error() const;  // why the newest repair was needed; empty if none was
  void check();

  // Throws MisuseError in a fork of the process, and once the memory is closed.
  void require_usable() const;
  // Post: every other call throws MisuseError. The memory itself goes with its last tensor.
  void close();
  bool closed() const;

  // For tensors over the memory, which keep it alive.
  std::shared_ptr<AddressSpace> address_space() const;

 private:
  // What a sequence has in memory.
  struct Holding {
    View view = View::kVirtual;
    SlotId slot = kNoSlot;
    std::int64_t length = 0;
    std::int64_t sealed = 0;
    std::int64_t seal_limit = std::numeric_limits<std::int64_t>::max();  // worthless from here on
    std::int64_t num_trimmed = 0;                                        // leading blocks given up
    std::int64_t num_published = 0;  // leading blocks offered to the prefix cache
    std::vector<BlockId> blocks;
    bool swapped = false;
    std::vector<SwapId> swap;
  };

  struct Sequence {
    bool open = false;
    std::uint32_t generation = 0;  // tells apart those that had the same id
    Tenant tenant = 0;
    Holding has;
    std::vector<std::int32_t> tokens;
    bool nameless = false;  // its tokens are not (or not all) known: nothing is published
    Digest root{};
    std::vector<Digest> digests;  // of the first full blocks
  };

  // How one page of a virtual sequence comes about from blocks that exist.
  struct BoundPage {
    enum class Kind { kHole, kShare, kClaim, kCopy } kind;
    PageId page;
    std::int32_t num_blocks;  // that hold its tokens
  };

  // Memory that a change still has to find.
  struct Fresh {
    enum class Kind { kSlotPage, kWholePage, kBlock } kind;
    SeqId seq;
    std::int64_t index;  // kSlotPage: of the page; else of the block
  };

  struct BlockCopy {
    SeqId seq;
    std::int64_t index;  // of the block
    BlockId source;
    std::int64_t num_tokens;
  };

  struct SlotMap {
    SlotId slot;
    std::int64_t index;
    bool read_only;
  };

  struct SwapCopy {
    SeqId seq;
    std::int64_t index;  // of the block, which swapping in finds last
    BlockId block;
    SwapId swap;
  };

  struct Attached {
    SeqId seq;
    std::vector<BlockId> blocks;
  };

  struct Forked {
    SeqId child;
    SeqId parent;
    std::int64_t num_tokens;
  };

  // A mutation under way: what was done to the books, and so what to undo; and what the driver is
  // to do before it is true.
  struct Change {
    struct Grown {
      SeqId seq;
      std::size_t num_blocks;
      std::int64_t cow_index;
      BlockId cow_block;
    };
    struct SavedSlot {
      SlotId slot;
      SeqId seq;
      std::int64_t size;
      Epoch retire;
      std::vector<std::int64_t> made_writable;
      std::vector<std::int64_t> made_read_only;
    };
    explicit Change(PageDriver& driver) : tx(driver) {}
    Transaction tx;
    bool dense = false;
    std::vector<std::pair<SeqId, Holding>> holdings;
    std::vector<Grown> grown;
    std::vector<SavedSlot> slots;
    std::vector<BlockId> refs;
    std::vector<BlockId> matched;                     // kept while memory is sought
    std::unordered_map<SeqId, std::int64_t> targets;  // tokens that what is converted grows to
    std::vector<PageId> held;
    std::vector<std::pair<PageId, SeqId>> owners;
    std::vector<SwapId> swap_taken;
    std::vector<Fresh> fresh;
    std::vector<BlockCopy> copies;
    std::vector<SwapCopy> swap_out, swap_in;
    std::optional<Mark> copy_mark;  // behind swap_out, where that runs beside the kernels
    std::vector<Attached> attached;
    std::unordered_map<BlockId, std::int32_t> left;  // by so many, each to a copy of its own
    std::vector<PageId> zero_pages;
    std::vector<BlockId> zero_blocks;
    std::vector<SlotMap> maps;
    // At the commit.
    std::vector<BlockId> drops;
    std::vector<SwapId> swap_drops;
    std::vector<Op> grows;
    std::vector<Forked> forked;
    std::vector<SeqId> touched;
    MemoryCounters counts;
  };

  // Driver calls that could not be undone: the pages concerned are held, and the slots unusable,
  // until the calls succeed, which every later mutation tries first.
  struct Repair {
    std::vector<UndoStep> steps;
    std::vector<PageId> held;
    std::vector<PageRun> created;  // shall not exist afterwards; held too
    std::vector<SlotId> slots;
  };

  // What a sequence is like after the plan's ops so far.
  struct Tentative {
    View view;
    std::int64_t length;
  };

  struct Demand {
    std::int64_t pages = 0;   // fresh ones, and idle ones that are claimed
    std::int64_t coming = 0;  // of those, ones that are nobody else's, though not idle yet
    std::int64_t slots = 0;
    std::int64_t swap_blocks = 0;
    std::int64_t runs = 0;  // of pages that slots are to show, of one group, at most
    std::unordered_map<Tenant, std::int64_t> blocks;
    // While it is counted.
    bool dense = false;
    std::unordered_map<SeqId, Tentative> tentative;
    std::unordered_set<PageId> claimed;
    std::unordered_set<BlockId> swapped;
    std::vector<SeqId> parents;
    std::vector<PageId> attached;   // pages of which a kAttach of the plan finds blocks
    std::vector<PageId> contested;  // of those, ones that another kAttach would like to have, too
  };

  // Positions [start, length) that an epoch writes of a sequence.
  struct Written {
    SeqId seq;
    std::uint32_t generation;
    std::int64_t start;
    std::int64_t length;
  };

  struct Record {
    Epoch epoch;
    std::vector<Written> written;
  };

  // Blocks on their way to host memory beside the kernels.
  struct Copying {
    Mark mark;
    std::vector<BlockId> blocks;
  };

  // -- kv_memory.cpp
  std::unique_lock<std::mutex> enter() const;  // refuses a fork and a closed memory, then locks
  void require_alive() const;                  // throws once the pool has failed
  const Sequence& open_seq(SeqId seq) const;
  Sequence& open_seq(SeqId seq);
  std::int64_t pages_for(std::int64_t num_tokens) const;
  std::int64_t blocks_for(std::int64_t num_tokens) const;
  std::int64_t num_pages(const Sequence& seq) const;
  std::int64_t num_matched(const Sequence& seq) const;  // blocks
  void extend_digests(Sequence& seq);
  void complete_locked(Epoch epoch, bool sealed);
  void seal(SeqId id, std::int64_t length);
  void publish(Sequence& seq);
  void park(SlotId slot, Epoch retire);
  void write_table(SeqId seq, std::size_t from);
  void fail_if_sticky(const Error& error);

  // -- kv_memory_plan.cpp
  void validate(const std::vector<Op>& ops) const;
  std::vector<Op> merged(const std::vector<Op>& ops) const;
  static bool attaches(const std::vector<Op>& ops);
  Plan assess(const std::vector<Op>& ops, bool& dense) const;
  Demand demand(const std::vector<Op>& ops, bool dense) const;
  void demand_op(Demand& demand, const Op& op) const;
  void demand_grow(Demand& demand, const Op& op) const;
  static bool is_parent(const Demand& demand, SeqId id);
  std::int64_t num_claims(const Sequence& seq, bool all) const;
  std::int64_t num_claimed_gaps(const Sequence& seq) const;
  void demand_swap_in(Demand& demand, SeqId id) const;
  void demand_bind(Demand& demand, const Sequence& seq, const std::vector<BlockId>& blocks,
                   std::int64_t num_tokens, bool own) const;
  void demand_paged(Demand& demand, SeqId id, std::int64_t have, std::int64_t want) const;
  std::int64_t num_coming(const Sequence& seq, std::int64_t have, std::int64_t want) const;
  void note_attached(Demand& demand, const std::vector<Op>& ops) const;
  bool is_wanted(const Demand& demand, const Sequence& seq) const;
  // `own`: the sequence has these blocks already. `held`: how often a page may be held and still
  // be had as a whole.
  std::vector<BoundPage> bind_pages(const std::vector<BlockId>& blocks, std::int64_t num_tokens,
                                    bool own, std::int32_t held) const;
  bool offers_more(PageId page, std::int32_t count) const;
  bool is_clearing_late(PageId page) const;
  std::int64_t num_restless_pages() const;
  std::vector<BlockId> matched_blocks(const Sequence& seq, std::int64_t num_tokens) const;
  bool takes_whole_page(std::int64_t block_index, bool dense) const;
  std::int64_t pages_missing(const Demand& demand, bool squeezed) const;
  std::unordered_map<Tenant, std::vector<PageId>> loose_pages() const;
  std::int64_t squeezable_pages(std::unordered_map<Tenant, std::int64_t>& left) const;
  std::int64_t num_usable_slots() const;
  static std::int64_t num_runs(const std::vector<BoundPage>& bound);
  std::int64_t num_retiring_pages() const;

  // -- kv_memory_apply.cpp, kv_memory_ops.cpp, kv_memory_bind.cpp, kv_memory_execute.cpp
  void stage(Change& change, const Op& op);
  void stage_attach(Change& change, const Op& op);
  void stage_fork(Change& change, const Op& op);
  void stage_convert(Change& change, const Op& op);
  void stage_swap_out(Change& change, const Op& op, std::unordered_map<BlockId, SwapId>& copied);
  void stage_swap_in(Change& change, const Op& op);
  void stage_grow(Change& change, const Op& op);
  void grow_virtual(Change& change, SeqId id, std::int64_t num_tokens);
  void require_whole(SlotId slot) const;  // throws while it is in a repair
  bool needs_copy(const Change& change, BlockId block) const;
  void grow_paged(Change& change, SeqId id, std::int64_t num_tokens);
  void bind(Change& change, SeqId id, const std::vector<BlockId>& blocks, std::int64_t num_tokens,
            bool own);
  void bind_copy(Change& change, SeqId id, std::int64_t index, const std::vector<BlockId>& blocks,
                 std::int64_t num_tokens);
  void bind_page(Change& change, SeqId id, std::int64_t index, const BoundPage& bound,
                 std::int64_t num_tokens);
  std::int64_t num_shown(const Slot& slot, const std::vector<BoundPage>& bound) const;
  bool is_missed(const Slot& slot, std::int64_t first, Tenant tenant) const;
  std::pair<std::int64_t, std::int64_t> rank_slot(const Slot& slot, Tenant tenant,
                                                  const std::vector<BoundPage>& bound,
                                                  std::int64_t want, bool pressed) const;
  SlotId choose_slot(const Change& change, Tenant tenant, const std::vector<BoundPage>& bound,
                     std::int64_t want, bool pressed) const;
  bool shows_foreign(PageId page, Tenant tenant) const;
  void hold_matches(Change& change, const std::vector<Op>& ops);
  static void note_targets(Change& change, const std::vector<Op>& ops);
  void take_slot(Change& change, SeqId id, const std::vector<BoundPage>& bound, std::int64_t want);
  Change::SavedSlot& saved(Change& change, SlotId slot);
  bool claim_spare(Change& change, SeqId id, std::int64_t index);
  void make_writable(Change& change, SlotId slot, std::int64_t index);
  void make_read_only(Change& change, SlotId slot, std::int64_t index);
  void leave_slot(Change& change, SeqId id);
  void seal_shared(Change& change, const Sequence& parent, const Op& op);
  std::vector<AccessRun> access_runs(const Change& change, bool writable) const;
  void add_ref(Change& change, BlockId block);
  void save(Change& change, SeqId id);
  std::int64_t num_own_behind(SeqId seq, BlockId block) const;
  std::int64_t pages_for_fresh(const Change& change) const;
  void assign_fresh(Change& change);
  PageId fresh_page(Change& change, BlockId before, Tenant tenant, bool grows);
  BlockId fresh_whole_page(Change& change, SeqId id, BlockId before);
  BlockId fresh_block(Change& change, SeqId id, BlockId before);
  void prepare_page(Change& change, PageId page, Tenant tenant);
  void execute(Change& change);
  std::vector<CopyRun> copy_runs(const Change& change) const;
  std::vector<CopyRun> swap_runs(const std::vector<SwapCopy>& copies, bool out) const;
  void map_runs(const Change& change, std::vector<MapRun>& runs) const;
  void commit(Change& change);
  void inherit(const Forked& fork);
  void trim_front(SeqId id, std::int64_t first_token);
  void rollback(Change& change);
  bool wait_for_mapper(const std::vector<Op>& ops, const Plan& plan);

  // -- kv_memory_mappings.cpp
  std::int64_t mappings_per_run() const;
  std::int64_t mapping_room() const;  // that no command of the mapper may take
  bool can_unmap(const Slot& slot) const;
  std::int64_t parked_mappings(const Slot& slot) const;
  std::int64_t available_mappings(std::int64_t needed) const;
  void make_mapping_room(std::int64_t needed);
  SlotId oldest_parked() const;
  bool has_room_ahead(std::int64_t num_pages) const;
  std::uint64_t submit(Command command);

  // -- kv_memory_room.cpp
  void make_room(std::int64_t num_pages);
  void commit_pages(std::int64_t count);
  void create_pages(std::int64_t count);
  bool evict(PageId page, std::int64_t wanted);
  // Post: the entries are the slot's no more; false if the driver refused (a repair is left).
  bool truncate(SlotId slot, std::int64_t index);
  bool punch(SlotId slot, std::int64_t index);
  bool unmap_entries(SlotId slot, std::int64_t first, std::int64_t count);
  std::vector<AddressRun> entry_ranges(SlotId slot, std::int64_t first, std::int64_t count) const;
  void forget_entries(SlotId slot, std::int64_t first, std::int64_t count);
  std::int64_t give_back(std::int64_t count);
  void give_back(const PageRun& run);
  std::int64_t drop_idle(std::int64_t keep);
  void give_back_excess();
  void shed();
  void squeeze();
  void loosen(PageId page);
  std::int64_t pack(std::vector<PageId> pages);
  void move_blocks(const std::vector<std::pair<BlockId, BlockId>>& moves);
  void retry_repairs();
  bool retry(Repair& repair);
  void add_repair(Repair repair, const std::string& error);

  // -- kv_memory_ahead.cpp
  void absorb();  // the mapper's outcomes, and marks that were reached
  void absorb_marks();
  void absorb_copies();
  void end_oldest_copies();
  bool finish_copies_locked();
  void absorb(Outcome outcome);
  // Waits for the mapper, then absorbs; `counts`: because somebody needs it.
  void settle_locked(bool counts = true);
  void tend(const std::vector<Op>& grows);  // gives the mapper what the next steps will need
  void look_ahead(SeqId id, std::int64_t target);
  void premap(SlotId slot, std::int64_t count, Tenant tenant);
  void premapped(const Outcome& outcome);
  void unmapped(Outcome& outcome);
  void grew(Outcome& outcome);
  void unseal(const Command& command, Unfinished unfinished);
  std::vector<PageId> reclaim_slot(SlotId slot, std::int64_t first);
  void keep_eager_slots();
  void note_demand();
  std::int64_t wanted_free() const;
  void grow_ahead();
  void evict_ahead();
  void reclaim_ahead();
  void reclaim(SlotId slot, std::int64_t num_pages);
  bool is_ready(const Slot& slot) const;
  void seal_slots(const std::vector<SeqId>& seqs);
  void seal_now(const Command& command);
  bool is_sole(PageId page) const;
  void reopen_pages();
  bool works_ahead() const { return mapper_->mode() != MapperMode::kOff; }

  // -- kv_memory_map.cpp
  void draw_cells(MemoryMap& map, const std::vector<std::uint8_t>& uses,
                  std::int64_t max_cells) const;

  // -- kv_memory_check.cpp
  void check_references() const;
  void check_slots() const;
  void check_mappings() const;
  std::int64_t num_quarantined() const;

  MemoryConfig config_;
  pid_t pid_;
  mutable std::mutex mutex_;
  std::shared_ptr<PageDriver> driver_;
  std::shared_ptr<AddressSpace> space_;  // null once closed
  std::unique_ptr<Mapper> mapper_;
  std::unique_ptr<SwapSpace> swap_;
  BlockPool pool_;
  std::vector<Sequence> seqs_;
  std::vector<Slot> slots_;
  LazyArray<BlockId> tables_;
  std::vector<std::size_t> row_sizes_;
  std::int64_t blocks_per_row_;
  std::vector<Repair> repairs_;
  std::string last_error_;
  std::string failure_;  // why the pool has failed; empty if it has not
  // Raised by what callers change, not by what happens behind them: that brings more than a plan
  // counted on or, if the driver refuses, is found out when the plan is carried out.
  std::uint64_t version_ = 0;
  std::uint64_t parkings_ = 0;
  std::uint64_t weights_epoch_ = 0;
  Epoch begun_ = 0;
  Epoch completed_ = 0;
  std::deque<Record> records_;
  std::deque<std::pair<Epoch, Mark>> marks_;
  std::deque<Copying> copying_;
  std::int64_t num_open_ = 0;
  std::int64_t mapping_reserve_ = 0;   // parked slots are unmapped while there is less room
  std::int64_t pending_mappings_ = 0;  // that the mapper's commands may make, at most
  std::vector<PageId> reclaimed_;      // by the mapper, since the last step was begun
  bool is_growing_ = false;            // the mapper commits pages
  std::uint64_t last_mapping_ = 0;     // the mapper's newest command that is more than sealing
  // Pages and newcomers of a step, and pages that a newcomer with nothing cached began with: those
  // of the change that is being made, and the most of late, which is forgotten by and by.
  std::int64_t pages_now_ = 0;
  std::int64_t newcomers_now_ = 0;
  double step_pages_ = 0;
  double step_newcomers_ = 0;
  double first_pages_ = 0;
  Tenant newest_tenant_ = 0;
  bool copies_beside_;       // the driver's copy stream
  bool may_reopen_ = false;  // a page may be read-only that nobody shares any more
  MemoryCounters totals_;
};

}  // namespace vmserve
