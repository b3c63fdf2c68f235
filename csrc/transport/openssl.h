// The functions of OpenSSL (1.1.1 and newer) that the mesh uses. They are looked up in the system's library at first
// use: the wheel does not link OpenSSL, and jobs without TLS do not need it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace elastic {

struct OpenSsl {
  struct Ssl;
  struct Context;
  struct Method;
  struct Cipher;
  struct Session;
  struct Bio;
  struct BioMethod;
  struct Digest;
  struct CipherContext;
  struct BlockCipher;
  struct Engine;
  using UseKey = int (*)(Ssl*, const Digest*, const unsigned char** id, size_t* length, Session**);
  using SelectProtocol = int (*)(Ssl*, const unsigned char** out, unsigned char* size, const unsigned char* offered,
                                 unsigned int length, void*);
  using FindKey = int (*)(Ssl*, const unsigned char* id, size_t length, Session**);

  static constexpr int kTls13 = 0x0304;
  static constexpr int kSetMinVersion = 123, kSetSessionCache = 44;  // for SSL_CTX_ctrl
  static constexpr int kWantRead = 2;                                // of SSL_get_error
  static constexpr int kGetTag = 0x10, kSetTag = 0x11;               // for EVP_CIPHER_CTX_ctrl
  static constexpr int kOk = 0, kNoProtocol = 3;                     // of SelectProtocol

  const Method* (*TLS_method)();
  Context* (*SSL_CTX_new)(const Method*);
  void (*SSL_CTX_free)(Context*);
  long (*SSL_CTX_ctrl)(Context*, int, long, void*);
  int (*SSL_CTX_set_ciphersuites)(Context*, const char*);
  int (*SSL_CTX_set_num_tickets)(Context*, size_t);
  int (*SSL_CTX_set_ex_data)(Context*, int, void*);
  void* (*SSL_CTX_get_ex_data)(const Context*, int);
  void (*SSL_CTX_set_psk_use_session_callback)(Context*, UseKey);
  void (*SSL_CTX_set_psk_find_session_callback)(Context*, FindKey);
  int (*SSL_CTX_set_alpn_protos)(Context*, const unsigned char*, unsigned int);
  void (*SSL_CTX_set_alpn_select_cb)(Context*, SelectProtocol, void*);
  void (*SSL_get0_alpn_selected)(const Ssl*, const unsigned char**, unsigned int*);
  Ssl* (*SSL_new)(Context*);
  void (*SSL_free)(Ssl*);
  Context* (*SSL_get_SSL_CTX)(const Ssl*);
  void (*SSL_set_bio)(Ssl*, Bio*, Bio*);
  void (*SSL_set_connect_state)(Ssl*);
  void (*SSL_set_accept_state)(Ssl*);
  int (*SSL_do_handshake)(Ssl*);
  int (*SSL_get_error)(const Ssl*, int);
  int (*SSL_export_keying_material)(Ssl*, unsigned char* out, size_t size, const char* label, size_t length,
                                    const unsigned char* context, size_t contextSize, int useContext);
  const Cipher* (*SSL_CIPHER_find)(Ssl*, const unsigned char*);
  Session* (*SSL_SESSION_new)();
  void (*SSL_SESSION_free)(Session*);
  int (*SSL_SESSION_set1_master_key)(Session*, const unsigned char*, size_t);
  int (*SSL_SESSION_set_cipher)(Session*, const Cipher*);
  int (*SSL_SESSION_set_protocol_version)(Session*, int);
  Bio* (*BIO_new)(const BioMethod*);
  const BioMethod* (*BIO_s_mem)();
  int (*BIO_free)(Bio*);
  int (*BIO_read)(Bio*, void*, int);
  int (*BIO_write)(Bio*, const void*, int);
  size_t (*BIO_ctrl_pending)(Bio*);
  CipherContext* (*EVP_CIPHER_CTX_new)();
  void (*EVP_CIPHER_CTX_free)(CipherContext*);
  const BlockCipher* (*EVP_aes_128_gcm)();
  const BlockCipher* (*EVP_aes_128_ocb)();  // null where OpenSSL was built without it
  int (*EVP_CipherInit_ex)(CipherContext*, const BlockCipher*, Engine*, const unsigned char* key,
                           const unsigned char* nonce, int encrypts);
  int (*EVP_CipherUpdate)(CipherContext*, unsigned char* out, int* size, const unsigned char* in, int length);
  int (*EVP_CipherFinal_ex)(CipherContext*, unsigned char* out, int* size);
  int (*EVP_CIPHER_CTX_ctrl)(CipherContext*, int, int, void*);
  void (*ERR_clear_error)();

  // Throws std::runtime_error if the system has no such library.
  static const OpenSsl& get();
};

}  // namespace elastic
