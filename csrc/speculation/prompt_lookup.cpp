#include "prompt_lookup.h"

#include <algorithm>

namespace vmserve::speculation {
namespace {

constexpr std::size_t kFewestBuckets = 64;
// Buckets for each token; fewer make longer chains, more take memory.
constexpr std::size_t kTokensPerBucket = 1;

}  // namespace

std::size_t PromptLookup::bucket(Token first, Token second) const {
  const std::uint64_t pair = (static_cast<std::uint64_t>(static_cast<std::uint32_t>(first)) << 32) |
                             static_cast<std::uint32_t>(second);
  return static_cast<std::size_t>((pair * 0x9E3779B97F4A7C15ULL) >> 32) & (newest_.size() - 1);
}

void PromptLookup::append(Token token) {
  tokens_.push_back(token);
  previous_.push_back(0);
  if (tokens_.size() > kTokensPerBucket * newest_.size()) {
    grow();
  } else {
    link(size());
  }
}

// Enters the pair that ends before `end`.
void PromptLookup::link(std::int64_t end) {
  if (end < 2) return;
  const auto at = static_cast<std::size_t>(end);
  if (tokens_[at - 2] < 0 || tokens_[at - 1] < 0) return;
  std::int32_t& newest = newest_[bucket(tokens_[at - 2], tokens_[at - 1])];
  previous_[at] = newest;
  newest = static_cast<std::int32_t>(end);
}

void PromptLookup::grow() {
  newest_.assign(std::max(kFewestBuckets, 2 * newest_.size()), 0);
  std::fill(previous_.begin(), previous_.end(), 0);
  for (std::int64_t end = 2; end <= size(); ++end) link(end);
}

Match PromptLookup::find() const {
  Match best;
  const std::int64_t end = size();
  if (end < 3) return best;
  std::int64_t place = previous_[static_cast<std::size_t>(end)];
  for (std::int64_t visited = 0; place > 0 && visited < most_visited_; ++visited) {
    const Token* const here = tokens_.data() + end;
    const Token* const there = tokens_.data() + place;
    // The compared stretches may overlap: a text that repeats itself matches itself.
    const std::int64_t most = std::min(place, longest_);
    std::int64_t length = 0;
    while (length < most && here[-1 - length] == there[-1 - length] && here[-1 - length] >= 0) {
      ++length;
    }
    if (length > best.length && length >= 2) best = {length, place};
    if (best.length == longest_) break;
    place = previous_[static_cast<std::size_t>(place)];
  }
  return best;
}

std::int64_t PromptLookup::num_following(const Match& match, std::int64_t limit) const {
  if (match.length == 0) return 0;
  const std::int64_t period = size() - match.next;
  for (std::int64_t i = 0; i < std::min(limit, period); ++i) {
    if (at(match.next + i) < 0) return i;
  }
  return limit;
}

std::vector<Token> PromptLookup::continuation(const Match& match, std::int64_t limit) const {
  std::vector<Token> draft;
  const std::int64_t period = size() - match.next, count = num_following(match, limit);
  for (std::int64_t i = 0; i < count; ++i) draft.push_back(at(match.next + i % period));
  return draft;
}

std::size_t PromptLookup::num_bytes() const {
  return tokens_.capacity() * sizeof(Token) +
         (previous_.capacity() + newest_.capacity()) * sizeof(std::int32_t);
}

}  // namespace vmserve::speculation
