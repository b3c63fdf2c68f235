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

  bool wait(std::deque<int>& done, bool& aborted, int* rank, const char* what);
  size_t checkedSize(size_t offset, size_t nbytes) const;

  // Guarded by the mesh's mutex.
  Mesh& mesh_;
  std::deque<int> sent_, received_;  // peers, one entry per completed operation
  int pending_ = 0;
  bool sendAborted_ = false, recvAborted_ = false;
};

}  // namespace elastic
