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
  using UseKey = int (*)(Ssl*, const Digest*, const unsigned char** id, size_t* length, Session**);
  using FindKey = int (*)(Ssl*, const unsigned char* id, size_t length, Session**);

  static constexpr int kTls13 = 0x0304;
  static constexpr int kSetMinVersion = 123, kSetSessionCache = 44;  // for SSL_CTX_ctrl
  static constexpr int kWantRead = 2;                                // of SSL_get_error
  static constexpr int kUpdateNotRequested = 0;                      // for SSL_key_update

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
  Ssl* (*SSL_new)(Context*);
  void (*SSL_free)(Ssl*);
  Context* (*SSL_get_SSL_CTX)(const Ssl*);
  void (*SSL_set_bio)(Ssl*, Bio*, Bio*);
  void (*SSL_set_connect_state)(Ssl*);
  void (*SSL_set_accept_state)(Ssl*);
  int (*SSL_do_handshake)(Ssl*);
  int (*SSL_read)(Ssl*, void*, int);
  int (*SSL_write)(Ssl*, const void*, int);
  int (*SSL_get_error)(const Ssl*, int);
  int (*SSL_key_update)(Ssl*, int);
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
  void (*ERR_clear_error)();

  // Throws std::runtime_error if the system has no such library.
  static const OpenSsl& get();
};

}  // namespace elastic
