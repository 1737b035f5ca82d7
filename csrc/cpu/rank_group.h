// Several decoders that compute one forward pass together, each with a slice of every matrix: they
// meet in memory that they share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace vmserve {

// A rank's part of a number of outputs.
struct Slice {
  std::int64_t first = 0, count = 0;
};

// One rank of `size`. The memory is a file without a name (memfd), which ranks in other processes
// inherit. It is zeroed before the first rank. Ranks may also be threads of one process.
//
// A rank that ends, or calls fail(), ends the group: every wait(), now or later, throws. So does a
// rank that keeps rank 0 waiting, if it is stopped for 0.7 s or asleep for 10 s.
class RankGroup {
 public:
  static constexpr int kMaxRanks = 64;

  // The caller keeps the descriptor. `board_bytes`: room for a message of publish(), the same for
  // all ranks. Throws MisuseError if the file does not fit, or the rank is taken.
  RankGroup(int descriptor, int rank, int size, std::size_t board_bytes = 0);
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // Memory that all ranks write to, and its size.
  char* data() const;
  std::size_t bytes() const;

  // Waits for all ranks, also for those that have not begun yet. What they wrote before is then
  // visible. Throws a sticky DriverError if one has ended.
  void wait();
  void fail() { lose(rank_); }
  // Ends the group: this rank has ended.
  void lose(int rank);

  // Rank 0 sends the others what they compute next, once each has received the message before.
  // Throws MisuseError if the message does not fit on the board, else as wait().
  void publish(std::string_view step);
  // Waits for rank 0's message, which is valid until the next call.
  std::string_view receive();

  // Slices follow each other in the order of ranks and are all `count` outputs. None is empty if
  // there are as many outputs as ranks. Borders are those of packed panels if there are enough.
  static Slice slice(std::int64_t count, int rank, int size);
  Slice slice(std::int64_t count) const { return slice(count, rank_, size_); }

 private:
  struct Header;

  // For how long each rank that rank 0 waits for has done nothing.
  struct Stalls;

  [[noreturn]] void report() const;
  void mark_lost(std::uint32_t lost);
  void find_dead();
  void find_hung(Stalls& stalls);
  char* board(std::uint32_t turn) const;

  int rank_, size_;
  std::size_t board_bytes_;  // bytes of each of the two halves
  std::uint32_t num_published_ = 0;
  std::size_t mapped_ = 0;
  Header* header_ = nullptr;
};

}  // namespace vmserve
