// A connected socket that never waits: in the clear, or inside TLS. Owns the descriptor. One thread at a time.
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
  // From now on inside TLS, where `key` is one; null: in the clear. dials: this side made the connection.
  void secure(const std::shared_ptr<const TlsKey>& key, bool dials);
  // As sendmsg and recv do, -1 with errno (EPROTO where TLS is broken). What was taken may still be here: see flush.
  ssize_t send(const iovec* parts, size_t count);
  ssize_t recv(void* data, size_t size);
  // True once the kernel has everything that was taken; else errno, EAGAIN where it takes no more for now.
  bool flush();
  // All of a few bytes at once, or nothing good: for handshakes.
  bool sendAll(const void* data, size_t size);
  // Whether bytes wait here that no poll of the socket tells of.
  bool hasBufferedInput() const { return tls_ && tls_->hasInput(); }
  void close();

 private:
  int fd_ = -1;
  std::unique_ptr<Tls> tls_;
  std::unique_ptr<char[]> out_;  // encrypted; from outBegin_ to outEnd_ not taken by the kernel yet
  size_t outEnd_ = 0, outBegin_ = 0;
};

}  // namespace elastic
