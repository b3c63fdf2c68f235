// Connections with TLS: what is refused, and that groups behave as without TLS.
#include "transport/tls.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <thread>
#include <vector>

#include "check.h"
#include "dial.h"
#include "ranks.h"
#include "transport/pair.h"

using namespace elastic;

namespace {

// Two TLS states; the test passes the bytes between them and may change them.
struct Both {
  explicit Both(const std::string& key, const std::string& other, uint64_t rekeyAfter = RecordCipher::kRekeyAfter,
                bool dialerHasOcb = true, bool acceptorHasOcb = true)
      : dialer(std::make_shared<const TlsKey>(key, dialerHasOcb), true, rekeyAfter),
        acceptor(std::make_shared<const TlsKey>(other, acceptorHasOcb), false, rekeyAfter) {}

  // Passes the bytes of one side to the other, which reads as much as it can, up to `most` bytes at a time.
  std::string carry(Tls& from, Tls& to, size_t most = 1 << 15) {
    std::string plain;
    std::vector<char> bytes(most);
    for (ByteQueue& out = from.output(); out.size() > 0;) {
      const auto room = to.inputRoom();
      const size_t some = std::min(room.second, out.size());
      std::copy_n(out.front(), some, room.first);
      wire.append(out.front(), some);
      out.begin += some;
      broken |= !to.feed(some);
      ssize_t got;
      while ((got = to.read(bytes.data(), bytes.size())) > 0) plain.append(bytes.data(), static_cast<size_t>(got));
      broken |= got < 0;
    }
    return plain;
  }

  // The peer's answer to bytes that only begin a handshake.
  void shake() {
    for (int turn = 0; turn < 2; turn++) {
      carry(dialer, acceptor);
      carry(acceptor, dialer);
    }
  }

  // Whether the acceptor reads what the dialer writes, all of it.
  bool say(const std::string& text, size_t most = 1 << 15) { return send(dialer, acceptor, text, most) == text; }
  bool answer(const std::string& text) { return send(acceptor, dialer, text, 1 << 15) == text; }

  std::string send(Tls& from, Tls& to, const std::string& text, size_t most) {
    std::string plain;
    for (size_t done = 0; done < text.size() && !broken;) {
      const iovec part{const_cast<char*>(text.data()) + done, text.size() - done};
      const ssize_t taken = from.write(&part, 1);
      if (taken < 0) return "broken";
      done += static_cast<size_t>(taken);
      plain += carry(from, to, most);
    }
    return plain;
  }

  std::string wire;
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
  const iovec part{const_cast<char*>(early.data()), early.size()};
  CHECK(both.dialer.write(&part, 1) == static_cast<ssize_t>(early.size()));
  CHECK(both.carry(both.dialer, both.acceptor).empty());
  CHECK(both.carry(both.acceptor, both.dialer).empty());
  CHECK(both.carry(both.dialer, both.acceptor) == early);
  CHECK(both.answer(std::string(300000, 'a')));
  CHECK(!both.broken);
  CHECK(both.wire.find("handshake is over") == std::string::npos && both.wire.find("aaaaaaaa") == std::string::npos);
}

TEST(tls, another_key_breaks_the_handshake) {
  Both both("key", "another key");
  both.dialer.read(nullptr, 0);
  both.shake();
  CHECK(both.broken);
}

TEST(tls, records_are_read_in_pieces_of_any_size) {
  std::string text(400000, ' ');
  for (size_t i = 0; i < text.size(); i++) text[i] = static_cast<char>(i * 31 >> 3);
  for (const int ocb : {0, 1, 2, 3}) {  // of either side
    Both both("key", "key", RecordCipher::kRekeyAfter, ocb & 1, ocb & 2);
    both.dialer.read(nullptr, 0);
    both.shake();
    for (const size_t most : {size_t{7}, size_t{4096}, RecordCipher::kMaxText, size_t{1} << 20})
      CHECK(both.say(text, most) && both.answer("yes"));
  }
}

// Any byte of a record: its length, its text, its tag.
TEST(tls, a_changed_byte_breaks_the_connection) {
  for (const int changed : {0, 2, 5, -3}) {
    Both both("key", "key");
    both.dialer.read(nullptr, 0);
    both.shake();
    CHECK(both.say("x"));
    char text[] = "gradient";
    const iovec part{text, 8};
    CHECK(both.dialer.write(&part, 1) == 8);
    ByteQueue& out = both.dialer.output();
    out.data[changed < 0 ? out.end - 3 : out.begin + static_cast<size_t>(changed)] ^= 1;
    const std::string padding(RecordCipher::kMaxText, 'p');
    const iovec more{const_cast<char*>(padding.data()), padding.size()};
    CHECK(both.dialer.write(&more, 1) > 0);
    CHECK(both.carry(both.dialer, both.acceptor).empty() && both.broken);
    CHECK(both.acceptor.read(text, 8) == -1);
  }
}

TEST(tls, a_record_is_accepted_once_and_in_its_place) {
  for (const bool repeats : {true, false}) {
    Both both("key", "key");
    both.dialer.read(nullptr, 0);
    both.shake();
    std::string records[2];
    for (std::string& record : records) {
      char text[] = "gradient";
      const iovec part{text, 8};
      CHECK(both.dialer.write(&part, 1) == 8);
      ByteQueue& out = both.dialer.output();
      record.assign(out.front(), out.size());
      out.begin = out.end;
    }
    for (const std::string& record : {records[repeats ? 0 : 1], records[0]}) {
      std::copy(record.begin(), record.end(), both.acceptor.inputRoom().first);
      char text[8];
      both.broken |= !both.acceptor.feed(record.size()) || both.acceptor.read(text, 8) < 0;
    }
    CHECK(both.broken);
  }
}

TEST(tls, keys_are_updated_during_a_connection) {
  Both both("key", "key", 100000);
  both.dialer.read(nullptr, 0);
  both.shake();
  for (int turn = 0; turn < 5; turn++) CHECK(both.say(std::string(250000, 'm')) && both.answer(std::string(9000, 'n')));
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
