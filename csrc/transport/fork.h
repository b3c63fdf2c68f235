// Descriptors that no forked child keeps. Peers know by the end of our connections that we have died: a child, such as
// a DataLoader's worker, would hold them open for as long as it lives.
//
// In the child their numbers stay taken, by nothing at all, so that whoever still closes one closes nobody else's.
#pragma once

#include <mutex>

namespace elastic {

// While one lives no thread of this process forks: around what opens a descriptor and owns it. It must not wait.
class NoFork {
 public:
  NoFork();

 private:
  std::lock_guard<std::mutex> lock_;
};

// Returns what it is given; a negative one is none.
int own(int fd);
// What `open` returns, owned at once.
template <class Open>
int openOwned(Open open) {
  const NoFork whole;
  return own(open());
}

// Closes it.
void disown(int fd);

}  // namespace elastic
