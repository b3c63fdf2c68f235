#include "group.h"

#include <gloo/types.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "calls/adasum.h"
#include "numbers/half.h"

namespace elastic {
namespace {

constexpr uint8_t kOwnSlotPrefix = 0x40;  // not used by Gloo's algorithms

// Up to this many bytes bcube sums at least as fast as the ring, measured over sockets on one machine: with two or
// three processes the ring wins from 1 MB on; with four or more bcube wins up to 4 MB, by 1.0 to 2.2 times. Trying both
// in each world and keeping the faster one gained less than 5 %, and made two runs differ by rounding.
size_t bcubeLimit(int processes) { return processes < 4 ? size_t{512} << 10 : size_t{4} << 20; }

// Divides evenly; the first parts are longer if it does not divide.
std::vector<size_t> evenParts(size_t count, int size) {
  const auto parts = static_cast<size_t>(size);
  std::vector<size_t> counts(parts, count / parts);
  for (size_t r = 0; r < count % parts; r++) counts[r]++;
  return counts;
}

uint32_t hashOf(double factor) {
  uint64_t bits;
  std::memcpy(&bits, &factor, sizeof bits);
  return static_cast<uint32_t>((bits * 0x9e3779b97f4a7c15u) >> 32);
}

Call callOf(CallKind kind, size_t bytes, const Reduction& reduction) {
  Call call;
  call.kind = kind;
  call.bytes = bytes;
  // The factor on the operand may differ between ranks, the factor on the result may not.
  call.signature = reduction.shape ^ hashOf(reduction.after);
  call.type = reduction.type;
  call.op = reduction.op;
  call.wire = reduction.wire;
  call.algorithm = reduction.algorithm;
  return call;
}

Call callOf(CallKind kind, size_t bytes, uint32_t signature) {
  Call call;
  call.kind = kind;
  call.bytes = bytes;
  call.signature = signature;
  return call;
}

}  // namespace

struct Group::AllRanks : gloo::Context {
  AllRanks(int rank, int size, const std::shared_ptr<Mesh>& mesh) : gloo::Context(rank, size) {
    device_ = std::make_shared<Device>();
    transportContext_ = mesh;
    timeout_ = mesh->getTimeout();
  }
};

Group::Group(std::shared_ptr<Endpoint> endpoint, int rank, const std::vector<std::string>& peers, Fence fence,
             const GroupOptions& options)
    : rank_(rank),
      size_(static_cast<int>(peers.size())),
      fence_(fence),
      key_(endpoint->key()),
      local_(options.local),
      warn_(options.warn) {
  mesh_ = std::make_shared<Mesh>(std::move(endpoint), rank, peers, fence, options.timeout, options.closeTimeout,
                                 options.onWait, options.findAddresses);
  allRanks_ = std::make_shared<AllRanks>(rank, size_, mesh_);
}

Group::~Group() { close(); }

uint32_t Group::start(Call call) {
  if (!negotiated_ && !local_.empty()) negotiateHosts();
  call.number = tag_++;
  mesh_->enter(call);
  if (!local_.empty()) call_ = call;
  return call.number;
}

// Determines which ranks share memory, by collectives of all ranks.
void Group::negotiateHosts() {
  negotiated_ = true;
  if (size_ == 1) return;
  const auto gather = [this](const std::vector<char>& own) {
    const uint32_t tag = start(callOf(CallKind::kNegotiate, own.size(), 0u));
    std::vector<char> all(own.size() * static_cast<size_t>(size_));
    allgatherByGloo(allRanks_, own.data(), all.data(), std::vector<size_t>(static_cast<size_t>(size_), own.size()),
                    tag);
    std::vector<std::vector<char>> parts;
    for (auto at = all.begin(); at != all.end(); at += static_cast<ptrdiff_t>(own.size())) {
      parts.emplace_back(at, at + static_cast<ptrdiff_t>(own.size()));
    }
    return parts;
  };
  std::string why;
  std::shared_ptr<Hosts> hosts = Hosts::negotiate(mesh_, key_, fence_, local_, gather, why);
  if (!why.empty()) {
    std::string ranks;
    for (int rank : local_) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    warn_("ranks " + ranks + " of one host exchange through sockets, since rank " + std::to_string(rank_) +
          " has no shared memory: " + why);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  hosts_ = std::move(hosts);
}

std::shared_ptr<Hosts> Group::hosts() {
  std::lock_guard<std::mutex> lock(mutex_);
  return hosts_;
}

std::shared_ptr<Memory> Group::memory(size_t bytes) {
  mesh_->check();
  if (!negotiated_ && !local_.empty()) negotiateHosts();
  const auto hosts = this->hosts();
  const size_t some = std::max<size_t>(bytes, 1);
  auto taken = hosts ? hosts->memory(some) : nullptr;
  return taken ? taken : std::make_shared<Memory>(some);
}

Route Group::route(uint32_t tag) {
  std::vector<int> all(static_cast<size_t>(size_));
  std::iota(all.begin(), all.end(), 0);
  return {*mesh_, gloo::Slot::build(kOwnSlotPrefix, tag), std::move(all)};
}

void Group::allreduce(void* data, size_t count, const Reduction& reduction) {
  const uint32_t tag = start(callOf(CallKind::kAllreduce, count * widthOf(reduction.type), reduction));
  if (count == 0) return waitForAll(tag);
  scale(data, count, reduction.type, reduction.before, 1);
  if (reduction.wire != Wire::kPlain) return reducePacked(static_cast<float*>(data), count, reduction, tag);
  reduce(data, count, reduction, tag);
}

void Group::reduce(void* data, size_t count, const Reduction& reduction, uint32_t tag) {
  if (size_ == 1) return scaleResult(reduction, data, count, reduction.type, 1);
  if (reduction.op == ReduceOp::kAdasum) return reduceByAdasum(data, count, reduction, tag);
  const auto hosts = this->hosts();
  // On several hosts 16-bit floats go over the mesh between all ranks: in two levels they would be rounded at each host
  // as well as at the end, or travel as float32, twice the bytes.
  if (hosts && (hosts->isSingleHost() || !isHalf(reduction.type))) {
    const auto bySockets = [&](const GlooContext& leaders) { reduceBySockets(leaders, data, count, reduction, tag); };
    return hosts->allreduce(data, count, reduction, call_, bySockets);
  }
  if (isHalf(reduction.type)) return reduceDirectly(data, count, reduction, tag);
  reduceBySockets(allRanks_, data, count, reduction, tag);
  scaleResult(reduction, data, count, reduction.type, size_);
}

void Group::reduceBySockets(const GlooContext& context, void* data, size_t count, const Reduction& reduction,
                            uint32_t tag) {
  if (reduction.algorithm != Algorithm::kAuto) {
    return reduceByGloo(context, data, count, reduction, reduction.algorithm == Algorithm::kBcube, tag);
  }
  reduceByGloo(context, data, count, reduction, count * widthOf(reduction.type) <= bcubeLimit(context->size), tag);
}

// 16-bit floats: an algorithm that passes sums on would round them once at every rank.
void Group::reduceDirectly(void* data, size_t count, const Reduction& reduction, uint32_t tag) {
  reduceParts(route(tag), reduction, data, evenParts(count, size_), nullptr);
}

// Converts to 16-bit floats for sending. `before` has been applied in float32.
Reduction Group::pack(const float* data, size_t count, const Reduction& reduction) {
  if (count > packedRoom_) {
    packedRoom_ = 0;
    packed_.reset(new uint16_t[count]);
    packedRoom_ = count;
  }
  Reduction packed = reduction;
  packed.type = reduction.wire == Wire::kFloat16 ? DataType::kFloat16 : DataType::kBfloat16;
  narrow(packed.type, data, packed_.get(), count);
  return packed;
}

void Group::reducePacked(float* data, size_t count, const Reduction& reduction, uint32_t tag) {
  const auto hosts = this->hosts();
  if (hosts && !hosts->isSingleHost()) return reducePackedAcross(*hosts, data, count, reduction, tag);
  const Reduction packed = pack(data, count, reduction);
  reduce(packed_.get(), count, packed, tag);
  widen(packed.type, packed_.get(), data, count);
}

// Data is packed between hosts only; inside a host float32 is summed. Each host's part is scaled before it is packed:
// the sum over many ranks may exceed the range of 16 bits although the average does not.
void Group::reducePackedAcross(Hosts& hosts, float* data, size_t count, const Reduction& reduction, uint32_t tag) {
  const bool sums = reduction.op == ReduceOp::kSum || reduction.op == ReduceOp::kAverage;
  Reduction whole = reduction;
  if (sums) whole.op = ReduceOp::kSum;
  if (sums) whole.after = 1.0;
  hosts.allreduce(data, count, whole, call_, [&](const GlooContext& leaders) {
    if (sums) scaleResult(reduction, data, count, DataType::kFloat32, size_);
    Reduction packed = pack(data, count, whole);
    packed.after = 1.0;  // for other operations it is applied later, in float32
    Route way = route(tag);
    way.ranks = hosts.leaders();
    reduceParts(way, packed, packed_.get(), evenParts(count, leaders->size), nullptr);
    widen(packed.type, packed_.get(), data, count);
  });
}

void Group::reduceByAdasum(void* data, size_t count, const Reduction& reduction, uint32_t tag) {
  if (reduction.type == DataType::kFloat64) {
    adasum(route(tag), static_cast<double*>(data), count);
  } else if (reduction.type == DataType::kFloat32) {
    adasum(route(tag), static_cast<float*>(data), count);
  } else if (isHalf(reduction.type)) {
    std::vector<float> wide(count);
    widen(reduction.type, static_cast<uint16_t*>(data), wide.data(), count);
    adasum(route(tag), wide.data(), count);
    narrow(reduction.type, wide.data(), static_cast<uint16_t*>(data), count);
  } else {
    throw std::invalid_argument("adasum supports floating-point types only");
  }
  scaleResult(reduction, data, count, reduction.type, 1);
}

void Group::reducescatter(void* data, const std::vector<size_t>& counts, void* out, const Reduction& reduction) {
  const size_t count = std::accumulate(counts.begin(), counts.end(), size_t{0});
  const uint32_t tag = start(callOf(CallKind::kReducescatter, count * widthOf(reduction.type), reduction));
  if (count == 0) return waitForAll(tag);
  scale(data, count, reduction.type, reduction.before, 1);
  if (reduction.wire == Wire::kPlain) return reduceToParts(data, counts, out, reduction, tag);
  const Reduction packed = pack(static_cast<float*>(data), count, reduction);
  const size_t own = counts[static_cast<size_t>(rank_)];
  std::vector<uint16_t> part(own);
  reduceToParts(packed_.get(), counts, part.data(), packed, tag);
  widen(packed.type, part.data(), static_cast<float*>(out), own);
}

// On several hosts between all ranks, also where some share a host: in two levels it could not sum in rank order.
void Group::reduceToParts(void* data, const std::vector<size_t>& counts, void* out, const Reduction& reduction,
                          uint32_t tag) {
  const auto hosts = this->hosts();
  if (hosts && hosts->isSingleHost()) return hosts->reducescatter(data, counts, out, reduction, call_);
  reduceParts(route(tag), reduction, data, counts, out);
}

void Group::broadcast(void* data, size_t bytes, int root, uint32_t signature) {
  const uint32_t tag = start(callOf(CallKind::kBroadcast, bytes, signature));
  if (bytes == 0) return waitForAll(tag);
  const auto bySockets = [&](const GlooContext& context, int from) {
    broadcastByGloo(context, data, bytes, from, tag);
  };
  if (const auto hosts = this->hosts()) return hosts->broadcast(data, bytes, root, call_, bySockets);
  bySockets(allRanks_, root);
}

void Group::allgather(const void* in, void* out, const std::vector<size_t>& sizes, uint32_t signature) {
  const size_t bytes = std::accumulate(sizes.begin(), sizes.end(), size_t{0});
  const uint32_t tag = start(callOf(CallKind::kAllgather, bytes, signature));
  if (bytes == 0) return waitForAll(tag);
  const auto bySockets = [&](const GlooContext& context, const void* from, void* to, const std::vector<size_t>& parts) {
    allgatherByGloo(context, from, to, parts, tag);
  };
  if (const auto hosts = this->hosts()) return hosts->allgather(in, out, sizes, call_, bySockets);
  bySockets(allRanks_, in, out, sizes);
}

void Group::alltoall(const Parts& in, const Parts& out, uint32_t signature, bool agreed) {
  // Ranks may send different amounts.
  const Call call = callOf(CallKind::kAlltoall, 0, signature);
  uint32_t tag = start(call);
  const auto hosts = this->hosts();
  if (hosts && hosts->isSingleHost()) return hosts->alltoall(in, out, call_);
  if (!agreed) {
    std::vector<size_t> sizes(in.size()), sent(in.size());
    Parts own, theirs;
    for (size_t r = 0; r < in.size(); r++) {
      sizes[r] = in[r].bytes;
      own.push_back({reinterpret_cast<char*>(&sizes[r]), sizeof(size_t)});
      theirs.push_back({reinterpret_cast<char*>(&sent[r]), sizeof(size_t)});
    }
    elastic::alltoall(route(tag), own, theirs);
    for (size_t r = 0; r < sent.size(); r++) mesh_->requireSize(static_cast<int>(r), sent[r], out[r].bytes);
    tag = start(call);
  }
  elastic::alltoall(route(tag), in, out);
}

void Group::barrier() { waitForAll(start(callOf(CallKind::kBarrier, 0, 0u))); }

// Returns once all ranks have started the call `tag`.
void Group::waitForAll(uint32_t tag) {
  if (size_ == 1) return;
  const auto bySockets = [&](const GlooContext& context) { barrierByGloo(context, tag); };
  if (const auto hosts = this->hosts()) return hosts->barrier(call_, bySockets);
  bySockets(allRanks_);
}

void Group::abort(const std::string& reason) { mesh_->abort(Cause::kAborted, {}, reason); }

void Group::close() {
  mesh_->close();
  std::shared_ptr<Hosts> hosts;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    hosts.swap(hosts_);
  }
  if (hosts) hosts->close();  // a running collective keeps the memory until it has noticed
}

void Group::check() { mesh_->check(); }

}  // namespace elastic
