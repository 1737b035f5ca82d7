#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../cpu/decoder.h"
#include "bindings.h"
#include "quantization.h"
#include "tensor_tuple.h"
#include "vmserve/errors.h"

namespace py = pybind11;

namespace vmserve {
namespace {

DType as_dtype(const std::string& name) {
  if (name == "float32") return DType::kFloat32;
  if (name == "bfloat16") return DType::kBFloat16;
  throw MisuseError("a decoder has no KV cache of " + name + ": use float32 or bfloat16");
}

cpu::Activation as_activation(const std::string& name) {
  if (name == "silu") return cpu::Activation::kSilu;
  if (name == "gelu") return cpu::Activation::kGelu;
  throw MisuseError("a decoder has no activation " + name + ": use silu or gelu");
}

// A vector of floats, or null.
const float* vector_of(std::optional<TensorTuple> tuple, std::int64_t size, const char* name) {
  if (!tuple) return nullptr;
  const TensorRef tensor = as_tensor(std::move(*tuple));
  if (tensor.dtype != DType::kFloat32 || tensor.shape != Ints{size} || tensor.strides != Ints{1}) {
    throw MisuseError(std::string(name) + " is not [" + std::to_string(size) +
                      "] in contiguous float32");
  }
  return reinterpret_cast<const float*>(tensor.data);
}

std::vector<float> copy_of(const Floats& array) {
  return {array.data(), array.data() + array.size()};
}

// Returns (logits [rows, vocab], seconds of attention in each batch, hidden states). Only the first
// rank returns rows.
py::tuple forward(CpuDecoder& decoder, const IntArray& token_ids,
                  const std::vector<CpuBatch*>& batches, const std::optional<IntArray>& wanted,
                  std::int64_t num_hidden, const std::optional<Floats>& embedded) {
  const Ints ids = as_ints(token_ids);
  Ints rows(wanted ? 0 : ids.size());  // default: all rows, in order
  std::iota(rows.begin(), rows.end(), 0);
  if (wanted) rows = as_ints(*wanted);
  if (embedded &&
      (embedded->ndim() != 2 || embedded->shape(0) != static_cast<std::int64_t>(ids.size()) ||
       embedded->shape(1) != decoder.hidden_size())) {
    throw MisuseError("embedded is not [" + std::to_string(ids.size()) + ", " +
                      std::to_string(decoder.hidden_size()) + "]");
  }
  const float* const embedded_rows = embedded ? embedded->data() : nullptr;
  std::vector<CpuDecoder::Part> parts;
  for (CpuBatch* batch : batches) parts.push_back({batch, 0.0});
  const auto returned = [&](std::int64_t count) {
    return decoder.is_first() ? std::max<std::int64_t>(0, count) : 0;
  };
  const auto num_wanted = static_cast<std::int64_t>(rows.size());
  py::array_t<float> logits({returned(num_wanted - num_hidden), decoder.vocab_size()});
  py::array_t<float> hidden({returned(num_hidden), decoder.hidden_size()});
  float* const out = logits.mutable_data();
  float* const hidden_out = hidden.mutable_data();
  {
    const py::gil_scoped_release unlocked;
    decoder.forward(ids, parts, rows, out, num_hidden, hidden_out, embedded_rows);
  }
  std::vector<double> seconds;
  for (const CpuDecoder::Part& part : parts) seconds.push_back(part.seconds);
  return py::make_tuple(std::move(logits), std::move(seconds), std::move(hidden));
}

}  // namespace

void bind_decoder(py::module_& m) {
  py::class_<RankGroup, std::shared_ptr<RankGroup>>(m, "RankGroup")
      .def(py::init<int, int, int, std::size_t>(), py::arg("descriptor"), py::arg("rank"),
           py::arg("size"), py::arg("board_bytes") = 0)
      .def_property_readonly("rank", &RankGroup::rank)
      .def_property_readonly("size", &RankGroup::size)
      .def("wait", &RankGroup::wait, py::call_guard<py::gil_scoped_release>())
      .def("fail", &RankGroup::fail)
      .def("lose", &RankGroup::lose, py::arg("rank"))
      .def(
          "publish",
          [](RankGroup& group, const py::bytes& step) {
            const std::string_view bytes(step);
            const py::gil_scoped_release unlocked;
            group.publish(bytes);
          },
          py::arg("step"))
      .def("receive",
           [](RankGroup& group) {
             std::string_view step;
             {
               const py::gil_scoped_release unlocked;
               step = group.receive();
             }
             return py::bytes(step.data(), step.size());
           })
      .def(
          "slice",
          [](const RankGroup& group, std::int64_t count) {
            const Slice own = group.slice(count);
            return std::make_pair(own.first, own.count);
          },
          py::arg("count"));
  py::class_<DeltaShape>(m, "DeltaShape")
      .def(py::init([](std::int64_t key_heads, std::int64_t value_heads, std::int64_t key_dim,
                       std::int64_t value_dim, std::int64_t taps, bool tiled) {
             return DeltaShape{key_heads, value_heads, key_dim, value_dim, taps, tiled};
           }),
           py::kw_only(), py::arg("key_heads"), py::arg("value_heads"), py::arg("key_dim"),
           py::arg("value_dim"), py::arg("taps"), py::arg("tiled"));
  py::class_<LatentShape>(m, "LatentShape")
      .def(py::init(
               [](std::int64_t q_rank, std::int64_t rank, std::int64_t plain, std::int64_t rotated,
                  std::int64_t value) { return LatentShape{q_rank, rank, plain, rotated, value}; }),
           py::kw_only(), py::arg("q_rank"), py::arg("rank"), py::arg("plain"), py::arg("rotated"),
           py::arg("value"));
  py::class_<CpuDecoder>(m, "CpuDecoder")
      .def(py::init([](std::int64_t vocab_size, std::int64_t hidden_size, std::int64_t q_heads,
                       std::int64_t kv_heads, std::int64_t head_dim, float norm_eps,
                       float embedding_scale, float logits_softcap,
                       const std::optional<DeltaShape>& delta,
                       const std::optional<LatentShape>& latent, const std::string& row_dtype,
                       const std::string& quantization, int num_threads, const std::string& isa,
                       std::shared_ptr<RankGroup> group) {
             const DecoderShape shape{vocab_size,
                                      hidden_size,
                                      q_heads,
                                      kv_heads,
                                      head_dim,
                                      norm_eps,
                                      embedding_scale,
                                      logits_softcap,
                                      delta.value_or(DeltaShape{}),
                                      latent.value_or(LatentShape{})};
             return std::make_unique<CpuDecoder>(shape, as_dtype(row_dtype),
                                                 as_quantization(quantization), num_threads, isa,
                                                 std::move(group));
           }),
           py::kw_only(), py::arg("vocab_size"), py::arg("hidden_size"), py::arg("q_heads"),
           py::arg("kv_heads"), py::arg("head_dim"), py::arg("norm_eps"),
           py::arg("embedding_scale") = 1.0F, py::arg("logits_softcap") = 0.0F,
           py::arg("delta") = std::nullopt, py::arg("latent") = std::nullopt, py::arg("row_dtype"),
           py::arg("quantization"), py::arg("num_threads"), py::arg("isa") = "",
           py::arg("group") = nullptr)
      .def(
          "add_layer",
          [](CpuDecoder& decoder, TensorTuple attention_norm, const WeightArgument& q,
             const WeightArgument& k, const WeightArgument& v, const WeightArgument& output,
             TensorTuple mlp_norm, std::optional<TensorTuple> q_bias,
             std::optional<TensorTuple> k_bias, std::optional<TensorTuple> v_bias,
             std::optional<TensorTuple> output_bias, std::optional<TensorTuple> sinks,
             std::optional<TensorTuple> q_norm, std::optional<TensorTuple> k_norm,
             std::optional<TensorTuple> attention_out_norm, std::optional<TensorTuple> mlp_out_norm,
             std::int64_t head_dim, std::int64_t rotation, float scale, std::int64_t window,
             float softcap, bool gated) {
            DecoderLayer layer;
            layer.attention_norm = as_tensor(std::move(attention_norm));
            layer.q = as_weights(q);
            layer.k = as_weights(k);
            layer.v = as_weights(v);
            layer.output = as_weights(output);
            layer.mlp_norm = as_tensor(std::move(mlp_norm));
            layer.q_bias = vector_of(std::move(q_bias), outputs_of(layer.q), "q_bias");
            layer.k_bias = vector_of(std::move(k_bias), outputs_of(layer.k), "k_bias");
            layer.v_bias = vector_of(std::move(v_bias), outputs_of(layer.v), "v_bias");
            layer.output_bias =
                vector_of(std::move(output_bias), outputs_of(layer.output), "output_bias");
            layer.sinks = vector_of(std::move(sinks), outputs_of(layer.q) / head_dim, "sinks");
            layer.q_norm = vector_of(std::move(q_norm), head_dim, "q_norm");
            layer.k_norm = vector_of(std::move(k_norm), head_dim, "k_norm");
            layer.attention_out_norm = vector_of(std::move(attention_out_norm),
                                                 decoder.hidden_size(), "attention_out_norm");
            layer.mlp_out_norm =
                vector_of(std::move(mlp_out_norm), decoder.hidden_size(), "mlp_out_norm");
            layer.rotation = rotation;
            layer.scale = scale;
            layer.window = window;
            layer.softcap = softcap;
            layer.gated = gated;
            const py::gil_scoped_release unlocked;
            decoder.add_layer(layer);
          },
          py::kw_only(), py::arg("attention_norm"), py::arg("q"), py::arg("k"), py::arg("v"),
          py::arg("output"), py::arg("mlp_norm"), py::arg("q_bias"), py::arg("k_bias"),
          py::arg("v_bias"), py::arg("output_bias") = std::nullopt, py::arg("sinks") = std::nullopt,
          py::arg("q_norm"), py::arg("k_norm"), py::arg("attention_out_norm") = std::nullopt,
          py::arg("mlp_out_norm") = std::nullopt, py::arg("head_dim"), py::arg("rotation"),
          py::arg("scale"), py::arg("window"), py::arg("softcap"), py::arg("gated") = false)
      .def(
          "add_latent",
          [](CpuDecoder& decoder, TensorTuple attention_norm,
             const std::optional<WeightArgument>& q_down, std::optional<TensorTuple> q_norm,
             const WeightArgument& q, const WeightArgument& kv_down, TensorTuple kv_norm,
             const std::vector<WeightArgument>& key_up, const std::vector<WeightArgument>& value_up,
             const WeightArgument& output, TensorTuple mlp_norm, float norm_eps,
             std::int64_t rotation, float scale) {
            DecoderLatent layer;
            const LatentShape& shape = decoder.latent();
            layer.attention_norm = as_tensor(std::move(attention_norm));
            if (q_down) layer.q_down = as_weights(*q_down);
            layer.q_norm = vector_of(std::move(q_norm), shape.q_rank, "q_norm");
            layer.q = as_weights(q);
            layer.kv_down = as_weights(kv_down);
            layer.kv_norm = vector_of(std::move(kv_norm), shape.rank, "kv_norm");
            for (const WeightArgument& head : key_up) layer.key_up.push_back(as_weights(head));
            for (const WeightArgument& head : value_up) layer.value_up.push_back(as_weights(head));
            layer.output = as_weights(output);
            layer.mlp_norm = as_tensor(std::move(mlp_norm));
            layer.norm_eps = norm_eps;
            layer.rotation = rotation;
            layer.scale = scale;
            const py::gil_scoped_release unlocked;
            decoder.add_latent(layer);
          },
          py::kw_only(), py::arg("attention_norm"), py::arg("q_down"), py::arg("q_norm"),
          py::arg("q"), py::arg("kv_down"), py::arg("kv_norm"), py::arg("key_up"),
          py::arg("value_up"), py::arg("output"), py::arg("mlp_norm"), py::arg("norm_eps"),
          py::arg("rotation"), py::arg("scale"))
      .def(
          "add_delta",
          [](CpuDecoder& decoder, TensorTuple attention_norm, const WeightArgument& qkv,
             const WeightArgument& z, const WeightArgument& gates, const WeightArgument& output,
             TensorTuple mlp_norm, const Floats& taps, const Floats& decay_rate, const Floats& bias,
             const Floats& norm) {
            DecoderDelta layer;
            layer.attention_norm = as_tensor(std::move(attention_norm));
            layer.qkv = as_weights(qkv);
            layer.z = as_weights(z);
            layer.gates = as_weights(gates);
            layer.output = as_weights(output);
            layer.mlp_norm = as_tensor(std::move(mlp_norm));
            layer.weights = {copy_of(taps), copy_of(decay_rate), copy_of(bias), copy_of(norm)};
            const py::gil_scoped_release unlocked;
            decoder.add_delta(layer);
          },
          py::kw_only(), py::arg("attention_norm"), py::arg("qkv"), py::arg("z"), py::arg("gates"),
          py::arg("output"), py::arg("mlp_norm"), py::arg("taps"), py::arg("decay_rate"),
          py::arg("bias"), py::arg("norm"))
      .def(
          "add_mlp",
          [](CpuDecoder& decoder, const WeightArgument& gate, const WeightArgument& up,
             const WeightArgument& down, std::optional<TensorTuple> gate_bias,
             std::optional<TensorTuple> up_bias, std::optional<TensorTuple> down_bias,
             const std::string& activation, std::optional<std::pair<float, float>> clamp) {
            DecoderMlp mlp;
            mlp.gate = as_weights(gate);
            mlp.up = as_weights(up);
            mlp.down = as_weights(down);
            const std::int64_t size = outputs_of(mlp.gate);
            mlp.gate_bias = vector_of(std::move(gate_bias), size, "gate_bias");
            mlp.up_bias = vector_of(std::move(up_bias), size, "up_bias");
            mlp.down_bias = vector_of(std::move(down_bias), outputs_of(mlp.down), "down_bias");
            mlp.activation.activation = as_activation(activation);
            if (clamp) mlp.activation = {cpu::Activation::kClamped, clamp->first, clamp->second};
            const py::gil_scoped_release unlocked;
            decoder.add_mlp(mlp);
          },
          py::kw_only(), py::arg("gate"), py::arg("up"), py::arg("down"),
          py::arg("gate_bias") = std::nullopt, py::arg("up_bias") = std::nullopt,
          py::arg("down_bias") = std::nullopt, py::arg("activation") = "silu",
          py::arg("clamp") = std::nullopt)
      .def(
          "add_router",
          [](CpuDecoder& decoder, TensorTuple weights, std::int64_t count, std::int64_t chosen,
             bool normalised, std::optional<TensorTuple> bias, bool sigmoid,
             std::optional<TensorTuple> correction, std::int64_t groups, std::int64_t chosen_groups,
             std::int64_t group_best, float scale, bool shared,
             std::optional<TensorTuple> shared_gate) {
            DecoderRouter router;
            router.weights = as_tensor(std::move(weights));
            router.bias = vector_of(std::move(bias), count, "router_bias");
            router.count = count;
            router.chosen = chosen;
            router.normalised = normalised;
            router.sigmoid = sigmoid;
            router.correction = vector_of(std::move(correction), count, "correction");
            router.groups = groups;
            router.chosen_groups = chosen_groups;
            router.group_best = group_best;
            router.scale = scale;
            router.shared = shared;
            if (shared_gate) router.shared_gate = as_tensor(std::move(*shared_gate));
            const py::gil_scoped_release unlocked;
            decoder.add_router(router);
          },
          py::kw_only(), py::arg("weights"), py::arg("count"), py::arg("chosen"),
          py::arg("normalised"), py::arg("bias") = std::nullopt, py::arg("sigmoid") = false,
          py::arg("correction") = std::nullopt, py::arg("groups") = 1, py::arg("chosen_groups") = 1,
          py::arg("group_best") = 1, py::arg("scale") = 1.0F, py::arg("shared") = false,
          py::arg("shared_gate") = std::nullopt)
      .def(
          "set_ends",
          [](CpuDecoder& decoder,
             const std::optional<std::tuple<int, std::int64_t, std::string>>& embedding,
             TensorTuple final_norm, const WeightArgument& head) {
            std::optional<FileRows> rows;
            if (embedding) {
              const auto& [descriptor, start, dtype] = *embedding;
              rows = FileRows{descriptor, start, as_dtype(dtype)};
            }
            const TensorRef norm = as_tensor(std::move(final_norm));
            const WeightRef last = as_weights(head);
            const py::gil_scoped_release unlocked;
            decoder.set_ends(rows, norm, last);
          },
          py::arg("embedding"), py::arg("final_norm"), py::arg("head"))
      .def_property_readonly("weight_bytes", &CpuDecoder::weight_bytes)
      .def_property_readonly("row_weight_bytes", &CpuDecoder::row_weight_bytes)
      .def_property_readonly("expert_reads", &CpuDecoder::expert_reads)
      .def_property_readonly("expert_rows", &CpuDecoder::expert_rows)
      .def_property_readonly("delta_seconds", &CpuDecoder::delta_seconds)
      .def_property_readonly("row_type", &CpuDecoder::row_type)
      .def_property_readonly("vocab_size", &CpuDecoder::vocab_size)
      .def_property("num_threads", &CpuDecoder::num_threads, &CpuDecoder::set_num_threads)
      .def_property_readonly("num_positions", &CpuDecoder::num_positions)
      .def(
          "set_rotations",
          [](CpuDecoder& decoder, std::vector<std::pair<TensorTuple, TensorTuple>> tables) {
            std::vector<Rotations> rotations;
            for (auto& [cos, sin] : tables) {
              rotations.push_back({as_tensor(std::move(cos)), as_tensor(std::move(sin))});
            }
            decoder.set_rotations(rotations);
          },
          py::arg("tables"))
      .def("forward", &forward, py::arg("token_ids"), py::arg("batches"), py::arg("wanted"),
           py::arg("num_hidden") = 0, py::arg("embedded") = std::nullopt);
}

}  // namespace vmserve
