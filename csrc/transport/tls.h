// TLS 1.3 between two holders of the job's key (RFC 8446: external pre-shared key with ephemeral key exchange). No
// certificates. A process without the key can neither read nor intercept; a key leaked later does not decrypt recorded
// traffic.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "transport/openssl.h"
#include "transport/sha256.h"

namespace elastic {

// The job's key for all TLS connections of an endpoint. Any thread.
class TlsKey {
 public:
  // Throws std::runtime_error without OpenSSL.
  explicit TlsKey(const std::string& key);
  ~TlsKey();
  TlsKey(const TlsKey&) = delete;
  TlsKey& operator=(const TlsKey&) = delete;

 private:
  friend class Tls;
  static int use(OpenSsl::Ssl*, const OpenSsl::Digest*, const unsigned char**, size_t*, OpenSsl::Session**);
  static int find(OpenSsl::Ssl*, const unsigned char*, size_t, OpenSsl::Session**);
  static OpenSsl::Session* session(OpenSsl::Ssl* ssl);

  const OpenSsl& lib_;
  const Digest secret_;
  OpenSsl::Context* context_;
};

// The TLS state of one connection, in memory: the owner of the socket moves the bytes. One thread at a time.
class Tls {
 public:
  static constexpr uint64_t kRekeyAfter = uint64_t{1} << 36;  // bytes; AES-GCM allows 2^38 under one key

  // dials: the side that starts the handshake.
  Tls(std::shared_ptr<const TlsKey> key, bool dials, uint64_t rekeyAfter = kRekeyAfter);
  ~Tls();
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  // Encrypts; buffers data until the handshake is complete. False: the connection is broken.
  bool write(const void* data, size_t size);
  // Returns decrypted bytes; 0: needs more input; -1: the connection is broken.
  ssize_t read(void* data, size_t size);
  // Bytes received from the peer, and bytes to send to it.
  bool feed(const void* data, size_t size);
  size_t takeEncrypted(void* data, size_t size);
  bool hasOutput() const { return lib_.BIO_ctrl_pending(out_) > 0; }
  bool hasInput() const { return lib_.BIO_ctrl_pending(in_) > 0; }

 private:
  bool handshake();
  bool encrypt(const char* data, size_t size);

  const std::shared_ptr<const TlsKey> key_;
  const OpenSsl& lib_;
  OpenSsl::Ssl* ssl_;
  OpenSsl::Bio* in_;
  OpenSsl::Bio* out_;
  bool ready_ = false, broken_ = false;
  std::string beforeHandshake_;
  const uint64_t rekeyAfter_;
  uint64_t written_ = 0;
};

}  // namespace elastic
