#include "shared/shm_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <new>

namespace elastic {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kMaxViews = 256;

size_t roundUp(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

struct Memory::Registry {
  struct Extent {
    uint64_t offset;
    size_t bytes;
  };

  std::shared_ptr<Segment> segment;
  std::mutex mutex;                       // guards the members below
  std::map<const char*, Extent> extents;  // by address
  uint64_t next = 0, end = 0;  // of what is left of this member's region

  void drop(const char* data) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = extents.find(data);
    // Other members may still map it; they read zeros, which no collective uses.
    fallocate(segment->fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(found->second.offset),
              static_cast<off_t>(found->second.bytes));
    extents.erase(found);
  }
};

Memory::Memory(size_t bytes) : bytes_(roundUp(bytes)) {
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<char*>(memory);
}

Memory::Memory(char* data, size_t bytes, const std::shared_ptr<Registry>& registry)
    : data_(data), bytes_(bytes), registry_(registry) {}

Memory::~Memory() {
  if (const auto registry = registry_.lock()) registry->drop(data_);
  munmap(data_, bytes_);
}

MemoryPool::MemoryPool(std::shared_ptr<Segment> segment, int member, uint64_t region)
    : segment_(std::move(segment)), registry_(std::make_shared<Memory::Registry>()) {
  registry_->segment = segment_;
  registry_->next = region * (static_cast<uint64_t>(member) + 1);
  registry_->end = registry_->next + region;
}

MemoryPool::~MemoryPool() { dropViews(); }

std::shared_ptr<Memory> MemoryPool::allocate(size_t bytes) {
  const size_t room = roundUp(bytes);
  std::lock_guard<std::mutex> lock(registry_->mutex);
  const auto offset = static_cast<off_t>(registry_->next);
  if (room > registry_->end - registry_->next ||
      fallocate(segment_->fd(), 0, offset, static_cast<off_t>(room)) != 0) return nullptr;
  registry_->next += room;
  void* memory = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, segment_->fd(), offset);
  if (memory == MAP_FAILED) {
    fallocate(segment_->fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, static_cast<off_t>(room));
    return nullptr;
  }
  const auto data = static_cast<char*>(memory);
  std::shared_ptr<Memory> taken(new Memory(data, room, registry_));
  registry_->extents[data] = {static_cast<uint64_t>(offset), room};
  return taken;
}

void MemoryPool::describeOperand(const void* data, size_t bytes, CallDescriptor& descriptor) const {
  const auto begin = static_cast<const char*>(data);
  descriptor.extent = descriptor.extentBytes = descriptor.at = 0;
  std::lock_guard<std::mutex> lock(registry_->mutex);
  auto found = registry_->extents.upper_bound(begin);
  if (found == registry_->extents.begin()) return;
  --found;
  const auto at = static_cast<size_t>(begin - found->first);
  if (at > found->second.bytes || bytes > found->second.bytes - at) return;
  descriptor.extent = found->second.offset;
  descriptor.extentBytes = found->second.bytes;
  descriptor.at = at;
}

char* MemoryPool::view(const CallDescriptor& descriptor, size_t bytes) {
  if (descriptor.extent == 0 || descriptor.at > descriptor.extentBytes ||
      bytes > descriptor.extentBytes - descriptor.at) {
    return nullptr;
  }
  auto found = views_.find(descriptor.extent);
  if (found == views_.end()) {
    void* memory = mmap(nullptr, descriptor.extentBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                        segment_->fd(), static_cast<off_t>(descriptor.extent));
    if (memory == MAP_FAILED) return nullptr;
    found = views_.emplace(descriptor.extent, View{static_cast<char*>(memory), descriptor.extentBytes}).first;
  }
  return found->second.data + descriptor.at;
}

void MemoryPool::releaseViews() {
  if (views_.size() > kMaxViews) dropViews();
}

void MemoryPool::dropViews() {
  for (const auto& [offset, view] : views_) munmap(view.data, view.bytes);
  views_.clear();
}

}  // namespace elastic
