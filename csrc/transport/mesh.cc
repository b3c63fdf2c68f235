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
#include "transport/fork.h"
#include "transport/goodbye.h"
#include "transport/pair.h"

namespace elastic {
namespace {

constexpr std::chrono::seconds kHelloWithin{10};
constexpr std::chrono::minutes kProofWithin{10};  // who is computing does not answer a challenge
constexpr std::chrono::milliseconds kSlice{200};  // how often one who closes looks whether the last waiter has gone
constexpr std::chrono::milliseconds kAcceptRest{100};

}  // namespace

Mesh::Mesh(std::shared_ptr<Endpoint> endpoint, int rank, const std::vector<std::string>& peers, Fence fence,
           std::chrono::milliseconds timeout, std::chrono::milliseconds nobodyHears, OnWait onWait)
    : gloo::transport::Context(rank, static_cast<int>(peers.size())),
      endpoint_(std::move(endpoint)),
      fence_(fence),
      onWait_(std::move(onWait)),
      limit_(timeout.count()),
      farewell_(nobodyHears) {
  timeout_ = timeout;
  for (const auto& peer : peers) addresses_.push_back(parseAddress(peer));
  for (int r = 0; r < size; r++) {
    if (r != rank) pairs_[r] = std::make_unique<Pair>(*this, r);
  }
  if (endpoint_->fd() < 0) throw std::runtime_error("the endpoint is closed; a new group needs an open one");
  epoll_ = openOwned([] { return epoll_create1(EPOLL_CLOEXEC); });
  event_ = openOwned([] { return eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC); });
  if (epoll_ < 0 || event_ < 0) {
    const std::string why = strerror(errno);
    close();
    throw std::runtime_error("no descriptors for a new group: " + why);
  }
  watch(event_, EPOLLIN, true);
  watch(endpoint_->fd(), EPOLLIN, true);
  endpoint_->enroll(event_, static_cast<size_t>(size));
  wake();  // the first turn looks for what others left: until then nobody would hear what is taken from them
}

Mesh::~Mesh() { close(); }

void Mesh::close() {
  closeSockets();
  farewell_.end();  // without the mutex
}

void Mesh::closeSockets() {
  Lock lock(mu_);
  // An orderly end is no failure of the peers: they may still be busy with one another, so nobody is told.
  if (!failure_) {
    failure_ = std::make_unique<Failure>(Cause::kAborted, std::vector<int>{}, me() + ": the group is closed");
  }
  wake();
  while (polling_) news_.wait_for(lock, kSlice);
  for (auto& pair : pairs_) {
    if (pair) static_cast<Pair*>(pair.get())->shut();
  }
  // Those in the midst of a handshake may be of the next generation already.
  for (auto& entry : incoming_) endpoint_->leave(std::move(entry.second));
  incoming_.clear();
  guests_.clear();
  if (event_ >= 0) endpoint_->dismiss(event_);
  if (epoll_ >= 0) disown(epoll_);
  if (event_ >= 0) disown(event_);
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
}

void Mesh::abortLocked(Cause cause, std::vector<int> ranks, const std::string& reason) {
  if (failure_) return;
  failure_ = std::make_unique<Failure>(cause, std::move(ranks), reason);
  wake();
  if (onFailure_) onFailure_(*failure_);
  sayGoodbye();
}

// What peers do not take at once goes on without us: the caller, and whoever waits for the mutex, have their own work.
void Mesh::sayGoodbye() {
  const std::vector<char> body = encodeGoodbye(*failure_);
  std::vector<Pair*> all, late;
  for (auto& pair : pairs_) {
    if (pair) all.push_back(static_cast<Pair*>(pair.get()));
  }
  for (Pair* pair : all) {
    if (pair->beginGoodbye(body)) late.push_back(pair);
  }
  std::vector<LastWords> words;
  for (Pair* pair : late) words.push_back(pair->takeGoodbye());
  for (Pair* pair : all) pair->endGoodbye(*failure_);
  if (!words.empty()) farewell_.begin(std::move(words));
}

void Mesh::wake() {
  news_.notify_all();
  const uint64_t one = 1;
  if (event_ >= 0 && write(event_, &one, sizeof one) < 0) return;  // full: the leader wakes all the same
}

// Waits for events and deals with them; returns how many there were.
int Mesh::turn(Lock& lock, std::chrono::milliseconds timeout) {
  epoll_event events[64];
  polling_ = true;
  if (pulse_ != nullptr) pulse_->fetch_add(1, std::memory_order_relaxed);
  lock.unlock();
  const int ready = epoll_wait(epoll_, events, 64, static_cast<int>(timeout.count()));
  lock.lock();
  polling_ = false;
  news_.notify_all();
  if (!failure_) acceptAgain();
  for (int i = 0; i < ready && !failure_; i++) dispatch(events[i].data.fd, events[i].events);
  return ready;
}

void Mesh::dispatch(int fd, uint32_t events) {
  if (fd == event_) {
    uint64_t count;
    if (read(event_, &count, sizeof count) < 0) return;  // somebody else has taken it
    adoptLeftOver();
  } else if (fd == endpoint_->fd()) {
    acceptAll();
  } else if (auto found = incoming_.find(fd); found != incoming_.end()) {
    proceed(found->second);
  } else if (auto known = byFd_.find(fd); known != byFd_.end()) {
    known->second->onEvents(events);
  } else if (auto guest = guests_.find(fd); guest != guests_.end()) {
    const OnEvents onEvents = guest->second;  // it may detach itself
    if (const auto failure = onEvents(events)) abortLocked(failure->cause, failure->ranks, failure->what());
  }
}

void Mesh::acceptAll() {
  dropExpired();
  for (;;) {
    const int fd = openOwned([&] { return accept4(endpoint_->fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); });
    if (fd < 0 && errno != EAGAIN && errno != ECONNABORTED && errno != EINTR) return restFromAccepting();
    if (fd < 0) return;
    Connection connection(fd);
    connection.secure(endpoint_->tls(), false);
    // Who has said something already is heard at once: only those who keep silent are in danger of the next ones.
    proceed(take(Incoming{std::move(connection), {}, {}, false, false, {}, Clock::now() + kHelloWithin}));
    if (failure_) return;
  }
}

// A newcomer. Where there are too many, strangers who say nothing must not take all descriptors: one goes for it, of
// those who have said nothing if there are any, and the one who came first.
Incoming& Mesh::take(Incoming incoming) {
  if (incoming_.size() >= endpoint_->mostUnproven()) {
    const auto order = [](const Incoming& one) { return std::make_pair(one.challenged, one.until); };
    const auto first = std::min_element(incoming_.begin(), incoming_.end(), [&](const auto& a, const auto& b) {
      return order(a.second) < order(b.second);
    });
    forget(first->first);
  }
  const int fd = incoming.connection.fd();
  watch(fd, EPOLLIN, true);
  return incoming_.emplace(fd, std::move(incoming)).first->second;
}

// Out of descriptors or memory: the listening socket stays readable, and would wake the leader without end.
void Mesh::restFromAccepting() {
  unwatch(endpoint_->fd());
  acceptAgain_ = Clock::now() + kAcceptRest;
}

void Mesh::acceptAgain() {
  if (acceptAgain_ > Clock::now()) return;
  acceptAgain_ = Clock::time_point::max();
  watch(endpoint_->fd(), EPOLLIN, true);
}

// Deals with what a newcomer said; a stranger that says anything else than a handshake loses its connection, no more.
void Mesh::proceed(Incoming& incoming) {
  while (hear(incoming)) {
  }
}

// One stage of a handshake. False: more has to come first, or `incoming` is gone.
bool Mesh::hear(Incoming& incoming) {
  const size_t need = incoming.challenged ? sizeof(Proof) : sizeof(Hello);
  char bytes[sizeof(Hello)];
  const ssize_t got = incoming.connection.recv(bytes, need - incoming.got.size());
  if (got < 0 && errno == EAGAIN) return false;
  if (got <= 0) return forget(incoming.connection.fd()), false;
  incoming.got.insert(incoming.got.end(), bytes, bytes + got);
  if (incoming.got.size() < need) return true;
  if (incoming.challenged) return adopt(incoming), false;
  std::memcpy(&incoming.hello, incoming.got.data(), sizeof(Hello));
  incoming.got.clear();
  const Hello& hello = incoming.hello;
  if (hello.magic == kMagic && !(hello.fence < fence_) && greet(incoming)) return true;
  return forget(incoming.connection.fd()), false;
}

bool Mesh::greet(Incoming& incoming) {
  incoming.nonce = freshNonce();
  incoming.challenged = true;
  incoming.until = Clock::now() + kProofWithin;
  const Challenge challenge{incoming.nonce, macOf(endpoint_->key(), "accept", incoming.hello, incoming.nonce)};
  return incoming.connection.say(&challenge, sizeof challenge);
}

void Mesh::adopt(Incoming& incoming) {
  Proof proof;
  std::memcpy(&proof, incoming.got.data(), sizeof proof);
  const Hello hello = incoming.hello;
  const Digest expected = macOf(endpoint_->key(), "dial", hello, incoming.nonce);
  const bool proven = equalInConstantTime(proof.mac, expected);
  unwatch(incoming.connection.fd());
  const int fd = incoming.connection.fd();
  Connection connection = std::move(incoming.connection);
  incoming_.erase(fd);
  if (!proven) return;
  if (!(fence_ == hello.fence)) return endpoint_->park(std::move(connection), hello);
  adoptProven(std::move(connection), hello);
}

void Mesh::adoptProven(Connection connection, const Hello& hello) {
  const bool expected = hello.to == static_cast<uint32_t>(rank) && hello.from < static_cast<uint32_t>(rank);
  if (!expected || pair(static_cast<int>(hello.from)).opened()) return;
  pair(static_cast<int>(hello.from)).accept(std::move(connection));
}

// What meshes before this one accepted and could not use.
void Mesh::adoptLeftOver() {
  for (auto& [connection, hello] : endpoint_->takeParked(fence_)) adoptProven(std::move(connection), hello);
  // Heard at once, since they may be passed on before the next turn.
  for (auto& incoming : endpoint_->takeUnproven()) proceed(take(std::move(incoming)));
  dropExpired();
}

// A handshake under way may be of another group of this process, one that is yet to be made among them, whose callers
// wait while nobody turns this event loop.
void Mesh::passOn() {
  for (auto& [fd, incoming] : incoming_) {
    unwatch(fd);
    endpoint_->leave(std::move(incoming));
  }
  incoming_.clear();
}

void Mesh::forget(int fd) {
  unwatch(fd);
  incoming_.erase(fd);
}

// Those who have been silent for too long. Nobody may have listened meanwhile, so that they are heard once more before.
void Mesh::dropExpired() {
  std::vector<int> expired;
  for (auto& [fd, incoming] : incoming_) {
    if (incoming.until < Clock::now()) expired.push_back(fd);
  }
  for (int fd : expired) {
    Incoming& late = incoming_.at(fd);
    if (std::exchange(late.late, true)) {
      forget(fd);
    } else {
      late.until = Clock::now() + kHelloWithin;
      proceed(late);
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

}  // namespace elastic
