// Which collective a rank is in; travels with every frame, so that ranks that call different ones learn it at once.
#pragma once

#include <cstdint>
#include <string>

namespace elastic {

enum class CallKind : uint32_t { kNone, kAllreduce, kBroadcast, kAllgather, kBarrier };

struct Call {
  uint64_t bytes = 0;
  uint32_t number = 0;  // of the collective within its group
  CallKind kind = CallKind::kNone;
  uint64_t details = 0;  // whatever else must be equal: type, operation and algorithm, or the root

  // Whether one group's ranks disagree: the same number, but not the same call.
  bool conflicts(const Call& o) const {
    return kind != CallKind::kNone && o.kind != CallKind::kNone && number == o.number &&
           (kind != o.kind || bytes != o.bytes || details != o.details);
  }

  std::string text() const {
    static const char* const names[] = {"nothing", "allreduce", "broadcast", "allgather", "barrier"};
    return std::string(kind <= CallKind::kBarrier ? names[static_cast<uint32_t>(kind)] : "something unknown") + " of " +
           std::to_string(bytes) + " bytes";
  }
};

static_assert(sizeof(Call) == 24, "wire layout");

}  // namespace elastic
