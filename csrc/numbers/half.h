// float16 and bfloat16 to and from float32: round to nearest even, by the processor's instructions if it has them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "numbers/numbers.h"

namespace elastic {

// `half` is kFloat16 or kBfloat16. A NaN becomes a quiet NaN; values that are too large become infinite.
void widen(DataType half, const uint16_t* in, float* out, size_t count);
void narrow(DataType half, const float* in, uint16_t* out, size_t count);

// The same bits without special instructions.
void widenPortably(DataType half, const uint16_t* in, float* out, size_t count);
void narrowPortably(DataType half, const float* in, uint16_t* out, size_t count);

}  // namespace elastic
