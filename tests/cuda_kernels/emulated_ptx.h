// The functions of csrc/cuda/ptx.h for a CPU, with the semantics of the PTX ISA: every CUDA
// thread is a fiber, warps and blocks meet as they do on the device, and what a device would do
// silently wrong ends the launch with an error:
// - global memory outside the ranges that the test allowed, or not aligned to the access;
// - a warp whose threads meet at different instructions, or never (a deadlock);
// - what an asynchronous copy brought is read by other threads without a sync_warp or sync_block
//   after the wait of the thread that started it, or a copy is started to where others may still
//   read (that a warp meets at another instruction orders nothing);
// - asynchronous copies are done as late as the wait allows (or at once, as a test chooses); until
//   then, and wherever shared memory was never written, there is NaN.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emu {

constexpr int kWarp = 32;

enum class Op { kNone, kBlock, kWarp, kShuffle, kMatrices, kTransposed, kMultiply };

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
int thread_index();
int block_index();
int grid_blocks();
char* shared_memory();
void check_global(const void* address, std::size_t bytes, bool write);
// As check_row, for `bytes` that a thread reads by itself.
void check_copied(const void* address, std::size_t bytes);
// A lane's row of a matrix in shared memory, which its whole warp reads now.
void check_row(const void* address, int lane);
void meet_block();
// All threads of the warp bring `mine`; the last to come does `work` on what all brought.
void meet_warp(Op op, void* mine, void (*work)(void** lanes));
void copy_async(void* to, const void* from, std::size_t bytes, bool valid);
void copy_commit();
void copy_wait(int pending);

inline std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float flushed(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? 0.0F : x;
}

inline float to_float(Bf16 x) {
  return float_of(static_cast<std::uint32_t>(x.bits) << 16);
}
inline float to_float(Fp16 x) {
  const int exponent = (x.bits >> 10) & 31, fraction = x.bits & 1023;
  const float sign = x.bits & 0x8000 ? -1.0F : 1.0F;
  if (exponent == 31) return fraction != 0 ? float_of(0x7fffffff) : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
  return sign * std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
}
template <class T>
T round_to(float x);
template <>
inline Bf16 round_to<Bf16>(float x) {
  if (std::isnan(x)) return {0x7fff};
  const std::uint32_t bits = bits_of(x);
  return {static_cast<u16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
template <>
inline Fp16 round_to<Fp16>(float x) {
  if (std::isnan(x)) return {0x7fff};
  const u16 sign = std::signbit(x) ? 0x8000 : 0;
  const float size = std::fabs(x);
  if (size == 0.0F) return {sign};
  if (size >= 65520.0F) return {static_cast<u16>(sign | 0x7c00)};
  int exponent = 0;
  std::frexp(size, &exponent);                                  // size < 2^exponent
  const int shift = exponent - 11 < -24 ? -24 : exponent - 11;  // of the last place
  const int count = static_cast<int>(std::nearbyint(std::ldexp(size, -shift)));
  // 2^shift * count, where count may have grown to the next power of two: the carry is right.
  return {static_cast<u16>(sign | (shift == -24 ? count : ((shift + 24) << 10) + count))};
}

struct Rows {
  const void* row;
  std::uint32_t* to;
};
template <bool kTransposed>
void read_matrices(void** lanes) {
  const auto at = [&](int matrix, int row, int column) {
    const void* const from = static_cast<const Rows*>(lanes[8 * matrix + row])->row;
    return static_cast<const u16*>(from)[column];
  };
  for (int i = 0; i < kWarp; ++i) check_row(static_cast<const Rows*>(lanes[i])->row, i);
  for (int lane = 0; lane < kWarp; ++lane) {
    const int row = lane / 4, column = 2 * (lane % 4);
    for (int m = 0; m < 4; ++m) {
      const u16 low = kTransposed ? at(m, column, row) : at(m, row, column);
      const u16 high = kTransposed ? at(m, column + 1, row) : at(m, row, column + 1);
      static_cast<const Rows*>(lanes[lane])->to[m] = low | static_cast<std::uint32_t>(high) << 16;
    }
  }
}

struct Product {
  float* d;
  const std::uint32_t* a;
  std::uint32_t b[2];
};
template <class T>
float half_of(std::uint32_t pair, int high) {
  return to_float(T{static_cast<u16>(pair >> (16 * high))});
}
template <class T>
void multiply(void** lanes) {
  const auto of = [&](int lane) { return static_cast<const Product*>(lanes[lane]); };
  float a[16][16], b[16][8];
  for (int lane = 0; lane < kWarp; ++lane) {
    const int group = lane / 4, pair = 2 * (lane % 4);
    for (int high = 0; high < 2; ++high) {
      for (int r = 0; r < 4; ++r) {
        a[group + 8 * (r & 1)][pair + 8 * (r >> 1) + high] = half_of<T>(of(lane)->a[r], high);
      }
      for (int r = 0; r < 2; ++r) b[pair + 8 * r + high][group] = half_of<T>(of(lane)->b[r], high);
    }
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
      float sum = of(lane)->d[i];
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      of(lane)->d[i] = sum;
    }
  }
}

struct Shuffle {
  std::uint32_t x, y;
  int mask;
};
inline void shuffle(void** lanes) {
  for (int lane = 0; lane < kWarp; ++lane) {
    auto* const mine = static_cast<Shuffle*>(lanes[lane]);
    mine->y = static_cast<const Shuffle*>(lanes[lane ^ mine->mask])->x;
  }
}

}  // namespace emu

namespace ptx {

inline int thread() {
  return emu::thread_index();
}
inline int block() {
  return emu::block_index();
}
inline int num_blocks() {
  return emu::grid_blocks();
}
inline char* shared() {
  return emu::shared_memory();
}
inline void sync_block() {
  emu::meet_block();
}
inline void sync_warp() {
  emu::meet_warp(emu::Op::kWarp, nullptr, [](void**) {});
}
inline u32 shuffle_xor(u32 x, int mask) {
  emu::Shuffle mine = {x, 0, mask};
  emu::meet_warp(emu::Op::kShuffle, &mine, emu::shuffle);
  return mine.y;
}
inline float shuffle_xor(float x, int mask) {
  return emu::float_of(shuffle_xor(emu::bits_of(x), mask));
}
template <class T>
T load(const T* from) {
  emu::check_global(from, sizeof(T), false);
  return *from;
}
template <class T>
void store(T* to, T value) {
  emu::check_global(to, sizeof(T), true);
  *to = value;
}
template <class T>
T load_now(const T* from) {
  return load(from);
}
inline void copy_async(void* to, const void* from, bool valid) {
  emu::copy_async(to, from, 16, valid);
}
inline void copy_async_word(void* to, const void* from, bool valid) {
  emu::copy_async(to, from, 4, valid);
}
inline void copy_commit() {
  emu::copy_commit();
}
template <int kPending>
void copy_wait() {
  emu::copy_wait(kPending);
}
inline Pair load_copied(const Pair* from) {
  emu::check_copied(from, sizeof(Pair));
  return *from;
}
inline void load_matrices(u32 (&to)[4], const void* row) {
  emu::Rows mine = {row, to};
  emu::meet_warp(emu::Op::kMatrices, &mine, emu::read_matrices<false>);
}
inline void load_matrices_transposed(u32 (&to)[4], const void* row) {
  emu::Rows mine = {row, to};
  emu::meet_warp(emu::Op::kTransposed, &mine, emu::read_matrices<true>);
}
template <class T>
void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emu::Product mine = {d, a, {b0, b1}};
  emu::meet_warp(emu::Op::kMultiply, &mine, emu::multiply<T>);
}
template <class T>
u32 pack(float low, float high) {
  return emu::round_to<T>(low).bits | static_cast<u32>(emu::round_to<T>(high).bits) << 16;
}
inline u32 product_of_pairs(u32 x, u32 y) {
  const auto product = [&](int high) {
    return emu::round_to<Bf16>(emu::half_of<Bf16>(x, high) * emu::half_of<Bf16>(y, high)).bits;
  };
  return product(0) | static_cast<u32>(product(1)) << 16;
}
inline u32 bits_of(float x) {
  return emu::bits_of(x);
}
inline float float_of(u32 bits) {
  return emu::float_of(bits);
}
template <class T>
float widen(T x) {
  return emu::to_float(x);
}
inline float exp2(float x) {
  return emu::flushed(std::exp2(emu::flushed(x)));
}
inline float log2(float x) {
  return std::log2(emu::flushed(x));
}
inline float reciprocal(float x) {
  return emu::flushed(1.0F / emu::flushed(x));
}
inline float inverse_root(float x) {
  return 1.0F / std::sqrt(x);
}
// As fmaxf: the number where one of two is NaN.
inline float larger(float x, float y) {
  return std::fmax(x, y);
}
inline float multiply_add(float x, float y, float z) {
  return std::fma(x, y, z);
}
inline float product(float x, float y) {
  return x * y;
}
inline float sum(float x, float y) {
  return x + y;
}
inline float silu(float x) {
  return x / (1.0F + std::exp(-x));
}
inline float gelu_tanh(float x) {
  const float cube = x * x * x;
  return 0.5F * x * (1.0F + std::tanh(0.79788456080286535588F * (x + 0.044715F * cube)));
}
inline float infinity() {
  return INFINITY;
}

}  // namespace ptx

#define VMS_DEVICE inline
#define VMS_KERNEL(threads, blocks) static void
