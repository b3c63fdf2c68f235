#include "transport/call.h"

namespace elastic {

bool Call::operator==(const Call& o) const {
  return bytes == o.bytes && number == o.number && kind == o.kind && signature == o.signature && type == o.type &&
         op == o.op && wire == o.wire && algorithm == o.algorithm;
}

bool Call::conflicts(const Call& o) const {
  return kind != CallKind::kNone && o.kind != CallKind::kNone && number == o.number && !(*this == o);
}

std::string Call::text() const {
  static const char* const kinds[] = {"nothing", "allreduce",     "broadcast", "allgather",
                                      "barrier", "reducescatter", "alltoall",  "set-up"};
  static const char* const wires[] = {"", " as float16", " as bfloat16"};
  static const char* const algorithms[] = {"", " by ring", " by bcube"};
  std::string text = kind <= CallKind::kNegotiate ? kinds[static_cast<uint32_t>(kind)] : "something unknown";
  if (kind == CallKind::kBarrier) return text;
  const bool reduces = kind == CallKind::kAllreduce || kind == CallKind::kReducescatter;
  if (reduces) text += std::string(" (") + nameOf(op) + ", " + nameOf(type);
  if (reduces && wire <= Wire::kBfloat16) text += wires[static_cast<size_t>(wire)];
  if (reduces && algorithm <= Algorithm::kBcube) text += algorithms[static_cast<size_t>(algorithm)];
  return text + (reduces ? ") of " : " of ") + std::to_string(bytes) + " bytes";
}

std::string mismatchText(int rank, const Call& call, int other, const Call& theirs) {
  return "rank " + std::to_string(rank) + " called " + call.text() + " and rank " + std::to_string(other) + " called " +
         theirs.text() + (call.text() == theirs.text() ? " of another shape, root or factor on the result" : "") +
         ": all ranks must call the same collectives in the same order with the same arguments";
}

}  // namespace elastic
