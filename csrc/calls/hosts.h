// Which ranks memory a host's memory, and the collectives in two levels: inside each host through memory, among the
// first ranks of the hosts ("leaders") through the mesh, and inside each host again.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "calls/gloo_calls.h"
#include "shared/local_group.h"

namespace elastic {

// Each rank's bytes to all, in rank order.
using Gather = std::function<std::vector<std::vector<char>>(const std::vector<char>& own)>;

struct Topology {
  std::vector<std::vector<int>> hosts;  // ranks by host, each in order; hosts in the order of their first ranks
  size_t mine = 0;                      // this rank's host
  int member = 0;                       // this rank within it
};

class Hosts {
 public:
  // A collective of all ranks. `local`: those on this rank's host by the driver's answer, in order, this rank among them.
  // Every host whose ranks find out that they do not memory memory counts as so many hosts; null if all do.
  // why: one sentence, where this rank is the one that could not.
  static std::unique_ptr<Hosts> negotiate(const std::shared_ptr<Mesh>& mesh, const std::string& key, Fence fence,
                                       const std::vector<int>& local, const Gather& gather, std::string& why);

  bool isSingleHost() const { return topology_.hosts.size() == 1; }  // all ranks are on one host
  std::vector<int> leaders() const;

  // What leaders do among themselves: in the world that they are given, in place.
  using Step = std::function<void(const World& leaders)>;
  void allreduce(void* data, size_t count, const Reduction& reduction, const Call& call, const Step& across);
  // across: with the root's host, as a rank among leaders.
  void broadcast(void* data, size_t bytes, int root, const Call& call,
                 const std::function<void(const World&, int root)>& across);
  // across: gathers the hosts' parts, given in bytes, from the first into the second memory.
  using GatherStep = std::function<void(const World&, const void* in, void* out, const std::vector<size_t>& sizes)>;
  void gather(const void* own, void* out, const std::vector<size_t>& sizes, const Call& call, const GatherStep& across);
  void barrier(const Call& call, const Step& across);

  // Null where there is no room in shared memory.
  std::shared_ptr<Memory> memory(size_t bytes) { return local_ ? local_->memory(bytes) : nullptr; }
  void close();

 private:
  Hosts(const std::shared_ptr<Mesh>& mesh, Topology topology, std::unique_ptr<LocalGroup> local);
  void runAmongLeaders(CrossHost phase, const std::function<void()>& run);

  const Topology topology_;
  const std::unique_ptr<LocalGroup> local_;  // null: isSingleHost on its host
  World leaders_;                            // null: one host, or not a leader
};

}  // namespace elastic
