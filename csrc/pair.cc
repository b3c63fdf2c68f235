#include "pair.h"

#include <gloo/common/error.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "buffer.h"

namespace elastic {
namespace {

constexpr size_t kMostAside = size_t{1} << 28;   // bytes stored for collectives that have not begun here
constexpr size_t kLongestGoodbye = size_t{1} << 16;

std::vector<char> encode(const Failure& failure) {
  const uint32_t count = static_cast<uint32_t>(failure.ranks.size());
  std::vector<char> body(sizeof count + count * sizeof(int32_t));
  std::memcpy(body.data(), &count, sizeof count);
  for (uint32_t i = 0; i < count; i++) {
    const int32_t rank = failure.ranks[i];
    std::memcpy(body.data() + sizeof count + i * sizeof rank, &rank, sizeof rank);
  }
  const std::string reason = failure.what();
  body.insert(body.end(), reason.begin(), reason.begin() + std::min<size_t>(reason.size(), 4096));
  return body;
}

Failure decode(const std::vector<char>& body, int peer) {
  uint32_t count = 0;
  if (body.size() >= sizeof count) std::memcpy(&count, body.data(), sizeof count);
  if (body.size() < sizeof count || count > (body.size() - sizeof count) / sizeof(int32_t)) {
    return Failure(Cause::kAborted, {peer}, "a goodbye that makes no sense");
  }
  std::vector<int> ranks;
  for (uint32_t i = 0; i < count; i++) {
    int32_t rank;
    std::memcpy(&rank, body.data() + sizeof count + i * sizeof rank, sizeof rank);
    ranks.push_back(rank);
  }
  const size_t text = sizeof count + count * sizeof(int32_t);
  return Failure(Cause::kAborted, ranks, std::string(body.begin() + static_cast<ptrdiff_t>(text), body.end()));
}

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
  mesh_.check();
  auto buffer = static_cast<Buffer*>(unbound);
  buffer->pending_++;
  sends_.push_back({buffer, {slot, nbytes}, static_cast<const char*>(buffer->ptr) + offset, 0});
  open();
  if (state_ == State::kUp && sends_.size() == 1) flush();
}

void Pair::recv(gloo::transport::UnboundBuffer* unbound, uint64_t slot, size_t offset, size_t nbytes) {
  Mesh::Lock lock(mesh_.mu_);
  mesh_.check();
  auto buffer = static_cast<Buffer*>(unbound);
  char* data = static_cast<char*>(buffer->ptr) + offset;
  if (auto stored = early_.find(slot); stored != early_.end()) {
    const std::vector<char> body = std::move(stored->second.front());
    stored->second.pop_front();
    if (stored->second.empty()) early_.erase(stored);
    mesh_.spilled_ -= body.size();
    if (body.size() != nbytes) return mismatch(nbytes, body.size());
    std::memcpy(data, body.data(), nbytes);
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
    mesh_.check();
  }
  if (state_ != State::kIdle || mesh_.rank > peer_) return;  // the lower rank dials, the higher accepts
  const SocketAddress& to = mesh_.addresses_[static_cast<size_t>(peer_)];
  fd_ = socket(to.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd_ < 0) return fail(std::string("no socket: ") + strerror(errno));
  mesh_.byFd_[fd_] = this;
  state_ = State::kDialing;
  mesh_.watch(fd_, armed_ = EPOLLOUT, true);
  if (::connect(fd_, to.get(), to.length) != 0 && errno != EINPROGRESS) fail(std::string("connect: ") + strerror(errno));
}

void Pair::accept(int fd) {
  fd_ = fd;
  mesh_.byFd_[fd_] = this;
  mesh_.watch(fd_, armed_ = EPOLLIN, true);
  up();
}

void Pair::up() {
  const int one = 1;
  setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  state_ = State::kUp;
  have_ = 0;
  flush();
}

void Pair::onEvents(uint32_t events) {
  if (state_ == State::kDialing) {
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return fail(std::string("connect: ") + strerror(error));
    hello_ = Hello{kMagic, mesh_.fence_, static_cast<uint32_t>(mesh_.rank), static_cast<uint32_t>(peer_), freshNonce()};
    if (::send(fd_, &hello_, sizeof hello_, MSG_NOSIGNAL) != sizeof hello_) return fail("no room for a handshake");
    state_ = State::kProving;
    mesh_.watch(fd_, armed_ = EPOLLIN, false);
    return;
  }
  if (state_ == State::kProving) return prove();
  if (state_ == State::kUp && (events & EPOLLOUT)) flush();
  if (state_ == State::kUp && (events & (EPOLLIN | EPOLLHUP | EPOLLERR))) read();
}

void Pair::prove() {
  if (!readInto(reinterpret_cast<char*>(&challenge_), have_, sizeof challenge_)) return;
  const Digest expected = macOf(mesh_.endpoint_->key(), "accept", hello_, challenge_.nonce);
  if (!equalInConstantTime(challenge_.mac, expected)) return fail("it does not hold the job's key");
  const Proof proof{macOf(mesh_.endpoint_->key(), "dial", hello_, challenge_.nonce)};
  if (::send(fd_, &proof, sizeof proof, MSG_NOSIGNAL) != sizeof proof) return fail("no room for a handshake");
  up();
}

void Pair::flush() {
  while (state_ == State::kUp && !sends_.empty()) {
    Send& next = sends_.front();
    const size_t total = sizeof(FrameHeader) + next.header.size;
    iovec parts[2];
    size_t count = 0;
    if (next.done < sizeof(FrameHeader)) {
      parts[count++] = {reinterpret_cast<char*>(&next.header) + next.done, sizeof(FrameHeader) - next.done};
      if (next.header.size > 0) parts[count++] = {const_cast<char*>(next.data), next.header.size};
    } else {
      const size_t sent = next.done - sizeof(FrameHeader);
      parts[count++] = {const_cast<char*>(next.data) + sent, next.header.size - sent};
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    const ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) break;
    if (sent < 0 && paused_) return fail(strerror(errno));
    if (sent < 0) return read();  // the peer may have said goodbye before it went: that tells more than our errno
    next.done += static_cast<size_t>(sent);
    if (next.done < total) break;
    next.buffer->sent_.push_back(peer_);
    next.buffer->pending_--;
    sends_.pop_front();
    mesh_.news_.notify_all();
  }
  arm();
}

void Pair::read() {
  while (state_ == State::kUp && !paused_) {
    if (!inBody_) {
      if (!readInto(reinterpret_cast<char*>(&header_), have_, sizeof header_)) return;
      have_ = 0;
      if (!place()) return;
    }
    if (!readInto(target_.data, have_, header_.size)) return;
    have_ = 0;
    deliver();
  }
}

// True once all `size` bytes are there.
bool Pair::readInto(char* data, size_t& have, size_t size) {
  while (have < size) {
    const ssize_t got = ::recv(fd_, data + have, size - have, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return false;
    if (got <= 0) {
      fail(got == 0 ? "closed by peer" : strerror(errno));
      return false;
    }
    have += static_cast<size_t>(got);
  }
  return true;
}

// A header is there: find where its body goes. False: it has to wait, or the group has failed.
bool Pair::place() {
  auto posted = receives_.find(header_.slot);
  aside_ = posted == receives_.end();
  if (!aside_) {
    target_ = posted->second.front();
    posted->second.pop_front();
    if (posted->second.empty()) receives_.erase(posted);
    posted_--;
    if (target_.size != header_.size) {
      target_.buffer->pending_--;
      mismatch(target_.size, header_.size);
      return false;
    }
  } else if (header_.slot == kGoodbyeSlot ? header_.size > kLongestGoodbye
                                          : mesh_.spilled_ + header_.size > kMostAside && posted_ > 0) {
    fail("it sent more than anybody here asked for");
    return false;
  } else if (header_.slot != kGoodbyeSlot && posted_ == 0) {
    paused_ = true;  // back-pressure: nothing is read until somebody asks
    arm();
    return false;
  } else {
    asideBody_.resize(header_.size);
    target_ = {nullptr, asideBody_.data(), header_.size};
  }
  inBody_ = true;
  return true;
}

void Pair::mismatch(size_t expected, size_t got) {
  mesh_.abortLocked(Cause::kMismatch, {mesh_.rank, peer_},
                    mesh_.me() + ": rank " + std::to_string(peer_) + " sent " + std::to_string(got) + " bytes where " +
                        std::to_string(expected) +
                        " were expected: the ranks do not call the same collective with the same sizes");
}

void Pair::deliver() {
  inBody_ = false;
  if (!aside_) {
    target_.buffer->received_.push_back(peer_);
    target_.buffer->pending_--;
    mesh_.news_.notify_all();
  } else if (header_.slot == kGoodbyeSlot) {
    const Failure failure = decode(asideBody_, peer_);
    mesh_.abortLocked(failure.cause, failure.ranks, failure.what());
  } else {
    mesh_.spilled_ += asideBody_.size();
    early_[header_.slot].push_back(std::move(asideBody_));
    asideBody_ = {};
  }
}

void Pair::fail(const std::string& why) {
  const bool needed = busy();
  why_ = why;
  shut();
  if (needed) mesh_.abortLocked(Cause::kPeerLost, {peer_}, link() + ": " + why);
}

// Best effort: only between two frames, and only what the socket takes at once.
void Pair::sayGoodbye(const Failure& failure) {
  if (state_ == State::kUp && (sends_.empty() || sends_.front().done == 0)) {
    std::vector<char> body = encode(failure);
    FrameHeader header{kGoodbyeSlot, body.size()};
    iovec parts[2] = {{&header, sizeof header}, {body.data(), body.size()}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    if (sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) why_ = strerror(errno);
  }
  if (fd_ >= 0) {
    mesh_.unwatch(fd_);
    ::shutdown(fd_, SHUT_RDWR);
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

void Pair::shut() {
  if (fd_ >= 0) {
    mesh_.unwatch(fd_);
    mesh_.byFd_.erase(fd_);
    ::close(fd_);
  }
  fd_ = -1;
  armed_ = 0;
  state_ = State::kClosed;
}

// A paused pair is not watched at all: a peer that hangs up would else wake the leader without end.
void Pair::arm() {
  if (fd_ < 0 || state_ != State::kUp) return;
  const uint32_t wanted = (paused_ ? 0u : uint32_t{EPOLLIN}) | (sends_.empty() ? 0u : uint32_t{EPOLLOUT});
  if (wanted == armed_) return;
  if (wanted == 0) {
    mesh_.unwatch(fd_);
  } else {
    mesh_.watch(fd_, wanted, armed_ == 0);
  }
  armed_ = wanted;
}

std::string Pair::link() const { return mesh_.me() + ": connection to rank " + std::to_string(peer_); }

}  // namespace elastic
