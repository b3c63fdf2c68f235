// The barrier between the members of one host: it releases them once all have arrived or the group has failed.
//
// A waiter spins for a moment, then sleeps on a futex in slices. Between slices it polls the mesh, which reports dead
// members, failures of other hosts and Ctrl-C. A failure that any member publishes wakes all.
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
  // ranks: rank of each member; self: index of this member.
  SharedBarrier(std::shared_ptr<Segment> segment, std::vector<int> ranks, int self, Mesh& mesh);

  // Waits until all members have arrived as often as this one; their earlier writes are visible then. Throws the
  // failure that ended the group.
  void arriveAndWait();
  // Data written to this bank before the next arriveAndWait() stays valid until the second one after that.
  uint32_t bank() const { return turn_ % 2; }

  // The first failure wins. Any thread.
  void publish(const Failure& failure);
  bool failed() const { return segment_->header().phase.load(std::memory_order_acquire) & 1; }
  Failure failure() const;  // waits briefly while another member writes it
  // The member's process has ended or closed the group; fatal only if this member still needs it.
  void lost(int member) { lost_[static_cast<size_t>(member)] = true; }
  // Until the next arriveAndWait().
  void setCrossHost(CrossHost crossHost) {
    segment_->memberState(self_).crossHost.store(crossHost, std::memory_order_relaxed);
  }
  // For a member that others wait for while it does something else than wait for other hosts.
  void showProgress() {
    MemberState& own = segment_->memberState(self_);
    own.heartbeat.fetch_add(1, std::memory_order_relaxed);
    own.progress.fetch_add(1, std::memory_order_relaxed);
  }
  bool isAwaited() const {
    return segment_->memberState(self_).crossHost.load(std::memory_order_relaxed) == CrossHost::kAwaited;
  }
  Failure makeLossFailure(int member) const;

 private:
  struct WaitState;
  bool isReleased() const;
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
  uint32_t turn_ = 0;  // number of arrivals of this member
  std::vector<std::atomic<bool>> lost_;
};

}  // namespace elastic
