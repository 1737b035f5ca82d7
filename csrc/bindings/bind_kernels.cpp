#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../cpu/attention.h"
#include "bindings.h"
#include "tensor_tuple.h"
#include "vmserve/errors.h"

namespace py = pybind11;

namespace vmserve {
namespace {

using Tables = py::array_t<std::int32_t, py::array::c_style>;
using Doubles = py::array_t<double, py::array::c_style>;

std::vector<TensorRef> as_tensors(std::vector<TensorTuple>&& tuples) {
  std::vector<TensorRef> tensors;
  tensors.reserve(tuples.size());
  for (TensorTuple& tuple : tuples) tensors.push_back(as_tensor(std::move(tuple)));
  return tensors;
}

std::shared_ptr<CpuKvView> paged_view(std::vector<TensorTuple> keys,
                                      std::vector<TensorTuple> values,
                                      const std::vector<Tables>& tables, std::int64_t block_tokens,
                                      std::vector<std::size_t> layer_tables) {
  if (tables.empty()) throw MisuseError("the block tables are empty");
  std::vector<const std::int32_t*> addresses;
  for (const Tables& each : tables) {
    if (each.ndim() != 2 || each.shape(0) != tables[0].shape(0) ||
        each.shape(1) != tables[0].shape(1)) {
      throw MisuseError("block tables are int32 [rows, blocks], all of one shape");
    }
    addresses.push_back(each.data());
  }
  return std::make_shared<CpuKvView>(as_tensors(std::move(keys)), as_tensors(std::move(values)),
                                     std::move(addresses), std::move(layer_tables),
                                     tables[0].shape(0), tables[0].shape(1), block_tokens);
}

CpuLayerCall as_call(std::int64_t layer, TensorTuple q, TensorTuple k, TensorTuple v,
                     std::optional<std::pair<TensorTuple, TensorTuple>> rotary, float scale,
                     std::int64_t window, float softcap,
                     std::optional<TensorTuple> sinks = std::nullopt) {
  CpuLayerCall call;
  call.layer = layer;
  call.q = as_tensor(std::move(q));
  call.k = as_tensor(std::move(k));
  call.v = as_tensor(std::move(v));
  if (rotary) {
    call.cos = as_tensor(std::move(rotary->first));
    call.sin = as_tensor(std::move(rotary->second));
  }
  call.scale = scale;
  call.window = window;
  call.softcap = softcap;
  if (!sinks) return call;
  const TensorRef scores = as_tensor(std::move(*sinks));
  if (scores.dtype != DType::kFloat32 || scores.shape != Ints{call.q.shape.at(1)} ||
      scores.strides != Ints{1}) {
    throw MisuseError("sinks are not [q_heads] in contiguous float32");
  }
  call.sinks = reinterpret_cast<const float*>(scores.data);
  return call;
}

void run(CpuAttention& attention, CpuBatch& batch, std::int64_t layer, TensorTuple q, TensorTuple k,
         TensorTuple v, std::optional<std::pair<TensorTuple, TensorTuple>> rotary, TensorTuple out,
         float scale, std::int64_t window, float softcap, std::uintptr_t lse,
         std::optional<TensorTuple> sinks) {
  CpuLayerCall call = as_call(layer, std::move(q), std::move(k), std::move(v), std::move(rotary),
                              scale, window, softcap, std::move(sinks));
  call.out = as_tensor(std::move(out));
  call.lse = reinterpret_cast<float*>(lse);
  const py::gil_scoped_release unlocked;
  attention.run(batch, call);
}

void bind_references(py::module_& m) {
  m.def(
      "write_reference",
      [](const CpuBatch& batch, std::int64_t layer, TensorTuple q, TensorTuple k, TensorTuple v,
         std::optional<std::pair<TensorTuple, TensorTuple>> rotary, std::uintptr_t q_out) {
        const CpuLayerCall call = as_call(layer, std::move(q), std::move(k), std::move(v),
                                          std::move(rotary), 1.0F, 0, 0.0F);
        write_reference(batch, call, reinterpret_cast<char*>(q_out));
      },
      py::arg("batch"), py::arg("layer"), py::arg("q"), py::arg("k"), py::arg("v"),
      py::arg("rotary"), py::arg("q_out"));
  m.def(
      "attend_reference",
      [](const CpuBatch& batch, std::int64_t layer, const TensorTuple& q, float scale,
         std::int64_t window, float softcap, std::optional<TensorTuple> sinks) {
        const CpuLayerCall call =
            as_call(layer, q, q, q, std::nullopt, scale, window, softcap, std::move(sinks));
        const Ints& shape = call.q.shape;
        Doubles out({shape.at(0), shape.at(1), shape.at(2)}), lse({shape.at(0), shape.at(1)});
        attend_reference(batch, call, out.mutable_data(), lse.mutable_data());
        return std::make_pair(out, lse);
      },
      py::arg("batch"), py::arg("layer"), py::arg("q"), py::arg("scale"), py::arg("window") = 0,
      py::arg("softcap") = 0.0F, py::arg("sinks") = std::nullopt);
}

}  // namespace

void bind_kernels(py::module_& m) {
  m.def("cpu_isas", &cpu_isas);
  py::class_<CpuKvView, std::shared_ptr<CpuKvView>>(m, "CpuKvView")
      .def(py::init([](std::vector<TensorTuple> keys, std::vector<TensorTuple> values) {
             return std::make_shared<CpuKvView>(as_tensors(std::move(keys)),
                                                as_tensors(std::move(values)));
           }),
           py::arg("keys"), py::arg("values"))
      .def(py::init(&paged_view), py::arg("keys"), py::arg("values"),
           py::arg("block_tables").noconvert(), py::arg("block_tokens"), py::arg("layer_tables"),
           py::keep_alive<1, 4>())
      .def(py::init([](std::vector<TensorTuple> keys, std::vector<TensorTuple> values,
                       const Tables& tables, std::int64_t block_tokens) {
             std::vector<std::size_t> layer_tables(keys.size());
             return paged_view(std::move(keys), std::move(values), {tables}, block_tokens,
                               std::move(layer_tables));
           }),
           py::arg("keys"), py::arg("values"), py::arg("block_tables").noconvert(),
           py::arg("block_tokens"), py::keep_alive<1, 4>())
      .def(
          "set_states",
          [](CpuKvView& view, TensorTuple pages, const Tables& table) {
            if (table.ndim() != 2) throw MisuseError("a table of states is int32 [rows, blocks]");
            view.set_states(as_tensor(std::move(pages)), table.data(), table.shape(0),
                            table.shape(1));
          },
          py::arg("pages"), py::arg("table").noconvert(), py::keep_alive<1, 3>());
  py::class_<CpuBatch>(m, "CpuBatch")
      .def(py::init([](const std::shared_ptr<CpuKvView>& view, const IntArray& places,
                       const IntArray& num_past, const IntArray& num_new,
                       const py::object& state_places) {
             // Every step passes state_places. They are converted only if there are states.
             Ints states;
             if (!state_places.is_none() && view->state_floats() > 0) {
               states = as_ints(py::cast<IntArray>(state_places));
             }
             return std::make_unique<CpuBatch>(view, as_ints(places), as_ints(num_past),
                                               as_ints(num_new), states);
           }),
           py::arg("view"), py::arg("places"), py::arg("num_past"), py::arg("num_new"),
           py::arg("state_places") = py::none())
      .def_property_readonly("num_tokens", &CpuBatch::num_tokens)
      .def_property_readonly("last_position", &CpuBatch::last_position);
  py::class_<CpuAttention>(m, "CpuAttention")
      .def(py::init<int, const std::string&>(), py::arg("num_threads"), py::arg("isa") = "")
      .def_property_readonly("isa", &CpuAttention::isa)
      .def_property("num_threads", &CpuAttention::num_threads, &CpuAttention::set_num_threads)
      .def("run", &run, py::arg("batch"), py::arg("layer"), py::arg("q"), py::arg("k"),
           py::arg("v"), py::arg("rotary"), py::arg("out"), py::arg("scale"), py::arg("window") = 0,
           py::arg("softcap") = 0.0F, py::arg("lse") = 0, py::arg("sinks") = std::nullopt)
      .def(
          "fold",
          [](const CpuAttention& attention, std::uintptr_t data, std::size_t bytes) {
            const py::gil_scoped_release unlocked;
            return attention.fold(reinterpret_cast<const char*>(data), bytes);
          },
          py::arg("data"), py::arg("bytes"));
  bind_references(m);
}

}  // namespace vmserve
