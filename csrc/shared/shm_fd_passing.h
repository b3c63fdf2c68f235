// Distributes the shared memory of a host: its first member passes the descriptors to the others over a Unix socket.
//
// An abstract Unix socket needs no file system, no common process namespace and no rights over other processes, and
// leaves nothing behind. Members in different network namespaces cannot reach it; their host then uses no shared
// memory. Clients prove the job's key.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/handshake.h"
#include "transport/mesh.h"

namespace elastic {

constexpr int kMaxMembers = 128;  // limit of descriptors in one message

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

// A socket pair per member, of which the member holds one end alone. The others see it close when the member's process
// ends, and see it readable when the member has published a failure. (A pipe would raise SIGPIPE without readers.)
struct LivenessSockets {
  UniqueFd own;
  std::vector<UniqueFd> others;  // by member; none for this member
};

struct ReceivedSegment {
  UniqueFd memory;
  LivenessSockets liveness;
};

// Serves requests from the mesh's event loop for as long as it exists.
class SegmentServer {
 public:
  // Throws std::runtime_error if sockets or descriptors are refused.
  SegmentServer(Mesh& mesh, const std::string& key, const Nonce& name, int memory, int members);
  ~SegmentServer();

  // The first member's own sockets; call once, after all requests.
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

// Requests the descriptors from the server of that name until the deadline. Throws std::runtime_error if it gets none,
// or the mesh's failure.
ReceivedSegment fetchSegment(Mesh& mesh, const std::string& key, const Nonce& name, int member, int members,
                             Mesh::Clock::time_point until);

}  // namespace elastic
