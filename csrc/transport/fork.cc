#include "transport/fork.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

namespace elastic {
namespace {

std::mutex& forkMutex() {
  static std::mutex* instance = new std::mutex();  // never destroyed: groups may outlive static objects
  return *instance;
}

std::vector<bool>& registeredFds() {  // indexed by descriptor; guarded by forkMutex
  static std::vector<bool>* instance = new std::vector<bool>();
  return *instance;
}

// Runs in the forked child, which has one thread. Allocates nothing.
void closeInChild() {
  const int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
  for (size_t fd = 0; fd < registeredFds().size(); fd++) {
    if (!registeredFds()[fd]) continue;
    if (nothing < 0 || dup3(nothing, static_cast<int>(fd), O_CLOEXEC) < 0) close(static_cast<int>(fd));
  }
  if (nothing >= 0) close(nothing);
  forkMutex().unlock();
}

const int kAtFork = pthread_atfork([] { forkMutex().lock(); }, [] { forkMutex().unlock(); }, closeInChild);

}  // namespace

ForkLock::ForkLock() : lock_(forkMutex()) {}

int registerFd(int fd) {
  if (fd < 0) return fd;
  const auto index = static_cast<size_t>(fd);
  if (index >= registeredFds().size()) registeredFds().resize(std::max(index + 1, 2 * registeredFds().size()));
  registeredFds()[index] = true;
  return fd;
}

void closeFd(int fd) {
  const ForkLock whole;
  if (static_cast<size_t>(fd) < registeredFds().size()) registeredFds()[static_cast<size_t>(fd)] = false;
  close(fd);
}

}  // namespace elastic
