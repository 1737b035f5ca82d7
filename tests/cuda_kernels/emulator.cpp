// Runs the kernels of one variant on the CPU: csrc/cuda/kernels.cu over emulated_ptx.h.
// Blocks run one after the other; the threads of a block are fibers of one OS thread.
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <deque>
#include <string>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include "kernels.cu"

namespace emu {
namespace {

constexpr std::size_t kStackBytes = 64 << 10;
constexpr std::size_t kGuardBytes = 4096;  // behind shared memory, to be found untouched

#if defined(__x86_64__)
// ucontext's switch makes a system call each time; this one saves what a call must preserve.
struct Context {
  void* stack_pointer = nullptr;
};
extern "C" void emu_switch(void** from, void* to);
asm(R"(
.text
.type emu_switch, @function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
void prepare(Context& context, char* stack, void (*entry)()) {
  auto* top = reinterpret_cast<void**>(stack + kStackBytes);
  *--top = nullptr;  // as after a call, the stack is 8 off 16 bytes
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context.stack_pointer = top;
}
void switch_context(Context& from, Context& to) {
  emu_switch(&from.stack_pointer, to.stack_pointer);
}
#else
struct Context {
  ucontext_t saved;
};
void prepare(Context& context, char* stack, void (*entry)()) {
  getcontext(&context.saved);
  context.saved.uc_stack.ss_sp = stack;
  context.saved.uc_stack.ss_size = kStackBytes;
  context.saved.uc_link = nullptr;
  makecontext(&context.saved, entry, 0);
}
void switch_context(Context& from, Context& to) {
  swapcontext(&from.saved, &to.saved);
}
#endif

struct Meeting {
  int arrived = 0;
  unsigned generation = 0;
  Op op = Op::kNone;
  void* lanes[kWarp] = {};
};

struct Copy {
  void* to;
  const void* from;
  std::size_t bytes;
  bool valid;
};

struct Thread {
  Context context;
  bool done = false;
  const Meeting* waits_for = nullptr;
  unsigned generation = 0;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> commits;
};

struct Range {
  std::uintptr_t begin, end;
  bool writable;
};

// How often a thread's warp, and the block, had met at a sync when something happened.
struct Moment {
  unsigned warp = 0, block = 0;
};
constexpr int kNobody = -1, kSeveral = -2;

// Who touched four bytes of shared memory last: by an asynchronous copy, and as rows of matrices.
struct Access {
  int writer = kNobody;        // a thread
  int reading_warp = kNobody;  // kSeveral: more than one since the block met
  Moment written, read;
};

// How threads take turns, and when copies are done.
enum Order { kForward, kBackward, kRandom };

struct Machine {
  std::vector<Range> ranges;
  std::size_t last_range = 0;
  std::vector<Thread> threads;
  std::vector<Meeting> warps;
  std::vector<unsigned> warp_syncs;
  unsigned block_syncs = 0;
  std::vector<Access> accesses;
  Meeting block_meeting;
  char* stacks = nullptr;
  std::size_t num_stacks = 0;
  std::vector<char> shared;
  char* shared_base = nullptr;
  std::size_t shared_bytes = 0;
  Context main;
  int current = 0, block = 0, num_blocks = 0;
  Order order = kForward;
  std::uint32_t random = 1;
  bool eager = false;
  void (*kernel)(const void*) = nullptr;
  const void* args = nullptr;
  std::string error;
};
Machine m;

bool ready(const Thread& thread) {
  return !thread.done &&
         (thread.waits_for == nullptr || thread.waits_for->generation != thread.generation);
}

// The next thread to run, or -1: after the current one, before it, or anywhere.
int next_ready() {
  const int count = static_cast<int>(m.threads.size());
  int at = m.current;
  if (m.order == kRandom) {
    m.random ^= m.random << 13;
    m.random ^= m.random >> 17;
    m.random ^= m.random << 5;
    at = static_cast<int>(m.random % static_cast<unsigned>(count));
  }
  for (int i = 0; i < count; ++i) {
    at += m.order == kBackward ? count - 1 : 1;
    if (at >= count) at -= count;
    if (ready(m.threads[static_cast<std::size_t>(at)])) return at;
  }
  return -1;
}

Thread& current() {
  return m.threads[static_cast<std::size_t>(m.current)];
}

const char* name_of(Op op) {
  switch (op) {
    case Op::kNone:
      return "nothing";
    case Op::kBlock:
      return "sync_block";
    case Op::kWarp:
      return "sync_warp";
    case Op::kShuffle:
      return "shuffle_xor";
    case Op::kMatrices:
      return "load_matrices";
    case Op::kTransposed:
      return "load_matrices_transposed";
    case Op::kMultiply:
      return "multiply_add";
  }
  return "?";
}

// Runs other threads until this one may go on; a thread that is done does not come back.
void yield() {
  Thread& from = current();
  const int next = next_ready();
  if (next < 0) {
    const bool all_done =
        std::all_of(m.threads.begin(), m.threads.end(), [](const Thread& t) { return t.done; });
    if (!all_done) fail("deadlock: every thread that is not done waits for others");
    switch_context(from.context, m.main);
  }
  if (next == m.current) return;
  m.current = next;
  switch_context(from.context, m.threads[static_cast<std::size_t>(next)].context);
}

void run_thread() {
  m.kernel(m.args);
  current().done = true;
  yield();
}

Moment now(int warp) {
  return {m.warp_syncs[static_cast<std::size_t>(warp)], m.block_syncs};
}

// Whether the block, or if `same_warp` the warp, has met at a sync since.
bool met_since(const Moment& then, int warp, bool same_warp) {
  const Moment at = now(warp);
  return at.block != then.block || (same_warp && at.warp != then.warp);
}

// Those of the words from `address` on.
Access* accesses_of(const void* address) {
  return &m.accesses[static_cast<std::size_t>(static_cast<const char*>(address) - m.shared_base) /
                     4];
}

void check_shared(const void* address, std::size_t bytes) {
  const char* const at = static_cast<const char*>(address);
  if (at < m.shared_base || at + bytes > m.shared_base + m.shared_bytes) {
    fail("shared memory at %td of %zu bytes", at - m.shared_base, m.shared_bytes);
  }
  if (reinterpret_cast<std::uintptr_t>(at) % bytes != 0) fail("shared memory is not aligned");
}

void arrive(Meeting& meeting, Op op, int expected, void* mine, int slot, void (*work)(void**)) {
  if (meeting.arrived == 0) meeting.op = op;
  if (meeting.op != op) {
    fail("thread %d meets its warp at %s, another is at %s", m.current, name_of(op),
         name_of(meeting.op));
  }
  if (slot >= 0) meeting.lanes[slot] = mine;
  if (++meeting.arrived == expected) {
    meeting.arrived = 0;
    if (work != nullptr) work(meeting.lanes);
    if (op == Op::kWarp) ++m.warp_syncs[static_cast<std::size_t>(m.current / kWarp)];
    if (op == Op::kBlock) ++m.block_syncs;
    ++meeting.generation;
    return;
  }
  Thread& self = current();
  self.waits_for = &meeting;
  self.generation = meeting.generation;
  yield();
  self.waits_for = nullptr;
}

void perform(const std::vector<Copy>& copies) {
  for (const Copy& copy : copies) {
    Access* const access = accesses_of(copy.to);
    for (std::size_t word = 0; word < copy.bytes / 4; ++word) {
      access[word].writer = m.current;
      access[word].written = now(m.current / kWarp);
    }
    if (copy.valid) {
      std::memcpy(copy.to, copy.from, copy.bytes);
    } else {
      std::memset(copy.to, 0, copy.bytes);
    }
  }
}

void run_block(int threads) {
  std::fill(m.shared.begin(), m.shared.end(), static_cast<char>(0xff));
  for (Meeting& warp : m.warps) warp = Meeting{};
  m.block_meeting = Meeting{};
  m.accesses.assign(m.shared_bytes / 4, Access{});
  for (int i = 0; i < threads; ++i) {
    Thread& thread = m.threads[static_cast<std::size_t>(i)];
    thread.done = false;
    thread.waits_for = nullptr;
    thread.open.clear();
    thread.commits.clear();
    prepare(thread.context, m.stacks + static_cast<std::size_t>(i) * kStackBytes, run_thread);
  }
  m.current = m.order == kBackward ? threads - 1 : 0;
  switch_context(m.main, current().context);
  const char* const end = m.shared_base + m.shared_bytes;
  if (m.error.empty() &&
      !std::all_of(end, end + kGuardBytes, [](char c) { return c == static_cast<char>(0xff); })) {
    m.error = "shared memory was written behind its end";
  }
}

template <class Args>
using Kernel = void (*)(const Args);

template <class Args, Kernel<Args> kKernel>
void call(const void* args) {
  kKernel(*static_cast<const Args*>(args));
}

struct Entry {
  const char* name;
  void (*call)(const void*);
  int threads;
  std::size_t arg_bytes, shared_bytes;
};
const Entry kEntries[] = {
    {"vms_decode", call<AttendArgs, vms_decode>, 32 * kDecodeWarps, sizeof(AttendArgs),
     DecodeMemory<VMS_KV, VMS_HEAD_DIM, VMS_STAGES>::kBytes},
    {"vms_append", call<AttendArgs, vms_append>, 32 * kAppendWarps, sizeof(AttendArgs),
     AppendMemory<VMS_KV, VMS_HEAD_DIM>::kBytes},
    {"vms_combine", call<CombineArgs, vms_combine>, 32 * kCombineWarps, sizeof(CombineArgs), 0},
    {"vms_write", call<WriteArgs, vms_write>, kWriteThreads, sizeof(WriteArgs), 0},
    {"vms_norm", call<NormArgs, vms_norm>, kNormThreads, sizeof(NormArgs),
     kNormThreads / 32 * sizeof(float)},
    {"vms_gate", call<GateArgs, vms_gate>, kGateThreads, sizeof(GateArgs), 0},
    {"vms_copy", call<MoveArgs, vms_copy>, kMoveThreads, sizeof(MoveArgs), 0},
    {"vms_zero", call<MoveArgs, vms_zero>, kMoveThreads, sizeof(MoveArgs), 0},
};

void make_room(int threads, std::size_t shared_bytes) {
  m.threads.resize(static_cast<std::size_t>(threads));
  m.warps.resize(static_cast<std::size_t>(threads) / kWarp);
  m.warp_syncs.resize(m.warps.size());
  if (m.num_stacks < static_cast<std::size_t>(threads)) {
    if (m.stacks != nullptr) munmap(m.stacks, m.num_stacks * kStackBytes);
    m.num_stacks = static_cast<std::size_t>(threads);
    void* const stacks = mmap(nullptr, m.num_stacks * kStackBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stacks == MAP_FAILED) std::abort();
    m.stacks = static_cast<char*>(stacks);
  }
  m.shared.resize(shared_bytes + kGuardBytes + 128);
  const auto address = reinterpret_cast<std::uintptr_t>(m.shared.data());
  m.shared_base = m.shared.data() + (128 - address % 128) % 128;
  m.shared_bytes = shared_bytes;
}

}  // namespace

void fail(const char* format, ...) {
  char text[512];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  m.error =
      "block " + std::to_string(m.block) + ", thread " + std::to_string(m.current) + ": " + text;
  Context abandoned;
  switch_context(abandoned, m.main);
  std::abort();
}

int thread_index() {
  return m.current;
}
int block_index() {
  return m.block;
}
int grid_blocks() {
  return m.num_blocks;
}
char* shared_memory() {
  return m.shared_base;
}

void check_global(const void* address, std::size_t bytes, bool write) {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  if (begin % bytes != 0) fail("%zu bytes at %p are not aligned", bytes, address);
  const auto inside = [&](const Range& range) {
    return begin >= range.begin && begin + bytes <= range.end && (range.writable || !write);
  };
  if (m.last_range < m.ranges.size() && inside(m.ranges[m.last_range])) return;
  auto after =
      std::upper_bound(m.ranges.begin(), m.ranges.end(), begin,
                       [](std::uintptr_t at, const Range& range) { return at < range.begin; });
  if (after == m.ranges.begin() || !inside(*--after)) {
    fail("%s of %zu bytes at %p, which is not allowed", write ? "write" : "read", bytes, address);
  }
  m.last_range = static_cast<std::size_t>(after - m.ranges.begin());
}

namespace {
void check_read(const void* address, std::size_t bytes, int lane) {
  check_shared(address, bytes);
  const int warp = m.current / kWarp;
  for (std::size_t word = 0; word < bytes / 4; ++word) {
    Access& access = accesses_of(address)[word];
    const int writer = access.writer;
    if (writer != kNobody && writer != warp * kWarp + lane &&
        !met_since(access.written, warp, writer / kWarp == warp)) {
      fail("thread %d reads what thread %d copied, and they have not met since",
           warp * kWarp + lane, writer);
    }
    const bool others = access.reading_warp != kNobody && access.reading_warp != warp &&
                        access.read.block == m.block_syncs;
    access.reading_warp = others ? kSeveral : warp;
    access.read = now(warp);
  }
}
}  // namespace

void check_row(const void* address, int lane) {
  check_read(address, 16, lane);
}

void check_copied(const void* address, std::size_t bytes) {
  check_read(address, bytes, m.current % kWarp);
}

void meet_block() {
  arrive(m.block_meeting, Op::kBlock, static_cast<int>(m.threads.size()), nullptr, -1, nullptr);
}

void meet_warp(Op op, void* mine, void (*work)(void**)) {
  arrive(m.warps[static_cast<std::size_t>(m.current / kWarp)], op, kWarp, mine, m.current % kWarp,
         work);
}

void copy_async(void* to, const void* from, std::size_t bytes, bool valid) {
  check_shared(to, bytes);
  check_global(from, bytes, false);
  const int warp = m.current / kWarp;
  for (std::size_t word = 0; word < bytes / 4; ++word) {
    const Access& access = accesses_of(to)[word];
    if (access.reading_warp != kNobody &&
        !met_since(access.read, warp, access.reading_warp == warp)) {
      fail("a copy to where a warp reads, and they have not met since");
    }
  }
  const Copy copy = {to, from, bytes, valid};
  if (m.eager) {
    perform({copy});
  } else {
    std::memset(to, 0xff, bytes);  // undefined until the wait
    current().open.push_back(copy);
  }
}

void copy_commit() {
  current().commits.push_back(std::move(current().open));
  current().open.clear();
}

void copy_wait(int pending) {
  auto& commits = current().commits;
  while (commits.size() > static_cast<std::size_t>(pending)) {
    perform(commits.front());
    commits.pop_front();
  }
}

}  // namespace emu

// Allows global memory: count ranges of {first byte, bytes, writable}, which do not overlap.
extern "C" void emu_allow(const std::int64_t* ranges, std::int64_t count) {
  auto& to = emu::m.ranges;
  to.clear();
  for (std::int64_t i = 0; i < count; ++i) {
    const auto begin = static_cast<std::uintptr_t>(ranges[3 * i]);
    to.push_back(
        {begin, begin + static_cast<std::uintptr_t>(ranges[3 * i + 1]), ranges[3 * i + 2] != 0});
  }
  std::sort(to.begin(), to.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  std::size_t kept = 0;
  for (std::size_t i = 1; i < to.size(); ++i) {
    if (to[i].begin == to[kept].end && to[i].writable == to[kept].writable) {
      to[kept].end = to[i].end;
    } else {
      to[++kept] = to[i];
    }
  }
  if (!to.empty()) to.resize(kept + 1);
  emu::m.last_range = 0;
}

// Runs a kernel; returns null, or what went wrong (valid until the next call).
extern "C" const char* emu_launch(const char* name, std::int64_t blocks, std::int64_t threads,
                                  std::int64_t shared_bytes, const void* args,
                                  std::int64_t arg_bytes, int order, std::uint32_t seed,
                                  int eager) {
  using emu::m;
  m.error.clear();
  for (const auto& entry : emu::kEntries) {
    if (std::strcmp(entry.name, name) != 0) continue;
    if (entry.threads != threads || static_cast<std::int64_t>(entry.arg_bytes) != arg_bytes ||
        static_cast<std::int64_t>(entry.shared_bytes) > shared_bytes) {
      m.error = "launched with other threads, arguments or shared memory than the kernel has";
      return m.error.c_str();
    }
    emu::make_room(static_cast<int>(threads), static_cast<std::size_t>(shared_bytes));
    m.num_blocks = static_cast<int>(blocks);
    m.order = static_cast<emu::Order>(order);
    m.random = seed * 2654435761U + 1;
    m.eager = eager != 0;
    m.kernel = entry.call;
    m.args = args;
    for (m.block = 0; m.block < m.num_blocks && m.error.empty(); ++m.block) {
      emu::run_block(static_cast<int>(threads));
    }
    return m.error.empty() ? nullptr : m.error.c_str();
  }
  m.error = "no such kernel";
  return m.error.c_str();
}

// The code nearest to a float, as the write has it.
extern "C" std::uint32_t emu_code(float x) {
  return code_of(x);
}
// Bits of the two elements of type VMS_TYPE that a code's byte, four times, becomes.
extern "C" std::uint32_t emu_widen_code(std::uint32_t code) {
  std::uint32_t even = 0, odd = 0;
  widen_codes<VMS_TYPE>(code * 0x01010101U, even, odd);
  return even == odd ? even : 0xffffffffU;
}
