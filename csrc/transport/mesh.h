// The transport under Gloo's algorithms: one generation's connections to its peers, driven by whoever waits.
//
// No thread of its own: a waiting caller runs the event loop, further waiters sleep until it has news (leader and
// followers). One mutex guards everything; sockets are opened on first use. Any failure ends the whole mesh at once.
#pragma once

#include <gloo/transport/context.h>
#include <gloo/transport/device.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/address.h"
#include "transport/call.h"
#include "transport/endpoint.h"
#include "transport/failure.h"
#include "transport/graceful_close.h"

namespace elastic {

class Buffer;
class Pair;

class Mesh : public gloo::transport::Context {
 public:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;

  // Called now and then while waiting: for how long so far and, after two seconds, for which ranks, as far as it is
  // known here. What it throws ends the wait and the group.
  using OnWait = std::function<void(std::chrono::milliseconds waited, const std::vector<int>& ranks)>;

  // peers[r] is the address that rank r listens on. closeTimeout: see GracefulClose.
  Mesh(std::shared_ptr<Endpoint> endpoint, int rank, const std::vector<std::string>& peers, Fence fence,
       std::chrono::milliseconds timeout, std::chrono::milliseconds closeTimeout, OnWait onWait);
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
  // How long a wait may last from now on, one that is under way as if it began now; zero: without end. From any thread.
  void limit(std::chrono::milliseconds timeout);
  std::chrono::milliseconds limit() const { return std::chrono::milliseconds(limit_.load()); }
  Clock::time_point deadlineOf(Clock::time_point begin) const;  // of a wait that began then

  // For those who wait elsewhere too, in shared memory (mesh_guests.cc). Guests are descriptors in the same event loop;
  // onEvents runs with the mutex held, and a failure that it returns ends the mesh.
  using OnEvents = std::function<std::unique_ptr<Failure>(uint32_t events)>;
  Lock lock() { return Lock(mu_); }
  void addFd(int fd, OnEvents onEvents);  // with the mutex held, as in onEvents
  void removeFd(int fd);                     // likewise
  // Called with the failure, the mutex held; at once if there is one already. `pulse` grows while somebody waits here.
  void observeFailure(std::function<void(const Failure&)> onFailure, std::atomic<uint32_t>* pulse);
  // One pollEvents of the event loop without waiting. Throws the failure, if there is one.
  void pollOnce();
  // What is to be done now and then besides, in a wait for `ranks` that has lasted since `begin`.
  void onWaitInterval(Clock::time_point begin, const std::vector<int>& ranks);
  // Runs the event loop until done(), or until the time is up: whether it was done.
  bool runUntil(const std::function<bool()>& done, Clock::time_point until);

 private:
  friend class Pair;
  friend class Buffer;

  Pair& pair(int rank);
  void checkLocked() const;
  void abortLocked(Cause cause, std::vector<int> ranks, const std::string& reason);
  void sendCloseFrames();
  void closeSockets();
  // Runs or follows the event loop until done() or the deadline; `what` names the wait in the error (mesh_waits.cc).
  void wait(Lock& lock, const std::function<bool()>& done, const char* what);
  std::vector<int> ranksAwaited(bool silentOnes);
  void failByTimeout(const char* what, bool suspectAll);
  static Clock::duration stoppedTime(Clock::time_point since, std::chrono::milliseconds slice);
  Clock::duration pollAsLeader(Lock& lock, std::chrono::milliseconds slice, Clock::time_point begin);
  int pollEvents(Lock& lock, std::chrono::milliseconds timeout);
  void reportWait(Lock& lock, Clock::time_point begin, const std::vector<int>& ranks);
  void doPeriodicWork(Clock::time_point begin);
  void dispatch(int fd, uint32_t events);
  void acceptConnections();
  PendingConnection& addPending(PendingConnection incoming);
  void pauseAccepting();
  void resumeAccepting();
  void continueHandshake(PendingConnection& incoming);
  bool advanceHandshake(PendingConnection& incoming);
  bool sendChallenge(PendingConnection& incoming);
  void finishHandshake(PendingConnection& incoming);
  void acceptPeer(Connection connection, const Hello& hello);
  void takeFromEndpoint();
  void returnHandshakes();
  void closePending(int fd);
  void dropExpired();
  void watch(int fd, uint32_t events, bool add);
  void unwatch(int fd);
  void wake();
  std::string name() const { return "rank " + std::to_string(rank); }

  const std::shared_ptr<Endpoint> endpoint_;
  const Fence fence_;
  const OnWait onWait_;
  std::atomic<std::chrono::milliseconds::rep> limit_;
  std::atomic<Clock::rep> limitSetAt_{0};
  Clock::time_point lastPeriodicWork_{};  // when a waiter last did what is done now and then; under the mutex
  std::vector<SocketAddress> addresses_;
  std::mutex mu_;
  std::condition_variable wakeup_;
  bool hasLeader_ = false;  // somebody is the leader
  int epoll_ = -1, event_ = -1;
  std::unique_ptr<Failure> failure_;
  GracefulClose closing_;
  std::unordered_map<int, Pair*> byFd_;
  std::unordered_map<int, PendingConnection> pending_;
  std::unordered_map<int, OnEvents> externalFds_;
  std::function<void(const Failure&)> onFailure_;
  std::atomic<uint32_t>* heartbeat_ = nullptr;
  Call call_;                                                 // the collective that this rank is in, or was in last
  Clock::time_point resumeAcceptingAt_ = Clock::time_point::max();  // the listening socket is not watched until then
  size_t unexpectedBytes_ = 0;                                        // bytes that arrived before anybody asked for them
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
