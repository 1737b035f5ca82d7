// KV memory of a model whose layers differ: one KVMemory for each kind of layers, one limit for
// all.
//
// Glossary
//   kind       layers whose sequences keep the same positions: all, those of a sliding window, or
//              the state after the last. Each kind has its own pages, arena, slots and driver
//   window     tokens that a query of the kind sees, its own included; 0: all
//   whole page one page of every kind but states: page_tokens tokens of all layers. The unit of
//              plans, limits and statistics, because it is what a sequence takes within its
//              windows. States count as the whole pages of as many bytes
//
// Laws
//   * the laws of KVMemory, for each kind
//   * bytes committed in all kinds <= the limit. Above a lowered one, nothing is free or idle after
//     a plan without attach, an apply or a release (unless a driver refused to take pages back)
//   * a sequence has the same length, view and slot in all kinds (states have no slots), and epochs
//     have the same numbers, and end in all kinds at once
//   * a kind has the blocks of a sequence that the next token sees through its window
//
// If a kind is short of pages, it takes an idle one of another kind. That page is evicted, its
// memory returned, and the first kind commits as many bytes. Nothing is copied. The page that was
// used least recently goes first, whatever its kind.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "vmserve/kv_memory.h"

namespace vmserve {

struct KindConfig {
  std::shared_ptr<PageDriver> driver;
  MemoryConfig memory;
  std::int64_t window = 0;
};

// Thread-safe. A mutation happens completely in all kinds or not at all. Functions without a
// comment do what those of KVMemory do; pages are whole pages.
class KindsMemory {
 public:
  // Pre: kinds differ in groups, bytes, windows and limits alone; the first sees all positions, and
  // keeps the books of tokens. The limits of all kinds are replaced by `limit_pages`.
  KindsMemory(const std::vector<KindConfig>& kinds, std::int64_t limit_pages);
  KindsMemory(const KindsMemory&) = delete;
  KindsMemory& operator=(const KindsMemory&) = delete;

  // For reading: buffers, block tables and statistics of one kind.
  const std::vector<std::unique_ptr<KVMemory>>& kinds() const { return kinds_; }

  std::optional<SeqId> open(Tenant tenant, View view, const std::string& salt,
                            const std::vector<std::int32_t>& tokens);
  // Tokens of the longest prefix on which all kinds agree.
  std::int64_t match(SeqId seq) const;
  Plan plan(const std::vector<Op>& ops);
  Epoch apply(const std::vector<Op>& ops, std::uint64_t version);
  void complete(Epoch epoch);
  void abandon_epoch(Epoch epoch);
  void launched(Epoch epoch);
  bool finish_copies();
  bool is_copying();
  Epoch begun_epoch() const { return kinds_[0]->begun_epoch(); }
  Epoch completed_epoch() const { return kinds_[0]->completed_epoch(); }
  void keep(const std::vector<SeqId>& seqs, const std::vector<std::int64_t>& lengths);
  void append_tokens(const std::vector<SeqId>& seqs, const std::vector<std::int32_t>& tokens);
  std::vector<SeqId> open_seqs() const { return kinds_[0]->open_seqs(); }
  void release(SeqId seq);
  // One store for each kind.
  void persist_to(const std::vector<std::shared_ptr<PageStore>>& stores,
                  double touch_seconds = kTouchSeconds);
  bool restore(SeqId seq, const std::vector<Op>& beside);
  void finish_restores();
  void write_when_idle();
  bool flush(double seconds);
  std::string persist_message();
  void clear_cache();
  std::int64_t trim(std::int64_t keep_pages, bool drop_idle);
  void set_limit(std::int64_t limit_pages);
  void settle_mapper();

  // Gauges as stats.def says. Counters of calls, pages and blocks are sums of the kinds' own; those
  // of sequences are the first kind's.
  MemoryStats stats();
  // The kinds' pools one after the other, then what no kind has committed, in pages of each kind's
  // own size. Slots are the first kind's.
  MemoryMap memory_map(std::int64_t max_cells);
  std::string last_error() const;
  void check();
  std::uint64_t fingerprint() const;
  void require_usable() const { kinds_[0]->require_usable(); }
  void close();

 private:
  using Locks = std::vector<std::unique_lock<std::mutex>>;

  std::unique_lock<std::mutex> lock_calls() const;
  Locks enter() const;
  std::int64_t page_bytes(const KVMemory& kind) const;
  std::int64_t whole_page_bytes() const;
  // Bytes of the limit that no kind has committed; negative above a lowered limit.
  std::int64_t uncommitted_bytes() const;
  std::int64_t free_bytes() const;
  std::int64_t reclaimable_bytes() const;  // of free and idle pages
  // Allows the kind to commit `bytes` more.
  void allow(KVMemory& kind, std::int64_t bytes) const;
  void allow_all() const;
  void share_limit();
  bool evict_oldest();
  // Blocks of the longest prefix on which all kinds agree. `stored`: counting those of the stores.
  std::int64_t num_matched(SeqId seq, bool stored) const;
  // Returns at least `bytes`, if there are as many, of the free pages that kinds do not need.
  void return_free(std::int64_t bytes, const std::vector<std::int64_t>& needed);
  // Evicts and returns pages until each kind can have `needed` free pages.
  void gather(const std::vector<std::int64_t>& needed);
  void give_back_excess();
  void try_give_back_excess();
  std::vector<Op> ops_of(std::size_t kind, const std::vector<Op>& ops) const;
  bool finish_background();
  bool give_up_past(bool from_slots);
  bool will_give_up_past() const;
  void apply_reached_marks();
  std::vector<Plan> assess(const std::vector<Op>& ops, bool packs = false);
  Plan sum_up(const std::vector<Plan>& plans) const;
  std::uint64_t state_version() const;  // changes with every change in a kind
  void stage_and_execute(const std::vector<Assessed>& now, std::int64_t needed_mappings,
                         std::vector<std::unique_ptr<Change>>& changes);
  void make_mapping_room(std::int64_t needed);
  std::string last_error_text() const;

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<KVMemory>> kinds_;
  std::vector<std::int64_t> windows_;
  std::int64_t limit_bytes_ = 0;
  std::vector<Op> last_ops_;  // of the last plan
  bool is_planned_ = false;
  SlotChoices slots_;  // that they take
  // For each launched epoch, a mark of each kind's driver.
  std::deque<std::pair<Epoch, std::vector<Mark>>> marks_;
};

}  // namespace vmserve
