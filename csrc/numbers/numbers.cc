#include "numbers/numbers.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "numbers/half.h"

namespace elastic {
namespace {

// Unsigned and at least as wide as int, so that sums do not overflow; floats stay unchanged.
template <typename T, bool = std::is_integral<T>::value>
struct Arithmetic {
  using Type = T;
};
template <typename T>
struct Arithmetic<T, true> {
  using Type = std::conditional_t<sizeof(T) < sizeof(unsigned), unsigned, std::make_unsigned_t<T>>;
};

struct Sum {
  template <typename T>
  static T of(T a, T b) {
    using Wide = typename Arithmetic<T>::Type;
    return static_cast<T>(static_cast<Wide>(a) + static_cast<Wide>(b));
  }
};

struct Product {
  template <typename T>
  static T of(T a, T b) {
    using Wide = typename Arithmetic<T>::Type;
    return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b));
  }
};

struct Min {
  template <typename T>
  static T of(T a, T b) {
    return a < b || a != a ? a : b;
  }
};

struct Max {
  template <typename T>
  static T of(T a, T b) {
    return a > b || a != a ? a : b;
  }
};

struct Or {
  static uint8_t of(uint8_t a, uint8_t b) { return (a | b) != 0; }
};

struct And {
  static uint8_t of(uint8_t a, uint8_t b) { return a != 0 && b != 0; }
};

template <typename T, typename Op>
void fold(void* out, const void* a, const void* b, size_t count) {
  const auto to = static_cast<T*>(out);
  const auto left = static_cast<const T*>(a), right = static_cast<const T*>(b);
  for (size_t i = 0; i < count; i++) to[i] = Op::of(left[i], right[i]);
}

template <typename T>
Fold foldOfType(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return &fold<T, Sum>;
    case ReduceOp::kMin:
      return &fold<T, Min>;
    case ReduceOp::kMax:
      return &fold<T, Max>;
    case ReduceOp::kProduct:
      return &fold<T, Product>;
    case ReduceOp::kAdasum:
      break;
  }
  throw std::invalid_argument("no element-wise reduction");
}

template <typename T>
T toInteger(double value) {
  // As a double a bound may be one above the type's range, where the cast would be undefined.
  if (!(value > static_cast<double>(std::numeric_limits<T>::min()))) return std::numeric_limits<T>::min();
  if (value >= static_cast<double>(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  return static_cast<T>(value);
}

template <typename T>
void scaleType(void* data, size_t count, double times, int over) {
  const auto values = static_cast<T*>(data);
  if constexpr (std::is_integral<T>::value) {
    if (times == 1.0) {                         // exact, also beyond 2^53
      using Wide = std::common_type_t<T, int>;  // 8 bits may be too few for the world's size
      for (size_t i = 0; i < count; i++) values[i] = static_cast<T>(values[i] / static_cast<Wide>(over));
      return;
    }
    for (size_t i = 0; i < count; i++) values[i] = toInteger<T>(static_cast<double>(values[i]) * times / over);
  } else {
    const double factor = times / over;
    for (size_t i = 0; i < count; i++) values[i] = static_cast<T>(static_cast<double>(values[i]) * factor);
  }
}

void scaleHalf(void* data, size_t count, DataType type, double times, int over) {
  constexpr size_t kBlock = 1024;
  float block[kBlock];
  const auto halves = static_cast<uint16_t*>(data);
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t some = std::min(kBlock, count - at);
    widen(type, halves + at, block, some);
    scaleType<float>(block, some, times, over);
    narrow(type, block, halves + at, some);
  }
}

// Calls `use` with a null pointer of the type that the tag stands for.
template <typename Use>
auto withType(DataType type, Use use) {
  switch (type) {
    case DataType::kUint8:
      return use(static_cast<uint8_t*>(nullptr));
    case DataType::kInt8:
      return use(static_cast<int8_t*>(nullptr));
    case DataType::kUint16:
      return use(static_cast<uint16_t*>(nullptr));
    case DataType::kInt16:
      return use(static_cast<int16_t*>(nullptr));
    case DataType::kUint32:
      return use(static_cast<uint32_t*>(nullptr));
    case DataType::kInt32:
      return use(static_cast<int32_t*>(nullptr));
    case DataType::kUint64:
      return use(static_cast<uint64_t*>(nullptr));
    case DataType::kInt64:
      return use(static_cast<int64_t*>(nullptr));
    case DataType::kFloat32:
      return use(static_cast<float*>(nullptr));
    case DataType::kFloat64:
      return use(static_cast<double*>(nullptr));
    default:
      throw std::invalid_argument(std::string("no arithmetic of its own: ") + nameOf(type));
  }
}

}  // namespace

size_t widthOf(DataType type) {
  static const size_t widths[] = {1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8};
  return widths[static_cast<size_t>(type)];
}

const char* nameOf(DataType type) {
  static const char* const names[] = {"bool",   "uint8", "int8",    "uint16",   "int16",   "uint32", "int32",
                                      "uint64", "int64", "float16", "bfloat16", "float32", "float64"};
  return type <= DataType::kFloat64 ? names[static_cast<size_t>(type)] : "unknown";
}

const char* nameOf(ReduceOp op) {
  static const char* const names[] = {"sum", "average", "min", "max", "product", "adasum"};
  return op <= ReduceOp::kAdasum ? names[static_cast<size_t>(op)] : "unknown";
}

Fold foldOf(DataType type, ReduceOp op) {
  if (type == DataType::kBool) {
    return op == ReduceOp::kMin || op == ReduceOp::kProduct ? &fold<uint8_t, And> : &fold<uint8_t, Or>;
  }
  return withType(type, [op](auto* of) { return foldOfType<std::remove_pointer_t<decltype(of)>>(op); });
}

void scale(void* data, size_t count, DataType type, double times, int over) {
  if (times == 1.0 && over == 1) return;
  if (isHalf(type)) return scaleHalf(data, count, type, times, over);
  withType(type, [=](auto* of) { scaleType<std::remove_pointer_t<decltype(of)>>(data, count, times, over); });
}

}  // namespace elastic
