// How a group fails: one cause, kept with the ranks at fault, and thrown to every waiter.
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

// Whatever the bytes are: those without sense become an abort that names the peer who sent them.
Failure decodeFailure(const std::vector<char>& body, int peer);

}  // namespace elastic
