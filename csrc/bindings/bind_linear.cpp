// Quantized weights from numpy, and single products for tests and benchmarks.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>

#include "../cpu/gguf_codes.h"
#include "../cpu/kernels/isa.h"
#include "../cpu/linear_layer.h"
#include "bindings.h"
#include "quantization.h"
#include "tensor_tuple.h"
#include "vmserve/errors.h"

namespace py = pybind11;

namespace vmserve {
namespace {

void check_shape(const py::array& array, std::int64_t outputs, std::int64_t columns,
                 const char* name) {
  if (array.ndim() == 2 && array.shape(0) == outputs && array.shape(1) == columns) return;
  throw MisuseError(std::string(name) + " are not [" + std::to_string(outputs) + ", " +
                    std::to_string(columns) + "]");
}

GroupedArrays grouped_arrays(Codes codes, int bits, std::int64_t group, Floats scales,
                             std::optional<Floats> minima, std::optional<Floats> scale_steps,
                             std::optional<Floats> minimum_steps) {
  if (codes.ndim() != 2 || scales.ndim() != 2) {
    throw MisuseError("codes are [outputs, inputs], scales [outputs, groups]");
  }
  check_shape(scales, codes.shape(0), scales.shape(1), "scales");
  if (minima) check_shape(*minima, codes.shape(0), scales.shape(1), "minima");
  const std::int64_t steps = scale_steps && scale_steps->ndim() == 2 ? scale_steps->shape(1) : 0;
  if (scale_steps) check_shape(*scale_steps, codes.shape(0), steps, "scale_steps");
  if (minimum_steps) check_shape(*minimum_steps, codes.shape(0), steps, "minimum_steps");
  return {std::move(codes),
          bits,
          group,
          std::move(scales),
          std::move(minima),
          std::move(scale_steps),
          std::move(minimum_steps)};
}

const float* data_of(const std::optional<Floats>& array) {
  return array ? array->data() : nullptr;
}

// blocks [rows, bytes of a row] -> codes [rows, columns].
Codes unpack_codes(const std::string& type, const Codes& blocks) {
  const GgufBlocks* const form = gguf_blocks(type);
  if (form == nullptr) throw MisuseError("type " + type + " has no codes");
  if (blocks.ndim() != 2 || blocks.shape(1) % form->bytes != 0) {
    throw MisuseError("rows of " + type + " are whole blocks of " + std::to_string(form->bytes) +
                      " bytes");
  }
  const std::int64_t count = blocks.size() / form->bytes;
  Codes codes({blocks.shape(0), blocks.shape(1) / form->bytes * form->elements});
  const std::uint8_t* const from = blocks.data();
  std::uint8_t* const to = codes.mutable_data();
  const py::gil_scoped_release unlocked;
  for (std::int64_t i = 0; i < count; ++i) {
    form->unpack(from + i * form->bytes, to + i * form->elements);
  }
  return codes;
}

// A linear layer by itself.
class CpuLinear {
 public:
  CpuLinear(const WeightArgument& weights, Quantization quantization, bool bf16_rows,
            int num_threads, const std::string& isa)
      : products_(cpu::choose_table(isa).linear, std::make_shared<ThreadPool>(num_threads),
                  quantization, bf16_rows) {
    const WeightRef matrix = as_weights(weights);
    const auto* const grouped = std::get_if<cpu::GroupedTensor>(&matrix);
    if (grouped != nullptr) {
      check_matrix(matrix, "a matrix", grouped->outputs, grouped->inputs);
    } else {
      const Ints& shape = std::get<TensorRef>(matrix).shape;
      check_matrix(matrix, "a matrix", shape.at(0), shape.at(1));
    }
    layer_ = products_.pack({&matrix}, false);
  }

  // rows [rows, inputs] -> [rows, outputs].
  py::array_t<float> multiply(const Floats& rows) {
    if (rows.ndim() != 2) throw MisuseError("rows are [rows, inputs]");
    check_shape(rows, rows.shape(0), layer_.inputs, "rows");
    const std::int64_t num_rows = rows.shape(0);
    py::array_t<float> out({num_rows, layer_.outputs});
    float* const to = out.mutable_data();
    const py::gil_scoped_release unlocked;
    products_.pack_rows(layer_, rows.data(), false, num_rows, nullptr, 0.0F);
    products_.multiply(layer_, nullptr, nullptr, num_rows, cpu::Epilogue::kStore, to,
                       layer_.outputs);
    return out;
  }

  std::size_t weight_bytes() const { return layer_.weight_bytes(); }
  const char* row_type() const { return layer_.row_format().name; }

 private:
  LinearProducts products_;
  LinearLayer layer_;
};

}  // namespace

cpu::GroupedTensor GroupedArrays::tensor() const {
  cpu::GroupedTensor tensor{};
  tensor.bits = bits;
  tensor.group = group;
  tensor.codes = codes.data();
  tensor.scales = scales.data();
  tensor.minima = data_of(minima);
  tensor.scale_steps = data_of(scale_steps);
  tensor.minimum_steps = data_of(minimum_steps);
  tensor.outputs = codes.shape(0);
  tensor.inputs = codes.shape(1);
  tensor.groups = scales.shape(1);
  tensor.steps = scale_steps ? scale_steps->shape(1) : 0;
  return tensor;
}

void bind_linear(py::module_& m) {
  m.def("unpack_codes", &unpack_codes, py::arg("type"), py::arg("blocks").noconvert());
  py::class_<GroupedArrays>(m, "GroupedWeights")
      .def(py::init(&grouped_arrays), py::kw_only(), py::arg("codes").noconvert(), py::arg("bits"),
           py::arg("group"), py::arg("scales").noconvert(), py::arg("minima") = py::none(),
           py::arg("scale_steps") = py::none(), py::arg("minimum_steps") = py::none())
      .def_property_readonly("shape", [](const GroupedArrays& weights) {
        return std::make_pair(weights.codes.shape(0), weights.codes.shape(1));
      });
  py::class_<CpuLinear>(m, "CpuLinear")
      .def(py::init([](const WeightArgument& weights, const std::string& quantization,
                       bool bf16_rows, int num_threads, const std::string& isa) {
             return std::make_unique<CpuLinear>(weights, as_quantization(quantization), bf16_rows,
                                                num_threads, isa);
           }),
           py::arg("weights"), py::kw_only(), py::arg("quantization") = "none",
           py::arg("bf16_rows") = false, py::arg("num_threads") = 1, py::arg("isa") = "")
      .def("multiply", &CpuLinear::multiply, py::arg("rows").noconvert())
      .def_property_readonly("weight_bytes", &CpuLinear::weight_bytes)
      .def_property_readonly("row_type", &CpuLinear::row_type);
}

}  // namespace vmserve
