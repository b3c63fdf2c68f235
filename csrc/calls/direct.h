// Collectives in which every rank sends each other rank its part directly: what Gloo has no form of for any transport.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "numbers/reduction.h"
#include "transport/mesh.h"

namespace elastic {

// Where a collective's own frames go: two slots, `slot` and `slot + 1`, belong to it.
struct Route {
  Mesh& mesh;
  uint64_t slot;
  std::vector<int> ranks;  // those that take part, in order
};

// Part r of `in` (inSizes[r] bytes) goes to rank r; what rank r sends (outSizes[r] bytes) becomes part r of `out`.
void alltoall(const Route& route, const void* in, const std::vector<size_t>& inSizes, void* out,
              const std::vector<size_t>& outSizes);

// Reduces `data`, cut into parts of counts[r] elements, in rank order; part r of the result comes to be at the route's
// r-th rank, which puts it into `out`. With `out` null: into its place in `data`, and from there to all, so that every
// rank has the whole result, with the bits that the owner stored.
void reduceParts(const Route& route, const Reduction& reduction, void* data, const std::vector<size_t>& counts,
                 void* out);

}  // namespace elastic
