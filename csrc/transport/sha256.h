// SHA-256 (FIPS 180-4) and HMAC-SHA-256 (RFC 2104), for the mesh's handshake alone: a few hundred bytes per connection.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace elastic {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  Sha256();
  void update(const void* data, size_t size);
  Digest finish();

 private:
  void block(const uint8_t* data);

  std::array<uint32_t, 8> state_;
  std::array<uint8_t, 64> pending_;
  size_t pendingSize_ = 0;
  uint64_t total_ = 0;
};

Digest hmacSha256(const std::string& key, const std::string& message);

// Compares in constant time.
bool equalInConstantTime(const Digest& a, const Digest& b);

}  // namespace elastic
