// Everything in the kernels that is not plain C++: PTX instructions and thread synchronisation.
//
// Kernels access global memory, fragments in shared memory, other threads and approximate units
// only through these functions, so that a test can run the same source on a CPU: it defines
// VMSERVE_EMULATED_PTX as a header with the same functions and the semantics of the PTX ISA.
// Needs sm_80.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;

// Elements are stored as bits; arithmetic is in float.
struct Bf16 {
  u16 bits;
};
struct Fp16 {
  u16 bits;
};
// Of a KV cache alone: a code of 8 bits, which has a scale (kv.cuh).
struct E4m3 {
  unsigned char bits;
};

// 16 bytes, the unit of copies.
struct alignas(16) Unit {
  u32 x, y, z, w;
};

struct alignas(8) Pair {
  float x, y;
};

struct alignas(8) Codes {
  u32 low, high;  // four each
};

#ifdef VMSERVE_EMULATED_PTX
#include VMSERVE_EMULATED_PTX
#else

namespace ptx {

#define VMS_PTX __device__ __forceinline__

VMS_PTX int thread() {
  return static_cast<int>(threadIdx.x);
}
VMS_PTX int block() {
  return static_cast<int>(blockIdx.x);
}
VMS_PTX int num_blocks() {
  return static_cast<int>(gridDim.x);
}

// The block's dynamic shared memory.
VMS_PTX char* shared() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}

VMS_PTX void sync_block() {
  __syncthreads();
}
VMS_PTX void sync_warp() {
  __syncwarp();
}
VMS_PTX float shuffle_xor(float x, int mask) {
  return __shfl_xor_sync(0xffffffffU, x, mask);
}
VMS_PTX u32 shuffle_xor(u32 x, int mask) {
  return __shfl_xor_sync(0xffffffffU, x, mask);
}

// Reads global memory. T: 1, 2, 4, 8 or 16 bytes, aligned to its size.
template <class T>
VMS_PTX T load(const T* from) {
  return *from;
}
template <class T>
VMS_PTX void store(T* to, T value) {
  *to = value;
}

// The same, issued where it is written, not where what it brings is first needed: ahead of a branch
// that something else is waited for.
VMS_PTX int load_now(const int* from) {
  int value;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(from));
  return value;
}
VMS_PTX Unit load_now(const Unit* from) {
  Unit unit;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(unit.x), "=r"(unit.y), "=r"(unit.z), "=r"(unit.w)
               : "l"(from));
  return unit;
}

VMS_PTX u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Starts to copy 16 bytes from global to shared memory, or writes zeros and reads nothing if not
// `valid` (`from` must be a valid address anyway, because of the prefetch hint). The copy belongs
// to the next commit. It is visible to this thread after the wait, to others after a barrier as
// well.
VMS_PTX void copy_async(void* to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
               "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
// The same with 4 bytes.
VMS_PTX void copy_async_word(void* to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(valid ? 4 : 0)
               : "memory");
}
VMS_PTX void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most kPending of the thread's last commits are incomplete.
template <int kPending>
VMS_PTX void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Reads shared memory that asynchronous copies wrote. In place: registers are scarce.
VMS_PTX Pair load_copied(const Pair* from) {
  Pair pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(pair.x), "=f"(pair.y)
               : "r"(shared_address(from))
               : "memory");
  return pair;
}

// Loads four 8 x 8 matrices of 16-bit elements. Lane 8 i + j passes the address of row j of matrix
// i, and gets elements 2 (lane % 4) and the next of row lane / 4 of each matrix.
VMS_PTX void load_matrices(u32 (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}
// Loads four transposed matrices.
VMS_PTX void load_matrices_transposed(u32 (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

// d += a b: 16 x 16 times 16 x 8, elements of type T, sums in float32.
template <class T>
VMS_PTX void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <>
VMS_PTX void multiply_add<Bf16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
VMS_PTX void multiply_add<Fp16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Packs two floats, rounded to nearest even; the first in the low half.
template <class T>
VMS_PTX u32 pack(float low, float high);
template <>
VMS_PTX u32 pack<Bf16>(float low, float high) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
template <>
VMS_PTX u32 pack<Fp16>(float low, float high) {
  u32 bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

VMS_PTX float widen(Bf16 x) {
  return __uint_as_float(static_cast<u32>(x.bits) << 16);
}
VMS_PTX float widen(Fp16 x) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
}

// Products of two pairs of elements, each rounded once; subnormals count. sm_80 has no
// multiplication of these, so it adds -0.
VMS_PTX u32 product_of_pairs(u32 x, u32 y) {
  u32 bits;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(bits) : "r"(x), "r"(y), "r"(0x80008000U));
  return bits;
}
VMS_PTX u32 bits_of(float x) {
  return __float_as_uint(x);
}
VMS_PTX float float_of(u32 bits) {
  return __uint_as_float(bits);
}

// 2^x and log2 x of the special function unit: error of 2 ulp, subnormals flushed to 0.
VMS_PTX float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
VMS_PTX float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
VMS_PTX float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Error of at most 2 ulp.
VMS_PTX float inverse_root(float x) {
  return rsqrtf(x);
}
VMS_PTX float larger(float x, float y) {
  return fmaxf(x, y);
}
VMS_PTX float multiply_add(float x, float y, float z) {
  return fmaf(x, y, z);
}
// Neither is contracted to an FMA.
VMS_PTX float product(float x, float y) {
  return __fmul_rn(x, y);
}
VMS_PTX float sum(float x, float y) {
  return __fadd_rn(x, y);
}
// As torch's kernels have them, and compiled as they are: what may be contracted is, division is
// IEEE's, so that results are the same to the bit.
VMS_PTX float silu(float x) {
  return x / (1.0F + expf(-x));
}
VMS_PTX float gelu_tanh(float x) {
  const float cube = x * x * x;
  const float inner = 0.79788456080286535588F * (x + 0.044715F * cube);  // sqrt(2 / pi)
  return 0.5F * x * (1.0F + tanhf(inner));
}
VMS_PTX float infinity() {
  return __int_as_float(0x7f800000);
}

#undef VMS_PTX

}  // namespace ptx

#define VMS_DEVICE __device__ __forceinline__
#define VMS_KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#endif
