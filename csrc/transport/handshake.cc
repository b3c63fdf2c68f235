#include "transport/handshake.h"

#include <sys/random.h>

#include <cerrno>
#include <stdexcept>

namespace elastic {

Nonce makeNonce() {
  Nonce nonce;
  size_t have = 0;
  while (have < nonce.size()) {
    const ssize_t got = getrandom(nonce.data() + have, nonce.size() - have, 0);
    if (got < 0 && errno != EINTR) throw std::runtime_error("the kernel gives no random bytes");
    if (got > 0) have += static_cast<size_t>(got);
  }
  return nonce;
}

Digest computeMac(const std::string& key, const char* side, const Hello& hello, const Nonce& nonce) {
  std::string message(side);
  message.append(reinterpret_cast<const char*>(&hello), sizeof hello);
  message.append(reinterpret_cast<const char*>(nonce.data()), nonce.size());
  return hmacSha256(key, message);
}

}  // namespace elastic
