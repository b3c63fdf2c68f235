#include "transport/buffer.h"

#include <gloo/common/error.h>

#include <utility>

#include "transport/pair.h"

namespace elastic {

Buffer::~Buffer() {
  Mesh::Lock lock(mesh_.mu_);
  if (pending_ == 0) return;
  // An algorithm threw. This memory must not be touched any more, so the group cannot continue.
  mesh_.abortLocked(Cause::kAborted, {}, mesh_.name() + ": an operation was cancelled half way");
  for (int r = 0; r < mesh_.size; r++) {
    if (r != mesh_.rank) mesh_.pair(r).discardOperations();
  }
}

// Gloo passes the timeout that the group was created with; the mesh knows the current one.
bool Buffer::waitRecv(int* rank, std::chrono::milliseconds) { return wait(received_, rank, "receive"); }

bool Buffer::waitSend(int* rank, std::chrono::milliseconds) { return wait(sent_, rank, "send"); }

// The timeout is for one frame, so that an operation of any size may take as long as it needs.
bool Buffer::wait(Completions& done, int* rank, const char* what) {
  Mesh::Lock lock(mesh_.mu_);
  do {
    const size_t frames = done.frames;
    mesh_.wait(
        lock, [&] { return done.aborted || !done.peers.empty() || done.frames != frames; }, what);
  } while (!done.aborted && done.peers.empty());
  if (std::exchange(done.aborted, false)) return false;
  if (rank != nullptr) *rank = done.peers.front();
  done.peers.pop_front();
  return true;
}

void Buffer::abortWaitRecv() {
  Mesh::Lock lock(mesh_.mu_);
  received_.aborted = true;
  mesh_.wake();
}

void Buffer::abortWaitSend() {
  Mesh::Lock lock(mesh_.mu_);
  sent_.aborted = true;
  mesh_.wake();
}

void Buffer::send(int rank, uint64_t slot, size_t offset, size_t nbytes) {
  const size_t size = checkedSize(offset, nbytes);
  mesh_.getPair(rank)->send(this, slot, offset, size);
}

void Buffer::recv(int rank, uint64_t slot, size_t offset, size_t nbytes) {
  const size_t size = checkedSize(offset, nbytes);
  mesh_.getPair(rank)->recv(this, slot, offset, size);
}

void Buffer::recv(std::vector<int> ranks, uint64_t slot, size_t offset, size_t nbytes) {
  if (ranks.size() != 1) throw gloo::InvalidOperationException("receiving from any rank is not supported");
  recv(ranks[0], slot, offset, nbytes);
}

size_t Buffer::checkedSize(size_t offset, size_t nbytes) const {
  if (nbytes == 0) return 0;  // empty segments of Gloo's algorithms may start beyond the end
  if (nbytes == kUnspecifiedByteCount) nbytes = size - offset;
  if (offset > size || nbytes > size - offset) throw gloo::InvalidOperationException("outside of the buffer");
  return nbytes;
}

}  // namespace elastic
