// Hashes, macs and addresses against published vectors and by hand.
#include <unistd.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "numbers/numbers.h"
#include "transport/address.h"
#include "transport/endpoint.h"
#include "transport/failure.h"
#include "transport/handshake.h"
#include "transport/sha256.h"

using namespace elastic;

namespace {

std::string hex(const Digest& digest) {
  std::string text;
  char two[3];
  for (uint8_t byte : digest) {
    std::snprintf(two, sizeof two, "%02x", byte);
    text += two;
  }
  return text;
}

std::string sha(const std::string& message, size_t piece) {
  Sha256 hash;
  for (size_t at = 0; at < message.size(); at += piece) {
    const std::string part = message.substr(at, piece);
    hash.update(part.data(), part.size());
  }
  return hex(hash.finish());
}

int descriptor() { return dup(0); }

bool isOpen(int fd) { return lseek(fd, 0, SEEK_CUR) >= 0 || errno != EBADF; }

}  // namespace

TEST(bytes, sha256_of_fips_180_4) {
  CHECK(sha("", 1) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(sha("abc", 1) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  const std::string two = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
  for (size_t piece : {size_t{1}, size_t{7}, two.size()}) {
    CHECK(sha(two, piece) == "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  }
  CHECK(sha(std::string(1000000, 'a'), 999) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(bytes, hmac_of_rfc_4231) {
  CHECK(hex(hmacSha256(std::string(20, '\x0b'), "Hi There")) ==
        "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK(hex(hmacSha256("Jefe", "what do ya want for nothing?")) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(hex(hmacSha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")) ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(bytes, a_mac_binds_key_side_hello_and_nonce) {
  Hello hello;
  hello.fence = {1, 2};
  hello.to = 1;
  const Nonce nonce = makeNonce();
  const Digest mac = computeMac("key", "dial", hello, nonce);
  CHECK(equalInConstantTime(mac, computeMac("key", "dial", hello, nonce)));
  CHECK(!equalInConstantTime(mac, computeMac("kez", "dial", hello, nonce)));
  CHECK(!equalInConstantTime(mac, computeMac("key", "accept", hello, nonce)));
  CHECK(!equalInConstantTime(mac, computeMac("key", "dial", hello, makeNonce())));
  Hello other = hello;
  other.fence.generation++;
  CHECK(!equalInConstantTime(mac, computeMac("key", "dial", other, nonce)));
  other = hello;
  other.from = 7;
  CHECK(!equalInConstantTime(mac, computeMac("key", "dial", other, nonce)));
}

template <typename T>
std::vector<int64_t> averaged(DataType type, std::vector<T> values, int over) {
  scale(values.data(), values.size(), type, 1.0, over);
  return {values.begin(), values.end()};
}

TEST(bytes, averages_of_small_integers_in_large_worlds) {
  for (int over : {127, 128, 130, 256, 1000}) {
    const int64_t most = over == 127 ? 1 : 0, least = over <= 128 ? -1 : 0;
    CHECK(averaged<int8_t>(DataType::kInt8, {127, -128, 5}, over) == (std::vector<int64_t>{most, least, 0}));
  }
  for (int over : {128, 256, 257}) {
    CHECK(averaged<uint8_t>(DataType::kUint8, {255, 3}, over) == (std::vector<int64_t>{over == 128 ? 1 : 0, 0}));
  }
  CHECK(averaged<int64_t>(DataType::kInt64, {-(int64_t{1} << 62)}, 2) == std::vector<int64_t>{-(int64_t{1} << 61)});
}

TEST(bytes, addresses) {
  CHECK(formatAddress("host", 80) == "host:80");
  CHECK(formatAddress("::1", 80) == "[::1]:80");
  CHECK(parseAddress("127.0.0.1:65535").family() == AF_INET);
  CHECK(parseAddress("[::1]:80").family() == AF_INET6);
  for (const char* wrong : {"host", "host:", "127.0.0.1:65536", "127.0.0.1:8x", "127.0.0.1:-1", "127.0.0.1:999999"}) {
    CHECK(thrownBy([&] { parseAddress(wrong); }).find(wrong) != std::string::npos);
  }
}

TEST(bytes, a_close_frame_round_trips_and_malformed_ones_do_not_throw) {
  const Failure failure(Cause::kTimeout, {3, 1}, "too late");
  const std::vector<char> body = encodeFailure(failure);
  const Failure back = decodeFailure(body, 7);
  CHECK(back.cause == Cause::kTimeout && back.ranks == failure.ranks && std::string(back.what()) == "too late");
  for (size_t size = 0; size < 16; size++) {
    const Failure cut = decodeFailure(std::vector<char>(body.begin(), body.begin() + static_cast<ptrdiff_t>(size)), 7);
    CHECK(cut.cause == Cause::kAborted && cut.ranks == std::vector<int>{7});
  }
  CHECK(decodeFailure(std::vector<char>(64, '\xff'), 7).ranks == std::vector<int>{7});
}

TEST(bytes, a_long_reason_is_cut_between_two_characters) {
  for (const char* character : {"\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80"}) {
    std::string reason = "x";
    while (reason.size() < 5000) reason += character;
    const std::string cut = decodeFailure(encodeFailure(Failure(Cause::kAborted, {}, reason)), 0).what();
    const size_t width = std::string(character).size();
    CHECK(cut.size() > 4096 - width && cut.size() <= 4096 && (cut.size() - 1) % width == 0);
    CHECK(cut == reason.substr(0, cut.size()));
  }
  const std::string binary(5000, '\x80');
  CHECK(decodeFailure(encodeFailure(Failure(Cause::kAborted, {}, binary)), 0).ranks.empty());
}

TEST(bytes, fences_order_by_attempt_then_generation) {
  CHECK((Fence{1, 9} < Fence{2, 1}) && (Fence{1, 1} < Fence{1, 2}));
  CHECK(!(Fence{2, 1} < Fence{1, 9}) && !(Fence{1, 1} < Fence{1, 1}));
}

TEST(bytes, an_endpoint_gives_parked_connections_to_their_world_alone) {
  Endpoint endpoint("key", "127.0.0.1", 0, 0, "");
  Hello older, mine, newer;
  older.fence = {1, 1};
  mine.fence = {1, 2};
  newer.fence = {2, 1};
  const int old = descriptor(), own = descriptor(), next = descriptor();
  endpoint.park(Connection(old), older);
  endpoint.park(Connection(own), mine);
  endpoint.park(Connection(next), newer);
  const auto taken = endpoint.takeParked({1, 2});
  CHECK(taken.size() == 1 && taken[0].first.fd() == own);
  CHECK(!isOpen(old) && isOpen(own) && isOpen(next));
  Hello other = newer;
  other.fence.channel = 3;
  const int beside = descriptor();
  endpoint.park(Connection(beside), other);
  CHECK(endpoint.takeParked({2, 1, 4}).empty() && isOpen(next) && isOpen(beside));
  CHECK(endpoint.takeParked({2, 1, 3}).size() == 1);
  CHECK(!isOpen(beside));
  endpoint.close();
  CHECK(!isOpen(next));
  const int late = descriptor();
  endpoint.park(Connection(late), newer);
  CHECK(!isOpen(late));
}

TEST(bytes, an_endpoint_parks_every_connection_that_has_proven_the_key) {
  Endpoint endpoint("key", "127.0.0.1", 0, 0, "");
  Hello hello;
  for (int i = 0; i < 300; i++) endpoint.park(Connection(descriptor()), hello);
  CHECK(endpoint.takeParked({0, 0}).size() == 300);
}
