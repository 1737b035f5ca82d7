#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "bindings.h"
#include "tensor_tuple.h"
#include "vmserve/errors.h"

namespace py = pybind11;

namespace vmserve {
namespace {

// An int, or -1 for None.
std::int64_t as_number(const py::handle value, PyObject* name) {
  if (PyLong_Check(value.ptr())) {
    const long long number = PyLong_AsLongLong(value.ptr());
    if (number == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return number;
  }
  if (value.is_none()) return -1;
  throw py::type_error(py::cast<std::string>(name) + " is neither an int nor None");
}

py::array_t<std::int64_t> as_array(const std::vector<std::int64_t>& numbers) {
  return py::array_t<std::int64_t>(static_cast<py::ssize_t>(numbers.size()), numbers.data());
}

// Names of a sequence's attributes.
struct Names {
  PyObject* memory_id = PyUnicode_InternFromString("memory_id");
  PyObject* num_computed = PyUnicode_InternFromString("num_computed");
  PyObject* num_prompt = PyUnicode_InternFromString("num_prompt");
  PyObject* num_published = PyUnicode_InternFromString("num_published");
  PyObject* tokens = PyUnicode_InternFromString("tokens");
  PyObject* start = PyUnicode_InternFromString("start");
};

const Names& names() {
  static const Names* const kept = new Names();  // leaked: statics may outlive the interpreter
  return *kept;
}

py::object attribute(const py::handle object, PyObject* name) {
  auto value = py::reinterpret_steal<py::object>(PyObject_GetAttr(object.ptr(), name));
  if (!value) throw py::error_already_set();
  return value;
}

std::int64_t number(const py::handle object, PyObject* name) {
  return as_number(attribute(object, name), name);
}

py::list token_list(const py::handle sequence) {
  py::object tokens = attribute(sequence, names().tokens);
  if (PyList_Check(tokens.ptr()) == 0) throw py::type_error("a sequence's tokens are a list");
  return py::reinterpret_steal<py::list>(tokens.release());
}

py::object item(const py::list& list, py::ssize_t place) {
  auto value = py::reinterpret_borrow<py::object>(PyList_GetItem(list.ptr(), place));
  if (!value) throw py::error_already_set();
  return value;
}

std::int64_t token_at(const py::list& tokens, py::ssize_t place) {
  return as_number(item(tokens, place), names().tokens);
}

// Rows of a step's table; `vmserve.scheduler.base.Columns` documents them.
enum Row : py::ssize_t { kMemoryId, kComputed, kPrompt, kKnown, kLast, kNew, kNumRows };

// Collects what a step needs to know about its sequences, in one pass. `num_new`: tokens of each
// sequence, or None for one token each. `window`: the most positions any layer attends to, 0 for
// all. Returns the table int64 [rows, sequences], growths int64 [sequences, 3] and three flags. The
// flags: every sequence computes all its known tokens; every sequence computes one token after its
// prompt; a sequence starts in this step.
py::tuple step_columns(const py::list& sequences, const std::optional<py::list>& num_new,
                       std::int64_t window) {
  const auto num = static_cast<py::ssize_t>(sequences.size());
  if (num_new && static_cast<py::ssize_t>(num_new->size()) != num) {
    throw py::value_error("there is not one share for each sequence");
  }
  py::array_t<std::int64_t> table({static_cast<py::ssize_t>(kNumRows), num});
  py::array_t<std::int64_t> growths({num, py::ssize_t{3}});
  auto cells = table.mutable_unchecked<2>();
  auto grown = growths.mutable_unchecked<2>();
  bool takes_last = true, only_decodes = true, starts = false;
  for (py::ssize_t i = 0; i < num; ++i) {
    const py::object sequence = item(sequences, i);
    const py::list tokens = token_list(sequence);
    const std::int64_t memory_id = number(sequence, names().memory_id);
    const std::int64_t computed = number(sequence, names().num_computed);
    const std::int64_t prompt = number(sequence, names().num_prompt);
    const auto known = static_cast<std::int64_t>(tokens.size());
    const std::int64_t share = num_new ? as_number(item(*num_new, i), names().tokens) : 1;
    cells(kMemoryId, i) = memory_id;
    cells(kComputed, i) = computed;
    cells(kPrompt, i) = prompt;
    cells(kKnown, i) = known;
    cells(kLast, i) = known > 0 ? token_at(tokens, known - 1) : 0;
    cells(kNew, i) = share;
    grown(i, 0) = memory_id;
    grown(i, 1) = computed + share;
    grown(i, 2) = window > 0 ? std::max<std::int64_t>(0, computed - window + 1) : 0;
    takes_last = takes_last && computed + share == known;
    only_decodes = only_decodes && share == 1 && computed >= prompt;
    starts = starts || !attribute(sequence, names().start).is_none();
  }
  return py::make_tuple(table, growths, takes_last, takes_last && only_decodes, starts);
}

// Tokens of sequences that the KV memory has not been given yet: two arrays int64 [tokens], memory
// ids and token ids. Counts them as published. `memory_ids[i]`: sequence i's id at launch; if it
// has changed, the sequence has ended.
py::tuple take_unpublished(const py::list& sequences, const IntArray& memory_ids) {
  if (memory_ids.size() != static_cast<py::ssize_t>(sequences.size())) {
    throw py::value_error("there is not one id for each sequence");
  }
  std::vector<std::int64_t> owners, tokens;
  owners.reserve(sequences.size());
  tokens.reserve(sequences.size());
  for (py::ssize_t i = 0; i < memory_ids.size(); ++i) {
    const py::object sequence = item(sequences, i);
    const std::int64_t memory_id = memory_ids.data()[i];
    if (number(sequence, names().memory_id) != memory_id) continue;
    const py::list known = token_list(sequence);
    const auto num_known = static_cast<py::ssize_t>(known.size());
    const std::int64_t num_published = number(sequence, names().num_published);
    if (num_published == num_known) continue;
    for (py::ssize_t place = num_published; place < num_known; ++place) {
      owners.push_back(memory_id);
      tokens.push_back(token_at(known, place));
    }
    if (PyObject_SetAttr(sequence.ptr(), names().num_published, py::int_(num_known).ptr()) != 0) {
      throw py::error_already_set();
    }
  }
  return py::make_tuple(as_array(owners), as_array(tokens));
}

// The garbage collector need not visit numbers one by one: they are part of no cycle. Pre: the list
// never gets other objects.
void untrack(const py::list& tokens) {
  PyObject_GC_UnTrack(tokens.ptr());
}

}  // namespace

void bind_columns(py::module_& m) {
  m.def("untrack", &untrack, py::arg("tokens"));
  m.def("step_columns", &step_columns, py::arg("sequences"), py::arg("num_new") = py::none(),
        py::arg("window") = 0, "What a step needs to know of its sequences.");
  m.def("take_unpublished", &take_unpublished, py::arg("sequences"), py::arg("memory_ids"),
        "Tokens that became known since the last call.");
}

}  // namespace vmserve
