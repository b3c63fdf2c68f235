#include "shared/local_group.h"

#include <sys/socket.h>

namespace elastic {

LocalGroup::LocalGroup(std::shared_ptr<Segment> segment, Lifelines lifelines, std::vector<int> ranks, int self,
                       Mesh& mesh)
    : segment_(std::move(segment)),
      ranks_(std::move(ranks)),
      self_(self),
      members_(static_cast<int>(ranks_.size())),
      mesh_(mesh),
      gate_(segment_, ranks_, self, mesh),
      memories_(segment_, self),
      lifelines_(std::move(lifelines)),
      scratch_(new char[kBlock]) {
  {
    const auto lock = mesh_.hold();
    for (int m = 0; m < members_; m++) {
      const int fd = lifelines_.others[static_cast<size_t>(m)].get();
      if (fd >= 0) mesh_.attach(fd, [this, m](uint32_t) { return onLifeline(m); });
    }
  }
  const auto tell = [this](const Failure& failure) {
    gate_.publish(failure);
    // For members that wait in their mesh; whether anybody is left to hear it is all the same.
    if (lifelines_.own.get() >= 0) send(lifelines_.own.get(), "", 1, MSG_NOSIGNAL);
  };
  mesh_.watchedBy(tell, &segment_->line(self_).pulse);
}

LocalGroup::~LocalGroup() { close(); }

void LocalGroup::close() {
  mesh_.watchedBy(nullptr, nullptr);
  const auto lock = mesh_.hold();
  for (auto& other : lifelines_.others) {
    mesh_.detach(other.get());
    other.reset(-1);
  }
  lifelines_.own.reset(-1);
}

// Readable: the member has published a failure. Closed: its process has ended, or it has closed its group.
std::unique_ptr<Failure> LocalGroup::onLifeline(int member) {
  const int fd = lifelines_.others[static_cast<size_t>(member)].get();
  char byte;
  const bool told = recv(fd, &byte, 1, MSG_PEEK) == 1;  // left there: all members share this end
  mesh_.detach(fd);
  if (told || gate_.failed()) return std::make_unique<Failure>(gate_.failure());
  gate_.lost(member);
  // While all wait for this one, none can have left in good order.
  return gate_.isAwaited() ? std::make_unique<Failure>(gate_.lossOf(member)) : nullptr;
}

void LocalGroup::post(const Call& call, const void* data, size_t bytes) {
  Notice& notice = segment_->notice(gate_.bank(), self_);
  notice.call = call;
  memories_.locate(data, bytes, notice);
}

void LocalGroup::check(uint32_t bank, const Call& call) {
  for (int m = 0; m < members_; m++) {
    const Call& theirs = segment_->notice(bank, m).call;
    if (theirs == call) continue;
    const int rank = ranks_[static_cast<size_t>(m)];
    mesh_.abort(Cause::kMismatch, {mesh_.rank, rank}, mismatchText(mesh_.rank, call, rank, theirs));
    mesh_.check();
  }
}

// How many members' operands lie in shared memory.
int LocalGroup::extents(uint32_t bank) {
  int count = 0;
  for (int m = 0; m < members_; m++) count += segment_->notice(bank, m).extent != 0;
  return count;
}

// A member's operand, as this process sees it.
char* LocalGroup::operandOf(int member, uint32_t bank, size_t bytes) {
  char* const operand = memories_.view(segment_->notice(bank, member), bytes);
  if (operand == nullptr) {
    mesh_.abort(Cause::kAborted, {mesh_.rank},
                "rank " + std::to_string(mesh_.rank) + ": no address space for the shared memory of rank " +
                    std::to_string(ranks_[static_cast<size_t>(member)]));
    mesh_.check();
  }
  return operand;
}

void LocalGroup::meet(const Call& call) {
  const uint32_t bank = gate_.bank();
  post(call, nullptr, 0);
  gate_.pass();
  check(bank, call);
}

}  // namespace elastic
