// An MLP's activation of its gate, times the other half, in one pass.
//
// Rounds where separate tensor operations in the element type would: after the activation and
// after the product.
#pragma once

#include "write.cuh"

constexpr int kGateThreads = 128;

// `pieces` blocks share a row, a unit for each thread.
template <class T>
VMS_DEVICE void gate_row(const GateArgs& args) {
  const int row = ptx::block() / args.pieces, piece = ptx::block() - row * args.pieces;
  const int i = piece * kGateThreads + ptx::thread();
  if (i >= args.size / 8) return;
  Words gate, up;
  gate.unit = ptx::load(reinterpret_cast<const Unit*>(args.gate + row * args.gate_stride) + i);
  up.unit = ptx::load(reinterpret_cast<const Unit*>(args.up + row * args.up_stride) + i);
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    Pair x = widened<T>(gate.words, w);
    if (args.activation == kSilu) {
      x = Pair{ptx::silu(x.x), ptx::silu(x.y)};
    } else {
      x = Pair{ptx::gelu_tanh(x.x), ptx::gelu_tanh(x.y)};
    }
    const u32 active = ptx::pack<T>(x.x, x.y);
    const Pair a = widened<T>(&active, 0), b = widened<T>(up.words, w);
    gate.words[w] = ptx::pack<T>(ptx::product(a.x, b.x), ptx::product(a.y, b.y));
  }
  ptx::store(reinterpret_cast<Unit*>(args.out + row * args.out_stride) + i, gate.unit);
}
