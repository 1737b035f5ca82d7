// Reads memory as fast as plain C++ can: the baseline of kernel benchmarks.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "attention.h"
#include "thread_pool.h"

namespace vmserve {
namespace {

// Bytes of a work item, which is read in four streams: a core keeps more cache misses in flight
// over several streams than over one.
constexpr std::size_t kItemBytes = 1 << 20, kStreams = 4;
// 16 bytes: every processor has registers of this size, and GCC uses them without vectorising
// loops.
using Words = std::uint64_t __attribute__((vector_size(16)));
constexpr std::size_t kLineBytes = 64, kLineWords = kLineBytes / sizeof(Words);

struct ReadRun {
  const char* data;
  std::size_t bytes;
  std::atomic<std::uint64_t> folded;
};

std::uint64_t fold(const char* from, std::size_t bytes) {
  Words sums[kLineWords] = {};
  const std::size_t stream_bytes = bytes / kStreams / kLineBytes * kLineBytes;
  for (std::size_t at = 0; at < stream_bytes; at += kLineBytes) {
#pragma GCC unroll 4
    for (std::size_t stream = 0; stream < kStreams; ++stream) {
#pragma GCC unroll 4
      for (std::size_t i = 0; i < kLineWords; ++i) {
        Words words;
        std::memcpy(&words, from + stream * stream_bytes + at + i * sizeof words, sizeof words);
        sums[i] ^= words;
      }
    }
  }
  const Words all = (sums[0] ^ sums[1]) ^ (sums[2] ^ sums[3]);
  std::uint64_t folded = all[0] ^ all[1], word = 0;
  for (std::size_t at = kStreams * stream_bytes; at < bytes; at += sizeof word) {
    std::memcpy(&word, from + at, sizeof word);
    folded ^= word;
  }
  return folded;
}

void do_read(void* context, std::int64_t index, int) {
  auto& run = *static_cast<ReadRun*>(context);
  const std::size_t at = static_cast<std::size_t>(index) * kItemBytes;
  run.folded ^= fold(run.data + at, std::min(kItemBytes, run.bytes - at));
}

}  // namespace

std::uint64_t fold_memory(ThreadPool& pool, const char* data, std::size_t bytes) {
  ReadRun run{data, bytes / sizeof(std::uint64_t) * sizeof(std::uint64_t), {0}};
  const std::size_t num_items = (run.bytes + kItemBytes - 1) / kItemBytes;
  pool.run(static_cast<std::int64_t>(num_items), ThreadPool::kMaxThreads, &do_read, &run);
  return run.folded;
}

}  // namespace vmserve
