// The one listening socket of a process, kept across generations, and connections that came too early for theirs.
#pragma once

#include <algorithm>
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

struct PendingConnection {  // accepted, not yet proven
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
  // encrypted: its groups' connections are inside TLS, or there is none. Throws std::runtime_error.
  Endpoint(std::string key, const std::string& host, int first, int last, const std::string& advertise,
           bool encrypted = false);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  const std::string& key() const { return key_; }
  const std::string& address() const { return address_; }            // as peers dial it
  const std::shared_ptr<const TlsKey>& tls() const { return tls_; }  // null: in the clear
  int fd() const { return fd_; }

  // The eventfds of meshes that are to look for parked connections when one comes. ranks: that the mesh has.
  void registerMesh(int event, size_t ranks);
  void unregisterMesh(int event);
  // A proven connection of a newer world, or of another channel, waits for its group; bounded in number and time.
  void park(Connection connection, const Hello& hello);
  // Those that wait for `fence`; older ones are closed.
  std::vector<std::pair<Connection, Hello>> takeParked(const Fence& fence);
  // A handshake that a mesh which nobody waits in, or which closes, could not end; the next one that is turned goes on
  // with it.
  void returnPending(PendingConnection incoming);
  std::vector<PendingConnection> takePending();
  size_t maxPending();  // handshakes under way at a time; more than all ranks of the largest mesh so far
  void close();

 private:
  struct Parked {
    Connection connection;
    Hello hello;
    std::chrono::steady_clock::time_point since;
  };
  size_t capacity(size_t few) const { return std::max(few, 2 * ranks_); }
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
