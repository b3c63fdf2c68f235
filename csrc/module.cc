// The Python module `elastic_collectives._engine`: thin, takes memory by the buffer protocol, gives up the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>

#include "group.h"
#include "numbers/half.h"
#include "process_exit.h"

namespace py = pybind11;
using namespace elastic;

namespace {

// Set once by the Python side; called as (cause, ranks, reason), raises the matching error class.
py::object& errorRaiser() {
  static py::object* instance = new py::object();  // never destroyed: the interpreter may be gone
  return *instance;
}

// Set once by the Python side; called with a warning for the user, one sentence.
py::object& warningHandler() {
  static py::object* instance = new py::object();
  return *instance;
}

void warn(const std::string& text) {
  py::gil_scoped_acquire gil;
  warningHandler()(text);
}

// A Python callable that any thread may set, call and release.
class WaitObserver {
 public:
  ~WaitObserver() {
    py::gil_scoped_acquire gil;
    callback_ = py::object();
  }
  void set(py::object callback) { callback_ = std::move(callback); }
  void onWait(std::chrono::milliseconds waited, const std::vector<int>& ranks) const {
    py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    const py::object callback = callback_;  // a copy: another thread may replace it
    if (!callback.is_none() && !ranks.empty()) callback(std::chrono::duration<double>(waited).count(), ranks);
  }

 private:
  py::object callback_ = py::none();  // guarded by the interpreter's lock
};

// The group exposed to Python, with the callback for its waits.
struct ObservedGroup : Group {
  ObservedGroup(std::shared_ptr<Endpoint> endpoint, int rank, const std::vector<std::string>& peers, Fence fence,
                const GroupOptions& options, std::shared_ptr<WaitObserver> observer)
      : Group(std::move(endpoint), rank, peers, fence, options), observer(std::move(observer)) {}

  const std::shared_ptr<WaitObserver> observer;
};

std::chrono::milliseconds millisecondsOf(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

void translate(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const Failure& failure) {
    try {
      // A peer may have sent any bytes.
      const py::object reason = py::reinterpret_steal<py::object>(
          PyUnicode_DecodeUTF8(failure.what(), static_cast<ssize_t>(std::strlen(failure.what())), "replace"));
      if (!reason) throw py::error_already_set();
      errorRaiser()(static_cast<int>(failure.cause), failure.ranks, reason);
    } catch (py::error_already_set& raised) {
      raised.restore();
    }
  }
}

size_t bytesOf(const py::buffer_info& info) { return static_cast<size_t>(info.size * info.itemsize); }

size_t total(const std::vector<size_t>& sizes) { return std::accumulate(sizes.begin(), sizes.end(), size_t{0}); }

void* sized(const py::buffer& buffer, size_t bytes, bool writable) {
  const py::buffer_info info = buffer.request(writable);
  if (bytesOf(info) != bytes) throw std::invalid_argument("sizes do not match");
  return info.ptr;
}

Parts partsOf(const Group& group, const std::vector<py::buffer>& buffers, bool writable) {
  if (buffers.size() != static_cast<size_t>(group.size())) throw std::invalid_argument("one part for each rank");
  Parts parts;
  for (const py::buffer& buffer : buffers) {
    const py::buffer_info info = buffer.request(writable);
    parts.push_back({static_cast<char*>(info.ptr), bytesOf(info)});
  }
  return parts;
}

void widenArray(DataType half, const py::buffer& data, const py::buffer& out, bool portably) {
  const size_t count = bytesOf(data.request()) / sizeof(uint16_t);
  const auto from = static_cast<const uint16_t*>(data.request().ptr);
  const auto to = static_cast<float*>(sized(out, count * sizeof(float), true));
  (portably ? widenPortably : widen)(half, from, to, count);
}

void narrowArray(DataType half, const py::buffer& data, const py::buffer& out, bool portably) {
  const size_t count = bytesOf(data.request()) / sizeof(float);
  const auto from = static_cast<const float*>(data.request().ptr);
  const auto to = static_cast<uint16_t*>(sized(out, count * sizeof(uint16_t), true));
  (portably ? narrowPortably : narrow)(half, from, to, count);
}

std::unique_ptr<ObservedGroup> makeGroup(std::shared_ptr<Endpoint> endpoint, int rank,
                                         const std::vector<std::string>& peers, std::array<uint64_t, 3> fence,
                                         double timeout, const std::vector<int>& local,
                                         const py::object& findAddresses) {
  auto observer = std::make_shared<WaitObserver>();
  GroupOptions options;
  options.timeout = millisecondsOf(timeout);
  options.onWait = [observer](auto waited, const auto& ranks) { observer->onWait(waited, ranks); };
  options.warn = warn;
  options.local = local;
  if (!findAddresses.is_none()) {
    // The last copy may be dropped by a thread without the interpreter's lock.
    const std::shared_ptr<py::object> ask(new py::object(findAddresses), [](py::object* function) {
      py::gil_scoped_acquire gil;
      delete function;
    });
    options.findAddresses = [ask](const std::vector<int>& ranks) {
      py::gil_scoped_acquire gil;
      return (*ask)(ranks).cast<std::vector<std::string>>();
    };
  }
  py::gil_scoped_release released;
  return std::make_unique<ObservedGroup>(std::move(endpoint), rank, peers, Fence{fence[0], fence[1], fence[2]}, options,
                                         std::move(observer));
}

}  // namespace

PYBIND11_MODULE(_engine, module) {
  py::register_exception_translator(&translate);
  module.def("set_error_raiser", [](py::object function) { errorRaiser() = std::move(function); });
  module.def("set_warning_handler", [](py::object function) { warningHandler() = std::move(function); });

  py::enum_<DataType> types(module, "DataType");
  for (int type = 0; type <= static_cast<int>(DataType::kFloat64); type++) {
    types.value(nameOf(static_cast<DataType>(type)), static_cast<DataType>(type));
  }
  py::enum_<ReduceOp> ops(module, "ReduceOp");
  for (int op = 0; op <= static_cast<int>(ReduceOp::kAdasum); op++) {
    ops.value(nameOf(static_cast<ReduceOp>(op)), static_cast<ReduceOp>(op));
  }
  py::enum_<Wire>(module, "Wire")
      .value("plain", Wire::kPlain)
      .value("float16", Wire::kFloat16)
      .value("bfloat16", Wire::kBfloat16);
  py::enum_<Algorithm>(module, "Algorithm")
      .value("auto", Algorithm::kAuto)
      .value("ring", Algorithm::kRing)
      .value("bcube", Algorithm::kBcube);
  py::class_<Reduction>(module, "Reduction")
      .def(py::init([](DataType type, ReduceOp op, Wire wire, Algorithm algorithm, double before, double after,
                       uint32_t shape) { return Reduction{type, op, wire, algorithm, before, after, shape}; }),
           py::arg("type"), py::arg("op"), py::arg("wire"), py::arg("algorithm"), py::arg("before"), py::arg("after"),
           py::arg("shape"));
  module.def(
      "await_exit", [](int pid, double period) { return awaitExit(pid, millisecondsOf(period)); }, py::arg("pid"),
      py::arg("period"), py::call_guard<py::gil_scoped_release>());
  module.def("is_exiting", &isExiting, py::arg("pid"));
  module.def("widen", &widenArray, py::arg("half"), py::arg("data"), py::arg("out"), py::arg("portably"));
  module.def("narrow", &narrowArray, py::arg("half"), py::arg("data"), py::arg("out"), py::arg("portably"));

  py::class_<Endpoint, std::shared_ptr<Endpoint>>(module, "Endpoint")
      .def(py::init(
          [](const py::bytes& key, const std::string& host, int first, int last, const std::string& advertise,
             bool encrypted) { return std::make_shared<Endpoint>(key, host, first, last, advertise, encrypted); }))
      .def_property_readonly("address", &Endpoint::address)
      .def("close", &Endpoint::close);

  py::class_<Memory, std::shared_ptr<Memory>>(module, "Memory", py::buffer_protocol()).def_buffer([](Memory& memory) {
    return py::buffer_info(memory.data(), static_cast<ssize_t>(memory.bytes()));
  });

  py::class_<ObservedGroup>(module, "Group")
      .def(py::init(&makeGroup))
      .def("allreduce",
           [](ObservedGroup& group, const py::buffer& data, const Reduction& reduction) {
             const py::buffer_info info = data.request(true);
             py::gil_scoped_release released;
             group.allreduce(info.ptr, bytesOf(info) / widthOf(reduction.type), reduction);
           })
      .def("reducescatter",
           [](ObservedGroup& group, const py::buffer& data, const std::vector<size_t>& counts, const py::buffer& out,
              const Reduction& reduction) {
             const size_t width = widthOf(reduction.type);
             void* from = sized(data, total(counts) * width, reduction.before != 1.0);
             void* to = sized(out, counts.at(static_cast<size_t>(group.rank())) * width, true);
             py::gil_scoped_release released;
             group.reducescatter(from, counts, to, reduction);
           })
      .def("broadcast",
           [](ObservedGroup& group, const py::buffer& data, int root, uint32_t signature) {
             const py::buffer_info info = data.request(true);
             py::gil_scoped_release released;
             group.broadcast(info.ptr, bytesOf(info), root, signature);
           })
      .def("allgather",
           [](ObservedGroup& group, const py::buffer& in, const py::buffer& out, const std::vector<size_t>& sizes,
              uint32_t signature) {
             const void* from = sized(in, sizes.at(static_cast<size_t>(group.rank())), false);
             void* to = sized(out, total(sizes), true);
             py::gil_scoped_release released;
             group.allgather(from, to, sizes, signature);
           })
      .def("alltoall",
           [](ObservedGroup& group, const std::vector<py::buffer>& in, const std::vector<py::buffer>& out,
              uint32_t signature, bool agreed) {
             const Parts from = partsOf(group, in, false), to = partsOf(group, out, true);
             py::gil_scoped_release released;
             group.alltoall(from, to, signature, agreed);
           })
      .def("barrier", &Group::barrier, py::call_guard<py::gil_scoped_release>())
      .def("memory", &Group::memory, py::call_guard<py::gil_scoped_release>())
      .def("set_timeout", [](ObservedGroup& group, double seconds) { group.setTimeout(millisecondsOf(seconds)); })
      .def("watch", [](ObservedGroup& group, py::object callback) { group.observer->set(std::move(callback)); })
      .def("abort", &Group::abort, py::call_guard<py::gil_scoped_release>())
      .def("close", &Group::close, py::call_guard<py::gil_scoped_release>())
      .def("check", &Group::check, py::call_guard<py::gil_scoped_release>());
}
