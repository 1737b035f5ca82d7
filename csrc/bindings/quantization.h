#pragma once

#include <string>

#include "../cpu/linear_layer.h"
#include "vmserve/errors.h"

namespace vmserve {

inline Quantization as_quantization(const std::string& name) {
  if (name == "none") return Quantization::kNone;
  if (name == "int8") return Quantization::kInt8;
  if (name == "int8-dynamic") return Quantization::kInt8Dynamic;
  throw MisuseError("quantization '" + name + "' is not one of none, int8, int8-dynamic");
}

}  // namespace vmserve
