#include "transport/connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "transport/fork.h"

namespace elastic {
namespace {

constexpr size_t kMaxPlaintext = size_t{1} << 17;  // bytes encrypted per call of send
constexpr size_t kChunk = size_t{1} << 16;

}  // namespace

Connection& Connection::operator=(Connection&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(tls_, other.tls_);
  std::swap(out_, other.out_);
  std::swap(outEnd_, other.outEnd_);
  std::swap(outBegin_, other.outBegin_);
  return *this;
}

void Connection::secure(const std::shared_ptr<const TlsKey>& key, bool dials) {
  if (!key) return;
  tls_ = std::make_unique<Tls>(key, dials);
  out_.reset(new char[kChunk]);
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
  size_t taken = 0;
  for (size_t i = 0; i < count && taken < kMaxPlaintext; i++) {
    const size_t some = std::min(parts[i].iov_len, kMaxPlaintext - taken);
    if (!tls_->write(parts[i].iov_base, some)) {
      errno = EPROTO;
      return -1;
    }
    taken += some;
  }
  if (!flush() && errno != EAGAIN) return -1;
  return static_cast<ssize_t>(taken);
}

bool Connection::flush() {
  while (tls_ && (outBegin_ < outEnd_ || tls_->hasOutput())) {
    if (outBegin_ == outEnd_) {
      outEnd_ = tls_->takeEncrypted(out_.get(), kChunk);
      outBegin_ = 0;
    }
    const ssize_t sent = ::send(fd_, out_.get() + outBegin_, outEnd_ - outBegin_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return false;
    outBegin_ += static_cast<size_t>(sent);
  }
  return true;
}

ssize_t Connection::recv(void* data, size_t size) {
  for (;;) {
    char bytes[kChunk];
    if (tls_) {
      const ssize_t got = tls_->read(data, size);
      flush();  // sends handshake replies and alerts; a peer that accepts none may still have sent its reason
      if (got < 0) errno = EPROTO;
      if (got != 0) return got > 0 ? got : -1;
    }
    const ssize_t got = tls_ ? ::recv(fd_, bytes, sizeof bytes, MSG_DONTWAIT) : ::recv(fd_, data, size, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (!tls_ || got <= 0) return got;
    if (!tls_->feed(bytes, static_cast<size_t>(got))) {
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
  out_.reset();
  outEnd_ = outBegin_ = 0;
}

}  // namespace elastic
