// Descriptors that no forked child keeps. Peers know by the end of our connections that we have died: a child, such as
// a DataLoader's worker, would hold them open for as long as it lives.
//
// In the child their numbers stay taken, by nothing at all, so that whoever still closes one closes nobody else's.
#pragma once

#include <mutex>

namespace elastic {

// While one lives no thread of this process forks: around what opens a descriptor and owns it. It must not wait.
class ForkLock {
 public:
  ForkLock();

 private:
  std::lock_guard<std::mutex> lock_;
};

// Returns what it is given; a negative one is none.
int registerFd(int fd);
// What `open` returns, registeredFds at once.
template <class Open>
int openRegistered(Open open) {
  const ForkLock whole;
  return registerFd(open());
}

// Closes it.
void closeFd(int fd);

}  // namespace elastic
