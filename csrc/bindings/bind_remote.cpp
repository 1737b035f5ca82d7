#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "bindings.h"
#include "vmserve/remote_driver.h"
#include "vmserve/ring.h"
#include "vmserve/ring_relay.h"

namespace py = pybind11;

namespace vmserve {
namespace {

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

py::array_t<std::uint8_t> buffer(const RankLoop& loop, Address address, std::size_t num_bytes) {
  auto* owner = new std::shared_ptr<PageDriver>(loop.owner_of(address, num_bytes));
  const py::capsule keeps_alive(
      owner, [](void* p) { delete static_cast<std::shared_ptr<PageDriver>*>(p); });
  return py::array_t<std::uint8_t>(static_cast<py::ssize_t>(num_bytes),
                                   reinterpret_cast<const std::uint8_t*>(address), keeps_alive);
}

}  // namespace

void bind_remote(py::module_& m) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  m.def(
      "make_ring",
      [](std::size_t frame_bytes, std::int64_t num_frames) {
        return Ring::make(frame_bytes, num_frames).release();
      },
      py::arg("frame_bytes"), py::arg("num_frames"));
  m.def(
      "ring_frames",
      [](int fd) {
        const Ring ring(fd);
        return py::make_tuple(ring->frame_bytes, ring->num_frames);
      },
      py::arg("ring_fd"));
  py::class_<RemoteDriver, PageDriver, std::shared_ptr<RemoteDriver>>(m, "RemoteDriver")
      .def(py::init([](int fd, pid_t rank, double attach, double answer) {
             const py::gil_scoped_release unlocked;
             return std::make_shared<RemoteDriver>(
                 fd, rank, RemoteDriver::Patience{milliseconds(attach), milliseconds(answer)});
           }),
           py::arg("ring_fd"), py::kw_only(), py::arg("rank_pid") = 0,
           py::arg("attach_timeout") = 60.0, py::arg("answer_timeout") = 120.0)
      .def_property_readonly("failure", &RemoteDriver::failure);
  py::class_<RankLoop, std::shared_ptr<RankLoop>>(m, "RankLoop")
      .def(py::init<int, std::shared_ptr<PageDriver>>(), py::arg("ring_fd"), py::arg("driver"))
      .def_property_readonly("is_running", &RankLoop::is_running)
      .def_property_readonly("reason", &RankLoop::reason)
      .def("buffer", &buffer, py::arg("address"), py::arg("num_bytes"))
      .def("close", &RankLoop::close, unlocked());
  py::class_<RelayedRing>(m, "RelayedRing")
      .def(py::init<int>(), py::arg("ring_fd"))
      .def(
          "serve",
          [](RelayedRing& relay, const py::bytes& terms) { relay.serve(std::string(terms)); },
          py::arg("terms"))
      .def("take",
           [](RelayedRing& relay) -> std::optional<py::bytes> {
             std::optional<std::string> call;
             {
               const py::gil_scoped_release unlocked;
               call = relay.take();
             }
             if (!call) return std::nullopt;
             return py::bytes(*call);
           })
      .def(
          "answer",
          [](RelayedRing& relay, const py::bytes& answer) { relay.answer(std::string(answer)); },
          py::arg("answer"))
      .def("end", &RelayedRing::end, py::arg("reason"));
  py::class_<RelayEnd>(m, "RelayEnd")
      .def(py::init<int>(), py::arg("ring_fd"))
      .def("terms", [](const RelayEnd& end) { return py::bytes(end.terms()); })
      .def(
          "execute",
          [](RelayEnd& end, const py::bytes& call) {
            const std::string given(call);
            std::string answer;
            {
              const py::gil_scoped_release unlocked;
              answer = end.execute(given);
            }
            return py::bytes(answer);
          },
          py::arg("call"));
}

}  // namespace vmserve
