// How long a mesh waits, whom it blames in the end, and what waiters do meanwhile.
#include <algorithm>

#include "transport/mesh.h"
#include "transport/pair.h"

namespace elastic {
namespace {

constexpr std::chrono::milliseconds kSlice{200};  // how often a waiter looks for Ctrl-C and expired strangers
constexpr std::chrono::seconds kLate{1};          // after which peers ought to know that we wait ourselves
constexpr std::chrono::seconds kSilent{1};        // a peer that is late says so far more often than this
constexpr std::chrono::seconds kGrace{2};         // for whoever knows the culprit of a timeout to tell

}  // namespace

void Mesh::limit(std::chrono::milliseconds timeout) {
  // In this order: who sees the new limit also sees from when it counts.
  limitedAt_.store(Clock::now().time_since_epoch().count());
  limit_.store(timeout.count());
}

Mesh::Clock::time_point Mesh::deadlineOf(Clock::time_point begin) const {
  const std::chrono::milliseconds limit(limit_.load());
  if (limit.count() == 0) return Clock::time_point::max();
  return std::max(begin, Clock::time_point(Clock::duration(limitedAt_.load()))) + limit;
}

void Mesh::wait(Lock& lock, const std::function<bool()>& done, const char* what) {
  auto begin = Clock::now();
  while (!done()) {
    checkLocked();
    const auto now = Clock::now(), deadline = deadlineOf(begin);
    if (now >= deadline) timeOut(what, now - deadline >= kGrace);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - now);
    const auto slice = now < deadline ? std::min(kSlice, left) : kSlice;
    if (!polling_) {
      begin += lead(lock, slice, begin);
    } else if (news_.wait_for(lock, slice) == std::cv_status::timeout) {
      begin += overslept(now, slice);
      tellOfWait(lock, begin, {});
    }
  }
  passOn();
}

// Time in which this process was stopped, or its machine: peers had none of it either, or could not be heard.
Mesh::Clock::duration Mesh::overslept(Clock::time_point since, std::chrono::milliseconds slice) {
  const auto over = Clock::now() - since - slice;
  return over > kSlice ? over : Clock::duration::zero();
}

// Peers that keep us waiting. One that waits itself, for somebody else, says so now and then.
std::vector<int> Mesh::awaited(bool silentOnes) {
  const auto since = Clock::now() - kSilent;
  std::vector<int> ranks;
  for (int r = 0; r < size; r++) {
    if (r != rank && pair(r).busy() && (!silentOnes || pair(r).silentSince(since))) ranks.push_back(r);
  }
  return ranks;
}

// Ends the group naming the peers that keep us waiting and are silent. Where there are none, the culprit is known to
// others, who are given a moment to tell.
void Mesh::timeOut(const char* what, bool suspectAll) {
  const std::vector<int> ranks = awaited(!suspectAll);
  if (ranks.empty() && !suspectAll) return;
  std::string names;
  for (int r : ranks) names += (names.empty() ? "" : ", ") + std::to_string(r);
  abortLocked(Cause::kTimeout, ranks,
              me() + ": " + what + " timed out after " + std::to_string(limit_.load()) + " ms, waiting for rank(s) " +
                  (names.empty() ? "unknown" : names));
  checkLocked();
}

// One turn of the event loop in a wait that has lasted since `begin`; returns how much of it does not count.
Mesh::Clock::duration Mesh::lead(Lock& lock, std::chrono::milliseconds slice, Clock::time_point begin) {
  const auto before = Clock::now();
  const int ready = turn(lock, slice);
  const auto now = Clock::now();
  const auto lost = overslept(before, slice);
  // By time: peers that wait say so as often as we look, and would keep us from ever being idle.
  if (failure_ || (ready > 0 && now - std::max(begin, idled_) < kSlice)) return lost;
  idled_ = now;
  whenIdle(begin);
  if (failure_) return lost;
  const std::vector<int> ranks = awaited(true);
  if (ready <= 0 || !ranks.empty()) tellOfWait(lock, begin, ranks);
  return lost;
}

void Mesh::tellOfWait(Lock& lock, Clock::time_point begin, const std::vector<int>& ranks) {
  lock.unlock();
  try {
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin);
    onWait_(waited, waited < kLate + kSilent ? std::vector<int>{} : ranks);
  } catch (...) {
    abort(Cause::kAborted, {rank}, me() + ": interrupted");
    throw;
  }
  lock.lock();
}

void Mesh::whenIdle(Clock::time_point begin) {
  adoptLeftOver();
  for (int r = 0; r < size && !failure_; r++) {
    if (r != rank) pair(r).lookBehind();
    if (r < rank && !failure_) pair(r).seek();
  }
  // Not from the start: bytes that a peer leaves unread when it closes reset the connection, and what it sent with it.
  const auto late = limit().count() == 0 ? kLate : std::min<Clock::duration>(limit() / 2, kLate);
  if (failure_ || Clock::now() < begin + late) return;
  for (int r = 0; r < size; r++) {
    if (r != rank) pair(r).sayHere();
  }
}

}  // namespace elastic
