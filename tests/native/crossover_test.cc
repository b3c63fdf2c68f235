// Which algorithm sums the quicker: what is tried, agreed on and told.
#include "calls/crossover.h"

#include <map>

#include "check.h"
#include "ranks.h"

using namespace elastic;

namespace {

constexpr size_t kKilo = 1024, kMega = kKilo * kKilo;

// Sums of so many bytes until the ranks are to agree, at so many seconds a byte by the ring and by bcube.
void tryAll(Crossover& crossover, size_t bytes, double ring, double bcube) {
  for (int turn = 0; !crossover.isDue(bytes); turn++) {
    CHECK(turn < 100);
    crossover.took(bytes, static_cast<double>(bytes) * (crossover.byBcube(bytes) ? bcube : ring));
  }
}

bool agreedAt(size_t bytes, double ring, double bcube) {
  Crossover crossover(kMega);
  tryAll(crossover, bytes, ring, bcube);
  crossover.agree(bytes, {crossover.measured(bytes)});
  CHECK(!crossover.isDue(bytes));
  return crossover.byBcube(bytes);
}

}  // namespace

TEST(crossover, the_quicker_one_is_taken_where_it_is_so_by_more_than_chance) {
  CHECK(!agreedAt(600 * kKilo, 1e-9, 2e-9));
  CHECK(agreedAt(600 * kKilo, 1e-9, 1.02e-9));  // the usual one, below 1 MB
  CHECK(agreedAt(3 * kMega, 2e-9, 1e-9));
  CHECK(!agreedAt(3 * kMega, 1.02e-9, 1e-9));
}

TEST(crossover, out_of_bounds_nothing_is_tried_and_one_size_says_nothing_of_others) {
  Crossover crossover(kMega);
  for (int turn = 0; turn < 100; turn++) {
    for (size_t bytes : {kKilo, 256 * kKilo, 4 * kMega + 1}) {
      CHECK(crossover.byBcube(bytes) == (bytes < kMega) && !crossover.isDue(bytes));
      crossover.took(bytes, 1.0);
    }
  }
  tryAll(crossover, kMega, 1e-9, 9e-9);
  CHECK(!crossover.isDue(kMega + 1) && !crossover.isDue(512 * kKilo));
}

TEST(crossover, sizes_that_take_turns_are_tried_both_ways) {
  Crossover crossover(kMega);
  std::map<std::pair<size_t, bool>, int> tried;
  for (size_t turn = 0; !crossover.isDue(kMega); turn++) {
    const size_t bytes = turn % 2 == 0 ? kMega : 600 * kKilo;
    tried[{bytes, crossover.byBcube(bytes)}]++;
    crossover.took(bytes, 1.0);
  }
  for (const auto& [way, times] : tried) CHECK(times >= 4);
  CHECK(tried.size() == 4);
}

TEST(crossover, all_ranks_agree_and_the_first_tells) {
  for (const std::vector<int>& hosts : {std::vector<int>{}, {0, 0, 1}}) {
    Ranks ranks(3, 1, 20000, hosts);
    const auto thrown = ranks.each([](Group& group) {
      std::vector<float> data(700 * kKilo / sizeof(float));
      for (int turn = 1; turn <= 40; turn++) {
        data.assign(data.size(), static_cast<float>(turn));
        group.allreduce(data.data(), data.size(), Reduction{});
        CHECK(data.front() == 3.0f * static_cast<float>(turn) && data.back() == data.front());
      }
    });
    CHECK(thrown == std::vector<std::string>(3));
    CHECK(ranks.told.size() == 1 && ranks.told[0].find("sums of 512 KB to 1024 KB") == 0);
  }
}
