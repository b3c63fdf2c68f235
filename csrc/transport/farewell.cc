#include "transport/farewell.h"

#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>

namespace elastic {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

// In huge pages where there are some: a waiter stands by while it is filled, and that costs mostly the first touch.
LastWords::LastWords(size_t size) {
  const size_t whole = (size + kHugePage - 1) / kHugePage * kHugePage;
  void* memory = nullptr;
  if (posix_memalign(&memory, kHugePage, whole) != 0) throw std::bad_alloc();
  madvise(memory, whole, MADV_HUGEPAGE);
  rest_.reset(static_cast<char*>(memory));
}

void LastWords::add(const char* data, size_t size) {
  if (size > 0) std::memcpy(rest_.get() + size_, data, size);
  size_ += size;
}

// What the peer says meanwhile is void and thrown away: it may be ending a frame itself, with nobody to read it. One
// that has ended, or is gone, need not be told.
bool LastWords::goOn() {
  char unheard[1 << 14];
  const ssize_t got = ::recv(connection.fd(), unheard, sizeof unheard, MSG_DONTWAIT);
  if (got == 0 || (got < 0 && errno != EAGAIN)) return false;
  while (said_ < size_) {
    const iovec left{rest_.get() + said_, size_ - said_};
    const ssize_t sent = connection.send(&left, 1);
    if (sent < 0) return errno == EAGAIN;
    said_ += static_cast<size_t>(sent);
  }
  return !connection.flush() && errno == EAGAIN;
}

void Farewell::begin(std::vector<LastWords> words) {
  words_ = std::move(words);
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // Ctrl-C is for the process's own threads
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error&) {
    words_.clear();  // no thread today: those peers find the stream cut
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Farewell::end() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (thread_.joinable()) thread_.join();
  words_.clear();
}

// To all at once, so that one that is stopped takes nobody's time.
void Farewell::run() {
  std::vector<pollfd> hearing;
  const auto until = Clock::now() + 4 * nobodyHears_;
  do {
    hearing.clear();
    for (LastWords& words : words_) {
      if (words.goOn()) hearing.push_back({words.connection.fd(), POLLIN | POLLOUT, 0});
    }
  } while (!hearing.empty() && Clock::now() < until &&
           ::poll(hearing.data(), hearing.size(), static_cast<int>(nobodyHears_.count())) != 0);
  // Not SHUT_RD: what the peer still sends would reset the connection, and our words with it.
  for (LastWords& words : words_) ::shutdown(words.connection.fd(), SHUT_WR);
}

}  // namespace elastic
