// Memory for operands in the segment's file, so that their reduction needs no copy.
//
// It outlives the group: the mapping stays until its last owner releases it. A stopped member that resumes after the
// group's end writes to pages of a generation that no process reads any more.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "shared/shm_segment.h"

namespace elastic {

class Memory {
 public:
  // Private memory of this process.
  explicit Memory(size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  friend class MemoryPool;
  struct Registry;
  Memory(char* data, size_t bytes, const std::shared_ptr<Registry>& registry);

  char* data_ = nullptr;
  const size_t bytes_;
  std::weak_ptr<Registry> registry_;
};

// The memory that this member has allocated, and its mappings of the other members' memory.
class MemoryPool {
 public:
  // region: bytes of the file that each member may allocate in its life; the file is sparse, offsets are not reused.
  MemoryPool(std::shared_ptr<Segment> segment, int member, uint64_t region = uint64_t{1} << 40);
  ~MemoryPool();

  // Null if the host or this member's region has no room. Any thread.
  std::shared_ptr<Memory> allocate(size_t bytes);
  // Writes into the descriptor where an operand of this member lies.
  void describeOperand(const void* data, size_t bytes, CallDescriptor& descriptor) const;
  // Maps the operand of a member into this process; null if that fails. Valid until releaseViews().
  char* view(const CallDescriptor& descriptor, size_t bytes);
  // Unmaps views if there are many; call between collectives.
  void releaseViews();

 private:
  struct View {
    char* data;
    size_t bytes;
  };
  void dropViews();

  const std::shared_ptr<Segment> segment_;
  const std::shared_ptr<Memory::Registry> registry_;
  std::unordered_map<uint64_t, View> views_;  // by the extent's offset, which is never reused
};

}  // namespace elastic
