// One reduction: the options that its ranks must agree on, and the arithmetic that combines their parts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "numbers/numbers.h"

namespace elastic {

enum class Wire : uint8_t { kPlain, kFloat16, kBfloat16 };  // how float32 is sent
enum class Algorithm : uint8_t { kAuto, kRing, kBcube };

struct Reduction {
  DataType type = DataType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  Wire wire = Wire::kPlain;
  Algorithm algorithm = Algorithm::kAuto;
  double before = 1.0;  // factor on each rank's operand
  double after = 1.0;   // factor on the result
  uint32_t shape = 0;   // hash of the shape
};

// Offsets of contiguous parts.
std::vector<size_t> startsOf(const std::vector<size_t>& sizes);

// out = parts[0] op parts[1] op ..., in this order on every rank, times `after` and, for an average, divided by the
// number of parts. 16-bit floats are accumulated as float32 and rounded once. out may be one of the parts; scratch:
// room for `count` elements.
void foldParts(const Reduction& reduction, const std::vector<const char*>& parts, size_t count, char* scratch,
               char* out);

// Applies to a combined result `after` and, for an average over `size` ranks, the division.
void scaleResult(const Reduction& reduction, void* data, size_t count, DataType type, int size);

}  // namespace elastic
