// What a group that has ended still has to say to peers that read late: the rest of a half sent frame, and why it
// ended. In a thread of its own and from memory of its own, so that nobody here waits for a peer that is stopped.
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
  // Room for `size` bytes.
  explicit PendingClose(size_t size);

  void add(const char* data, size_t size);
  // Whether there is more to say, once the peer takes it.
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
  // closeTimeout: peers that take nothing for so long are stopped. All of it takes four times as long at most.
  explicit GracefulClose(std::chrono::milliseconds closeTimeout) : closeTimeout_(closeTimeout) {}
  ~GracefulClose() { join(); }
  // Once at most, and not at the same time as `end`.
  void start(std::vector<PendingClose> closes);
  // Returns when all is said, or nobody hears. From any thread.
  void join();

 private:
  void run();

  const std::chrono::milliseconds closeTimeout_;
  std::vector<PendingClose> closes_;  // their connections stay open: what peers still send would reset closed ones
  std::mutex mutex_;              // guards the joining
  std::thread thread_;
};

}  // namespace elastic
