// The memory that the ranks of one host share for one generation, and how it is laid out.
//
// It is a file without a name (memfd), segment from process to process: nothing can stay behind, whoever dies when. All
// of it is allocated before it is used, and it never shrinks, so that a host without memory is an error and no SIGBUS.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "transport/call.h"
#include "transport/handshake.h"

namespace elastic {

constexpr size_t kMaxFailureBytes = 8192;  // bytes of a failure

struct SegmentPlan {
  Fence fence;
  Nonce nonce{};  // what the first member drew; a member that finds it in the memory does share it
  int members = 0;
};

// A member that is busy with other hosts: the rest of its own may wait for it, or have done their part and leave.
enum class CrossHost : uint32_t { kNot, kNotAwaited, kAwaited };

// What one member tells of itself; a cache line of its own.
struct alignas(64) MemberState {
  std::atomic<uint32_t> arrived;  // how often it has come to a meeting
  std::atomic<CrossHost> crossHost;
  std::atomic<uint32_t> heartbeat;  // grows while it waits for other hosts
};

// Which collective a member is in, and where its operand lies.
struct alignas(64) CallDescriptor {
  Call call;
  uint64_t extent = 0;  // offset of the shared memory that the operand lies in; 0: in private memory
  uint64_t room = 0;    // bytes of that
  uint64_t at = 0;      // of the operand within it
};

struct SegmentHeader {
  uint64_t magic;
  Fence fence;
  Nonce nonce;
  // Words of the meeting, each on a line of its own.
  alignas(64) std::atomic<uint32_t> arrivals;  // members that have come
  alignas(64) std::atomic<uint32_t> phase;     // twice the meetings held; the lowest bit: the group has failed
  std::atomic<uint32_t> sleepers;              // members that have to be woken
  alignas(64) std::atomic<uint32_t> failureState;   // 0: none, 1: being written, 2: body and bodySize hold the failure
  uint32_t bodySize;
  char body[kMaxFailureBytes];
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "shared between processes");

class Segment {
 public:
  // Throws std::runtime_error with the reason: no memory, or forbidden here.
  static std::shared_ptr<Segment> create(const SegmentPlan& plan);
  // Takes the descriptor. Throws std::runtime_error when it cannot be mapped or is not what the plan says.
  static std::shared_ptr<Segment> open(int fd, const SegmentPlan& plan);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int fd() const { return fd_; }
  int members() const { return members_; }
  size_t chunk() const { return chunk_; }  // bytes of a staging
  SegmentHeader& header() { return *reinterpret_cast<SegmentHeader*>(memory_); }
  MemberState& line(int member) { return reinterpret_cast<MemberState*>(memory_ + membersAt_)[member]; }
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
