#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "../cpu/kernels/isa.h"
#include "../cpu/kernels/kernels.h"
#include "../cpu/sampling/row_sampler.h"
#include "bindings.h"
#include "tensor_tuple.h"

namespace py = pybind11;

namespace vmserve {
namespace {

using Token = std::int32_t;
using Tokens = TokenIds;

// An attribute name, interned once.
class Attribute {
 public:
  explicit Attribute(const char* name)
      : name_(py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name))) {}

  py::object of(py::handle object) const {
    auto value = py::reinterpret_steal<py::object>(PyObject_GetAttr(object.ptr(), name_.ptr()));
    if (!value) throw py::error_already_set();
    return value;
  }

  PyObject* name() const { return name_.ptr(); }

 private:
  py::object name_;
};

double as_double(const py::object& value) {
  const double number = PyFloat_AsDouble(value.ptr());
  if (number == -1.0 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return number;
}

std::int64_t as_int(py::handle value) {
  const long long number = PyLong_AsLongLong(value.ptr());
  if (number == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return number;
}

// Ids that do not fit in 32 bits become -1, which is refused as out of vocabulary later.
Token as_token(py::handle value) {
  const std::int64_t number = as_int(value);
  return number == static_cast<Token>(number) ? static_cast<Token>(number) : -1;
}

std::int64_t size_of(const py::object& sequence) {
  const Py_ssize_t size = PyObject_Size(sequence.ptr());
  if (size < 0) throw py::error_already_set();
  return size;
}

// Items of a list, a tuple or any iterable.
Tokens as_tokens(const py::object& items) {
  const auto fast =
      py::reinterpret_steal<py::object>(PySequence_Fast(items.ptr(), "token ids are a sequence"));
  if (!fast) throw py::error_already_set();
  Tokens tokens(static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast.ptr())));
  PyObject** const at = PySequence_Fast_ITEMS(fast.ptr());
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = as_token(at[i]);
  return tokens;
}

// Lists that all rows of a request share, because a client chooses their length.
struct RequestLists {
  std::shared_ptr<const FixedChanges> changes;
  std::shared_ptr<const Tokens> listed;
  std::vector<Tokens> bad_words;
  Tokens stop_ids;
};

// A row's values for all its steps; the row keeps them.
struct RowTerms {
  py::object tokens;  // the list that grows
  std::int64_t num_prompt = 0, min_tokens = 0;
  double temperature = 0.0;
  RowRequest request;  // without temperature, position and changes
  py::object owner;    // keeps `lists` alive
  const RequestLists* lists = nullptr;
};

// A row's prompt and output tokens in a step; drafted ones are the end of the output.
struct Known {
  const RowTerms& terms;
  py::object drafted;
  std::int64_t size, num_drafted;

  std::int64_t num_output() const { return size - terms.num_prompt + num_drafted; }
  Tokens prompt() const { return slice(0, terms.num_prompt); }
  Tokens output() const {
    Tokens result = slice(terms.num_prompt, size);
    if (num_drafted > 0) {
      const Tokens rest = as_tokens(drafted);
      result.insert(result.end(), rest.begin(), rest.end());
    }
    return result;
  }

 private:
  Tokens slice(std::int64_t begin, std::int64_t end) const {
    return as_tokens(py::reinterpret_steal<py::object>(PySequence_GetSlice(
        terms.tokens.ptr(), static_cast<py::ssize_t>(begin), static_cast<py::ssize_t>(end))));
  }
};

// Reads vmserve.sampling.tokens.SamplingRow attribute by attribute, at a tenth of the cost of
// packing rows in Python; the sampler runs every step. Values that no step changes are read once.
class RowReader {
 public:
  RowReader(double greedy_below, std::int64_t vocab) : greedy_below_(greedy_below), vocab_(vocab) {}

  // `masks` keeps the arrays alive that the request points to.
  RowRequest read(py::handle row, std::vector<py::object>& masks) const {
    const RowTerms& terms = terms_of(row);
    const Known known = read_known(row, terms);
    RowRequest request = terms.request;
    request.position = static_cast<std::uint64_t>(known.num_output());
    request.temperature =
        terms.temperature < greedy_below_ ? 0.0F : static_cast<float>(terms.temperature);
    if (request.num_likeliest == kAll) request.num_likeliest = vocab_;
    add_changes(row, known, request, masks);
    return request;
  }

 private:
  static constexpr const char* kTerms = "vmserve.RowTerms";
  static constexpr const char* kLists = "vmserve.RequestLists";
  static constexpr std::int64_t kAll = -2;  // num_likeliest: the whole vocabulary

  // Returns the T in `kept.core`; makes it with `make` if there is none yet.
  template <typename T, typename Make>
  const T& kept_in(const py::object& kept, const char* name, const Make& make) const {
    py::object known = core_.of(kept);
    if (known.is_none()) {
      auto made = std::make_unique<T>();
      make(*made);
      known = py::capsule(made.get(), name, [](PyObject* capsule) {
        delete static_cast<T*>(PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule)));
      });
      made.release();
      if (PyObject_SetAttr(kept.ptr(), core_.name(), known.ptr()) != 0) {
        throw py::error_already_set();
      }
    }
    const void* const pointer = PyCapsule_GetPointer(known.ptr(), name);
    if (pointer == nullptr) throw py::error_already_set();
    return *static_cast<const T*>(pointer);
  }

  const RowTerms& terms_of(py::handle row) const {
    return kept_in<RowTerms>(kept_.of(row), kTerms,
                             [&](RowTerms& terms) { read_terms(row, terms); });
  }

  void read_terms(py::handle row, RowTerms& terms) const {
    const py::object params = params_.of(row);
    terms.tokens = tokens_.of(row);
    terms.num_prompt = as_int(num_prompt_.of(row));
    terms.min_tokens = as_int(min_tokens_.of(params));
    terms.temperature = as_double(temperature_.of(params));
    RowRequest& request = terms.request;
    request.seed = static_cast<std::uint64_t>(PyLong_AsUnsignedLongLongMask(seed_.of(row).ptr()));
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    request.index = static_cast<std::uint64_t>(as_int(index_.of(row)));
    request.top_k = as_int(top_k_.of(params));
    request.top_p = as_double(top_p_.of(params));
    request.min_p = as_double(min_p_.of(params));
    const py::object num = logprobs_.of(params);
    if (!num.is_none()) {
      request.num_likeliest = as_int(num);
      if (request.num_likeliest < 0) request.num_likeliest = kAll;
    }
    terms.owner = shared_.of(row);
    terms.lists = &kept_in<RequestLists>(
        terms.owner, kLists, [&](RequestLists& lists) { read_lists(row, params, lists); });
    if (!num.is_none()) request.listed = terms.lists->listed;
  }

  void read_lists(py::handle row, const py::object& params, RequestLists& lists) const {
    auto changes = std::make_shared<FixedChanges>();
    const py::object bias = bias_.of(params), allowed = allowed_.of(params);
    if (!bias.is_none()) {
      for (const auto& [id, value] : py::cast<py::dict>(bias)) {
        const auto amount = py::reinterpret_borrow<py::object>(value);
        changes->bias.emplace_back(as_token(id), static_cast<float>(as_double(amount)));
        check_ids({changes->bias.back().first}, vocab_);
      }
    }
    if (!allowed.is_none()) changes->allowed = as_tokens(allowed);
    check_ids(changes->allowed, vocab_);
    changes->repetition = static_cast<float>(as_double(repetition_.of(params)));
    changes->presence = as_double(presence_.of(params));
    changes->frequency = as_double(frequency_.of(params));
    lists.changes = std::move(changes);
    const py::object listed = listed_.of(params);
    if (!listed.is_none()) {
      lists.listed = std::make_shared<const Tokens>(as_tokens(listed));
      check_ids(*lists.listed, vocab_);
    }
    for (const py::handle word : bad_words_.of(params)) {
      lists.bad_words.push_back(as_tokens(py::reinterpret_borrow<py::object>(word)));
    }
    lists.stop_ids = as_tokens(stop_ids_.of(row));
  }

  Known read_known(py::handle row, const RowTerms& terms) const {
    py::object drafted = drafted_.of(row);
    const std::int64_t size = size_of(terms.tokens), num_drafted = size_of(drafted);
    if (terms.num_prompt < 0 || terms.num_prompt > size) {
      throw MisuseError("a row of " + std::to_string(size) + " tokens has no prompt of " +
                        std::to_string(terms.num_prompt));
    }
    return {terms, std::move(drafted), size, num_drafted};
  }

  void add_changes(py::handle row, const Known& known, RowRequest& request,
                   std::vector<py::object>& masks) const {
    const RowTerms& terms = known.terms;
    const FixedChanges& given = *terms.lists->changes;
    const py::object mask = mask_.of(row);
    const bool repeats = given.repetition != 1.0F;
    const bool counts = given.presence != 0.0 || given.frequency != 0.0;
    Tokens banned = banned_now(known);
    if (!repeats && !counts && given.bias.empty() && given.allowed.empty() && banned.empty() &&
        mask.is_none()) {
      return;
    }
    LogitChanges changes;
    changes.fixed = terms.lists->changes;
    changes.banned = std::move(banned);
    if (repeats) changes.prompt = known.prompt();
    if (repeats || counts) changes.output = known.output();
    if (!mask.is_none()) {
      auto array = py::cast<py::array_t<bool, py::array::c_style | py::array::forcecast>>(mask);
      if (array.ndim() != 1 || array.shape(0) != vocab_) {
        throw MisuseError("a mask is of the vocabulary: [" + std::to_string(vocab_) + "]");
      }
      changes.mask = array.data();
      masks.push_back(std::move(array));
    }
    request.changes = std::move(changes);
  }

  // The last tokens of bad words that the output is about to complete, and the stop ids that
  // min_tokens holds back. The tokenizer may have ids that the model lacks.
  Tokens banned_now(const Known& known) const {
    Tokens banned;
    const RowTerms& terms = known.terms;
    if (!terms.lists->bad_words.empty()) {
      const Tokens said = known.output();
      for (const Tokens& word : terms.lists->bad_words) {
        if (word.empty() || word.size() - 1 > said.size()) continue;
        const auto rest = static_cast<std::ptrdiff_t>(word.size()) - 1;
        if (std::equal(word.begin(), word.begin() + rest, said.end() - rest)) {
          add_known(word.back(), banned);
        }
      }
    }
    if (known.num_output() < terms.min_tokens) {
      for (const Token id : terms.lists->stop_ids) add_known(id, banned);
    }
    return banned;
  }

  void add_known(Token id, Tokens& ids) const {
    if (id >= 0 && id < vocab_) ids.push_back(id);
  }

  double greedy_below_;
  std::int64_t vocab_;
  Attribute params_{"params"}, seed_{"seed"}, index_{"index"}, tokens_{"tokens"},
      num_prompt_{"num_prompt"}, drafted_{"drafted"}, stop_ids_{"stop_ids"},
      bad_words_{"bad_words"}, mask_{"mask"}, kept_{"kept"}, shared_{"shared"}, core_{"core"};
  Attribute temperature_{"temperature"}, top_k_{"top_k"}, top_p_{"top_p"}, min_p_{"min_p"},
      logprobs_{"logprobs"}, listed_{"logprob_token_ids"}, bias_{"logit_bias"},
      allowed_{"allowed_token_ids"}, min_tokens_{"min_tokens"}, repetition_{"repetition_penalty"},
      presence_{"presence_penalty"}, frequency_{"frequency_penalty"};
};

py::object as_top(const RowResult& result) {
  if (result.ranked.empty()) return py::none();
  py::dict top;
  for (const RankedToken& token : result.ranked) {
    top[py::int_(token.id)] = py::make_tuple(token.logprob, token.rank);
  }
  return std::move(top);
}

// Returns (tokens, log-probabilities, ranked tokens of each row or None, number of repaired rows).
py::tuple as_tuple(const std::vector<RowResult>& results) {
  const auto num = static_cast<py::ssize_t>(results.size());
  py::list tokens(num), logprobs(num), tops(num);
  std::int64_t num_repaired = 0;
  for (py::ssize_t i = 0; i < num; ++i) {
    const RowResult& result = results[static_cast<std::size_t>(i)];
    tokens[i] = py::int_(result.token);
    logprobs[i] = py::float_(result.logprob);
    tops[i] = as_top(result);
    num_repaired += result.was_repaired ? 1 : 0;
  }
  return py::make_tuple(tokens, logprobs, tops, num_repaired);
}

// Arrays on the host, or tensors of torch.
using Logits = std::variant<Floats, TensorTuple>;

TensorRef tensor_of(const Logits& logits) {
  if (const auto* tuple = std::get_if<TensorTuple>(&logits)) return as_tensor(TensorTuple(*tuple));
  const Floats& array = std::get<Floats>(logits);
  TensorRef tensor;
  tensor.data = reinterpret_cast<char*>(const_cast<float*>(array.data()));  // it is only read
  tensor.dtype = DType::kFloat32;
  tensor.shape.assign(array.shape(), array.shape() + array.ndim());
  tensor.strides = {array.ndim() == 2 ? array.shape(1) : 1, 1};
  return tensor;
}

class PyRowSampler {
 public:
  PyRowSampler(std::int64_t vocab, double greedy_below, int num_threads, const std::string& isa)
      : sampler_(vocab, num_threads, isa), reader_(greedy_below, vocab) {}

  py::tuple sample(const Logits& logits, const py::sequence& rows) {
    std::vector<RowRequest> requests;
    std::vector<py::object> masks;
    requests.reserve(rows.size());
    for (const py::handle row : rows) requests.push_back(reader_.read(row, masks));
    return run(logits, requests);
  }

  py::tuple score(const Logits& logits, const Tokens& targets, std::int64_t num_likeliest) {
    std::vector<RowRequest> requests(targets.size());
    for (std::size_t i = 0; i < targets.size(); ++i) {
      requests[i].given = targets[i];
      requests[i].num_likeliest = num_likeliest < 0 ? sampler_.vocab() : num_likeliest;
    }
    return run(logits, requests);
  }

  int num_threads() const { return sampler_.num_threads(); }
  void set_num_threads(int num_threads) { sampler_.set_num_threads(num_threads); }

 private:
  py::tuple run(const Logits& logits, const std::vector<RowRequest>& requests) {
    const TensorRef tensor = tensor_of(logits);
    std::vector<RowResult> results;
    {
      const py::gil_scoped_release unlocked;
      sampler_.run(tensor, requests, results);
    }
    return as_tuple(results);
  }

  RowSampler sampler_;
  RowReader reader_;
};

// Applies RowKernels::weights, for tests.
py::array_t<float> row_weights(const py::array_t<float, py::array::c_style>& values,
                               float temperature, float shift, const std::string& isa) {
  py::array_t<float> out(values.size());
  cpu::choose_table(isa).rows.weights(values.data(), values.size(), temperature, shift,
                                      out.mutable_data());
  return out;
}

}  // namespace

void bind_sampler(py::module_& m) {
  m.def("row_weights", &row_weights, py::arg("values"), py::arg("temperature"), py::arg("shift"),
        py::arg("isa") = "");
  m.def("uniform_of", &uniform_of, py::arg("seed"), py::arg("index"), py::arg("position"));
  py::class_<PyRowSampler>(m, "RowSampler")
      .def(py::init<std::int64_t, double, int, const std::string&>(), py::arg("vocab_size"),
           py::arg("greedy_below"), py::arg("num_threads") = 1, py::arg("isa") = "")
      .def_property("num_threads", &PyRowSampler::num_threads, &PyRowSampler::set_num_threads)
      .def("sample", &PyRowSampler::sample, py::arg("logits"), py::arg("rows"))
      .def("score", &PyRowSampler::score, py::arg("logits"), py::arg("targets"),
           py::arg("num_likeliest"));
}

}  // namespace vmserve
