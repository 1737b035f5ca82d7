// Parts of the Python extension module `vmserve._core`.
#pragma once

#include <pybind11/pybind11.h>

namespace vmserve {

void bind_errors(pybind11::module_& m);
void bind_driver(pybind11::module_& m);
void bind_cuda(pybind11::module_& m);
void bind_plugin(pybind11::module_& m);
void bind_remote(pybind11::module_& m);
void bind_memory(pybind11::module_& m);
void bind_kernels(pybind11::module_& m);
void bind_columns(pybind11::module_& m);
void bind_linear(pybind11::module_& m);
void bind_decoder(pybind11::module_& m);
void bind_sampler(pybind11::module_& m);
void bind_speculation(pybind11::module_& m);
void bind_store(pybind11::module_& m);

}  // namespace vmserve
