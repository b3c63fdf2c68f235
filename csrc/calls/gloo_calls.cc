#include "calls/gloo_calls.h"

#include <gloo/allgatherv.h>
#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>

namespace elastic {

void reduceByGloo(const GlooContext& context, void* data, size_t count, const Reduction& reduction, bool bcube,
                  uint32_t tag) {
  gloo::AllreduceOptions options(context);
  options.setTag(tag);
  // Gloo needs the type for its width alone.
  switch (widthOf(reduction.type)) {
    case 1:
      options.setOutput(static_cast<uint8_t*>(data), count);
      break;
    case 2:
      options.setOutput(static_cast<uint16_t*>(data), count);
      break;
    case 4:
      options.setOutput(static_cast<uint32_t*>(data), count);
      break;
    default:
      options.setOutput(static_cast<uint64_t*>(data), count);
  }
  options.setReduceFunction(foldOf(reduction.type, reduction.op));
  options.setAlgorithm(bcube ? gloo::AllreduceOptions::Algorithm::BCUBE : gloo::AllreduceOptions::Algorithm::RING);
  gloo::allreduce(options);
}

void broadcastByGloo(const GlooContext& context, void* data, size_t bytes, int root, uint32_t tag) {
  gloo::BroadcastOptions options(context);
  options.setOutput(static_cast<char*>(data), bytes);
  options.setRoot(root);
  options.setTag(tag);
  gloo::broadcast(options);
}

void allgatherByGloo(const GlooContext& context, const void* in, void* out, const std::vector<size_t>& sizes,
                     uint32_t tag) {
  gloo::AllgathervOptions options(context);
  options.setInput(static_cast<char*>(const_cast<void*>(in)), sizes[static_cast<size_t>(context->rank)]);
  options.setOutput(static_cast<char*>(out), sizes);
  options.setTag(tag);
  gloo::allgatherv(options);
}

void barrierByGloo(const GlooContext& context, uint32_t tag) {
  gloo::BarrierOptions options(context);
  options.setTag(tag);
  gloo::barrier(options);
}

}  // namespace elastic
