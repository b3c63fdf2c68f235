// The ranks of one generation and the collectives among them. One collective at a time per group; abort from anywhere.
#pragma once

#include <gloo/context.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "mesh.h"

namespace elastic {

enum class DataType { kFloat32, kFloat64, kInt32, kInt64 };
enum class ReduceOp { kSum, kMin, kMax, kProduct };

struct GroupOptions {
  std::chrono::milliseconds timeout{60000};
  size_t bcubeLimit = size_t{1} << 20;         // bytes up to which allreduce takes bcube, above it the ring
  std::function<void()> checkSignals = [] {};  // what it throws ends a wait
};

class Group {
 public:
  Group(std::shared_ptr<Endpoint> endpoint, int rank, const std::vector<std::string>& peers, Fence fence,
        const GroupOptions& options);
  ~Group();

  int rank() const { return rank_; }
  int size() const { return size_; }

  // In place; identical bits on every rank. algorithm: "auto", "ring" or "bcube".
  void allreduce(void* data, size_t count, DataType type, ReduceOp op, const std::string& algorithm);
  void broadcast(void* data, size_t bytes, int root);
  // out holds everyone's part in rank order; sizes[r] bytes each.
  void allgather(const void* in, void* out, const std::vector<size_t>& sizes);
  void barrier();

  void abort(const std::string& reason);
  void close();
  void check();  // throws the failure, if there is one

 private:
  struct World;

  const int rank_, size_;
  const size_t bcubeLimit_;
  std::shared_ptr<Mesh> mesh_;
  std::shared_ptr<World> world_;
  uint32_t enter(CallKind kind, size_t bytes, uint64_t details);

  std::atomic<uint32_t> tag_{0};  // equal on all ranks as long as they call the same collectives in the same order
};

}  // namespace elastic
