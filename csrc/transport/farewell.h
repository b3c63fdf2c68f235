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

class LastWords {
 public:
  // Room for `size` bytes.
  explicit LastWords(size_t size);

  void add(const char* data, size_t size);
  // Whether there is more to say, once the peer takes it.
  bool goOn();

  Connection connection;

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> rest_;
  size_t size_ = 0, said_ = 0;
};

class Farewell {
 public:
  // nobodyHears: peers that take nothing for so long are stopped. All of it takes four times as long at most.
  explicit Farewell(std::chrono::milliseconds nobodyHears) : nobodyHears_(nobodyHears) {}
  ~Farewell() { end(); }
  // Once at most, and not at the same time as `end`.
  void begin(std::vector<LastWords> words);
  // Returns when all is said, or nobody hears. From any thread.
  void end();

 private:
  void run();

  const std::chrono::milliseconds nobodyHears_;
  std::vector<LastWords> words_;  // their connections stay open: what peers still send would reset closed ones
  std::mutex mutex_;              // guards the joining
  std::thread thread_;
};

}  // namespace elastic
