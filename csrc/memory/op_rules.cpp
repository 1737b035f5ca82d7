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
  std::vector<std::uint8_t> seen(books.seqs.size());  // 1: an op other than kGrow; 2: kSwapOut
  for (const Op& op : ops) {
    const Sequence& seq = books.open_seq(op.seq);
    require(op.num_tokens >= 0 && op.num_tokens <= config.max_len, [&] {
      return name(op.seq) + " cannot hold " + with_commas(op.num_tokens) + " tokens: max_len is " +
             with_commas(config.max_len);
    });
    if (op.kind == OpKind::kGrow) {
      require(seen[op.seq] != 2 && (!seq.kv.swapped || seen[op.seq] == 1),
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
        require(op.num_tokens % config.block_tokens == 0, [&] {
          return "a cached prefix has whole blocks of " + std::to_string(config.block_tokens) +
                 " tokens, not " + with_commas(op.num_tokens);
        });
        break;
      case OpKind::kFork: {
        const Sequence& parent = books.open_seq(op.other);
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

std::vector<Op> merge_grows(const std::vector<Op>& ops, const Books& books) {
  std::vector<Op> result;
  result.reserve(ops.size());
  std::vector<std::int32_t> grows(books.seqs.size(), -1);
  for (const Op& op : ops) {
    books.open_seq(op.seq);
    if (op.kind != OpKind::kGrow) result.push_back(op);
  }
  const auto num_others = static_cast<std::ptrdiff_t>(result.size());
  for (const Op& op : ops) {
    if (op.kind != OpKind::kGrow) continue;
    std::int32_t& at = grows[op.seq];
    if (at < 0) {
      at = static_cast<std::int32_t>(result.size());
      result.push_back(op);
    } else {
      const std::int64_t kept = std::max(result[at].kept_tokens(), op.kept_tokens());
      result[at].num_tokens = std::max(result[at].num_tokens, op.num_tokens);
      result[at].num_drafted = result[at].num_tokens - kept;
      result[at].first_token = std::max(result[at].first_token, op.first_token);
    }
  }
  // Parents grow last: the last to grow keeps the shared block without a copy, and only the parent
  // owns the rest of that page.
  std::vector<bool> forks(num_others > 0 ? books.seqs.size() : 0);
  bool any = false;
  for (const Op& op : result) {
    if (op.kind != OpKind::kFork) continue;
    books.open_seq(op.other);
    forks[op.other] = any = true;
  }
  if (any) {
    std::stable_partition(result.begin() + num_others, result.end(),
                          [&](const Op& op) { return !forks[op.seq]; });
  }
  return result;
}

bool has_attach(const std::vector<Op>& ops) {
  return std::any_of(ops.begin(), ops.end(),
                     [](const Op& op) { return op.kind == OpKind::kAttach && op.num_tokens > 0; });
}

}  // namespace vmserve
