#include "shared/shm_segment.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "transport/fork.h"

namespace elastic {
namespace {

constexpr uint64_t kSegmentMagic = 0x316d68736c65;  // "elshm1": grows with every change of the layout
constexpr uint32_t kBanks = 2;                      // one is written while the other one is read
constexpr size_t kPage = 4096;
constexpr size_t kMaxBankBytes = size_t{8} << 20;  // of staging buffers
constexpr size_t kLongestChunk = size_t{1} << 20;

size_t roundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

size_t chunkFor(int members) {
  return std::clamp(kMaxBankBytes / static_cast<size_t>(members) / kPage * kPage, kPage * 16, kLongestChunk);
}

[[noreturn]] void fail(const char* what) { throw std::runtime_error(std::string(what) + ": " + std::strerror(errno)); }

}  // namespace

Segment::Segment(int fd, int members) : fd_(fd), members_(members), chunk_(chunkFor(members)) {
  const auto count = static_cast<size_t>(members);
  membersAt_ = roundUp(sizeof(SegmentHeader), alignof(MemberState));
  descriptorsAt_ = membersAt_ + count * sizeof(MemberState);
  stagingAt_ = roundUp(descriptorsAt_ + kBanks * count * sizeof(CallDescriptor), kPage);
  bytes_ = stagingAt_ + kBanks * count * chunk_;
}

Segment::~Segment() {
  if (memory_ != nullptr) munmap(memory_, bytes_);
  closeFd(fd_);
}

std::shared_ptr<Segment> Segment::create(const SegmentPlan& plan) {
  const int fd = openRegistered([] { return memfd_create("elastic-segment", MFD_CLOEXEC | MFD_ALLOW_SEALING); });
  if (fd < 0) fail("no shared memory");
  std::shared_ptr<Segment> segment(new Segment(fd, plan.members));
  segment->allocate();
  segment->map();
  auto header = new (segment->memory_) SegmentHeader{};
  header->fence = plan.fence;
  header->nonce = plan.nonce;
  header->magic = kSegmentMagic;
  return segment;
}

std::shared_ptr<Segment> Segment::open(int fd, const SegmentPlan& plan) {
  std::shared_ptr<Segment> segment(new Segment(fd, plan.members));
  segment->map();
  const SegmentHeader& header = segment->header();
  if (header.magic != kSegmentMagic || !(header.fence == plan.fence) || header.nonce != plan.nonce) {
    throw std::runtime_error("the shared memory is not this generation's");
  }
  return segment;
}

void Segment::allocate() {
  int error;
  do {
    error = posix_fallocate(fd_, 0, static_cast<off_t>(bytes_));
  } while (error == EINTR);
  errno = error;
  if (error != 0) fail("no room for shared memory");
  if (fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) != 0) fail("shared memory cannot be sealed");
}

void Segment::map() {
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, 0);
  if (memory == MAP_FAILED) fail("shared memory cannot be mapped");
  memory_ = static_cast<char*>(memory);
}

}  // namespace elastic
