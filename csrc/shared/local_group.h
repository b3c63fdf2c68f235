// Collectives among the ranks of one host, through shared memory.
//
// Members are numbered from 0 in rank order. Operands pass through staging buffers chunk by chunk, with one barrier per
// chunk: while chunk p is copied in, each member reduces its part of chunk p - 1, and chunk p - 2 is copied out.
// Operands that all lie in shared memory are reduced in place. Parts are reduced in rank order. If each
// member sends different data to each other one, a staging buffer holds a slot for each of them.
#pragma once

#include <memory>
#include <vector>

#include "numbers/reduction.h"
#include "shared/shm_barrier.h"
#include "shared/shm_fd_passing.h"
#include "shared/shm_memory.h"
#include "transport/mesh.h"

namespace elastic {

class LocalGroup {
 public:
  LocalGroup(std::shared_ptr<Segment> segment, LivenessSockets liveness, std::vector<int> ranks, int self, Mesh& mesh);
  ~LocalGroup();

  // call: must be equal on all members. toAllMembers: every member gets the result; otherwise only the first one, and
  // the other operands are undefined.
  void allreduce(void* data, size_t count, const Reduction& reduction, const Call& call, bool toAllMembers);
  // counts: elements of each member's part of data; out: receives the result of this member's part, and may lie in it.
  void reducescatter(const void* data, const std::vector<size_t>& counts, void* out, const Reduction& reduction,
                     const Call& call);
  // in, out: what each member gets from this one, and what this one gets from it.
  void alltoall(const Parts& in, const Parts& out, const Call& call);
  void broadcast(void* data, size_t bytes, int root, const Call& call);
  // out: destination of each member's part; own: this member's part, copied unless it is already in place.
  void allgather(const void* own, const std::vector<char*>& out, const std::vector<size_t>& sizes, const Call& call);
  void barrier(const Call& call);

  // Null if there is no room.
  std::shared_ptr<Memory> memory(size_t bytes) { return pool_.allocate(bytes); }
  void setCrossHost(CrossHost crossHost) { barrier_.setCrossHost(crossHost); }
  void showProgress() { barrier_.showProgress(); }
  // Closes the sockets that show the others that this member is alive. Any thread.
  void close();

 private:
  struct StagedReduction;
  void post(const Call& call, const void* data, size_t bytes);
  void requireSameCall(uint32_t bank, const Call& call);
  int countSharedOperands(uint32_t bank);
  char* operandOf(int member, uint32_t bank, size_t bytes);
  std::unique_ptr<Failure> onLivenessEvent(int member);
  void reduceSmall(void* data, size_t count, const Reduction& reduction, const Call& call);
  void reduceChunks(StagedReduction& work, bool mayRestart);
  void copyIn(const StagedReduction& work, size_t c, uint32_t bank);
  void reducePart(const StagedReduction& work, size_t c, uint32_t from, uint32_t to);
  void copyOut(const StagedReduction& work, size_t c, uint32_t bank);
  size_t sizeOfSlot() const;
  char* slot(uint32_t bank, int from, int to) const;
  size_t agreeOnLongest(uint32_t bank, const Parts& expected);
  void reduceInPlace(uint32_t bank, size_t count, const Reduction& reduction, bool toAllMembers);

  void broadcastInPlace(char* operand, size_t bytes, int root, uint32_t bank);

  static constexpr size_t kScratchBytes = size_t{32} << 10;  // stays in the first-level cache during a reduction

  const std::shared_ptr<Segment> segment_;
  const std::vector<int> ranks_;
  const int self_, members_;
  Mesh& mesh_;
  SharedBarrier barrier_;
  MemoryPool pool_;
  LivenessSockets liveness_;  // guarded by the mesh's mutex
  std::unique_ptr<char[]> scratch_;
};

}  // namespace elastic
