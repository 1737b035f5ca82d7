#include <pybind11/native_enum.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <utility>
#include <vector>

#include "bindings.h"
#include "vmserve/errors.h"
#include "vmserve/kv_memory.h"

namespace py = pybind11;

namespace vmserve {
namespace {

using GrowthTuple = std::pair<SlotId, std::int64_t>;

std::vector<Growth> as_growths(const std::vector<GrowthTuple>& tuples) {
  std::vector<Growth> growths;
  growths.reserve(tuples.size());
  for (const auto& [slot, num_tokens] : tuples) growths.push_back({slot, num_tokens});
  return growths;
}

// `rows` x `row_bytes` of the reservation at `addr`; the array keeps the reservation alive.
py::array_t<std::uint8_t> buffer(std::shared_ptr<AddressSpace> space, Address addr,
                                 std::int64_t rows, std::size_t row_bytes) {
  auto* owner = new std::shared_ptr<AddressSpace>(std::move(space));
  const py::capsule base(owner,
                         [](void* p) { delete static_cast<std::shared_ptr<AddressSpace>*>(p); });
  return py::array_t<std::uint8_t>({rows, static_cast<py::ssize_t>(row_bytes)},
                                   reinterpret_cast<const std::uint8_t*>(addr), base);
}

void check_group(const KVMemory& memory, std::int32_t group) {
  const std::int32_t num_groups = memory.config().num_groups;
  if (group < 0 || group >= num_groups) {
    throw MisuseError("group " + std::to_string(group) + " is outside 0 .. " +
                      std::to_string(num_groups - 1));
  }
}

py::array_t<std::uint8_t> slots_buffer(const KVMemory& memory, std::int32_t group) {
  check_group(memory, group);
  const auto space = memory.address_space();
  return buffer(space, space->slot(group), space->shape().num_slots, space->slot_bytes());
}

py::array_t<std::uint8_t> arena_buffer(const KVMemory& memory, std::int32_t group) {
  check_group(memory, group);
  const auto space = memory.address_space();
  return buffer(space, space->arena(group), space->shape().max_pages, space->page_bytes());
}

py::array_t<std::uint8_t> shadow_buffer(KVMemory& memory, std::int32_t group) {
  check_group(memory, group);
  {
    const py::gil_scoped_release unlocked;
    memory.enable_shadow();
  }
  const auto space = memory.address_space();
  auto array = buffer(space, space->shadow(group), space->shape().num_slots, space->slot_bytes());
  array.attr("setflags")(py::arg("write") = false);
  return array;
}

void bind_stats(py::module_& m) {
  py::class_<MemoryStats>(m, "MemoryStats")
      .def_readonly("page_bytes", &MemoryStats::page_bytes)
      .def_readonly("page_tokens", &MemoryStats::page_tokens)
      .def_readonly("limit_pages", &MemoryStats::limit_pages)
      .def_readonly("committed_pages", &MemoryStats::committed_pages)
      .def_readonly("free_pages", &MemoryStats::free_pages)
      .def_readonly("used_pages", &MemoryStats::used_pages)
      .def_readonly("quarantined_pages", &MemoryStats::quarantined_pages)
      .def_readonly("shared_pages", &MemoryStats::shared_pages)
      .def_readonly("num_slots", &MemoryStats::num_slots)
      .def_readonly("used_slots", &MemoryStats::used_slots)
      .def_readonly("used_tokens", &MemoryStats::used_tokens)
      .def_readonly("tail_waste_bytes", &MemoryStats::tail_waste_bytes)
      .def_readonly("pages_mapped_total", &MemoryStats::pages_mapped_total)
      .def_readonly("pages_unmapped_total", &MemoryStats::pages_unmapped_total)
      .def_readonly("pages_committed_total", &MemoryStats::pages_committed_total)
      .def_readonly("pages_given_back_total", &MemoryStats::pages_given_back_total)
      .def_readonly("pages_zeroed_total", &MemoryStats::pages_zeroed_total)
      .def_readonly("map_calls_total", &MemoryStats::map_calls_total)
      .def_readonly("unmap_calls_total", &MemoryStats::unmap_calls_total)
      .def_readonly("arena_map_calls_total", &MemoryStats::arena_map_calls_total)
      .def_readonly("map_seconds_total", &MemoryStats::map_seconds_total)
      .def_readonly("memfd_allocated_bytes", &MemoryStats::memfd_allocated_bytes)
      .def_readonly("num_mappings", &MemoryStats::num_mappings)
      .def_readonly("pending_repairs", &MemoryStats::pending_repairs);
}

}  // namespace

void bind_memory(py::module_& m) {
  py::native_enum<ZeroPolicy>(m, "ZeroPolicy", "enum.Enum", "When pages are cleared.")
      .value("ALWAYS", ZeroPolicy::kAlways)
      .value("TENANT", ZeroPolicy::kTenant)
      .value("NEVER", ZeroPolicy::kNever)
      .finalize();
  bind_stats(m);
  using unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<KVMemory>(m, "KVMemory")
      .def(py::init([](std::shared_ptr<PageDriver> driver, std::int32_t num_groups,
                       std::int64_t page_tokens, std::int64_t token_bytes, std::int32_t num_slots,
                       std::int64_t max_len, std::int64_t read_slack, std::int64_t limit_pages,
                       std::int64_t max_pages, std::int64_t grow_pages, ZeroPolicy zero_policy) {
             MemoryConfig config;
             config.num_groups = num_groups;
             config.page_tokens = page_tokens;
             config.token_bytes = token_bytes;
             config.num_slots = num_slots;
             config.max_len = max_len;
             config.read_slack = read_slack;
             config.limit_pages = limit_pages;
             config.max_pages = max_pages;
             config.grow_pages = grow_pages;
             config.zero_policy = zero_policy;
             return std::make_unique<KVMemory>(std::move(driver), config);
           }),
           py::arg("driver"), py::kw_only(), py::arg("num_groups"), py::arg("page_tokens"),
           py::arg("token_bytes"), py::arg("num_slots"), py::arg("max_len"),
           py::arg("read_slack") = 0, py::arg("limit_pages"), py::arg("max_pages"),
           py::arg("grow_pages") = 1, py::arg("zero_policy") = ZeroPolicy::kTenant)
      .def("alloc_slot", &KVMemory::alloc_slot, py::arg("tenant") = 0, unlocked())
      .def(
          "plan",
          [](const KVMemory& memory, const std::vector<GrowthTuple>& growths) {
            Plan plan{};
            {
              const py::gil_scoped_release no_gil;
              plan = memory.plan(as_growths(growths));
            }
            return py::make_tuple(plan.needed_pages, plan.available_pages, plan.version);
          },
          py::arg("growths"))
      .def(
          "apply",
          [](KVMemory& memory, const std::vector<GrowthTuple>& growths, std::uint64_t version) {
            memory.apply(as_growths(growths), version);
          },
          py::arg("growths"), py::arg("version"), unlocked())
      .def("release", &KVMemory::release, py::arg("slot"), unlocked())
      .def("fork_slot", &KVMemory::fork_slot, py::arg("src"), py::arg("num_tokens"), unlocked())
      .def("trim", &KVMemory::trim, py::arg("keep_pages") = 0, unlocked())
      .def("set_limit", &KVMemory::set_limit, py::arg("limit_pages"), unlocked())
      .def(
          "block_table",
          [](const KVMemory& memory, SlotId slot) {
            const std::vector<PageId> pages = memory.block_table(slot);
            return py::array_t<PageId>(static_cast<py::ssize_t>(pages.size()), pages.data());
          },
          py::arg("slot"))
      .def("slot_length", &KVMemory::slot_length, py::arg("slot"), unlocked())
      .def("slots_buffer", &slots_buffer, py::arg("group"))
      .def("arena_buffer", &arena_buffer, py::arg("group"))
      .def("shadow_buffer", &shadow_buffer, py::arg("group"))
      .def("stats", &KVMemory::stats, unlocked())
      .def("last_error", &KVMemory::last_error, unlocked())
      .def("check", &KVMemory::check, unlocked())
      .def("close", &KVMemory::close, unlocked())
      .def_property_readonly("closed", &KVMemory::closed);
}

}  // namespace vmserve
