// The first bytes of a connection: both sides prove the job's key and agree on fence and ranks.
//
//   dialer -> acceptor   Hello      both ranks, the fence, the channel, and a nonce
//   acceptor -> dialer   Challenge  a nonce of its own, HMAC(key, "accept" + Hello + nonce)
//   dialer -> acceptor   Proof      HMAC(key, "dial" + Hello + nonce)
//
// A recorded handshake cannot be replayed: each side signs the other's fresh nonce.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "transport/sha256.h"

namespace elastic {

// Identifies a group: its world (driver's attempt, generation) and, among that world's groups, which have no order, the
// channel.
struct Fence {
  uint64_t attempt = 0;
  uint64_t generation = 0;
  uint64_t channel = 0;

  bool operator==(const Fence& o) const {
    return attempt == o.attempt && generation == o.generation && channel == o.channel;
  }
  bool operator<(const Fence& o) const {
    return attempt != o.attempt ? attempt < o.attempt : generation < o.generation;
  }
};

using Nonce = std::array<uint8_t, 16>;

constexpr uint64_t kMagic = 0x32676e6972736c65;  // "elsring2"

struct Hello {
  uint64_t magic = kMagic;
  Fence fence;
  uint32_t from = 0;
  uint32_t to = 0;
  Nonce nonce{};
};

struct Challenge {
  Nonce nonce{};
  Digest mac{};
};

struct Proof {
  Digest mac{};
};

static_assert(sizeof(Hello) == 56 && sizeof(Challenge) == 48 && sizeof(Proof) == 32, "wire layout");

Nonce makeNonce();
Digest computeMac(const std::string& key, const char* side, const Hello& hello, const Nonce& nonce);

}  // namespace elastic
