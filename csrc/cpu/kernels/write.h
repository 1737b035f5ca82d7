// Rotary embedding of q and k, the write of k and v to their positions, and the merge of partial
// outputs.
//
// Rotations round where separate tensor operations in the element type would: after each product
// and after the sum (vmserve/attention/rotary.py). Nothing is contracted to an FMA.
#pragma once

#include "int8.h"

namespace vmserve::cpu {
namespace {

template <class T>
Vec::R rounded(Vec::R x);
template <>
[[maybe_unused]] inline Vec::R rounded<float>(Vec::R x) {
  return x;
}
template <>
[[maybe_unused]] inline Vec::R rounded<Bf16>(Vec::R x) {
  return Vec::round_bf16(x);
}

// to[i] = x[i] * cos[i] + partner[i] * sin[i]
template <class T>
void rotate_half(const T* x, const T* partner, const T* cos, const T* sin, int count, T* to) {
  for (int i = 0; i < count; i += kPair) {
    Vec::R xs[2], partners[2], coss[2], sins[2];
    load_upto(x + i, count - i, xs[0], xs[1]);
    load_upto(partner + i, count - i, partners[0], partners[1]);
    load_upto(cos + i, count - i, coss[0], coss[1]);
    load_upto(sin + i, count - i, sins[0], sins[1]);
    for (int j = 0; j < 2; ++j) {
      xs[j] = Vec::add(rounded<T>(Vec::mul(xs[j], coss[j])),
                       rounded<T>(Vec::mul(partners[j], sins[j])));
    }
    store_upto(to + i, count - i, xs[0], xs[1]);
  }
}

template <class T>
void rotate_row(const T* x, const T* cos, const T* sin, int rotary_dim, int head_dim, T* to) {
  const int half = rotary_dim / 2;
  rotate_half(x, x + half, cos, sin, half, to);
  rotate_half(x + half, x, cos + half, sin + half, half, to + half);
  memcpy(to + rotary_dim, x + rotary_dim, sizeof(T) * static_cast<size_t>(head_dim - rotary_dim));
}

// Keys or values of one head, rotated already, into the KV cache.
template <class T>
void store_row(const T* row, int head_dim, T* to) {
  memcpy(to, row, sizeof(T) * static_cast<size_t>(head_dim));
}
template <class T>
void store_row(const T* row, int head_dim, Code* to) {
  encode_row(row, head_dim, to);
}

template <class T>
void store_rotated(const T* row, const T* cos, const T* sin, int rotary_dim, int head_dim, T* to) {
  rotate_row(row, cos, sin, rotary_dim, head_dim, to);
}
template <class T>
void store_rotated(const T* row, const T* cos, const T* sin, int rotary_dim, int head_dim,
                   Code* to) {
  T rotated[kMaxHeadDim];
  rotate_row(row, cos, sin, rotary_dim, head_dim, rotated);
  encode_row(rotated, head_dim, to);
}

template <class T, class C>
void write_token(const WriteArgs& a, int token, C* k_to, C* v_to) {
  const T* const cos = static_cast<const T*>(a.cos) + token * a.cos_stride;
  const T* const sin = static_cast<const T*>(a.sin) + token * a.sin_stride;
  for (int h = 0; h < a.kv_heads; ++h) {
    const T* k = static_cast<const T*>(a.k) + token * a.k_token_stride + h * a.k_head_stride;
    C* const to = k_to + h * a.seq.k.head_stride;
    if (a.rotary_dim > 0) {
      store_rotated(k, cos, sin, a.rotary_dim, a.head_dim, to);
    } else {
      store_row(k, a.head_dim, to);
    }
    if (a.v == nullptr) continue;
    const T* v = static_cast<const T*>(a.v) + token * a.v_token_stride + h * a.v_head_stride;
    store_row(v, a.head_dim, v_to + h * a.seq.v.head_stride);
  }
  for (int h = 0; a.rotary_dim > 0 && h < a.q_heads; ++h) {
    const T* q = static_cast<const T*>(a.q) + token * a.q_token_stride + h * a.q_head_stride;
    rotate_row(
        q, cos, sin, a.rotary_dim, a.head_dim,
        static_cast<T*>(a.q_out) + (static_cast<std::int64_t>(token) * a.q_heads + h) * a.head_dim);
  }
}

// C: the element of the KV cache.
template <class T, class C>
void write(const WriteArgs& a) {
  for (int token = 0; token < a.num_tokens; ++token) {
    const C *k, *v;
    locate(a.seq, a.position + token, 1, &k, &v);
    write_token<T>(a, token, const_cast<C*>(k), const_cast<C*>(v));
  }
}

template <class T>
void combine_row(const CombineArgs& a, int row, int head) {
  const int stride = padded(a.head_dim);
  const float* part =
      a.parts + (static_cast<std::int64_t>(row) * a.heads + head) * partial_floats(a.head_dim);
  float sums[kMaxHeadDim];
  memset(sums, 0, sizeof(float) * static_cast<size_t>(stride));
  Vec::R maximum = Vec::set(kLowest), total = Vec::zero();
  for (int i = 0; i < a.num_parts; ++i, part += a.part_stride) {
    const Fold fold(maximum, Vec::set(part[stride]));
    for (int d = 0; d < stride; d += Vec::kWidth) {
      Vec::store(sums + d, fold(Vec::load(sums + d), Vec::load(part + d)));
    }
    total = fold(total, Vec::set(part[stride + 1]));
    maximum = fold.maximum;
  }
  emit<T>(a.out, row, head, a.heads, a.head_dim, sums, first_lane(maximum), first_lane(total));
}

template <class T>
void combine(const CombineArgs& a) {
  for (int row = 0; row < a.num_rows; ++row) {
    for (int head = 0; head < a.heads; ++head) combine_row<T>(a, row, head);
  }
}

}  // namespace
}  // namespace vmserve::cpu
