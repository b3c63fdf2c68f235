#include "group.h"

#include <gloo/allgatherv.h>
#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/math.h>

#include <numeric>
#include <stdexcept>

namespace elastic {
namespace {

using Reduce = void (*)(void*, const void*, const void*, size_t);

template <typename T>
Reduce reduceOf(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return static_cast<Reduce>(&gloo::sum<T>);
    case ReduceOp::kMin:
      return static_cast<Reduce>(&gloo::min<T>);
    case ReduceOp::kMax:
      return static_cast<Reduce>(&gloo::max<T>);
    case ReduceOp::kProduct:
      return static_cast<Reduce>(&gloo::product<T>);
  }
  throw std::invalid_argument("unknown reduction");
}

template <typename T>
void setData(gloo::AllreduceOptions& options, void* data, size_t count, ReduceOp op) {
  options.setOutput(static_cast<T*>(data), count);
  options.setReduceFunction(reduceOf<T>(op));
}

size_t widthOf(DataType type) { return type == DataType::kFloat32 || type == DataType::kInt32 ? 4 : 8; }

}  // namespace

struct Group::World : gloo::Context {
  World(int rank, int size, const std::shared_ptr<Mesh>& mesh) : gloo::Context(rank, size) {
    device_ = std::make_shared<Device>();
    transportContext_ = mesh;
    timeout_ = mesh->getTimeout();
  }
};

Group::Group(std::shared_ptr<Endpoint> endpoint, int rank, const std::vector<std::string>& peers, Fence fence,
             const GroupOptions& options)
    : rank_(rank), size_(static_cast<int>(peers.size())), bcubeLimit_(options.bcubeLimit) {
  mesh_ = std::make_shared<Mesh>(std::move(endpoint), rank, peers, fence, options.timeout, options.checkSignals);
  world_ = std::make_shared<World>(rank, size_, mesh_);
}

Group::~Group() { close(); }

void Group::allreduce(void* data, size_t count, DataType type, ReduceOp op, const std::string& algorithm) {
  const bool small = count * widthOf(type) <= bcubeLimit_;
  const bool bcube = algorithm == "bcube" || (algorithm == "auto" && small);
  const auto details = static_cast<uint64_t>(type) << 16 | static_cast<uint64_t>(op) << 8 | uint64_t{bcube};
  gloo::AllreduceOptions options(world_);
  options.setTag(enter(CallKind::kAllreduce, count * widthOf(type), details));
  switch (type) {
    case DataType::kFloat32:
      setData<float>(options, data, count, op);
      break;
    case DataType::kFloat64:
      setData<double>(options, data, count, op);
      break;
    case DataType::kInt32:
      setData<int32_t>(options, data, count, op);
      break;
    case DataType::kInt64:
      setData<int64_t>(options, data, count, op);
      break;
  }
  options.setAlgorithm(bcube ? gloo::AllreduceOptions::Algorithm::BCUBE : gloo::AllreduceOptions::Algorithm::RING);
  gloo::allreduce(options);
}

uint32_t Group::enter(CallKind kind, size_t bytes, uint64_t details) {
  const uint32_t tag = tag_++;
  mesh_->enter(Call{bytes, tag, kind, details});
  return tag;
}

void Group::broadcast(void* data, size_t bytes, int root) {
  gloo::BroadcastOptions options(world_);
  options.setOutput(static_cast<char*>(data), bytes);
  options.setRoot(root);
  options.setTag(enter(CallKind::kBroadcast, bytes, static_cast<uint64_t>(root)));
  gloo::broadcast(options);
}

void Group::allgather(const void* in, void* out, const std::vector<size_t>& sizes) {
  gloo::AllgathervOptions options(world_);
  options.setInput(static_cast<char*>(const_cast<void*>(in)), sizes[static_cast<size_t>(rank_)]);
  options.setOutput(static_cast<char*>(out), sizes);
  options.setTag(enter(CallKind::kAllgather, std::accumulate(sizes.begin(), sizes.end(), size_t{0}), 0));
  gloo::allgatherv(options);
}

void Group::barrier() {
  gloo::BarrierOptions options(world_);
  options.setTag(enter(CallKind::kBarrier, 0, 0));
  gloo::barrier(options);
}

void Group::abort(const std::string& reason) { mesh_->abort(Cause::kAborted, {}, reason); }

void Group::close() { mesh_->close(); }

void Group::check() { mesh_->check(); }

}  // namespace elastic
