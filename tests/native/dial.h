// A raw connection to an endpoint: whole handshakes, or any bytes that a test sends.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "group.h"
#include "transport/address.h"
#include "transport/handshake.h"
#include "transport/pair.h"

namespace elastic {

const std::string kKey = "key";

// A connection to an endpoint; reads give up after five seconds.
class Dial {
 public:
  explicit Dial(const Endpoint& endpoint) {
    const SocketAddress to = parseAddress(endpoint.address());
    fd_ = socket(to.family(), SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(connect(fd_, to.get(), to.length) == 0);
    const timeval patience{5, 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  }
  ~Dial() { close(fd_); }

  void sendAll(const void* data, size_t size) { send(fd_, data, size, MSG_NOSIGNAL); }
  bool receive(void* data, size_t size) { return recv(fd_, data, size, MSG_WAITALL) == static_cast<ssize_t>(size); }

  // The answer to the challenge that follows the hello; the other side waits for it.
  Proof proofAfter(const Hello& hello) {
    Challenge challenge;
    sendAll(&hello, sizeof hello);
    CHECK(receive(&challenge, sizeof challenge));
    return {computeMac(kKey, "dial", hello, challenge.nonce)};
  }

  // Whether the peer's group accepts this connection as its rank 0, for which it waits in a barrier.
  bool receivesBarrier(FrameHeader& header) {
    return receive(&header, sizeof header) && header.call.kind == CallKind::kBarrier && header.size == 0;
  }
  bool receivesBarrier() {
    FrameHeader header{};
    return receivesBarrier(header);
  }

  int fd() const { return fd_; }

  // Whether the peer has closed the connection or reset it, without sending a byte.
  bool closed() {
    char byte;
    const ssize_t got = recv(fd_, &byte, 1, 0);
    return got == 0 || (got < 0 && errno != EAGAIN);
  }

  // A whole handshake as `from`; true if the other side has proved the key.
  bool shake(const std::string& key, const Hello& hello) {
    sendAll(&hello, sizeof hello);
    Challenge challenge;
    if (!receive(&challenge, sizeof challenge)) return false;
    if (!equalInConstantTime(challenge.mac, computeMac(key, "accept", hello, challenge.nonce))) return false;
    const Proof proof{computeMac(key, "dial", hello, challenge.nonce)};
    sendAll(&proof, sizeof proof);
    return true;
  }

 private:
  int fd_;
};

inline Hello helloTo(uint32_t to, Fence fence) {
  Hello hello;
  hello.fence = fence;
  hello.to = to;
  hello.nonce = makeNonce();
  return hello;
}

// Rank 1 of two waits in a barrier, in a thread; the test plays rank 0.
struct Waiting {
  explicit Waiting(std::shared_ptr<Endpoint> at = std::make_shared<Endpoint>(kKey, "127.0.0.1", 0, 0, ""),
                   Fence fence = {1, 5}, int timeout = 10000)
      : endpoint(std::move(at)) {
    GroupOptions options;
    options.timeout = std::chrono::milliseconds(timeout);
    group = std::make_unique<Group>(endpoint, 1, std::vector<std::string>{zero.address(), endpoint->address()}, fence,
                                    options);
    thread = std::thread([this] { thrown = thrownBy([this] { group->barrier(); }); });
  }
  ~Waiting() {
    if (thread.joinable()) end();
  }
  std::string end() {
    group->abort("the test is over");
    thread.join();
    return thrown;
  }

  // Rank 0 arrives at the barrier.
  void passWith(Dial& zero) {
    FrameHeader barrier{};
    CHECK(zero.shake(kKey, helloTo(1, {1, 5})) && zero.receivesBarrier(barrier));
    zero.sendAll(&barrier, sizeof barrier);  // both sides send the same frame
    thread.join();
    CHECK(thrown.empty());
  }

  Endpoint zero{kKey, "127.0.0.1", 0, 0, ""};  // listens at the address of rank 0
  std::shared_ptr<Endpoint> endpoint;
  std::unique_ptr<Group> group;
  std::thread thread;
  std::string thrown;
};

}  // namespace elastic
