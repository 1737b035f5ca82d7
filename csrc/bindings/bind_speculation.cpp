#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "../speculation/draft_lengths.h"
#include "../speculation/prompt_drafter.h"
#include "bindings.h"
#include "vmserve/errors.h"

namespace py = pybind11;

namespace vmserve {
namespace {

using speculation::DraftLengths;
using speculation::PolicyNumbers;
using speculation::PromptDrafter;
using speculation::Token;

Token token_at(const py::list& tokens, std::int64_t index) {
  return py::cast<Token>(py::handle(PyList_GET_ITEM(tokens.ptr(), static_cast<Py_ssize_t>(index))));
}

// A sequence whose number is negative gets no draft. None: no sequence gets one.
py::object propose(PromptDrafter& drafter, const std::vector<std::int64_t>& numbers,
                   const std::vector<py::list>& token_lists, std::int64_t num_prompt_rows) {
  if (token_lists.size() != numbers.size()) throw MisuseError("a token list for each number");
  std::int64_t num_tokens = 0;
  for (const py::list& tokens : token_lists) num_tokens += static_cast<std::int64_t>(tokens.size());
  const auto num_decoding = static_cast<std::int64_t>(numbers.size());
  if (!drafter.begin(num_decoding, num_prompt_rows, num_tokens)) return py::none();
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] < 0) continue;
    const py::list& tokens = token_lists[i];
    drafter.add(numbers[i], static_cast<std::int64_t>(tokens.size()),
                [&](std::int64_t at) { return token_at(tokens, at); });
  }
  const std::vector<std::vector<Token>> chosen = drafter.choose();
  if (chosen.empty()) return py::none();
  std::vector<std::vector<Token>> drafts(numbers.size());
  for (std::size_t i = 0, at = 0; i < numbers.size(); ++i) {
    if (numbers[i] >= 0) drafts[i] = chosen[at++];
  }
  return py::cast(std::move(drafts));
}

// The attributes of vmserve.speculation.policy.DraftPolicy.
PolicyNumbers numbers_of(const py::handle policy) {
  const auto number = [&](const char* name) { return policy.attr(name).cast<double>(); };
  PolicyNumbers numbers{policy.attr("match_bounds").cast<std::vector<std::int64_t>>(),
                        policy.attr("usual_rates").cast<std::vector<double>>(),
                        number("prior_weight"),
                        number("most_weight"),
                        policy.attr("most_drafted").cast<std::int64_t>(),
                        policy.attr("is_priced").cast<bool>(),
                        number("least_rate"),
                        number("margin"),
                        number("earned"),
                        number("most_credit"),
                        number("round_share")};
  if (numbers.usual_rates.size() != numbers.match_bounds.size() + 1) {
    throw MisuseError("a usual rate on each side of each bound");
  }
  return numbers;
}

std::vector<std::int64_t> choose(DraftLengths& lengths,
                                 const std::vector<std::array<std::int64_t, 5>>& sequences,
                                 std::int64_t num_prompt_rows) {
  std::vector<DraftLengths::Decoding> decoding;
  decoding.reserve(sequences.size());
  for (const auto& [number, size, num_unread, most, left] : sequences) {
    decoding.push_back({number, size, num_unread, most, left});
  }
  return lengths.choose(decoding, num_prompt_rows);
}

}  // namespace

void bind_speculation(py::module_& m) {
  py::class_<DraftLengths>(m, "DraftLengths")
      .def(py::init([](const py::object& policy) {
             return std::make_unique<DraftLengths>(numbers_of(policy));
           }),
           py::arg("policy"))
      .def("open", &DraftLengths::open, py::arg("number"))
      .def("close", &DraftLengths::close, py::arg("number"))
      .def("choose", &choose, py::arg("sequences"), py::arg("num_prompt_rows"))
      .def("ran", &DraftLengths::ran, py::arg("num_rows"), py::arg("num_sequences"),
           py::arg("seconds"))
      .def("accepted", &DraftLengths::accepted, py::arg("number"), py::arg("num_drafted"),
           py::arg("num_accepted"))
      .def("learn", &DraftLengths::learn, py::arg("seconds"), py::arg("attention"))
      .def("may_pay", &DraftLengths::may_pay, py::arg("num_decoding"))
      .def_property_readonly("credit", [](const DraftLengths& d) { return d.policy().credit(); });
  py::class_<PromptDrafter>(m, "PromptDrafter")
      .def(py::init([](const py::object& policy) {
             return std::make_unique<PromptDrafter>(
                 numbers_of(policy), policy.attr("most_visited").cast<std::int64_t>(),
                 policy.attr("longest").cast<std::int64_t>());
           }),
           py::arg("policy"))
      .def("open", &PromptDrafter::open, py::arg("number"), py::arg("before"),
           py::arg("num_prompt"), py::arg("most_tokens"))
      .def("close", &PromptDrafter::close, py::arg("number"))
      .def("propose", &propose, py::arg("numbers"), py::arg("token_lists"),
           py::arg("num_prompt_rows"))
      .def("accepted", &PromptDrafter::accepted, py::arg("number"), py::arg("num_drafted"),
           py::arg("num_accepted"))
      .def("learn", &PromptDrafter::learn, py::arg("seconds"), py::arg("attention"))
      .def("may_pay", &PromptDrafter::may_pay, py::arg("num_decoding"))
      .def("__len__", &PromptDrafter::size)
      .def_property_readonly("num_bytes", &PromptDrafter::num_bytes)
      .def_property_readonly("credit", [](const PromptDrafter& d) { return d.policy().credit(); });
}

}  // namespace vmserve
