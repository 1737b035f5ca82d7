#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <utility>
#include <vector>

#include "../speculation/prompt_drafter.h"
#include "bindings.h"
#include "vmserve/errors.h"

namespace py = pybind11;

namespace vmserve {
namespace {

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

}  // namespace

void bind_speculation(py::module_& m) {
  py::class_<PromptDrafter>(m, "PromptDrafter")
      .def(py::init([](std::vector<std::int64_t> match_bounds, std::vector<double> usual_rates,
                       double prior_weight, double most_weight, std::int64_t most_drafted,
                       bool is_priced, double least_rate, double margin, double earned,
                       double most_credit, std::int64_t most_visited, std::int64_t longest) {
             if (usual_rates.size() != match_bounds.size() + 1) {
               throw MisuseError("a usual rate on each side of each bound");
             }
             PolicyNumbers numbers{std::move(match_bounds),
                                   std::move(usual_rates),
                                   prior_weight,
                                   most_weight,
                                   most_drafted,
                                   is_priced,
                                   least_rate,
                                   margin,
                                   earned,
                                   most_credit};
             return std::make_unique<PromptDrafter>(std::move(numbers), most_visited, longest);
           }),
           py::kw_only(), py::arg("match_bounds"), py::arg("usual_rates"), py::arg("prior_weight"),
           py::arg("most_weight"), py::arg("most_drafted"), py::arg("is_priced"),
           py::arg("least_rate"), py::arg("margin"), py::arg("earned"), py::arg("most_credit"),
           py::arg("most_visited"), py::arg("longest"))
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
