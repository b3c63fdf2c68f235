#include "shared/shm_handover.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <stdexcept>

#include "transport/fork.h"

namespace elastic {
namespace {

constexpr size_t kMostCallers = 2 * kMostMembers;  // strangers among them

struct Request {
  uint32_t member;
  Digest mac;
};

[[noreturn]] void fail(const char* what) { throw std::runtime_error(std::string(what) + ": " + std::strerror(errno)); }

Digest proofOf(const std::string& key, const Nonce& name, uint32_t member) {
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

Descriptor packetSocket() {
  Descriptor made(openOwned([] { return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); }));
  if (made.get() < 0) fail("no Unix socket");
  return made;
}

// A message of one byte with room for descriptors beside it.
struct Envelope {
  explicit Envelope(size_t descriptors) : control(CMSG_SPACE(descriptors * sizeof(int))) {
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
  Envelope envelope(descriptors.size());
  cmsghdr* header = CMSG_FIRSTHDR(&envelope.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
  std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
  return sendmsg(fd, &envelope.message, MSG_NOSIGNAL) == 1;
}

std::vector<Descriptor> receiveDescriptors(int fd, size_t most) {
  Envelope envelope(most);
  std::vector<Descriptor> received;
  const NoFork whole;
  if (recvmsg(fd, &envelope.message, MSG_CMSG_CLOEXEC) != 1) return received;
  const cmsghdr* header = CMSG_FIRSTHDR(&envelope.message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) return received;
  const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
  for (size_t i = 0; i < count; i++) {
    int one;
    std::memcpy(&one, CMSG_DATA(header) + i * sizeof(int), sizeof one);
    received.emplace_back(own(one));
  }
  return received;
}

}  // namespace

void Descriptor::reset(int fd) {
  if (fd_ >= 0) disown(fd_);
  fd_ = fd;
}

Giver::Giver(Mesh& mesh, const std::string& key, const Nonce& name, int memory, int members)
    : mesh_(mesh), key_(key), name_(name), memory_(memory) {
  for (int m = 0; m < members; m++) {
    int ends[2];
    const NoFork whole;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) fail("no pair of sockets");
    farEnds_.emplace_back(own(ends[0]));
    ownEnds_.emplace_back(own(ends[1]));
  }
  listener_ = packetSocket();
  const UnixAddress address(name);
  if (bind(listener_.get(), address.get(), address.length) != 0) fail("no name for a Unix socket");
  if (listen(listener_.get(), kMostMembers) != 0) fail("a Unix socket does not listen");
  const auto lock = mesh_.hold();
  mesh_.attach(listener_.get(), [this](uint32_t) { return onCaller(); });
}

Giver::~Giver() {
  const auto lock = mesh_.hold();
  mesh_.detach(listener_.get());
  for (const auto& caller : callers_) mesh_.detach(caller.get());
}

std::unique_ptr<Failure> Giver::onCaller() {
  Descriptor caller(
      openOwned([&] { return accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); }));
  if (caller.get() < 0 || callers_.size() >= kMostCallers) return nullptr;
  const int fd = caller.get();
  mesh_.attach(fd, [this, fd](uint32_t) { return onRequest(fd); });
  callers_.push_back(std::move(caller));
  return nullptr;
}

std::unique_ptr<Failure> Giver::onRequest(int fd) {
  Request request;
  const ssize_t got = recv(fd, &request, sizeof request, 0);
  const bool whole = got == sizeof request && request.member > 0 && request.member < ownEnds_.size();
  if (whole && equalInConstantTime(request.mac, proofOf(key_, name_, request.member))) {
    give(fd, static_cast<int>(request.member));
  }
  mesh_.detach(fd);
  for (size_t i = 0; i < callers_.size(); i++) {
    if (callers_[i].get() != fd) continue;
    callers_.erase(callers_.begin() + static_cast<ptrdiff_t>(i));
    break;
  }
  return nullptr;
}

void Giver::give(int fd, int member) {
  std::vector<int> descriptors{memory_, ownEnds_[static_cast<size_t>(member)].get()};
  for (size_t m = 0; m < farEnds_.size(); m++) {
    if (m != static_cast<size_t>(member)) descriptors.push_back(farEnds_[m].get());
  }
  // From here on the member alone holds its end. A member that does not get it says so.
  if (sendDescriptors(fd, descriptors)) ownEnds_[static_cast<size_t>(member)].reset(-1);
}

Lifelines Giver::takeOwn() {
  const auto lock = mesh_.hold();
  Lifelines lifelines{std::move(ownEnds_[0]), std::move(farEnds_)};
  lifelines.others[0].reset(-1);
  return lifelines;
}

Handed fetch(Mesh& mesh, const std::string& key, const Nonce& name, int member, int members,
             Mesh::Clock::time_point until) {
  const Descriptor asking = packetSocket();
  const UnixAddress address(name);
  if (connect(asking.get(), address.get(), address.length) != 0) fail("the first rank of this host is out of reach");
  const Request request{static_cast<uint32_t>(member), proofOf(key, name, static_cast<uint32_t>(member))};
  if (send(asking.get(), &request, sizeof request, MSG_NOSIGNAL) != sizeof request) fail("the first rank is gone");
  bool answered = false;
  std::vector<Descriptor> received;
  {
    const auto lock = mesh.hold();
    mesh.attach(asking.get(), [&](uint32_t) -> std::unique_ptr<Failure> {
      received = receiveDescriptors(asking.get(), static_cast<size_t>(members) + 1);
      answered = true;
      mesh.detach(asking.get());
      return nullptr;
    });
  }
  struct Leave {
    Mesh& mesh;
    int fd;
    ~Leave() {
      const auto lock = mesh.hold();
      mesh.detach(fd);
    }
  } leave{mesh, asking.get()};
  mesh.await([&] { return answered; }, until);
  if (received.size() != static_cast<size_t>(members) + 1) throw std::runtime_error("no shared memory was handed over");
  Handed handed{std::move(received[0]), {std::move(received[1]), {}}};
  size_t next = 2;
  for (int m = 0; m < members; m++)
    handed.lifelines.others.push_back(m == member ? Descriptor() : std::move(received[next++]));
  return handed;
}

}  // namespace elastic
