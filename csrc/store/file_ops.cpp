#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "vmserve/file_store.h"

namespace vmserve {

int FileOps::open(const std::string& path, int flags) {
  return ::open(path.c_str(), flags | O_CLOEXEC, 0600);
}

int FileOps::close(int fd) {
  return ::close(fd);
}

ssize_t FileOps::write(int fd, const iovec* parts, int count, off_t at) {
  return ::pwritev(fd, parts, count, at);
}

ssize_t FileOps::read(int fd, const iovec* parts, int count, off_t at) {
  return ::preadv(fd, parts, count, at);
}

int FileOps::rename(const std::string& from, const std::string& to) {
  return ::rename(from.c_str(), to.c_str());
}

int FileOps::unlink(const std::string& path) {
  return ::unlink(path.c_str());
}

// -- faults

namespace {

int refuse(int error) {
  errno = error;
  return -1;
}

}  // namespace

std::int64_t FaultFileOps::take(std::int64_t wanted) {
  const std::int64_t done = std::min(wanted, left_.load());
  left_ -= done;
  num_changes_ += done;
  return done;
}

int FaultFileOps::open(const std::string& path, int flags) {
  if ((flags & O_CREAT) == 0) return FileOps::open(path, flags);
  if (write_error_ != 0) return refuse(write_error_);
  return take(1) == 1 ? FileOps::open(path, flags) : refuse(EIO);
}

ssize_t FaultFileOps::write(int fd, const iovec* parts, int count, off_t at) {
  if (write_error_ != 0) return refuse(write_error_);
  ssize_t written = 0;
  for (int i = 0; i < count; ++i) {
    const auto wanted = static_cast<std::int64_t>(parts[i].iov_len);
    const std::int64_t allowed = take(wanted);
    const iovec part{parts[i].iov_base, static_cast<std::size_t>(allowed)};
    if (allowed > 0) {
      const ssize_t done = FileOps::write(fd, &part, 1, at + written);
      if (done < 0) return done;
      written += done;
    }
    if (allowed < wanted) return refuse(EIO);
  }
  return written;
}

ssize_t FaultFileOps::read(int fd, const iovec* parts, int count, off_t at) {
  return read_error_ != 0 ? refuse(read_error_) : FileOps::read(fd, parts, count, at);
}

int FaultFileOps::rename(const std::string& from, const std::string& to) {
  if (write_error_ != 0) return refuse(write_error_);
  return take(1) == 1 ? FileOps::rename(from, to) : refuse(EIO);
}

int FaultFileOps::unlink(const std::string& path) {
  return take(1) == 1 ? FileOps::unlink(path) : refuse(EIO);
}

}  // namespace vmserve
