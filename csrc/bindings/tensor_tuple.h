// Converts tensors from Python.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "../cpu/attention.h"
#include "../cpu/linear_layer.h"
#include "vmserve/errors.h"

namespace vmserve {

using Ints = std::vector<std::int64_t>;
using IntArray =
    pybind11::array_t<std::int64_t, pybind11::array::c_style | pybind11::array::forcecast>;
// (address, dtype, shape, strides in elements)
using TensorTuple = std::tuple<std::uintptr_t, std::string_view, Ints, Ints>;

inline Ints as_ints(const IntArray& array) {
  return {array.data(), array.data() + array.size()};
}

inline TensorRef as_tensor(TensorTuple&& tuple) {
  auto& [address, dtype, shape, strides] = tuple;
  TensorRef tensor;
  tensor.data = reinterpret_cast<char*>(address);
  if (dtype == "float32") {
    tensor.dtype = DType::kFloat32;
  } else if (dtype == "bfloat16") {
    tensor.dtype = DType::kBFloat16;
  } else if (dtype == "int8") {
    tensor.dtype = DType::kInt8;
  } else {
    throw MisuseError("the CPU kernels have no dtype " + std::string(dtype));
  }
  if (shape.size() != strides.size()) throw MisuseError("a tensor's shape and strides differ");
  tensor.shape = std::move(shape);
  tensor.strides = std::move(strides);
  return tensor;
}

using Codes = pybind11::array_t<std::uint8_t, pybind11::array::c_style>;
using Floats = pybind11::array_t<float, pybind11::array::c_style>;
// A cpu::GroupedTensor as numpy arrays.
struct GroupedArrays {
  Codes codes;
  int bits;
  std::int64_t group;
  Floats scales;
  std::optional<Floats> minima, scale_steps, minimum_steps;

  cpu::GroupedTensor tensor() const;
};
using WeightArgument = std::variant<GroupedArrays, TensorTuple>;

inline WeightRef as_weights(const WeightArgument& weights) {
  if (const auto* grouped = std::get_if<GroupedArrays>(&weights)) return grouped->tensor();
  return as_tensor(TensorTuple(std::get<TensorTuple>(weights)));
}

}  // namespace vmserve
