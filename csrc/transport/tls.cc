#include "transport/tls.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace elastic {
namespace {

constexpr char kCipher[] = "TLS_AES_128_GCM_SHA256";
constexpr unsigned char kCipherId[] = {0x13, 0x01};
constexpr char kIdentity[] = "spark_elastic";  // the name of the only key; it is not secret
constexpr unsigned char kOcb[] = {3, 'o', 'c', 'b'};  // a protocol's name as ALPN writes it (RFC 7301)
constexpr char kRecords[] = "EXPORTER-spark_elastic-records";
constexpr size_t kSmallQueue = size_t{1} << 13;  // bytes; of a connection that carries no long bodies
constexpr size_t kShort = size_t{1} << 12;       // bytes that share a record
constexpr size_t kShortRecord = 64;              // bytes: more than a frame's header takes

}  // namespace

TlsKey::TlsKey(const std::string& key, bool ocb) : lib_(OpenSsl::get()), secret_(hmacSha256(key, "tls between workers")) {
  context_ = lib_.SSL_CTX_new(lib_.TLS_method());
  if (context_ == nullptr || lib_.SSL_CTX_ctrl(context_, OpenSsl::kSetMinVersion, OpenSsl::kTls13, nullptr) != 1 ||
      lib_.SSL_CTX_set_ciphersuites(context_, kCipher) != 1 || lib_.SSL_CTX_set_num_tickets(context_, 0) != 1 ||
      lib_.SSL_CTX_set_ex_data(context_, 0, this) != 1) {
    if (context_ != nullptr) lib_.SSL_CTX_free(context_);
    throw std::runtime_error(std::string("this host's OpenSSL has no TLS 1.3 with ") + kCipher);
  }
  lib_.SSL_CTX_ctrl(context_, OpenSsl::kSetSessionCache, 0, nullptr);
  lib_.SSL_CTX_set_psk_use_session_callback(context_, &TlsKey::use);
  lib_.SSL_CTX_set_psk_find_session_callback(context_, &TlsKey::find);
  if (!ocb || !RecordCipher::hasOcb(lib_)) return;
  lib_.SSL_CTX_set_alpn_protos(context_, kOcb, sizeof kOcb);
  lib_.SSL_CTX_set_alpn_select_cb(context_, &TlsKey::select, nullptr);
}

TlsKey::~TlsKey() { lib_.SSL_CTX_free(context_); }

int TlsKey::use(OpenSsl::Ssl* ssl, const OpenSsl::Digest*, const unsigned char** id, size_t* length,
                OpenSsl::Session** made) {
  *made = session(ssl);
  *id = reinterpret_cast<const unsigned char*>(kIdentity);
  *length = sizeof kIdentity - 1;
  return *made != nullptr;
}

int TlsKey::find(OpenSsl::Ssl* ssl, const unsigned char*, size_t, OpenSsl::Session** made) {
  *made = session(ssl);
  return *made != nullptr;
}

// The acceptor's choice of what the dialer offers: both have OCB.
int TlsKey::select(OpenSsl::Ssl*, const unsigned char** out, unsigned char* size, const unsigned char* offered,
                   unsigned int length, void*) {
  if (length != sizeof kOcb || !std::equal(kOcb, kOcb + length, offered)) return OpenSsl::kNoProtocol;
  *out = kOcb + 1;
  *size = kOcb[0];
  return OpenSsl::kOk;
}

OpenSsl::Session* TlsKey::session(OpenSsl::Ssl* ssl) {
  const OpenSsl& lib = OpenSsl::get();
  const auto key = static_cast<const TlsKey*>(lib.SSL_CTX_get_ex_data(lib.SSL_get_SSL_CTX(ssl), 0));
  OpenSsl::Session* made = lib.SSL_SESSION_new();
  if (made == nullptr) return nullptr;
  const OpenSsl::Cipher* cipher = lib.SSL_CIPHER_find(ssl, kCipherId);
  if (cipher != nullptr && lib.SSL_SESSION_set1_master_key(made, key->secret_.data(), key->secret_.size()) == 1 &&
      lib.SSL_SESSION_set_cipher(made, cipher) == 1 &&
      lib.SSL_SESSION_set_protocol_version(made, OpenSsl::kTls13) == 1) {
    return made;
  }
  lib.SSL_SESSION_free(made);
  return nullptr;
}

char* ByteQueue::makeRoom(size_t more) {
  if (begin == end) begin = end = 0;
  if (end + more > capacity) {
    const size_t kept = size();
    if (kept + more > capacity) {
      capacity = std::max(kSmallQueue, kept + more);
      std::unique_ptr<char[]> larger(new char[capacity]);
      std::copy_n(front(), kept, larger.get());
      data = std::move(larger);
    } else {
      std::memmove(data.get(), front(), kept);
    }
    begin = 0;
    end = kept;
  }
  return data.get() + end;
}

Tls::Tls(std::shared_ptr<const TlsKey> key, bool dials, uint64_t rekeyAfter)
    : key_(std::move(key)), lib_(key_->lib_), dials_(dials), rekeyAfter_(rekeyAfter) {
  ssl_ = lib_.SSL_new(key_->context_);
  handshakeIn_ = lib_.BIO_new(lib_.BIO_s_mem());
  handshakeOut_ = lib_.BIO_new(lib_.BIO_s_mem());
  if (ssl_ == nullptr || handshakeIn_ == nullptr || handshakeOut_ == nullptr) {
    if (handshakeIn_ != nullptr) lib_.BIO_free(handshakeIn_);
    if (handshakeOut_ != nullptr) lib_.BIO_free(handshakeOut_);
    if (ssl_ != nullptr) lib_.SSL_free(ssl_);
    throw std::runtime_error("no memory for a connection's TLS");
  }
  lib_.SSL_set_bio(ssl_, handshakeIn_, handshakeOut_);  // takes ownership of both
  dials ? lib_.SSL_set_connect_state(ssl_) : lib_.SSL_set_accept_state(ssl_);
}

Tls::~Tls() { lib_.SSL_free(ssl_); }

// True once both sides have proved the key.
bool Tls::handshake() {
  if (ready()) return true;
  if (broken_) return false;
  lib_.ERR_clear_error();
  const int result = lib_.SSL_do_handshake(ssl_);
  if (result != 1) {
    broken_ = lib_.SSL_get_error(ssl_, result) != OpenSsl::kWantRead;
    return false;
  }
  output();  // the last bytes of the handshake go before the first record
  if (!makeCiphers()) {
    broken_ = true;
    return false;
  }
  // Records that came with the end of the peer's handshake.
  while (const size_t left = lib_.BIO_ctrl_pending(handshakeIn_)) {
    const int got = lib_.BIO_read(handshakeIn_, in_.makeRoom(left), static_cast<int>(left));
    if (got <= 0) break;
    in_.end += static_cast<size_t>(got);
  }
  const iovec buffered{beforeHandshake_.data(), beforeHandshake_.size()};
  if (buffered.iov_len > 0) seal(&buffered, buffered.iov_len);
  beforeHandshake_.clear();
  return !broken_;
}

// One secret for each direction, which nobody else has: both took part in this connection's own key exchange.
bool Tls::makeCiphers() {
  Digest secrets[2];
  static_assert(sizeof secrets == 64, "no gap between them");
  const auto bytes = reinterpret_cast<unsigned char*>(secrets);
  if (lib_.SSL_export_keying_material(ssl_, bytes, sizeof secrets, kRecords, sizeof kRecords - 1, nullptr, 0, 0) != 1)
    return false;
  const unsigned char* chosen = nullptr;
  unsigned int length = 0;
  lib_.SSL_get0_alpn_selected(ssl_, &chosen, &length);
  const bool ocb = length > 0;
  seals_ = std::make_unique<RecordCipher>(lib_, secrets[dials_ ? 0 : 1], ocb, true, rekeyAfter_);
  opens_ = std::make_unique<RecordCipher>(lib_, secrets[dials_ ? 1 : 0], ocb, false, rekeyAfter_);
  return true;
}

ssize_t Tls::seal(const iovec* parts, size_t size) {
  const size_t length = seals_->seal(parts, size, out_.makeRoom(RecordCipher::kHead + size + RecordCipher::kTag));
  broken_ |= length == 0;
  out_.end += length;
  return broken_ ? -1 : static_cast<ssize_t>(size);
}

ssize_t Tls::write(const iovec* parts, size_t count) {
  const bool shaken = handshake();
  if (broken_) return -1;
  size_t size = 0;
  for (size_t i = 0; i < count; i++) {
    size += parts[i].iov_len;
    if (!shaken) beforeHandshake_.append(static_cast<const char*>(parts[i].iov_base), parts[i].iov_len);
  }
  if (!shaken) return static_cast<ssize_t>(size);
  if (count == 1 || size <= kShort) return seal(parts, std::min(size, RecordCipher::kMaxText));
  // A long body has records of its own, which the peer decrypts to where it belongs.
  const size_t head = std::min(parts->iov_len, RecordCipher::kMaxText), body = parts[1].iov_len;
  if (seal(parts, head) < 0) return -1;
  const ssize_t some = seal(parts + 1, std::min(body, RecordCipher::kMaxText));
  return some < 0 ? -1 : static_cast<ssize_t>(head) + some;
}

ssize_t Tls::read(void* data, size_t size) {
  const bool shaken = handshake();
  if (broken_) return -1;
  if (!shaken) return 0;
  if (text_.size() == 0) {
    if (in_.size() < RecordCipher::kHead) return 0;
    const size_t length = RecordCipher::lengthOf(in_.front());
    if (length > in_.size()) return 0;
    const size_t text = length - RecordCipher::kHead - RecordCipher::kTag;
    broken_ = length == 0 || !opens_->open(in_.front(), text <= size ? static_cast<char*>(data) : text_.makeRoom(text));
    if (broken_) return -1;
    in_.begin += length;
    if (text <= size) return static_cast<ssize_t>(text);
    text_.end += text;
  }
  const size_t some = std::min(size, text_.size());
  std::memcpy(data, text_.front(), some);
  text_.begin += some;
  return static_cast<ssize_t>(some);
}

// Up to the end of the record that has begun to arrive, and of a short one behind it: what lies there has to be moved
// before the next.
std::pair<char*, size_t> Tls::inputRoom() {
  const size_t length = ready() && in_.size() >= RecordCipher::kHead ? RecordCipher::lengthOf(in_.front()) : 0;
  const size_t room = length > in_.size() ? length - in_.size() + kShortRecord : kShort;
  return {in_.makeRoom(room), room};
}

bool Tls::feed(size_t size) {
  if (ready()) {
    in_.end += size;
  } else {
    const auto given = static_cast<int>(size);
    broken_ |= lib_.BIO_write(handshakeIn_, in_.front(), given) != given;
  }
  return !broken_;
}

ByteQueue& Tls::output() {
  while (const size_t left = ready() ? 0 : lib_.BIO_ctrl_pending(handshakeOut_)) {
    const int got = lib_.BIO_read(handshakeOut_, out_.makeRoom(left), static_cast<int>(left));
    if (got <= 0) break;
    out_.end += static_cast<size_t>(got);
  }
  return out_;
}

}  // namespace elastic
