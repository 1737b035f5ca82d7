#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>

#include "bindings.h"
#include "vmserve/checksum.h"
#include "vmserve/errors.h"
#include "vmserve/file_store.h"

namespace py = pybind11;

namespace vmserve {
namespace {

Digest as_digest(const std::string& bytes) {
  Digest digest;
  if (bytes.size() != digest.size()) throw MisuseError("a digest has 32 bytes");
  std::copy(bytes.begin(), bytes.end(), digest.begin());
  return digest;
}

py::bytes as_bytes(const Checksum& sum) {
  return {reinterpret_cast<const char*>(sum.data()), sizeof(sum)};
}

}  // namespace

void bind_store(py::module_& m) {
  m.def(
      "checksum",
      [](const py::buffer& data, bool by_table) {
        const py::buffer_info info = data.request();
        const auto bytes = static_cast<std::size_t>(info.size * info.itemsize);
        Checksum sum;
        {
          const py::gil_scoped_release no_gil;
          sum = by_table ? checksum_by_table(info.ptr, bytes) : checksum(info.ptr, bytes);
        }
        return as_bytes(sum);
      },
      py::arg("data"), py::arg("by_table") = false);
  m.def(
      "verify_file",
      [](const std::string& path) {
        std::string why;
        {
          const py::gil_scoped_release no_gil;
          if (verify_file(path, why) == FileState::kWhole) why.clear();
        }
        return why;
      },
      py::arg("path"));
  py::class_<PageStore, std::shared_ptr<PageStore>>(m, "PageStore")
      .def("has",
           [](PageStore& self, const py::bytes& digest) { return self.has(as_digest(digest)); })
      .def(
          "put",
          [](PageStore& self, const py::bytes& digest, const py::bytes& content) {
            const Digest key = as_digest(digest);
            const std::string bytes = content;
            const py::gil_scoped_release no_gil;
            return self.put(key, bytes.data(), bytes.size());
          },
          py::arg("digest"), py::arg("content"))
      .def(
          "get",
          [](PageStore& self, const py::bytes& digest, std::size_t num_bytes) -> py::object {
            const Digest key = as_digest(digest);
            std::string content(num_bytes, '\0');
            bool found = false;
            {
              const py::gil_scoped_release no_gil;
              found = self.get(key, content.data(), num_bytes);
            }
            return found ? py::object(py::bytes(content)) : py::none();
          },
          py::arg("digest"), py::arg("num_bytes"))
      .def("take_message", &PageStore::take_message)
      .def("stats", [](const PageStore& self) {
        const StoreStats stats = self.stats();
        py::dict values;
        values["written_blocks"] = stats.written_blocks;
        values["written_bytes"] = stats.written_bytes;
        values["read_blocks"] = stats.read_blocks;
        values["read_bytes"] = stats.read_bytes;
        values["broken_blocks"] = stats.broken_blocks;
        values["refused_writes"] = stats.refused_writes;
        values["evicted_blocks"] = stats.evicted_blocks;
        values["bytes"] = stats.bytes;
        return values;
      });
  py::class_<FileOps, std::shared_ptr<FileOps>>(m, "FileOps").def(py::init<>());
  py::class_<FaultFileOps, FileOps, std::shared_ptr<FaultFileOps>>(m, "FaultFileOps")
      .def(py::init<>())
      .def("kill_after", &FaultFileOps::kill_after, py::arg("count"))
      .def("refuse_writes", &FaultFileOps::refuse_writes, py::arg("error"))
      .def("refuse_reads", &FaultFileOps::refuse_reads, py::arg("error"))
      .def_property_readonly("num_changes", &FaultFileOps::num_changes);
  py::class_<StoreDirectory, std::shared_ptr<StoreDirectory>>(m, "StoreDirectory")
      .def(py::init([](std::string path, std::int64_t limit_bytes, std::shared_ptr<FileOps> ops) {
             if (ops == nullptr) ops = std::make_shared<FileOps>();
             return std::make_shared<StoreDirectory>(std::move(path), limit_bytes, std::move(ops));
           }),
           py::arg("path"), py::arg("limit_bytes"), py::arg("ops") = nullptr)
      .def_property_readonly("num_bytes", &StoreDirectory::bytes)
      .def(
          "space",
          [](StoreDirectory& self, const std::string& name, const py::bytes& id) {
            return self.space(name, as_digest(id));
          },
          py::arg("name"), py::arg("id"));
}

}  // namespace vmserve
