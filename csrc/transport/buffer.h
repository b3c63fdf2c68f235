// Memory that collectives send from and receive into. Counts completions; its destructor cancels pending operations.
#pragma once

#include <gloo/transport/unbound_buffer.h>

#include <deque>

#include "transport/mesh.h"

namespace elastic {

class Buffer : public gloo::transport::UnboundBuffer {
 public:
  Buffer(Mesh& mesh, void* ptr, size_t size) : gloo::transport::UnboundBuffer(ptr, size), mesh_(mesh) {}
  ~Buffer() override;

  using gloo::transport::UnboundBuffer::waitRecv;
  using gloo::transport::UnboundBuffer::waitSend;
  bool waitRecv(int* rank, std::chrono::milliseconds timeout) override;
  bool waitSend(int* rank, std::chrono::milliseconds timeout) override;
  void abortWaitRecv() override;
  void abortWaitSend() override;
  void send(int rank, uint64_t slot, size_t offset, size_t nbytes) override;
  void recv(int rank, uint64_t slot, size_t offset, size_t nbytes) override;
  void recv(std::vector<int> ranks, uint64_t slot, size_t offset, size_t nbytes) override;

 private:
  friend class Pair;

  // The completed operations of one direction.
  struct Completions {
    std::deque<int> peers;  // one entry per operation
    size_t frames = 0;      // of all operations, those under way included
    bool aborted = false;

    // A frame is complete; `rest` bytes of its operation follow.
    void add(int peer, size_t rest) {
      frames++;
      if (rest == 0) peers.push_back(peer);
    }
  };

  bool wait(Completions& done, int* rank, const char* what);
  size_t checkedSize(size_t offset, size_t nbytes) const;

  // Guarded by the mesh's mutex.
  Mesh& mesh_;
  Completions sent_, received_;
  int pending_ = 0;  // frames
};

}  // namespace elastic
