#include "calls/leaders.h"

#include <algorithm>

#include "transport/buffer.h"

namespace elastic {
namespace {

using Ranks = std::vector<int>;

int indexOf(const Ranks& ranks, int rank) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

// Numbers its peers as the leaders do, and the buffer within as the mesh does.
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

struct LeadersWorld : gloo::Context {
  explicit LeadersWorld(std::shared_ptr<LeadersTransport> transport) : gloo::Context(transport->rank, transport->size) {
    device_ = std::make_shared<Device>();
    timeout_ = transport->getTimeout();
    transportContext_ = std::move(transport);
  }
};

}  // namespace

World worldOf(const std::shared_ptr<Mesh>& mesh, const std::vector<int>& ranks) {
  return std::make_shared<LeadersWorld>(std::make_shared<LeadersTransport>(mesh, ranks));
}

}  // namespace elastic
