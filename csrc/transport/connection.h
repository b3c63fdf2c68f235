// A connected non-blocking socket, with or without TLS. Owns the descriptor. One thread at a time.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <memory>

#include "transport/tls.h"

namespace elastic {

class Connection {
 public:
  Connection() = default;
  explicit Connection(int fd) : fd_(fd) {}
  Connection(Connection&& other) noexcept { *this = std::move(other); }
  Connection& operator=(Connection&& other) noexcept;
  ~Connection() { close(); }

  int fd() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  // Starts TLS if `key` is not null. dials: this side opened the connection.
  void secure(const std::shared_ptr<const TlsKey>& key, bool dials);
  // Like sendmsg and recv: -1 with errno on error (EPROTO for TLS). Accepted bytes may still be buffered: see flush.
  ssize_t send(const iovec* parts, size_t count);
  ssize_t recv(void* data, size_t size);
  // Hands buffered bytes to the kernel; true once none are left, else errno (EAGAIN: the socket is full).
  bool flush();
  // Sends a few bytes at once, for handshakes; false if the socket does not accept all of them.
  bool sendAll(const void* data, size_t size);
  // Whether decrypted input is buffered that polling the socket does not show.
  bool hasBufferedInput() const { return tls_ && tls_->hasInput(); }
  void close();

 private:
  int fd_ = -1;
  std::unique_ptr<Tls> tls_;
};

}  // namespace elastic
