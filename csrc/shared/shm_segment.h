// The memory that the ranks of one host share for one generation, and its layout.
//
// It is an anonymous file (memfd) passed between processes, so that nothing is left behind. It is allocated before use
// and never shrinks, so that a host without memory fails at set-up and not with SIGBUS.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "transport/call.h"
#include "transport/handshake.h"

namespace elastic {

constexpr size_t kMaxFailureBytes = 8192;  // bytes of an encoded failure

struct SegmentPlan {
  Fence fence;
  Nonce nonce{};  // drawn by the first member; a member that reads it in the memory shares it
  int members = 0;
};

// Whether a member communicates with other hosts, and whether the other members of its host wait for the result.
enum class CrossHost : uint32_t { kIdle, kNotAwaited, kAwaited };

// State of one member, on its own cache line.
struct alignas(64) MemberState {
  std::atomic<uint32_t> arrived;  // number of barriers it has arrived at
  std::atomic<CrossHost> crossHost;
  std::atomic<uint32_t> heartbeat;  // incremented while it waits for other hosts
  std::atomic<uint32_t> progress;   // number of its waits for other hosts that have succeeded
};

// The collective that a member has called, and where its operand lies.
struct alignas(64) CallDescriptor {
  Call call;
  uint64_t extent = 0;  // offset of the extent with the operand; 0: private memory
  uint64_t extentBytes = 0;
  uint64_t at = 0;      // offset of the operand within the extent
};

struct SegmentHeader {
  uint64_t magic;
  Fence fence;
  Nonce nonce;
  // Words of the barrier, each on its own cache line.
  alignas(64) std::atomic<uint32_t> arrivals;  // members that have arrived
  alignas(64) std::atomic<uint32_t> phase;  // twice the number of completed barriers; lowest bit: the group has failed
  std::atomic<uint32_t> sleepers;           // members that must be woken
  alignas(64) std::atomic<uint32_t> failureState;  // 0: none, 1: being written, 2: body and bodySize hold the failure
  uint32_t bodySize;
  char body[kMaxFailureBytes];
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "shared between processes");

class Segment {
 public:
  // Throws std::runtime_error with the reason: no memory, or not permitted.
  static std::shared_ptr<Segment> create(const SegmentPlan& plan);
  // Takes ownership of the descriptor. Throws std::runtime_error if it cannot be mapped or does not match the plan.
  static std::shared_ptr<Segment> open(int fd, const SegmentPlan& plan);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int fd() const { return fd_; }
  int members() const { return members_; }
  size_t chunk() const { return chunk_; }  // bytes of a staging buffer
  SegmentHeader& header() { return *reinterpret_cast<SegmentHeader*>(memory_); }
  MemberState& memberState(int member) { return reinterpret_cast<MemberState*>(memory_ + membersAt_)[member]; }
  CallDescriptor& descriptor(uint32_t bank, int member) {
    return reinterpret_cast<CallDescriptor*>(memory_ + descriptorsAt_)[at(bank, member)];
  }
  char* staging(uint32_t bank, int member) { return memory_ + stagingAt_ + at(bank, member) * chunk_; }

 private:
  Segment(int fd, int members);
  size_t at(uint32_t bank, int member) const {
    return bank * static_cast<size_t>(members_) + static_cast<size_t>(member);
  }
  void allocate();
  void map();

  const int fd_, members_;
  const size_t chunk_;
  size_t membersAt_, descriptorsAt_, stagingAt_, bytes_;
  char* memory_ = nullptr;
};

}  // namespace elastic
