// The books of sequences: what is true of a sequence in every kind of layers. Which epochs run. No
// pages, and no driver call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "vmserve/kv_memory_types.h"
#include "vmserve/prefix_digest.h"

namespace vmserve {

// What ops and epochs change of a sequence.
struct SeqState {
  View view = View::kVirtual;
  SlotId slot = kNoSlot;
  std::int64_t length = 0;
  std::int64_t sealed = 0;
  // Positions from here on were not computed (abandoned epoch); they are never sealed.
  std::int64_t seal_limit = std::numeric_limits<std::int64_t>::max();
  std::int64_t num_published = 0;  // leading blocks offered to the prefix cache
  bool swapped = false;
};

struct Sequence {
  bool open = false;
  std::uint32_t generation = 0;  // distinguishes sequences that had the same id
  Tenant tenant = 0;
  SeqState kv;
  std::vector<std::int32_t> tokens;
  bool tokens_unknown = false;       // No or not all token ids are known: nothing is published.
  std::int64_t last_checkpoint = 0;  // a state's, besides the multiples of checkpoint_tokens
  Digest root{};
  std::vector<Digest> digests;  // of the leading full blocks
};

struct Forked {
  SeqId child;
  SeqId parent;
  std::int64_t num_tokens;
};

// Positions [start, length) of a sequence that an epoch writes.
struct WrittenRange {
  SeqId seq;
  std::uint32_t generation;
  std::int64_t start;
  std::int64_t length;
};

struct EpochRecord {
  Epoch epoch;
  std::vector<WrittenRange> written;
  // Of each range, for each kind: the epoch reads nothing before this position.
  std::vector<std::int64_t> first_seen;
};

// Slots that sequences take.
using SlotChoices = std::vector<std::pair<SeqId, SlotId>>;

class Books {
 public:
  Books(const MemoryConfig& config, std::size_t num_kinds);

  std::int32_t block_tokens() const { return block_tokens_; }
  const Sequence& open_seq(SeqId seq) const;
  Sequence& open_seq(SeqId seq);
  std::optional<SeqId> open(Tenant tenant, View view, const std::string& salt,
                            const std::vector<std::int32_t>& tokens);
  // Forgets the sequence; its slot, or kNoSlot.
  SlotId close(SeqId seq);
  void append_token(SeqId seq, std::int32_t token);
  // Leading blocks of a sequence that another may have computed: one token is left to compute.
  std::int64_t num_matchable(const Sequence& seq) const;
  // Seals the sequence up to `length`. False if that seals nothing new.
  bool seal(SeqId seq, std::int64_t length);
  // Leading blocks that are sealed and have a digest.
  std::int64_t num_publishable(const Sequence& seq) const {
    return std::min(seq.kv.sealed / block_tokens_, static_cast<std::int64_t>(seq.digests.size()));
  }
  // Lengthens the sequence. False if the epoch that wrote it has ended: else that seals it.
  bool lengthen(SeqId seq, std::int64_t length);
  // Gives the child the tokens and digests of the parent's prefix. `first_seen`: for each kind, the
  // first position that the child has.
  void inherit_prefix(const Forked& fork, const std::vector<std::int64_t>& first_seen);
  std::vector<bool> running_seqs() const;  // those that a running epoch computes
  void clear_digests();
  // A hash of all state that affects later decisions.
  std::uint64_t fingerprint() const;

  const std::size_t num_kinds;
  std::vector<Sequence> seqs;
  std::int64_t num_open = 0;
  // Incremented by callers' changes, not by background work. That only adds to what a plan counted
  // on; a driver refusal is found when the plan is applied.
  std::uint64_t version = 0;
  Epoch begun = 0;
  Epoch completed = 0;
  std::deque<EpochRecord> records;
  std::uint64_t generation = 0;  // in the digests of prefixes

 private:
  void extend_digests(Sequence& seq) const;

  const std::int32_t block_tokens_;
  const bool prefix_caching_;
};

// What ops did to the books, and how to undo it.
class BooksChange {
 public:
  explicit BooksChange(Books& books) : books_(books) {}

  // Notes an op after all kinds have staged it. `slot`: the one that it took, or kNoSlot.
  void stage(const Op& op, SlotId slot) {
    if (op.kind != OpKind::kGrow || slot != kNoSlot) note(op, slot);
  }
  void undo();

  std::vector<Forked> forked;

 private:
  void note(const Op& op, SlotId slot);
  SeqState& save(SeqId seq);

  Books& books_;
  std::vector<std::pair<SeqId, SeqState>> saved_;
};

}  // namespace vmserve
