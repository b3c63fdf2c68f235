// The records of an encrypted connection: AES-128 in OCB mode (RFC 7253), or in GCM where a host's OpenSSL has no OCB (in
// FIPS mode), with TLS 1.3's nonces (RFC 8446, 5.3) under keys from TLS's exporter (7.5). They may be four times as long
// as TLS's own, and are encrypted from, and decrypted to, where the caller's bytes lie. OCB passes over the bytes once:
// OpenSSL 3.0 encrypts twice as fast with it as with GCM.
//
//   record   length of the text (4 bytes, authenticated), the encrypted text, its tag (16 bytes)
#pragma once

#include <sys/uio.h>

#include "transport/openssl.h"
#include "transport/sha256.h"

namespace elastic {

// One direction of a connection. Both sides count its bytes, so that they change keys at the same record.
class RecordCipher {
 public:
  static constexpr size_t kHead = 4, kTag = 16, kMaxText = size_t{1} << 16;
  static constexpr uint64_t kRekeyAfter = uint64_t{1} << 36;  // bytes; both modes allow 2^38 under one key

  // seals: this is the side that sends. ocb: else GCM.
  RecordCipher(const OpenSsl& lib, const Digest& secret, bool ocb, bool seals, uint64_t rekeyAfter);
  ~RecordCipher();
  RecordCipher(const RecordCipher&) = delete;
  RecordCipher& operator=(const RecordCipher&) = delete;

  static bool hasOcb(const OpenSsl& lib);
  // The length of a whole record by its head; 0: no record is that long.
  static size_t lengthOf(const char* record);
  // Encrypts the first `size` bytes of the parts to `record`; returns the record's length, 0 if OpenSSL fails.
  size_t seal(const iovec* parts, size_t size, char* record);
  // Decrypts a whole record to `text`; false: it was changed on the way, or is not the next one.
  bool open(const char* record, char* text);

 private:
  void useSecret();
  bool begin(const char* head);
  void count(size_t size);

  const OpenSsl& lib_;
  OpenSsl::CipherContext* context_;
  Digest secret_;
  const bool ocb_, seals_;
  const uint64_t rekeyAfter_;
  std::array<uint8_t, 12> iv_{};
  uint64_t record_ = 0, bytes_ = 0;  // under this key
};

}  // namespace elastic
