#include "calls/adasum.h"

#include <cstdint>
#include <vector>

#include "transport/buffer.h"

namespace elastic {
namespace {

struct Range {
  size_t begin, end;
  size_t size() const { return end - begin; }
};

struct Products {
  double aa = 0, bb = 0, ab = 0;
};

template <typename T>
Products productsOf(const T* a, const T* b, size_t count) {
  Products sums;
  for (size_t i = 0; i < count; i++) {
    const auto x = static_cast<double>(a[i]), y = static_cast<double>(b[i]);
    sums.aa += x * x;
    sums.bb += y * y;
    sums.ab += x * y;
  }
  return sums;
}

template <typename T>
void combine(const Products& sums, const T* a, const T* b, T* out, size_t count) {
  const double ofA = sums.aa > 0 ? 1 - sums.ab / (2 * sums.aa) : 1;
  const double ofB = sums.bb > 0 ? 1 - sums.ab / (2 * sums.bb) : 1;
  for (size_t i = 0; i < count; i++) out[i] = static_cast<T>(ofA * a[i] + ofB * b[i]);
}

template <typename T>
class Adasum {
 public:
  Adasum(const Route& route, T* data, size_t count)
      : route_(route), rank_(route.mesh.rank), data_(data), count_(count), theirs_(count) {
    while (power_ * 2 <= route.mesh.size) power_ *= 2;
  }

  void run() {
    const int partner = rank_ < power_ ? rank_ + power_ : rank_ - power_;
    if (rank_ >= power_) {
      give(partner);
      take(partner, data_);
      return;
    }
    if (partner < route_.mesh.size) {
      take(partner, theirs_.data());
      combine(productsOf(data_, theirs_.data(), count_), data_, theirs_.data(), data_, count_);
    }
    halve(1, Range{0, count_});
    if (partner < route_.mesh.size) give(partner);
  }

 private:
  // Combines `range` with the partner at `distance`: each keeps one half, combines it with partners further away, and
  // then sends its half of the result to the other.
  void halve(int distance, const Range& range) {
    if (distance >= power_) return;
    const int partner = rank_ ^ distance;
    const size_t middle = range.begin + range.size() / 2;
    const bool lower = (rank_ & distance) == 0;
    const Range low{range.begin, middle}, high{middle, range.end};
    const Range kept = lower ? low : high, given = lower ? high : low;
    trade(partner, data_ + given.begin, given.size(), theirs_.data(), kept.size());
    // "a" is the vector of the lower partner on both sides, so that all ranks compute the same coefficients.
    const T* a = lower ? data_ + kept.begin : theirs_.data();
    const T* b = lower ? theirs_.data() : data_ + kept.begin;
    const Products sums = sumOverRanks(productsOf(a, b, kept.size()), distance);
    combine(sums, a, b, data_ + kept.begin, kept.size());
    halve(distance * 2, kept);
    trade(partner, data_ + kept.begin, kept.size(), data_ + given.begin, given.size());
  }

  // Sums over the 2 * distance ranks that hold the two vectors; the order of two terms does not change the bits.
  Products sumOverRanks(Products sums, int distance) {
    for (int step = 1; step <= distance; step *= 2) {
      Products others;
      trade(rank_ ^ step, &sums, 1, &others, 1);
      sums = {sums.aa + others.aa, sums.bb + others.bb, sums.ab + others.ab};
    }
    return sums;
  }

  template <typename Item>
  void trade(int peer, Item* out, size_t outCount, Item* in, size_t inCount) {
    Buffer from(route_.mesh, out, outCount * sizeof(Item)), to(route_.mesh, in, inCount * sizeof(Item));
    to.recv(peer, route_.slot, 0, inCount * sizeof(Item));
    from.send(peer, route_.slot, 0, outCount * sizeof(Item));
    to.waitRecv();
    from.waitSend();
  }

  void give(int peer) {
    Buffer from(route_.mesh, data_, count_ * sizeof(T));
    from.send(peer, route_.slot, 0, count_ * sizeof(T));
    from.waitSend();
  }

  void take(int peer, T* data) {
    Buffer to(route_.mesh, data, count_ * sizeof(T));
    to.recv(peer, route_.slot, 0, count_ * sizeof(T));
    to.waitRecv();
  }

  const Route& route_;
  const int rank_;
  int power_ = 1;
  T* const data_;
  const size_t count_;
  std::vector<T> theirs_;
};

}  // namespace

void adasum(const Route& route, float* data, size_t count) { Adasum<float>(route, data, count).run(); }

void adasum(const Route& route, double* data, size_t count) { Adasum<double>(route, data, count).run(); }

}  // namespace elastic
