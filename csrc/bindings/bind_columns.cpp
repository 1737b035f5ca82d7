#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>

#include "bindings.h"
#include "vmserve/errors.h"

namespace py = pybind11;

namespace vmserve {
namespace {

// An int as it is, a list's length, -1 for None.
std::int64_t as_number(const py::handle value, const py::handle name) {
  if (PyLong_Check(value.ptr())) {
    const long long number = PyLong_AsLongLong(value.ptr());
    if (number == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return number;
  }
  if (PyList_Check(value.ptr())) return PyList_GET_SIZE(value.ptr());
  if (value.is_none()) return -1;
  throw py::type_error(py::cast<std::string>(name) + " is neither an int nor a list nor None");
}

// Row i has the attribute `names[i]` of every object: int64 [names, objects]. Object by object, so
// that each comes into the processor's caches once.
py::array_t<std::int64_t> columns(const py::list& objects, const py::tuple& names) {
  py::array_t<std::int64_t> array({names.size(), objects.size()});
  auto cells = array.mutable_unchecked<2>();
  for (py::ssize_t column = 0; column < cells.shape(1); ++column) {
    const auto object = py::reinterpret_borrow<py::object>(
        PyList_GetItem(objects.ptr(), column));  // the list may be changed by an attribute's code
    if (!object) throw py::error_already_set();
    for (py::ssize_t row = 0; row < cells.shape(0); ++row) {
      const py::handle name = PyTuple_GET_ITEM(names.ptr(), row);
      const auto value =
          py::reinterpret_steal<py::object>(PyObject_GetAttr(object.ptr(), name.ptr()));
      if (!value) throw py::error_already_set();
      cells(row, column) = as_number(value, name);
    }
  }
  return array;
}

}  // namespace

void bind_columns(py::module_& m) {
  m.def("columns", &columns, py::arg("objects"), py::arg("names"),
        "Attributes of many objects at once.");
}

}  // namespace vmserve
