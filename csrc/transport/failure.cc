#include "transport/failure.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace elastic {
namespace {

constexpr size_t kLongestReason = 4096;  // bytes

// The text, cut to kLongestReason between two of its UTF-8 characters.
std::string shorten(const std::string& text) {
  size_t end = std::min(text.size(), kLongestReason);
  while (end > 0 && end < text.size() && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) end--;
  return text.substr(0, end);
}

}  // namespace

std::vector<char> encodeFailure(const Failure& failure) {
  std::vector<int32_t> numbers{static_cast<int32_t>(failure.cause), static_cast<int32_t>(failure.ranks.size())};
  numbers.insert(numbers.end(), failure.ranks.begin(), failure.ranks.end());
  const auto first = reinterpret_cast<const char*>(numbers.data());
  std::vector<char> body(first, first + numbers.size() * sizeof(int32_t));
  const std::string reason = shorten(failure.what());
  body.insert(body.end(), reason.begin(), reason.end());
  return body;
}

Failure decodeFailure(const std::vector<char>& body, int peer) {
  std::vector<int32_t> numbers(body.size() / sizeof(int32_t));
  if (!numbers.empty()) std::memcpy(numbers.data(), body.data(), numbers.size() * sizeof(int32_t));
  const bool sound = numbers.size() >= 2 && numbers[0] >= 0 && numbers[0] <= static_cast<int32_t>(Cause::kMismatch) &&
                     numbers[1] >= 0 && static_cast<size_t>(numbers[1]) <= numbers.size() - 2;
  if (!sound) return Failure(Cause::kAborted, {peer}, "rank " + std::to_string(peer) + " sent a malformed close frame");
  const ptrdiff_t text = 2 + numbers[1];
  return Failure(static_cast<Cause>(numbers[0]), std::vector<int>(numbers.begin() + 2, numbers.begin() + text),
                 std::string(body.begin() + text * static_cast<ptrdiff_t>(sizeof(int32_t)), body.end()));
}

}  // namespace elastic
