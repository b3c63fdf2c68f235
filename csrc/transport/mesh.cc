#include "transport/mesh.h"

#include <gloo/common/error.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/buffer.h"
#include "transport/failure.h"
#include "transport/fork.h"
#include "transport/pair.h"

namespace elastic {
namespace {

constexpr std::chrono::seconds kHelloTimeout{10};
constexpr std::chrono::minutes kProofTimeout{10};  // a rank that computes does not answer a challenge
constexpr std::chrono::milliseconds kSlice{200};   // interval of periodic work: Ctrl-C, expired handshakes, keepalives
constexpr std::chrono::milliseconds kAcceptPause{100};
constexpr std::chrono::seconds kAnswerTime{1};    // within which a peer that waits answers a challenge
constexpr std::chrono::seconds kLate{1};          // waits longer than this send keepalives
constexpr std::chrono::seconds kVeryLate{5};      // waits longer than this connect to all peers, for keepalives
constexpr std::chrono::seconds kSilenceLimit{1};  // a peer that waits itself sends keepalives far more often
constexpr std::chrono::seconds kGrace{2};         // time for another rank to report who caused a timeout

}  // namespace

Mesh::Mesh(std::shared_ptr<Endpoint> endpoint, int rank, const std::vector<std::string>& peers, Fence fence,
           std::chrono::milliseconds timeout, std::chrono::milliseconds closeTimeout, OnWait onWait,
           FindAddresses findAddresses)
    : gloo::transport::Context(rank, static_cast<int>(peers.size())),
      endpoint_(std::move(endpoint)),
      fence_(fence),
      onWait_(std::move(onWait)),
      limit_(timeout.count()),
      findAddresses_(std::move(findAddresses)),
      asked_(peers.size()),
      closing_(closeTimeout) {
  timeout_ = timeout;
  for (const auto& peer : peers) addresses_.push_back(peer.empty() ? SocketAddress{} : parseAddress(peer));
  for (int r = 0; r < size; r++) {
    if (r != rank) pairs_[r] = std::make_unique<Pair>(*this, r);
  }
  if (endpoint_->fd() < 0) throw std::runtime_error("the endpoint is closed; a new group needs an open one");
  epoll_ = openRegistered([] { return epoll_create1(EPOLL_CLOEXEC); });
  event_ = openRegistered([] { return eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC); });
  if (epoll_ < 0 || event_ < 0) {
    const std::string why = strerror(errno);
    close();
    throw std::runtime_error("no descriptors for a new group: " + why);
  }
  watch(event_, EPOLLIN, true);
  watch(endpoint_->fd(), EPOLLIN, true);
  endpoint_->registerMesh(event_, static_cast<size_t>(size));
  wake();  // makes the first pollEvents take over connections that earlier meshes left in the endpoint
}

Mesh::~Mesh() { close(); }

void Mesh::close() {
  closeSockets();
  closing_.join();  // must not hold the mutex
}

void Mesh::closeSockets() {
  Lock lock(mu_);
  // Later calls of this rank fail. No close frame is sent, as `abort` does: peers may still be busy with one another.
  if (!failure_) {
    failure_ = std::make_unique<Failure>(Cause::kAborted, std::vector<int>{}, name() + ": the group is closed");
  }
  wake();
  while (hasPoller_) wakeup_.wait_for(lock, kSlice);
  std::vector<PendingClose> unreceived;
  for (auto& pair : pairs_) {
    if (pair) static_cast<Pair*>(pair.get())->closeOrderly(unreceived);
  }
  if (!unreceived.empty()) closing_.start(std::move(unreceived));
  // Handshakes in progress may belong to the next generation.
  for (auto& entry : pending_) endpoint_->returnPending(std::move(entry.second));
  pending_.clear();
  externalFds_.clear();
  if (event_ >= 0) endpoint_->unregisterMesh(event_);
  if (epoll_ >= 0) closeFd(epoll_);
  if (event_ >= 0) closeFd(event_);
  epoll_ = event_ = -1;
}

std::unique_ptr<gloo::transport::UnboundBuffer> Mesh::createUnboundBuffer(void* ptr, size_t size) {
  return std::make_unique<Buffer>(*this, ptr, size);
}

Pair& Mesh::pair(int rank) { return static_cast<Pair&>(*pairs_.at(rank)); }

void Mesh::check() {
  Lock lock(mu_);
  checkLocked();
}

void Mesh::enter(const Call& call) {
  Lock lock(mu_);
  checkLocked();
  call_ = call;
}

void Mesh::checkLocked() const {
  if (failure_) throw Failure(*failure_);
}

void Mesh::abort(Cause cause, std::vector<int> ranks, const std::string& reason) {
  Lock lock(mu_);
  abortLocked(cause, std::move(ranks), reason);
  returnHandshakes();  // not in abortLocked, which is also called in the midst of one
}

void Mesh::requireSize(int peer, size_t sent, size_t expected) {
  if (sent == expected) return;
  abort(Cause::kMismatch, {rank, peer},
        "rank " + std::to_string(peer) + " sends " + std::to_string(sent) + " bytes to rank " + std::to_string(rank) +
            ", which expects " + std::to_string(expected));
  check();
}

void Mesh::abortLocked(Cause cause, std::vector<int> ranks, const std::string& reason) {
  if (failure_) return;
  failure_ = std::make_unique<Failure>(cause, std::move(ranks), reason);
  wake();
  if (onFailure_) onFailure_(*failure_);
  sendCloseFrames();
}

// GracefulClose sends in the background what peers do not accept at once, so that neither the caller nor waiters for
// the mutex are delayed.
void Mesh::sendCloseFrames() {
  const std::vector<char> body = encodeFailure(*failure_);
  std::vector<Pair*> all, late;
  for (auto& pair : pairs_) {
    if (pair) all.push_back(static_cast<Pair*>(pair.get()));
  }
  for (Pair* pair : all) {
    if (pair->beginClose(body)) late.push_back(pair);
  }
  std::vector<PendingClose> unsent;
  for (Pair* pair : late) unsent.push_back(pair->takePendingClose());
  for (Pair* pair : all) pair->finishClose(*failure_);
  if (!unsent.empty()) closing_.start(std::move(unsent));
}

void Mesh::wake() {
  wakeup_.notify_all();
  const uint64_t one = 1;
  if (event_ >= 0 && write(event_, &one, sizeof one) < 0) return;  // counter full: the poller wakes anyway
}

// Waits for events and handles them; returns their number.
int Mesh::pollEvents(Lock& lock, std::chrono::milliseconds timeout) {
  epoll_event events[64];
  hasPoller_ = true;
  if (heartbeat_ != nullptr) heartbeat_->fetch_add(1, std::memory_order_relaxed);
  lock.unlock();
  const int ready = epoll_wait(epoll_, events, 64, static_cast<int>(timeout.count()));
  lock.lock();
  hasPoller_ = false;
  wakeup_.notify_all();
  if (!failure_) resumeAccepting();
  for (int i = 0; i < ready && !failure_; i++) dispatch(events[i].data.fd, events[i].events);
  return ready;
}

void Mesh::dispatch(int fd, uint32_t events) {
  if (fd == event_) {
    uint64_t count;
    if (read(event_, &count, sizeof count) < 0) return;  // another mesh of this process took it
    takeFromEndpoint();
  } else if (fd == endpoint_->fd()) {
    acceptConnections();
  } else if (auto found = pending_.find(fd); found != pending_.end()) {
    continueHandshake(found->second);
  } else if (auto known = byFd_.find(fd); known != byFd_.end()) {
    known->second->onEvents(events);
  } else if (auto external = externalFds_.find(fd); external != externalFds_.end()) {
    const OnEvents onEvents = external->second;  // a copy: the callback may remove itself
    if (const auto failure = onEvents(events)) abortLocked(failure->cause, failure->ranks, failure->what());
  }
}

void Mesh::acceptConnections() {
  dropExpired();
  for (;;) {
    if (mustHandshakesEndFirst()) return pauseAccepting();
    const int fd =
        openRegistered([&] { return accept4(endpoint_->fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); });
    if (fd < 0 && errno != EAGAIN && errno != ECONNABORTED && errno != EINTR) return pauseAccepting();
    if (fd < 0) return;
    Connection connection(fd);
    connection.secure(endpoint_->tls(), false);
    // Reads at once: a connection that has sent its hello is not dropped in favour of later ones.
    continueHandshake(
        addPending(PendingConnection{std::move(connection), {}, {}, false, false, {}, Clock::now() + kHelloTimeout}));
    if (failure_) return;
  }
}

// Whether there are so many handshakes that another one would cost one to whose challenge the peer may still answer.
// Peers open a connection for each of their groups, of which this process does not know the number.
bool Mesh::mustHandshakesEndFirst() {
  const auto answers = [](const auto& entry) {
    return entry.second.challengeSent && Clock::now() < entry.second.deadline - kProofTimeout + kAnswerTime;
  };
  return pending_.size() >= endpoint_->maxPending() && std::all_of(pending_.begin(), pending_.end(), answers);
}

// Adds a handshake. If there are too many, closes one, so that unauthenticated connections cannot exhaust descriptors:
// preferably one without a hello, and of those the oldest.
PendingConnection& Mesh::addPending(PendingConnection incoming) {
  while (pending_.size() >= endpoint_->maxPending() && !mustHandshakesEndFirst()) {
    const auto order = [](const PendingConnection& one) { return std::make_pair(one.challengeSent, one.deadline); };
    const auto first = std::min_element(pending_.begin(), pending_.end(), [&](const auto& a, const auto& b) {
      return order(a.second) < order(b.second);
    });
    const int oldest = first->first;
    const bool heard = first->second.challengeSent;
    if (!heard) continueHandshake(first->second);  // its hello may have come meanwhile
    const auto still = pending_.find(oldest);
    if (still != pending_.end() && still->second.challengeSent == heard) closePending(oldest);
  }
  const int fd = incoming.connection.fd();
  watch(fd, EPOLLIN, true);
  return pending_.emplace(fd, std::move(incoming)).first->second;
}

// Out of descriptors or memory, or too many handshakes: the listening socket would stay readable and wake the poller in
// a loop.
void Mesh::pauseAccepting() {
  unwatch(endpoint_->fd());
  resumeAcceptingAt_ = Clock::now() + kAcceptPause;
}

void Mesh::resumeAccepting() {
  if (resumeAcceptingAt_ > Clock::now()) return;
  resumeAcceptingAt_ = Clock::time_point::max();
  watch(endpoint_->fd(), EPOLLIN, true);
}

// Continues a handshake as far as the input allows. Malformed input closes that connection and has no other effect.
void Mesh::continueHandshake(PendingConnection& incoming) {
  while (advanceHandshake(incoming)) {
  }
}

// One step of a handshake. False: more input is needed, or `incoming` was closed.
bool Mesh::advanceHandshake(PendingConnection& incoming) {
  const size_t need = incoming.challengeSent ? sizeof(Proof) : sizeof(Hello);
  char bytes[sizeof(Hello)];
  const ssize_t got = incoming.connection.recv(bytes, need - incoming.received.size());
  if (got < 0 && errno == EAGAIN) return false;
  if (got <= 0) return closePending(incoming.connection.fd()), false;
  incoming.received.insert(incoming.received.end(), bytes, bytes + got);
  if (incoming.received.size() < need) return true;
  if (incoming.challengeSent) return finishHandshake(incoming), false;
  std::memcpy(&incoming.hello, incoming.received.data(), sizeof(Hello));
  incoming.received.clear();
  const Hello& hello = incoming.hello;
  if (hello.magic == kMagic && !(hello.fence < fence_) && sendChallenge(incoming)) return true;
  return closePending(incoming.connection.fd()), false;
}

bool Mesh::sendChallenge(PendingConnection& incoming) {
  incoming.nonce = makeNonce();
  incoming.challengeSent = true;
  incoming.deadline = Clock::now() + kProofTimeout;
  const Challenge challenge{incoming.nonce, computeMac(endpoint_->key(), "accept", incoming.hello, incoming.nonce)};
  return incoming.connection.sendAll(&challenge, sizeof challenge);
}

void Mesh::finishHandshake(PendingConnection& incoming) {
  Proof proof;
  std::memcpy(&proof, incoming.received.data(), sizeof proof);
  const Hello hello = incoming.hello;
  const Digest expected = computeMac(endpoint_->key(), "dial", hello, incoming.nonce);
  const bool proven = equalInConstantTime(proof.mac, expected);
  unwatch(incoming.connection.fd());
  const int fd = incoming.connection.fd();
  Connection connection = std::move(incoming.connection);
  pending_.erase(fd);
  if (!proven) return;
  if (!(fence_ == hello.fence)) return endpoint_->park(std::move(connection), hello);
  acceptPeer(std::move(connection), hello);
}

void Mesh::acceptPeer(Connection connection, const Hello& hello) {
  const bool expected = hello.to == static_cast<uint32_t>(rank) && hello.from < static_cast<uint32_t>(rank);
  if (!expected || pair(static_cast<int>(hello.from)).isOpen()) return;
  pair(static_cast<int>(hello.from)).accept(std::move(connection));
}

// Takes over connections that other meshes of this process accepted and could not use.
void Mesh::takeFromEndpoint() {
  for (auto& [connection, hello] : endpoint_->takeParked(fence_)) acceptPeer(std::move(connection), hello);
  // Continue at once: they may be returned to the endpoint before the next pollEvents.
  for (auto& incoming : endpoint_->takePending()) continueHandshake(addPending(std::move(incoming)));
  dropExpired();
}

// Returns handshakes in progress to the endpoint: they may belong to another group of this process, which would wait
// for them while no caller drives this mesh.
void Mesh::returnHandshakes() {
  for (auto& [fd, incoming] : pending_) {
    unwatch(fd);
    endpoint_->returnPending(std::move(incoming));
  }
  pending_.clear();
}

void Mesh::closePending(int fd) {
  unwatch(fd);
  pending_.erase(fd);
}

// Closes handshakes whose deadline has passed. Each gets one extension, since this mesh may not have polled meanwhile.
void Mesh::dropExpired() {
  std::vector<int> expired;
  for (auto& [fd, incoming] : pending_) {
    if (incoming.deadline < Clock::now()) expired.push_back(fd);
  }
  for (int fd : expired) {
    PendingConnection& late = pending_.at(fd);
    if (std::exchange(late.extended, true)) {
      closePending(fd);
    } else {
      late.deadline = Clock::now() + kHelloTimeout;
      continueHandshake(late);
    }
  }
}

void Mesh::watch(int fd, uint32_t events, bool add) {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  epoll_ctl(epoll_, add ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &event);
}

void Mesh::unwatch(int fd) { epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr); }

std::shared_ptr<gloo::transport::Context> Device::createContext(int, int) {
  throw gloo::InvalidOperationException("a mesh is made from an endpoint, not from a device");
}

void Mesh::limit(std::chrono::milliseconds timeout) {
  // In this order: a reader of the new limit also sees its start time.
  limitSetAt_.store(Clock::now().time_since_epoch().count());
  limit_.store(timeout.count());
}

Mesh::Clock::time_point Mesh::deadlineOf(Clock::time_point begin) const {
  const std::chrono::milliseconds limit(limit_.load());
  if (limit.count() == 0) return Clock::time_point::max();
  return std::max(begin, Clock::time_point(Clock::duration(limitSetAt_.load()))) + limit;
}

void Mesh::wait(Lock& lock, const std::function<bool()>& done, const char* what) {
  const HandshakesReturner returner{*this};
  auto begin = Clock::now();
  while (!done()) {
    checkLocked();
    const auto now = Clock::now(), deadline = deadlineOf(begin);
    if (now >= deadline) blameAwaitedPeers(what, now - deadline >= kGrace);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - now);
    const auto slice = now < deadline ? std::min(kSlice, left) : kSlice;
    if (!wanted_.empty()) {
      askForAddresses(lock);
    } else if (!hasPoller_) {
      begin += pollForAll(lock, slice, begin);
    } else if (wakeup_.wait_for(lock, slice) == std::cv_status::timeout) {
      begin += computeStoppedTime(now, slice);
      reportWait(lock, begin, {});
    }
  }
  if (progress_ != nullptr) progress_->fetch_add(1, std::memory_order_relaxed);
}

// Returns how long this process or its machine was stopped; that time does not count against peers.
Mesh::Clock::duration Mesh::computeStoppedTime(Clock::time_point since, std::chrono::milliseconds slice) {
  const auto excess = Clock::now() - since - slice;
  return excess > kSlice ? excess : Clock::duration::zero();
}

// Peers that this rank waits for. silentOnes: only those that sent no keepalive, which waiting peers do.
std::vector<int> Mesh::findAwaitedRanks(bool silentOnes) {
  const auto since = Clock::now() - kSilenceLimit;
  std::vector<int> ranks;
  for (int r = 0; r < size; r++) {
    if (r != rank && pair(r).isBusy() && (!silentOnes || pair(r).isSilentSince(since))) ranks.push_back(r);
  }
  return ranks;
}

// Ends the group and blames the silent peers that this rank waits for. If there are none, it returns: another rank
// knows the cause and gets a moment to report it. blameAll: that moment is over, so all awaited peers are blamed.
void Mesh::blameAwaitedPeers(const char* what, bool blameAll) {
  const std::vector<int> ranks = findAwaitedRanks(!blameAll);
  if (ranks.empty() && !blameAll) return;
  std::string names;
  for (int r : ranks) names += (names.empty() ? "" : ", ") + std::to_string(r);
  abortLocked(Cause::kTimeout, ranks,
              name() + ": " + what + " timed out after " + std::to_string(limit_.load()) + " ms, waiting for rank(s) " +
                  (names.empty() ? "unknown" : names));
  checkLocked();
}

// Runs the event loop once during a wait that began at `begin`; returns the time in which the process was stopped.
Mesh::Clock::duration Mesh::pollForAll(Lock& lock, std::chrono::milliseconds slice, Clock::time_point begin) {
  const auto before = Clock::now();
  const int ready = pollEvents(lock, slice);
  const auto now = Clock::now();
  const auto lost = computeStoppedTime(before, slice);
  // Decided by time, not by readiness: keepalives of waiting peers arrive all the time.
  if (failure_ || (ready > 0 && now - std::max(begin, lastPeriodicWork_) < kSlice)) return lost;
  lastPeriodicWork_ = now;
  doPeriodicWork(begin);
  if (failure_) return lost;
  const std::vector<int> ranks = findAwaitedRanks(true);
  if (ready <= 0 || !ranks.empty()) reportWait(lock, begin, ranks);
  return lost;
}

void Mesh::reportWait(Lock& lock, Clock::time_point begin, const std::vector<int>& ranks) {
  lock.unlock();
  try {
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin);
    onWait_(waited, waited < kLate + kSilenceLimit ? std::vector<int>{} : ranks);
  } catch (...) {
    lock.lock();
    abortLocked(Cause::kAborted, {rank}, name() + ": interrupted");
    throw;
  }
  lock.lock();
}

const SocketAddress* Mesh::addressOf(int peer) {
  const auto at = static_cast<size_t>(peer);
  if (addresses_[at].length > 0) return &addresses_[at];
  if (!asked_[at]) wanted_.push_back(peer);
  asked_[at] = true;
  return nullptr;
}

// Asks for the addresses that were wanted, then dials. Ends the group if they cannot be known.
void Mesh::askForAddresses(Lock& lock) {
  if (wanted_.empty()) return;
  const std::vector<int> ranks = std::exchange(wanted_, {});
  std::vector<SocketAddress> found;
  std::string why = "the addresses of its peers cannot be known";
  std::exception_ptr raised;
  lock.unlock();
  try {
    for (const auto& address : findAddresses_(ranks)) found.push_back(parseAddress(address));
  } catch (const std::invalid_argument& error) {
    why = error.what();
  } catch (...) {
    raised = std::current_exception();
  }
  lock.lock();
  if (raised || found.size() != ranks.size()) abortLocked(Cause::kAborted, {}, name() + ": " + why);
  if (raised) std::rethrow_exception(raised);
  checkLocked();
  for (size_t i = 0; i < ranks.size(); i++) {
    addresses_[static_cast<size_t>(ranks[i])] = found[i];
    pair(ranks[i]).onAddress();
  }
}

void Mesh::doPeriodicWork(Clock::time_point begin) {
  takeFromEndpoint();
  for (int r = 0; r < size && !failure_; r++) {
    if (r != rank) pair(r).readPastUnexpected();
    if (r < rank && !failure_) pair(r).probeListener();
  }
  // Not from the start: a keepalive that a peer leaves unread when it closes resets the connection and loses its data.
  const auto waits = [&](Clock::duration late) {
    return Clock::now() >= begin + (limit().count() == 0 ? late : std::min<Clock::duration>(limit() / 2, late));
  };
  if (failure_ || !waits(kLate)) return;
  const bool veryLate = waits(kVeryLate);
  for (int r = 0; r < size; r++) {
    if (r == rank) continue;
    if (veryLate) pair(r).dialEarly();
    pair(r).sendKeepalive();
  }
}

void Mesh::addFd(int fd, OnEvents onEvents) {
  externalFds_[fd] = std::move(onEvents);
  watch(fd, EPOLLIN, true);
}

void Mesh::removeFd(int fd) {
  if (externalFds_.erase(fd) > 0) unwatch(fd);
}

void Mesh::observeFailure(std::function<void(const Failure&)> onFailure, std::atomic<uint32_t>* heartbeat,
                          std::atomic<uint32_t>* progress) {
  Lock lock(mu_);
  onFailure_ = std::move(onFailure);
  heartbeat_ = heartbeat;
  progress_ = progress;
  if (failure_ && onFailure_) onFailure_(*failure_);
}

void Mesh::pollOnce() {
  Lock lock(mu_);
  const HandshakesReturner returner{*this};
  checkLocked();
  if (!hasPoller_) pollEvents(lock, std::chrono::milliseconds(0));  // else another caller polls
  checkLocked();
}

void Mesh::onWaitInterval(Clock::time_point begin, const std::vector<int>& ranks) {
  Lock lock(mu_);
  const HandshakesReturner returner{*this};
  if (!failure_) doPeriodicWork(begin);
  askForAddresses(lock);
  reportWait(lock, begin, ranks);
  checkLocked();
}

bool Mesh::runUntil(const std::function<bool()>& done, Clock::time_point until) {
  Lock lock(mu_);
  const HandshakesReturner returner{*this};
  const auto begin = Clock::now();
  while (!done()) {
    checkLocked();
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
    if (left.count() <= 0) break;
    if (!wanted_.empty()) {
      askForAddresses(lock);
    } else if (hasPoller_) {
      wakeup_.wait_for(lock, std::min(kSlice, left));
    } else {
      pollForAll(lock, std::min(kSlice, left), begin);
    }
  }
  return done();
}

}  // namespace elastic
