// Closes connections whose peers have not taken everything yet, in a thread of its own: after a failure, what the group
// still owes to peers that read slowly (the rest of a half-sent frame and the close frame), of which it has its own copy,
// so that no caller waits for a stopped peer; after an orderly end, what the kernel has yet to deliver.
#pragma once

#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "transport/connection.h"

namespace elastic {

class PendingClose {
 public:
  // Allocates room for `size` bytes.
  explicit PendingClose(size_t size = 0);

  void add(const char* data, size_t size);
  // Sends what the socket accepts; true if bytes are left.
  bool sendMore();

  Connection connection;
  // Whether to wait until the peer's machine has taken all bytes that the socket has accepted.
  bool awaitsReceipt = false;

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> unsent_;
  size_t size_ = 0, sent_ = 0;
};

// Reads and discards a socket's input, which would otherwise reset the connection when it is closed, and lose what is on
// its way to the peer. Returns the bytes that were read; -1 once the peer has closed.
ssize_t discardInput(int fd);

// Bytes that a socket has accepted and the peer's machine has not taken yet.
size_t countUnreceived(int fd);

class GracefulClose {
 public:
  // closeTimeout: gives up once no peer has accepted a byte for this long, and after four times as long in any case.
  explicit GracefulClose(std::chrono::milliseconds closeTimeout) : closeTimeout_(closeTimeout) {}
  ~GracefulClose() { join(); }
  // At most once, and not concurrently with join().
  void start(std::vector<PendingClose> closes);
  // Waits until everything is sent or given up. Any thread.
  void join();

 private:
  void run();
  // Until all is received, the peers have closed, or nothing was received for four times closeTimeout.
  void awaitReceipt();

  const std::chrono::milliseconds closeTimeout_;
  std::vector<PendingClose> closes_;  // kept open: unread input would reset a closed connection
  std::mutex mutex_;                  // guards thread_.join()
  std::thread thread_;
};

}  // namespace elastic
