// A connection without the key, or with malformed input, is closed and disturbs no group.
#include <random>
#include <thread>

#include "check.h"
#include "dial.h"
#include "transport/pair.h"

using namespace elastic;

TEST(unauthenticated_peers, garbage_wrong_keys_and_older_fences_lose_their_connection) {
  Waiting waiting;
  std::mt19937 random(7);
  for (int turn = 0; turn < 50; turn++) {
    Dial dial(*waiting.endpoint);
    std::vector<char> bytes(1 + random() % 400);
    for (char& byte : bytes) byte = static_cast<char>(random());
    dial.sendAll(bytes.data(), bytes.size());
    if (bytes.size() >= sizeof(Hello)) CHECK(dial.closed());
  }
  Dial wrong(*waiting.endpoint);
  CHECK(!wrong.shake("another key", helloTo(1, {1, 5})));
  const Proof forged{};
  wrong.sendAll(&forged, sizeof forged);
  CHECK(wrong.closed());
  for (Fence older : {Fence{1, 4}, Fence{0, 9}}) {
    Dial dial(*waiting.endpoint);
    CHECK(!dial.shake(kKey, helloTo(1, older)));
  }
  Dial astray(*waiting.endpoint);
  CHECK(astray.shake(kKey, helloTo(2, {1, 5})) && astray.closed());
  CHECK(waiting.end() == "the test is over");
}

TEST(unauthenticated_peers, a_recorded_proof_is_refused) {
  Waiting waiting;
  const Hello hello = helloTo(1, {1, 5});
  Challenge challenge;
  Dial first(*waiting.endpoint);
  first.sendAll(&hello, sizeof hello);
  CHECK(first.receive(&challenge, sizeof challenge));
  const Proof recorded{computeMac(kKey, "dial", hello, challenge.nonce)};
  Dial second(*waiting.endpoint);
  second.sendAll(&hello, sizeof hello);
  second.sendAll(&recorded, sizeof recorded);
  CHECK(second.receive(&challenge, sizeof challenge) && second.closed());
  CHECK(waiting.end() == "the test is over");
}

TEST(unauthenticated_peers, half_open_and_short_connections_do_not_keep_a_peer_out) {
  Waiting waiting;
  std::vector<std::unique_ptr<Dial>> silent;
  for (int i = 0; i < 100; i++) silent.push_back(std::make_unique<Dial>(*waiting.endpoint));
  for (int i = 0; i < 100; i++) Dial hasty(*waiting.endpoint);
  Dial peer(*waiting.endpoint);
  CHECK(peer.shake(kKey, helloTo(1, {1, 5})));
  FrameHeader header{};
  CHECK(peer.receive(&header, sizeof header) && header.call.kind == CallKind::kBarrier && header.size == 0);
  CHECK(waiting.end() == "the test is over");
}

// Of more than 64 pending connections the oldest is closed, and those without a hello before those with a challenge.
TEST(unauthenticated_peers, silent_connections_do_not_use_up_descriptors) {
  Waiting waiting;
  Dial slow(*waiting.endpoint);
  const Hello hello = helloTo(1, {1, 5});
  Challenge challenge;
  slow.sendAll(&hello, sizeof hello);
  CHECK(slow.receive(&challenge, sizeof challenge));
  std::vector<std::unique_ptr<Dial>> silent;
  for (int i = 0; i < 200; i++) silent.push_back(std::make_unique<Dial>(*waiting.endpoint));
  for (int i = 0; i < 200 - 64; i++) CHECK(silent[static_cast<size_t>(i)]->closed());
  const Proof proof{computeMac(kKey, "dial", hello, challenge.nonce)};
  slow.sendAll(&proof, sizeof proof);
  FrameHeader header{};
  CHECK(slow.receive(&header, sizeof header) && header.call.kind == CallKind::kBarrier);
  CHECK(waiting.end() == "the test is over");
}

TEST(unauthenticated_peers, a_frame_with_a_huge_size_ends_the_group_only) {
  for (uint64_t size : {~uint64_t{0}, ~uint64_t{0} - 100, uint64_t{1} << 40}) {
    Waiting waiting;
    Dial peer(*waiting.endpoint);
    CHECK(peer.shake(kKey, helloTo(1, {1, 5})));
    const FrameHeader header{12345, size, {}};
    peer.sendAll(&header, sizeof header);
    waiting.thread.join();
    CHECK(waiting.thrown.find("more unexpected data than this rank buffers") != std::string::npos);
  }
}

// The abort does not wait for a peer that reads late; that peer gets the rest of the half-sent frame and the close
// frame, and none of the other frames that the operation consists of.
TEST(unauthenticated_peers, an_abort_does_not_wait_for_a_peer_that_reads_nothing) {
  auto endpoint = std::make_shared<Endpoint>(kKey, "127.0.0.1", 0, 0, "");
  GroupOptions options;
  options.closeTimeout = std::chrono::minutes(1);  // longer than the peer may wait for the processor
  Group group(endpoint, 1, {"127.0.0.1:1", endpoint->address()}, Fence{1, 5}, options);
  std::vector<char> data(size_t{32} << 20);
  std::string thrown;
  std::thread waiter([&] { thrown = thrownBy([&] { group.broadcast(data.data(), data.size(), 1, 0); }); });
  Dial late(*endpoint);
  CHECK(late.shake(kKey, helloTo(1, {1, 5})));
  FrameHeader header{};
  CHECK(late.receive(&header, sizeof header) && header.size == kMaxFrame);
  CHECK(header.size + header.rest == data.size());
  group.abort("enough");
  waiter.join();
  CHECK(thrown == "enough");
  data = {};  // the waiter may free its memory
  std::vector<char> frame(header.size);
  CHECK(late.receive(frame.data(), frame.size()) && late.receive(&header, sizeof header) && header.slot == kCloseSlot);
}

TEST(unauthenticated_peers, a_malformed_close_frame_is_an_abort_that_names_the_sender) {
  Waiting waiting;
  Dial peer(*waiting.endpoint);
  CHECK(peer.shake(kKey, helloTo(1, {1, 5})));
  const int32_t body[2] = {1, 1 << 30};
  const FrameHeader header{kCloseSlot, sizeof body, {}};
  peer.sendAll(&header, sizeof header);
  peer.sendAll(body, sizeof body);
  waiting.thread.join();
  CHECK(waiting.thrown == "rank 0 sent a malformed close frame");
}

TEST(unauthenticated_peers, r10_a_connection_of_a_newer_world_waits_for_its_group) {
  Waiting waiting;
  Dial peer(*waiting.endpoint);
  CHECK(peer.shake(kKey, helloTo(1, {2, 1})));
  Dial barrier(*waiting.endpoint);  // once it is refused, the connection before has been handled
  CHECK(!barrier.shake(kKey, helloTo(1, {1, 1})));
  CHECK(waiting.end() == "the test is over");
  waiting.group->close();
  Group next(waiting.endpoint, 1, {"127.0.0.1:1", waiting.endpoint->address()}, Fence{2, 1}, GroupOptions{});
  std::string thrown;
  std::thread thread([&] { thrown = thrownBy([&] { next.barrier(); }); });
  FrameHeader header{};
  CHECK(peer.receive(&header, sizeof header) && header.call.kind == CallKind::kBarrier);
  next.abort("done");
  thread.join();
  CHECK(thrown == "done");
}

// The first group does not poll any more, since it has nothing to wait for; a group that is made meanwhile does not
// yet.
TEST(unauthenticated_peers, a_later_group_completes_a_handshake_that_another_group_began) {
  Waiting first;
  Dial peer(*first.endpoint), early(*first.endpoint);
  const Hello hello = helloTo(1, {1, 5, 9});
  const Proof proof = early.proofAfter(hello);
  first.passWith(peer);
  Group unused(first.endpoint, 1, {"127.0.0.1:1", first.endpoint->address()}, {1, 5, 8}, GroupOptions{});
  Waiting later(first.endpoint, hello.fence);
  early.sendAll(&proof, sizeof proof);
  CHECK(early.receivesBarrier());
  CHECK(later.end() == "the test is over");
}

TEST(unauthenticated_peers, a_later_group_completes_a_handshake_that_a_failed_group_began) {
  for (int timeout : {10000, 100}) {
    Waiting first(std::make_shared<Endpoint>(kKey, "127.0.0.1", 0, 0, ""), Fence{1, 5}, timeout);
    Dial early(*first.endpoint);
    const Hello hello = helloTo(1, {1, 5, 9});
    const Proof proof = early.proofAfter(hello);
    if (timeout == 100) first.thread.join();
    if (timeout != 100) CHECK(first.end() == "the test is over");
    Waiting later(first.endpoint, hello.fence);
    early.sendAll(&proof, sizeof proof);
    CHECK(early.receivesBarrier());
  }
}

// Peers that hold the key open a connection for each of their groups, however many those are.
TEST(unauthenticated_peers, no_peer_is_cut_because_it_has_many_groups) {
  constexpr uint64_t kGroups = 150;
  Waiting first;
  std::vector<std::unique_ptr<Dial>> dials;
  std::vector<Hello> hellos;
  for (uint64_t channel = 1; channel <= kGroups; channel++) {
    hellos.push_back(helloTo(1, {1, 5, channel}));
    dials.push_back(std::make_unique<Dial>(*first.endpoint));
    dials.back()->sendAll(&hellos.back(), sizeof(Hello));
  }
  for (size_t i = 0; i < kGroups; i++) {
    Challenge challenge;
    CHECK(dials[i]->receive(&challenge, sizeof challenge));
    const Proof proof{computeMac(kKey, "dial", hellos[i], challenge.nonce)};
    dials[i]->sendAll(&proof, sizeof proof);
  }
  for (size_t i : {size_t{0}, size_t{kGroups} / 2, size_t{kGroups} - 1}) {
    Waiting later(first.endpoint, hellos[i].fence);
    CHECK(dials[i]->receivesBarrier());
  }
}

// A new connection makes the mesh check all handshakes whose deadline has passed: one that answers slowly, one that
// answered while no group polled, and one that has not sent anything yet.
TEST(unauthenticated_peers, no_handshake_fails_because_a_rank_computes_for_long) {
  Waiting polled(std::make_shared<Endpoint>(kKey, "127.0.0.1", 0, 0, ""), Fence{1, 5}, 60000), unpolled,
      inTls(std::make_shared<Endpoint>(kKey, "127.0.0.1", 0, 0, "", true));
  Dial slow(*polled.endpoint), peer(*unpolled.endpoint), early(*unpolled.endpoint), late(*inTls.endpoint);
  const Hello hello = helloTo(1, {1, 5, 9});
  const Proof slowly = slow.proofAfter(helloTo(1, {1, 5})), proof = early.proofAfter(hello);
  const std::string garbage(400, '\x16');
  Dial last(*inTls.endpoint);
  last.sendAll(garbage.data(), garbage.size());
  CHECK(last.closed());  // `late` has been accepted before
  unpolled.passWith(peer);
  inTls.end();
  inTls.group->close();
  early.sendAll(&proof, sizeof proof);
  Connection cipher(dup(late.fd()));
  cipher.secure(inTls.endpoint->tls(), true);
  CHECK(cipher.sendAll(&hello, sizeof hello));
  std::this_thread::sleep_for(std::chrono::milliseconds(10500));
  Dial one(*polled.endpoint), other(*unpolled.endpoint), third(*inTls.endpoint);
  Waiting next(unpolled.endpoint, hello.fence), nextInTls(inTls.endpoint, hello.fence);
  CHECK(early.receivesBarrier());
  slow.sendAll(&slowly, sizeof slowly);
  CHECK(slow.receivesBarrier());
  Challenge challenge;
  ssize_t got = -1;
  for (int i = 0; i < 5000 && got < 0; i++) {
    got = cipher.recv(&challenge, sizeof challenge);
    if (got < 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(got == sizeof challenge);
}
