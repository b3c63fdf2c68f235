// Which ranks share a host's memory, and the collectives in two levels: inside each host through memory, among the
// first ranks of the hosts ("leaders") through the mesh, and inside each host again.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "calls/gloo_calls.h"
#include "shared/local_group.h"

namespace elastic {

// Gathers each rank's bytes on all ranks, in rank order.
using Gather = std::function<std::vector<std::vector<char>>(const std::vector<char>& own)>;

struct Topology {
  std::vector<std::vector<int>> hosts;  // ranks by host, each in order; hosts in the order of their first ranks
  size_t mine = 0;                      // this rank's host
  int member = 0;                       // this rank within it
};

class Hosts {
 public:
  // A collective of all ranks. local: the ranks on this rank's host according to the driver, ascending, including
  // itself. A host whose ranks do not all share memory counts as one host per rank; null if no host is left. why: set
  // to one sentence if this rank is the one that cannot share memory.
  static std::unique_ptr<Hosts> negotiate(const std::shared_ptr<Mesh>& mesh, const std::string& key, Fence fence,
                                          const std::vector<int>& local, const Gather& gather, std::string& why);

  bool isSingleHost() const { return topology_.hosts.size() == 1; }  // all ranks share one host
  std::vector<int> leaders() const;

  // The in-place operation among leaders, with the context of the leaders.
  using LeaderCollective = std::function<void(const GlooContext& leaders)>;
  void allreduce(void* data, size_t count, const Reduction& reduction, const Call& call,
                 const LeaderCollective& amongLeaders);
  // Among ranks that all share one host; see LocalGroup.
  void reducescatter(const void* data, const std::vector<size_t>& counts, void* out, const Reduction& reduction,
                     const Call& call) {
    local_->reducescatter(data, counts, out, reduction, call);
  }
  void alltoall(const Parts& in, const Parts& out, const Call& call) { local_->alltoall(in, out, call); }
  // amongLeaders: also gets the root's host, as a rank among leaders.
  void broadcast(void* data, size_t bytes, int root, const Call& call,
                 const std::function<void(const GlooContext&, int root)>& amongLeaders);
  // amongLeaders: gathers the hosts' parts, given in bytes, from the first into the second memory.
  using LeaderAllgather =
      std::function<void(const GlooContext&, const void* in, void* out, const std::vector<size_t>& sizes)>;
  void allgather(const void* own, void* out, const std::vector<size_t>& sizes, const Call& call,
                 const LeaderAllgather& amongLeaders);
  void barrier(const Call& call, const LeaderCollective& amongLeaders);

  // Null if shared memory has no room.
  std::shared_ptr<Memory> memory(size_t bytes) { return local_ ? local_->memory(bytes) : nullptr; }
  void close();

 private:
  Hosts(const std::shared_ptr<Mesh>& mesh, Topology topology, std::unique_ptr<LocalGroup> local);
  void runAmongLeaders(CrossHost phase, const std::function<void()>& run);
  void copy(char* to, const char* from, size_t bytes);

  const Topology topology_;
  const std::unique_ptr<LocalGroup> local_;  // null: the only rank on its host
  GlooContext leaders_;                      // null: one host, or not a leader
};

}  // namespace elastic
