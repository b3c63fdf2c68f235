// The element types of reductions, and arithmetic on arrays of them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace elastic {

enum class DataType : uint8_t {
  kBool,
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kUint64,
  kInt64,
  kFloat16,
  kBfloat16,
  kFloat32,
  kFloat64
};
enum class ReduceOp : uint8_t { kSum, kAverage, kMin, kMax, kProduct, kAdasum };

size_t widthOf(DataType type);
const char* nameOf(DataType type);
const char* nameOf(ReduceOp op);
inline bool isHalf(DataType type) { return type == DataType::kFloat16 || type == DataType::kBfloat16; }

// out[i] = a[i] op b[i]; out may be a or b. Integers wrap around; the sum of bools is "or", their product "and"; the
// minimum and the maximum with a NaN are NaN. Averages combine as sums. Not for 16-bit floats, which combine as
// float32.
using Fold = void (*)(void* out, const void* a, const void* b, size_t count);
Fold foldOf(DataType type, ReduceOp op);

// data[i] * times / over, rounded once: to nearest for floats, towards zero and within range for integers.
void scale(void* data, size_t count, DataType type, double times, int over);

}  // namespace elastic
