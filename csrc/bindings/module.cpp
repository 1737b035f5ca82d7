#include <pybind11/pybind11.h>

#include "bindings.h"
#include "vmserve/errors.h"

namespace py = pybind11;

namespace vmserve {
namespace {

py::object error_class(const char* name) {
  return py::module_::import("vmserve.errors").attr(name);
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const DriverError& error) {
    const py::object type = error_class("DriverError");
    const py::object raised = type(error.code, error.what());
    raised.attr("sticky") = error.sticky;
    raised.attr("completed") = error.completed;
    PyErr_SetObject(type.ptr(), raised.ptr());
  } catch (const OutOfMemoryError& error) {
    py::set_error(error_class("OutOfMemoryError"), error.what());
  } catch (const MisuseError& error) {
    py::set_error(PyExc_ValueError, error.what());
  } catch (const InvariantError& error) {
    py::set_error(PyExc_AssertionError, error.what());
  }
}

}  // namespace

void bind_errors(py::module_&) {
  py::register_local_exception_translator(&translate);
}

}  // namespace vmserve

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C++ core of vmserve: page drivers and KV memory.";
  vmserve::bind_errors(m);
  vmserve::bind_driver(m);
  vmserve::bind_cuda(m);
  vmserve::bind_memory(m);
}
