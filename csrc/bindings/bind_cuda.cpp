#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <utility>

#include "bindings.h"
#include "vmserve/cuda_driver.h"

namespace py = pybind11;

namespace vmserve {
namespace {

// Releases the GIL to close the driver, because closing waits for the device. The last owner may be
// a C++ object that is destroyed without the GIL.
struct CloseUnlocked {
  void operator()(CudaDriver* driver) const {
    if (PyGILState_Check() == 0) {
      delete driver;
      return;
    }
    const py::gil_scoped_release unlocked;
    delete driver;
  }
};

std::shared_ptr<CudaDriver> make_driver(std::size_t frame_bytes, std::int64_t num_frames,
                                        int device, std::uintptr_t stream, std::string library,
                                        std::uint64_t spare_bytes, bool recommended_granularity) {
  CudaOptions options;
  options.frame_bytes = frame_bytes;
  options.num_frames = num_frames;
  options.device = device;
  options.stream = stream;
  options.library = std::move(library);
  options.spare_bytes = spare_bytes;
  options.recommended_granularity = recommended_granularity;
  return {new CudaDriver(std::move(options)), CloseUnlocked()};
}

}  // namespace

void bind_cuda(py::module_& m) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  const CudaOptions defaults;
  py::class_<CudaDriver, PageDriver, std::shared_ptr<CudaDriver>>(m, "CudaDriver")
      .def(py::init([](std::size_t frame_bytes, std::int64_t num_frames, int device,
                       std::uintptr_t stream, std::string library, std::uint64_t spare_bytes,
                       bool recommended_granularity) {
             const py::gil_scoped_release released;
             return make_driver(frame_bytes, num_frames, device, stream, std::move(library),
                                spare_bytes, recommended_granularity);
           }),
           py::arg("frame_bytes"), py::arg("num_frames"), py::kw_only(), py::arg("device") = 0,
           py::arg("stream") = 0, py::arg("library") = defaults.library,
           py::arg("spare_bytes") = defaults.spare_bytes,
           py::arg("recommended_granularity") = false);
  m.def(
      "cuda_granularity",
      [](int device, const std::string& library) {
        const CudaGranularity granularity = cuda_granularity(device, library);
        return std::make_pair(granularity.minimum, granularity.recommended);
      },
      py::arg("device") = 0, py::arg("library") = defaults.library, unlocked());
}

}  // namespace vmserve
