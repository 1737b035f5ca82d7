// Chooses how many drafted tokens a step computes: as many as pay, from measured steps and accepted
// tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace vmserve::speculation {

// The numbers of vmserve/speculation/policy.py, which explains them.
struct PolicyNumbers {
  std::vector<std::int64_t> match_bounds;
  std::vector<double> usual_rates;  // one more than bounds
  double prior_weight, most_weight;
  std::int64_t most_drafted;
  bool is_priced;
  double least_rate;
  double margin;
  double earned, most_credit;
  double round_share;
};

// A request's share of accepted tokens by the length of the match that they extend.
class Acceptance {
 public:
  explicit Acceptance(const PolicyNumbers& numbers);
  // Begins with the rates of another one.
  Acceptance(const PolicyNumbers& numbers, const Acceptance& other);

  double rate(std::int64_t match_length) const;
  // Tokens after a rejected one are not counted.
  void learn(std::int64_t match_length, std::int64_t num_drafted, std::int64_t num_accepted);
  // Moves the rates a little towards the usual ones, so that bad matches are tried again some time.
  void relax();

 private:
  std::size_t place_of(std::int64_t match_length) const;

  const PolicyNumbers* numbers_;
  std::vector<double> tried_, accepted_;
};

// The rows of a step: one token of each decoding sequence, rows of prompts, and drafted tokens.
struct StepShape {
  std::int64_t num_decoding = 0, num_prompt_rows = 0;
  double positions = 0;  // sum over all decoding sequences
  // Sums over the sequences with drafts: their tokens, positions, and products of both.
  std::int64_t num_drafted = 0;
  double drafted_positions = 0, drafted_products = 0;
  // For a draft model: its own steps, the most sequences of one, and the seconds that they took.
  // `reading`: seconds of reading texts that are charged to this step.
  std::int64_t num_rounds = 0, num_drafting = 0;
  double drafting_seconds = 0, reading = 0;

  std::int64_t num_rows() const { return num_decoding + num_prompt_rows + num_drafted; }
};

// A mean of measured seconds: of all at first, later mostly of the newest. A value counts for at
// most twice the mean, because a step may be held up.
class RunningMean {
 public:
  void add(double value);
  double value() const { return value_; }
  bool empty() const { return count_ == 0; }

 private:
  double value_ = 0;
  std::int64_t count_ = 0;
};

// Seconds of whole steps without their attention. Steps without drafts have a price for each number
// of sequences. Steps with drafts are fewer and their rows vary, so that numbers of rows close to
// each other have one price. A price that was not measured lately is forgotten: one that was too
// high by chance would stay.
class RowPrices {
 public:
  void learn(const StepShape& step, double seconds);
  // Whether no step without drafts was measured.
  bool empty() const { return plain_.empty(); }
  double plain(std::int64_t num_decoding) const;
  // Seconds that the drafts of a step add; infinite if unknown.
  double drafts(const StepShape& step) const;

 private:
  struct Price {
    RunningMean num_rows, seconds;
    std::int64_t measured_at = 0;
  };
  using Prices = std::map<std::int64_t, Price>;

  void forget_stale(Prices& prices) const;

  Prices plain_, drafted_;  // keys: number of sequences; greatest number of rows of the price
  RunningMean prompt_row_;  // seconds of a row in steps that mostly read prompts
  std::int64_t num_steps_ = 0;
};

// Seconds of attention. A sequence without drafts costs the same for each of its positions; one
// with drafts costs more, and more again for each drafted token. Learnt by recursive least squares.
class AttentionPrices {
 public:
  void learn(const StepShape& step, double seconds);
  // Seconds of all sequences as if none had drafts.
  double plain(double positions) const { return plain_.value() * positions; }
  // Seconds that drafts add.
  double drafts(double positions, double products) const {
    return chunk_ * positions + token_ * products;
  }

 private:
  RunningMean plain_;
  double chunk_ = 0, token_ = 0;
  // Decayed sums of squares and products of positions, products and seconds.
  double xx_ = 0, xy_ = 0, yy_ = 0, xz_ = 0, yz_ = 0;
};

// A draft that could be computed.
struct Offer {
  std::size_t index;  // of its sequence
  const Acceptance* acceptance;
  std::int64_t match_length, num_tokens;
  double positions;
  double reading = 0;  // as in StepShape
};

// Chooses drafts that make a batch faster by the geometric mean of its sequences' tokens a second.
// By this mean, many sequences have to gain from what all of them wait for. (By the sum, one
// sequence of eight may slow the others by a tenth. And eight that begin together are done when the
// last one is.)
//
// Estimates may be wrong, so drafts are paid from an account. A step with drafts adds the seconds
// that it won and takes those that it lost. A step without drafts earns a small share of its own
// seconds. With an empty account there are no drafts, so losses are bounded by earnings.
class DraftPolicy {
 public:
  explicit DraftPolicy(PolicyNumbers numbers) : numbers_(std::move(numbers)) {}

  const PolicyNumbers& numbers() const { return numbers_; }
  // Whether drafts in such a step would pay if all were accepted: worth a search.
  bool may_pay(const StepShape& step) const;
  // The number of tokens of each offer to compute.
  std::vector<std::int64_t> lengths(const StepShape& step, const std::vector<Offer>& offers) const;
  // Takes the seconds of the whole step and of its attention. `log_tokens`: the sum of the
  // logarithms of the numbers of tokens that its sequences got.
  void learn(const StepShape& step, double log_tokens, double seconds, double attention);
  // Takes the seconds of a step of a draft model.
  void drew(std::int64_t num_sequences, double seconds);

  double seconds_of(const StepShape& step) const;
  double credit() const { return credit_; }

 private:
  double plain_seconds(const StepShape& step) const;
  double round_seconds(const StepShape& step) const;

  PolicyNumbers numbers_;
  RowPrices rows_, rounds_;
  AttentionPrices attention_;
  double credit_ = 0;
  bool has_begun_ = false;
};

}  // namespace vmserve::speculation
