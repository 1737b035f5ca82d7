// A PageStore in a directory: one file per block, named by its digest.
//
//   DIR/                        one limit of bytes for all below it
//     SPACE/                    blocks that are equal in all processes; see space()
//       DIGEST.kv               a header and the block's bytes
//       .RANDOM-COUNT.tmp       being written
//       NUMBER.generation       empty; the highest number counts
//
// The directory is the index: a lookup is a system call, and what another process wrote is found at
// once. A file appears complete, by a rename. Nothing is forced to the disk. If the machine stops,
// the checksums of header and content find what was lost, which is a miss. The files that were used
// least recently go first, by their times of change; a hit is a use.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "vmserve/page_store.h"

namespace vmserve {

// The system calls that change or read files. They return -1 and set errno for a refusal.
class FileOps {
 public:
  virtual ~FileOps() = default;
  virtual int open(const std::string& path, int flags);
  virtual int close(int fd);
  virtual ssize_t write(int fd, const iovec* parts, int count, off_t at);
  virtual ssize_t read(int fd, const iovec* parts, int count, off_t at);
  virtual int rename(const std::string& from, const std::string& to);
  virtual int unlink(const std::string& path);
};

// Simulates a process that is killed and a system that refuses, for tests.
class FaultFileOps : public FileOps {
 public:
  // Only the first `count` changes happen; each written byte is one. Later calls that change
  // something do nothing and fail.
  void kill_after(std::int64_t count) { left_ = count; }
  // Writes, and opening files for them, fail with this error number; 0: they succeed again.
  void refuse_writes(int error) { write_error_ = error; }
  void refuse_reads(int error) { read_error_ = error; }
  std::int64_t num_changes() const { return num_changes_; }

  int open(const std::string& path, int flags) override;
  ssize_t write(int fd, const iovec* parts, int count, off_t at) override;
  ssize_t read(int fd, const iovec* parts, int count, off_t at) override;
  int rename(const std::string& from, const std::string& to) override;
  int unlink(const std::string& path) override;

 private:
  // How many of `wanted` changes happen.
  std::int64_t take(std::int64_t wanted);

  std::atomic<std::int64_t> left_{INT64_MAX};
  std::atomic<std::int64_t> num_changes_{0};
  std::atomic<int> write_error_{0}, read_error_{0};
};

// The files of a directory, and their limit. Thread-safe; other processes may use the same
// directory.
class StoreDirectory : public std::enable_shared_from_this<StoreDirectory> {
 public:
  // Pre: the directory exists. `limit_bytes`: of the files of all spaces, headers included.
  StoreDirectory(std::string path, std::int64_t limit_bytes, std::shared_ptr<FileOps> ops);

  // The blocks of one space, in the subdirectory `name`, which exists. `id` is in every file: the
  // digest of all that decides the bytes of a block in addition to its tokens.
  std::shared_ptr<PageStore> space(const std::string& name, const Digest& id);

  std::int64_t bytes() const { return bytes_; }

 private:
  friend class FileStore;

  struct File {
    std::int64_t used_ns;
    std::int64_t bytes;
    std::string path;
  };

  std::vector<File> scan() const;
  void added(std::int64_t bytes);
  // Removes the oldest files until an eighth of the limit is free.
  void evict();

  const std::string path_;
  const std::int64_t limit_;
  const std::shared_ptr<FileOps> ops_;
  std::mutex mutex_;
  std::atomic<std::int64_t> bytes_{0};
  std::int64_t added_ = 0;  // since the last scan: other processes add files, too
  std::atomic<std::int64_t> evicted_{0};
};

enum class FileState { kWhole, kMissing, kBroken };

// Whether the file is as it was written; `why` if it is not. Only the form of a space's id is
// checked.
FileState verify_file(const std::string& path, std::string& why);

}  // namespace vmserve
