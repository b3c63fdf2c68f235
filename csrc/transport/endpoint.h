// The listening socket of a process, kept across generations, and connections that arrived before their group existed.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "transport/connection.h"
#include "transport/handshake.h"

namespace elastic {

struct PendingConnection {  // accepted, handshake not complete
  Connection connection;
  Hello hello;
  Nonce nonce{};
  bool challengeSent = false;
  bool extended = false;  // its deadline has passed once and was extended
  std::vector<char> received;
  std::chrono::steady_clock::time_point deadline;
};

class Endpoint {
 public:
  // Listens on `host`, on any port (first == 0) or on the first free one of [first, last].
  // encrypted: all connections of its groups use TLS. Throws std::runtime_error.
  Endpoint(std::string key, const std::string& host, int first, int last, const std::string& advertise,
           bool encrypted = false);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  const std::string& key() const { return key_; }
  const std::string& address() const { return address_; }            // that peers dial
  const std::shared_ptr<const TlsKey>& tls() const { return tls_; }  // null: no TLS
  int fd() const { return fd_; }

  // Registers the eventfd of a mesh with so many ranks; it is signalled when a connection is parked.
  void registerMesh(int event, size_t ranks);
  void unregisterMesh(int event);
  // Keeps an authenticated connection of a newer generation or another channel for its group; bounded in time, and not
  // in number: whoever holds the key opens one for each of its groups.
  void park(Connection connection, const Hello& hello);
  // Returns the connections parked for `fence` and closes older ones.
  std::vector<std::pair<Connection, Hello>> takeParked(const Fence& fence);
  // Takes back a handshake from a mesh that closes or that no caller drives; the next mesh that polls continues it, or
  // closes it if it has too many.
  void returnPending(PendingConnection incoming);
  std::vector<PendingConnection> takePending();
  size_t maxPending();  // handshakes of a mesh in progress at a time: at least twice the ranks of the largest mesh
  void close();

 private:
  struct Parked {
    Connection connection;
    Hello hello;
    std::chrono::steady_clock::time_point since;
  };
  void dropExpired();
  void wakeMeshes();

  const std::string key_;
  const std::shared_ptr<const TlsKey> tls_;
  std::string address_;
  std::atomic<int> fd_{-1};
  std::mutex mutex_;  // guards what follows
  bool closed_ = false;
  std::vector<int> events_;
  size_t ranks_ = 0;  // of the largest mesh so far
  std::vector<Parked> parked_;
  std::vector<PendingConnection> pending_;
};

}  // namespace elastic
