#include "calls/direct.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>

#include "transport/buffer.h"

namespace elastic {
namespace {

constexpr size_t kBanks = 2;  // one is reduced while the other one receives

size_t totalOf(const std::vector<size_t>& sizes) {
  size_t total = 0;
  for (size_t size : sizes) total += size;
  return total;
}

// This rank's index in the route.
size_t placeOn(const Route& route) {
  const auto& ranks = route.ranks;
  return static_cast<size_t>(std::find(ranks.begin(), ranks.end(), route.mesh.rank) - ranks.begin());
}

// The peers' indexes in the order in which this rank sends to them, beginning behind its own, so that not all ranks
// begin with the same peer.
std::vector<size_t> peersOf(const Route& route) {
  const size_t me = placeOn(route), size = route.ranks.size();
  std::vector<size_t> peers;
  for (size_t step = 1; step < size; step++) peers.push_back((me + step) % size);
  return peers;
}

void awaitSent(Buffer& buffer, size_t& count) {
  for (; count > 0; count--) buffer.waitSend();
}

void awaitReceived(Buffer& buffer, size_t& count) {
  for (; count > 0; count--) buffer.waitRecv();
}

// One call of reduceParts, chunk by chunk: round c exchanges the c-th chunk of every part.
class PartsReduction {
 public:
  PartsReduction(const Route& route, const Reduction& reduction, char* data, const std::vector<size_t>& counts,
                 char* out)
      : route_(route),
        mesh_(route.mesh),
        reduction_(reduction),
        width_(widthOf(reduction.type)),
        me_(placeOn(route)),
        peers_(peersOf(route)),
        counts_(counts),
        starts_(startsOf(counts)),
        chunk_(std::clamp((size_t{8} << 20) / counts.size(), size_t{64} << 10, size_t{1} << 20) / width_),
        spread_(out == nullptr),
        data_(data),
        out_(spread_ ? data + starts_[me_] * width_ : out),
        memory_(new char[memoryNeeded()]),
        whole_(mesh_, data, totalOf(counts) * width_),
        result_(mesh_, out_, counts[me_] * width_) {
    for (size_t bank = 0; bank < kBanks; bank++) {
      banks_.emplace_back(mesh_, bankMemory(bank), bankMemory(1) - bankMemory(0));
    }
  }

  void run() {
    const size_t rounds = chunksOf(*std::max_element(counts_.begin(), counts_.end()));
    if (spread_) expectResults();
    for (size_t c = 0; c < rounds; c++) {
      // The bank of the previous chunk is receiving or full: at most two rounds are under way.
      expect(c);
      for (size_t peer : peers_) send(c, peer);
      if (c > 0) fold(c - 1);
    }
    if (rounds > 0) fold(rounds - 1);
    awaitSent(whole_, toSend_);
    awaitSent(result_, resultsToSend_);
    awaitReceived(whole_, resultsToCome_);
  }

 private:
  int rankOf(size_t place) const { return route_.ranks[place]; }
  size_t chunksOf(size_t count) const { return (count + chunk_ - 1) / chunk_; }
  // Number of elements in a part's c-th chunk; 0 beyond its end.
  size_t lengthOf(size_t part, size_t c) const {
    return std::min(counts_[part], (c + 1) * chunk_) - std::min(counts_[part], c * chunk_);
  }
  // Offset in bytes of a part's c-th chunk.
  size_t offsetOf(size_t part, size_t c) const { return (starts_[part] + c * chunk_) * width_; }
  size_t longest() const { return std::min(chunk_, counts_[me_]) * width_; }
  // A chunk of every rank for each bank, and one more for the reduction.
  size_t memoryNeeded() const { return longest() * (counts_.size() * kBanks + 1); }
  char* bankMemory(size_t bank) { return memory_.get() + bank * longest() * counts_.size(); }

  void expectResults() {
    for (size_t peer : peers_) {
      for (size_t c = 0; c < chunksOf(counts_[peer]); c++, resultsToCome_++) {
        whole_.recv(rankOf(peer), route_.slot + 1, offsetOf(peer, c), lengthOf(peer, c) * width_);
      }
    }
  }

  void expect(size_t c) {
    const size_t bytes = lengthOf(me_, c) * width_;
    if (bytes == 0) return;
    for (size_t peer : peers_) {
      banks_[c % kBanks].recv(rankOf(peer), route_.slot, peer * longest(), bytes);
      toCome_[c % kBanks]++;
    }
  }

  void send(size_t c, size_t peer) {
    const size_t bytes = lengthOf(peer, c) * width_;
    if (bytes == 0) return;
    whole_.send(rankOf(peer), route_.slot, offsetOf(peer, c), bytes);
    toSend_++;
  }

  void fold(size_t c) {
    const size_t count = lengthOf(me_, c), bank = c % kBanks;
    if (count == 0) return;
    awaitReceived(banks_[bank], toCome_[bank]);
    std::vector<const char*> parts;
    for (size_t r = 0; r < counts_.size(); r++) {
      parts.push_back(r == me_ ? data_ + offsetOf(me_, c) : bankMemory(bank) + r * longest());
    }
    foldParts(reduction_, parts, count, bankMemory(kBanks), out_ + c * chunk_ * width_);
    if (!spread_) return;
    for (size_t peer : peers_) {
      result_.send(rankOf(peer), route_.slot + 1, c * chunk_ * width_, count * width_);
      resultsToSend_++;
    }
  }

  const Route& route_;
  Mesh& mesh_;
  const Reduction& reduction_;
  const size_t width_, me_;
  const std::vector<size_t> peers_;
  const std::vector<size_t>& counts_;
  const std::vector<size_t> starts_;
  const size_t chunk_;  // elements
  const bool spread_;
  char* const data_;
  char* const out_;
  const std::unique_ptr<char[]> memory_;
  // The destructors of these buffers, which run first, cancel operations that are pending on the memory above. A
  // received result overwrites the part that this rank sent to its owner, which must have received all of it before.
  Buffer whole_, result_;
  std::deque<Buffer> banks_;
  size_t toSend_ = 0, resultsToSend_ = 0, resultsToCome_ = 0;
  size_t toCome_[kBanks] = {};
};

}  // namespace

void alltoall(const Route& route, const Parts& in, const Parts& out) {
  const size_t me = placeOn(route);
  std::deque<Buffer> from, to;
  for (size_t r : peersOf(route)) {
    const int rank = route.ranks[r];
    const size_t received = out[r].bytes, sent = in[r].bytes;
    if (received > 0) to.emplace_back(route.mesh, out[r].data, received).recv(rank, route.slot, 0, received);
    if (sent > 0) from.emplace_back(route.mesh, in[r].data, sent).send(rank, route.slot, 0, sent);
  }
  if (in[me].bytes > 0) std::memcpy(out[me].data, in[me].data, in[me].bytes);
  for (Buffer& buffer : to) buffer.waitRecv();
  for (Buffer& buffer : from) buffer.waitSend();
}

void reduceParts(const Route& route, const Reduction& reduction, void* data, const std::vector<size_t>& counts,
                 void* out) {
  PartsReduction(route, reduction, static_cast<char*>(data), counts, static_cast<char*>(out)).run();
}

}  // namespace elastic
