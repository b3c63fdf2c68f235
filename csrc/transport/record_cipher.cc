#include "transport/record_cipher.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace elastic {
namespace {

const unsigned char* bytesOf(const char* data) { return reinterpret_cast<const unsigned char*>(data); }
unsigned char* bytesOf(char* data) { return reinterpret_cast<unsigned char*>(data); }

std::string keyOf(const Digest& secret) { return {secret.begin(), secret.end()}; }

}  // namespace

RecordCipher::RecordCipher(const OpenSsl& lib, const Digest& secret, bool ocb, bool seals, uint64_t rekeyAfter)
    : lib_(lib),
      context_(lib.EVP_CIPHER_CTX_new()),
      secret_(secret),
      ocb_(ocb),
      seals_(seals),
      rekeyAfter_(rekeyAfter) {
  if (context_ == nullptr) throw std::runtime_error("no memory for a connection's cipher");
  useSecret();
}

RecordCipher::~RecordCipher() { lib_.EVP_CIPHER_CTX_free(context_); }

bool RecordCipher::hasOcb(const OpenSsl& lib) {
  if (lib.EVP_aes_128_ocb == nullptr) return false;
  OpenSsl::CipherContext* const context = lib.EVP_CIPHER_CTX_new();
  const unsigned char key[16]{};
  const bool has = context != nullptr &&
                   lib.EVP_CipherInit_ex(context, lib.EVP_aes_128_ocb(), nullptr, key, nullptr, 1) == 1;
  lib.EVP_CIPHER_CTX_free(context);
  return has;
}

void RecordCipher::useSecret() {
  const Digest key = hmacSha256(keyOf(secret_), "key"), iv = hmacSha256(keyOf(secret_), "iv");
  std::copy_n(iv.begin(), iv_.size(), iv_.begin());
  const OpenSsl::BlockCipher* const mode = ocb_ ? lib_.EVP_aes_128_ocb() : lib_.EVP_aes_128_gcm();
  if (lib_.EVP_CipherInit_ex(context_, mode, nullptr, key.data(), nullptr, seals_) != 1)
    throw std::runtime_error("this host's OpenSSL has no AES-128-GCM");
}

size_t RecordCipher::lengthOf(const char* record) {
  uint32_t size;
  std::memcpy(&size, record, sizeof size);
  return size == 0 || size > kMaxText ? 0 : kHead + size + kTag;
}

// The nonce is the record's number, hidden by the key's own vector.
bool RecordCipher::begin(const char* head) {
  std::array<uint8_t, 12> nonce = iv_;
  for (size_t i = 0; i < sizeof record_; i++) nonce[nonce.size() - 1 - i] ^= static_cast<uint8_t>(record_ >> (8 * i));
  record_++;
  int done = 0;
  return lib_.EVP_CipherInit_ex(context_, nullptr, nullptr, nullptr, nonce.data(), seals_) == 1 &&
         lib_.EVP_CipherUpdate(context_, nullptr, &done, bytesOf(head), kHead) == 1;
}

size_t RecordCipher::seal(const iovec* parts, size_t size, char* record) {
  const auto length = static_cast<uint32_t>(size);
  std::memcpy(record, &length, sizeof length);
  if (!begin(record)) return 0;
  char* to = record + kHead;
  int done = 0;
  for (size_t left = size; left > 0; parts++) {
    const size_t some = std::min(left, parts->iov_len);
    const auto from = static_cast<const char*>(parts->iov_base);
    if (some == 0) continue;
    if (lib_.EVP_CipherUpdate(context_, bytesOf(to), &done, bytesOf(from), static_cast<int>(some)) != 1) return 0;
    to += done;  // whole blocks; OCB keeps the rest
    left -= some;
  }
  if (lib_.EVP_CipherFinal_ex(context_, bytesOf(to), &done) != 1 ||
      lib_.EVP_CIPHER_CTX_ctrl(context_, OpenSsl::kGetTag, kTag, record + kHead + size) != 1) {
    return 0;
  }
  count(size);
  return kHead + size + kTag;
}

bool RecordCipher::open(const char* record, char* text) {
  const size_t size = lengthOf(record) - kHead - kTag;
  char* const tag = const_cast<char*>(record) + kHead + size;
  int done = 0;
  if (!begin(record) ||
      lib_.EVP_CipherUpdate(context_, bytesOf(text), &done, bytesOf(record + kHead), static_cast<int>(size)) != 1 ||
      lib_.EVP_CIPHER_CTX_ctrl(context_, OpenSsl::kSetTag, kTag, tag) != 1 ||
      lib_.EVP_CipherFinal_ex(context_, bytesOf(text) + done, &done) != 1) {
    return false;
  }
  count(size);
  return true;
}

void RecordCipher::count(size_t size) {
  bytes_ += size;
  if (bytes_ < rekeyAfter_) return;
  secret_ = hmacSha256(keyOf(secret_), "next");
  record_ = bytes_ = 0;
  useSecret();
}

}  // namespace elastic
