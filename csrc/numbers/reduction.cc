#include "numbers/reduction.h"

#include <algorithm>
#include <cstring>

#include "numbers/half.h"

namespace elastic {
namespace {

void foldHalves(const Reduction& reduction, const std::vector<const char*>& parts, size_t count, char* out) {
  constexpr size_t kBlock = 2048;  // both blocks stay in the first-level cache
  float sum[kBlock], next[kBlock];
  const Fold fold = foldOf(DataType::kFloat32, reduction.op);
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t some = std::min(kBlock, count - at);
    widen(reduction.type, reinterpret_cast<const uint16_t*>(parts[0]) + at, sum, some);
    for (size_t r = 1; r < parts.size(); r++) {
      widen(reduction.type, reinterpret_cast<const uint16_t*>(parts[r]) + at, next, some);
      fold(sum, sum, next, some);
    }
    scaleResult(reduction, sum, some, DataType::kFloat32, static_cast<int>(parts.size()));
    narrow(reduction.type, sum, reinterpret_cast<uint16_t*>(out) + at, some);
  }
}

}  // namespace

std::vector<size_t> startsOf(const std::vector<size_t>& sizes) {
  std::vector<size_t> starts(sizes.size(), 0);
  for (size_t i = 1; i < sizes.size(); i++) starts[i] = starts[i - 1] + sizes[i - 1];
  return starts;
}

void foldParts(const Reduction& reduction, const std::vector<const char*>& parts, size_t count, char* scratch,
               char* out) {
  if (isHalf(reduction.type)) return foldHalves(reduction, parts, count, out);
  const Fold fold = foldOf(reduction.type, reduction.op);
  const char* left = parts[0];
  if (parts.size() == 1 && out != left) std::memcpy(out, left, count * widthOf(reduction.type));
  for (size_t r = 1; r < parts.size(); r++) {
    // Only the last step may write to `out`, which may be a part that is read later.
    char* const to = r + 1 == parts.size() ? out : scratch;
    fold(to, left, parts[r], count);
    left = to;
  }
  scaleResult(reduction, out, count, reduction.type, static_cast<int>(parts.size()));
}

void scaleResult(const Reduction& reduction, void* data, size_t count, DataType type, int size) {
  scale(data, count, type, reduction.after, reduction.op == ReduceOp::kAverage ? size : 1);
}

}  // namespace elastic
