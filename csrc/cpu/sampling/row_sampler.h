// From rows of logits on the host to tokens, their log-probabilities and ranks.
//
// A row's result depends on its logits and its request alone: it has the same bits whatever other
// rows there are, on any number of threads and every instruction set. Log-probabilities are those
// of the logits as they are given: (x - maximum) - log(sum of exp(x - maximum)). Logits that are no
// numbers are repaired first: NaN becomes -inf, +inf the largest finite number, and where all are
// -inf, all become 0.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../attention.h"
#include "../thread_pool.h"

namespace vmserve {

namespace cpu {
struct KernelTable;
}
namespace sampling {
struct Workspace;
}

// What a request changes in its logits, in this order: bias, then what may be chosen, then the
// penalties. Ids are of the vocabulary.
struct LogitChanges {
  std::vector<std::pair<std::int32_t, float>> bias;  // distinct ids
  // Nothing but these (distinct; empty: all), nor any of those. Where that leaves no token,
  // `allowed` is given up first, then `banned`; what `mask` rules out stays so.
  std::vector<std::int32_t> allowed, banned;
  const bool* mask = nullptr;  // [vocab], true for what a grammar lets follow
  float repetition = 1.0F;     // divides what is above 0 and multiplies the rest, of tokens seen
  double presence = 0.0, frequency = 0.0;  // subtracted from tokens of the output
  std::vector<std::int32_t> prompt, output;
};

struct RowRequest {
  // No number of likeliest tokens: none are asked for, nor the rank of the chosen one.
  static constexpr std::int64_t kNone = -1;

  std::uint64_t seed = 0, index = 0, position = 0;
  float temperature = 0.0F;  // 0: the likeliest token, the lowest id of equals
  std::int64_t top_k = 0;    // 0: all
  double top_p = 1.0, min_p = 0.0;
  std::optional<LogitChanges> changes;
  std::optional<std::int64_t> given;  // this token instead of a choice
  std::int64_t num_likeliest = kNone;
  std::optional<std::vector<std::int32_t>> listed;  // tokens to tell of instead of the likeliest
};

struct RankedToken {
  std::int32_t id;
  double logprob;
  std::int64_t rank;  // 1 is the likeliest; of equal logits the lower id comes first
};

struct RowResult {
  std::int64_t token = 0;
  double logprob = 0.0;
  bool was_repaired = false;
  // The token, then the likeliest or the listed ones; empty where the request asks for none.
  std::vector<RankedToken> ranked;
};

// Philox4x32-10 (Salmon et al., SC 2011) under the key `seed`: 53 random bits, in [0, 1).
double uniform_of(std::uint64_t seed, std::uint64_t index, std::uint64_t position);

class RowSampler {
 public:
  // `isa`: one of cpu_isas(), or "" for the best. Throws MisuseError.
  RowSampler(std::int64_t vocab, int num_threads, const std::string& isa);
  ~RowSampler();

  std::int64_t vocab() const { return vocab_; }
  int num_threads() const { return num_threads_; }
  void set_num_threads(int num_threads);

  // `logits` [rows, vocab], each row contiguous. Post: results[i] is of requests[i]. Throws
  // MisuseError for shapes and ids that do not fit, before anything is done. Calls take turns.
  void run(const TensorRef& logits, const std::vector<RowRequest>& requests,
           std::vector<RowResult>& results);

 private:
  void check(const TensorRef& logits, const std::vector<RowRequest>& requests) const;

  std::int64_t vocab_;
  int num_threads_;
  const cpu::KernelTable* table_;
  std::mutex turn_;
  std::unique_ptr<ThreadPool> pool_;  // made when there is work to share
  std::vector<std::unique_ptr<sampling::Workspace>> workspaces_;  // of each thread
};

}  // namespace vmserve
