// Drafts of a batch from the texts of its sequences.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "draft_policy.h"
#include "prompt_lookup.h"

namespace vmserve::speculation {

// Keeps an index and the acceptance of each sequence, by a number that the caller gives it.
//
// In a step: begin(), add() for each decoding sequence, choose(); when its tokens are known,
// accepted() for each draft that was computed, and learn().
class PromptDrafter {
 public:
  // `most_visited`, `longest`: as in PromptLookup.
  PromptDrafter(PolicyNumbers numbers, std::int64_t most_visited, std::int64_t longest);
  PromptDrafter(const PromptDrafter&) = delete;
  PromptDrafter& operator=(const PromptDrafter&) = delete;

  // `before`: a text that the answer may repeat. No match crosses its end. `num_prompt`: tokens
  // before the answer; the sequence ends at `most_tokens`.
  void open(std::int64_t number, const std::vector<Token>& before, std::int64_t num_prompt,
            std::int64_t most_tokens);
  void close(std::int64_t number) { entries_.erase(number); }

  // Begins a step of `num_decoding` sequences with `num_tokens` tokens together. False if none is
  // worth a search.
  bool begin(std::int64_t num_decoding, std::int64_t num_prompt_rows, std::int64_t num_tokens);
  // Searches a match for a sequence of `size` tokens; `token(i)` returns the new ones.
  template <class TokenAt>
  void add(std::int64_t number, std::int64_t size, TokenAt token) {
    Entry& entry = entry_of(number);
    for (std::int64_t i = entry.lookup.size() - entry.num_before; i < size; ++i) {
      entry.lookup.append(token(i));
    }
    offer(entry, size);
  }
  // Returns the drafts of the added sequences, in order; an empty one is no draft.
  std::vector<std::vector<Token>> choose();

  void accepted(std::int64_t number, std::int64_t num_drafted, std::int64_t num_accepted);
  // Takes the seconds of the whole step and of its attention.
  void learn(double seconds, double attention);

  bool may_pay(std::int64_t num_decoding) const;
  std::size_t size() const { return entries_.size(); }
  std::size_t num_bytes() const;
  const DraftPolicy& policy() const { return policy_; }

 private:
  struct Entry {
    PromptLookup lookup;
    Acceptance acceptance;
    std::int64_t num_before, num_prompt, most_tokens;
    // The result of the last search.
    Match match;
  };

  Entry& entry_of(std::int64_t number);
  void offer(Entry& entry, std::int64_t size);

  DraftPolicy policy_;
  std::int64_t most_visited_, longest_;
  std::unordered_map<std::int64_t, Entry> entries_;
  StepShape step_;
  double log_tokens_ = 0;
  std::vector<Entry*> added_;
  std::vector<Offer> offers_;
};

}  // namespace vmserve::speculation
