#include <pybind11/pybind11.h>

#include "bindings.h"
#include "vmserve/errors.h"

namespace py = pybind11;

namespace vmserve {
namespace {

py::object error_class(const char* name) {
  return py::module_::import("vmserve.errors").attr(name);
}

// `completed`: number of executed runs of a batched driver call.
void raise(const py::object& type, const py::object& raised, const Error& error) {
  raised.attr("completed") = error.completed;
  PyErr_SetObject(type.ptr(), raised.ptr());
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const DriverError& error) {
    const py::object type = error_class("DriverError");
    const py::object raised = type(error.code, error.what());
    raised.attr("sticky") = error.sticky;
    raise(type, raised, error);
  } catch (const OutOfMemoryError& error) {
    const py::object type = error_class("OutOfMemoryError");
    raise(type, type(error.what()), error);
  } catch (const MisuseError& error) {
    const auto type = py::reinterpret_borrow<py::object>(PyExc_ValueError);
    raise(type, type(error.what()), error);
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
  m.doc() = "The C++ core of vmserve: page drivers, KV memory and CPU kernels.";
  vmserve::bind_errors(m);
  vmserve::bind_driver(m);
  vmserve::bind_cuda(m);
  vmserve::bind_plugin(m);
  vmserve::bind_remote(m);
  vmserve::bind_store(m);
  vmserve::bind_memory(m);
  vmserve::bind_kernels(m);
  vmserve::bind_linear(m);
  vmserve::bind_decoder(m);
  vmserve::bind_sampler(m);
  vmserve::bind_speculation(m);
  vmserve::bind_columns(m);
}
