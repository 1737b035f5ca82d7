#include <pybind11/native_enum.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "vmserve/errors.h"
#include "vmserve/kv_memory.h"

namespace py = pybind11;

namespace vmserve {
namespace {

// (kind, sequence, tokens, first token, other sequence, view)
using OpTuple = std::tuple<OpKind, SeqId, std::int64_t, std::int64_t, SeqId, View>;
using Ints = py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>;

std::vector<std::int32_t> narrow(const Ints& numbers) {
  std::vector<std::int32_t> result;
  result.reserve(static_cast<std::size_t>(numbers.size()));
  for (py::ssize_t i = 0; i < numbers.size(); ++i) {
    const std::int64_t number = numbers.data()[i];
    result.push_back(static_cast<std::int32_t>(number));
    if (result.back() != number) throw MisuseError(std::to_string(number) + " is not a 32-bit id");
  }
  return result;
}

std::vector<Op> as_ops(const std::vector<OpTuple>& tuples) {
  std::vector<Op> ops;
  ops.reserve(tuples.size());
  for (const auto& [kind, seq, num_tokens, first_token, other, view] : tuples) {
    ops.push_back({kind, seq, num_tokens, first_token, other, view});
  }
  return ops;
}

// `grows`: int64 [n, 3] of (sequence, tokens, first token), or [n, 4] with the number of drafted
// tokens. An array, because every step passes it.
void append_grows(std::vector<Op>& ops, const Ints& grows) {
  if (grows.ndim() != 2 || (grows.shape(1) != 3 && grows.shape(1) != 4)) {
    throw MisuseError("grows must be an int64 array of shape [n, 3] or [n, 4]");
  }
  const bool has_drafts = grows.shape(1) == 4;
  const auto rows = grows.unchecked<2>();
  ops.reserve(ops.size() + static_cast<std::size_t>(rows.shape(0)));
  for (py::ssize_t i = 0; i < rows.shape(0); ++i) {
    ops.push_back({OpKind::kGrow, static_cast<SeqId>(rows(i, 0)), rows(i, 1), rows(i, 2)});
    if (has_drafts) ops.back().num_drafted = rows(i, 3);
  }
}

// A [rows, row_bytes] array over the reservation at `addr`; it keeps the reservation alive.
py::array_t<std::uint8_t> buffer(std::shared_ptr<AddressSpace> space, Address addr,
                                 std::int64_t rows, std::size_t row_bytes) {
  auto* owner = new std::shared_ptr<AddressSpace>(std::move(space));
  const py::capsule base(owner,
                         [](void* p) { delete static_cast<std::shared_ptr<AddressSpace>*>(p); });
  return py::array_t<std::uint8_t>({rows, static_cast<py::ssize_t>(row_bytes)},
                                   reinterpret_cast<const std::uint8_t*>(addr), base);
}

void check_group(const KVMemory& memory, std::int32_t group, std::size_t kind) {
  const std::int32_t num_groups = memory.config(kind).num_groups;
  if (group < 0 || group >= num_groups) {
    throw MisuseError("group " + std::to_string(group) + " is outside 0 .. " +
                      std::to_string(num_groups - 1));
  }
}

py::array_t<std::uint8_t> slots_buffer(const KVMemory& memory, std::int32_t group,
                                       std::size_t kind) {
  check_group(memory, group, kind);
  const auto space = memory.address_space(kind);
  return buffer(space, space->slot(group), space->shape().num_slots, space->slot_bytes());
}

py::array_t<std::uint8_t> arena_buffer(const KVMemory& memory, std::int32_t group,
                                       std::size_t kind) {
  check_group(memory, group, kind);
  const auto space = memory.address_space(kind);
  return buffer(space, space->arena(group), space->shape().max_pages, space->page_bytes());
}

py::array_t<std::uint8_t> shadow_buffer(KVMemory& memory, std::int32_t group, std::size_t kind) {
  check_group(memory, group, kind);
  {
    const py::gil_scoped_release unlocked;
    memory.enable_shadow(kind);
  }
  const auto space = memory.address_space(kind);
  auto array = buffer(space, space->shadow(group), space->shape().num_slots, space->slot_bytes());
  array.attr("setflags")(py::arg("write") = false);
  return array;
}

template <typename T>
py::array_t<T> as_array(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

void bind_enums(py::module_& m) {
  py::native_enum<ZeroPolicy>(m, "ZeroPolicy", "enum.Enum", "When pages are zeroed.")
      .value("ALWAYS", ZeroPolicy::kAlways)
      .value("TENANT", ZeroPolicy::kTenant)
      .value("NEVER", ZeroPolicy::kNever)
      .finalize();
  py::native_enum<View>(m, "View", "enum.Enum", "How kernels address a sequence's KV memory.")
      .value("VIRTUAL", View::kVirtual)
      .value("PAGED", View::kPaged)
      .finalize();
  py::native_enum<OpKind>(m, "OpKind", "enum.Enum", "An operation on a sequence.")
      .value("ATTACH", OpKind::kAttach)
      .value("FORK", OpKind::kFork)
      .value("CONVERT", OpKind::kConvert)
      .value("SWAP_OUT", OpKind::kSwapOut)
      .value("SWAP_IN", OpKind::kSwapIn)
      .value("GROW", OpKind::kGrow)
      .finalize();
  py::native_enum<MapperMode>(m, "MapperMode", "enum.Enum",
                              "Which thread executes mapper commands.")
      .value("OFF", MapperMode::kOff)
      .value("MANUAL", MapperMode::kManual)
      .value("THREAD", MapperMode::kThread)
      .finalize();
  py::native_enum<Health>(
      m, "Health", "enum.Enum",
      "Health of the pool: DEGRADED while a repair is pending, FAILED after a sticky driver error.")
      .value("HEALTHY", Health::kHealthy)
      .value("DEGRADED", Health::kDegraded)
      .value("FAILED", Health::kFailed)
      .finalize();
}

py::dict as_dict(const MemoryStats& stats) {
  py::dict values;
#define VMSERVE_GAUGE(type, name, rule, what) values[#name] = stats.name;
#define VMSERVE_COUNTER(type, name, rule, what) values[#name "_total"] = stats.name##_total;
#include "vmserve/stats.def"
  return values;
}

void bind_stats(py::module_& m) {
  py::class_<Plan>(m, "Plan")
      .def_readonly("needed_pages", &Plan::needed_pages)
      .def_readonly("available_pages", &Plan::available_pages)
      .def_readonly("excess_pages", &Plan::excess_pages)
      .def_readonly("waiting_pages", &Plan::waiting_pages)
      .def_readonly("missing_slots", &Plan::missing_slots)
      .def_readonly("missing_swap_blocks", &Plan::missing_swap_blocks)
      .def_readonly("lost_prefixes", &Plan::lost_prefixes)
      .def_readonly("needed_mappings", &Plan::needed_mappings)
      .def_readonly("available_mappings", &Plan::available_mappings)
      .def_readonly("version", &Plan::version)
      .def_property_readonly("fits", &Plan::fits);
  py::class_<MemoryStats> stats(m, "MemoryStats");
  stats.def_readonly("health", &MemoryStats::health);
  stats.def("as_dict", &as_dict);
#define VMSERVE_GAUGE(type, name, rule, what) stats.def_readonly(#name, &MemoryStats::name, what);
#define VMSERVE_COUNTER(type, name, rule, what) \
  stats.def_readonly(#name "_total", &MemoryStats::name##_total, what);
#include "vmserve/stats.def"
}

// (pages, pages per cell, code of each cell, pages by code, int32 [slots, 3])
py::tuple as_tuple(const MemoryMap& map) {
  static_assert(sizeof(MemoryMap::SlotRow) == 3 * sizeof(std::int32_t));
  const auto num_slots = static_cast<py::ssize_t>(map.slots.size());
  py::array_t<std::int32_t> slots({num_slots, py::ssize_t{3}});
  std::copy(map.slots.begin(), map.slots.end(),
            reinterpret_cast<MemoryMap::SlotRow*>(slots.mutable_data()));
  const py::bytes cells(reinterpret_cast<const char*>(map.cells.data()), map.cells.size());
  return py::make_tuple(map.num_pages, map.pages_per_cell, cells, map.counts, slots);
}

// `own`: options of one kind, with its driver; `common`: of all kinds.
KindConfig as_kind(const py::dict& own, const py::dict& common) {
  KindConfig kind;
  MemoryConfig& config = kind.memory;
  py::dict left = py::cast<py::dict>(common.attr("copy")());
  for (const auto& [name, value] : own) left[name] = value;
  const auto take = [&](const char* name, auto& value, bool is_required = false) {
    if (!left.contains(name)) {
      if (is_required) throw py::type_error(std::string("missing argument: ") + name);
      return;
    }
    value = py::cast<std::decay_t<decltype(value)>>(left[name]);
    left.attr("pop")(name);
  };
  take("driver", kind.driver, true);
  take("num_groups", config.num_groups, true);
  take("block_tokens", config.block_tokens, true);
  take("blocks_per_page", config.blocks_per_page, true);
  take("token_bytes", config.token_bytes, true);
  take("max_seqs", config.max_seqs, true);
  take("num_slots", config.num_slots, true);
  take("max_len", config.max_len, true);
  take("max_pages", config.max_pages, true);
  take("window", config.window);
  take("state_bytes", config.state_bytes);
  take("checkpoint_tokens", config.checkpoint_tokens);
  take("read_slack", config.read_slack);
  take("grow_pages", config.grow_pages);
  take("ready_pages", config.ready_pages);
  take("zero_policy", config.zero_policy);
  take("prefix_caching", config.prefix_caching);
  take("null_page", config.null_page);
  take("deferred_reclamation", config.deferred_reclamation);
  take("seal_read_only", config.seal_read_only);
  take("access_under_readers", config.access_under_readers);
  take("swap_blocks", config.swap_blocks);
  take("mapper", config.mapper);
  take("lookahead_tokens", config.lookahead_tokens);
  take("eager_slots", config.eager_slots);
  take("eager_pages", config.eager_pages);
  take("reclaim_share", config.reclaim_share);
  if (!left.empty()) {
    throw py::type_error("unknown argument: " + py::cast<std::string>(*left.begin()->first));
  }
  return kind;
}

void bind_sequences(py::class_<KVMemory>& memory) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  memory
      .def(
          "open",
          [](KVMemory& self, Tenant tenant, View view, const py::bytes& salt,
             const std::vector<std::int32_t>& tokens) {
            const std::string salt_bytes = salt;
            const py::gil_scoped_release no_gil;
            return self.open(tenant, view, salt_bytes, tokens);
          },
          py::arg("tenant") = 0, py::arg("view") = View::kVirtual, py::arg("salt") = py::bytes(),
          py::arg("tokens") = std::vector<std::int32_t>())
      .def("match", &KVMemory::match, py::arg("seq"), unlocked())
      .def(
          "plan",
          [](KVMemory& self, const std::vector<OpTuple>& ops) { return self.plan(as_ops(ops)); },
          py::arg("ops"), unlocked())
      .def(
          "apply",
          [](KVMemory& self, const std::vector<OpTuple>& ops, std::uint64_t version) {
            return self.apply(as_ops(ops), version);
          },
          py::arg("ops"), py::arg("version"), unlocked())
      .def(
          "plan_step",
          [](KVMemory& self, const Ints& grows, const std::vector<OpTuple>& tuples) {
            std::vector<Op> ops = as_ops(tuples);
            append_grows(ops, grows);
            const py::gil_scoped_release no_gil;
            return self.plan(ops);
          },
          py::arg("grows"), py::arg("ops") = std::vector<OpTuple>())
      .def(
          "apply_step",
          [](KVMemory& self, const Ints& grows, std::uint64_t version,
             const std::vector<OpTuple>& tuples) {
            std::vector<Op> ops = as_ops(tuples);
            append_grows(ops, grows);
            const py::gil_scoped_release no_gil;
            return self.apply(ops, version);
          },
          py::arg("grows"), py::arg("version"), py::arg("ops") = std::vector<OpTuple>())
      .def(
          "keep",
          [](KVMemory& self, const Ints& seqs, const Ints& lengths) {
            const std::vector<SeqId> ids = narrow(seqs);
            const std::vector<std::int64_t> ends{lengths.data(), lengths.data() + lengths.size()};
            const py::gil_scoped_release no_gil;
            self.keep(ids, ends);
          },
          py::arg("seqs"), py::arg("lengths"))
      .def(
          "append_tokens",
          [](KVMemory& self, const Ints& seqs, const Ints& tokens) {
            const std::vector<SeqId> ids = narrow(seqs);
            const std::vector<std::int32_t> names = narrow(tokens);
            const py::gil_scoped_release no_gil;
            self.append_tokens(ids, names);
          },
          py::arg("seqs"), py::arg("tokens"))
      .def("open_seqs", &KVMemory::open_seqs, unlocked())
      .def("release", &KVMemory::release, py::arg("seq"), unlocked())
      .def("complete", &KVMemory::complete, py::arg("epoch"), unlocked())
      .def("abandon_epoch", &KVMemory::abandon_epoch, py::arg("epoch"), unlocked())
      .def("launched", &KVMemory::launched, py::arg("epoch"), unlocked())
      .def("finish_copies", &KVMemory::finish_copies, unlocked())
      .def("is_copying", &KVMemory::is_copying, unlocked())
      .def_property_readonly("begun_epoch", &KVMemory::begun_epoch)
      .def_property_readonly("completed_epoch", &KVMemory::completed_epoch);
}

void bind_pool(py::class_<KVMemory>& memory) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  memory
      .def(
          "restore",
          [](KVMemory& self, SeqId seq, const std::vector<OpTuple>& attaching) {
            return self.restore(seq, as_ops(attaching));
          },
          py::arg("seq"), py::arg("attaching") = std::vector<OpTuple>(), unlocked())
      .def("finish_restores", &KVMemory::finish_restores, unlocked())
      .def("write_when_idle", &KVMemory::write_when_idle, unlocked())
      .def("flush", &KVMemory::flush, py::arg("seconds"), unlocked())
      .def("persist_message", &KVMemory::persist_message, unlocked())
      .def("persist_to", &KVMemory::persist_to, py::arg("stores"),
           py::arg("touch_seconds") = kTouchSeconds, unlocked())
      .def("clear_cache", &KVMemory::clear_cache, unlocked())
      .def("trim", &KVMemory::trim, py::arg("keep_pages") = 0, py::arg("drop_idle") = false,
           unlocked())
      .def("set_limit", &KVMemory::set_limit, py::arg("limit_pages"), unlocked())
      .def("settle_mapper", &KVMemory::settle_mapper, unlocked())
      .def("require_usable", &KVMemory::require_usable, unlocked())
      .def("close", &KVMemory::close, unlocked())
      .def("stats", &KVMemory::stats, unlocked())
      .def("kind_stats", &KVMemory::kind_stats, unlocked())
      .def("last_error", &KVMemory::last_error, unlocked())
      .def("check", &KVMemory::check, unlocked())
      .def("fingerprint", &KVMemory::fingerprint, unlocked())
      .def(
          "memory_map",
          [](KVMemory& self, std::int64_t max_cells) {
            MemoryMap map;
            {
              const py::gil_scoped_release no_gil;
              map = self.memory_map(max_cells);
            }
            return as_tuple(map);
          },
          py::arg("max_cells"));
}

// Block tables of all sequences, which share the memory's ownership.
py::array_t<BlockId> block_tables(const py::object& self, std::size_t kind) {
  const auto& memory = py::cast<const KVMemory&>(self);
  py::array_t<BlockId> tables({static_cast<py::ssize_t>(memory.config(kind).max_seqs),
                               static_cast<py::ssize_t>(memory.blocks_per_row(kind))},
                              memory.block_tables(kind), self);
  tables.attr("setflags")(py::arg("write") = false);
  return tables;
}

void bind_reading(py::class_<KVMemory>& memory) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  memory.def("length", &KVMemory::length, py::arg("seq"), unlocked())
      .def("sealed", &KVMemory::sealed, py::arg("seq"), unlocked())
      .def("view", &KVMemory::view, py::arg("seq"), unlocked())
      .def("swapped", &KVMemory::swapped, py::arg("seq"), unlocked())
      .def("slot", &KVMemory::slot, py::arg("seq"), unlocked())
      .def(
          "slots",
          [](const KVMemory& self, const Ints& seqs) {
            return as_array(self.slots({seqs.data(), seqs.data() + seqs.size()}));
          },
          py::arg("seqs"))
      .def(
          "blocks",
          [](const KVMemory& self, SeqId seq, std::size_t kind) {
            return as_array(self.blocks(seq, kind));
          },
          py::arg("seq"), py::arg("kind") = 0)
      .def(
          "slot_pages",
          [](const KVMemory& self, SlotId slot, std::size_t kind) {
            return as_array(self.slot_pages(slot, kind));
          },
          py::arg("slot"), py::arg("kind") = 0)
      .def("block_refs", &KVMemory::block_refs, py::arg("block"), py::arg("kind") = 0, unlocked())
      .def("block_tables", &block_tables, py::arg("kind") = 0)
      .def("slots_buffer", &slots_buffer, py::arg("group"), py::arg("kind") = 0)
      .def("arena_buffer", &arena_buffer, py::arg("group"), py::arg("kind") = 0)
      .def("shadow_buffer", &shadow_buffer, py::arg("group"), py::arg("kind") = 0);
}

}  // namespace

void bind_memory(py::module_& m) {
  bind_enums(m);
  bind_stats(m);
  m.def(
      "sha256",
      [](const py::bytes& data) {
        const std::string message = data;
        const Digest digest = sha256(message.data(), message.size());
        return py::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
      },
      py::arg("data"));
  using unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<KVMemory> memory(m, "KVMemory");
  memory
      .def(py::init([](const std::vector<py::dict>& kinds, std::int64_t limit_pages,
                       const py::kwargs& common) {
             std::vector<KindConfig> configs;
             for (const py::dict& own : kinds) configs.push_back(as_kind(own, common));
             const py::gil_scoped_release no_gil;
             return std::make_unique<KVMemory>(std::move(configs), limit_pages);
           }),
           py::arg("kinds"), py::arg("limit_pages"))
      .def("compact", &KVMemory::compact, unlocked())
      .def("run_mapper", &KVMemory::run_mapper, py::arg("max_commands"), unlocked())
      .def("run_store", &KVMemory::run_store, py::arg("max_jobs"), unlocked())
      .def_property_readonly("closed", &KVMemory::closed);
  bind_sequences(memory);
  bind_pool(memory);
  bind_reading(memory);
}

}  // namespace vmserve
