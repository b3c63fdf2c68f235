// The mesh's event loop for those who wait elsewhere too, or for something else than a peer's frame.
#include <sys/epoll.h>

#include <algorithm>

#include "transport/mesh.h"

namespace elastic {
namespace {

constexpr std::chrono::milliseconds kSlice{200};  // how often a waiter looks for Ctrl-C

}  // namespace

void Mesh::attach(int fd, OnEvents onEvents) {
  guests_[fd] = std::move(onEvents);
  watch(fd, EPOLLIN, true);
}

void Mesh::detach(int fd) {
  if (guests_.erase(fd) > 0) unwatch(fd);
}

void Mesh::watchedBy(std::function<void(const Failure&)> onFailure, std::atomic<uint32_t>* pulse) {
  Lock lock(mu_);
  onFailure_ = std::move(onFailure);
  pulse_ = pulse;
  if (failure_ && onFailure_) onFailure_(*failure_);
}

void Mesh::attend() {
  Lock lock(mu_);
  checkLocked();
  if (!polling_) turn(lock, std::chrono::milliseconds(0));  // else somebody else is at it
  checkLocked();
  passOn();
}

void Mesh::attendToWait(Clock::time_point begin, const std::vector<int>& ranks) {
  Lock lock(mu_);
  if (!failure_) whenIdle(begin);
  tellOfWait(lock, begin, ranks);
  checkLocked();
  passOn();
}

bool Mesh::await(const std::function<bool()>& done, Clock::time_point until) {
  Lock lock(mu_);
  const auto begin = Clock::now();
  while (!done()) {
    checkLocked();
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
    if (left.count() <= 0) break;
    if (polling_) {
      news_.wait_for(lock, std::min(kSlice, left));
    } else {
      lead(lock, std::min(kSlice, left), begin);
    }
  }
  passOn();
  return done();
}

}  // namespace elastic
