#include "vmserve/file_store.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <climits>
#include <cstring>
#include <random>

#include "vmserve/checksum.h"
#include "vmserve/text.h"

namespace vmserve {
namespace {

constexpr char kMagic[8] = {'v', 'm', 's', 'e', 'r', 'v', 'e', '1'};
constexpr char kSuffix[] = ".kv";
constexpr char kTemporary[] = ".tmp";
constexpr char kGeneration[] = ".generation";
// After a refusal, writes are not tried for so long.
constexpr std::chrono::seconds kPause{10};
// An engine scans the directory, in which others write too, after it has written this part of the
// limit. With two engines the limit holds; each further one may exceed it by as much.
constexpr std::int64_t kLooks = 16;
// A temporary file of this age was left by a process that was killed.
constexpr std::int64_t kAbandonedSeconds = 300;

struct Header {
  char magic[8];
  std::uint64_t content_bytes;
  Digest space;
  Digest digest;
  Checksum content;
  Checksum header;  // checksum of all before it
};
static_assert(sizeof(Header) == 112, "the header has no padding");

Header make_header(const Digest& space, const Digest& digest, const void* from, std::size_t bytes) {
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.content_bytes = bytes;
  header.space = space;
  header.digest = digest;
  header.content = checksum(from, bytes);
  header.header = checksum(&header, offsetof(Header, header));
  return header;
}

std::string hex(const Digest& digest) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * digest.size());
  for (const std::uint8_t byte : digest) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::string random_name() {
  std::random_device random;
  return std::to_string(random()) + "-" + std::to_string(random());
}

bool ends_with(const std::string& text, const char* end) {
  const std::size_t size = std::strlen(end);
  return text.size() > size && text.compare(text.size() - size, size, end) == 0;
}

std::int64_t used_ns(const struct stat& file) {
  return file.st_mtim.tv_sec * std::int64_t{1'000'000'000} + file.st_mtim.tv_nsec;
}

std::vector<std::string> names_in(const std::string& path) {
  std::vector<std::string> names;
  DIR* directory = ::opendir(path.c_str());
  if (directory == nullptr) return names;
  while (const dirent* entry = ::readdir(directory)) names.emplace_back(entry->d_name);
  ::closedir(directory);
  return names;
}

// Opens without waiting, because a name may stand for something other than a file.
constexpr int kRead = O_RDONLY | O_NOFOLLOW | O_NONBLOCK;

bool is_file(int fd) {
  struct stat found{};
  return ::fstat(fd, &found) == 0 && S_ISREG(found.st_mode);
}

std::string error_text(int error) {
  return std::strerror(error);
}

}  // namespace

// -- the directory

StoreDirectory::StoreDirectory(std::string path, std::int64_t limit_bytes,
                               std::shared_ptr<FileOps> ops)
    : path_(std::move(path)), limit_(limit_bytes), ops_(std::move(ops)) {
  evict();
}

std::vector<StoreDirectory::File> StoreDirectory::scan() const {
  std::vector<File> files;
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  for (const std::string& space : names_in(path_)) {
    if (space[0] == '.') continue;
    const std::string directory = path_ + "/" + space;
    for (const std::string& name : names_in(directory)) {
      const bool is_temporary = ends_with(name, kTemporary);
      if (!is_temporary && !ends_with(name, kSuffix)) continue;
      const std::string path = directory + "/" + name;
      struct stat found{};
      if (::lstat(path.c_str(), &found) != 0 || !S_ISREG(found.st_mode)) continue;
      if (is_temporary && found.st_mtim.tv_sec + kAbandonedSeconds < now.tv_sec) {
        ops_->unlink(path);
        continue;
      }
      files.push_back({used_ns(found), is_temporary ? 0 : found.st_size, path});
    }
  }
  return files;
}

void StoreDirectory::added(std::int64_t bytes) {
  bool is_due = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    bytes_ += bytes;
    added_ += bytes;
    is_due = bytes_ > limit_ || added_ > limit_ / kLooks;
  }
  if (is_due) evict();
}

void StoreDirectory::evict() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<File> files = scan();
  std::int64_t total = 0;
  for (const File& file : files) total += file.bytes;
  added_ = 0;
  if (total > limit_) {
    std::sort(files.begin(), files.end(), [](const File& a, const File& b) {
      return a.used_ns != b.used_ns ? a.used_ns < b.used_ns : a.path < b.path;
    });
    const std::int64_t goal = limit_ - limit_ / 8;
    for (const File& file : files) {
      if (total <= goal) break;
      if (file.bytes == 0 || ops_->unlink(file.path) != 0) continue;
      total -= file.bytes;
      ++evicted_;
    }
  }
  bytes_ = total;
}

// -- a space

class FileStore : public PageStore {
 public:
  FileStore(std::shared_ptr<StoreDirectory> directory, std::string path, const Digest& id)
      : directory_(std::move(directory)),
        ops_(*directory_->ops_),
        path_(std::move(path)),
        id_(id),
        generation_(newest_generation()) {}

  bool has(const Digest& digest) noexcept override {
    struct stat found{};
    return ::lstat(path_of(digest).c_str(), &found) == 0 && S_ISREG(found.st_mode);
  }

  bool get(const Digest& digest, void* to, std::size_t bytes) noexcept override;
  bool put(const Digest& digest, const void* from, std::size_t bytes) noexcept override;

  void prefetch(const Digest& digest) noexcept override {
    const int fd = ops_.open(path_of(digest), kRead);
    if (fd < 0) return;
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_WILLNEED);
    ops_.close(fd);
  }

  void touch(const Digest& digest) noexcept override { set_time(path_of(digest)); }

  std::uint64_t generation() const noexcept override { return generation_; }
  std::uint64_t begin_generation() noexcept override;
  void remove_older() noexcept override;

  StoreStats stats() const override {
    StoreStats stats;
    stats.written_blocks = written_blocks_;
    stats.written_bytes = written_bytes_;
    stats.read_blocks = read_blocks_;
    stats.read_bytes = read_bytes_;
    stats.broken_blocks = broken_;
    stats.refused_writes = refused_;
    stats.evicted_blocks = directory_->evicted_;
    stats.bytes = directory_->bytes_;
    return stats;
  }

  std::string take_message() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (messages_.empty()) return "";
    std::string message = std::move(messages_.front());
    messages_.pop_front();
    return message;
  }

 private:
  std::string path_of(const Digest& digest) const { return path_ + "/" + hex(digest) + kSuffix; }

  std::string path_of(std::uint64_t generation) const {
    return path_ + "/" + std::to_string(generation) + kGeneration;
  }

  static bool set_time(const std::string& path) {
    return ::utimensat(AT_FDCWD, path.c_str(), nullptr, AT_SYMLINK_NOFOLLOW) == 0;
  }

  std::uint64_t newest_generation() const;

  // Reports each kind of trouble once.
  void tell(const std::string& kind, const std::string& message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (reported_.insert(kind).second) messages_.push_back(message);
  }

  bool refused(int error) {
    ++refused_;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      paused_until_ = Clock::now() + kPause;
    }
    tell("write " + std::to_string(error), "nothing more is kept for now, because writing to " +
                                               path_ + " failed (" + error_text(error) +
                                               "): free space there, or make it writable");
    return false;
  }

  bool broken(const std::string& path, const std::string& why) {
    ++broken_;
    ops_.unlink(path);
    tell("broken", path + " was dropped and is computed again: " + why);
    return false;
  }

  bool is_paused() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return Clock::now() < paused_until_;
  }

  using Clock = std::chrono::steady_clock;

  const std::shared_ptr<StoreDirectory> directory_;
  FileOps& ops_;
  const std::string path_;
  const Digest id_;
  // A process number is no unique name: a process may have several stores of a space, and
  // containers that share a directory may have equal numbers.
  const std::string writer_ = random_name();
  std::atomic<std::uint64_t> generation_;
  std::mutex mutex_;
  Clock::time_point paused_until_{};
  std::set<std::string> reported_;
  std::deque<std::string> messages_;
  std::atomic<std::int64_t> written_blocks_{0}, written_bytes_{0}, read_blocks_{0}, read_bytes_{0},
      broken_{0}, refused_{0}, num_temporary_{0};
};

namespace {

std::string fault_of(const Header& header, const void* content, ssize_t size) {
  const auto expected = static_cast<ssize_t>(sizeof(Header) + header.content_bytes);
  if (size < static_cast<ssize_t>(sizeof(Header))) return "it ends within its header";
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) return "it has another format";
  if (checksum(&header, offsetof(Header, header)) != header.header) {
    return "its header fails its checksum";
  }
  if (size != expected) {
    return "it has " + with_commas(size) + " bytes, not " + with_commas(expected);
  }
  if (checksum(content, header.content_bytes) != header.content) {
    return "its content fails its checksum";
  }
  return "";
}

}  // namespace

bool FileStore::get(const Digest& digest, void* to, std::size_t bytes) noexcept {
  try {
    const std::string path = path_of(digest);
    const int fd = ops_.open(path, kRead);
    if (fd < 0) {
      if (errno != ENOENT) tell("open", "cannot read " + path + " (" + error_text(errno) + ")");
      return false;
    }
    if (!is_file(fd)) {
      ops_.close(fd);
      tell("kind", path + " is not a file: nothing is kept under its name, remove it");
      return false;
    }
    Header header{};
    char beyond = 0;
    const iovec parts[] = {{&header, sizeof(header)}, {to, bytes}, {&beyond, 1}};
    const ssize_t size = ops_.read(fd, parts, 3, 0);
    const int error = errno;
    if (size == static_cast<ssize_t>(sizeof(header) + bytes)) ::futimens(fd, nullptr);
    ops_.close(fd);
    if (size < 0) {
      tell("read", "cannot read " + path + " (" + error_text(error) + ")");
      return false;
    }
    std::string fault;
    if (size >= static_cast<ssize_t>(sizeof(header)) && header.content_bytes != bytes &&
        checksum(&header, offsetof(Header, header)) == header.header) {
      fault = "it has blocks of another size";
    } else {
      fault = fault_of(header, to, size);
    }
    if (fault.empty() && (header.space != id_ || header.digest != digest)) {
      fault = "it belongs elsewhere";
    }
    if (!fault.empty()) return broken(path, fault);
    ++read_blocks_;
    read_bytes_ += size;
    return true;
  } catch (...) {  // no memory
    return false;
  }
}

bool FileStore::put(const Digest& digest, const void* from, std::size_t bytes) noexcept {
  try {
    if (is_paused()) {
      ++refused_;
      return false;
    }
    const std::string path = path_of(digest);
    if (set_time(path) || ::access(path.c_str(), F_OK) == 0) return true;
    const Header header = make_header(id_, digest, from, bytes);
    const std::string temporary =
        path_ + "/." + writer_ + "-" + std::to_string(++num_temporary_) + kTemporary;
    const int fd = ops_.open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW);
    if (fd < 0) return refused(errno);
    const auto total = static_cast<ssize_t>(sizeof(header) + bytes);
    ssize_t written = 0;
    while (written < total) {
      const auto in_content = std::max<ssize_t>(0, written - static_cast<ssize_t>(sizeof(header)));
      const auto in_header = std::min<ssize_t>(written, sizeof(header));
      const iovec parts[] = {{reinterpret_cast<char*>(const_cast<Header*>(&header)) + in_header,
                              sizeof(header) - static_cast<std::size_t>(in_header)},
                             {static_cast<char*>(const_cast<void*>(from)) + in_content,
                              bytes - static_cast<std::size_t>(in_content)}};
      const ssize_t more = ops_.write(fd, parts, 2, written);
      if (more <= 0) {
        const int error = more < 0 ? errno : ENOSPC;
        ops_.close(fd);
        ops_.unlink(temporary);
        return refused(error);
      }
      written += more;
    }
    // Some file systems refuse writes only here.
    if (ops_.close(fd) != 0 || ops_.rename(temporary, path) != 0) {
      const int error = errno;
      ops_.unlink(temporary);
      return refused(error);
    }
    ++written_blocks_;
    written_bytes_ += total;
    directory_->added(total);
    return true;
  } catch (...) {
    return false;
  }
}

namespace {

// The number of a file that marks a generation; 0 for another file.
std::uint64_t generation_of(const std::string& name) {
  if (!ends_with(name, kGeneration)) return 0;
  std::uint64_t number = 0;
  const char* const end = name.data() + name.size() - std::strlen(kGeneration);
  const auto [stop, error] = std::from_chars(name.data(), end, number);
  return error == std::errc() && stop == end ? number : 0;
}

}  // namespace

std::uint64_t FileStore::newest_generation() const {
  std::uint64_t newest = 0;
  for (const std::string& name : names_in(path_)) newest = std::max(newest, generation_of(name));
  return newest;
}

std::uint64_t FileStore::begin_generation() noexcept {
  try {
    const std::uint64_t newest = newest_generation();
    if (newest > generation_) return generation_ = newest;
    ++generation_;
    const int fd = ops_.open(path_of(generation_), O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK);
    if (fd >= 0) {
      ops_.close(fd);
    } else {
      tell("generation",
           "what was cleared will be found again after a restart, because writing to " + path_ +
               " failed (" + error_text(errno) + "): clear the directory");
    }
  } catch (...) {
    ++generation_;
  }
  return generation_;
}

void FileStore::remove_older() noexcept {
  try {
    struct stat begun{};
    if (::lstat(path_of(generation_).c_str(), &begun) != 0) return;
    for (const std::string& name : names_in(path_)) {
      const std::string path = path_ + "/" + name;
      const std::uint64_t generation = generation_of(name);
      struct stat found{};
      const bool is_older = generation != 0
                                ? generation < generation_
                                : ends_with(name, kSuffix) && ::lstat(path.c_str(), &found) == 0 &&
                                      used_ns(found) <= used_ns(begun);
      if (is_older) ops_.unlink(path);
    }
    directory_->evict();
  } catch (...) {  // what is left goes when it is the oldest
  }
}

std::shared_ptr<PageStore> StoreDirectory::space(const std::string& name, const Digest& id) {
  return std::make_shared<FileStore>(shared_from_this(), path_ + "/" + name, id);
}

FileState verify_file(const std::string& path, std::string& why) {
  FileOps ops;
  const int fd = ops.open(path, kRead);
  if (fd < 0) {
    why = error_text(errno);
    return FileState::kMissing;
  }
  if (!is_file(fd)) {
    ops.close(fd);
    why = "it is not a file";
    return FileState::kBroken;
  }
  struct stat found{};
  std::vector<char> content;
  if (::fstat(fd, &found) == 0) content.resize(static_cast<std::size_t>(found.st_size));
  Header header{};
  const std::size_t rest = content.size() - std::min(content.size(), sizeof(header));
  const iovec parts[] = {{&header, sizeof(header)}, {content.data(), rest}};
  const ssize_t size = ops.read(fd, parts, 2, 0);
  ops.close(fd);
  why = size < 0 ? error_text(errno) : fault_of(header, content.data(), size);
  if (why.empty() && !ends_with(path, (hex(header.digest) + kSuffix).c_str())) {
    why = "it has another block's name";
  }
  return why.empty() ? FileState::kWhole : FileState::kBroken;
}

}  // namespace vmserve
