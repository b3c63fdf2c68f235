#include "calls/crossover.h"

#include <algorithm>

namespace elastic {
namespace {

constexpr size_t kLeast = size_t{256} << 10;   // bytes up to which bcube is always taken; above four octaves, the ring
constexpr size_t kUncounted = 2, kTries = 18;  // the first ones open connections
constexpr double kMargin = 0.95;               // of the usual one's time: what the other must reach to be taken

// In which order the two are tried: sizes that take turns come to both.
bool triesBcube(size_t turn) { return ((turn ^ (turn >> 1)) & 1) == 0; }

std::string sizeOf(size_t bytes) { return std::to_string(bytes >> 10) + " KB"; }

}  // namespace

bool Crossover::isOpen(size_t bytes) { return bytes > kLeast && bytes <= endOf(kOctaves - 1); }

size_t Crossover::endOf(size_t octave) { return kLeast << (octave + 1); }

size_t Crossover::octaveOf(size_t bytes) {
  size_t octave = 0;
  while (octave + 1 < kOctaves && bytes > endOf(octave)) octave++;
  return octave;
}

bool Crossover::byBcube(size_t bytes) const {
  if (!isOpen(bytes)) return bytes <= kLeast;
  const Octave& octave = octaves_[octaveOf(bytes)];
  return octave.agreed ? octave.bcube : triesBcube(octave.tries);
}

void Crossover::took(size_t bytes, double seconds) {
  if (!isOpen(bytes)) return;
  Octave& octave = octaves_[octaveOf(bytes)];
  if (octave.agreed) return;
  const size_t turn = octave.tries++;
  // The best, since who comes early waits for others besides.
  double& best = octave.best[triesBcube(turn) ? 1 : 0];
  if (turn >= kUncounted) best = std::min(best, seconds / static_cast<double>(bytes));
}

bool Crossover::isDue(size_t bytes) const {
  if (!isOpen(bytes)) return false;
  const Octave& octave = octaves_[octaveOf(bytes)];
  return !octave.agreed && octave.tries >= kTries;
}

std::string Crossover::agree(size_t bytes, const std::vector<Speeds>& all) {
  const size_t number = octaveOf(bytes);
  Speeds best{kNever, kNever};
  for (const Speeds& one : all) {
    for (size_t way = 0; way < best.size(); way++) best[way] = std::min(best[way], one[way]);
  }
  Octave& octave = octaves_[number];
  const bool usual = isUsual(number);
  octave.bcube = best[usual ? 0 : 1] < kMargin * best[usual ? 1 : 0] ? !usual : usual;
  octave.agreed = true;
  const auto speedOf = [&](size_t way) { return std::to_string(static_cast<int>(1e-6 / best[way])) + " MB/s"; };
  return "sums of " + sizeOf(endOf(number) / 2) + " to " + sizeOf(endOf(number)) + " between processes go by " +
         (octave.bcube ? "bcube" : "ring") + " in this world: tried at " + speedOf(0) + " by ring, at " + speedOf(1) +
         " by bcube";
}

}  // namespace elastic
