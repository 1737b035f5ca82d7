#include "row_sampler.h"

#include <algorithm>
#include <string>

#include "../kernels/isa.h"
#include "row.h"
#include "vmserve/errors.h"

namespace vmserve {
namespace {

// Below this many elements, about 0.1 ms of work, waking a thread costs more than it saves.
constexpr std::int64_t kSerialElements = 1 << 17;

void check_request(const RowRequest& request, std::int64_t vocab) {
  if (request.given && (*request.given < 0 || *request.given >= vocab)) {
    throw MisuseError("token id " + std::to_string(*request.given) +
                      " is out of vocabulary: ids are 0 to " + std::to_string(vocab - 1));
  }
  if (request.listed) {
    if (static_cast<std::int64_t>(request.listed->size()) > vocab) {
      throw MisuseError("a token is listed twice: " + std::to_string(request.listed->size()) +
                        " are listed of a vocabulary of " + std::to_string(vocab));
    }
  }
  if (!request.changes) return;
  const LogitChanges& changes = *request.changes;
  for (const auto* ids : {&changes.banned, &changes.prompt, &changes.output})
    check_ids(*ids, vocab);
}

}  // namespace

void check_ids(const TokenIds& ids, std::int64_t vocab) {
  for (const std::int32_t id : ids) {
    if (id < 0 || id >= vocab) {
      throw MisuseError("token id " + std::to_string(id) + " is out of vocabulary: ids are 0 to " +
                        std::to_string(vocab - 1));
    }
  }
}

double uniform_of(std::uint64_t seed, std::uint64_t index, std::uint64_t position) {
  const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  const auto high = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
  std::uint32_t k0 = low(seed), k1 = high(seed);
  std::uint32_t c0 = low(position), c1 = high(position), c2 = low(index), c3 = 0;
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{c0} * 0xD2511F53U, p1 = std::uint64_t{c2} * 0xCD9E8D57U;
    const std::uint32_t next0 = high(p1) ^ c1 ^ k0, next2 = high(p0) ^ c3 ^ k1;
    c0 = next0;
    c1 = low(p1);
    c2 = next2;
    c3 = low(p0);
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return static_cast<double>(std::uint64_t{c0 >> 5} << 26 | c1 >> 6) * 0x1p-53;
}

RowSampler::RowSampler(std::int64_t vocab, int num_threads, const std::string& isa)
    : vocab_(vocab), num_threads_(num_threads), table_(&cpu::choose_table(isa)) {
  if (vocab < 1 || vocab > INT32_MAX) {
    throw MisuseError("a vocabulary of " + std::to_string(vocab) + " tokens: use 1 to 2147483647");
  }
  set_num_threads(num_threads);
}

RowSampler::~RowSampler() = default;

void RowSampler::set_num_threads(int num_threads) {
  if (num_threads < 1 || num_threads > ThreadPool::kMaxThreads) {
    throw MisuseError("a sampler with " + std::to_string(num_threads) + " threads: use 1 to " +
                      std::to_string(ThreadPool::kMaxThreads));
  }
  const std::lock_guard turn(turn_);
  num_threads_ = num_threads;
}

void RowSampler::check(const TensorRef& logits, const std::vector<RowRequest>& requests) const {
  const auto num_rows = static_cast<std::int64_t>(requests.size());
  if (logits.shape.size() != 2 || logits.shape[0] != num_rows || logits.shape[1] != vocab_) {
    throw MisuseError("logits are not [" + std::to_string(num_rows) + ", " +
                      std::to_string(vocab_) + "]");
  }
  if (vocab_ > 1 && logits.strides[1] != 1) throw MisuseError("rows of logits are contiguous");
  for (const RowRequest& request : requests) check_request(request, vocab_);
}

void RowSampler::run(const TensorRef& logits, const std::vector<RowRequest>& requests,
                     std::vector<RowResult>& results) {
  check(logits, requests);
  const std::lock_guard turn(turn_);
  const auto num_rows = static_cast<std::int64_t>(requests.size());
  results.resize(requests.size());
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const RowRequest& request = requests[i];
    if (request.num_likeliest == RowRequest::kNone && !request.listed) continue;
    const std::int64_t num = request.listed
                                 ? static_cast<std::int64_t>(request.listed->size())
                                 : std::clamp<std::int64_t>(request.num_likeliest, 0, vocab_);
    results[i].ranked.resize(static_cast<std::size_t>(num) + 1);
  }
  const bool shared = num_threads_ > 1 && num_rows > 1 && num_rows * vocab_ >= kSerialElements;
  const auto num_workers = static_cast<std::size_t>(shared ? num_threads_ : 1);
  while (workspaces_.size() < num_workers) {
    workspaces_.push_back(std::make_unique<sampling::Workspace>(vocab_));
  }
  for (const auto& workspace : workspaces_) workspace->make_room(requests, vocab_);
  if (shared && (pool_ == nullptr || pool_->num_threads() != num_threads_)) {
    pool_ = std::make_unique<ThreadPool>(num_threads_);
  }
  const auto work = [&](std::int64_t row, int worker) {
    sampling::Row(table_->rows, vocab_, *workspaces_[worker])
        .run(logits, row, requests[row], results[row]);
  };
  if (!shared) {
    for (std::int64_t row = 0; row < num_rows; ++row) work(row, 0);
    return;
  }
  using Body = decltype(work);
  const auto call = [](void* context, std::int64_t row, int worker) {
    (*static_cast<Body*>(context))(row, worker);
  };
  // const_cast: the pool passes the pointer through unchanged.
  pool_->run(num_rows, ThreadPool::kMaxThreads, call,
             const_cast<void*>(static_cast<const void*>(&work)));
}

}  // namespace vmserve
