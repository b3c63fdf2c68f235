// Sends what a failed group still owes to peers that read slowly: the rest of a half-sent frame and the close frame.
// Runs in its own thread with its own copy of the data, so that no caller waits for a stopped peer.
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
  explicit PendingClose(size_t size);

  void add(const char* data, size_t size);
  // Sends what the socket accepts; true if bytes are left.
  bool sendMore();

  Connection connection;

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> unsent_;
  size_t size_ = 0, sent_ = 0;
};

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

  const std::chrono::milliseconds closeTimeout_;
  std::vector<PendingClose> closes_;  // kept open: unread input would reset a closed connection
  std::mutex mutex_;                  // guards thread_.join()
  std::thread thread_;
};

}  // namespace elastic
