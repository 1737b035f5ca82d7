// Makes blocks outlive the process. Published blocks are written to a store while steps run, and
// read back into free pages when a new sequence's prefix is there.
//
// A block that was read back is published, in an idle page, like one that a step has computed.
// Attaching it is an ordinary hit, and any failure before that an ordinary miss. Content passes
// through host memory in both directions, where its checksum is made and compared, so only whole
// blocks ever reach a page.
//
//   write   write_behind() copies blocks to buffers in host memory, between steps, and the writer
//           thread puts these into the store while nothing else wants its processor. A block that
//           is evicted before that is not kept
//   read    begin_restore() takes free pages, which are held while the reader thread fills them;
//           apply_finished() publishes what arrived. A caller that cannot go on without it
//           helps: finish_restores()
//   use     a hit in the cache is a use in the store, too. The writer notifies the store now and
//           then, or it would drop the blocks that are used most
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

#include "vmserve/memory/driver_work.h"
#include "vmserve/page_store.h"
#include "vmserve/worker.h"

namespace vmserve {

// The store is notified of hits in the cache at most so often.
constexpr double kTouchSeconds = 60;

// Blocks of a prefix that are not in the cache.
struct MissingBlocks {
  std::vector<std::int64_t> indices;  // to be read; ascending
  bool is_coming = false;             // others are being read
};

// Functions without a comment on locks are called with the memory's lock held.
class Persistence : LedgerClient {
 public:
  Persistence(Ledger& ledger, DriverWork& work, std::deque<InFlightCopies>& copies_in_flight,
              std::shared_ptr<PageStore> store, double touch_seconds);
  ~Persistence();

  // Takes no lock. Called by the writer thread, without locks, when it has written a batch.
  void call_when_written(std::function<void()> call) { when_written_ = std::move(call); }
  // Copies pending blocks to free buffers. The writer writes them, and notifies the store of hits.
  void write_behind();
  // Lets the writer notify the store of hits now.
  void tell_hits();
  // Writes that are pending or under way.
  bool has_writes();
  // Without the memory's lock: executes on this thread what the writer has not begun, and waits.
  void wait_for_writer() { writer_.wait(writer_.last_id()); }

  // The block is cached, stored, or on its way.
  bool is_within_reach(const Digest& digest) const;
  // Looks up the sequence's blocks first .. end - 1, which are within reach. Cached ones are hits.
  MissingBlocks look_up(const Sequence& seq, std::int64_t first, std::int64_t end);
  // Pages that begin_restore() takes.
  std::int64_t pages_for(const std::vector<std::int64_t>& indices) const;
  // Holds idle pages with the sequence's blocks first .. end - 1, so that finding memory does not
  // evict them. Adds them to `held`; the caller releases them.
  void hold_cached(const Sequence& seq, std::int64_t first, std::int64_t end,
                   std::vector<PageId>& held);
  // Begins to read blocks of the sequence's prefix. Pre: pages_for(indices) pages are free.
  void begin_restore(const Sequence& seq, const std::vector<std::int64_t>& indices);
  bool is_restoring() const { return !restoring_.empty(); }
  void apply_finished();
  // Post: nothing is being read.
  void finish_restores();

  // Forgets what was computed and stored; returns the generation of digests from now on.
  std::uint64_t begin_generation();
  // Without the memory's lock. Stops the threads; blocks that are not written by now are lost.
  void stop();
  // Without the memory's lock, if mapper commands are executed by hand: executes jobs.
  std::int64_t run(std::int64_t max_jobs) { return reader_.run(max_jobs) + writer_.run(max_jobs); }

  PageStore& store() { return *store_; }
  std::int64_t num_waiting() const { return static_cast<std::int64_t>(pending_.size()); }

 private:
  using Clock = std::chrono::steady_clock;

  struct Read {
    Digest digest;
    BlockId block;
    bool done = false;
  };
  struct Restore {
    std::vector<Read> reads;
    std::vector<PageId> pages;  // held
    std::atomic<std::int64_t> left{0};
    Clock::time_point begun;
    std::atomic<std::int64_t> finished_ns{0};  // since `begun`
    double waited = 0;                         // seconds
  };
  struct Write {
    Digest digest;
    BlockId block;
    Address buffer;
  };
  // Buffers in host memory, each for one block of all groups.
  class Buffers {
   public:
    Buffers(std::size_t bytes, std::int64_t most) : bytes_(bytes), most_(most) {}
    // Returns 0 if all are taken, or waits if `waits`. Allocates from the driver, with its lock.
    Address take(DriverWork& work, bool waits);
    void give_back(Address buffer);
    void free(PageDriver& driver);
    bool all_free();

   private:
    std::size_t bytes_;
    std::int64_t most_;
    std::mutex mutex_;
    std::condition_variable freed_;
    std::vector<Address> all_, free_;
  };

  std::vector<CopyRun> runs(BlockId block, Address buffer, bool out) const;
  void write(const std::vector<Write>& batch, const std::optional<Mark>& mark,
             std::uint64_t generation);
  void read(Restore& restore, std::size_t first, std::size_t count);
  bool copy_in(const Read& read, Address buffer, std::optional<Mark>& mark);
  void wait_for_copy(const std::optional<Mark>& mark);
  void publish(Restore& restore);
  void zero_failed(Restore& restore);

  DriverWork& work_;
  std::deque<InFlightCopies>& copies_in_flight_;
  const std::shared_ptr<PageStore> store_;
  const std::size_t block_bytes_;  // of all groups
  const bool has_threads_;
  std::deque<Digest> pending_;  // published, and not written yet
  const Clock::duration touch_time_;
  std::unordered_set<Digest, DigestHash> hits_;  // since told_at_
  Clock::time_point told_at_ = Clock::now();
  std::deque<std::shared_ptr<Restore>> restoring_;
  std::unordered_set<Digest, DigestHash> coming_;
  Buffers write_buffers_, read_buffers_;
  std::function<void()> when_written_;
  Worker writer_, reader_;
};

}  // namespace vmserve
