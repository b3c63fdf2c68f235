// The transport under Gloo's algorithms: the connections of one generation to its peers. It takes the place of Gloo's
// own ones, so that all generations of a process share one listening socket, a handshake proves the job's key and
// carries the fence, and any thread can abort.
//
// The mesh has no thread. The first caller that waits becomes the poller and runs the event loop; other waiters sleep
// until the poller wakes them. One mutex guards everything; sockets open on first use; any failure ends the whole mesh.
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

  // Called a few times a second during a wait with the time waited and, after two seconds, the ranks that are known to
  // be missing. An exception ends the wait and the group.
  using OnWait = std::function<void(std::chrono::milliseconds waited, const std::vector<int>& ranks)>;
  // Returns the addresses of these ranks, or none at all if they cannot be known. Called in a wait, without the mutex.
  using FindAddresses = std::function<std::vector<std::string>(const std::vector<int>& ranks)>;

  // peers[r] is the address that rank r listens on, "" if `findAddresses` is to be asked once it is needed.
  // closeTimeout: see GracefulClose.
  Mesh(std::shared_ptr<Endpoint> endpoint, int rank, const std::vector<std::string>& peers, Fence fence,
       std::chrono::milliseconds timeout, std::chrono::milliseconds closeTimeout, OnWait onWait,
       FindAddresses findAddresses);
  ~Mesh() override;

  std::unique_ptr<gloo::transport::Pair>& getPair(int rank) override { return pairs_.at(rank); }
  std::unique_ptr<gloo::transport::Pair>& createPair(int rank) override { return pairs_.at(rank); }
  std::unique_ptr<gloo::transport::UnboundBuffer> createUnboundBuffer(void* ptr, size_t size) override;

  // Ends the group: wakes every waiter and informs the peers. The first cause wins. Any thread.
  void abort(Cause cause, std::vector<int> ranks, const std::string& reason);
  void close();
  // Throws the failure if the group has failed.
  void check();
  // Ends the group if a peer sends another size than this rank expects from it.
  void requireSize(int peer, size_t sent, size_t expected);
  // Sets the collective that the following frames belong to.
  void enter(const Call& call);
  // Sets how long a wait may last; a wait in progress counts as if it began now. Zero: no limit. Any thread.
  void limit(std::chrono::milliseconds timeout);
  std::chrono::milliseconds limit() const { return std::chrono::milliseconds(limit_.load()); }
  Clock::time_point deadlineOf(Clock::time_point begin) const;  // of a wait that began at `begin`

  // For code that also waits in shared memory: other descriptors in the same event loop. onEvents runs with the mutex
  // held; a failure that it returns ends the mesh.
  using OnEvents = std::function<std::unique_ptr<Failure>(uint32_t events)>;
  Lock lock() { return Lock(mu_); }
  void addFd(int fd, OnEvents onEvents);  // needs the mutex
  void removeFd(int fd);                  // needs the mutex
  // Registers a callback for the failure, called with the mutex held, at once if the group has failed. `heartbeat` is
  // incremented each time the event loop runs, `progress` each time a wait for a peer has succeeded.
  void observeFailure(std::function<void(const Failure&)> onFailure, std::atomic<uint32_t>* heartbeat,
                      std::atomic<uint32_t>* progress);
  // Runs the event loop once without waiting. Throws the failure if the group has failed.
  void pollOnce();
  // Does the periodic work of a wait for `ranks` that began at `begin`.
  void onWaitInterval(Clock::time_point begin, const std::vector<int>& ranks);
  // Runs the event loop until done() or `until`; returns done().
  bool runUntil(const std::function<bool()>& done, Clock::time_point until);

 private:
  friend class Pair;
  friend class Buffer;

  // Returns the handshakes in progress however a wait ends, a failure included.
  struct HandshakesReturner {
    Mesh& mesh;  // its mutex is held
    ~HandshakesReturner() { mesh.returnHandshakes(); }
  };

  Pair& pair(int rank);
  void checkLocked() const;
  void abortLocked(Cause cause, std::vector<int> ranks, const std::string& reason);
  void sendCloseFrames();
  void closeSockets();
  // Runs the event loop, or sleeps while another caller does, until done() or the deadline; `what` is for the error.
  void wait(Lock& lock, const std::function<bool()>& done, const char* what);
  std::vector<int> findAwaitedRanks(bool silentOnes);
  void blameAwaitedPeers(const char* what, bool blameAll);
  static Clock::duration computeStoppedTime(Clock::time_point since, std::chrono::milliseconds slice);
  Clock::duration pollForAll(Lock& lock, std::chrono::milliseconds slice, Clock::time_point begin);
  int pollEvents(Lock& lock, std::chrono::milliseconds timeout);
  void reportWait(Lock& lock, Clock::time_point begin, const std::vector<int>& ranks);
  // The address of a peer; null: it is not known, and the next wait asks for it.
  const SocketAddress* addressOf(int peer);
  void askForAddresses(Lock& lock);
  void doPeriodicWork(Clock::time_point begin);
  void dispatch(int fd, uint32_t events);
  void acceptConnections();
  bool mustHandshakesEndFirst();
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
  Clock::time_point lastPeriodicWork_{};  // guarded by mu_
  const FindAddresses findAddresses_;
  std::vector<SocketAddress> addresses_;  // of length 0: not known
  std::vector<int> wanted_;               // ranks whose addresses are to be asked for
  std::vector<bool> asked_;               // by rank: its address was wanted before
  std::mutex mu_;
  std::condition_variable wakeup_;
  bool hasPoller_ = false;  // a caller runs the event loop
  int epoll_ = -1, event_ = -1;
  std::unique_ptr<Failure> failure_;
  GracefulClose closing_;
  std::unordered_map<int, Pair*> byFd_;
  std::unordered_map<int, PendingConnection> pending_;
  std::unordered_map<int, OnEvents> externalFds_;
  std::function<void(const Failure&)> onFailure_;
  std::atomic<uint32_t>* heartbeat_ = nullptr;
  std::atomic<uint32_t>* progress_ = nullptr;
  Call call_;                                                       // the current or last collective of this rank
  Clock::time_point resumeAcceptingAt_ = Clock::time_point::max();  // until then the listening socket is not polled
  size_t unexpectedBytes_ = 0;                                      // buffered bytes without a posted receive
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
