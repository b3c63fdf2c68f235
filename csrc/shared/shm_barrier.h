// Where the members of one host meet: nobody goes on before all have come, or the group has failed.
//
// A waiter spins for a moment, then sleeps on a futex in slices; between slices it gives the mesh a turn, which is how
// it learns of dead members, of other hosts' failures and of Ctrl-C. A failure that any member publishes wakes all.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "shared/shm_segment.h"
#include "transport/mesh.h"

namespace elastic {

class SharedBarrier {
 public:
  // ranks: of the members, in their order; `self` is the index of this one.
  SharedBarrier(std::shared_ptr<Segment> segment, std::vector<int> ranks, int self, Mesh& mesh);

  // Returns once all members have come as often as this one; what they wrote before can be read from then on. Throws
  // the failure that ends the group.
  void arriveAndWait();
  // What is written before the next arriveAndWait() into this bank stays until the second arriveAndWait() after that.
  uint32_t bank() const { return turn_ % 2; }

  // From any thread. The first failure stays.
  void publish(const Failure& failure);
  bool failed() const { return segment_->header().phase.load(std::memory_order_acquire) & 1; }
  Failure failure() const;  // waits a moment for the one who publishes it
  // A member's process is gone or has closed the group: fatal only to those who need it.
  void lost(int member) { lost_[static_cast<size_t>(member)] = true; }
  void setCrossHost(CrossHost crossHost) { segment_->line(self_).crossHost.store(crossHost, std::memory_order_relaxed); }
  bool isAwaited() const { return segment_->line(self_).crossHost.load(std::memory_order_relaxed) == CrossHost::kAwaited; }
  Failure makeLossFailure(int member) const;

 private:
  struct WaitState;
  bool open() const;
  void spin() const;
  void sleep();
  void failOnLostMember();
  void failOnTimeout(WaitState& watch);
  [[noreturn]] void raise();
  std::vector<int> missing() const;
  std::vector<int> ranksToReport() const;

  const std::shared_ptr<Segment> segment_;
  const std::vector<int> ranks_;
  const int self_;
  Mesh& mesh_;
  const std::chrono::microseconds spin_;
  uint32_t turn_ = 0;  // passes begun
  std::vector<std::atomic<bool>> lost_;
};

}  // namespace elastic
