#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>

#include "bindings.h"
#include "vmserve/plugin_driver.h"

namespace py = pybind11;

namespace vmserve {

void bind_plugin(py::module_& m) {
  py::class_<PluginDriver, PageDriver, std::shared_ptr<PluginDriver>>(m, "PluginDriver")
      .def(py::init([](const std::string& path, std::size_t frame_bytes, std::int64_t num_frames,
                       const std::map<std::string, std::string>& options) {
             PluginConfig config{path, frame_bytes, num_frames, {options.begin(), options.end()}};
             const py::gil_scoped_release unlocked;
             return std::make_shared<PluginDriver>(config);
           }),
           py::arg("path"), py::arg("frame_bytes"), py::arg("num_frames"), py::kw_only(),
           py::arg("options") = std::map<std::string, std::string>())
      .def_property_readonly("plugin_name", &PluginDriver::name);
}

}  // namespace vmserve
