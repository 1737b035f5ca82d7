// Chooses the lengths of a draft model's drafts.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "draft_policy.h"

namespace vmserve::speculation {

// Keeps the acceptance of each sequence, by a number that the caller gives it. A new sequence
// begins with the acceptance of all: how well two models agree depends more on them than on a text.
//
// In a step: choose(); ran() for each step of the draft model; when its tokens are known,
// accepted() for each draft that was computed, and learn().
class DraftLengths {
 public:
  // A decoding sequence of a step. `number` < 0: it gets no draft. `num_unread` of its `size`
  // tokens are to be read first. It can get `most` tokens, and `left` until it ends.
  struct Decoding {
    std::int64_t number, size, num_unread, most, left;
  };

  explicit DraftLengths(PolicyNumbers numbers);
  DraftLengths(const DraftLengths&) = delete;
  DraftLengths& operator=(const DraftLengths&) = delete;

  void open(std::int64_t number);
  void close(std::int64_t number) { entries_.erase(number); }

  // Returns the lengths in the order of `sequences`.
  std::vector<std::int64_t> choose(const std::vector<Decoding>& sequences,
                                   std::int64_t num_prompt_rows);
  // Takes a step of the draft model.
  void ran(std::int64_t num_rows, std::int64_t num_sequences, double seconds);
  void accepted(std::int64_t number, std::int64_t num_drafted, std::int64_t num_accepted);
  // Takes the seconds of the whole step and of its attention.
  void learn(double seconds, double attention);

  bool may_pay(std::int64_t num_decoding) const;
  const DraftPolicy& policy() const { return policy_; }

 private:
  struct Entry {
    Acceptance acceptance;
    double positions;
  };

  Entry& entry_of(std::int64_t number);

  DraftPolicy policy_;
  Acceptance overall_;
  std::unordered_map<std::int64_t, Entry> entries_;
  StepShape step_;
  double log_tokens_ = 0, reading_ = 0;
  RunningMean read_row_;
};

}  // namespace vmserve::speculation
