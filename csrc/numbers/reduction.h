// One reduction: what its ranks must agree on, and how the parts that they bring become one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "numbers/numbers.h"

namespace elastic {

enum class Wire : uint8_t { kPlain, kFloat16, kBfloat16 };  // how float32 travels
enum class Algorithm : uint8_t { kAuto, kRing, kBcube };

struct Reduction {
  DataType type = DataType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  Wire wire = Wire::kPlain;
  Algorithm algorithm = Algorithm::kAuto;
  double before = 1.0;  // factor on what each rank brings
  double after = 1.0;   // factor on the result
  uint32_t shape = 0;   // a hash of it
};

// out = parts[0] op parts[1] op ..., in this order whoever computes it, times `after` and over the number of parts
// where that is asked for. 16-bit floats are accumulated as float32 and rounded once. out may be one of the parts;
// scratch: room for `count` elements.
void foldParts(const Reduction& reduction, const std::vector<const char*>& parts, size_t count, char* scratch,
               char* out);

// What is left to do on a folded result: `after`, and the division of an average over `size` ranks.
void finish(const Reduction& reduction, void* data, size_t count, DataType type, int size);

}  // namespace elastic
