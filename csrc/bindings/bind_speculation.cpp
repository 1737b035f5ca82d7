#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../speculation/prompt_lookup.h"
#include "bindings.h"
#include "vmserve/errors.h"

namespace py = pybind11;

namespace vmserve {
namespace {

using speculation::Match;
using speculation::PromptLookup;
using speculation::Token;

Token token_at(const py::list& tokens, std::size_t index) {
  return py::cast<Token>(py::handle(PyList_GET_ITEM(tokens.ptr(), static_cast<Py_ssize_t>(index))));
}

// An index for each sequence, by a number that the caller gives it.
class PromptLookups {
 public:
  PromptLookups(std::int64_t most_visited, std::int64_t longest)
      : most_visited_(most_visited), longest_(longest) {
    if (most_visited < 1 || longest < 2)
      throw MisuseError("a search visits and compares something");
  }

  void open(std::int64_t number, const std::vector<Token>& before) {
    Entry entry{PromptLookup(most_visited_, longest_), 0};
    for (const Token token : before) entry.lookup.append(token);
    if (!before.empty()) entry.lookup.append(-1);
    entry.num_before = entry.lookup.size();
    if (!entries_.emplace(number, std::move(entry)).second) {
      throw MisuseError("sequence " + std::to_string(number) + " is open already");
    }
  }

  // Appends what is new of each token list; returns the lengths of the matches and the drafts.
  std::pair<std::vector<std::int64_t>, std::vector<std::vector<Token>>> propose(
      const std::vector<std::int64_t>& numbers, const py::list& token_lists,
      const std::vector<std::int64_t>& limits) {
    if (token_lists.size() != numbers.size() || limits.size() != numbers.size()) {
      throw MisuseError("a token list and a limit for each number");
    }
    std::vector<std::int64_t> lengths(numbers.size());
    std::vector<std::vector<Token>> drafts(numbers.size());
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      Entry& entry = entry_of(numbers[i]);
      PromptLookup& lookup = entry.lookup;
      const auto tokens = py::cast<py::list>(token_lists[i]);
      const std::size_t num_before = static_cast<std::size_t>(entry.num_before);
      for (std::size_t at = static_cast<std::size_t>(lookup.size()) - num_before;
           at < tokens.size(); ++at) {
        lookup.append(token_at(tokens, at));
      }
      const Match match = lookup.find();
      lengths[i] = match.length;
      if (match.length > 0) drafts[i] = lookup.continuation(match, limits[i]);
    }
    return {std::move(lengths), std::move(drafts)};
  }

  void close(std::int64_t number) { entries_.erase(number); }

  std::size_t num_bytes() const {
    std::size_t sum = 0;
    for (const auto& [number, entry] : entries_) sum += entry.lookup.num_bytes();
    return sum;
  }

  std::size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    PromptLookup lookup;
    std::int64_t num_before;
  };

  Entry& entry_of(std::int64_t number) {
    const auto found = entries_.find(number);
    if (found == entries_.end()) {
      throw MisuseError("sequence " + std::to_string(number) + " is not open");
    }
    return found->second;
  }

  std::int64_t most_visited_, longest_;
  std::unordered_map<std::int64_t, Entry> entries_;
};

}  // namespace

void bind_speculation(py::module_& m) {
  py::class_<PromptLookups>(m, "PromptLookups")
      .def(py::init<std::int64_t, std::int64_t>(), py::arg("most_visited"), py::arg("longest"))
      .def("open", &PromptLookups::open, py::arg("number"), py::arg("before"))
      .def("propose", &PromptLookups::propose, py::arg("numbers"), py::arg("token_lists"),
           py::arg("limits"))
      .def("close", &PromptLookups::close, py::arg("number"))
      .def("__len__", &PromptLookups::size)
      .def_property_readonly("num_bytes", &PromptLookups::num_bytes);
}

}  // namespace vmserve
