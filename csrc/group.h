// The ranks of one generation and the collectives among them. One collective at a time per group; abort from anywhere.
#pragma once

#include <gloo/context.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "calls/direct.h"
#include "calls/gloo_calls.h"
#include "calls/hosts.h"
#include "numbers/reduction.h"
#include "transport/call.h"
#include "transport/mesh.h"

namespace elastic {

struct GroupOptions {
  std::chrono::milliseconds timeout{60000};
  // Peers that take nothing of the last words for so long are stopped.
  std::chrono::milliseconds closeTimeout{250};
  Mesh::OnWait onWait = [](std::chrono::milliseconds, const std::vector<int>&) {};
  // The ranks on this one's host, in order, itself among them: they will share memory if they can. Empty (on all ranks
  // alike): none does.
  std::vector<int> local;
  std::function<void(const std::string&)> warn = [](const std::string&) {};  // what the user should know, one sentence
};

// All collectives also take nothing at all: ranks that bring nothing while others do are told of the mismatch.
class Group {
 public:
  Group(std::shared_ptr<Endpoint> endpoint, int rank, const std::vector<std::string>& peers, Fence fence,
        const GroupOptions& options);
  ~Group();

  int rank() const { return rank_; }
  int size() const { return size_; }

  // In place; identical bits on every rank.
  void allreduce(void* data, size_t count, const Reduction& reduction);
  // Part r of the result, counts[r] elements, is for rank r, in `out`. `data` is written to if there is a factor
  // `before`.
  void reducescatter(void* data, const std::vector<size_t>& counts, void* out, const Reduction& reduction);
  // signature: of whatever else must be equal on all ranks.
  void broadcast(void* data, size_t bytes, int root, uint32_t signature);
  // out holds everyone's part in rank order; sizes[r] bytes each.
  void allgather(const void* in, void* out, const std::vector<size_t>& sizes, uint32_t signature);
  void alltoall(const void* in, const std::vector<size_t>& inSizes, void* out, const std::vector<size_t>& outSizes,
                uint32_t signature);
  void barrier();

  // Memory that lies in the host's shared memory where that is possible: what lies in it on all ranks of the host is
  // reduced without a copy. It lives as long as it is held. The first call is a collective unless there was one before.
  std::shared_ptr<Memory> memory(size_t bytes);

  // How long a wait may last from now on, one that is under way as if it began now; zero: without end. Any thread.
  void limit(std::chrono::milliseconds timeout) { mesh_->limit(timeout); }
  void abort(const std::string& reason);
  void close();
  void check();  // throws the failure, if there is one

 private:
  struct AllRanks;

  uint32_t start(Call call);
  void waitForAll(uint32_t tag);
  void negotiateHosts();
  std::shared_ptr<Hosts> hosts();  // null: everything goes through the mesh
  Route route(uint32_t tag);
  void reduceBySockets(const World& world, void* data, size_t count, const Reduction& reduction, uint32_t tag);
  void reduce(void* data, size_t count, const Reduction& reduction, uint32_t tag);
  void reduceDirectly(void* data, size_t count, const Reduction& reduction, uint32_t tag);
  Reduction pack(const float* data, size_t count, const Reduction& reduction);
  void reducePacked(float* data, size_t count, const Reduction& reduction, uint32_t tag);
  void reducePackedAcross(Hosts& hosts, float* data, size_t count, const Reduction& reduction, uint32_t tag);
  void reduceByAdasum(void* data, size_t count, const Reduction& reduction, uint32_t tag);

  const int rank_, size_;
  const Fence fence_;
  const std::string key_;
  const std::vector<int> local_;
  const std::function<void(const std::string&)> warn_;
  std::shared_ptr<Mesh> mesh_;
  World world_;
  bool negotiated_ = false;
  Call call_;  // the collective that this rank is in; kept for hosts_ alone
  std::mutex mutex_;
  std::shared_ptr<Hosts> hosts_;  // guarded by the mutex: the group may be closed at any time
  std::atomic<uint32_t> tag_{0};  // equal on all ranks as long as they call the same collectives in the same order
  // What float32 is packed into; kept, since touching new memory costs as much as packing does.
  std::unique_ptr<uint16_t[]> packed_;
  size_t packedRoom_ = 0;
};

}  // namespace elastic
