// The only file that knows Python. Blocking calls release the GIL where they are bound, by
// `ReleaseGil`; they are bounded by a timeout, and Python repeats them so that Ctrl-C works.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "arena.h"
#include "crc32c.h"
#include "engine.h"
#include "file.h"
#include "reader.h"
#include "slots.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace sharded_ckpt {
namespace {

using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;
using Seconds = Job::Seconds;

// Addresses come from the caller (tensor.data_ptr()), who keeps the memory alive.
template <typename T>
T* Pointer(uint64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// A failed status, or None: Python raises, so that there is one place that knows its exceptions.
std::optional<Status> OrNone(Status status) {
  if (status.ok()) return std::nullopt;
  return status;
}

IoMode ParseIoMode(const std::string& name) {
  if (name == "auto") return IoMode::kAuto;
  if (name == "direct") return IoMode::kDirect;
  if (name == "buffered") return IoMode::kBuffered;
  throw nb::value_error("io must be 'auto', 'direct' or 'buffered'");
}

const char* CodeName(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kIo:
      return "io";
    case Code::kCorrupt:
      return "corrupt";
    case Code::kInvalid:
      return "invalid";
    case Code::kCancelled:
      return "cancelled";
    case Code::kClosed:
      return "closed";
    case Code::kForked:
      return "forked";
    case Code::kTimeout:
      return "timeout";
  }
  return "unknown";
}

// A C-contiguous read-only view of a bytes-like object.
class BufferView {
 public:
  explicit BufferView(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  ~BufferView() { PyBuffer_Release(&view_); }
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;
  const void* data() const { return view_.buf; }
  size_t nbytes() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_;
};

uint32_t CrcOfBuffer(nb::handle data, uint32_t value) {
  const BufferView view(data);
  const nb::gil_scoped_release release;
  return Crc32cExtend(value, view.data(), view.nbytes());
}

std::pair<std::optional<Status>, std::shared_ptr<Job>> StartJob(
    Engine& engine, std::shared_ptr<Arena> arena,
    const std::vector<std::pair<uint64_t, uint64_t>>& sources, uint64_t chunk_nbytes) {
  std::vector<Source> native;
  native.reserve(sources.size());
  for (const auto& [address, nbytes] : sources) {
    native.push_back({Pointer<const char>(address), nbytes});
  }
  std::shared_ptr<Job> job;
  Status status = engine.Start(std::move(arena), std::move(native), chunk_nbytes, &job);
  return {OrNone(std::move(status)), std::move(job)};
}

std::optional<Status> StartRead(ShardReader& reader, std::string path, uint64_t header_nbytes,
                                uint64_t data_nbytes, uint64_t chunk_nbytes,
                                std::vector<uint32_t> crcs,
                                const std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>& spans,
                                bool scan, int threads) {
  ReadRequest request;
  request.path = std::move(path);
  request.header_nbytes = header_nbytes;
  request.data_nbytes = data_nbytes;
  request.chunk_nbytes = chunk_nbytes;
  request.crcs = std::move(crcs);
  request.spans.reserve(spans.size());
  for (const auto& [start, nbytes, address] : spans) {
    request.spans.push_back({start, nbytes, Pointer<char>(address)});
  }
  request.scan = scan;
  return OrNone(reader.Start(std::move(request), threads));
}

std::vector<std::pair<std::string, std::string>> SlotTransitions() {
  std::vector<std::pair<std::string, std::string>> allowed;
  for (size_t from = 0; from < kSlotStateCount; ++from) {
    for (size_t to = 0; to < kSlotStateCount; ++to) {
      const auto a = static_cast<SlotState>(from);
      const auto b = static_cast<SlotState>(to);
      if (SlotMayMove(a, b)) allowed.emplace_back(SlotStateName(a), SlotStateName(b));
    }
  }
  return allowed;
}

void BindFunctions(nb::module_& m) {
  m.def("crc32c", &CrcOfBuffer, "data"_a, "value"_a = 0);
  m.def(
      "crc32c_at",
      [](uint64_t address, uint64_t nbytes, uint32_t value) {
        return Crc32cExtend(value, Pointer<const void>(address), nbytes);
      },
      "address"_a, "nbytes"_a, "value"_a = 0, ReleaseGil());
  m.def("crc32c_combine", &Crc32cCombine, "crc_a"_a, "crc_b"_a, "nbytes_b"_a);
  m.def(
      "crc32c_table",
      [](nb::bytes data, uint32_t value) {
        return Crc32cExtendTable(value, data.c_str(), data.size());
      },
      "data"_a, "value"_a = 0);
  m.def("crc32c_implementation", &Crc32cImplementation);
  m.def(
      "memcpy_crc",
      [](uint64_t dest, uint64_t source, uint64_t nbytes, uint32_t value) {
        return Crc32cCopy(value, Pointer<void>(dest), Pointer<const void>(source), nbytes);
      },
      "dest"_a, "source"_a, "nbytes"_a, "value"_a = 0, ReleaseGil());
  m.def("slot_transitions", &SlotTransitions);
}

void BindValues(nb::module_& m) {
  nb::class_<Status>(m, "Status")
      .def_prop_ro("code", [](const Status& status) { return CodeName(status.code); })
      .def_ro("errno", &Status::err)
      .def_ro("operation", &Status::operation)
      .def_ro("path", &Status::path)
      .def_ro("detail", &Status::detail)
      .def_ro("start", &Status::start)
      .def_ro("end", &Status::end);
  nb::class_<Written>(m, "Written")
      .def_ro("file_nbytes", &Written::file_nbytes)
      .def_ro("header_nbytes", &Written::header_nbytes)
      .def_ro("data_nbytes", &Written::data_nbytes)
      .def_ro("header_crc32c", &Written::header_crc32c)
      .def_ro("file_crc32c", &Written::file_crc32c)
      .def_ro("copy_seconds", &Written::copy_seconds)
      .def_ro("write_seconds", &Written::write_seconds);
  nb::class_<Arena>(m, "Arena")
      .def_static(
          "map",
          [](uint64_t nbytes) {
            std::shared_ptr<Arena> arena;
            Status status = Arena::Map(nbytes, &arena);
            return std::pair(OrNone(std::move(status)), std::move(arena));
          },
          "nbytes"_a, ReleaseGil())
      .def_static(
          "wrap",
          [](uint64_t address, uint64_t nbytes) {
            return Arena::Wrap(Pointer<char>(address), nbytes);
          },
          "address"_a, "nbytes"_a)
      .def_prop_ro("address",
                   [](const Arena& arena) { return reinterpret_cast<uintptr_t>(arena.address()); })
      .def_prop_ro("nbytes", &Arena::nbytes);
}

// The waits return 1 for yes, 0 at the timeout, -1 when the job failed.
int Answer(Waited waited) {
  return waited == Waited::kYes ? 1 : waited == Waited::kTimeout ? 0 : -1;
}

void BindJobs(nb::module_& m) {
  nb::class_<Job>(m, "Job")
      .def(
          "write_to",
          [](Job& job, std::string path, nb::bytes header, uint64_t crc_pos) {
            return OrNone(
                job.WriteTo(std::move(path), std::string(header.c_str(), header.size()), crc_pos));
          },
          "path"_a, "header"_a, "crc_pos"_a)
      .def(
          "advance", [](Job& job, uint64_t offset) { return OrNone(job.Advance(offset)); },
          "data_offset"_a)
      .def("cancel", [](Job& job) { return OrNone(job.Cancel()); })
      .def(
          "wait_staged",
          [](const Job& job, double timeout_s) {
            return Answer(job.WaitStaged(Seconds(timeout_s)));
          },
          "timeout_s"_a, ReleaseGil())
      .def(
          "wait_slot_for",
          [](const Job& job, uint64_t offset, double timeout_s) {
            return Answer(job.WaitSlotFor(offset, Seconds(timeout_s)));
          },
          "data_offset"_a, "timeout_s"_a, ReleaseGil())
      .def(
          "wait_quiet",
          [](const Job& job, double timeout_s) {
            return Answer(job.WaitQuiet(Seconds(timeout_s)));
          },
          "timeout_s"_a, ReleaseGil())
      .def("status", [](const Job& job) { return OrNone(job.status()); })
      .def("written", &Job::written)
      .def_prop_ro("staged_nbytes", &Job::staged_nbytes);
  nb::class_<Engine>(m, "Engine")
      .def(
          "__init__",
          [](Engine* self, int copy_threads, int io_threads, const std::string& io) {
            new (self) Engine(copy_threads, io_threads, ParseIoMode(io));
          },
          "copy_threads"_a, "io_threads"_a, "io"_a)
      .def("check_open", [](const Engine& engine) { return OrNone(engine.CheckOpen()); })
      .def("start", &StartJob, "arena"_a, "sources"_a, "chunk_nbytes"_a)
      .def(
          "close",
          [](Engine& engine, double timeout_s) { return OrNone(engine.Close(Seconds(timeout_s))); },
          "timeout_s"_a, ReleaseGil());
  nb::class_<ShardReader>(m, "ShardReader")
      .def(nb::init<>())
      .def("start", &StartRead, "path"_a, "header_nbytes"_a, "data_nbytes"_a, "chunk_nbytes"_a,
           "crcs"_a, "spans"_a, "scan"_a, "threads"_a)
      .def(
          "wait",
          [](ShardReader& reader, double timeout_s) { return reader.Wait(Seconds(timeout_s)); },
          "timeout_s"_a, ReleaseGil())
      .def("cancel", &ShardReader::Cancel)
      .def("status", [](const ShardReader& reader) { return OrNone(reader.status()); })
      .def("bad_chunks", &ShardReader::bad_chunks);
}

}  // namespace

NB_MODULE(_C, m) {
  // Handles that outlive the interpreter are not worth a report to the user.
  nb::set_leak_warnings(false);
  m.doc() = "The copy, write and read engine in C++. Internal: use sharded_ckpt.engine.";
  BindFunctions(m);
  BindValues(m);
  BindJobs(m);
}

}  // namespace sharded_ckpt
