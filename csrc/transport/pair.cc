#include "transport/pair.h"

#include <gloo/common/error.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/buffer.h"
#include "transport/fork.h"
#include "transport/goodbye.h"

namespace elastic {
namespace {

constexpr std::chrono::milliseconds kHereEvery{150};
constexpr std::chrono::seconds kSeekEvery{1};
constexpr int kSocket = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;

}  // namespace

Pair::Pair(Mesh& mesh, int peer) : mesh_(mesh), peer_(peer) { localRank_ = 0; }

Pair::~Pair() { shut(); }

const gloo::transport::Address& Pair::address() const {
  throw gloo::InvalidOperationException("pairs have no address of their own");
}

std::unique_ptr<gloo::transport::Buffer> Pair::createSendBuffer(int, void*, size_t) {
  throw gloo::InvalidOperationException("bound buffers are not supported: use the collectives that are functions");
}

std::unique_ptr<gloo::transport::Buffer> Pair::createRecvBuffer(int, void*, size_t) {
  throw gloo::InvalidOperationException("bound buffers are not supported: use the collectives that are functions");
}

void Pair::send(gloo::transport::UnboundBuffer* unbound, uint64_t slot, size_t offset, size_t nbytes) {
  Mesh::Lock lock(mesh_.mu_);
  mesh_.checkLocked();
  auto buffer = static_cast<Buffer*>(unbound);
  buffer->pending_++;
  sends_.push_back({buffer, {slot, nbytes, mesh_.call_}, static_cast<const char*>(buffer->ptr) + offset});
  open();
  if (state_ == State::kUp && sends_.size() == 1) flush();
}

void Pair::recv(gloo::transport::UnboundBuffer* unbound, uint64_t slot, size_t offset, size_t nbytes) {
  Mesh::Lock lock(mesh_.mu_);
  mesh_.checkLocked();
  auto buffer = static_cast<Buffer*>(unbound);
  char* data = static_cast<char*>(buffer->ptr) + offset;
  if (auto stored = early_.find(slot); stored != early_.end()) {
    const Early early = std::move(stored->second.front());
    const std::vector<char>& body = early.body;
    stored->second.pop_front();
    if (stored->second.empty()) early_.erase(stored);
    mesh_.spilled_ -= body.size();
    if (!sameCall(early.call)) return;
    if (body.size() != nbytes) return mismatch(nbytes, body.size());
    if (nbytes > 0) std::memcpy(data, body.data(), nbytes);
    buffer->received_.push_back(peer_);
    return;
  }
  buffer->pending_++;
  receives_[slot].push_back({buffer, data, nbytes});
  posted_++;
  open();
  if (paused_) {
    paused_ = false;
    if (place()) read();
    arm();
  }
}

void Pair::open() {
  if (state_ == State::kClosed) {
    mesh_.abortLocked(Cause::kPeerLost, {peer_}, link() + ": " + why_);
    mesh_.checkLocked();
  }
  if (state_ != State::kIdle || mesh_.rank > peer_) return;  // the lower rank dials, the higher accepts
  const SocketAddress& to = mesh_.addresses_[static_cast<size_t>(peer_)];
  connection_ = Connection(openOwned([&] { return socket(to.family(), kSocket, 0); }));
  if (!connection_.open()) {
    // Our own trouble: nothing is known against the peer.
    return mesh_.abortLocked(Cause::kAborted, {mesh_.rank}, mesh_.me() + ": no socket: " + strerror(errno));
  }
  mesh_.byFd_[connection_.fd()] = this;
  state_ = State::kDialing;
  // Before it is watched: a socket that nobody connects looks as if it were.
  const bool refused = ::connect(connection_.fd(), to.get(), to.length) != 0 && errno != EINPROGRESS;
  if (refused) return fail(std::string("connect: ") + strerror(errno));
  mesh_.watch(connection_.fd(), armed_ = EPOLLOUT, true);
}

void Pair::accept(Connection connection) {
  connection_ = std::move(connection);
  mesh_.byFd_[connection_.fd()] = this;
  mesh_.watch(connection_.fd(), armed_ = EPOLLIN, true);
  up();
  if (connection_.holds()) read();  // what came with the end of the handshake
}

void Pair::up() {
  const int one = 1;
  setsockopt(connection_.fd(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  state_ = State::kUp;
  have_ = 0;
  heard_ = Mesh::Clock::now();
  flush();
}

void Pair::onEvents(uint32_t events) {
  if (state_ == State::kDialing) {
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(connection_.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return fail(std::string("connect: ") + strerror(error));
    connection_.secure(mesh_.endpoint_->tls(), true);
    hello_ = Hello{kMagic, mesh_.fence_, static_cast<uint32_t>(mesh_.rank), static_cast<uint32_t>(peer_), freshNonce()};
    if (!connection_.say(&hello_, sizeof hello_)) return fail("no room for a handshake");
    state_ = State::kProving;
    mesh_.watch(connection_.fd(), armed_ = EPOLLIN, false);
    return;
  }
  if (state_ == State::kProving) return prove();
  if (state_ == State::kUp && (events & EPOLLOUT)) flush();
  if (state_ == State::kUp && paused_ && (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR))) return lookBehind();
  if (state_ == State::kUp && (events & (EPOLLIN | EPOLLHUP | EPOLLERR))) read();
}

void Pair::prove() {
  if (!readInto(reinterpret_cast<char*>(&challenge_), have_, sizeof challenge_)) return;
  const Digest expected = macOf(mesh_.endpoint_->key(), "accept", hello_, challenge_.nonce);
  if (!equalInConstantTime(challenge_.mac, expected)) return fail("it does not hold the job's key");
  const Proof proof{macOf(mesh_.endpoint_->key(), "dial", hello_, challenge_.nonce)};
  if (!connection_.say(&proof, sizeof proof)) return fail("no room for a handshake");
  up();
}

void Pair::flush() {
  while (state_ == State::kUp && !sends_.empty()) {
    if (sendFront()) continue;
    if (errno == EAGAIN) break;
    return drain();
  }
  arm();
}

// Hands the kernel what it takes of the first frame; false with errno when it takes nothing. A frame is sent once the
// kernel has all of it: nobody need turn the event loop for what is under way.
bool Pair::sendFront() {
  Send& next = sends_.front();
  const size_t whole = sizeof(FrameHeader) + next.header.size;
  if (next.done < whole) {
    iovec parts[2];
    size_t count = 0;
    if (next.done < sizeof(FrameHeader)) {
      parts[count++] = {reinterpret_cast<char*>(&next.header) + next.done, sizeof(FrameHeader) - next.done};
      if (next.header.size > 0) parts[count++] = {const_cast<char*>(next.data), next.header.size};
    } else {
      parts[count++] = {const_cast<char*>(next.data) + (next.done - sizeof(FrameHeader)), whole - next.done};
    }
    const ssize_t sent = connection_.send(parts, count);
    if (sent < 0) return false;
    next.done += static_cast<size_t>(sent);
    if (next.done < whole) return true;
  }
  if (!connection_.flush()) return false;
  if (next.buffer != nullptr) {
    next.buffer->sent_.push_back(peer_);
    next.buffer->pending_--;
    mesh_.news_.notify_all();
  }
  sends_.pop_front();
  return true;
}

// What we say on our own account, such as that we wait, is nobody's loss.
bool Pair::owes() const {
  return std::any_of(sends_.begin(), sends_.end(), [](const Send& send) { return send.buffer != nullptr; });
}

void Pair::fail(const std::string& why) {
  const bool needed = busy();
  why_ = why;
  shut();
  if (needed) mesh_.abortLocked(Cause::kPeerLost, {peer_}, link() + ": " + why);
}

// Tells the peer that we live and wait; only where nothing else is on its way.
void Pair::sayHere() {
  const auto now = Mesh::Clock::now();
  if (state_ != State::kUp || !sends_.empty() || now - said_ < kHereEvery) return;
  said_ = now;
  sends_.push_back({nullptr, {kHereSlot, 0, {}}, nullptr});
  flush();
}

// A frame that is half sent is ended first: a peer that found the stream cut would have to take us for dead. Whether
// there is more than the kernel took; its memory lives for as long as we hold the mutex. So must `body`.
bool Pair::beginGoodbye(const std::vector<char>& body) {
  if (state_ != State::kUp) return false;
  while (!sends_.empty() && sends_.back().done == 0) sends_.pop_back();
  sends_.push_back({nullptr, {kGoodbyeSlot, body.size(), {}}, body.data()});
  while (!sends_.empty()) {
    if (!sendFront()) return errno == EAGAIN;
  }
  return false;
}

// What beginGoodbye left, and the connection to say it on.
LastWords Pair::takeGoodbye() {
  size_t size = 0;
  for (const Send& send : sends_) size += sizeof(FrameHeader) + send.header.size - send.done;
  LastWords words(size);
  for (const Send& send : sends_) {
    const size_t header = std::min(send.done, sizeof(FrameHeader)), body = send.done - header;
    words.add(reinterpret_cast<const char*>(&send.header) + header, sizeof(FrameHeader) - header);
    words.add(send.data + body, send.header.size - body);
  }
  mesh_.unwatch(connection_.fd());
  mesh_.byFd_.erase(connection_.fd());
  words.connection = std::move(connection_);
  return words;
}

void Pair::endGoodbye(const Failure& failure) {
  if (state_ == State::kUp) sends_.clear();
  if (connection_.open()) {
    mesh_.unwatch(connection_.fd());
    // Not SHUT_RD: what the peer still sends would reset the connection, and our words with it.
    ::shutdown(connection_.fd(), SHUT_WR);
  }
  if (why_.empty()) why_ = failure.what();
  state_ = State::kClosed;
}

// A buffer has died with operations pending; the group has failed, so everything on this pair is void.
void Pair::drop() {
  sends_.clear();
  receives_.clear();
  posted_ = 0;
  inBody_ = false;
  target_ = {};
}

void Pair::close() {
  Mesh::Lock lock(mesh_.mu_);
  shut();
}

// A lower rank that died before it dialled us shows in that nobody listens there any more. Looked at twice, since what
// it sent before an orderly end may have come in between. To the living we are a stranger who says nothing.
void Pair::seek() {
  if (seeking_ >= 0) {
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(seeking_, SOL_SOCKET, SO_ERROR, &error, &length);
    return sought(error);
  }
  const auto now = Mesh::Clock::now();
  if (state_ != State::kIdle || !busy() || (!refused_ && now - sought_ < kSeekEvery)) return;
  sought_ = now;
  const SocketAddress& to = mesh_.addresses_[static_cast<size_t>(peer_)];
  seeking_ = openOwned([&] { return socket(to.family(), kSocket, 0); });
  if (seeking_ < 0) return;  // no descriptor today
  if (::connect(seeking_, to.get(), to.length) != 0 && errno != EINPROGRESS) sought(errno);
}

void Pair::sought(int error) {
  disown(seeking_);
  seeking_ = -1;
  const bool again = refused_;
  refused_ = error == ECONNREFUSED;
  if (refused_ && again && state_ == State::kIdle) fail("it is gone and never came");
}

void Pair::shut() {
  if (seeking_ >= 0) disown(seeking_);
  seeking_ = -1;
  if (connection_.open()) {
    mesh_.unwatch(connection_.fd());
    mesh_.byFd_.erase(connection_.fd());
    connection_.close();
  }
  armed_ = 0;
  state_ = State::kClosed;
}

// Of a paused pair only the peer's end is of interest, which may have sent a goodbye after the frame that waits; and
// not even that if the frame is too large to look past: it would wake the leader without end.
void Pair::arm() {
  if (!connection_.open() || state_ != State::kUp) return;
  uint32_t wanted = sends_.empty() ? 0u : uint32_t{EPOLLOUT};
  if (!paused_) wanted |= EPOLLIN;
  if (paused_ && fitsAside()) wanted |= EPOLLRDHUP;
  if (wanted == armed_) return;
  if (wanted == 0) {
    mesh_.unwatch(connection_.fd());
  } else {
    mesh_.watch(connection_.fd(), wanted, armed_ == 0);
  }
  armed_ = wanted;
}

std::string Pair::link() const { return mesh_.me() + ": connection to rank " + std::to_string(peer_); }

}  // namespace elastic
