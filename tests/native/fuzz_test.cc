// Mutated handshakes and frames: an unauthenticated one disturbs no group, and one of a peer ends only its own group.
//
// ELASTIC_FUZZ_INPUTS says how many of each (default 2000), ELASTIC_FUZZ_SEED from which on. The input that a check
// fails on is repeated by its seed.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "check.h"
#include "dial.h"
#include "transport/pair.h"

using namespace elastic;

namespace {

using Bytes = std::vector<char>;

uint64_t setting(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

template <typename Part>
void append(Bytes& bytes, const Part& part) {
  const char* raw = reinterpret_cast<const char*>(&part);
  bytes.insert(bytes.end(), raw, raw + sizeof part);
}

// One input's luck.
class Luck {
 public:
  explicit Luck(uint64_t seed) : random_(seed) {}

  size_t below(size_t end) { return end ? random_() % end : 0; }
  bool once_in(size_t n) { return below(n) == 0; }

  // Flips, overwrites, cuts, repeats; at least once.
  void mutate(Bytes& bytes) {
    static const uint64_t kOdd[] = {0,         1, 0x7f, 0xff, 0x7fffffff, 0xffffffff, ~uint64_t{0}, ~uint64_t{0} - 1,
                                    1ull << 40};
    do {
      if (bytes.empty()) bytes.push_back('x');
      const size_t at = below(bytes.size());
      switch (below(5)) {
        case 0:
          bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
          break;
        case 1: {
          const uint64_t odd = kOdd[below(std::size(kOdd))];
          const size_t width = std::min<size_t>(bytes.size() - at, size_t{1} << below(4));
          std::memcpy(&bytes[at], &odd, width);
          break;
        }
        case 2:
          bytes.resize(at);
          break;
        case 3: {
          const Bytes again(bytes.begin() + static_cast<long>(at), bytes.end());
          bytes.insert(bytes.end(), again.begin(), again.end());
          break;
        }
        default:
          for (size_t i = below(64); i > 0; i--) bytes.push_back(static_cast<char>(random_()));
      }
    } while (once_in(2));
  }

  // In one to three pieces.
  void sendAll(Dial& dial, const Bytes& bytes) {
    size_t said = 0;
    while (said < bytes.size()) {
      const size_t piece = once_in(3) ? 1 + below(bytes.size() - said) : bytes.size() - said;
      dial.sendAll(bytes.data() + said, piece);
      said += piece;
    }
  }

 private:
  std::mt19937_64 random_;
};

// Collectives of two ranks, in which rank 1 sends first; the peer's frames are mutated.
void collective(Group& group, size_t which) {
  std::vector<float> data(1000, 1.0f), out(2000);
  const auto halves = [](std::vector<float>& memory) {
    const auto begin = reinterpret_cast<char*>(memory.data());
    return Parts{{begin, 2000}, {begin + 2000, 2000}};
  };
  switch (which) {
    case 0:
      return group.barrier();
    case 1:
      return group.allreduce(data.data(), data.size(), Reduction{});
    case 2:
      return group.broadcast(data.data(), data.size(), 1, 7);
    case 3:
      return group.allgather(data.data(), out.data(), {4000, 4000}, 7);
    default:
      return group.alltoall(halves(data), halves(out), 7, false);
  }
}

}  // namespace

TEST(fuzz, unauthenticated_handshakes_disturb_no_group) {
  const uint64_t first = setting("ELASTIC_FUZZ_SEED", 1), inputs = setting("ELASTIC_FUZZ_INPUTS", 2000);
  Waiting waiting(std::make_shared<Endpoint>(kKey, "127.0.0.1", 0, 0, ""), Fence{1, 5}, 600000);
  for (uint64_t seed = first; seed < first + inputs; seed++) {
    Luck luck(seed);
    Dial dial(*waiting.endpoint);
    const Hello hello = helloTo(1, {1, 5});
    Bytes bytes;
    append(bytes, hello);
    if (luck.once_in(2)) {
      luck.sendAll(dial, bytes);  // a true beginning
      Challenge challenge;
      CHECK(dial.receive(&challenge, sizeof challenge));
      bytes.clear();
      append(bytes, Proof{computeMac(luck.once_in(2) ? "another key" : kKey, "accept", hello, challenge.nonce)});
    } else {
      append(bytes, Proof{});
    }
    luck.mutate(bytes);
    luck.sendAll(dial, bytes);
  }
  Dial peer(*waiting.endpoint);
  CHECK(peer.shake(kKey, helloTo(1, {1, 5})));
  FrameHeader header{};
  CHECK(peer.receive(&header, sizeof header) && header.call.kind == CallKind::kBarrier);
  CHECK(waiting.end() == "the test is over");
}

TEST(fuzz, frames_of_a_peer_end_its_group_or_nothing) {
  const uint64_t first = setting("ELASTIC_FUZZ_SEED", 1), inputs = setting("ELASTIC_FUZZ_INPUTS", 2000);
  auto endpoint = std::make_shared<Endpoint>(kKey, "127.0.0.1", 0, 0, "");
  for (uint64_t seed = first; seed < first + inputs; seed++) {
    Luck luck(seed);
    GroupOptions options;
    options.timeout = std::chrono::seconds(5);
    Group group(endpoint, 1, {"127.0.0.1:1", endpoint->address()}, Fence{1, seed}, options);
    const size_t which = luck.below(4);
    std::thread thread([&] { thrownBy([&] { collective(group, which); }); });
    {
      Dial peer(*endpoint);
      CHECK(peer.shake(kKey, helloTo(1, {1, seed})));
      FrameHeader header{};
      CHECK(peer.receive(&header, sizeof header));
      Bytes bytes;
      append(bytes, header);
      bytes.resize(bytes.size() + std::min<uint64_t>(header.size, 8192));
      if (luck.once_in(8)) header.slot = luck.once_in(2) ? kCloseSlot : kKeepaliveSlot;
      std::memcpy(bytes.data(), &header, sizeof header);
      luck.mutate(bytes);
      luck.sendAll(peer, bytes);
    }  // the other side closes the connection
    thread.join();
  }
}
