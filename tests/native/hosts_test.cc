// Groups in shared memory and in two levels, among threads: results, ends from other threads, many generations.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "check.h"
#include "ranks.h"

using namespace elastic;

namespace {

constexpr int kTimeout = 20000;

Reduction sumOf(DataType type) {
  Reduction reduction;
  reduction.type = type;
  return reduction;
}

void sumIn(Group& group, int64_t* data, size_t count) {
  std::iota(data, data + count, group.rank());
  group.allreduce(data, count, sumOf(DataType::kInt64));
  const int64_t size = group.size(), offsets = size * (size - 1) / 2;
  for (size_t i = 0; i < count; i++) CHECK(data[i] == size * static_cast<int64_t>(i) + offsets);
}

void sum(Group& group, size_t count) {
  std::vector<int64_t> data(count);
  sumIn(group, data.data(), count);
}

std::vector<std::string> nothing(size_t size) { return std::vector<std::string>(size); }

// Memory that comes slowly, as if from a disk: half a second for the first access to each block. One object at a time.
class SlowMemory {
 public:
  static constexpr size_t kBlock = size_t{4} << 20;

  explicit SlowMemory(size_t blocks) {
    bytes_ = blocks * kBlock;
    start_ = static_cast<char*>(mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    CHECK(start_ != MAP_FAILED);
    struct sigaction handler{};
    handler.sa_sigaction = [](int, siginfo_t* fault, void*) {
      const size_t at = static_cast<size_t>(static_cast<char*>(fault->si_addr) - start_);
      if (at >= bytes_) _exit(1);
      const timespec pause{0, 500000000};
      nanosleep(&pause, nullptr);
      mprotect(start_ + at / kBlock * kBlock, kBlock, PROT_READ | PROT_WRITE);
    };
    handler.sa_flags = SA_SIGINFO;
    CHECK(sigaction(SIGSEGV, &handler, &before_) == 0);
  }
  ~SlowMemory() {
    sigaction(SIGSEGV, &before_, nullptr);
    munmap(start_, bytes_);
  }

  char* data() const { return start_; }

 private:
  struct sigaction before_{};
  static inline char* start_ = nullptr;
  static inline size_t bytes_ = 0;
};

const std::vector<std::vector<int>> kLayouts = {{0, 0}, {0, 0, 0}, {0, 1, 0, 1}, {0, 0, 1}, {0, 1, 1, 1, 1}};

}  // namespace

TEST(hosts, sums_of_all_sizes) {
  for (const auto& hosts : kLayouts) {
    Ranks ranks(static_cast<int>(hosts.size()), 1, kTimeout, hosts);
    const auto thrown = ranks.each([](Group& group) {
      for (size_t count : {1, 7, 4096, 4097, 300001}) sum(group, count);
      const auto memory = group.memory(300001 * sizeof(int64_t));
      const auto data = reinterpret_cast<int64_t*>(memory->data());
      for (size_t count : {5, 4097, 300001}) sumIn(group, data, count);
      // Some operands lie in shared memory and some do not.
      if (group.rank() == 0) return sum(group, 9000);
      sumIn(group, data + 3, 9000);
    });
    CHECK(thrown == nothing(hosts.size()));
  }
}

// Two of a host sum to 40000, and all four to more than float16 holds.
TEST(hosts, an_average_within_float16_is_finite_although_its_sum_is_not) {
  Ranks ranks(4, 1, kTimeout, {0, 0, 1, 1});
  const auto thrown = ranks.each([](Group& group) {
    for (const auto& [op, after] : {std::pair{ReduceOp::kAverage, 1.0}, {ReduceOp::kSum, 0.25}}) {
      Reduction packed = sumOf(DataType::kFloat32);
      packed.op = op;
      packed.after = after;
      packed.wire = Wire::kFloat16;
      std::vector<float> data(5000, 20000.0F);
      group.allreduce(data.data(), data.size(), packed);
      for (float value : data) CHECK(value == 20000.0F);
    }
    Reduction largest = sumOf(DataType::kFloat32);
    largest.op = ReduceOp::kMax;
    largest.after = -0.5;
    largest.wire = Wire::kFloat16;
    std::vector<float> data(5, static_cast<float>(group.rank()));
    group.allreduce(data.data(), data.size(), largest);
    CHECK(data[0] == -1.5F);
  });
  CHECK(thrown == nothing(4));
}

TEST(hosts, parts_of_any_size_are_gathered) {
  for (const auto& hosts : {std::vector<int>{0, 0, 0}, {0, 1, 0}}) {
    Ranks ranks(3, 1, kTimeout, hosts);
    const auto thrown = ranks.each([](Group& group) {
      const std::vector<size_t> sizes = {0, 5, 3 << 20};
      const std::vector<char> own(sizes[static_cast<size_t>(group.rank())] + 1, static_cast<char>('a' + group.rank()));
      std::vector<char> all((3 << 20) + 5);
      group.allgather(own.data(), all.data(), sizes, 0);
      CHECK(all[0] == 'b' && all[4] == 'b' && all[5] == 'c' && all.back() == 'c');
      for (int root = 0; root < group.size(); root++) {
        std::vector<char> data(5000001, static_cast<char>(group.rank()));
        group.broadcast(data.data(), data.size(), root, static_cast<uint32_t>(root));
        CHECK(data.front() == root && data.back() == root);
      }
      group.barrier();
    });
    CHECK(thrown == nothing(3));
  }
}

TEST(hosts, an_abort_from_another_thread_ends_all_waits_with_its_reason) {
  for (const auto& hosts : {std::vector<int>{0, 0, 0}, {0, 0, 1, 1}}) {
    Ranks ranks(static_cast<int>(hosts.size()), 1, kTimeout, hosts);
    std::atomic<int> turns{0};
    std::thread other([&] {
      while (turns < 20) std::this_thread::yield();
      for (auto& group : ranks.groups) group->abort("enough");
    });
    const auto thrown = ranks.each([&](Group& group) {
      for (;;) {
        sum(group, 200000);
        turns++;
      }
    });
    other.join();
    CHECK(thrown == std::vector<std::string>(hosts.size(), "enough"));
  }
}

TEST(hosts, no_collective_succeeds_after_an_abort) {
  Ranks ranks(2, 1, kTimeout, {0, 0});
  CHECK(ranks.each([](Group& group) { sum(group, 10); }) == nothing(2));
  ranks.groups[1]->abort("enough");
  CHECK(ranks.each([](Group& group) { sum(group, 10); }) == std::vector<std::string>(2, "enough"));
}

TEST(hosts, closing_under_a_running_collective_is_safe) {
  for (uint64_t turn = 1; turn <= 20; turn++) {
    Ranks ranks(2, 1, kTimeout, {0, 0});
    CHECK(ranks.each([](Group& group) { group.barrier(); }) == nothing(2));
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(turn));
      ranks.groups[0]->close();
    });
    const auto thrown = ranks.each([](Group& group) {
      for (;;) sum(group, 100000);
    });
    other.join();
    CHECK(thrown[0].find("closed") != std::string::npos);
    CHECK(thrown[1].find("rank 0") != std::string::npos);
  }
}

TEST(hosts, memory_of_one_member_never_runs_into_that_of_the_next) {
  constexpr size_t kRegion = size_t{16} << 20;
  const auto segment = Segment::create({Fence{1, 1}, makeNonce(), 2});
  MemoryPool pool(segment, 0, kRegion);
  const auto first = pool.allocate(kRegion / 4 * 3);
  CHECK(first != nullptr);
  CHECK(pool.allocate(kRegion / 2) == nullptr);
  CHECK(pool.allocate(kRegion / 4) != nullptr);
  CHECK(pool.allocate(1) == nullptr);
}

TEST(hosts, memory_outlives_its_group) {
  Ranks ranks(2, 1, kTimeout, {0, 0});
  std::vector<std::shared_ptr<Memory>> kept(2);
  ranks.each([&](Group& group) {
    auto& mine = kept[static_cast<size_t>(group.rank())];
    mine = group.memory(1 << 20);
    std::fill_n(mine->data(), mine->bytes(), static_cast<char>(7 + group.rank()));
    group.barrier();
  });
  ranks.build(2);
  CHECK(ranks.each([](Group& group) { sum(group, 200000); }) == nothing(2));
  CHECK(kept[0]->data()[0] == 7 && kept[1]->data()[(1 << 20) - 1] == 8);
}

TEST(hosts, generations_follow_one_another) {
  Ranks ranks(3, 1, kTimeout, {0, 0, 1});
  for (uint64_t generation = 2; generation < 40; generation++) {
    ranks.build(generation);
    CHECK(ranks.each([](Group& group) { sum(group, 100); }) == nothing(3));
  }
}

// The first rank of a host waits in shared memory for the missing rank. That of the other host waits for the first one,
// learns that, and blames the missing rank alone. Rank 0 dials, whichever of the two it is.
TEST(hosts, a_rank_that_waits_for_its_own_host_is_not_blamed) {
  for (int missing : {1, 3}) {
    Ranks ranks(4, 1, 2500, {0, 0, 1, 1});
    std::atomic<int> ended{0};
    const auto thrown = ranks.each([&](Group& group) {
      group.memory(1);  // the topology is known; the first ranks have no connection yet
      if (group.rank() == 0) group.setTimeout(std::chrono::milliseconds(3500));
      while (group.rank() == missing && ended < 3) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      const std::string why = thrownBy([&] { group.barrier(); });
      ended++;
      throw std::runtime_error(why);
    });
    const std::string blame = "waiting for rank(s) " + std::to_string(missing);
    for (const std::string& one : thrown) CHECK(one.find(blame) != std::string::npos);
  }
}

// Rank 1 has what it needs from rank 0 of its own host, which still waits for the other host.
TEST(hosts, a_rank_that_has_its_part_of_a_broadcast_may_leave) {
  Ranks ranks(4, 1, kTimeout, {0, 0, 1, 1});
  std::vector<char> large(size_t{32} << 20, 'x');
  std::atomic<bool> left{false};
  const auto thrown = ranks.each([&](Group& group) {
    group.barrier();
    std::vector<char> data = group.rank() == 0 ? large : std::vector<char>(large.size());
    while (group.rank() > 1 && !left) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    group.broadcast(data.data(), data.size(), 0, 0);
    CHECK(data == large);
    if (group.rank() > 1) return;
    if (group.rank() == 1) group.close();
    left = true;
  });
  CHECK(thrown == nothing(4));
}

// Rank 0 has nothing to wait for, and so no limit; rank 1 does not have to wait for it without end.
TEST(hosts, a_timeout_holds_whatever_that_of_the_hosts_first_rank_is) {
  Ranks ranks(3, 1, 300, {0, 0, 1});
  std::atomic<int> ended{0};
  const auto thrown = ranks.each([&](Group& group) {
    group.barrier();
    if (group.rank() == 0) group.setTimeout(std::chrono::milliseconds(0));
    while (group.rank() == 2 && ended < 2) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    const std::string why = thrownBy([&] { group.barrier(); });
    ended++;
    throw std::runtime_error(why);
  });
  for (size_t r : {0, 1}) {
    CHECK(thrown[r].find("rank 1: shared memory timed out") != std::string::npos);
    CHECK(thrown[r].find("waiting for rank(s) 0, which wait for other hosts") != std::string::npos);
  }
}

// The members have waited for longer than the timeout when their first rank copies what came from the other host.
TEST(hosts, a_first_rank_that_copies_slowly_is_not_blamed) {
  Ranks ranks(3, 1, kTimeout, {0, 0, 1});
  SlowMemory slow(4);
  const std::vector<size_t> sizes = {0, 0, 4 * SlowMemory::kBlock};
  const auto thrown = ranks.each([&](Group& group) {
    group.barrier();
    if (group.rank() == 1) group.setTimeout(std::chrono::milliseconds(300));
    std::vector<char> usual(group.rank() == 0 ? 0 : sizes[2]);
    char* const all = group.rank() == 0 ? slow.data() : usual.data();
    const std::vector<char> own(sizes[static_cast<size_t>(group.rank())], 'c');
    group.allgather(own.data(), all, sizes, 0);
    for (size_t i = 0; i < sizes[2]; i++) CHECK(all[i] == 'c');
  });
  CHECK(thrown == nothing(3));
}
