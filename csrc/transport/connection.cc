#include "transport/connection.h"

#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "transport/fork.h"

namespace elastic {

Connection& Connection::operator=(Connection&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(tls_, other.tls_);
  return *this;
}

void Connection::secure(const std::shared_ptr<const TlsKey>& key, bool dials) {
  if (key) tls_ = std::make_unique<Tls>(key, dials);
}

ssize_t Connection::send(const iovec* parts, size_t count) {
  if (!tls_) {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts);
    message.msg_iovlen = count;
    ssize_t sent;
    do {
      sent = sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (sent < 0 && errno == EINTR);
    return sent;
  }
  if (!flush()) return -1;
  const ssize_t taken = tls_->write(parts, count);
  if (taken < 0) {
    errno = EPROTO;
    return -1;
  }
  if (!flush() && errno != EAGAIN) return -1;
  return taken;
}

bool Connection::flush() {
  if (!tls_) return true;
  ByteQueue& out = tls_->output();
  while (out.size() > 0) {
    const ssize_t sent = ::send(fd_, out.front(), out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return false;
    out.begin += static_cast<size_t>(sent);
  }
  return true;
}

ssize_t Connection::recv(void* data, size_t size) {
  for (;;) {
    std::pair<char*, size_t> room{static_cast<char*>(data), size};
    if (tls_) {
      const bool shaking = !tls_->ready();
      const ssize_t got = tls_->read(data, size);
      if (shaking) flush();  // its replies and alerts; a peer that accepts none may still have sent its reason
      if (got < 0) errno = EPROTO;
      if (got != 0) return got > 0 ? got : -1;
      room = tls_->inputRoom();
    }
    const ssize_t got = ::recv(fd_, room.first, room.second, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (!tls_ || got <= 0) return got;
    if (!tls_->feed(static_cast<size_t>(got))) {
      errno = EPROTO;
      return -1;
    }
  }
}

bool Connection::sendAll(const void* data, size_t size) {
  const iovec all{const_cast<void*>(data), size};
  return send(&all, 1) == static_cast<ssize_t>(size) && flush();
}

void Connection::close() {
  if (fd_ >= 0) closeFd(fd_);
  fd_ = -1;
  tls_.reset();
}

}  // namespace elastic
