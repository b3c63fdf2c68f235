// How the members of one host get the shared memory: its first member gives them the descriptors over a Unix socket.
//
// A socket because it needs no name in a file system, no common process namespace and no rights over other processes,
// and because nothing can stay behind: an abstract name goes with its socket. Members in containers of their own do not
// find it, and all of that host then do without. The caller proves the job's key.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/handshake.h"
#include "transport/mesh.h"

namespace elastic {

constexpr int kMostMembers = 128;  // as many descriptors have room in one message

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& o) noexcept : fd_(o.release()) {}
  Descriptor& operator=(Descriptor&& o) noexcept {
    reset(o.release());
    return *this;
  }
  ~Descriptor() { reset(-1); }

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
struct Lifelines {
  Descriptor own;
  std::vector<Descriptor> others;  // by member; none for oneself
};

struct Handed {
  Descriptor memory;
  Lifelines lifelines;
};

// Gives as long as it lives, out of the mesh's event loop.
class Giver {
 public:
  // Throws std::runtime_error where sockets or descriptors are refused.
  Giver(Mesh& mesh, const std::string& key, const Nonce& name, int memory, int members);
  ~Giver();

  // The first member's own; to be called once, when nobody else asks any more.
  Lifelines takeOwn();

 private:
  std::unique_ptr<Failure> onCaller();
  std::unique_ptr<Failure> onRequest(int fd);
  void give(int fd, int member);

  Mesh& mesh_;
  const std::string key_;
  const Nonce name_;
  const int memory_;
  std::vector<Descriptor> ownEnds_, farEnds_;
  Descriptor listener_;
  std::vector<Descriptor> callers_;
};

// Asks the giver of that name, until the deadline. Throws std::runtime_error if nothing comes of it, or the mesh's
// failure.
Handed fetch(Mesh& mesh, const std::string& key, const Nonce& name, int member, int members,
             Mesh::Clock::time_point until);

}  // namespace elastic
