#include "transport/fork.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

namespace elastic {
namespace {

std::mutex& gate() {
  static std::mutex* held = new std::mutex();  // never destroyed: groups may outlive what is static
  return *held;
}

std::vector<bool>& owned() {  // by descriptor; guarded by the gate
  static std::vector<bool>* held = new std::vector<bool>();
  return *held;
}

// In the child, which has this one thread. Allocates nothing.
void forsake() {
  const int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
  for (size_t fd = 0; fd < owned().size(); fd++) {
    if (!owned()[fd]) continue;
    if (nothing < 0 || dup3(nothing, static_cast<int>(fd), O_CLOEXEC) < 0) close(static_cast<int>(fd));
  }
  if (nothing >= 0) close(nothing);
  gate().unlock();
}

const int kRegistered = pthread_atfork([] { gate().lock(); }, [] { gate().unlock(); }, forsake);

}  // namespace

NoFork::NoFork() : lock_(gate()) {}

int own(int fd) {
  if (fd < 0) return fd;
  const auto place = static_cast<size_t>(fd);
  if (place >= owned().size()) owned().resize(std::max(place + 1, 2 * owned().size()));
  owned()[place] = true;
  return fd;
}

void disown(int fd) {
  const NoFork whole;
  if (static_cast<size_t>(fd) < owned().size()) owned()[static_cast<size_t>(fd)] = false;
  close(fd);
}

}  // namespace elastic
