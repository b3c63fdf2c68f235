// The transport under Gloo's algorithms: one generation's connections to its peers, driven by whoever waits.
//
// No thread of its own: a waiting caller runs the event loop, further waiters sleep until it has news (leader and
// followers). One mutex guards everything; sockets are opened on first use. Any failure ends the whole mesh at once.
#pragma once

#include <gloo/transport/context.h>
#include <gloo/transport/device.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "address.h"
#include "call.h"
#include "endpoint.h"
#include "failure.h"

namespace elastic {

class Buffer;
class Pair;

class Mesh : public gloo::transport::Context {
 public:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;

  // peers[r] is the address that rank r listens on. checkSignals: called now and then while waiting; what it throws
  // ends the wait and the group.
  Mesh(std::shared_ptr<Endpoint> endpoint, int rank, const std::vector<std::string>& peers, Fence fence,
       std::chrono::milliseconds timeout, std::function<void()> checkSignals);
  ~Mesh() override;

  std::unique_ptr<gloo::transport::Pair>& getPair(int rank) override { return pairs_.at(rank); }
  std::unique_ptr<gloo::transport::Pair>& createPair(int rank) override { return pairs_.at(rank); }
  std::unique_ptr<gloo::transport::UnboundBuffer> createUnboundBuffer(void* ptr, size_t size) override;

  // From any thread; the first cause stays. Wakes every waiter and tells the peers.
  void abort(Cause cause, std::vector<int> ranks, const std::string& reason);
  void close();
  // Throws the failure, if there is one.
  void check();
  // What the frames that follow belong to.
  void enter(const Call& call);

 private:
  friend class Pair;
  friend class Buffer;

  Pair& pair(int rank);
  void checkLocked() const;
  void abortLocked(Cause cause, std::vector<int> ranks, const std::string& reason);
  // Runs or follows the event loop until done() or the deadline; `what` names the wait in the error.
  void wait(Lock& lock, const std::function<bool()>& done, std::chrono::milliseconds timeout, const char* what);
  void timeOut(std::chrono::milliseconds timeout, const char* what, bool suspectAll);
  void lead(Lock& lock, std::chrono::milliseconds timeout, bool late);
  void askForSignals(Lock& lock);
  void whenIdle(bool late);
  void dispatch(int fd, uint32_t events);
  void acceptAll();
  void restFromAccepting();
  void acceptAgain();
  void proceed(Incoming& incoming);
  void greet(Incoming& incoming);
  void adopt(Incoming& incoming);
  void adoptProven(int fd, const Hello& hello);
  void adoptLeftOver();
  void forget(int fd, bool close);
  void dropExpired();
  void watch(int fd, uint32_t events, bool add);
  void unwatch(int fd);
  void wake();
  std::string me() const { return "rank " + std::to_string(rank); }

  const std::shared_ptr<Endpoint> endpoint_;
  const Fence fence_;
  const std::function<void()> checkSignals_;
  std::vector<SocketAddress> addresses_;
  std::mutex mu_;
  std::condition_variable news_;
  bool polling_ = false;  // somebody is the leader
  int epoll_ = -1, event_ = -1;
  std::unique_ptr<Failure> failure_;
  std::unordered_map<int, Pair*> byFd_;
  std::unordered_map<int, Incoming> incoming_;
  Call call_;                                                 // the collective that this rank is in, or was in last
  Clock::time_point acceptAgain_ = Clock::time_point::max();  // the listening socket is not watched until then
  size_t spilled_ = 0;                                        // bytes that arrived before anybody asked for them
};

class Device : public gloo::transport::Device {
 public:
  std::string str() const override { return "elastic"; }
  const std::string& getPCIBusID() const override { return empty_; }
  std::shared_ptr<gloo::transport::Context> createContext(int, int) override;

 private:
  const std::string empty_;
};

}  // namespace elastic
