#include "draft_lengths.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "vmserve/errors.h"

namespace vmserve::speculation {
namespace {

// The most rows for each sequence in a step of the draft model that counts as drafting.
constexpr std::int64_t kMostCaughtUp = 2;
// Steps over which the price of reading a text is spread: as many as most answers have.
constexpr std::int64_t kHorizon = 64;

}  // namespace

DraftLengths::DraftLengths(PolicyNumbers numbers)
    : policy_(std::move(numbers)), overall_(policy_.numbers()) {}

void DraftLengths::open(std::int64_t number) {
  if (!entries_.emplace(number, Entry{Acceptance(policy_.numbers(), overall_), 0}).second) {
    throw MisuseError("sequence " + std::to_string(number) + " is open already");
  }
}

std::vector<std::int64_t> DraftLengths::choose(const std::vector<Decoding>& sequences,
                                               std::int64_t num_prompt_rows) {
  step_ = {};
  log_tokens_ = reading_ = 0;
  step_.num_decoding = static_cast<std::int64_t>(sequences.size());
  step_.num_prompt_rows = num_prompt_rows;
  for (const Decoding& each : sequences) step_.positions += static_cast<double>(each.size);
  std::vector<std::int64_t> lengths(sequences.size());
  if (!policy_.may_pay(step_)) return lengths;
  std::vector<Offer> offers;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const Decoding& each = sequences[i];
    if (each.number < 0 || each.most <= 0) continue;
    Entry& entry = entry_of(each.number);
    entry.positions = static_cast<double>(each.size);
    Offer offer{i, &entry.acceptance, 0, each.most, entry.positions};
    if (each.num_unread > kMostCaughtUp) {
      const auto steps =
          static_cast<double>(std::max<std::int64_t>(1, std::min(kHorizon, each.left)));
      offer.reading = static_cast<double>(each.num_unread) * read_row_.value() / steps;
    }
    offers.push_back(offer);
  }
  if (offers.empty()) return lengths;
  const auto chosen = policy_.lengths(step_, offers);
  bool any = false;
  for (std::size_t i = 0; i < offers.size(); ++i) {
    lengths[offers[i].index] = chosen[i];
    any = any || chosen[i] > 0;
  }
  if (!any) overall_.relax();
  return lengths;
}

void DraftLengths::ran(std::int64_t num_rows, std::int64_t num_sequences, double seconds) {
  if (num_rows > kMostCaughtUp * num_sequences) {
    read_row_.add(seconds / static_cast<double>(num_rows));
    reading_ += seconds;
    return;
  }
  policy_.drew(num_sequences, seconds);
  ++step_.num_rounds;
  step_.num_drafting = std::max(step_.num_drafting, num_sequences);
  step_.drafting_seconds += seconds;
}

void DraftLengths::accepted(std::int64_t number, std::int64_t num_drafted,
                            std::int64_t num_accepted) {
  Entry& entry = entry_of(number);
  entry.acceptance.learn(0, num_drafted, num_accepted);
  overall_.learn(0, num_drafted, num_accepted);
  step_.num_drafted += num_drafted;
  step_.drafted_positions += entry.positions;
  step_.drafted_products += entry.positions * static_cast<double>(num_drafted);
  log_tokens_ += std::log1p(static_cast<double>(num_accepted));
}

void DraftLengths::learn(double seconds, double attention) {
  policy_.learn(step_, log_tokens_, std::max(0.0, seconds - reading_), attention);
  step_ = {};
  log_tokens_ = reading_ = 0;
}

bool DraftLengths::may_pay(std::int64_t num_decoding) const {
  StepShape step;
  step.num_decoding = num_decoding;
  return policy_.may_pay(step);
}

DraftLengths::Entry& DraftLengths::entry_of(std::int64_t number) {
  const auto found = entries_.find(number);
  if (found == entries_.end()) {
    throw MisuseError("sequence " + std::to_string(number) + " is not open");
  }
  return found->second;
}

}  // namespace vmserve::speculation
