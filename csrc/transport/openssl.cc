#include "transport/openssl.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace elastic {
namespace {

// The names that distributions give it. A library that the process has loaded already, such as Python's, is used.
void* library() {
  for (const char* name : {"libssl.so.3", "libssl.so.1.1", "libssl.so"}) {
    if (void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return handle;
  }
  throw std::runtime_error(
      "TLS between workers needs OpenSSL, and there is no libssl.so.3 or libssl.so.1.1: install it on this host");
}

template <typename Function>
void find(void* handle, const char* name, Function& function) {
  void* found = dlsym(handle, name);  // also searches the libraries that it depends on
  if (found == nullptr) {
    throw std::runtime_error(std::string("TLS between workers needs OpenSSL 1.1.1 or newer; this one has no ") + name);
  }
  function = reinterpret_cast<Function>(found);
}

OpenSsl load() {
  OpenSsl all{};
  void* const handle = library();
#define FIND(name) find(handle, #name, all.name)
  FIND(TLS_method);
  FIND(SSL_CTX_new);
  FIND(SSL_CTX_free);
  FIND(SSL_CTX_ctrl);
  FIND(SSL_CTX_set_ciphersuites);
  FIND(SSL_CTX_set_num_tickets);
  FIND(SSL_CTX_set_ex_data);
  FIND(SSL_CTX_get_ex_data);
  FIND(SSL_CTX_set_psk_use_session_callback);
  FIND(SSL_CTX_set_psk_find_session_callback);
  FIND(SSL_CTX_set_alpn_protos);
  FIND(SSL_CTX_set_alpn_select_cb);
  FIND(SSL_get0_alpn_selected);
  FIND(SSL_new);
  FIND(SSL_free);
  FIND(SSL_get_SSL_CTX);
  FIND(SSL_set_bio);
  FIND(SSL_set_connect_state);
  FIND(SSL_set_accept_state);
  FIND(SSL_do_handshake);
  FIND(SSL_get_error);
  FIND(SSL_export_keying_material);
  FIND(SSL_CIPHER_find);
  FIND(SSL_SESSION_new);
  FIND(SSL_SESSION_free);
  FIND(SSL_SESSION_set1_master_key);
  FIND(SSL_SESSION_set_cipher);
  FIND(SSL_SESSION_set_protocol_version);
  FIND(BIO_new);
  FIND(BIO_s_mem);
  FIND(BIO_free);
  FIND(BIO_read);
  FIND(BIO_write);
  FIND(BIO_ctrl_pending);
  FIND(EVP_CIPHER_CTX_new);
  FIND(EVP_CIPHER_CTX_free);
  FIND(EVP_aes_128_gcm);
  FIND(EVP_CipherInit_ex);
  FIND(EVP_CipherUpdate);
  FIND(EVP_CipherFinal_ex);
  FIND(EVP_CIPHER_CTX_ctrl);
  FIND(ERR_clear_error);
#undef FIND
  all.EVP_aes_128_ocb = reinterpret_cast<decltype(all.EVP_aes_128_ocb)>(dlsym(handle, "EVP_aes_128_ocb"));
  return all;
}

}  // namespace

const OpenSsl& OpenSsl::get() {
  static const OpenSsl all = load();
  return all;
}

}  // namespace elastic
