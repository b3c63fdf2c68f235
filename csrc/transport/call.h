// Which collective a rank is in; travels with every frame, so that ranks that call different ones learn it at once.
#pragma once

#include <cstdint>
#include <string>

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
  // Whatever else must be equal.
  uint32_t signature = 0;  // of shape, type and the factor on the result, or the root
  DataType type = DataType::kBool;
  ReduceOp op = ReduceOp::kSum;
  Wire wire = Wire::kPlain;
  Algorithm algorithm = Algorithm::kAuto;

  bool operator==(const Call& o) const;
  // Whether one group's ranks disagree: the same number, but not the same call.
  bool conflicts(const Call& o) const;
  std::string text() const;
};

// Two ranks that disagree, as a sentence.
std::string mismatchText(int rank, const Call& call, int other, const Call& theirs);

static_assert(sizeof(Call) == 24, "wire layout");

}  // namespace elastic
