// TLS 1.3 between two holders of the job's key (RFC 8446: external pre-shared key with ephemeral key exchange). No
// certificates. A process without the key can neither read nor intercept; a key leaked later does not decrypt recorded
// traffic.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <utility>

#include "transport/openssl.h"
#include "transport/record_cipher.h"
#include "transport/sha256.h"

namespace elastic {

// The job's key for all TLS connections of an endpoint. Any thread.
class TlsKey {
 public:
  // Throws std::runtime_error without OpenSSL. ocb: where OpenSSL has it, and the other side's, too.
  explicit TlsKey(const std::string& key, bool ocb = true);
  ~TlsKey();
  TlsKey(const TlsKey&) = delete;
  TlsKey& operator=(const TlsKey&) = delete;

 private:
  friend class Tls;
  static int use(OpenSsl::Ssl*, const OpenSsl::Digest*, const unsigned char**, size_t*, OpenSsl::Session**);
  static int find(OpenSsl::Ssl*, const unsigned char*, size_t, OpenSsl::Session**);
  static int select(OpenSsl::Ssl*, const unsigned char**, unsigned char*, const unsigned char*, unsigned int, void*);
  static OpenSsl::Session* session(OpenSsl::Ssl* ssl);

  const OpenSsl& lib_;
  const Digest secret_;
  OpenSsl::Context* context_;
};

// Bytes on their way: those between `begin` and `end` of `data`. The owner makes room before it appends.
struct ByteQueue {
  std::unique_ptr<char[]> data;
  size_t capacity = 0, begin = 0, end = 0;

  size_t size() const { return end - begin; }
  const char* front() const { return data.get() + begin; }
  // Where `more` bytes can be appended.
  char* makeRoom(size_t more);
};

// The TLS state of one connection, in memory: the owner of the socket moves the bytes. TLS itself shakes hands; what
// follows are records (record_cipher.h). One thread at a time.
class Tls {
 public:
  // dials: the side that starts the handshake.
  Tls(std::shared_ptr<const TlsKey> key, bool dials, uint64_t rekeyAfter = RecordCipher::kRekeyAfter);
  ~Tls();
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  // Encrypts to `output`, which should be empty, and returns how many bytes of the parts it took; -1: the connection is
  // broken. Buffers all of them until the handshake is complete.
  ssize_t write(const iovec* parts, size_t count);
  // Returns decrypted bytes; 0: needs more input; -1: the connection is broken.
  ssize_t read(void* data, size_t size);
  // Where bytes of the peer go, how many at most, and how many came.
  std::pair<char*, size_t> inputRoom();
  bool feed(size_t size);
  // Bytes to send to the peer; who sent some of them moves its begin.
  ByteQueue& output();
  bool hasInput() const { return in_.size() > 0 || text_.size() > 0 || lib_.BIO_ctrl_pending(handshakeIn_) > 0; }
  bool ready() const { return seals_ != nullptr; }

 private:
  bool handshake();
  bool makeCiphers();
  ssize_t seal(const iovec* parts, size_t size);

  const std::shared_ptr<const TlsKey> key_;
  const OpenSsl& lib_;
  const bool dials_;
  const uint64_t rekeyAfter_;
  OpenSsl::Ssl* ssl_;
  OpenSsl::Bio* handshakeIn_;
  OpenSsl::Bio* handshakeOut_;
  bool broken_ = false;
  std::string beforeHandshake_;
  std::unique_ptr<RecordCipher> seals_, opens_;  // once the handshake is complete
  ByteQueue in_, out_;                           // encrypted
  ByteQueue text_;                               // of a record that is longer than what a reader asked for
};

}  // namespace elastic
