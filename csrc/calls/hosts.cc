#include "calls/hosts.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <stdexcept>

#include "transport/buffer.h"

namespace elastic {
namespace {

using Ranks = std::vector<int>;

int indexOf(const Ranks& ranks, int rank) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

// Translates ranks among leaders to ranks of the mesh.
class LeadersBuffer : public gloo::transport::UnboundBuffer {
 public:
  LeadersBuffer(Mesh& mesh, const Ranks& ranks, void* ptr, size_t size)
      : gloo::transport::UnboundBuffer(ptr, size), ranks_(ranks), inner_(mesh, ptr, size) {}

  using gloo::transport::UnboundBuffer::waitRecv;
  using gloo::transport::UnboundBuffer::waitSend;
  bool waitRecv(int* rank, std::chrono::milliseconds timeout) override {
    const bool done = inner_.waitRecv(rank, timeout);
    if (done && rank != nullptr) *rank = indexOf(ranks_, *rank);
    return done;
  }
  bool waitSend(int* rank, std::chrono::milliseconds timeout) override {
    const bool done = inner_.waitSend(rank, timeout);
    if (done && rank != nullptr) *rank = indexOf(ranks_, *rank);
    return done;
  }
  void abortWaitRecv() override { inner_.abortWaitRecv(); }
  void abortWaitSend() override { inner_.abortWaitSend(); }
  void send(int rank, uint64_t slot, size_t offset, size_t nbytes) override {
    inner_.send(ranks_.at(static_cast<size_t>(rank)), slot, offset, nbytes);
  }
  void recv(int rank, uint64_t slot, size_t offset, size_t nbytes) override {
    inner_.recv(ranks_.at(static_cast<size_t>(rank)), slot, offset, nbytes);
  }
  void recv(std::vector<int> ranks, uint64_t slot, size_t offset, size_t nbytes) override {
    for (int& rank : ranks) rank = ranks_.at(static_cast<size_t>(rank));
    inner_.recv(std::move(ranks), slot, offset, nbytes);
  }

 private:
  const Ranks& ranks_;
  Buffer inner_;
};

class LeadersTransport : public gloo::transport::Context {
 public:
  LeadersTransport(std::shared_ptr<Mesh> mesh, const Ranks& ranks)
      : gloo::transport::Context(indexOf(ranks, mesh->rank), static_cast<int>(ranks.size())),
        mesh_(std::move(mesh)),
        ranks_(ranks) {
    timeout_ = mesh_->getTimeout();
  }

  std::unique_ptr<gloo::transport::Pair>& getPair(int rank) override {
    return mesh_->getPair(ranks_.at(static_cast<size_t>(rank)));
  }
  std::unique_ptr<gloo::transport::Pair>& createPair(int rank) override { return getPair(rank); }
  std::unique_ptr<gloo::transport::UnboundBuffer> createUnboundBuffer(void* ptr, size_t size) override {
    return std::make_unique<LeadersBuffer>(*mesh_, ranks_, ptr, size);
  }

 private:
  const std::shared_ptr<Mesh> mesh_;
  const Ranks ranks_;
};

struct LeadersContext : gloo::Context {
  explicit LeadersContext(std::shared_ptr<LeadersTransport> transport)
      : gloo::Context(transport->rank, transport->size) {
    device_ = std::make_shared<Device>();
    timeout_ = transport->getTimeout();
    transportContext_ = std::move(transport);
  }
};

GlooContext buildLeadersContext(const std::shared_ptr<Mesh>& mesh, const std::vector<int>& ranks) {
  return std::make_shared<LeadersContext>(std::make_shared<LeadersTransport>(mesh, ranks));
}
struct HostDescriptor {
  int32_t leader = 0;
  uint32_t offersMemory = 0;  // whether it offers shared memory
  Nonce name{};
  Nonce probe{};
};

template <typename T>
std::vector<char> bytesOf(const T& value) {
  const auto first = reinterpret_cast<const char*>(&value);
  return std::vector<char>(first, first + sizeof value);
}

std::vector<HostDescriptor> exchangeDescriptors(const HostDescriptor& own, const Gather& gather) {
  std::vector<HostDescriptor> descriptors;
  for (const auto& bytes : gather(bytesOf(own))) {
    HostDescriptor descriptor;
    if (bytes.size() != sizeof descriptor)
      throw std::runtime_error("a rank's host descriptor has another size than ours");
    std::memcpy(&descriptor, bytes.data(), sizeof descriptor);
    descriptors.push_back(descriptor);
  }
  return descriptors;
}

// Groups ranks by the leader that they name; a rank whose leader names another one is alone. Equal on all ranks.
Topology buildTopology(const std::vector<int>& leaders, int self) {
  std::map<int, std::vector<int>> byLeader;
  for (int rank = 0; rank < static_cast<int>(leaders.size()); rank++) {
    const int leader = leaders[static_cast<size_t>(rank)];
    const bool sound = leader >= 0 && leader <= rank && leaders[static_cast<size_t>(leader)] == leader;
    byLeader[sound ? leader : rank].push_back(rank);
  }
  Topology topology;
  for (const auto& [leader, ranks] : byLeader) {
    const auto found = std::find(ranks.begin(), ranks.end(), self);
    if (found != ranks.end()) {
      topology.mine = topology.hosts.size();
      topology.member = static_cast<int>(found - ranks.begin());
    }
    topology.hosts.push_back(ranks);
  }
  return topology;
}

std::vector<int> leadersOf(const std::vector<HostDescriptor>& descriptors) {
  std::vector<int> leaders;
  for (const HostDescriptor& descriptor : descriptors) leaders.push_back(descriptor.leader);
  return leaders;
}

// This rank's handles of its host's shared memory; empty if the set-up failed.
struct HostMemory {
  std::shared_ptr<Segment> segment;
  std::unique_ptr<SegmentServer> server;  // on the first member
  LivenessSockets liveness;               // on the other members
};

HostMemory offerMemory(Mesh& mesh, const std::string& key, Fence fence, int members, HostDescriptor& descriptor,
                       std::string& why) {
  HostMemory memory;
  if (members < 2) return memory;
  if (members > kMaxMembers) {
    why = "shared memory is for " + std::to_string(kMaxMembers) + " ranks of a host at most";
    return memory;
  }
  descriptor.name = makeNonce();
  descriptor.probe = makeNonce();
  try {
    memory.segment = Segment::create({fence, descriptor.probe, members});
    memory.server = std::make_unique<SegmentServer>(mesh, key, descriptor.name, memory.segment->fd(), members);
    descriptor.offersMemory = 1;
  } catch (const std::runtime_error& error) {
    why = error.what();
    memory = HostMemory();  // the host uses sockets: the others read that from the descriptor
  }
  return memory;
}

HostMemory joinMemory(Mesh& mesh, const std::string& key, Fence fence, const Topology& topology,
                      const HostDescriptor& descriptor, std::string& why) {
  HostMemory memory;
  const int members = static_cast<int>(topology.hosts[topology.mine].size());
  if (descriptor.offersMemory == 0 || members > kMaxMembers) return memory;
  const auto until = Mesh::Clock::now() + mesh.getTimeout() / 2;
  try {
    ReceivedSegment received = fetchSegment(mesh, key, descriptor.name, topology.member, members, until);
    memory.segment = Segment::open(received.memory.release(), {fence, descriptor.probe, members});
    memory.liveness = std::move(received.liveness);
  } catch (const Failure&) {
    throw;
  } catch (const std::runtime_error& error) {
    why = error.what();
    memory = HostMemory();  // not fatal: all ranks of the host will learn it
  }
  return memory;
}

// Returns the leaders once each rank has reported whether it shares its host's memory.
std::vector<int> agreeOnHosts(bool succeeded, const std::vector<int>& leaders, const Topology& topology,
                              const Gather& gather) {
  const auto answers = gather(bytesOf(static_cast<uint8_t>(succeeded)));
  std::vector<int> agreed = leaders;
  for (const auto& ranks : topology.hosts) {
    const bool all = std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
      const auto& answer = answers[static_cast<size_t>(rank)];
      return answer.size() == 1 && answer[0] == 1;
    });
    for (int rank : ranks) agreed[static_cast<size_t>(rank)] = all ? ranks.front() : rank;
  }
  return agreed;
}

}  // namespace

Hosts::Hosts(const std::shared_ptr<Mesh>& mesh, Topology topology, std::unique_ptr<LocalGroup> local)
    : topology_(std::move(topology)), local_(std::move(local)) {
  if (topology_.hosts.size() > 1 && topology_.member == 0) leaders_ = buildLeadersContext(mesh, leaders());
}

std::vector<int> Hosts::leaders() const {
  std::vector<int> ranks;
  for (const auto& host : topology_.hosts) ranks.push_back(host.front());
  return ranks;
}

void Hosts::close() {
  if (local_) local_->close();
}

// Runs a leader's exchange with the other hosts.
void Hosts::runAmongLeaders(CrossHost phase, const std::function<void()>& run) {
  if (!leaders_) return;
  if (local_) local_->setCrossHost(phase);
  run();
  // A leader that is awaited stays so until it arrives at the barrier of those that wait for it.
  if (local_ && phase != CrossHost::kAwaited) local_->setCrossHost(CrossHost::kIdle);
}

// Members of this host may wait for the caller: it shows them after each block that it is alive.
void Hosts::copy(char* to, const char* from, size_t bytes) {
  constexpr size_t kBlock = size_t{4} << 20;
  for (size_t at = 0; at < bytes; at += kBlock) {
    std::memcpy(to + at, from + at, std::min(kBlock, bytes - at));
    if (local_) local_->showProgress();
  }
}

void Hosts::allreduce(void* data, size_t count, const Reduction& reduction, const Call& call,
                      const LeaderCollective& amongLeaders) {
  if (isSingleHost()) return local_->allreduce(data, count, reduction, call, true);
  // The division of an average and the factor are applied once, at the end.
  Reduction part = reduction;
  if (part.op == ReduceOp::kAverage) part.op = ReduceOp::kSum;
  part.after = 1.0;
  if (local_) local_->allreduce(data, count, part, call, false);
  runAmongLeaders(CrossHost::kAwaited, [&] {
    amongLeaders(leaders_);
    const size_t ranks = std::accumulate(topology_.hosts.begin(), topology_.hosts.end(), size_t{0},
                                         [](size_t sum, const auto& host) { return sum + host.size(); });
    scaleResult(reduction, data, count, reduction.type, static_cast<int>(ranks));
  });
  if (local_) local_->broadcast(data, count * widthOf(reduction.type), 0, call);
}

void Hosts::broadcast(void* data, size_t bytes, int root, const Call& call,
                      const std::function<void(const GlooContext&, int root)>& amongLeaders) {
  int host = 0, member = 0;
  for (size_t h = 0; h < topology_.hosts.size(); h++) {
    const auto& ranks = topology_.hosts[h];
    const auto found = std::find(ranks.begin(), ranks.end(), root);
    if (found == ranks.end()) continue;
    host = static_cast<int>(h);
    member = static_cast<int>(found - ranks.begin());
  }
  const bool home = static_cast<size_t>(host) == topology_.mine;
  if (home && local_) local_->broadcast(data, bytes, member, call);
  runAmongLeaders(home ? CrossHost::kNotAwaited : CrossHost::kAwaited, [&] { amongLeaders(leaders_, host); });
  if (!home && local_) local_->broadcast(data, bytes, 0, call);
}

void Hosts::allgather(const void* own, void* out, const std::vector<size_t>& sizes, const Call& call,
                      const LeaderAllgather& amongLeaders) {
  std::vector<char*> places;
  size_t total = 0;
  for (size_t size : sizes) {
    places.push_back(static_cast<char*>(out) + total);
    total += size;
  }
  const auto sizeOf = [&](int rank) { return sizes[static_cast<size_t>(rank)]; };
  const auto placeOf = [&](int rank) { return places[static_cast<size_t>(rank)]; };
  const auto& host = topology_.hosts[topology_.mine];
  const int self = host[static_cast<size_t>(topology_.member)];
  std::vector<char*> localPlaces;
  std::vector<size_t> localSizes;
  for (int rank : host) {
    localPlaces.push_back(placeOf(rank));
    localSizes.push_back(sizeOf(rank));
  }
  if (local_) {
    local_->allgather(own, localPlaces, localSizes, call);
  } else if (sizeOf(self) > 0) {
    std::memcpy(placeOf(self), own, sizeOf(self));
  }
  if (isSingleHost()) return;
  runAmongLeaders(CrossHost::kAwaited, [&] {
    // A host's parts need not be contiguous: leaders exchange them packed.
    std::vector<size_t> packed;
    for (const auto& ranks : topology_.hosts) {
      packed.push_back(std::accumulate(ranks.begin(), ranks.end(), size_t{0},
                                       [&](size_t sum, int rank) { return sum + sizeOf(rank); }));
    }
    const std::unique_ptr<char[]> in(new char[packed[topology_.mine]]), all(new char[total]);
    char* end = in.get();
    for (int rank : host) {
      copy(end, placeOf(rank), sizeOf(rank));
      end += sizeOf(rank);
    }
    amongLeaders(leaders_, in.get(), all.get(), packed);
    const char* next = all.get();
    for (const auto& ranks : topology_.hosts) {
      for (int rank : ranks) {
        copy(placeOf(rank), next, sizeOf(rank));
        next += sizeOf(rank);
      }
    }
  });
  if (local_) local_->broadcast(out, total, 0, call);
}

void Hosts::barrier(const Call& call, const LeaderCollective& amongLeaders) {
  if (local_) local_->barrier(call);
  if (isSingleHost()) return;
  runAmongLeaders(CrossHost::kAwaited, [&] { amongLeaders(leaders_); });
  if (local_) local_->barrier(call);
}

std::unique_ptr<Hosts> Hosts::negotiate(const std::shared_ptr<Mesh>& mesh, const std::string& key, Fence fence,
                                        const std::vector<int>& local, const Gather& gather, std::string& why) {
  const int self = mesh->rank;
  HostDescriptor descriptor;
  descriptor.leader = local.front();
  HostMemory memory;
  if (descriptor.leader == self)
    memory = offerMemory(*mesh, key, fence, static_cast<int>(local.size()), descriptor, why);
  const std::vector<HostDescriptor> descriptors = exchangeDescriptors(descriptor, gather);
  const std::vector<int> leaders = leadersOf(descriptors);
  const Topology proposed = buildTopology(leaders, self);
  if (proposed.hosts.size() == descriptors.size()) return nullptr;
  const auto& host = proposed.hosts[proposed.mine];
  const bool asExpected = host == local;
  if (asExpected && proposed.member > 0) {
    memory = joinMemory(*mesh, key, fence, proposed, descriptors[static_cast<size_t>(host.front())], why);
  }
  if (!asExpected) why = "its ranks have different lists of local ranks";
  const bool succeeded = host.size() == 1 || (asExpected && memory.segment != nullptr);
  Topology topology = buildTopology(agreeOnHosts(succeeded, leaders, proposed, gather), self);
  if (topology.hosts.size() == descriptors.size()) return nullptr;
  std::unique_ptr<LocalGroup> group;
  if (topology.hosts[topology.mine].size() > 1) {
    if (memory.server) memory.liveness = memory.server->takeOwnSockets();
    group = std::make_unique<LocalGroup>(memory.segment, std::move(memory.liveness), host, topology.member, *mesh);
  }
  return std::unique_ptr<Hosts>(new Hosts(mesh, std::move(topology), std::move(group)));
}

}  // namespace elastic
