#include "prompt_drafter.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "vmserve/errors.h"

namespace vmserve::speculation {
namespace {

// The match length assumed for an answer that begins like its prediction.
constexpr std::int64_t kAtTheBeginning = 3;

}  // namespace

PromptDrafter::PromptDrafter(PolicyNumbers numbers, std::int64_t most_visited, std::int64_t longest)
    : policy_(std::move(numbers)), most_visited_(most_visited), longest_(longest) {
  if (most_visited < 1 || longest < 2) throw MisuseError("a search visits and compares something");
}

void PromptDrafter::open(std::int64_t number, const std::vector<Token>& before,
                         std::int64_t num_prompt, std::int64_t most_tokens) {
  Entry entry{PromptLookup(most_visited_, longest_),
              Acceptance(policy_.numbers()),
              0,
              num_prompt,
              most_tokens,
              {}};
  for (const Token token : before) entry.lookup.append(token);
  if (!before.empty()) entry.lookup.append(-1);
  entry.num_before = entry.lookup.size();
  if (!entries_.emplace(number, std::move(entry)).second) {
    throw MisuseError("sequence " + std::to_string(number) + " is open already");
  }
}

bool PromptDrafter::begin(std::int64_t num_decoding, std::int64_t num_prompt_rows,
                          std::int64_t num_tokens) {
  step_ = {};
  step_.num_decoding = num_decoding;
  step_.num_prompt_rows = num_prompt_rows;
  step_.positions = static_cast<double>(num_tokens);
  log_tokens_ = 0;
  added_.clear();
  offers_.clear();
  return policy_.may_pay(step_);
}

void PromptDrafter::offer(Entry& entry, std::int64_t size) {
  const std::size_t index = added_.size();
  added_.push_back(&entry);
  const std::int64_t limit = std::min(policy_.numbers().most_drafted, entry.most_tokens - size - 1);
  if (limit <= 0) return;
  entry.match = entry.lookup.find();
  const bool is_first = size == entry.num_prompt + 1 && entry.num_before > 0;
  if (is_first && entry.match.length < kAtTheBeginning &&
      entry.lookup.at(0) == entry.lookup.at(entry.lookup.size() - 1)) {
    entry.match = {kAtTheBeginning, 1};
  }
  const std::int64_t num_tokens = entry.lookup.num_following(entry.match, limit);
  if (num_tokens == 0) return;
  offers_.push_back(
      {index, &entry.acceptance, entry.match.length, num_tokens, static_cast<double>(size)});
}

std::vector<std::vector<Token>> PromptDrafter::choose() {
  std::vector<std::vector<Token>> drafts;
  if (offers_.empty()) return drafts;
  const auto lengths = policy_.lengths(step_, offers_);
  for (std::size_t i = 0; i < offers_.size(); ++i) {
    if (lengths[i] == 0) continue;
    drafts.resize(added_.size());
    const Entry& entry = *added_[offers_[i].index];
    drafts[offers_[i].index] = entry.lookup.continuation(entry.match, lengths[i]);
  }
  return drafts;
}

void PromptDrafter::accepted(std::int64_t number, std::int64_t num_drafted,
                             std::int64_t num_accepted) {
  Entry& entry = entry_of(number);
  entry.acceptance.learn(entry.match.length, num_drafted, num_accepted);
  const auto positions = static_cast<double>(entry.lookup.size() - entry.num_before);
  step_.num_drafted += num_drafted;
  step_.drafted_positions += positions;
  step_.drafted_products += positions * static_cast<double>(num_drafted);
  log_tokens_ += std::log1p(static_cast<double>(num_accepted));
}

void PromptDrafter::learn(double seconds, double attention) {
  policy_.learn(step_, log_tokens_, seconds, attention);
  step_ = {};
}

bool PromptDrafter::may_pay(std::int64_t num_decoding) const {
  StepShape step;
  step.num_decoding = num_decoding;
  return policy_.may_pay(step);
}

std::size_t PromptDrafter::num_bytes() const {
  std::size_t sum = 0;
  for (const auto& [number, entry] : entries_) sum += entry.lookup.num_bytes();
  return sum;
}

PromptDrafter::Entry& PromptDrafter::entry_of(std::int64_t number) {
  const auto found = entries_.find(number);
  if (found == entries_.end()) {
    throw MisuseError("sequence " + std::to_string(number) + " is not open");
  }
  return found->second;
}

}  // namespace vmserve::speculation
