// The failure of a group: one cause with the ranks at fault, thrown to every waiter, and its form in a close frame.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace elastic {

enum class Cause { kPeerLost = 0, kAborted = 1, kTimeout = 2, kMismatch = 3 };

class Failure : public std::runtime_error {
 public:
  Failure(Cause cause, std::vector<int> ranks, const std::string& reason)
      : std::runtime_error(reason), cause(cause), ranks(std::move(ranks)) {}

  const Cause cause;
  const std::vector<int> ranks;  // at fault, as far as known
};

std::vector<char> encodeFailure(const Failure& failure);

// Never throws on malformed bytes: they become an abort that names the peer.
Failure decodeFailure(const std::vector<char>& body, int peer);

}  // namespace elastic
