#include "calls/hosts.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "calls/leaders.h"

namespace elastic {

Hosts::Hosts(const std::shared_ptr<Mesh>& mesh, Level level, std::unique_ptr<LocalGroup> local)
    : level_(std::move(level)), local_(std::move(local)) {
  if (level_.hosts.size() > 1 && level_.member == 0) leaders_ = worldOf(mesh, leaders());
}

std::vector<int> Hosts::leaders() const {
  std::vector<int> ranks;
  for (const auto& host : level_.hosts) ranks.push_back(host.front());
  return ranks;
}

void Hosts::close() {
  if (local_) local_->close();
}

// A leader's turn with the other hosts.
void Hosts::cross(Away away, const std::function<void()>& run) {
  if (!leaders_) return;
  struct Trip {
    LocalGroup* local;
    Trip(LocalGroup* local, Away away) : local(local) {
      if (local != nullptr) local->setAway(away);
    }
    ~Trip() {
      if (local != nullptr) local->setAway(Away::kNot);
    }
  } trip(local_.get(), away);
  run();
}

void Hosts::allreduce(void* data, size_t count, const Reduction& reduction, const Call& call, const Step& across) {
  if (alone()) return local_->allreduce(data, count, reduction, call, true);
  // The division of an average and the factor come at the very end, once.
  Reduction part = reduction;
  if (part.op == ReduceOp::kAverage) part.op = ReduceOp::kSum;
  part.after = 1.0;
  if (local_) local_->allreduce(data, count, part, call, false);
  cross(Away::kAwaited, [&] {
    across(leaders_);
    const size_t ranks = std::accumulate(level_.hosts.begin(), level_.hosts.end(), size_t{0},
                                         [](size_t sum, const auto& host) { return sum + host.size(); });
    finish(reduction, data, count, reduction.type, static_cast<int>(ranks));
  });
  if (local_) local_->broadcast(data, count * widthOf(reduction.type), 0, call);
}

void Hosts::broadcast(void* data, size_t bytes, int root, const Call& call,
                      const std::function<void(const World&, int root)>& across) {
  int host = 0, member = 0;
  for (size_t h = 0; h < level_.hosts.size(); h++) {
    const auto& ranks = level_.hosts[h];
    const auto found = std::find(ranks.begin(), ranks.end(), root);
    if (found == ranks.end()) continue;
    host = static_cast<int>(h);
    member = static_cast<int>(found - ranks.begin());
  }
  const bool home = static_cast<size_t>(host) == level_.mine;
  if (home && local_) local_->broadcast(data, bytes, member, call);
  cross(home ? Away::kNotAwaited : Away::kAwaited, [&] { across(leaders_, host); });
  if (!home && local_) local_->broadcast(data, bytes, 0, call);
}

void Hosts::gather(const void* own, void* out, const std::vector<size_t>& sizes, const Call& call,
                   const GatherStep& across) {
  std::vector<char*> places;
  size_t total = 0;
  for (size_t size : sizes) {
    places.push_back(static_cast<char*>(out) + total);
    total += size;
  }
  const auto sizeOf = [&](int rank) { return sizes[static_cast<size_t>(rank)]; };
  const auto placeOf = [&](int rank) { return places[static_cast<size_t>(rank)]; };
  const auto& host = level_.hosts[level_.mine];
  const int self = host[static_cast<size_t>(level_.member)];
  std::vector<char*> localPlaces;
  std::vector<size_t> localSizes;
  for (int rank : host) {
    localPlaces.push_back(placeOf(rank));
    localSizes.push_back(sizeOf(rank));
  }
  if (local_) {
    local_->gather(own, localPlaces, localSizes, call);
  } else if (sizeOf(self) > 0) {
    std::memcpy(placeOf(self), own, sizeOf(self));
  }
  if (alone()) return;
  cross(Away::kAwaited, [&] {
    // A host's parts need not be side by side: leaders exchange them packed.
    std::vector<size_t> packed;
    for (const auto& ranks : level_.hosts) {
      packed.push_back(std::accumulate(ranks.begin(), ranks.end(), size_t{0},
                                       [&](size_t sum, int rank) { return sum + sizeOf(rank); }));
    }
    std::vector<char> in, all(total);
    for (int rank : host) in.insert(in.end(), placeOf(rank), placeOf(rank) + sizeOf(rank));
    across(leaders_, in.data(), all.data(), packed);
    const char* next = all.data();
    for (const auto& ranks : level_.hosts) {
      for (int rank : ranks) {
        std::memcpy(placeOf(rank), next, sizeOf(rank));
        next += sizeOf(rank);
      }
    }
  });
  if (local_) local_->broadcast(out, total, 0, call);
}

void Hosts::meet(const Call& call, const Step& across) {
  if (local_) local_->meet(call);
  if (alone()) return;
  cross(Away::kAwaited, [&] { across(leaders_); });
  if (local_) local_->meet(call);
}

}  // namespace elastic
