// Which of two algorithms sums the quicker between processes, bcube or the ring: tried at the sizes around which that
// is open, and agreed on by all ranks. Pure: who calls it measures, and exchanges what was measured.
#pragma once

#include <array>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

namespace elastic {

class Crossover {
 public:
  // Seconds a byte at best: by the ring, by bcube.
  using Speeds = std::array<double, 2>;

  // usual: bytes up to which bcube is taken while nothing was agreed on.
  explicit Crossover(size_t usual) : usual_(usual) {}

  // Whether the next sum of so many bytes goes by bcube; the same on all ranks that have called the same sums.
  bool byBcube(size_t bytes) const;
  void took(size_t bytes, double seconds);
  // Enough was tried: ranks are to exchange what each has measured before the next sum of so many bytes.
  bool isDue(size_t bytes) const;
  Speeds measured(size_t bytes) const { return octaves_[octaveOf(bytes)].best; }
  // all: what the ranks have measured. Returns what is done from now on, as a sentence.
  std::string agree(size_t bytes, const std::vector<Speeds>& all);

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  static constexpr size_t kOctaves = 4;
  struct Octave {  // of sizes, up to the double of the one before
    size_t tries = 0;
    Speeds best{kNever, kNever};
    bool agreed = false, bcube = false;
  };
  static bool isOpen(size_t bytes);
  static size_t octaveOf(size_t bytes);
  static size_t endOf(size_t octave);
  bool isUsual(size_t octave) const { return endOf(octave) <= usual_; }

  const size_t usual_;
  std::array<Octave, kOctaves> octaves_;
};

}  // namespace elastic
