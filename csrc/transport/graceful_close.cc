#include "transport/graceful_close.h"

#include <linux/sockios.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
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
constexpr int kReceiptInterval = 5;  // ms

}  // namespace

// Uses huge pages if possible: a caller waits while the memory is filled, and page faults dominate that.
PendingClose::PendingClose(size_t size) {
  if (size == 0) return;
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
  if (discardInput(connection.fd()) < 0) return false;
  while (sent_ < size_) {
    const iovec left{unsent_.get() + sent_, size_ - sent_};
    const ssize_t sent = connection.send(&left, 1);
    if (sent < 0) return errno == EAGAIN;
    sent_ += static_cast<size_t>(sent);
  }
  return !connection.flush() && errno == EAGAIN;
}

// Not all at once: a peer may send for ever.
ssize_t discardInput(int fd) {
  char discarded[1 << 14];
  ssize_t total = 0;
  for (int i = 0; i < 64; i++) {
    const ssize_t got = ::recv(fd, discarded, sizeof discarded, MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN)) return -1;
    if (got < 0) break;
    total += got;
  }
  return total;
}

size_t countUnreceived(int fd) {
  int bytes = 0;
  return ioctl(fd, SIOCOUTQ, &bytes) == 0 ? static_cast<size_t>(bytes) : 0;
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
  if (!closes_.empty() && closes_.front().awaitsReceipt) return awaitReceipt();
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

void GracefulClose::awaitReceipt() {
  std::vector<pollfd> open;
  size_t least = SIZE_MAX;
  auto until = Clock::now() + 4 * closeTimeout_;
  while (Clock::now() < until) {
    size_t unreceived = 0;
    open.clear();
    for (PendingClose& close : closes_) {
      const int fd = close.connection.fd();
      const size_t left = discardInput(fd) < 0 ? 0 : countUnreceived(fd);
      if (left > 0) open.push_back({fd, POLLIN, 0});
      unreceived += left;
    }
    if (open.empty()) return;
    if (unreceived < least) {
      least = unreceived;
      until = Clock::now() + 4 * closeTimeout_;
    }
    ::poll(open.data(), open.size(), kReceiptInterval);
  }
}

}  // namespace elastic
