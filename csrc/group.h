// The ranks of one generation and the collectives among them. One collective at a time per group; any thread may abort.
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
  // Close frames to peers that accept no byte for this long are given up.
  std::chrono::milliseconds closeTimeout{250};
  Mesh::OnWait onWait = [](std::chrono::milliseconds, const std::vector<int>&) {};
  // The ranks on this rank's host, ascending, including itself; they share memory if they can. Empty on all ranks: no
  // shared memory.
  std::vector<int> local;
  // Asked for addresses that are "" among the peers'.
  Mesh::FindAddresses findAddresses = [](const std::vector<int>&) { return std::vector<std::string>{}; };
  std::function<void(const std::string&)> warn = [](const std::string&) {};  // a warning for the user, one sentence
};

// All collectives accept empty arrays; if only some ranks pass one, all get a mismatch error.
class Group {
 public:
  Group(std::shared_ptr<Endpoint> endpoint, int rank, const std::vector<std::string>& peers, Fence fence,
        const GroupOptions& options);
  ~Group();

  int rank() const { return rank_; }
  int size() const { return size_; }

  // In place; identical bits on every rank.
  void allreduce(void* data, size_t count, const Reduction& reduction);
  // Rank r gets part r of the result, counts[r] elements, in `out`. Writes to `data` if `before` is not 1.
  void reducescatter(void* data, const std::vector<size_t>& counts, void* out, const Reduction& reduction);
  // signature: hash of everything else that must be equal on all ranks.
  void broadcast(void* data, size_t bytes, int root, uint32_t signature);
  // out: the parts of all ranks in rank order, sizes[r] bytes each.
  void allgather(const void* in, void* out, const std::vector<size_t>& sizes, uint32_t signature);
  // agreed: the ranks have told each other what they send; otherwise a size that its receiver does not expect fails.
  void alltoall(const Parts& in, const Parts& out, uint32_t signature, bool agreed);
  void barrier();

  // Allocates memory in the host's shared memory if possible: operands in it on all ranks of the host are reduced
  // without a copy. The first call is a collective unless one ran before.
  std::shared_ptr<Memory> memory(size_t bytes);

  // Sets how long a wait may last; a wait in progress counts as if it began now. Zero: no limit. Any thread.
  void setTimeout(std::chrono::milliseconds timeout) { mesh_->limit(timeout); }
  void abort(const std::string& reason);
  void close();
  void check();  // throws the failure if the group has failed

 private:
  struct AllRanks;

  uint32_t start(Call call);
  void waitForAll(uint32_t tag);
  void negotiateHosts();
  std::shared_ptr<Hosts> hosts();  // null: all traffic uses the mesh
  Route route(uint32_t tag);
  void reduceBySockets(const GlooContext& context, void* data, size_t count, const Reduction& reduction, uint32_t tag);
  void reduce(void* data, size_t count, const Reduction& reduction, uint32_t tag);
  void reduceDirectly(void* data, size_t count, const Reduction& reduction, uint32_t tag);
  void reduceToParts(void* data, const std::vector<size_t>& counts, void* out, const Reduction& reduction,
                     uint32_t tag);
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
  GlooContext allRanks_;
  bool negotiated_ = false;
  Call call_;  // the current collective; only set for hosts_
  std::mutex mutex_;
  std::shared_ptr<Hosts> hosts_;  // guarded by mutex_: any thread may close the group
  std::atomic<uint32_t> tag_{0};  // equal on all ranks that call the same collectives in the same order
  // Buffer for packed float32; reused, since touching new memory costs as much as packing.
  std::unique_ptr<uint16_t[]> packed_;
  size_t packedRoom_ = 0;
};

}  // namespace elastic
