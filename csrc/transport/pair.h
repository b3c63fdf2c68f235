// One peer: a lazily opened socket, a queue of frames to send, and receives posted by slot. All under the mesh's mutex.
//
// Frames are sent eagerly. A frame without a posted receive stays in the socket (the pair is paused) or, if other
// receives are posted on this pair, is buffered as unexpected, so that concurrent collectives cannot deadlock.
//
// A large operation is several frames: a wait is for one of them, and an abort finishes only the one that is half sent.
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
  uint64_t rest = 0;  // bytes of the same operation in the frames that follow
};

constexpr size_t kMaxFrame = size_t{4} << 20;  // bytes of a frame's body

// Control frames use slots that Gloo never uses.
constexpr uint64_t kCloseSlot = ~uint64_t{0};  // close frame: the sender's group has failed; the body is the failure
constexpr uint64_t kKeepaliveSlot = ~uint64_t{0} - 1;  // the sender is alive and waits for another rank; no body

class Pair : public gloo::transport::Pair {
 public:
  Pair(Mesh& mesh, int peer);
  ~Pair() override;

  // Called by Gloo's algorithms.
  const gloo::transport::Address& address() const override;
  void connect(const std::vector<char>&) override {}
  void close() override;
  void setSync(bool, bool) override {}
  std::unique_ptr<gloo::transport::Buffer> createSendBuffer(int, void*, size_t) override;
  std::unique_ptr<gloo::transport::Buffer> createRecvBuffer(int, void*, size_t) override;
  void send(gloo::transport::UnboundBuffer* buffer, uint64_t slot, size_t offset, size_t nbytes) override;
  void recv(gloo::transport::UnboundBuffer* buffer, uint64_t slot, size_t offset, size_t nbytes) override;

  // Called by the mesh with its mutex held.
  int fd() const { return connection_.fd(); }
  bool isOpen() const { return connection_.open() || state_ == State::kClosed; }
  bool isBusy() const { return posted_ > 0 || inBody_ || hasUnsentData(); }
  bool isSilentSince(Mesh::Clock::time_point when) const { return lastReceived_ < when; }
  void accept(Connection connection);
  void onEvents(uint32_t events);
  void readPastUnexpected();
  void sendKeepalive();
  void dialEarly();
  void onAddress();
  void probeListener();
  bool beginClose(const std::vector<char>& body);
  PendingClose takePendingClose();
  void finishClose(const Failure& failure);
  void discardOperations();
  // Closes a connection that has not failed; moves it to `unreceived` if the peer has yet to take what is on its way.
  void closeOrderly(std::vector<PendingClose>& unreceived);
  void closeSocket();

 private:
  enum class State { kIdle, kDialing, kHandshaking, kConnected, kClosed };
  struct Send {
    Buffer* buffer;  // null for control frames
    FrameHeader header;
    const char* data;
    size_t done = 0;
  };
  struct Receive {
    Buffer* buffer;
    char* data;
    size_t size, rest;  // as in the header
  };

  struct UnexpectedFrame {
    FrameHeader header;
    std::vector<char> body;
  };

  bool hasUnsentData() const;
  void dial();
  void onChallenge();
  void onConnected();
  void flush();
  bool sendFront();
  void readToEnd();
  void read();
  bool readExactly(char* data, size_t& have, size_t size);
  bool beginBody();
  bool bufferUnexpected();
  bool fitsUnexpectedLimit() const;
  bool takePosted(Receive& receive);
  bool takeUnexpected(uint64_t slot, const Receive& receive);
  bool fits(const Receive& receive, const FrameHeader& header);
  void complete(const Receive& receive);
  void finishFrame();
  bool checkSameCall(const Call& theirs);
  void fail(const std::string& why);
  void onProbeResult(int error);
  void updateEpollEvents();
  std::string linkName() const;

  Mesh& mesh_;
  const int peer_;
  Connection connection_;
  State state_ = State::kIdle;
  bool early_ = false;  // dialled before it was needed, and not yet connected
  uint32_t epollEvents_ = 0;
  std::string closeReason_;
  Hello hello_;
  Challenge challenge_;
  std::deque<Send> sends_;
  std::unordered_map<uint64_t, std::deque<Receive>> receives_;
  size_t posted_ = 0;
  std::unordered_map<uint64_t, std::deque<UnexpectedFrame>> unexpectedFrames_;
  // The frame that is being read.
  FrameHeader header_{};
  size_t bytesRead_ = 0;
  bool inBody_ = false, paused_ = false, unexpected_ = false, readingToEnd_ = false;
  Receive target_{};
  std::vector<char> unexpectedBody_;
  int probeFd_ = -1;  // connects only to see whether the peer still listens; -1: none
  bool lastProbeRefused_ = false;
  Mesh::Clock::time_point lastProbe_{};
  Mesh::Clock::time_point lastReceived_{}, lastKeepalive_{};
};

}  // namespace elastic
