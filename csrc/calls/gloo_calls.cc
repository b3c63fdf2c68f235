#include "calls/gloo_calls.h"

#include <gloo/allgatherv.h>
#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/types.h>

#include <algorithm>
#include <cstring>

#include "transport/pair.h"

namespace elastic {
namespace {

// Parts go round the ring in pieces of one frame, and each rank passes a piece on as soon as it has it. Gloo passes on
// whole parts: while a rank receives a large one, those behind it would hear nothing, and their waits might time out.
void allgatherInPieces(const GlooContext& context, const void* in, char* out, const std::vector<size_t>& sizes,
                       uint32_t tag) {
  const size_t size = sizes.size(), me = static_cast<size_t>(context->rank);
  const int next = static_cast<int>((me + 1) % size), previous = static_cast<int>((me + size - 1) % size);
  const size_t longest = *std::max_element(sizes.begin(), sizes.end());
  const uint64_t slot = gloo::Slot::build(gloo::kAllgatherSlotPrefix, tag);
  const std::vector<size_t> starts = startsOf(sizes);
  if (sizes[me] > 0 && out + starts[me] != in) std::memcpy(out + starts[me], in, sizes[me]);
  const auto buffer = context->createUnboundBuffer(out, starts.back() + sizes.back());
  // Calls visit() for each piece in the order in which pieces reach and leave this rank; hops: from its owner to here.
  const auto visitPieces = [&](const auto& visit) {
    for (size_t at = 0; at < longest; at += kMaxFrame) {
      for (size_t hops = 0; hops < size; hops++) {
        const size_t part = (me + size - hops) % size;
        // Of an empty part one empty piece goes round: each rank waits for all.
        if (at == 0 || at < sizes[part]) visit(hops, starts[part] + at, std::min(kMaxFrame, sizes[part] - at));
      }
    }
  };
  visitPieces([&](size_t hops, size_t at, size_t bytes) {
    if (hops > 0) buffer->recv(previous, slot, at, bytes);
  });
  size_t needed = 0, came = 0, toSend = 0;
  visitPieces([&](size_t hops, size_t at, size_t bytes) {
    if (hops > 0) needed++;
    if (hops == size - 1) return;
    for (; came < needed; came++) buffer->waitRecv();
    buffer->send(next, slot, at, bytes);
    toSend++;
  });
  for (; came < needed; came++) buffer->waitRecv();
  for (; toSend > 0; toSend--) buffer->waitSend();
}

}  // namespace

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
  if (*std::max_element(sizes.begin(), sizes.end()) > kMaxFrame) {
    return allgatherInPieces(context, in, static_cast<char*>(out), sizes, tag);
  }
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
