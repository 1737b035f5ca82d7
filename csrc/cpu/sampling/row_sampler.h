// Samples tokens from rows of logits on the host, with log-probabilities and ranks.
//
// A row's result depends only on its logits and its request. It has the same bits in any batch, on
// any number of threads and with every instruction set. Log-probabilities are those of the logits
// as given: (x - maximum) - log(sum of exp(x - maximum)). Logits that are not finite are repaired
// first: NaN becomes -inf, +inf the largest finite number; if all are -inf, all become 0.
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

using TokenIds = std::vector<std::int32_t>;

// Changes that are the same for all rows and steps of a request.
struct FixedChanges {
  std::vector<std::pair<std::int32_t, float>> bias;  // distinct ids
  TokenIds allowed;                                  // distinct; empty: all
  float repetition = 1.0F;  // tokens seen: divides logits above 0, multiplies the others
  double presence = 0.0, frequency = 0.0;  // subtracted from the logits of output tokens
};

// Changes to a row of logits, in this order: bias, then which tokens may be chosen, then penalties.
// Ids are in the vocabulary.
struct LogitChanges {
  std::shared_ptr<const FixedChanges> fixed;
  // Only `fixed->allowed` without `banned` may be chosen. If that leaves no token, `allowed` is
  // ignored, then `banned`; `mask` always holds.
  TokenIds banned;
  const bool* mask = nullptr;  // [vocab], true for tokens that the grammar allows next
  TokenIds prompt, output;
};

struct RowRequest {
  // For num_likeliest: no likeliest tokens, and no rank of the chosen one.
  static constexpr std::int64_t kNone = -1;

  std::uint64_t seed = 0, index = 0, position = 0;
  float temperature = 0.0F;  // 0: the likeliest token; among equals, the lowest id
  std::int64_t top_k = 0;    // 0: all
  double top_p = 1.0, min_p = 0.0;
  std::optional<LogitChanges> changes;
  std::optional<std::int64_t> given;  // this token instead of a choice
  std::int64_t num_likeliest = kNone;
  std::shared_ptr<const TokenIds> listed;  // rank these, distinct, instead of the likeliest
};

struct RankedToken {
  std::int32_t id;
  double logprob;
  std::int64_t rank;  // 1: the likeliest; among equals, lower ids come first
};

struct RowResult {
  std::int64_t token = 0;
  double logprob = 0.0;
  bool was_repaired = false;
  // The chosen token, then the likeliest or listed ones; empty unless the request asks for them.
  std::vector<RankedToken> ranked;
};

// Throws MisuseError for ids that are not in the vocabulary.
void check_ids(const TokenIds& ids, std::int64_t vocab);

// Philox4x32-10 (Salmon et al., SC 2011) with the key `seed`: 53 random bits, in [0, 1).
double uniform_of(std::uint64_t seed, std::uint64_t index, std::uint64_t position);

class RowSampler {
 public:
  // `isa`: one of cpu_isas(), or "" for the best. Throws MisuseError.
  RowSampler(std::int64_t vocab, int num_threads, const std::string& isa);
  ~RowSampler();

  std::int64_t vocab() const { return vocab_; }
  int num_threads() const { return num_threads_; }
  void set_num_threads(int num_threads);

  // `logits` [rows, vocab], each row contiguous. Post: results[i] belongs to requests[i]. Throws
  // MisuseError for bad shapes or ids before anything is done. Concurrent calls wait for one
  // another.
  void run(const TensorRef& logits, const std::vector<RowRequest>& requests,
           std::vector<RowResult>& results);

 private:
  void check(const TensorRef& logits, const std::vector<RowRequest>& requests) const;

  std::int64_t vocab_;
  int num_threads_;
  const cpu::KernelTable* table_;
  std::mutex turn_;
  std::unique_ptr<ThreadPool> pool_;  // made when a call is worth sharing
  std::vector<std::unique_ptr<sampling::Workspace>> workspaces_;  // one for each thread
};

}  // namespace vmserve
