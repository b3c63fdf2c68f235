// The Python module `elastic_collectives._engine`: thin, takes memory by the buffer protocol, gives up the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

#include "group.h"

namespace py = pybind11;
using namespace elastic;

namespace {

// Set once by the Python half: called as (cause, ranks, reason), it raises the matching class of the error tree.
py::object& raiser() {
  static py::object* held = new py::object();  // never destroyed: the interpreter may be gone by then
  return *held;
}

void checkSignals() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void translate(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const Failure& failure) {
    try {
      raiser()(static_cast<int>(failure.cause), failure.ranks, failure.what());
    } catch (py::error_already_set& raised) {
      raised.restore();
    }
  }
}

void* writable(const py::buffer& buffer, size_t bytes) {
  py::buffer_info info = buffer.request(true);
  if (static_cast<size_t>(info.size * info.itemsize) != bytes) throw std::invalid_argument("sizes do not match");
  return info.ptr;
}

std::unique_ptr<Group> makeGroup(std::shared_ptr<Endpoint> endpoint, int rank, const std::vector<std::string>& peers,
                                 std::pair<uint64_t, uint64_t> fence, double timeout, size_t bcubeLimit) {
  GroupOptions options;
  options.timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout * 1000));
  options.bcubeLimit = bcubeLimit;
  options.checkSignals = checkSignals;
  py::gil_scoped_release released;
  return std::make_unique<Group>(std::move(endpoint), rank, peers, Fence{fence.first, fence.second}, options);
}

}  // namespace

PYBIND11_MODULE(_engine, module) {
  py::register_exception_translator(&translate);
  module.def("set_raiser", [](py::object function) { raiser() = std::move(function); });
  module.def("sha256_hmac", [](const std::string& key, const std::string& message) {
    const Digest digest = hmacSha256(key, message);
    return py::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
  });

  py::enum_<DataType>(module, "DataType")
      .value("float32", DataType::kFloat32)
      .value("float64", DataType::kFloat64)
      .value("int32", DataType::kInt32)
      .value("int64", DataType::kInt64);
  py::enum_<ReduceOp>(module, "ReduceOp")
      .value("sum", ReduceOp::kSum)
      .value("min", ReduceOp::kMin)
      .value("max", ReduceOp::kMax)
      .value("product", ReduceOp::kProduct);

  py::class_<Endpoint, std::shared_ptr<Endpoint>>(module, "Endpoint")
      .def(py::init(
          [](const py::bytes& key, const std::string& host, int first, int last, const std::string& advertise) {
            return std::make_shared<Endpoint>(key, host, first, last, advertise);
          }))
      .def_property_readonly("address", &Endpoint::address)
      .def("close", &Endpoint::close);

  py::class_<Group>(module, "Group")
      .def(py::init(&makeGroup))
      .def("allreduce",
           [](Group& group, const py::buffer& data, size_t count, size_t bytes, DataType type, ReduceOp op,
              const std::string& algorithm) {
             void* pointer = writable(data, bytes);
             py::gil_scoped_release released;
             group.allreduce(pointer, count, type, op, algorithm);
           })
      .def("broadcast",
           [](Group& group, const py::buffer& data, size_t bytes, int root) {
             void* pointer = writable(data, bytes);
             py::gil_scoped_release released;
             group.broadcast(pointer, bytes, root);
           })
      .def("allgather",
           [](Group& group, const py::buffer& in, const py::buffer& out, const std::vector<size_t>& sizes) {
             const void* from = in.request(false).ptr;
             void* to = out.request(true).ptr;
             py::gil_scoped_release released;
             group.allgather(from, to, sizes);
           })
      .def("barrier", &Group::barrier, py::call_guard<py::gil_scoped_release>())
      .def("abort", &Group::abort, py::call_guard<py::gil_scoped_release>())
      .def("close", &Group::close, py::call_guard<py::gil_scoped_release>())
      .def("check", &Group::check, py::call_guard<py::gil_scoped_release>());
}
