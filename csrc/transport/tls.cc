#include "transport/tls.h"

#include <algorithm>
#include <stdexcept>

namespace elastic {
namespace {

constexpr char kCipher[] = "TLS_AES_128_GCM_SHA256";
constexpr unsigned char kCipherId[] = {0x13, 0x01};
constexpr char kIdentity[] = "spark_elastic";  // the name of the only key; it is not secret
constexpr size_t kMaxRecord = size_t{1} << 20;

}  // namespace

TlsKey::TlsKey(const std::string& key) : lib_(OpenSsl::get()), secret_(hmacSha256(key, "tls between workers")) {
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

Tls::Tls(std::shared_ptr<const TlsKey> key, bool dials, uint64_t rekeyAfter)
    : key_(std::move(key)), lib_(key_->lib_), rekeyAfter_(rekeyAfter) {
  ssl_ = lib_.SSL_new(key_->context_);
  in_ = lib_.BIO_new(lib_.BIO_s_mem());
  out_ = lib_.BIO_new(lib_.BIO_s_mem());
  if (ssl_ == nullptr || in_ == nullptr || out_ == nullptr) {
    if (in_ != nullptr) lib_.BIO_free(in_);
    if (out_ != nullptr) lib_.BIO_free(out_);
    if (ssl_ != nullptr) lib_.SSL_free(ssl_);
    throw std::runtime_error("no memory for a connection's TLS");
  }
  lib_.SSL_set_bio(ssl_, in_, out_);  // takes ownership of both
  dials ? lib_.SSL_set_connect_state(ssl_) : lib_.SSL_set_accept_state(ssl_);
}

Tls::~Tls() { lib_.SSL_free(ssl_); }

// True once both sides have proved the key.
bool Tls::handshake() {
  if (ready_) return true;
  if (broken_) return false;
  lib_.ERR_clear_error();
  const int result = lib_.SSL_do_handshake(ssl_);
  if (result != 1) {
    broken_ = lib_.SSL_get_error(ssl_, result) != OpenSsl::kWantRead;
    return false;
  }
  ready_ = true;
  const std::string buffered = std::move(beforeHandshake_);
  return encrypt(buffered.data(), buffered.size());
}

bool Tls::encrypt(const char* data, size_t size) {
  while (size > 0 && !broken_) {
    lib_.ERR_clear_error();
    const int some = static_cast<int>(std::min(size, kMaxRecord));
    broken_ = lib_.SSL_write(ssl_, data, some) != some;  // a memory BIO accepts all bytes
    data += some;
    size -= static_cast<size_t>(some);
    written_ += static_cast<uint64_t>(some);
    if (broken_ || written_ < rekeyAfter_) continue;
    written_ = 0;
    broken_ = lib_.SSL_key_update(ssl_, OpenSsl::kUpdateNotRequested) != 1;
  }
  return !broken_;
}

bool Tls::write(const void* data, size_t size) {
  if (handshake()) return encrypt(static_cast<const char*>(data), size);
  beforeHandshake_.append(static_cast<const char*>(data), size);
  return !broken_;
}

ssize_t Tls::read(void* data, size_t size) {
  if (!handshake()) return broken_ ? -1 : 0;
  lib_.ERR_clear_error();
  const int got = lib_.SSL_read(ssl_, data, static_cast<int>(std::min(size, kMaxRecord)));
  if (got > 0) return got;
  broken_ = lib_.SSL_get_error(ssl_, got) != OpenSsl::kWantRead;
  return broken_ ? -1 : 0;
}

bool Tls::feed(const void* data, size_t size) {
  broken_ |= lib_.BIO_write(in_, data, static_cast<int>(size)) != static_cast<int>(size);
  return !broken_;
}

size_t Tls::takeEncrypted(void* data, size_t size) {
  const int got = lib_.BIO_read(out_, data, static_cast<int>(std::min(size, kMaxRecord)));
  return got > 0 ? static_cast<size_t>(got) : 0;
}

}  // namespace elastic
