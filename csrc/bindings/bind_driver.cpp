#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <memory>
#include <tuple>

#include "bindings.h"
#include "vmserve/driver.h"
#include "vmserve/fault_driver.h"
#include "vmserve/group_driver.h"
#include "vmserve/host_driver.h"
#include "vmserve/null_driver.h"
#include "vmserve/system_limits.h"

namespace py = pybind11;

namespace vmserve {
namespace {

// Python passes runs as tuples of numbers: (frame, count), (address, frame, count, access),
// (address, bytes), (address, bytes, access) and (destination, source, bytes).
using FrameTuple = std::tuple<FrameId, std::int64_t>;
using MapTuple = std::tuple<Address, FrameId, std::int64_t, Access>;
using AddressTuple = std::tuple<Address, std::size_t>;
using AccessTuple = std::tuple<Address, std::size_t, Access>;
using CopyTuple = std::tuple<Address, Address, std::size_t>;

MapRun as_run(const MapTuple& t) {
  return {std::get<0>(t), {std::get<1>(t), std::get<2>(t)}, std::get<3>(t)};
}

template <typename Run, typename Tuple>
Run as_run(const Tuple& tuple) {
  return std::apply([](const auto&... fields) { return Run{fields...}; }, tuple);
}

template <typename Run, typename Tuple>
auto batched(void (PageDriver::*call)(const std::vector<Run>&)) {
  return [call](PageDriver& driver, const std::vector<Tuple>& tuples) {
    const py::gil_scoped_release unlocked;
    std::vector<Run> runs;
    runs.reserve(tuples.size());
    for (const Tuple& tuple : tuples) runs.push_back(as_run<Run>(tuple));
    (driver.*call)(runs);
  };
}

void bind_values(py::module_& m) {
  py::native_enum<Access>(m, "Access", "enum.Enum", "What may be done at an address.")
      .value("NONE", Access::kNone)
      .value("READ", Access::kRead)
      .value("READ_WRITE", Access::kReadWrite)
      .finalize();
  py::native_enum<Backing>(m, "Backing", "enum.Enum",
                           "What an address shows while nothing is mapped there.")
      .value("TRAP", Backing::kTrap)
      .value("ZEROS", Backing::kZeros)
      .finalize();
  py::class_<Capabilities>(m, "Capabilities")
      .def_readonly("unmap", &Capabilities::unmap)
      .def_readonly("read_only", &Capabilities::read_only)
      .def_readonly("zeros_backing", &Capabilities::zeros_backing)
      .def_readonly("host_memory", &Capabilities::host_memory)
      .def_readonly("asynchronous", &Capabilities::asynchronous)
      .def_readonly("copy_stream", &Capabilities::copy_stream);
  py::class_<DriverStats>(m, "DriverStats")
      .def_readonly("created_frames", &DriverStats::created_frames)
      .def_readonly("mapped_frames", &DriverStats::mapped_frames)
      .def_readonly("num_mappings", &DriverStats::num_mappings)
      .def_readonly("max_mappings", &DriverStats::max_mappings)
      .def_readonly("allocated_bytes", &DriverStats::allocated_bytes);
  py::class_<SystemLimits>(m, "SystemLimits")
      .def(py::init<std::string>(), py::arg("root") = "")
      .def("max_map_count", &SystemLimits::max_map_count)
      .def("available_memory", [](const SystemLimits& limits) {
        const AvailableMemory available = limits.available_memory();
        return py::make_tuple(available.bytes, available.source);
      });
}

}  // namespace

void bind_driver(py::module_& m) {
  bind_values(m);
  using unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<PageDriver, std::shared_ptr<PageDriver>>(m, "PageDriver")
      .def_property_readonly("capabilities", &PageDriver::capabilities)
      .def_property_readonly("granularity", &PageDriver::granularity)
      .def_property_readonly("frame_bytes", &PageDriver::frame_bytes)
      .def_property_readonly("num_frames", &PageDriver::num_frames)
      .def("reserve", &PageDriver::reserve, py::arg("num_bytes"), py::arg("backing"), unlocked())
      .def("free_reservation", &PageDriver::free_reservation, py::arg("address"), unlocked())
      .def("create", batched<FrameRun, FrameTuple>(&PageDriver::create), py::arg("runs"))
      .def("destroy", batched<FrameRun, FrameTuple>(&PageDriver::destroy), py::arg("runs"))
      .def(
          "map",
          [](PageDriver& driver, const std::vector<MapTuple>& tuples, bool prefault) {
            const py::gil_scoped_release unlocked;
            std::vector<MapRun> runs;
            runs.reserve(tuples.size());
            for (const MapTuple& tuple : tuples) runs.push_back(as_run(tuple));
            for (MapRun& run : runs) run.prefault = prefault;
            driver.map(runs);
          },
          py::arg("runs"), py::kw_only(), py::arg("prefault") = false)
      .def("unmap", batched<AddressRun, AddressTuple>(&PageDriver::unmap), py::arg("runs"))
      .def("set_access", batched<AccessRun, AccessTuple>(&PageDriver::set_access), py::arg("runs"))
      .def("zero", batched<AddressRun, AddressTuple>(&PageDriver::zero), py::arg("runs"))
      .def("copy", batched<CopyRun, CopyTuple>(&PageDriver::copy), py::arg("runs"))
      .def("copy_out", batched<CopyRun, CopyTuple>(&PageDriver::copy_out), py::arg("runs"))
      .def("copy_in", batched<CopyRun, CopyTuple>(&PageDriver::copy_in), py::arg("runs"))
      .def("copy_mark", &PageDriver::copy_mark, unlocked())
      .def("copy_reached", &PageDriver::copy_reached, py::arg("mark"), unlocked())
      .def("fence", &PageDriver::fence, unlocked())
      .def("mark", &PageDriver::mark, unlocked())
      .def("reached", &PageDriver::reached, py::arg("mark"), unlocked())
      .def("alloc_host", &PageDriver::alloc_host, py::arg("num_bytes"), unlocked())
      .def("free_host", &PageDriver::free_host, py::arg("address"), unlocked())
      .def(
          "query",
          [](const PageDriver& driver, Address address) {
            const Mapping mapping = [&] {
              const py::gil_scoped_release unlocked;  // another process may have to answer
              return driver.query(address);
            }();
            return py::make_tuple(mapping.frame, mapping.access);
          },
          py::arg("address"))
      .def("stats", &PageDriver::stats, unlocked());

  py::class_<HostDriver, PageDriver, std::shared_ptr<HostDriver>>(m, "HostDriver")
      .def(py::init([](std::size_t frame_bytes, std::int64_t num_frames, std::int64_t max_map_count,
                       const SystemLimits& limits) {
             HostOptions options;
             options.frame_bytes = frame_bytes;
             options.num_frames = num_frames;
             options.max_map_count = max_map_count;
             options.limits = limits;
             return std::make_shared<HostDriver>(std::move(options));
           }),
           py::arg("frame_bytes"), py::arg("num_frames"), py::kw_only(),
           py::arg("max_map_count") = 0, py::arg("limits") = SystemLimits());

  py::class_<NullDriver, PageDriver, std::shared_ptr<NullDriver>>(m, "NullDriver")
      .def(py::init<std::size_t, std::int64_t>(), py::arg("frame_bytes"), py::arg("num_frames"))
      .def("work", [](const NullDriver& driver) {
        const NullDriver::Work work = driver.work();
        return py::make_tuple(work.zeroed_bytes, work.copied_bytes, work.swapped_bytes);
      });

  py::class_<FaultInjectingDriver, PageDriver, std::shared_ptr<FaultInjectingDriver>>(
      m, "FaultInjectingDriver")
      .def(py::init<std::shared_ptr<PageDriver>, bool, bool>(), py::arg("inner"), py::kw_only(),
           py::arg("late_copies") = false, py::arg("late_marks") = false)
      .def("arm", &FaultInjectingDriver::arm, py::arg("call"), py::kw_only(),
           py::arg("forever") = false, py::arg("code") = ENOMEM, py::arg("sticky") = false)
      .def("disarm", &FaultInjectingDriver::disarm)
      .def("run_copies", &FaultInjectingDriver::run_copies, py::arg("count"))
      .def("reach_marks", &FaultInjectingDriver::reach_marks, py::arg("count"))
      .def_property_readonly("num_calls", &FaultInjectingDriver::num_calls)
      .def_property_readonly("num_refused", &FaultInjectingDriver::num_refused);

  py::class_<GroupDriver, PageDriver, std::shared_ptr<GroupDriver>>(m, "GroupDriver")
      .def(py::init<GroupDriver::Members>(), py::arg("members"))
      .def_property_readonly("num_members", &GroupDriver::num_members)
      .def("address_of", &GroupDriver::address_of, py::arg("member"), py::arg("address"));
}

}  // namespace vmserve
