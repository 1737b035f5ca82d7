#include "vmserve/page_set.h"

#include <algorithm>

namespace vmserve {
namespace {

constexpr std::uint64_t kAllOnes = ~std::uint64_t{0};

}  // namespace

PageSet::PageSet(std::int64_t capacity) : words_((capacity + 63) / 64), capacity_(capacity) {}

void PageSet::insert(std::int64_t id) noexcept {
  words_[id / 64] |= std::uint64_t{1} << (id % 64);
  first_word_ = std::min(first_word_, id / 64);
  ++size_;
}

void PageSet::erase(std::int64_t id) noexcept {
  words_[id / 64] &= ~(std::uint64_t{1} << (id % 64));
  first_absent_word_ = std::min(first_absent_word_, id / 64);
  --size_;
}

std::int64_t PageSet::lowest(std::int64_t from) const noexcept {
  std::int64_t word = std::max(from / 64, first_word_);
  std::uint64_t mask = word == from / 64 ? kAllOnes << (from % 64) : kAllOnes;
  for (; word < words_.size(); ++word, mask = kAllOnes) {
    const std::uint64_t bits = words_[word] & mask;
    if (bits != 0) return word * 64 + __builtin_ctzll(bits);
    if (word == first_word_ && words_[word] == 0) ++first_word_;
  }
  return -1;
}

std::int64_t PageSet::lowest_absent(std::int64_t from) const noexcept {
  std::int64_t word = std::max(from / 64, first_absent_word_);
  std::uint64_t mask = word == from / 64 ? kAllOnes << (from % 64) : kAllOnes;
  for (; word < words_.size(); ++word, mask = kAllOnes) {
    const std::uint64_t bits = ~words_[word] & mask;
    if (bits != 0) {
      const std::int64_t id = word * 64 + __builtin_ctzll(bits);
      return id < capacity_ ? id : -1;
    }
    if (word == first_absent_word_ && words_[word] == kAllOnes) ++first_absent_word_;
  }
  return -1;
}

std::int64_t PageSet::highest(std::int64_t from) const noexcept {
  if (from < 0) return -1;
  std::uint64_t mask = kAllOnes >> (63 - from % 64);
  for (std::int64_t word = from / 64; word >= first_word_; --word, mask = kAllOnes) {
    const std::uint64_t bits = words_[word] & mask;
    if (bits != 0) return word * 64 + 63 - __builtin_clzll(bits);
  }
  return -1;
}

}  // namespace vmserve
