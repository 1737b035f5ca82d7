#include "vmserve/memory/op_rules.h"

#include <algorithm>

#include "vmserve/memory/require.h"
#include "vmserve/text.h"

namespace vmserve {
namespace {

std::string name(SeqId seq) {
  return "sequence " + std::to_string(seq);
}

}  // namespace

void validate(const std::vector<Op>& ops, const Books& books, const Kinds& kinds) {
  const MemoryConfig& config = kinds.front()->config;
  const bool has_state = std::any_of(kinds.begin(), kinds.end(),
                                     [](const auto& kind) { return kind->config.has_state(); });
  const bool grows_alone = ops.empty() || ops.front().kind == OpKind::kGrow;
  // 1: an op other than kGrow; 2: kSwapOut
  std::vector<std::uint8_t> seen(grows_alone ? 0 : books.seqs.size());
  for (const Op& op : ops) {
    const Sequence& seq = books.seqs[op.seq];
    require(op.num_tokens >= 0 && op.num_tokens <= config.max_len, [&] {
      return name(op.seq) + " cannot hold " + with_commas(op.num_tokens) + " tokens: max_len is " +
             with_commas(config.max_len);
    });
    if (op.kind == OpKind::kGrow) {
      const std::uint8_t before = grows_alone ? 0 : seen[op.seq];
      require(before != 2 && (!seq.kv.swapped || before == 1),
              [&] { return name(op.seq) + " is swapped out"; });
      require(op.num_drafted >= 0 && op.num_drafted <= op.num_tokens,
              [&] { return name(op.seq) + " grows by fewer tokens than are drafted"; });
      require(op.num_drafted == 0 || !has_state,
              [&] { return name(op.seq) + " has a state, which rejected drafts would change"; });
      require(op.first_token >= 0 && op.first_token <= std::max(op.kept_tokens(), seq.kv.length),
              [&] { return name(op.seq) + " cannot drop tokens that it does not have"; });
      continue;
    }
    require(seen[op.seq] == 0, [&] { return name(op.seq) + " has two ops in one plan"; });
    seen[op.seq] = op.kind == OpKind::kSwapOut ? 2 : 1;
    const bool is_empty = seq.kv.length == 0 && seq.kv.slot == kNoSlot && !seq.kv.swapped &&
                          kinds.front()->ledger.held[op.seq].blocks.empty();
    switch (op.kind) {
      case OpKind::kAttach:
        require(is_empty, [&] { return name(op.seq) + " is not empty"; });
        require(op.first_token >= 0 && op.first_token <= op.num_tokens,
                [&] { return name(op.seq) + " cannot drop tokens that it does not have"; });
        require(op.num_tokens % config.block_tokens == 0, [&] {
          return "a cached prefix has whole blocks of " + std::to_string(config.block_tokens) +
                 " tokens, not " + with_commas(op.num_tokens);
        });
        break;
      case OpKind::kFork: {
        const Sequence& parent = books.seqs[op.other];
        require(op.other != op.seq && is_empty, [&] { return name(op.seq) + " is not empty"; });
        require(parent.tenant == seq.tenant,
                [&] { return std::string("a fork must have its parent's tenant"); });
        require(!parent.kv.swapped && seen[op.other] == 0,
                [&] { return name(op.other) + " is swapped out, or changes in the same plan"; });
        require(op.num_tokens <= parent.kv.length, [&] {
          return "cannot fork " + name(op.other) + " at " + with_commas(op.num_tokens) +
                 " tokens: it holds " + with_commas(parent.kv.length);
        });
        require(!has_state || op.num_tokens == 0 || op.num_tokens == parent.kv.length, [&] {
          return "cannot fork " + name(op.other) + " at " + with_commas(op.num_tokens) +
                 " tokens: its state is that of " + with_commas(parent.kv.length);
        });
        break;
      }
      case OpKind::kSwapIn:
        require(seq.kv.swapped, [&] { return name(op.seq) + " is not swapped out"; });
        break;
      default:
        require(!seq.kv.swapped, [&] { return name(op.seq) + " is swapped out"; });
    }
  }
}

bool merge_grows(const std::vector<Op>& ops, const Books& books, std::vector<Op>& merged) {
  merged.clear();
  merged.reserve(ops.size());
  std::vector<std::int32_t> grows(books.seqs.size(), -1);
  bool is_same = true, forks = false;
  for (const Op& op : ops) {
    books.open_seq(op.seq);
    if (op.kind == OpKind::kGrow) continue;
    if (op.kind == OpKind::kFork) books.open_seq(op.other);
    forks = forks || op.kind == OpKind::kFork;
    merged.push_back(op);
  }
  const std::size_t num_others = merged.size();
  for (std::size_t i = 0; i < ops.size(); ++i) {
    const Op& op = ops[i];
    if (op.kind != OpKind::kGrow) {
      is_same = is_same && i < num_others;
      continue;
    }
    std::int32_t& at = grows[op.seq];
    if (at < 0) {
      at = static_cast<std::int32_t>(merged.size());
      merged.push_back(op);
    } else {
      Op& first = merged[at];
      const std::int64_t kept = std::max(first.kept_tokens(), op.kept_tokens());
      first.num_tokens = std::max(first.num_tokens, op.num_tokens);
      first.num_drafted = first.num_tokens - kept;
      first.first_token = std::max(first.first_token, op.first_token);
      is_same = false;
    }
  }
  if (!forks) return is_same;
  // Parents grow last: the last to grow keeps the shared block without a copy, and only the parent
  // owns the rest of that page.
  std::vector<bool> is_parent(books.seqs.size());
  for (std::size_t i = 0; i < num_others; ++i) {
    if (merged[i].kind == OpKind::kFork) is_parent[merged[i].other] = true;
  }
  std::stable_partition(merged.begin() + static_cast<std::ptrdiff_t>(num_others), merged.end(),
                        [&](const Op& op) { return !is_parent[op.seq]; });
  return false;
}

bool has_attach(const std::vector<Op>& ops) {
  return std::any_of(ops.begin(), ops.end(),
                     [](const Op& op) { return op.kind == OpKind::kAttach && op.num_tokens > 0; });
}

}  // namespace vmserve
