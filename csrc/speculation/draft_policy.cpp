#include "draft_policy.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

namespace vmserve::speculation {
namespace {

// Steps of more rows are bound by arithmetic and not distinguished.
constexpr std::int64_t kMostRows = 128;
// Steps after which a price is measured again.
constexpr std::int64_t kStaleAfter = 1000;
// The most values that a running mean counts.
constexpr std::int64_t kMostCounted = 16;
// Decay of a step's weight with each further step, in the least squares.
constexpr double kDecay = 0.98;
// Extra attention of a draft, relative to a decode, until it is measured.
constexpr double kUsualChunk = 1.0;
// Keeps the least squares from dividing by nothing.
constexpr double kRidge = 0.02;
// Weight of a step without drafts in the rates of a draft model.
constexpr double kRelaxed = 0.01;
// Rows over which the price of one more row is averaged.
constexpr std::int64_t kRowsOfSlope = 8;

// The assumed cost of one more row, as a share of a step of `num_rows`, if it was not measured.
// Little while reading weights takes the time, so that drafts are tried.
double growth(double num_rows) {
  return num_rows <= 8 ? 0.03 : 1 / num_rows;
}

// The greatest number of rows that shares a price with this one: such numbers are at most a quarter
// apart.
std::int64_t together(std::int64_t num_rows) {
  std::int64_t most = 4, width = 1;
  if (num_rows <= most) return num_rows;
  while (num_rows > 2 * most) most *= 2;
  width = most / 2;
  return most + (num_rows - most + width - 1) / width * width;
}

}  // namespace

Acceptance::Acceptance(const PolicyNumbers& numbers)
    : numbers_(&numbers),
      tried_(numbers.usual_rates.size(), numbers.prior_weight),
      accepted_(numbers.usual_rates) {
  for (double& accepted : accepted_) accepted *= numbers.prior_weight;
}

Acceptance::Acceptance(const PolicyNumbers& numbers, const Acceptance& other)
    : numbers_(&numbers),
      tried_(numbers.usual_rates.size(), numbers.prior_weight),
      accepted_(tried_) {
  for (std::size_t i = 0; i < accepted_.size(); ++i) {
    accepted_[i] *= other.accepted_[i] / other.tried_[i];
  }
}

void Acceptance::relax() {
  for (std::size_t i = 0; i < tried_.size(); ++i) {
    tried_[i] += kRelaxed;
    accepted_[i] += kRelaxed * numbers_->usual_rates[i];
  }
}

std::size_t Acceptance::place_of(std::int64_t match_length) const {
  const auto& bounds = numbers_->match_bounds;
  const auto found = std::upper_bound(bounds.begin(), bounds.end(), match_length);
  return static_cast<std::size_t>(found - bounds.begin());
}

double Acceptance::rate(std::int64_t match_length) const {
  const std::size_t place = place_of(match_length);
  return accepted_[place] / tried_[place];
}

void Acceptance::learn(std::int64_t match_length, std::int64_t num_drafted,
                       std::int64_t num_accepted) {
  for (std::int64_t i = 0; i < std::min(num_accepted + 1, num_drafted); ++i) {
    const std::size_t place = place_of(match_length + i);
    if (tried_[place] >= numbers_->most_weight) {
      const double kept = 1 - 1 / numbers_->most_weight;
      tried_[place] *= kept;
      accepted_[place] *= kept;
    }
    tried_[place] += 1;
    accepted_[place] += i < num_accepted ? 1 : 0;
  }
}

void RunningMean::add(double value) {
  if (count_ > 0) value = std::min(value, 2 * value_);
  count_ = std::min(count_ + 1, kMostCounted);
  value_ += (value - value_) / static_cast<double>(count_);
}

void RowPrices::learn(const StepShape& step, double seconds) {
  ++num_steps_;
  const std::int64_t num_rows = step.num_rows();
  if (step.num_prompt_rows > 0) {
    const bool is_mostly_prompts = step.num_prompt_rows >= 8 * step.num_decoding;
    if (is_mostly_prompts) prompt_row_.add(seconds / static_cast<double>(num_rows));
  } else {
    const bool is_plain = step.num_drafted == 0;
    Price& price = is_plain ? plain_[num_rows] : drafted_[together(num_rows)];
    price.num_rows.add(static_cast<double>(num_rows));
    price.seconds.add(seconds);
    price.measured_at = num_steps_;
  }
  if (num_steps_ % kStaleAfter != 0) return;
  forget_stale(plain_);
  forget_stale(drafted_);
}

void RowPrices::forget_stale(Prices& prices) const {
  for (auto it = prices.begin(); it != prices.end();) {
    const bool is_stale = num_steps_ - it->second.measured_at >= kStaleAfter;
    it = is_stale ? prices.erase(it) : std::next(it);
  }
}

double RowPrices::plain(std::int64_t num_decoding) const {
  const auto above = plain_.lower_bound(num_decoding);
  const auto rows = static_cast<double>(num_decoding);
  if (above == plain_.end()) return std::prev(above)->second.seconds.value();
  const double seconds = above->second.seconds.value();
  if (above->first == num_decoding || above == plain_.begin()) return seconds;
  const auto below = std::prev(above);
  const double least = below->second.seconds.value();
  const double share =
      (rows - static_cast<double>(below->first)) / static_cast<double>(above->first - below->first);
  return least + share * (seconds - least);
}

double RowPrices::drafts(const StepShape& step) const {
  const auto num_drafted = static_cast<double>(step.num_drafted);
  if (step.num_prompt_rows > 0) {
    return prompt_row_.empty() ? INFINITY : num_drafted * prompt_row_.value();
  }
  const double base = plain(step.num_decoding), rows = static_cast<double>(step.num_rows());
  struct Point {
    double rows, seconds;
  };
  Point from{static_cast<double>(step.num_decoding), base};
  double known = INFINITY;  // the line between the prices on both sides
  for (const auto& [most, price] : drafted_) {
    const Point to{price.num_rows.value(), std::max(base, price.seconds.value())};
    if (to.rows <= from.rows) continue;
    if (to.rows >= rows) {
      const double share = (rows - from.rows) / (to.rows - from.rows);
      known = from.seconds + share * (to.seconds - from.seconds);
      break;
    }
    from = to;
  }
  // Drafts that were not measured are assumed to be cheap, so that they are tried.
  const double hoped = from.seconds * (1 + growth(from.rows) * (rows - from.rows));
  const bool is_measured = drafted_.count(together(step.num_rows())) > 0 && known < INFINITY;
  return (is_measured ? known : std::min(known, hoped)) - base;
}

void AttentionPrices::learn(const StepShape& step, double seconds) {
  if (step.positions <= 0) return;
  if (step.num_drafted == 0) {
    plain_.add(seconds / step.positions);
    if (xx_ == 0) chunk_ = kUsualChunk * plain_.value();
    return;
  }
  const double x = step.drafted_positions, y = step.drafted_products;
  const double most = xx_ == 0 ? seconds : 2 * drafts(x, y);
  const double z = std::max(0.0, std::min(seconds - plain(step.positions), most));
  for (double* sum : {&xx_, &xy_, &yy_, &xz_, &yz_}) *sum *= kDecay;
  xx_ += x * x;
  xy_ += x * y;
  yy_ += y * y;
  xz_ += x * z;
  yz_ += y * z;
  // Drafts of equal lengths do not separate the two prices; then chunk_ is the larger one.
  token_ = (yz_ * xx_ - xy_ * xz_) / (xx_ * yy_ * (1 + kRidge) - xy_ * xy_);
  token_ = std::min(std::max(0.0, token_), yz_ / yy_);
  chunk_ = (xz_ - token_ * xy_) / xx_;
  if (chunk_ < 0) {
    chunk_ = 0;
    token_ = yz_ / yy_;
  }
}

double DraftPolicy::plain_seconds(const StepShape& step) const {
  return rows_.plain(step.num_decoding) + attention_.plain(step.positions);
}

// Rows of prompts are worth what they cost, so drafts are compared with the decodes alone.
double DraftPolicy::seconds_of(const StepShape& step) const {
  const double plain = plain_seconds(step);
  if (step.num_drafted == 0) return plain;
  return plain + rows_.drafts(step) +
         attention_.drafts(step.drafted_positions, step.drafted_products) +
         static_cast<double>(step.num_rounds) * round_seconds(step) + step.reading;
}

double DraftPolicy::round_seconds(const StepShape& step) const {
  return rounds_.empty() ? numbers_.round_share * plain_seconds(step)
                         : rounds_.plain(step.num_drafting);
}

void DraftPolicy::drew(std::int64_t num_sequences, double seconds) {
  StepShape round;
  round.num_decoding = num_sequences;
  rounds_.learn(round, seconds);
}

bool DraftPolicy::may_pay(const StepShape& step) const {
  if (!numbers_.is_priced) return true;
  if (rows_.empty() || credit_ < 0) return false;
  const double plain = plain_seconds(step);
  for (std::int64_t each = 1; each <= numbers_.most_drafted; each = 2 * each + 1) {
    StepShape drafted = step;
    drafted.num_drafted = each * step.num_decoding;
    if (numbers_.round_share > 0) {
      drafted.num_rounds = each;
      drafted.num_drafting = step.num_decoding;
    }
    const double speed = static_cast<double>(1 + each) / seconds_of(drafted);
    if (speed > numbers_.margin / plain) return true;
  }
  return false;
}

std::vector<std::int64_t> DraftPolicy::lengths(const StepShape& step,
                                               const std::vector<Offer>& offers) const {
  std::vector<std::int64_t> chosen(offers.size());
  if (!numbers_.is_priced) {
    for (std::size_t i = 0; i < offers.size(); ++i) {
      const Offer& offer = offers[i];
      const bool is_likely = offer.match_length > 2 ||
                             offer.acceptance->rate(offer.match_length) >= numbers_.least_rate;
      if (is_likely) chosen[i] = offer.num_tokens;
    }
    return chosen;
  }
  struct Token {
    double chance;  // that it and all before it are accepted
    std::size_t offer;
  };
  std::vector<Token> tokens;
  // Seconds that a token is worth, and about what a row costs.
  const auto num_decoding = static_cast<double>(step.num_decoding);
  const double plain = plain_seconds(step), worth = plain / num_decoding;
  StepShape more = step;
  more.num_drafted = kRowsOfSlope;
  const double row = rows_.drafts(more) / static_cast<double>(kRowsOfSlope);
  for (std::size_t i = 0; i < offers.size(); ++i) {
    const Offer& offer = offers[i];
    const double each = row + attention_.drafts(0, offer.positions);
    double gain = -attention_.drafts(offer.positions, 0), best = 0, chance = 1;
    const std::size_t first = tokens.size();
    for (std::int64_t k = 0; k < offer.num_tokens; ++k) {
      chance *= offer.acceptance->rate(offer.match_length + k);
      gain += chance * worth - each;
      best = std::max(best, gain);
      tokens.push_back({chance, i});
    }
    if (best <= 0) tokens.resize(first);  // its attention alone costs more than it promises
  }
  // Chances of a draft fall from token to token, so a prefix of each is taken.
  std::stable_sort(tokens.begin(), tokens.end(),
                   [](const Token& a, const Token& b) { return a.chance > b.chance; });
  StepShape drafted = step;
  std::vector<double> expected(offers.size(), 1.0);  // tokens of the sequence
  std::vector<std::int64_t> taken(offers.size());
  double log_gain = 0, best_gain = std::log(numbers_.margin);
  std::size_t best = 0;
  for (std::size_t num = 0; num < std::min<std::size_t>(tokens.size(), kMostRows); ++num) {
    const auto [chance, i] = tokens[num];
    ++drafted.num_drafted;
    if (taken[i]++ == 0) {
      drafted.drafted_positions += offers[i].positions;
      drafted.reading += offers[i].reading;
      if (numbers_.round_share > 0) ++drafted.num_drafting;
    }
    if (numbers_.round_share > 0) drafted.num_rounds = std::max(drafted.num_rounds, taken[i]);
    drafted.drafted_products += offers[i].positions;
    log_gain += std::log1p(chance / expected[i]) / num_decoding;
    expected[i] += chance;
    const double gain = log_gain - std::log(seconds_of(drafted) / plain);
    if (gain <= best_gain) continue;
    best_gain = gain;
    best = num + 1;
  }
  for (std::size_t num = 0; num < best; ++num) ++chosen[tokens[num].offer];
  return chosen;
}

void DraftPolicy::learn(const StepShape& step, double log_tokens, double seconds,
                        double attention) {
  if (step.num_decoding == 0) return;
  rows_.learn(step, std::max(0.0, seconds - attention - step.drafting_seconds));
  if (step.num_prompt_rows > 0 || rows_.empty()) return;
  attention_.learn(step, attention);
  const double plain = plain_seconds(step), most = numbers_.most_credit * plain;
  if (step.num_drafted == 0) {
    credit_ = has_begun_ ? credit_ + numbers_.earned * std::min(seconds, 2 * plain) : most;
    credit_ -= step.drafting_seconds;
    has_begun_ = true;
  } else {
    // A step that was held up, or measured wrongly, counts at most 1.5 times its expected seconds,
    // and at least 1 / 1.5.
    const double expected = seconds_of(step);
    const double took = std::min(std::max(seconds, expected / 1.5), 1.5 * expected);
    credit_ += std::exp(log_tokens / static_cast<double>(step.num_decoding)) * plain - took;
  }
  credit_ = std::min(std::max(credit_, -most), most);
}

}  // namespace vmserve::speculation
