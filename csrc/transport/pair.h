// One peer: a lazily opened socket, a queue of frames to send, and receives posted by slot. All under the mesh's mutex.
//
// Frames are sent without asking first. One that nobody posted a receive for is kept back (the socket is not read) or,
// where other receives are posted on the pair, stored aside, so that concurrent collectives cannot lock each other up.
#pragma once

#include <gloo/transport/pair.h>

#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/connection.h"
#include "transport/mesh.h"

namespace elastic {

struct FrameHeader {
  uint64_t slot;
  uint64_t size;
  Call call;
};

// Slots that Gloo never uses.
constexpr uint64_t kGoodbyeSlot = ~uint64_t{0};   // the sender's group has failed; the body says why
constexpr uint64_t kHereSlot = ~uint64_t{0} - 1;  // the sender lives and waits for somebody; no body

class Pair : public gloo::transport::Pair {
 public:
  Pair(Mesh& mesh, int peer);
  ~Pair() override;

  // What Gloo's algorithms call.
  const gloo::transport::Address& address() const override;
  void connect(const std::vector<char>&) override {}
  void close() override;
  void setSync(bool, bool) override {}
  std::unique_ptr<gloo::transport::Buffer> createSendBuffer(int, void*, size_t) override;
  std::unique_ptr<gloo::transport::Buffer> createRecvBuffer(int, void*, size_t) override;
  void send(gloo::transport::UnboundBuffer* buffer, uint64_t slot, size_t offset, size_t nbytes) override;
  void recv(gloo::transport::UnboundBuffer* buffer, uint64_t slot, size_t offset, size_t nbytes) override;

  // What the mesh calls, with its mutex held.
  int fd() const { return connection_.fd(); }
  bool opened() const { return connection_.open() || state_ == State::kClosed; }
  bool busy() const { return posted_ > 0 || inBody_ || owes(); }
  bool silentSince(Mesh::Clock::time_point when) const { return heard_ < when; }
  void accept(Connection connection);
  void onEvents(uint32_t events);
  void lookBehind();
  void sayHere();
  void seek();
  bool beginGoodbye(const std::vector<char>& body);
  LastWords takeGoodbye();
  void endGoodbye(const Failure& failure);
  void drop();
  void shut();

 private:
  enum class State { kIdle, kDialing, kProving, kUp, kClosed };
  struct Send {
    Buffer* buffer;  // null: nobody counts it
    FrameHeader header;
    const char* data;
    size_t done = 0;
  };
  struct Receive {
    Buffer* buffer;
    char* data;
    size_t size;
  };

  struct Early {
    Call call;
    std::vector<char> body;
  };

  bool owes() const;
  void open();
  void prove();
  void up();
  void flush();
  bool sendFront();
  void drain();
  void read();
  bool readInto(char* data, size_t& have, size_t size);
  bool place();
  bool placeAside();
  bool fitsAside() const;
  bool take(Receive& receive);
  void complete(const Receive& receive);
  void deliver();
  void mismatch(size_t expected, size_t got);
  bool sameCall(const Call& theirs);
  void fail(const std::string& why);
  void sought(int error);
  void arm();
  std::string link() const;

  Mesh& mesh_;
  const int peer_;
  Connection connection_;
  State state_ = State::kIdle;
  uint32_t armed_ = 0;
  std::string why_;  // it is closed
  Hello hello_;
  Challenge challenge_;
  std::deque<Send> sends_;
  std::unordered_map<uint64_t, std::deque<Receive>> receives_;
  size_t posted_ = 0;
  std::unordered_map<uint64_t, std::deque<Early>> early_;
  // The frame that is being read.
  FrameHeader header_{};
  size_t have_ = 0;
  bool inBody_ = false, paused_ = false, aside_ = false, draining_ = false;
  Receive target_{};
  std::vector<char> asideBody_;
  int seeking_ = -1;      // a connection that is made only to see whether the peer listens
  bool refused_ = false;  // it did not, the last time
  Mesh::Clock::time_point sought_{};
  Mesh::Clock::time_point heard_{}, said_{};  // when its last byte was read; when we last told it that we wait
};

}  // namespace elastic
