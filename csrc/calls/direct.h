// Collectives in which every rank sends each other rank its part directly. Gloo has none for any transport.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "numbers/reduction.h"
#include "transport/call.h"
#include "transport/mesh.h"

namespace elastic {

// The ranks of a collective and its two slots, `slot` and `slot + 1`.
struct Route {
  Mesh& mesh;
  uint64_t slot;
  std::vector<int> ranks;  // members, in order
};

// Part r of `in` goes to rank r; what rank r sends becomes part r of `out`.
void alltoall(const Route& route, const Parts& in, const Parts& out);

// Reduces `data`, divided into parts of counts[r] elements, in rank order. The route's r-th rank gets part r of the
// result in `out`. If `out` is null, it gets it in `data` and sends it to all, so that every rank has the whole result,
// bit for bit as its owner computed it.
void reduceParts(const Route& route, const Reduction& reduction, void* data, const std::vector<size_t>& counts,
                 void* out);

}  // namespace elastic
