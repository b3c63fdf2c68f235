// Whoever dials without the key, or says what makes no sense, loses its connection and disturbs nobody.
#include <random>
#include <thread>

#include "check.h"
#include "dial.h"
#include "transport/pair.h"

using namespace elastic;

TEST(strangers, garbage_wrong_keys_and_older_fences_lose_their_connection) {
  Waiting waiting;
  std::mt19937 random(7);
  for (int turn = 0; turn < 50; turn++) {
    Dial dial(*waiting.endpoint);
    std::vector<char> bytes(1 + random() % 400);
    for (char& byte : bytes) byte = static_cast<char>(random());
    dial.say(bytes.data(), bytes.size());
    if (bytes.size() >= sizeof(Hello)) CHECK(dial.closed());
  }
  Dial wrong(*waiting.endpoint);
  CHECK(!wrong.shake("another key", helloTo(1, {1, 5})));
  const Proof forged{};
  wrong.say(&forged, sizeof forged);
  CHECK(wrong.closed());
  for (Fence older : {Fence{1, 4}, Fence{0, 9}}) {
    Dial dial(*waiting.endpoint);
    CHECK(!dial.shake(kKey, helloTo(1, older)));
  }
  Dial astray(*waiting.endpoint);
  CHECK(astray.shake(kKey, helloTo(2, {1, 5})) && astray.closed());
  CHECK(waiting.end() == "the test is over");
}

TEST(strangers, a_recorded_proof_is_worth_nothing) {
  Waiting waiting;
  const Hello hello = helloTo(1, {1, 5});
  Challenge challenge;
  Dial first(*waiting.endpoint);
  first.say(&hello, sizeof hello);
  CHECK(first.hear(&challenge, sizeof challenge));
  const Proof recorded{macOf(kKey, "dial", hello, challenge.nonce)};
  Dial second(*waiting.endpoint);
  second.say(&hello, sizeof hello);
  second.say(&recorded, sizeof recorded);
  CHECK(second.hear(&challenge, sizeof challenge) && second.closed());
  CHECK(waiting.end() == "the test is over");
}

TEST(strangers, half_open_and_hasty_ones_do_not_keep_a_peer_out) {
  Waiting waiting;
  std::vector<std::unique_ptr<Dial>> silent;
  for (int i = 0; i < 100; i++) silent.push_back(std::make_unique<Dial>(*waiting.endpoint));
  for (int i = 0; i < 100; i++) Dial hasty(*waiting.endpoint);
  Dial peer(*waiting.endpoint);
  CHECK(peer.shake(kKey, helloTo(1, {1, 5})));
  FrameHeader header{};
  CHECK(peer.hear(&header, sizeof header) && header.call.kind == CallKind::kBarrier && header.size == 0);
  CHECK(waiting.end() == "the test is over");
}

// Of more than 64 the oldest one goes, silent ones before those who have been challenged.
TEST(strangers, silent_ones_do_not_take_all_descriptors) {
  Waiting waiting;
  Dial slow(*waiting.endpoint);
  const Hello hello = helloTo(1, {1, 5});
  Challenge challenge;
  slow.say(&hello, sizeof hello);
  CHECK(slow.hear(&challenge, sizeof challenge));
  std::vector<std::unique_ptr<Dial>> silent;
  for (int i = 0; i < 200; i++) silent.push_back(std::make_unique<Dial>(*waiting.endpoint));
  for (int i = 0; i < 200 - 64; i++) CHECK(silent[static_cast<size_t>(i)]->closed());
  const Proof proof{macOf(kKey, "dial", hello, challenge.nonce)};
  slow.say(&proof, sizeof proof);
  FrameHeader header{};
  CHECK(slow.hear(&header, sizeof header) && header.call.kind == CallKind::kBarrier);
  CHECK(waiting.end() == "the test is over");
}

TEST(strangers, a_frame_that_claims_to_be_huge_ends_the_group_and_nothing_else) {
  for (uint64_t size : {~uint64_t{0}, ~uint64_t{0} - 100, uint64_t{1} << 40}) {
    Waiting waiting;
    Dial peer(*waiting.endpoint);
    CHECK(peer.shake(kKey, helloTo(1, {1, 5})));
    const FrameHeader header{12345, size, {}};
    peer.say(&header, sizeof header);
    waiting.thread.join();
    CHECK(waiting.thrown.find("more than anybody here asked for") != std::string::npos);
  }
}

// Nobody here waits for a peer that reads late; it is told all the same, behind the frame that was half sent.
TEST(strangers, a_peer_that_reads_nothing_keeps_no_waiter_after_an_abort) {
  auto endpoint = std::make_shared<Endpoint>(kKey, "127.0.0.1", 0, 0, "");
  GroupOptions options;
  options.nobodyHears = std::chrono::minutes(1);  // however late the peer gets the processor
  Group group(endpoint, 1, {"127.0.0.1:1", endpoint->address()}, Fence{1, 5}, options);
  std::vector<char> data(size_t{32} << 20);
  std::string thrown;
  std::thread waiter([&] { thrown = thrownBy([&] { group.broadcast(data.data(), data.size(), 1, 0); }); });
  Dial late(*endpoint);
  CHECK(late.shake(kKey, helloTo(1, {1, 5})));
  FrameHeader header{};
  CHECK(late.hear(&header, sizeof header) && header.size == data.size());
  group.abort("enough");
  waiter.join();
  CHECK(thrown == "enough");
  data = {};  // the waiter's memory is its own again
  std::vector<char> frame(header.size);
  CHECK(late.hear(frame.data(), frame.size()) && late.hear(&header, sizeof header) && header.slot == kGoodbyeSlot);
}

TEST(strangers, a_goodbye_without_sense_is_an_abort_that_names_the_sender) {
  Waiting waiting;
  Dial peer(*waiting.endpoint);
  CHECK(peer.shake(kKey, helloTo(1, {1, 5})));
  const int32_t body[2] = {1, 1 << 30};
  const FrameHeader header{kGoodbyeSlot, sizeof body, {}};
  peer.say(&header, sizeof header);
  peer.say(body, sizeof body);
  waiting.thread.join();
  CHECK(waiting.thrown == "rank 0 said goodbye without sense");
}

TEST(strangers, r10_a_newer_world_is_parked_until_its_group_is_there) {
  Waiting waiting;
  Dial peer(*waiting.endpoint);
  CHECK(peer.shake(kKey, helloTo(1, {2, 1})));
  Dial barrier(*waiting.endpoint);  // once it is turned away, the one before has been dealt with
  CHECK(!barrier.shake(kKey, helloTo(1, {1, 1})));
  CHECK(waiting.end() == "the test is over");
  waiting.group->close();
  Group next(waiting.endpoint, 1, {"127.0.0.1:1", waiting.endpoint->address()}, Fence{2, 1}, GroupOptions{});
  std::string thrown;
  std::thread thread([&] { thrown = thrownBy([&] { next.barrier(); }); });
  FrameHeader header{};
  CHECK(peer.hear(&header, sizeof header) && header.call.kind == CallKind::kBarrier);
  next.abort("done");
  thread.join();
  CHECK(thrown == "done");
}

// The first group is never turned again: it has nothing more to wait for. And the rank computes for longer than a
// handshake may take, before it makes the other one, whose connections have been waiting for it all the time.
TEST(strangers, a_handshake_that_one_group_began_is_ended_by_one_that_is_made_later) {
  Waiting waiting;
  Dial peer(*waiting.endpoint), early(*waiting.endpoint);
  const Fence channel{1, 5, 9};
  const Hello hello = helloTo(1, channel);
  Challenge challenge;
  early.say(&hello, sizeof hello);
  CHECK(early.hear(&challenge, sizeof challenge));
  CHECK(peer.shake(kKey, helloTo(1, {1, 5})));
  FrameHeader barrier{};
  CHECK(peer.hear(&barrier, sizeof barrier));
  peer.say(&barrier, sizeof barrier);  // the same from the other side
  waiting.thread.join();
  CHECK(waiting.thrown.empty());
  const Proof proof{macOf(kKey, "dial", hello, challenge.nonce)};
  early.say(&proof, sizeof proof);
  std::this_thread::sleep_for(std::chrono::milliseconds(10500));
  Dial stranger(*waiting.endpoint);  // heard first; for its sake all are looked through whose time is up
  Group later(waiting.endpoint, 1, {"127.0.0.1:1", waiting.endpoint->address()}, channel, GroupOptions{});
  std::string thrown;
  std::thread thread([&] { thrown = thrownBy([&] { later.barrier(); }); });
  const bool heard = early.hear(&barrier, sizeof barrier);
  later.abort("done");
  thread.join();
  CHECK(heard && barrier.call.kind == CallKind::kBarrier && thrown == "done");
}
