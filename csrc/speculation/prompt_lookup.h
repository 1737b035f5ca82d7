// Finds an earlier occurrence of a text's end, to propose what followed it there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace vmserve::speculation {

using Token = std::int32_t;

// An earlier occurrence of the text's end: its `length` last tokens also stand before `next`.
struct Match {
  std::int64_t length = 0;
  std::int64_t next = 0;
};

// A text that grows at its end, and an index of its pairs of tokens.
//
// Chains link the places with the same pair, newest first, so a search visits the newest
// occurrences of the last two tokens. Memory: 12 to 16 bytes a token, twice that just after a
// vector has grown. A negative token matches nothing: it divides texts.
class PromptLookup {
 public:
  // `most_visited`: places that one search looks at. `longest`: matches are not compared further.
  PromptLookup(std::int64_t most_visited, std::int64_t longest)
      : most_visited_(most_visited), longest_(longest) {}

  void append(Token token);

  // The longest match of two tokens or more; of equal ones the newest. Length 0: none.
  Match find() const;

  // Returns the tokens after a match, at most `limit`. Text that repeats itself goes on as it
  // repeats.
  std::vector<Token> continuation(const Match& match, std::int64_t limit) const;

  // The number of tokens of continuation().
  std::int64_t num_following(const Match& match, std::int64_t limit) const;

  Token at(std::int64_t index) const { return tokens_[static_cast<std::size_t>(index)]; }
  std::int64_t size() const { return static_cast<std::int64_t>(tokens_.size()); }
  std::size_t num_bytes() const;

 private:
  std::size_t bucket(Token first, Token second) const;
  void link(std::int64_t end);
  void grow();

  std::int64_t most_visited_, longest_;
  std::vector<Token> tokens_;
  // By the position after a pair: the one before with a pair of the same bucket, or 0.
  std::vector<std::int32_t> previous_{0};
  // By bucket: the newest position after a pair of it, or 0. A power of two of them.
  std::vector<std::int32_t> newest_;
};

}  // namespace vmserve::speculation
