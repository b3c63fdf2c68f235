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

class Gate {
 public:
  // ranks: of the members, in their order; `self` is the index of this one.
  Gate(std::shared_ptr<Segment> segment, std::vector<int> ranks, int self, Mesh& mesh);

  // Returns once all members have come as often as this one; what they wrote before can be read from then on. Throws
  // the failure that ends the group.
  void pass();
  // What is written before the next pass() into this bank stays until the second pass() after that.
  uint32_t bank() const { return turn_ % 2; }

  // From any thread. The first failure stays.
  void publish(const Failure& failure);
  bool failed() const { return segment_->header().phase.load(std::memory_order_acquire) & 1; }
  Failure failure() const;  // waits a moment for the one who publishes it
  // A member's process is gone or has closed the group: fatal only to those who need it.
  void lost(int member) { gone_[static_cast<size_t>(member)] = true; }
  void setAway(Away away) { segment_->line(self_).away.store(away, std::memory_order_relaxed); }
  bool isAwaited() const { return segment_->line(self_).away.load(std::memory_order_relaxed) == Away::kAwaited; }
  Failure lossOf(int member) const;

 private:
  struct Watch;
  bool open() const;
  void spin() const;
  void sleep();
  void blameTheDead();
  void blameTheLate(Watch& watch);
  [[noreturn]] void raise();
  std::vector<int> missing() const;
  std::vector<int> toTell() const;

  const std::shared_ptr<Segment> segment_;
  const std::vector<int> ranks_;
  const int self_;
  Mesh& mesh_;
  const std::chrono::microseconds spin_;
  uint32_t turn_ = 0;  // passes begun
  std::vector<std::atomic<bool>> gone_;
};

}  // namespace elastic
