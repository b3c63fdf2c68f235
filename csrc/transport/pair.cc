#include "transport/pair.h"

#include <gloo/common/error.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/buffer.h"
#include "transport/failure.h"
#include "transport/fork.h"

namespace elastic {
namespace {

constexpr std::chrono::milliseconds kKeepaliveInterval{150};
constexpr std::chrono::seconds kProbeInterval{1};
constexpr int kSocket = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;
constexpr size_t kMaxUnexpectedBytes = size_t{1}
                                       << 28;  // bytes buffered for collectives that this rank has not started
// At an orderly end, the kernel is left alone with so many bytes where no keepalive of the peer can be on its way yet.
constexpr size_t kSmallTail = size_t{1} << 16;
constexpr size_t kMaxControlBody = size_t{1} << 16;

bool isControlSlot(uint64_t slot) { return slot == kCloseSlot || slot == kKeepaliveSlot; }

}  // namespace

Pair::Pair(Mesh& mesh, int peer) : mesh_(mesh), peer_(peer) { localRank_ = 0; }

Pair::~Pair() { closeSocket(); }

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
  const char* data = static_cast<const char*>(buffer->ptr) + offset;
  const bool idle = sends_.empty();
  for (size_t at = 0; at == 0 || at < nbytes; at += kMaxFrame) {
    const size_t size = std::min(kMaxFrame, nbytes - at);
    buffer->pending_++;
    sends_.push_back({buffer, {slot, size, mesh_.call_, nbytes - at - size}, data + at});
  }
  dial();
  if (state_ == State::kConnected && idle) flush();
}

void Pair::recv(gloo::transport::UnboundBuffer* unbound, uint64_t slot, size_t offset, size_t nbytes) {
  Mesh::Lock lock(mesh_.mu_);
  mesh_.checkLocked();
  auto buffer = static_cast<Buffer*>(unbound);
  char* data = static_cast<char*>(buffer->ptr) + offset;
  bool allCame = true;
  for (size_t at = 0; at == 0 || at < nbytes; at += kMaxFrame) {
    const size_t size = std::min(kMaxFrame, nbytes - at);
    const Receive receive{buffer, data + at, size, nbytes - at - size};
    if (unexpectedFrames_.count(slot) > 0) {
      if (!takeUnexpected(slot, receive)) return;
      continue;
    }
    allCame = false;
    buffer->pending_++;
    receives_[slot].push_back(receive);
    posted_++;
  }
  if (allCame) return;
  dial();
  if (paused_) {
    paused_ = false;
    if (beginBody()) read();
    updateEpollEvents();
  }
}

void Pair::dial() {
  if (state_ == State::kClosed) {
    mesh_.abortLocked(Cause::kPeerLost, {peer_}, linkName() + ": " + closeReason_);
    mesh_.checkLocked();
  }
  if (state_ != State::kIdle || mesh_.rank > peer_) return;  // the lower rank dials, the higher accepts
  const SocketAddress* to = mesh_.addressOf(peer_);
  if (to == nullptr) return;
  connection_ = Connection(openRegistered([&] { return socket(to->family(), kSocket, 0); }));
  if (!connection_.open()) {
    if (std::exchange(early_, false)) return;
    // A local failure: the peer is not to blame.
    return mesh_.abortLocked(Cause::kAborted, {mesh_.rank}, mesh_.name() + ": no socket: " + strerror(errno));
  }
  mesh_.byFd_[connection_.fd()] = this;
  state_ = State::kDialing;
  // Before epoll: an unconnected socket reports as ready.
  const bool refused = ::connect(connection_.fd(), to->get(), to->length) != 0 && errno != EINPROGRESS;
  if (refused) return fail(std::string("connect: ") + strerror(errno));
  mesh_.watch(connection_.fd(), epollEvents_ = EPOLLOUT, true);
}

// Connects to a peer that this rank does not need yet, but that may wait for this rank: without a connection the peer
// gets no keepalives, and would take this rank for silent.
void Pair::dialEarly() {
  const auto now = Mesh::Clock::now();
  if (state_ != State::kIdle || mesh_.rank > peer_ || now - lastProbe_ < kProbeInterval) return;
  lastProbe_ = now;
  early_ = true;
  dial();
}

// The peer's address was not known when it was dialled.
void Pair::onAddress() {
  if (state_ == State::kIdle && (early_ || isBusy())) dial();
}

void Pair::accept(Connection connection) {
  connection_ = std::move(connection);
  mesh_.byFd_[connection_.fd()] = this;
  mesh_.watch(connection_.fd(), epollEvents_ = EPOLLIN, true);
  onConnected();
  if (connection_.hasBufferedInput()) read();  // input that followed the handshake in the same record
}

void Pair::onConnected() {
  const int one = 1;
  setsockopt(connection_.fd(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  state_ = State::kConnected;
  early_ = false;
  bytesRead_ = 0;
  lastReceived_ = Mesh::Clock::now();
  flush();
}

void Pair::onEvents(uint32_t events) {
  if (state_ == State::kDialing) {
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(connection_.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return fail(std::string("connect: ") + strerror(error));
    connection_.secure(mesh_.endpoint_->tls(), true);
    hello_ = Hello{kMagic, mesh_.fence_, static_cast<uint32_t>(mesh_.rank), static_cast<uint32_t>(peer_), makeNonce()};
    if (!connection_.sendAll(&hello_, sizeof hello_)) return fail("no room for a handshake");
    state_ = State::kHandshaking;
    mesh_.watch(connection_.fd(), epollEvents_ = EPOLLIN, false);
    return;
  }
  if (state_ == State::kHandshaking) return onChallenge();
  if (state_ == State::kConnected && (events & EPOLLOUT)) flush();
  if (state_ == State::kConnected && paused_ && (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)))
    return readPastUnexpected();
  if (state_ == State::kConnected && (events & (EPOLLIN | EPOLLHUP | EPOLLERR))) read();
}

void Pair::onChallenge() {
  if (!readExactly(reinterpret_cast<char*>(&challenge_), bytesRead_, sizeof challenge_)) return;
  const Digest expected = computeMac(mesh_.endpoint_->key(), "accept", hello_, challenge_.nonce);
  if (!equalInConstantTime(challenge_.mac, expected)) return fail("it does not hold the job's key");
  const Proof proof{computeMac(mesh_.endpoint_->key(), "dial", hello_, challenge_.nonce)};
  if (!connection_.sendAll(&proof, sizeof proof)) return fail("no room for a handshake");
  onConnected();
}

void Pair::flush() {
  while (state_ == State::kConnected && !sends_.empty()) {
    if (sendFront()) continue;
    if (errno == EAGAIN) break;
    return readToEnd();
  }
  updateEpollEvents();
}

// Sends as much of the first frame as the kernel accepts; false with errno if it accepts nothing. A frame counts as
// sent once the kernel has all of it.
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
    next.buffer->sent_.add(peer_, next.header.rest);
    next.buffer->pending_--;
    mesh_.wakeup_.notify_all();
  }
  sends_.pop_front();
  return true;
}

// Whether frames of collectives are queued; control frames do not count.
bool Pair::hasUnsentData() const {
  return std::any_of(sends_.begin(), sends_.end(), [](const Send& send) { return send.buffer != nullptr; });
}

void Pair::fail(const std::string& why) {
  const bool needed = isBusy();
  closeSocket();
  if (std::exchange(early_, false)) {
    // It failed before it was needed, or while this rank did not continue the handshake.
    state_ = State::kIdle;
    bytesRead_ = 0;
    return needed ? dial() : void();
  }
  closeReason_ = why;
  if (needed) mesh_.abortLocked(Cause::kPeerLost, {peer_}, linkName() + ": " + why);
}

// Sends a keepalive (this rank is alive and waits) unless other frames are queued.
void Pair::sendKeepalive() {
  const auto now = Mesh::Clock::now();
  if (state_ != State::kConnected || !sends_.empty() || now - lastKeepalive_ < kKeepaliveInterval) return;
  lastKeepalive_ = now;
  sends_.push_back({nullptr, {kKeepaliveSlot, 0, {}}, nullptr});
  flush();
}

// Finishes a half-sent frame first, since a peer that sees a broken stream takes this rank for dead. Returns whether
// bytes are left; their memory, and `body`, must stay valid while the caller holds the mutex.
bool Pair::beginClose(const std::vector<char>& body) {
  if (state_ != State::kConnected) return false;
  while (!sends_.empty() && sends_.back().done == 0) sends_.pop_back();
  sends_.push_back({nullptr, {kCloseSlot, body.size(), {}}, body.data()});
  while (!sends_.empty()) {
    if (!sendFront()) return errno == EAGAIN;
  }
  return false;
}

// Moves the unsent bytes and the connection into a PendingClose.
PendingClose Pair::takePendingClose() {
  size_t size = 0;
  for (const Send& send : sends_) size += sizeof(FrameHeader) + send.header.size - send.done;
  PendingClose unsent(size);
  for (const Send& send : sends_) {
    const size_t header = std::min(send.done, sizeof(FrameHeader)), body = send.done - header;
    unsent.add(reinterpret_cast<const char*>(&send.header) + header, sizeof(FrameHeader) - header);
    unsent.add(send.data + body, send.header.size - body);
  }
  mesh_.unwatch(connection_.fd());
  mesh_.byFd_.erase(connection_.fd());
  unsent.connection = std::move(connection_);
  return unsent;
}

void Pair::finishClose(const Failure& failure) {
  if (state_ == State::kConnected) sends_.clear();
  if (connection_.open()) {
    mesh_.unwatch(connection_.fd());
    // Not SHUT_RD: input that arrives later would reset the connection and discard our unsent bytes.
    ::shutdown(connection_.fd(), SHUT_WR);
  }
  if (closeReason_.empty()) closeReason_ = failure.what();
  state_ = State::kClosed;
}

// A buffer was destroyed with operations pending. The group has failed, so this pair's operations are void.
void Pair::discardOperations() {
  sends_.clear();
  receives_.clear();
  posted_ = 0;
  inBody_ = false;
  target_ = {};
}

void Pair::close() {
  Mesh::Lock lock(mesh_.mu_);
  closeSocket();
}

// Detects a lower rank that died before it dialled us: its listening socket refuses connections. Probes twice, since
// data of an orderly close may arrive in between. Peers that are alive treat the probe as an unauthenticated
// connection.
void Pair::probeListener() {
  if (probeFd_ >= 0) {
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(probeFd_, SOL_SOCKET, SO_ERROR, &error, &length);
    return onProbeResult(error);
  }
  const auto now = Mesh::Clock::now();
  if (state_ != State::kIdle || !isBusy() || (!lastProbeRefused_ && now - lastProbe_ < kProbeInterval)) return;
  lastProbe_ = now;
  const SocketAddress* to = mesh_.addressOf(peer_);
  if (to == nullptr) return;
  probeFd_ = openRegistered([&] { return socket(to->family(), kSocket, 0); });
  if (probeFd_ < 0) return;  // out of descriptors: try again later
  if (::connect(probeFd_, to->get(), to->length) != 0 && errno != EINPROGRESS) onProbeResult(errno);
}

void Pair::onProbeResult(int error) {
  closeFd(probeFd_);
  probeFd_ = -1;
  const bool again = lastProbeRefused_;
  lastProbeRefused_ = error == ECONNREFUSED;
  if (lastProbeRefused_ && again && state_ == State::kIdle) fail("it died before it connected");
}

// A peer that waits for what is on its way sends keepalives meanwhile, which nobody here reads any more.
void Pair::closeOrderly(std::vector<PendingClose>& unreceived) {
  if (state_ == State::kConnected && connection_.open()) {
    const ssize_t discarded = discardInput(connection_.fd());
    const size_t left = countUnreceived(connection_.fd());
    if (discarded >= 0 && left > (discarded > 0 ? 0 : kSmallTail)) {
      sends_.clear();
      unreceived.push_back(takePendingClose());
      unreceived.back().awaitsReceipt = true;
    }
  }
  closeSocket();
}

void Pair::closeSocket() {
  if (probeFd_ >= 0) closeFd(probeFd_);
  probeFd_ = -1;
  if (connection_.open()) {
    mesh_.unwatch(connection_.fd());
    mesh_.byFd_.erase(connection_.fd());
    connection_.close();
  }
  epollEvents_ = 0;
  state_ = State::kClosed;
}

// A paused pair only watches for the peer's end, since a close frame may follow the frame that waits; and not even for
// that if the waiting frame is too large to buffer, because the event would fire in a loop.
void Pair::updateEpollEvents() {
  if (!connection_.open() || state_ != State::kConnected) return;
  uint32_t wanted = sends_.empty() ? 0u : uint32_t{EPOLLOUT};
  if (!paused_) wanted |= EPOLLIN;
  if (paused_ && fitsUnexpectedLimit()) wanted |= EPOLLRDHUP;
  if (wanted == epollEvents_) return;
  if (wanted == 0) {
    mesh_.unwatch(connection_.fd());
  } else {
    mesh_.watch(connection_.fd(), wanted, epollEvents_ == 0);
  }
  epollEvents_ = wanted;
}

std::string Pair::linkName() const { return mesh_.name() + ": connection to rank " + std::to_string(peer_); }

// The peer accepts no more bytes. Reads its input to the end: a close frame explains more than our errno.
void Pair::readToEnd() {
  readingToEnd_ = true;
  if (paused_) {
    paused_ = false;
    if (!beginBody()) return;
  }
  read();
}

void Pair::read() {
  while (state_ == State::kConnected && !paused_) {
    if (!inBody_) {
      if (!readExactly(reinterpret_cast<char*>(&header_), bytesRead_, sizeof header_)) return;
      bytesRead_ = 0;
      if (!beginBody()) return;
    }
    if (!readExactly(target_.data, bytesRead_, header_.size)) return;
    bytesRead_ = 0;
    finishFrame();
  }
}

// True once `size` bytes are read.
bool Pair::readExactly(char* data, size_t& have, size_t size) {
  while (have < size) {
    const ssize_t got = connection_.recv(data + have, size - have);
    if (got < 0 && errno == EAGAIN) return false;
    if (got <= 0) {
      const bool tlsFailed = got < 0 && errno == EPROTO;
      fail(got == 0                      ? "closed by peer"
           : !tlsFailed                  ? strerror(errno)
           : state_ == State::kConnected ? "what it sent was changed on the way, or was not its own"
                                         : "it does not hold the job's key, by TLS");
      return false;
    }
    have += static_cast<size_t>(got);
    lastReceived_ = Mesh::Clock::now();
  }
  return true;
}

// Decides where the body of the frame goes. False: the frame has to wait, or the group has failed.
bool Pair::beginBody() {
  if (!checkSameCall(header_.call)) return false;
  unexpected_ = !takePosted(target_);
  if (unexpected_ && !bufferUnexpected()) return false;
  if (!fits(target_, header_)) return false;
  inBody_ = true;
  return true;
}

bool Pair::fitsUnexpectedLimit() const {
  return header_.size <= (isControlSlot(header_.slot) ? kMaxControlBody : kMaxUnexpectedBytes - mesh_.unexpectedBytes_);
}

// Buffers the frame that a paused pair holds, since a close frame may follow it.
void Pair::readPastUnexpected() {
  if (state_ != State::kConnected || !paused_ || !fitsUnexpectedLimit()) return;
  paused_ = false;
  readingToEnd_ = true;
  const bool placed = beginBody();
  readingToEnd_ = false;  // one frame at a time: the next one may not fit
  if (placed) read();
  updateEpollEvents();
}

bool Pair::bufferUnexpected() {
  const bool isControl = isControlSlot(header_.slot);
  if (!isControl && posted_ == 0 && !readingToEnd_) {
    paused_ = true;  // back-pressure: stop reading until a receive is posted
    updateEpollEvents();
    return false;
  }
  if (!fitsUnexpectedLimit()) {
    fail("it sent more unexpected data than this rank buffers");
    return false;
  }
  if (!isControl) mesh_.unexpectedBytes_ += header_.size;
  unexpectedBody_.resize(header_.size);
  target_ = {nullptr, unexpectedBody_.data(), header_.size, header_.rest};
  return true;
}

// Takes the first receive posted for the frame's slot, if any.
bool Pair::takePosted(Receive& receive) {
  auto posted = receives_.find(header_.slot);
  if (posted == receives_.end()) return false;
  receive = posted->second.front();
  posted->second.pop_front();
  if (posted->second.empty()) receives_.erase(posted);
  posted_--;
  return true;
}

// Takes the first unexpected frame of the slot; false: it is not for this receive, and the group has failed.
bool Pair::takeUnexpected(uint64_t slot, const Receive& receive) {
  const auto stored = unexpectedFrames_.find(slot);
  const UnexpectedFrame early = std::move(stored->second.front());
  stored->second.pop_front();
  if (stored->second.empty()) unexpectedFrames_.erase(stored);
  mesh_.unexpectedBytes_ -= early.body.size();
  if (!checkSameCall(early.header.call) || !fits(receive, early.header)) return false;
  if (receive.size > 0) std::memcpy(receive.data, early.body.data(), receive.size);
  receive.buffer->received_.add(peer_, receive.rest);
  return true;
}

void Pair::complete(const Receive& receive) {
  receive.buffer->received_.add(peer_, receive.rest);
  receive.buffer->pending_--;
  mesh_.wakeup_.notify_all();
}

bool Pair::checkSameCall(const Call& theirs) {
  const Call& mine = mesh_.call_;
  if (!mine.conflicts(theirs)) return true;
  mesh_.abortLocked(Cause::kMismatch, {mesh_.rank, peer_}, mismatchText(mesh_.rank, mine, peer_, theirs));
  return false;
}

// Ends the group if the frame belongs to an operation of another size.
bool Pair::fits(const Receive& receive, const FrameHeader& header) {
  if (receive.size == header.size && receive.rest == header.rest) return true;
  const size_t sent = header.size + header.rest, expected = receive.size + receive.rest;
  mesh_.abortLocked(Cause::kMismatch, {mesh_.rank, peer_},
                    mesh_.name() + ": rank " + std::to_string(peer_) + " sent " + std::to_string(sent) +
                        " bytes where " + std::to_string(expected) +
                        " were expected: the ranks do not call the same collective with the same sizes");
  return false;
}

void Pair::finishFrame() {
  inBody_ = false;
  if (!unexpected_) return complete(target_);
  if (header_.slot == kKeepaliveSlot) return sendKeepalive();
  if (header_.slot == kCloseSlot) {
    const Failure failure = decodeFailure(unexpectedBody_, peer_);
    return mesh_.abortLocked(failure.cause, failure.ranks, failure.what());
  }
  std::vector<char> body = std::move(unexpectedBody_);
  unexpectedBody_ = {};
  Receive late;  // posted while the body was being read
  if (!takePosted(late)) {
    unexpectedFrames_[header_.slot].push_back({header_, std::move(body)});
    return;
  }
  mesh_.unexpectedBytes_ -= body.size();
  if (!fits(late, header_)) return;
  if (late.size > 0) std::memcpy(late.data, body.data(), late.size);
  complete(late);
}

}  // namespace elastic
