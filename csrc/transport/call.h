// The collective that a rank is in. Every frame carries it, so that ranks that disagree detect it at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "numbers/reduction.h"

namespace elastic {

enum class CallKind : uint32_t {
  kNone,
  kAllreduce,
  kBroadcast,
  kAllgather,
  kBarrier,
  kReducescatter,
  kAlltoall,
  kNegotiate
};

struct Call {
  uint64_t bytes = 0;
  uint32_t number = 0;  // of the collective within its group
  CallKind kind = CallKind::kNone;
  // All following fields must be equal on all ranks.
  uint32_t signature = 0;  // of shape, type and the factor on the result, or the root
  DataType type = DataType::kBool;
  ReduceOp op = ReduceOp::kSum;
  Wire wire = Wire::kPlain;
  Algorithm algorithm = Algorithm::kAuto;

  bool operator==(const Call& o) const;
  // Whether two ranks disagree: the same number, but not the same call.
  bool conflicts(const Call& o) const;
  std::string text() const;
};

// Memory with what one rank sends to another one, or receives from it.
struct Part {
  char* data;
  size_t bytes;
};
using Parts = std::vector<Part>;  // by rank

// One sentence about two ranks that disagree.
std::string mismatchText(int rank, const Call& call, int other, const Call& theirs);

static_assert(sizeof(Call) == 24, "wire layout");

}  // namespace elastic
