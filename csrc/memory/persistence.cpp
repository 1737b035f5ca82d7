#include "vmserve/memory/persistence.h"

#include <algorithm>
#include <thread>

#include "vmserve/errors.h"

namespace vmserve {
namespace {

// Bytes of blocks on their way to the store, and least number of them.
constexpr std::size_t kWriteBytes = std::size_t{16} << 20;
constexpr std::int64_t kLeastBuffers = 2;
constexpr std::int64_t kMostBuffers = 256;
// Published blocks that are remembered until they are written.
constexpr std::size_t kMostPending = std::size_t{1} << 20;
// A reader has one buffer to fill while the other is copied; two threads read.
constexpr std::int64_t kReadBuffers = 4;
// Blocks of a job: their files are asked for while the blocks before are read.
constexpr std::size_t kBlocksPerJob = 8;
constexpr int kPolls = 200;
constexpr std::chrono::microseconds kPollTime{50};

WorkerMode mode_of(MapperMode mapper, WorkerMode threaded) {
  if (mapper == MapperMode::kThread) return threaded;
  return mapper == MapperMode::kManual ? WorkerMode::kManual : WorkerMode::kInline;
}

std::int64_t num_buffers(std::size_t block_bytes) {
  return std::clamp(static_cast<std::int64_t>(kWriteBytes / block_bytes), kLeastBuffers,
                    kMostBuffers);
}

}  // namespace

// -- buffers

Address Persistence::Buffers::take(DriverWork& work, bool waits) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (free_.empty()) {
    if (static_cast<std::int64_t>(all_.size()) < most_) {
      all_.reserve(all_.size() + 1);
      free_.reserve(all_.capacity());
      const auto driving = work.lock();
      all_.push_back(work.driver->alloc_host(bytes_));
      return all_.back();
    }
    if (!waits) return 0;
    freed_.wait(lock);
  }
  const Address buffer = free_.back();
  free_.pop_back();
  return buffer;
}

void Persistence::Buffers::give_back(Address buffer) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(buffer);
  }
  freed_.notify_one();
}

void Persistence::Buffers::free(PageDriver& driver) {
  for (const Address buffer : all_) driver.free_host(buffer);
  all_.clear();
  free_.clear();
}

bool Persistence::Buffers::all_free() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return free_.size() == all_.size();
}

// --

Persistence::Persistence(Ledger& ledger, DriverWork& work,
                         std::deque<InFlightCopies>& copies_in_flight,
                         std::shared_ptr<PageStore> store, double touch_seconds)
    : LedgerClient(ledger),
      work_(work),
      copies_in_flight_(copies_in_flight),
      store_(std::move(store)),
      block_bytes_(static_cast<std::size_t>(config_.num_groups * config_.block_bytes())),
      has_threads_(config_.mapper == MapperMode::kThread),
      touch_time_(std::chrono::duration_cast<Clock::duration>(
          std::chrono::duration<double>(touch_seconds))),
      write_buffers_(block_bytes_, num_buffers(block_bytes_)),
      read_buffers_(block_bytes_, kReadBuffers),
      writer_(mode_of(config_.mapper, WorkerMode::kIdleThread)),
      reader_(mode_of(config_.mapper, WorkerMode::kThread)) {
  ledger_.logs_published = true;
}

Persistence::~Persistence() {
  stop();
  try {
    const auto driving = work_.lock();
    work_.driver->fence();
    write_buffers_.free(*work_.driver);
    read_buffers_.free(*work_.driver);
  } catch (const Error&) {
    // The device is lost: its memory goes with the process.
  }
}

void Persistence::stop() {
  writer_.stop();
  reader_.stop();
}

std::uint64_t Persistence::begin_generation() {
  finish_restores();
  ledger_.just_published.clear();
  pending_.clear();
  hits_.clear();
  const std::uint64_t generation = store_->begin_generation();
  // Runs after the writer's jobs of the generation before.
  writer_.submit([this] { store_->remove_older(); });
  return generation;
}

std::vector<CopyRun> Persistence::runs(BlockId block, Address buffer, bool out) const {
  const auto bytes = static_cast<std::size_t>(config_.block_bytes());
  std::vector<CopyRun> runs;
  runs.reserve(static_cast<std::size_t>(config_.num_groups));
  for (std::int32_t group = 0; group < config_.num_groups; ++group) {
    const Address page = work_.space->arena(group) + static_cast<std::size_t>(block) * bytes;
    const Address host = buffer + static_cast<std::size_t>(group) * bytes;
    runs.push_back(out ? CopyRun{host, page, bytes} : CopyRun{page, host, bytes});
  }
  return runs;
}

// Without a lock. Polls, because a fence waits for kernels, too.
void Persistence::wait_for_copy(const std::optional<Mark>& mark) {
  if (!mark) return;
  try {
    for (int i = 0; i < kPolls; ++i) {
      {
        const auto driving = work_.lock();
        if (work_.driver->copy_reached(*mark)) return;
      }
      std::this_thread::sleep_for(kPollTime);
    }
    const auto driving = work_.lock();
    work_.driver->fence();
  } catch (const Error&) {
    // The memory's next driver call reports it.
  }
}

// -- writing

void Persistence::write_behind() {
  if (!hits_.empty() && Clock::now() - told_at_ > touch_time_) tell_hits();
  pending_.insert(pending_.end(), ledger_.just_published.begin(), ledger_.just_published.end());
  ledger_.just_published.clear();
  while (pending_.size() > kMostPending) {
    pending_.pop_front();
    ++ledger_.totals.persist_missed_blocks;
  }
  if (pending_.empty() || !work_.failure.empty()) return;
  std::vector<Write> batch;
  std::vector<CopyRun> copies;
  std::optional<Mark> mark;
  try {
    while (!pending_.empty()) {
      const BlockId block = pool_.find(pending_.front());
      if (block == kNoBlock) {
        ++ledger_.totals.persist_missed_blocks;
        pending_.pop_front();
        continue;
      }
      const Address buffer = write_buffers_.take(work_, /*waits=*/false);
      if (buffer == 0) break;
      batch.push_back({pending_.front(), block, buffer});
      pending_.pop_front();
      const std::vector<CopyRun> own = runs(block, buffer, /*out=*/true);
      copies.insert(copies.end(), own.begin(), own.end());
    }
    if (batch.empty()) return;
    const auto driving = work_.lock();
    work_.driver->copy_out(copies);
    if (work_.has_copy_stream) mark = work_.driver->copy_mark();
  } catch (const Error& error) {
    // NOTE: copies that were requested before may still write to the buffers. Later copies run
    // after them, so the store gets what arrived last: only the blocks of this batch are lost.
    work_.last_error = error.what();
    work_.fail_if_sticky(error);
    for (const Write& write : batch) write_buffers_.give_back(write.buffer);
    ledger_.totals.persist_missed_blocks += static_cast<std::int64_t>(batch.size());
    return;
  }
  if (mark) {  // nothing may write the blocks until they are copied
    InFlightCopies copying{*mark, {}};
    for (const Write& write : batch) {
      copying.blocks.push_back(write.block);
      pool_.begin_copy(write.block);
    }
    copies_in_flight_.push_back(std::move(copying));
    ++books_.version;
  }
  writer_.submit([this, batch = std::move(batch), mark, generation = store_->generation()] {
    write(batch, mark, generation);
  });
}

void Persistence::tell_hits() {
  told_at_ = Clock::now();
  if (hits_.empty()) return;
  writer_.submit([this, hits = std::move(hits_)] {
    for (const Digest& digest : hits) store_->touch(digest);
  });
  hits_.clear();
}

void Persistence::write(const std::vector<Write>& batch, const std::optional<Mark>& mark,
                        std::uint64_t generation) {
  wait_for_copy(mark);
  for (const Write& write : batch) {
    if (generation == store_->generation()) {
      store_->put(write.digest, reinterpret_cast<const void*>(write.buffer), block_bytes_);
    }
    write_buffers_.give_back(write.buffer);
  }
  if (has_threads_ && when_written_) when_written_();
}

bool Persistence::has_writes() {
  return !pending_.empty() || !ledger_.just_published.empty() || !write_buffers_.all_free();
}

// -- reading

bool Persistence::is_within_reach(const Digest& digest) const {
  return pool_.find(digest) != kNoBlock || coming_.count(digest) > 0 || store_->has(digest);
}

MissingBlocks Persistence::look_up(const Sequence& seq, std::int64_t first, std::int64_t end) {
  MissingBlocks missing;
  for (std::int64_t i = first; i < end; ++i) {
    if (pool_.find(seq.digests[i]) != kNoBlock) {
      if (hits_.size() < kMostPending) hits_.insert(seq.digests[i]);
    } else if (coming_.count(seq.digests[i]) > 0) {
      missing.is_coming = true;
    } else {
      missing.indices.push_back(i);
    }
  }
  return missing;
}

std::int64_t Persistence::pages_for(const std::vector<std::int64_t>& indices) const {
  std::int64_t pages = 0, last = -1;
  for (const std::int64_t index : indices) {
    pages += index / config_.blocks_per_page != last ? 1 : 0;
    last = index / config_.blocks_per_page;
  }
  return pages;
}

void Persistence::hold_cached(const Sequence& seq, std::int64_t first, std::int64_t end,
                              std::vector<PageId>& held) {
  end = std::min(end, static_cast<std::int64_t>(seq.digests.size()));
  for (std::int64_t i = first; i < end; ++i) {
    const BlockId block = pool_.find(seq.digests[i]);
    if (block == kNoBlock || pool_.state(pool_.page_of(block)) != PageState::kIdle) continue;
    held.push_back(pool_.page_of(block));
    pool_.hold(held.back());
  }
}

// A block gets the place in its page that it has in its sequence's, so that a slot can show the
// page.
void Persistence::begin_restore(const Sequence& seq, const std::vector<std::int64_t>& indices) {
  auto restore = std::make_shared<Restore>();
  const std::int64_t width = config_.blocks_per_page;
  std::vector<AddressRun> zeros;
  PageId page = kNoPage;
  std::int64_t last = -1;
  for (const std::int64_t index : indices) {
    if (index / width != last) {
      page = pool_.take_page(page, /*grows=*/true);
      last = index / width;
      restore->pages.push_back(page);
      const bool is_filled = std::count_if(indices.begin(), indices.end(), [&](std::int64_t other) {
                               return other / width == last;
                             }) == width;
      for (std::int32_t group = 0; group < config_.num_groups; ++group) {
        if (is_filled || !pool_.needs_zero(page, seq.tenant)) break;
        zeros.push_back({work_.space->arena(group, page), work_.space->page_bytes()});
      }
      pool_.mark_written(page, seq.tenant);
    }
    const auto block = static_cast<BlockId>(pool_.first_block(page) + index % width);
    restore->reads.push_back({seq.digests[index], block});
    coming_.insert(seq.digests[index]);
  }
  restore->left = static_cast<std::int64_t>(restore->reads.size());
  restore->begun = Clock::now();
  try {
    const auto driving = work_.lock();
    if (!zeros.empty()) work_.driver->zero(zeros);
  } catch (const Error&) {
    // Nothing is read: the pages go back as they were, and the blocks can be asked for again.
    for (const Read& read : restore->reads) coming_.erase(read.digest);
    for (const PageId held : restore->pages) {
      pool_.mark_written(held, kNobody);
      pool_.unhold(held);
    }
    throw;
  }
  restoring_.push_back(restore);
  for (std::size_t first = 0; first < restore->reads.size(); first += kBlocksPerJob) {
    const std::size_t count = std::min(kBlocksPerJob, restore->reads.size() - first);
    reader_.submit([this, restore, first, count] { read(*restore, first, count); });
  }
}

void Persistence::read(Restore& restore, std::size_t first, std::size_t count) {
  const std::size_t next = std::min(restore.reads.size(), first + 2 * count);
  for (std::size_t i = first + count; i < next; ++i) store_->prefetch(restore.reads[i].digest);
  Address buffers[2] = {};
  std::optional<Mark> marks[2];
  try {
    for (std::size_t i = 0; i < count; ++i) {
      Address& buffer = buffers[i % 2];
      if (buffer == 0) buffer = read_buffers_.take(work_, /*waits=*/true);
      wait_for_copy(marks[i % 2]);
      Read& read = restore.reads[first + i];
      read.done = store_->get(read.digest, reinterpret_cast<void*>(buffer), block_bytes_) &&
                  copy_in(read, buffer, marks[i % 2]);
    }
  } catch (...) {
    // No host memory for a buffer: what is not done is a miss.
  }
  for (std::size_t i = 0; i < 2; ++i) {
    wait_for_copy(marks[i]);
    if (buffers[i] != 0) read_buffers_.give_back(buffers[i]);
  }
  const auto time = Clock::now() - restore.begun;
  restore.finished_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
  restore.left -= static_cast<std::int64_t>(count);
}

bool Persistence::copy_in(const Read& read, Address buffer, std::optional<Mark>& mark) {
  const std::vector<CopyRun> copies = runs(read.block, buffer, /*out=*/false);
  try {
    const auto driving = work_.lock();
    work_.driver->copy_in(copies);
    if (work_.has_copy_stream) mark = work_.driver->copy_mark();
    return true;
  } catch (const Error&) {
    return false;
  }
}

void Persistence::apply_finished() {
  while (!restoring_.empty() && restoring_.front()->left == 0) {
    const std::shared_ptr<Restore> restore = std::move(restoring_.front());
    restoring_.pop_front();
    publish(*restore);
  }
}

void Persistence::publish(Restore& restore) {
  zero_failed(restore);
  for (const Read& read : restore.reads) {
    coming_.erase(read.digest);
    // A step may have computed the same block meanwhile.
    if (read.done && work_.failure.empty() && pool_.publish(read.block, read.digest)) {
      ++ledger_.totals.persist_restored_blocks;
    }
  }
  // Tail first, so that the tail of a prefix is evicted first.
  for (auto page = restore.pages.rbegin(); page != restore.pages.rend(); ++page)
    pool_.unhold(*page);
  const double seconds = static_cast<double>(restore.finished_ns.load()) * 1e-9;
  ledger_.totals.persist_hidden_seconds += std::max(0.0, seconds - restore.waited);
}

// A block that was not read may show another tenant's data.
void Persistence::zero_failed(Restore& restore) {
  if (pool_.zero_policy() == ZeroPolicy::kNever) return;
  const auto bytes = static_cast<std::size_t>(config_.block_bytes());
  std::vector<AddressRun> zeros;
  for (const Read& read : restore.reads) {
    for (std::int32_t group = 0; !read.done && group < config_.num_groups; ++group) {
      const auto offset = static_cast<std::size_t>(read.block) * bytes;
      zeros.push_back({work_.space->arena(group) + offset, bytes});
    }
  }
  if (zeros.empty()) return;
  try {
    const auto driving = work_.lock();
    work_.driver->zero(zeros);
  } catch (const Error& error) {
    work_.last_error = error.what();
    work_.fail_if_sticky(error);
    for (Read& read : restore.reads) read.done = false;
    for (const PageId page : restore.pages) pool_.mark_written(page, kNobody);
  }
}

void Persistence::finish_restores() {
  if (restoring_.empty()) return;
  const auto start = Clock::now();
  reader_.wait(reader_.last_id());
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  for (const auto& restore : restoring_) restore->waited += seconds;
  ledger_.totals.persist_wait_seconds += seconds;
  apply_finished();
}

}  // namespace vmserve
