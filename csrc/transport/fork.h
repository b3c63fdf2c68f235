// Descriptors that a forked child must not inherit. Peers detect our death by the end of our connections; a child, such
// as a DataLoader worker, would keep them open for as long as it lives.
//
// In the child each registered descriptor is replaced by /dev/null, so that closing its number later is harmless.
#pragma once

#include <mutex>

namespace elastic {

// Blocks fork() in this process while it exists. Hold it from opening a descriptor until it is registered, not longer.
class ForkLock {
 public:
  ForkLock();

 private:
  std::lock_guard<std::mutex> lock_;
};

// Returns its argument; a negative descriptor is ignored.
int registerFd(int fd);
// Registers the descriptor that `open` returns.
template <class Open>
int openRegistered(Open open) {
  const ForkLock whole;
  return registerFd(open());
}

// Unregisters and closes the descriptor.
void closeFd(int fd);

}  // namespace elastic
