// The reading half of a pair: where the bodies of frames go, and what is done with frames that nobody asked for yet.
#include <cerrno>
#include <cstring>

#include "transport/buffer.h"
#include "transport/goodbye.h"
#include "transport/pair.h"

namespace elastic {
namespace {

constexpr size_t kMostAside = size_t{1} << 28;  // bytes stored for collectives that have not begun here
constexpr size_t kLongestGoodbye = size_t{1} << 16;

bool isOurs(uint64_t slot) { return slot == kGoodbyeSlot || slot == kHereSlot; }

}  // namespace

// The peer takes nothing more. It may have said goodbye before it went, which tells more than our errno: read it all.
void Pair::drain() {
  draining_ = true;
  if (paused_) {
    paused_ = false;
    if (!place()) return;
  }
  read();
}

void Pair::read() {
  while (state_ == State::kUp && !paused_) {
    if (!inBody_) {
      if (!readInto(reinterpret_cast<char*>(&header_), have_, sizeof header_)) return;
      have_ = 0;
      if (!place()) return;
    }
    if (!readInto(target_.data, have_, header_.size)) return;
    have_ = 0;
    deliver();
  }
}

// True once all `size` bytes are there.
bool Pair::readInto(char* data, size_t& have, size_t size) {
  while (have < size) {
    const ssize_t got = connection_.recv(data + have, size - have);
    if (got < 0 && errno == EAGAIN) return false;
    if (got <= 0) {
      const bool cipher = got < 0 && errno == EPROTO;
      fail(got == 0               ? "closed by peer"
           : !cipher              ? strerror(errno)
           : state_ == State::kUp ? "what it sent was changed on the way, or was not its own"
                                  : "it does not hold the job's key, by TLS");
      return false;
    }
    have += static_cast<size_t>(got);
    heard_ = Mesh::Clock::now();
  }
  return true;
}

// A header is there: find where its body goes. False: it has to wait, or the group has failed.
bool Pair::place() {
  if (!sameCall(header_.call)) return false;
  aside_ = !take(target_);
  if (aside_ && !placeAside()) return false;
  if (target_.size != header_.size) {
    mismatch(target_.size, header_.size);
    return false;
  }
  inBody_ = true;
  return true;
}

bool Pair::fitsAside() const {
  return header_.size <= (isOurs(header_.slot) ? kLongestGoodbye : kMostAside - mesh_.spilled_);
}

// Takes aside the frame that a paused pair holds, since what matters may come after it.
void Pair::lookBehind() {
  if (state_ != State::kUp || !paused_ || !fitsAside()) return;
  paused_ = false;
  draining_ = true;
  const bool placed = place();
  draining_ = false;  // one frame at a time: the next one may not fit
  if (placed) read();
  arm();
}

bool Pair::placeAside() {
  const bool ours = isOurs(header_.slot);
  if (!ours && posted_ == 0 && !draining_) {
    paused_ = true;  // back-pressure: nothing is read until somebody asks
    arm();
    return false;
  }
  if (!fitsAside()) {
    fail("it sent more than anybody here asked for");
    return false;
  }
  if (!ours) mesh_.spilled_ += header_.size;
  asideBody_.resize(header_.size);
  target_ = {nullptr, asideBody_.data(), header_.size};
  return true;
}

// The first receive that is posted for the frame's slot, if there is one.
bool Pair::take(Receive& receive) {
  auto posted = receives_.find(header_.slot);
  if (posted == receives_.end()) return false;
  receive = posted->second.front();
  posted->second.pop_front();
  if (posted->second.empty()) receives_.erase(posted);
  posted_--;
  return true;
}

void Pair::complete(const Receive& receive) {
  receive.buffer->received_.push_back(peer_);
  receive.buffer->pending_--;
  mesh_.news_.notify_all();
}

bool Pair::sameCall(const Call& theirs) {
  const Call& mine = mesh_.call_;
  if (!mine.conflicts(theirs)) return true;
  mesh_.abortLocked(Cause::kMismatch, {mesh_.rank, peer_}, mismatchText(mesh_.rank, mine, peer_, theirs));
  return false;
}

void Pair::mismatch(size_t expected, size_t got) {
  mesh_.abortLocked(Cause::kMismatch, {mesh_.rank, peer_},
                    mesh_.me() + ": rank " + std::to_string(peer_) + " sent " + std::to_string(got) + " bytes where " +
                        std::to_string(expected) +
                        " were expected: the ranks do not call the same collective with the same sizes");
}

void Pair::deliver() {
  inBody_ = false;
  if (!aside_) return complete(target_);
  if (header_.slot == kHereSlot) return sayHere();
  if (header_.slot == kGoodbyeSlot) {
    const Failure failure = decodeGoodbye(asideBody_, peer_);
    return mesh_.abortLocked(failure.cause, failure.ranks, failure.what());
  }
  std::vector<char> body = std::move(asideBody_);
  asideBody_ = {};
  Receive late;  // posted while the body was on its way
  if (!take(late)) {
    early_[header_.slot].push_back({header_.call, std::move(body)});
    return;
  }
  mesh_.spilled_ -= body.size();
  if (late.size != body.size()) return mismatch(late.size, body.size());
  if (late.size > 0) std::memcpy(late.data, body.data(), late.size);
  complete(late);
}

}  // namespace elastic
