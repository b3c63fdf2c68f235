#include "shared/local_group.h"

#include <sys/socket.h>

#include <algorithm>
#include <cstring>

namespace elastic {
namespace {

constexpr size_t kSmallReduction = size_t{32}
                                   << 10;  // bytes up to which every member reduces everything, with one barrier
constexpr size_t kLine = 64;

// Start of a member's part of `count` elements; whole cache lines, so that members do not share lines when writing.
size_t startOf(int member, int members, size_t count, size_t width) {
  const size_t line = kLine / width, each = (count + static_cast<size_t>(members) - 1) / static_cast<size_t>(members);
  return std::min(count, (each + line - 1) / line * line * static_cast<size_t>(member));
}

}  // namespace

LocalGroup::LocalGroup(std::shared_ptr<Segment> segment, LivenessSockets liveness, std::vector<int> ranks, int self,
                       Mesh& mesh)
    : segment_(std::move(segment)),
      ranks_(std::move(ranks)),
      self_(self),
      members_(static_cast<int>(ranks_.size())),
      mesh_(mesh),
      barrier_(segment_, ranks_, self, mesh),
      pool_(segment_, self),
      liveness_(std::move(liveness)),
      scratch_(new char[kScratchBytes]) {
  {
    const auto lock = mesh_.lock();
    for (int m = 0; m < members_; m++) {
      const int fd = liveness_.others[static_cast<size_t>(m)].get();
      if (fd >= 0) mesh_.addFd(fd, [this, m](uint32_t) { return onLivenessEvent(m); });
    }
  }
  const auto publishFailure = [this](const Failure& failure) {
    barrier_.publish(failure);
    // Wakes members that wait in their mesh; a failed send does not matter.
    if (liveness_.own.get() >= 0) send(liveness_.own.get(), "", 1, MSG_NOSIGNAL);
  };
  MemberState& state = segment_->memberState(self_);
  mesh_.observeFailure(publishFailure, &state.heartbeat, &state.progress);
}

LocalGroup::~LocalGroup() { close(); }

void LocalGroup::close() {
  mesh_.observeFailure(nullptr, nullptr, nullptr);
  const auto lock = mesh_.lock();
  for (auto& other : liveness_.others) {
    mesh_.removeFd(other.get());
    other.reset(-1);
  }
  liveness_.own.reset(-1);
}

// Readable: the member has published a failure. Closed: its process has ended, or it has closed its group.
std::unique_ptr<Failure> LocalGroup::onLivenessEvent(int member) {
  const int fd = liveness_.others[static_cast<size_t>(member)].get();
  char byte;
  const bool signalled = recv(fd, &byte, 1, MSG_PEEK) == 1;  // not consumed: all members share this end
  mesh_.removeFd(fd);
  if (signalled || barrier_.failed()) return std::make_unique<Failure>(barrier_.failure());
  barrier_.lost(member);
  // While all members wait for this one, a closed socket cannot be an orderly exit.
  return barrier_.isAwaited() ? std::make_unique<Failure>(barrier_.makeLossFailure(member)) : nullptr;
}

void LocalGroup::post(const Call& call, const void* data, size_t bytes) {
  CallDescriptor& descriptor = segment_->descriptor(barrier_.bank(), self_);
  descriptor.call = call;
  pool_.describeOperand(data, bytes, descriptor);
}

void LocalGroup::requireSameCall(uint32_t bank, const Call& call) {
  for (int m = 0; m < members_; m++) {
    const Call& theirs = segment_->descriptor(bank, m).call;
    if (theirs == call) continue;
    const int rank = ranks_[static_cast<size_t>(m)];
    mesh_.abort(Cause::kMismatch, {mesh_.rank, rank}, mismatchText(mesh_.rank, call, rank, theirs));
    mesh_.check();
  }
}

// Number of members whose operand lies in shared memory.
int LocalGroup::countSharedOperands(uint32_t bank) {
  int count = 0;
  for (int m = 0; m < members_; m++) count += segment_->descriptor(bank, m).extent != 0;
  return count;
}

// Maps a member's operand into this process.
char* LocalGroup::operandOf(int member, uint32_t bank, size_t bytes) {
  char* const operand = pool_.view(segment_->descriptor(bank, member), bytes);
  if (operand == nullptr) {
    mesh_.abort(Cause::kAborted, {mesh_.rank},
                "rank " + std::to_string(mesh_.rank) + ": no address space for the shared memory of rank " +
                    std::to_string(ranks_[static_cast<size_t>(member)]));
    mesh_.check();
  }
  return operand;
}

void LocalGroup::barrier(const Call& call) {
  const uint32_t bank = barrier_.bank();
  post(call, nullptr, 0);
  barrier_.arriveAndWait();
  requireSameCall(bank, call);
}

// One reduction through the staging buffers. All chunks are divided into parts at the same offsets, since a staging
// buffer holds the result of one chunk beside the input of the next.
struct LocalGroup::StagedReduction {
  StagedReduction(void* operand, size_t count, const Reduction& reduction, const Call& call, size_t staging,
                  int members)
      : data(static_cast<char*>(operand)),
        count(count),
        width(widthOf(reduction.type)),
        reduction(reduction),
        call(call) {
    const size_t unit = kLine / width * static_cast<size_t>(members);
    const size_t most = staging / width / unit * unit, chunks = (count + most - 1) / most;
    chunk = ((count + chunks - 1) / chunks + unit - 1) / unit * unit;
    part = chunk / static_cast<size_t>(members);
  }

  size_t chunks() const { return (count + chunk - 1) / chunk; }
  size_t lengthOf(size_t c) const { return std::min(chunk, count - c * chunk); }
  char* at(size_t c) const { return data + c * chunk * width; }
  // Start of a member's part of chunk c.
  size_t startOf(int member, size_t c) const { return std::min(lengthOf(c), part * static_cast<size_t>(member)); }

  char* const data;
  const size_t count, width;
  const Reduction& reduction;
  const Call& call;
  bool toAllMembers = true;
  size_t chunk, part;  // elements
};

void LocalGroup::allreduce(void* data, size_t count, const Reduction& reduction, const Call& call, bool toAllMembers) {
  const size_t width = widthOf(reduction.type), bytes = count * width;
  pool_.releaseViews();
  if (bytes <= kSmallReduction) return reduceSmall(data, count, reduction, call);
  StagedReduction work(data, count, reduction, call, segment_->chunk(), members_);
  work.toAllMembers = toAllMembers;
  const uint32_t bank = barrier_.bank();
  post(call, data, bytes);
  const bool shared = segment_->descriptor(bank, self_).extent != 0;
  if (!shared) return reduceChunks(work, true);
  barrier_.arriveAndWait();
  requireSameCall(bank, call);
  if (countSharedOperands(bank) == members_) return reduceInPlace(bank, count, reduction, toAllMembers);
  reduceChunks(work, false);
}

void LocalGroup::reduceSmall(void* data, size_t count, const Reduction& reduction, const Call& call) {
  const uint32_t bank = barrier_.bank();
  std::memcpy(segment_->staging(bank, self_), data, count * widthOf(reduction.type));
  post(call, nullptr, 0);
  barrier_.arriveAndWait();
  requireSameCall(bank, call);
  std::vector<const char*> parts;
  for (int m = 0; m < members_; m++) parts.push_back(segment_->staging(bank, m));
  foldParts(reduction, parts, count, scratch_.get(), static_cast<char*>(data));
}

// Phase p copies chunk p in, reduces this member's part of chunk p - 1 and copies chunk p - 2 out. `mayRestart`: this
// is also the first barrier, which shows whether all operands lie in shared memory.
void LocalGroup::reduceChunks(StagedReduction& work, bool mayRestart) {
  const size_t chunks = work.chunks();
  for (size_t p = 0; p < chunks + 2; p++) {
    const uint32_t now = barrier_.bank(), before = now ^ 1;
    if (p < chunks) copyIn(work, p, now);
    if (p >= 1 && p - 1 < chunks) reducePart(work, p - 1, before, now);
    if (p >= 2 && (work.toAllMembers || self_ == 0)) copyOut(work, p - 2, before);
    if (p == chunks + 1) return;
    barrier_.arriveAndWait();
    if (p > 0 || !mayRestart) continue;
    requireSameCall(now, work.call);
    if (countSharedOperands(now) > 0) return reduceChunks(work, false);
  }
}

// Copies the parts that other members reduce; this member reads its own part from the operand.
void LocalGroup::copyIn(const StagedReduction& work, size_t c, uint32_t bank) {
  const size_t count = work.lengthOf(c), width = work.width;
  const size_t first = work.startOf(self_, c), last = work.startOf(self_ + 1, c);
  char* const staging = segment_->staging(bank, self_);
  std::memcpy(staging, work.at(c), first * width);
  std::memcpy(staging + last * width, work.at(c) + last * width, (count - last) * width);
}

// Writes the result to its place in the staging buffer, which is unused, and into the operand.
void LocalGroup::reducePart(const StagedReduction& work, size_t c, uint32_t from, uint32_t to) {
  const size_t width = work.width;
  const size_t last = work.startOf(self_ + 1, c);
  std::vector<const char*> parts(static_cast<size_t>(members_));
  for (size_t at = work.startOf(self_, c); at < last; at += kScratchBytes / width) {
    const size_t some = std::min(kScratchBytes / width, last - at);
    for (int m = 0; m < members_; m++) {
      parts[static_cast<size_t>(m)] = (m == self_ ? work.at(c) : segment_->staging(from, m)) + at * width;
    }
    char* const out = work.at(c) + at * width;
    foldParts(work.reduction, parts, some, scratch_.get(), out);
    std::memcpy(segment_->staging(to, self_) + at * width, out, some * width);
  }
}

void LocalGroup::copyOut(const StagedReduction& work, size_t c, uint32_t bank) {
  const size_t width = work.width;
  for (int m = 0; m < members_; m++) {
    if (m == self_) continue;
    const size_t first = work.startOf(m, c), last = work.startOf(m + 1, c);
    std::memcpy(work.at(c) + first * width, segment_->staging(bank, m) + first * width, (last - first) * width);
  }
}

// All operands lie in shared memory: each member reduces its part and writes the result to all operands.
void LocalGroup::reduceInPlace(uint32_t bank, size_t count, const Reduction& reduction, bool toAllMembers) {
  const size_t width = widthOf(reduction.type);
  std::vector<char*> operands;
  for (int m = 0; m < members_; m++) operands.push_back(operandOf(m, bank, count * width));
  char* const mine = operands[toAllMembers ? static_cast<size_t>(self_) : 0];
  std::vector<const char*> parts(operands.size());
  const size_t last = startOf(self_ + 1, members_, count, width);
  for (size_t at = startOf(self_, members_, count, width); at < last; at += kScratchBytes / width) {
    const size_t some = std::min(kScratchBytes / width, last - at);
    for (size_t m = 0; m < parts.size(); m++) parts[m] = operands[m] + at * width;
    char* const out = mine + at * width;
    foldParts(reduction, parts, some, scratch_.get(), out);
    for (char* operand : operands) {
      if (toAllMembers && operand != mine) std::memcpy(operand + at * width, out, some * width);
    }
  }
  barrier_.arriveAndWait();
}

// Bytes of a slot: what one member has for another in one phase.
size_t LocalGroup::sizeOfSlot() const { return segment_->chunk() / static_cast<size_t>(members_) / kLine * kLine; }

char* LocalGroup::slot(uint32_t bank, int from, int to) const {
  return segment_->staging(bank, from) + static_cast<size_t>(to) * sizeOfSlot();
}

// Phase p copies chunk p of the other members' parts in, and reduces chunk p - 1 of this member's part.
void LocalGroup::reducescatter(const void* data, const std::vector<size_t>& counts, void* out,
                               const Reduction& reduction, const Call& call) {
  const size_t width = widthOf(reduction.type), slot = sizeOfSlot(), step = std::min(kScratchBytes, slot);
  const size_t longest = *std::max_element(counts.begin(), counts.end()) * width;
  const char* const mine = static_cast<const char*>(data) + startsOf(counts)[static_cast<size_t>(self_)] * width;
  const size_t size = counts[static_cast<size_t>(self_)] * width;
  std::vector<const char*> parts(static_cast<size_t>(members_));
  for (size_t at = 0;; at += slot) {
    const uint32_t now = barrier_.bank(), before = now ^ 1;
    if (at == 0) post(call, nullptr, 0);
    const char* part = static_cast<const char*>(data);
    for (int m = 0; m < members_; m++) {
      const size_t bytes = counts[static_cast<size_t>(m)] * width;
      if (m != self_ && at < bytes) std::memcpy(this->slot(now, self_, m), part + at, std::min(slot, bytes - at));
      part += bytes;
    }
    for (size_t done = at < slot ? size : at - slot; done < std::min(at, size); done += step) {
      const size_t some = std::min({step, at - done, size - done});
      for (int m = 0; m < members_; m++) {
        parts[static_cast<size_t>(m)] = m == self_ ? mine + done : this->slot(before, m, self_) + (done + slot - at);
      }
      foldParts(reduction, parts, some / width, scratch_.get(), static_cast<char*>(out) + done);
    }
    if (at >= longest) return;
    barrier_.arriveAndWait();
    if (at == 0) requireSameCall(now, call);
  }
}

// Reads how much each member sends to each other one, and compares it with what this one expects from them. Returns the
// longest of all messages.
size_t LocalGroup::agreeOnLongest(uint32_t bank, const Parts& expected) {
  size_t longest = 0;
  for (int m = 0; m < members_; m++) {
    std::vector<size_t> theirs(expected.size());
    std::memcpy(theirs.data(), segment_->staging(bank, m), theirs.size() * sizeof(size_t));
    longest = std::max(longest, *std::max_element(theirs.begin(), theirs.end()));
    const auto member = static_cast<size_t>(m);
    mesh_.requireSize(ranks_[member], theirs[static_cast<size_t>(self_)], expected[member].bytes);
  }
  return longest;
}

// In the first phase, the sizes of what a member sends lie before its slots.
void LocalGroup::alltoall(const Parts& in, const Parts& out, const Call& call) {
  const size_t sizesBytes = in.size() * sizeof(size_t), heading = (sizesBytes + kLine - 1) / kLine * kLine;
  const size_t slot = (segment_->chunk() - heading) / in.size() / kLine * kLine;
  const auto me = static_cast<size_t>(self_);
  const auto slotOf = [&](uint32_t bank, size_t sender, size_t receiver) {
    return segment_->staging(bank, static_cast<int>(sender)) + heading + receiver * slot;
  };
  size_t longest = 0;
  for (size_t at = 0; at == 0 || at < longest; at += slot) {
    const uint32_t now = barrier_.bank();
    if (at == 0) {
      post(call, nullptr, 0);
      const auto sizes = reinterpret_cast<size_t*>(segment_->staging(now, self_));
      for (size_t m = 0; m < in.size(); m++) sizes[m] = in[m].bytes;
    }
    for (size_t m = 0; m < in.size(); m++) {
      if (m == me || at >= in[m].bytes) continue;
      std::memcpy(slotOf(now, me, m), in[m].data + at, std::min(slot, in[m].bytes - at));
    }
    barrier_.arriveAndWait();
    if (at == 0) {
      requireSameCall(now, call);
      longest = agreeOnLongest(now, out);
    }
    for (size_t m = 0; m < out.size(); m++) {
      if (m == me || at >= out[m].bytes) continue;
      std::memcpy(out[m].data + at, slotOf(now, m, me), std::min(slot, out[m].bytes - at));
    }
  }
  // Last: no member waits for it.
  if (in[me].bytes > 0) std::memcpy(out[me].data, in[me].data, in[me].bytes);
}

void LocalGroup::broadcast(void* data, size_t bytes, int root, const Call& call) {
  // All staging buffers of a bank, side by side.
  const size_t chunk = segment_->chunk() * static_cast<size_t>(members_);
  const auto operand = static_cast<char*>(data);
  pool_.releaseViews();
  uint32_t now = barrier_.bank();
  post(call, data, bytes);
  const bool shared = segment_->descriptor(now, self_).extent != 0;
  for (size_t at = 0; at < bytes; at += chunk) {
    now = barrier_.bank();
    char* const bankMemory = segment_->staging(now, 0);
    if (self_ == root && !shared) std::memcpy(bankMemory, operand + at, std::min(chunk, bytes - at));
    barrier_.arriveAndWait();
    if (at == 0) requireSameCall(now, call);
    if (at == 0 && segment_->descriptor(now, root).extent != 0) return broadcastInPlace(operand, bytes, root, now);
    if (self_ != root) std::memcpy(operand + at, bankMemory, std::min(chunk, bytes - at));
  }
}

// The root's operand lies in shared memory: all members copy it from there.
void LocalGroup::broadcastInPlace(char* operand, size_t bytes, int root, uint32_t bank) {
  if (self_ != root) std::memcpy(operand, operandOf(root, bank, bytes), bytes);
  barrier_.arriveAndWait();
}

void LocalGroup::allgather(const void* own, const std::vector<char*>& out, const std::vector<size_t>& sizes,
                           const Call& call) {
  const size_t chunk = segment_->chunk(), longest = *std::max_element(sizes.begin(), sizes.end());
  const size_t mine = sizes[static_cast<size_t>(self_)];
  if (out[static_cast<size_t>(self_)] != own && mine > 0) std::memcpy(out[static_cast<size_t>(self_)], own, mine);
  for (size_t at = 0; at < longest; at += chunk) {
    const uint32_t now = barrier_.bank();
    if (at == 0) post(call, nullptr, 0);
    if (at < mine)
      std::memcpy(segment_->staging(now, self_), static_cast<const char*>(own) + at, std::min(chunk, mine - at));
    barrier_.arriveAndWait();
    if (at == 0) requireSameCall(now, call);
    for (int m = 0; m < members_; m++) {
      const size_t size = sizes[static_cast<size_t>(m)];
      if (m == self_ || at >= size) continue;
      std::memcpy(out[static_cast<size_t>(m)] + at, segment_->staging(now, m), std::min(chunk, size - at));
    }
  }
}

}  // namespace elastic
