// Connections with TLS: what is refused, and that groups behave as without TLS.
#include "transport/tls.h"

#include <atomic>
#include <numeric>
#include <thread>

#include "check.h"
#include "dial.h"
#include "ranks.h"
#include "transport/pair.h"

using namespace elastic;

namespace {

// Two TLS states; the test passes the bytes between them and may change them.
struct Both {
  explicit Both(const std::string& key, const std::string& other, uint64_t rekeyAfter = Tls::kRekeyAfter)
      : dialer(std::make_shared<const TlsKey>(key), true, rekeyAfter),
        acceptor(std::make_shared<const TlsKey>(other), false, rekeyAfter) {}

  // Passes the bytes of one side to the other, which reads as much as it can.
  std::string carry(Tls& from, Tls& to) {
    char bytes[1 << 15];
    while (const size_t some = from.takeEncrypted(bytes, sizeof bytes)) {
      wire.append(bytes, some);
      if (!to.feed(bytes, some)) break;
    }
    std::string plain;
    ssize_t got;
    while ((got = to.read(bytes, sizeof bytes)) > 0) plain.append(bytes, static_cast<size_t>(got));
    broken |= got < 0;
    return plain;
  }

  std::string heard, wire;
  bool broken = false;
  Tls dialer, acceptor;
};

std::vector<std::string> nothing(int size) { return std::vector<std::string>(static_cast<size_t>(size)); }

void sum(Group& group, size_t count, Algorithm algorithm) {
  std::vector<int64_t> data(count);
  std::iota(data.begin(), data.end(), group.rank());
  Reduction reduction;
  reduction.type = DataType::kInt64;
  reduction.algorithm = algorithm;
  group.allreduce(data.data(), count, reduction);
  const int64_t size = group.size(), offsets = size * (size - 1) / 2;
  for (size_t i = 0; i < count; i++) CHECK(data[i] == size * static_cast<int64_t>(i) + offsets);
}

std::shared_ptr<Endpoint> encrypted(const std::string& key = kKey) {
  return std::make_shared<Endpoint>(key, "127.0.0.1", 0, 0, "", true);
}

// What a barrier of two throws on both sides, whose endpoints these are. One that failed frees the other; one that
// passed does not, since the other may still be on its way out.
std::pair<std::string, std::string> meet(std::shared_ptr<Endpoint> first, std::shared_ptr<Endpoint> second) {
  const std::vector<std::string> peers{first->address(), second->address()};
  GroupOptions options;
  options.timeout = std::chrono::milliseconds(20000);
  Group one(first, 0, peers, Fence{1, 1}, options), two(second, 1, peers, Fence{1, 1}, options);
  std::string thrown;
  std::thread other([&] { thrown = thrownBy([&] { two.barrier(); }); });
  const std::string own = thrownBy([&] { one.barrier(); });
  if (!own.empty()) two.abort("the first has failed");
  other.join();
  return {own, thrown};
}

}  // namespace

TEST(tls, only_holders_of_the_key_can_decrypt) {
  Both both("key", "key");
  const std::string early = "said before the handshake is over";
  CHECK(both.dialer.write(early.data(), early.size()));
  CHECK(both.carry(both.dialer, both.acceptor).empty());
  CHECK(both.carry(both.acceptor, both.dialer).empty());
  CHECK(both.carry(both.dialer, both.acceptor) == early);
  const std::string answer(100000, 'a');
  CHECK(both.acceptor.write(answer.data(), answer.size()));
  CHECK(both.carry(both.acceptor, both.dialer) == answer);
  CHECK(!both.broken);
  CHECK(both.wire.find("handshake is over") == std::string::npos && both.wire.find("aaaaaaaa") == std::string::npos);
}

TEST(tls, another_key_breaks_the_handshake) {
  Both both("key", "another key");
  CHECK(both.dialer.write("x", 1));
  both.carry(both.dialer, both.acceptor);
  CHECK(both.broken);
}

TEST(tls, a_changed_byte_breaks_the_connection) {
  Both both("key", "key");
  CHECK(both.dialer.write("x", 1));
  both.carry(both.dialer, both.acceptor);
  both.carry(both.acceptor, both.dialer);
  CHECK(both.carry(both.dialer, both.acceptor) == "x");
  CHECK(both.dialer.write("gradient", 8));
  char bytes[256];
  const size_t some = both.dialer.takeEncrypted(bytes, sizeof bytes);
  bytes[some - 3] ^= 1;
  CHECK(both.acceptor.feed(bytes, some));
  CHECK(both.acceptor.read(bytes, sizeof bytes) == -1);
  CHECK(both.acceptor.read(bytes, sizeof bytes) == -1);
}

TEST(tls, keys_are_updated_during_a_connection) {
  Both both("key", "key", 100000);
  CHECK(both.dialer.write("x", 1));
  both.carry(both.dialer, both.acceptor);
  both.carry(both.acceptor, both.dialer);
  both.carry(both.dialer, both.acceptor);
  const std::string much(250000, 'm');
  for (int turn = 0; turn < 5; turn++) {
    CHECK(both.dialer.write(much.data(), much.size()));
    CHECK(both.carry(both.dialer, both.acceptor) == much);
    CHECK(both.acceptor.write(much.data(), much.size()));
    CHECK(both.carry(both.acceptor, both.dialer) == much);
  }
  CHECK(!both.broken);
}

TEST(tls, sums_of_all_sizes_and_many_generations) {
  for (int size : {2, 3}) {
    Ranks ranks(size, 1, 20000, {}, true);
    for (uint64_t generation = 1; generation <= 3; generation++) {
      if (generation > 1) ranks.build(generation);
      const auto thrown = ranks.each([](Group& group) {
        for (size_t count : {1, 7, 1023, 300001}) {
          for (Algorithm algorithm : {Algorithm::kRing, Algorithm::kBcube, Algorithm::kAuto})
            sum(group, count, algorithm);
        }
        group.barrier();
      });
      CHECK(thrown == nothing(size));
    }
  }
}

TEST(tls, an_unexpected_frame_waits_and_a_close_frame_behind_it_is_read) {
  Ranks ranks(2, 1, 20000, {}, true);
  const auto thrown = ranks.each([](Group& group) {
    group.barrier();
    std::vector<char> data(1 << 22, 'x');
    if (group.rank() == 0) {
      group.broadcast(data.data(), data.size(), 0, 0);
      group.abort("rank 0 has enough");
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      group.broadcast(data.data(), data.size(), 0, 0);
      group.barrier();
    }
  });
  CHECK(thrown[0].empty() && thrown[1] == "rank 0 has enough");
}

// It closes with unread input, so that the kernel resets the connection.
TEST(tls, a_close_frame_is_read_although_sending_fails) {
  Ranks ranks(2, 1, 20000, {}, true);
  std::atomic<bool> unread{false}, gone{false};
  const auto thrown = ranks.each([&](Group& group) {
    group.barrier();
    std::vector<char> data(1 << 20, 'x');
    if (group.rank() == 0) {
      while (!unread) std::this_thread::yield();
      group.abort("rank 0 has enough");
      group.close();
      gone = true;
    } else {
      group.broadcast(data.data(), 100, 1, 0);
      unread = true;
      while (!gone) std::this_thread::yield();
      group.broadcast(data.data(), data.size(), 1, 0);
    }
  });
  CHECK(thrown[1] == "rank 0 has enough");
}

TEST(tls, an_abort_frees_all_ranks) {
  Ranks ranks(3, 1, 20000, {}, true);
  const auto thrown = ranks.each([](Group& group) {
    group.barrier();
    if (group.rank() == 1) return group.abort("enough");
    group.barrier();
  });
  CHECK(thrown[0] == "enough" && thrown[2] == "enough");
}

TEST(tls, tls_on_one_side_only_or_another_key_connects_no_group) {
  const auto inTheClear = std::make_shared<Endpoint>(kKey, "127.0.0.1", 0, 0, "");
  CHECK(meet(encrypted(), encrypted()) == std::make_pair(std::string(), std::string()));
  for (const auto& other : {inTheClear, encrypted("another key")}) {
    for (const bool first : {true, false}) {
      const auto thrown = first ? meet(encrypted(), other) : meet(other, encrypted());
      CHECK(thrown.first.find("connection to rank 1") != std::string::npos);
    }
  }
}

TEST(tls, unauthenticated_connections_disturb_no_group) {
  const auto endpoint = encrypted();
  Group group(endpoint, 1, {"127.0.0.1:1", endpoint->address()}, Fence{1, 5}, GroupOptions{});
  std::string thrown;
  std::thread thread([&] { thrown = thrownBy([&] { group.barrier(); }); });
  {
    Dial plain(*endpoint);
    CHECK(!plain.shake(kKey, helloTo(1, {1, 5})));
    Dial silent(*endpoint);
    Dial garbage(*endpoint);
    const std::string bytes(400, '\x16');
    garbage.sendAll(bytes.data(), bytes.size());
  }
  group.abort("the test is over");
  thread.join();
  CHECK(thrown == "the test is over");
}
