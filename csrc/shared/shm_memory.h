// Memory that a member hands out to its program: it lies in the segment's file, so that a reduction of it needs no
// copy.
//
// It outlives the group: the mapping stays until the last owner drops it, and a member that comes to life again after
// the group's end writes into pages of a generation that nobody reads any more.
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
  // Memory of this process alone.
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

// What one member has segment out, and its view of what others have.
class MemoryPool {
 public:
  MemoryPool(std::shared_ptr<Segment> segment, int member);
  ~MemoryPool();

  // Null where the host has no room. From any thread.
  std::shared_ptr<Memory> allocate(size_t bytes);
  // Says in the descriptor where an operand of this member lies.
  void describeOperand(const void* data, size_t bytes, CallDescriptor& descriptor) const;
  // The operand of another member (or one's own) in this process; null where it cannot be mapped. Until releaseViews().
  char* view(const CallDescriptor& descriptor, size_t bytes);
  // Between collectives: gives up views when there are many.
  void releaseViews();

 private:
  struct View {
    char* data;
    size_t bytes;
  };
  void dropViews();

  const std::shared_ptr<Segment> segment_;
  const std::shared_ptr<Memory::Registry> registry_;
  std::unordered_map<uint64_t, View> views_;  // by the offset of the extent, which is never used twice
};

}  // namespace elastic
