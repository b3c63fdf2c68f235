#include "transport/endpoint.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "transport/address.h"
#include "transport/fork.h"

namespace elastic {
namespace {

constexpr size_t kMaxPending = 64;  // handshakes of a mesh; twice the number of ranks if that is more
constexpr std::chrono::hours kParkTimeout{1};  // a rank may compute for long before it builds the group
constexpr int kBacklog = 1024;

int portOf(int fd) {
  SocketAddress bound;
  bound.length = sizeof bound.storage;
  getsockname(fd, reinterpret_cast<sockaddr*>(&bound.storage), &bound.length);
  return ntohs(bound.family() == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound.storage)->sin6_port
                                          : reinterpret_cast<sockaddr_in*>(&bound.storage)->sin_port);
}

int listenOn(const std::string& host, int port) {
  const SocketAddress address = resolve(host, port);
  const int fd =
      openRegistered([&] { return socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
  if (fd < 0) return -1;
  const int one = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (bind(fd, address.get(), address.length) != 0 || listen(fd, kBacklog) != 0) {
    const int error = errno;
    closeFd(fd);
    errno = error;
    return -1;
  }
  return fd;
}

}  // namespace

Endpoint::Endpoint(std::string key, const std::string& host, int first, int last, const std::string& advertise,
                   bool encrypted)
    : key_(std::move(key)), tls_(encrypted ? std::make_shared<const TlsKey>(key_) : nullptr) {
  for (int port = first; port <= last && fd_ < 0; port++) fd_ = listenOn(host, port);
  if (fd_ < 0) {
    const std::string where =
        first == last ? std::to_string(first) : std::to_string(first) + "-" + std::to_string(last);
    throw std::runtime_error("cannot listen on " + host + ", port " + where + ": " + std::strerror(errno) +
                             "; give another host or a port_range with a free port");
  }
  address_ = formatAddress(advertise.empty() ? host : advertise, portOf(fd_));
}

Endpoint::~Endpoint() { close(); }

void Endpoint::registerMesh(int event, size_t ranks) {
  std::lock_guard<std::mutex> lock(mutex_);
  events_.push_back(event);
  ranks_ = std::max(ranks_, ranks);
}

void Endpoint::unregisterMesh(int event) {
  std::lock_guard<std::mutex> lock(mutex_);
  events_.erase(std::remove(events_.begin(), events_.end(), event), events_.end());
}

void Endpoint::park(Connection connection, const Hello& hello) {
  std::lock_guard<std::mutex> lock(mutex_);
  dropExpired();
  if (closed_) return;
  parked_.push_back({std::move(connection), hello, std::chrono::steady_clock::now()});
  wakeMeshes();
}

void Endpoint::wakeMeshes() {
  const uint64_t one = 1;
  for (const int event : events_) {
    if (write(event, &one, sizeof one) < 0) continue;  // counter full: the mesh is awake already
  }
}

std::vector<std::pair<Connection, Hello>> Endpoint::takeParked(const Fence& fence) {
  std::lock_guard<std::mutex> lock(mutex_);
  dropExpired();
  std::vector<std::pair<Connection, Hello>> taken;
  std::vector<Parked> kept;
  for (auto& parked : parked_) {
    if (parked.hello.fence == fence) {
      taken.emplace_back(std::move(parked.connection), parked.hello);
    } else if (!(parked.hello.fence < fence)) {
      kept.push_back(std::move(parked));
    }
  }
  parked_ = std::move(kept);
  return taken;
}

size_t Endpoint::maxPending() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::max(kMaxPending, 2 * ranks_);
}

void Endpoint::returnPending(PendingConnection incoming) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return;
  pending_.push_back(std::move(incoming));
  wakeMeshes();
}

std::vector<PendingConnection> Endpoint::takePending() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(pending_, {});
}

void Endpoint::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  parked_.clear();
  pending_.clear();
  if (fd_ >= 0) closeFd(fd_);
  fd_ = -1;
}

void Endpoint::dropExpired() {
  const auto now = std::chrono::steady_clock::now();
  std::vector<Parked> kept;
  for (auto& parked : parked_) {
    if (now - parked.since <= kParkTimeout) kept.push_back(std::move(parked));
  }
  parked_ = std::move(kept);
}

}  // namespace elastic
