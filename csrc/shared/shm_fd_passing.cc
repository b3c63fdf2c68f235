#include "shared/shm_fd_passing.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <stdexcept>

#include "transport/fork.h"

namespace elastic {
namespace {

constexpr size_t kMaxClients = 2 * kMaxMembers;  // including unauthenticated ones

struct Request {
  uint32_t member;
  Digest mac;
};

[[noreturn]] void fail(const char* what) { throw std::runtime_error(std::string(what) + ": " + std::strerror(errno)); }

Digest computeMac(const std::string& key, const Nonce& name, uint32_t member) {
  std::string message = "segment" + std::to_string(member);
  message.append(reinterpret_cast<const char*>(name.data()), name.size());
  return hmacSha256(key, message);
}

struct UnixAddress {
  sockaddr_un address{};
  socklen_t length;

  explicit UnixAddress(const Nonce& name) {
    static const char digits[] = "0123456789abcdef";
    std::string text = "elastic-";
    for (uint8_t byte : name) text += {digits[byte >> 4], digits[byte & 15]};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, text.data(), text.size());  // the leading zero makes it abstract
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

UniqueFd packetSocket() {
  UniqueFd made(openRegistered([] { return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); }));
  if (made.get() < 0) fail("no Unix socket");
  return made;
}

// A message of one byte with room for descriptors.
struct FdMessage {
  explicit FdMessage(size_t descriptors) : control(CMSG_SPACE(descriptors * sizeof(int))) {
    message.msg_iov = &body;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
  }
  char byte = 0;
  iovec body{&byte, 1};
  std::vector<char> control;
  msghdr message{};
};

bool sendDescriptors(int fd, const std::vector<int>& descriptors) {
  FdMessage envelope(descriptors.size());
  cmsghdr* header = CMSG_FIRSTHDR(&envelope.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
  std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
  return sendmsg(fd, &envelope.message, MSG_NOSIGNAL) == 1;
}

std::vector<UniqueFd> receiveDescriptors(int fd, size_t most) {
  FdMessage envelope(most);
  std::vector<UniqueFd> received;
  const ForkLock whole;
  if (recvmsg(fd, &envelope.message, MSG_CMSG_CLOEXEC) != 1) return received;
  const cmsghdr* header = CMSG_FIRSTHDR(&envelope.message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) return received;
  const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
  for (size_t i = 0; i < count; i++) {
    int one;
    std::memcpy(&one, CMSG_DATA(header) + i * sizeof(int), sizeof one);
    received.emplace_back(registerFd(one));
  }
  return received;
}

}  // namespace

void UniqueFd::reset(int fd) {
  if (fd_ >= 0) closeFd(fd_);
  fd_ = fd;
}

SegmentServer::SegmentServer(Mesh& mesh, const std::string& key, const Nonce& name, int memory, int members)
    : mesh_(mesh), key_(key), name_(name), memory_(memory) {
  for (int m = 0; m < members; m++) {
    int ends[2];
    const ForkLock whole;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) fail("no pair of sockets");
    peerEnds_.emplace_back(registerFd(ends[0]));
    ownEnds_.emplace_back(registerFd(ends[1]));
  }
  listener_ = packetSocket();
  const UnixAddress address(name);
  if (bind(listener_.get(), address.get(), address.length) != 0) fail("no name for a Unix socket");
  if (listen(listener_.get(), kMaxMembers) != 0) fail("a Unix socket does not listen");
  const auto lock = mesh_.lock();
  mesh_.addFd(listener_.get(), [this](uint32_t) { return onConnect(); });
}

SegmentServer::~SegmentServer() {
  const auto lock = mesh_.lock();
  mesh_.removeFd(listener_.get());
  for (const auto& client : clients_) mesh_.removeFd(client.get());
}

std::unique_ptr<Failure> SegmentServer::onConnect() {
  UniqueFd client(
      openRegistered([&] { return accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); }));
  if (client.get() < 0 || clients_.size() >= kMaxClients) return nullptr;
  const int fd = client.get();
  mesh_.addFd(fd, [this, fd](uint32_t) { return onRequest(fd); });
  clients_.push_back(std::move(client));
  return nullptr;
}

std::unique_ptr<Failure> SegmentServer::onRequest(int fd) {
  Request request;
  const ssize_t got = recv(fd, &request, sizeof request, 0);
  const bool whole = got == sizeof request && request.member > 0 && request.member < ownEnds_.size();
  if (whole && equalInConstantTime(request.mac, computeMac(key_, name_, request.member))) {
    sendSegment(fd, static_cast<int>(request.member));
  }
  mesh_.removeFd(fd);
  for (size_t i = 0; i < clients_.size(); i++) {
    if (clients_[i].get() != fd) continue;
    clients_.erase(clients_.begin() + static_cast<ptrdiff_t>(i));
    break;
  }
  return nullptr;
}

void SegmentServer::sendSegment(int fd, int member) {
  std::vector<int> descriptors{memory_, ownEnds_[static_cast<size_t>(member)].get()};
  for (size_t m = 0; m < peerEnds_.size(); m++) {
    if (m != static_cast<size_t>(member)) descriptors.push_back(peerEnds_[m].get());
  }
  // From here on the member alone holds its end.
  if (sendDescriptors(fd, descriptors)) ownEnds_[static_cast<size_t>(member)].reset(-1);
}

LivenessSockets SegmentServer::takeOwnSockets() {
  const auto lock = mesh_.lock();
  LivenessSockets liveness{std::move(ownEnds_[0]), std::move(peerEnds_)};
  liveness.others[0].reset(-1);
  return liveness;
}

ReceivedSegment fetchSegment(Mesh& mesh, const std::string& key, const Nonce& name, int member, int members,
                             Mesh::Clock::time_point until) {
  const UniqueFd asking = packetSocket();
  const UnixAddress address(name);
  if (connect(asking.get(), address.get(), address.length) != 0) fail("the first rank of this host is out of reach");
  const Request request{static_cast<uint32_t>(member), computeMac(key, name, static_cast<uint32_t>(member))};
  if (send(asking.get(), &request, sizeof request, MSG_NOSIGNAL) != sizeof request) fail("the first rank is gone");
  bool answered = false;
  std::vector<UniqueFd> received;
  {
    const auto lock = mesh.lock();
    mesh.addFd(asking.get(), [&](uint32_t) -> std::unique_ptr<Failure> {
      received = receiveDescriptors(asking.get(), static_cast<size_t>(members) + 1);
      answered = true;
      mesh.removeFd(asking.get());
      return nullptr;
    });
  }
  struct Leave {
    Mesh& mesh;
    int fd;
    ~Leave() {
      const auto lock = mesh.lock();
      mesh.removeFd(fd);
    }
  } leave{mesh, asking.get()};
  mesh.runUntil([&] { return answered; }, until);
  if (received.size() != static_cast<size_t>(members) + 1)
    throw std::runtime_error("the first rank of this host passed no shared memory");
  ReceivedSegment segment{std::move(received[0]), {std::move(received[1]), {}}};
  size_t next = 2;
  for (int m = 0; m < members; m++)
    segment.liveness.others.push_back(m == member ? UniqueFd() : std::move(received[next++]));
  return segment;
}

}  // namespace elastic
