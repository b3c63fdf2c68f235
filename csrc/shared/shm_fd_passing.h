// How the members of one host get the shared memory: its first member gives them the descriptors over a Unix socket.
//
// A socket because it needs no name in a file system, no common process namespace and no rights over other processes,
// and because nothing can stay behind: an abstract name goes with its socket. Members in containers of their own do not
// find it, and all of that host then do without. The client proves the job's key.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/handshake.h"
#include "transport/mesh.h"

namespace elastic {

constexpr int kMaxMembers = 128;  // as many descriptors have room in one message

class UniqueFd {
 public:
  explicit UniqueFd(int fd = -1) : fd_(fd) {}
  UniqueFd(UniqueFd&& o) noexcept : fd_(o.release()) {}
  UniqueFd& operator=(UniqueFd&& o) noexcept {
    reset(o.release());
    return *this;
  }
  ~UniqueFd() { reset(-1); }

  int get() const { return fd_; }
  int release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  void reset(int fd);

 private:
  int fd_;
};

// A pair of sockets per member, of which it alone holds one end: the others see it close with the member's process, and
// become readable when the member says that the group has failed. (Pipes would raise SIGPIPE where nobody reads any
// more.)
struct LivenessSockets {
  UniqueFd own;
  std::vector<UniqueFd> others;  // by member; none for oneself
};

struct ReceivedSegment {
  UniqueFd memory;
  LivenessSockets liveness;
};

// Gives as long as it lives, out of the mesh's event loop.
class SegmentServer {
 public:
  // Throws std::runtime_error where sockets or descriptors are refused.
  SegmentServer(Mesh& mesh, const std::string& key, const Nonce& name, int memory, int members);
  ~SegmentServer();

  // The first member's own; to be called once, when nobody else asks any more.
  LivenessSockets takeOwnSockets();

 private:
  std::unique_ptr<Failure> onConnect();
  std::unique_ptr<Failure> onRequest(int fd);
  void sendSegment(int fd, int member);

  Mesh& mesh_;
  const std::string key_;
  const Nonce name_;
  const int memory_;
  std::vector<UniqueFd> ownEnds_, peerEnds_;
  UniqueFd listener_;
  std::vector<UniqueFd> clients_;
};

// Asks the server of that name, until the deadline. Throws std::runtime_error if nothing comes of it, or the mesh's
// failure.
ReceivedSegment fetchSegment(Mesh& mesh, const std::string& key, const Nonce& name, int member, int members,
             Mesh::Clock::time_point until);

}  // namespace elastic
