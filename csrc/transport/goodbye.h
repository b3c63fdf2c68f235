// A failure as a frame's body: cause, number of ranks, ranks (int32 each), reason.
#pragma once

#include <vector>

#include "transport/failure.h"

namespace elastic {

std::vector<char> encodeGoodbye(const Failure& failure);

// Whatever the bytes are: those without sense become an abort that names the peer who sent them.
Failure decodeGoodbye(const std::vector<char>& body, int peer);

}  // namespace elastic
