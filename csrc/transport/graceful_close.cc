#include "transport/graceful_close.h"

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

// Uses huge pages if possible: a caller waits while the memory is filled, and page faults dominate that.
PendingClose::PendingClose(size_t size) {
  const size_t whole = (size + kHugePage - 1) / kHugePage * kHugePage;
  void* memory = nullptr;
  if (posix_memalign(&memory, kHugePage, whole) != 0) throw std::bad_alloc();
  madvise(memory, whole, MADV_HUGEPAGE);
  unsent_.reset(static_cast<char*>(memory));
}

void PendingClose::add(const char* data, size_t size) {
  if (size > 0) std::memcpy(unsent_.get() + size_, data, size);
  size_ += size;
}

// Reads and discards the peer's input, so that a peer that is still sending is not blocked. Stops if the peer has
// closed.
bool PendingClose::sendMore() {
  char discarded[1 << 14];
  const ssize_t got = ::recv(connection.fd(), discarded, sizeof discarded, MSG_DONTWAIT);
  if (got == 0 || (got < 0 && errno != EAGAIN)) return false;
  while (sent_ < size_) {
    const iovec left{unsent_.get() + sent_, size_ - sent_};
    const ssize_t sent = connection.send(&left, 1);
    if (sent < 0) return errno == EAGAIN;
    sent_ += static_cast<size_t>(sent);
  }
  return !connection.flush() && errno == EAGAIN;
}

void GracefulClose::start(std::vector<PendingClose> closes) {
  closes_ = std::move(closes);
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals such as Ctrl-C go to other threads
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error&) {
    closes_.clear();  // no thread available: these peers see a broken stream
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void GracefulClose::join() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (thread_.joinable()) thread_.join();
  closes_.clear();
}

// Serves all peers at once, so that a stopped one delays no other.
void GracefulClose::run() {
  std::vector<pollfd> open;
  const auto until = Clock::now() + 4 * closeTimeout_;
  do {
    open.clear();
    for (PendingClose& close : closes_) {
      if (close.sendMore()) open.push_back({close.connection.fd(), POLLIN | POLLOUT, 0});
    }
  } while (!open.empty() && Clock::now() < until &&
           ::poll(open.data(), open.size(), static_cast<int>(closeTimeout_.count())) != 0);
  // Not SHUT_RD: input that arrives later would reset the connection and discard our unsent bytes.
  for (PendingClose& close : closes_) ::shutdown(close.connection.fd(), SHUT_WR);
}

}  // namespace elastic
