// "host:port" and "[v6]:port" as text, and as what the kernel takes.
#pragma once

#include <sys/socket.h>

#include <string>

namespace elastic {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
};

// Resolves a host (name or literal). Throws std::invalid_argument with a sentence.
SocketAddress resolve(const std::string& host, int port);

// Splits "host:port" or "[v6]:port". Throws std::invalid_argument.
SocketAddress parseAddress(const std::string& text);

std::string formatAddress(const std::string& host, int port);

}  // namespace elastic
