// The collectives that Gloo has algorithms for, among the ranks of a context; tags are distinct among those that run at
// the same time.
#pragma once

#include <gloo/context.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "numbers/reduction.h"

namespace elastic {

using GlooContext = std::shared_ptr<gloo::Context>;

// In place, without what scaleResult() does. bcube: for small data, else the ring.
void reduceByGloo(const GlooContext& context, void* data, size_t count, const Reduction& reduction, bool bcube,
                  uint32_t tag);
void broadcastByGloo(const GlooContext& context, void* data, size_t bytes, int root, uint32_t tag);
// out: the parts of all ranks in rank order; sizes[r] bytes each.
void allgatherByGloo(const GlooContext& context, const void* in, void* out, const std::vector<size_t>& sizes,
                     uint32_t tag);
void barrierByGloo(const GlooContext& context, uint32_t tag);

}  // namespace elastic
