#include "vmserve/memory/books.h"

#include <algorithm>
#include <utility>

#include "vmserve/memory/require.h"
#include "vmserve/mix.h"

namespace vmserve {

Books::Books(const MemoryConfig& config, std::size_t kinds)
    : num_kinds(kinds),
      seqs(static_cast<std::size_t>(config.max_seqs)),
      block_tokens_(config.block_tokens),
      prefix_caching_(config.prefix_caching) {}

const Sequence& Books::open_seq(SeqId seq) const {
  const auto most = static_cast<SeqId>(seqs.size());
  require(seq >= 0 && seq < most, [&] {
    return "sequence " + std::to_string(seq) + " is outside 0 .. " + std::to_string(most - 1);
  });
  require(seqs[seq].open, [&] { return "sequence " + std::to_string(seq) + " is not open"; });
  return seqs[seq];
}

Sequence& Books::open_seq(SeqId seq) {
  return const_cast<Sequence&>(std::as_const(*this).open_seq(seq));
}

std::optional<SeqId> Books::open(Tenant tenant, View view, const std::string& salt,
                                 const std::vector<std::int32_t>& tokens) {
  if (num_open == static_cast<std::int64_t>(seqs.size())) return std::nullopt;
  SeqId id = 0;
  while (seqs[id].open) ++id;
  Sequence fresh;
  fresh.open = true;
  fresh.generation = seqs[id].generation + 1;
  fresh.tenant = tenant;
  fresh.kv.view = view;
  fresh.tokens = tokens;
  fresh.tokens_unknown = tokens.empty();
  const auto known = static_cast<std::int64_t>(tokens.size());
  fresh.last_checkpoint = std::max<std::int64_t>(0, known - 1) / block_tokens_ * block_tokens_;
  fresh.root = prefix_root(tenant, generation, salt);
  extend_digests(fresh);
  seqs[id] = std::move(fresh);
  ++num_open;
  return id;
}

SlotId Books::close(SeqId id) {
  Sequence& seq = seqs[id];
  const SlotId slot = seq.kv.slot;
  const std::uint32_t used = seq.generation;
  seq = Sequence{};
  seq.generation = used;
  --num_open;
  ++version;
  return slot;
}

void Books::append_token(SeqId id, std::int32_t token) {
  Sequence& seq = seqs[id];
  if (seq.tokens_unknown) return;
  seq.tokens.push_back(token);
  extend_digests(seq);
}

void Books::extend_digests(Sequence& seq) const {
  if (!prefix_caching_ || seq.tokens_unknown) return;
  const std::size_t full = seq.tokens.size() / static_cast<std::size_t>(block_tokens_);
  while (seq.digests.size() < full) {
    const Digest& parent = seq.digests.empty() ? seq.root : seq.digests.back();
    seq.digests.push_back(
        prefix_next(parent, seq.tokens.data() + seq.digests.size() * block_tokens_, block_tokens_));
  }
}

// At least one token must be computed: the caller needs its logits.
std::int64_t Books::num_matchable(const Sequence& seq) const {
  if (seq.tokens.empty()) return 0;
  return std::min((static_cast<std::int64_t>(seq.tokens.size()) - 1) / block_tokens_,
                  static_cast<std::int64_t>(seq.digests.size()));
}

bool Books::seal(SeqId id, std::int64_t length) {
  SeqState& kv = seqs[id].kv;
  length = std::min(length, kv.seal_limit);
  if (kv.swapped || length <= kv.sealed) return false;
  kv.sealed = length;
  return true;
}

bool Books::lengthen(SeqId id, std::int64_t length) {
  seqs[id].kv.length = length;
  for (auto record = records.rbegin(); record != records.rend(); ++record) {
    for (WrittenRange& written : record->written) {
      if (written.seq != id || written.generation != seqs[id].generation) continue;
      written.length = length;
      return true;
    }
  }
  return false;
}

void Books::inherit_prefix(const Forked& fork, const std::vector<std::int64_t>& first_seen) {
  const Sequence& parent = seqs[fork.parent];
  Sequence& child = seqs[fork.child];
  const auto known = std::min(parent.tokens.size(), static_cast<std::size_t>(fork.num_tokens));
  child.tokens_unknown = parent.tokens_unknown || known < static_cast<std::size_t>(fork.num_tokens);
  child.root = parent.root;
  child.tokens.assign(parent.tokens.begin(),
                      parent.tokens.begin() + static_cast<std::ptrdiff_t>(known));
  // Running epochs that write the parent's prefix seal it, or abandon it, for the child, too.
  for (EpochRecord& record : records) {
    if (record.epoch == begun) break;
    const auto of_parent = std::find_if(
        record.written.begin(), record.written.end(), [&](const WrittenRange& written) {
          return written.seq == fork.parent && written.generation == parent.generation;
        });
    if (of_parent == record.written.end()) continue;
    record.written.push_back({fork.child, child.generation,
                              std::min(of_parent->start, fork.num_tokens),
                              std::min(of_parent->length, fork.num_tokens)});
    record.first_seen.insert(record.first_seen.end(), first_seen.begin(), first_seen.end());
  }
  const auto full = std::min(parent.digests.size(), known / block_tokens_);
  child.digests.assign(parent.digests.begin(),
                       parent.digests.begin() + static_cast<std::ptrdiff_t>(full));
}

std::vector<bool> Books::running_seqs() const {
  std::vector<bool> running(seqs.size());
  for (const EpochRecord& record : records) {
    for (const WrittenRange& written : record.written) {
      if (seqs[written.seq].generation == written.generation) running[written.seq] = true;
    }
  }
  return running;
}

// Blocks that were computed before are never published.
void Books::clear_digests() {
  for (Sequence& seq : seqs) {
    seq.digests.clear();
    seq.tokens_unknown = true;
  }
}

std::uint64_t Books::fingerprint() const {
  Mix mix;
  mix.add(version, begun, completed, records.size(), num_open);
  for (const Sequence& seq : seqs) {
    mix.add(seq.open, static_cast<int>(seq.kv.view), seq.kv.slot, seq.kv.length, seq.kv.sealed,
            seq.kv.seal_limit, seq.kv.num_published, seq.kv.swapped, seq.tokens.size(),
            seq.tokens_unknown, seq.digests.size());
  }
  return mix.value();
}

// -- changes

SeqState& BooksChange::save(SeqId id) {
  SeqState& kv = books_.seqs[id].kv;
  saved_.emplace_back(id, kv);
  return kv;
}

void BooksChange::note(const Op& op, SlotId slot) {
  const auto take = [&](SeqState& kv) {
    if (slot != kNoSlot) kv.slot = slot;
  };
  switch (op.kind) {
    case OpKind::kAttach: {
      if (op.num_tokens == 0) return;
      SeqState& kv = save(op.seq);
      take(kv);
      kv.length = kv.sealed = op.num_tokens;
      kv.num_published = op.num_tokens / books_.block_tokens();
      return;
    }
    case OpKind::kFork: {
      const SeqState& parent = books_.seqs[op.other].kv;
      SeqState& kv = save(op.seq);
      take(kv);
      kv.length = op.num_tokens;
      kv.sealed = std::min(parent.sealed, op.num_tokens);
      // The parent's seal limit may lie beyond the fork.
      if (parent.seal_limit < op.num_tokens) kv.seal_limit = parent.seal_limit;
      kv.num_published = std::min(parent.num_published, op.num_tokens / books_.block_tokens());
      forked.push_back({op.seq, op.other, op.num_tokens});
      return;
    }
    case OpKind::kConvert: {
      SeqState& kv = save(op.seq);
      kv.view = op.view;
      if (op.view == View::kPaged) kv.slot = kNoSlot;
      take(kv);
      return;
    }
    case OpKind::kSwapOut: {
      SeqState& kv = save(op.seq);
      kv.slot = kNoSlot;
      kv.swapped = true;
      return;
    }
    case OpKind::kSwapIn: {
      SeqState& kv = save(op.seq);
      kv.swapped = false;
      take(kv);
      return;
    }
    case OpKind::kGrow:
      take(save(op.seq));
      return;
  }
}

void BooksChange::undo() {
  for (auto saved = saved_.rbegin(); saved != saved_.rend(); ++saved) {
    books_.seqs[saved->first].kv = saved->second;
  }
}

}  // namespace vmserve
