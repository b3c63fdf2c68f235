// Groups among threads: results under every algorithm, ends from other threads, and many generations.
#include "group.h"

#include <atomic>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "check.h"
#include "ranks.h"

using namespace elastic;

namespace {

Reduction sumOf(DataType type, Algorithm algorithm = Algorithm::kAuto) {
  Reduction reduction;
  reduction.type = type;
  reduction.algorithm = algorithm;
  return reduction;
}

void sum(Group& group, size_t count, Algorithm algorithm) {
  std::vector<int64_t> data(count);
  std::iota(data.begin(), data.end(), group.rank());
  group.allreduce(data.data(), count, sumOf(DataType::kInt64, algorithm));
  const int64_t size = group.size(), offsets = size * (size - 1) / 2;
  for (size_t i = 0; i < count; i++) CHECK(data[i] == size * static_cast<int64_t>(i) + offsets);
}

std::vector<std::string> nothing(int size) { return std::vector<std::string>(static_cast<size_t>(size)); }

}  // namespace

TEST(group, sums_of_all_sizes) {
  for (int size : {1, 2, 3, 5}) {
    Ranks ranks(size);
    const auto thrown = ranks.each([](Group& group) {
      if (group.size() == 1) return;
      for (size_t count : {1, 7, 1023, 300001}) {
        for (Algorithm algorithm : {Algorithm::kRing, Algorithm::kBcube, Algorithm::kAuto})
          sum(group, count, algorithm);
      }
      group.barrier();
    });
    CHECK(thrown == nothing(size));
  }
}

// Rank 1 sends keepalives meanwhile, which rank 0 leaves unread.
TEST(group, a_rank_may_leave_right_behind_a_message_for_which_its_peer_has_waited_long) {
  for (bool encrypted : {false, true}) {
    Ranks ranks(2, 1, 20000, {}, encrypted);
    const auto thrown = ranks.each([](Group& group) {
      group.barrier();
      std::vector<char> data(size_t{2} << 20, static_cast<char>('x' - group.rank()));
      if (group.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      group.broadcast(data.data(), data.size(), 0, 0);
      if (group.rank() == 0) return group.close();
      CHECK(data == std::vector<char>(data.size(), 'x'));
    });
    CHECK(thrown == nothing(2));
  }
}

TEST(group, parts_of_any_size_are_gathered) {
  Ranks ranks(3);
  const auto thrown = ranks.each([](Group& group) {
    const std::vector<size_t> sizes = {0, 5, 1 << 20};
    const std::vector<char> own(sizes[static_cast<size_t>(group.rank())] + 1, static_cast<char>('a' + group.rank()));
    std::vector<char> all((1 << 20) + 5);
    group.allgather(own.data(), all.data(), sizes, 0);
    CHECK(all[0] == 'b' && all[4] == 'b' && all[5] == 'c' && all.back() == 'c');
    for (int root = 0; root < group.size(); root++) {
      std::vector<char> data(100001, static_cast<char>(group.rank()));
      group.broadcast(data.data(), data.size(), root, 0);
      CHECK(data.front() == root && data.back() == root);
    }
  });
  CHECK(thrown == nothing(3));
}

TEST(group, parts_of_many_pieces_are_gathered) {
  constexpr size_t kPiece = size_t{4} << 20;
  for (const auto& sizes : {std::vector<size_t>{2 * kPiece + 7}, {0, kPiece + 1}, {kPiece * 3, 5, 0, kPiece}}) {
    Ranks ranks(static_cast<int>(sizes.size()));
    const auto thrown = ranks.each([&](Group& group) {
      const auto value = [](size_t rank, size_t i) { return static_cast<char>(i * 31 + i / kPiece + rank); };
      const auto me = static_cast<size_t>(group.rank());
      std::vector<char> own(sizes[me]), all(std::accumulate(sizes.begin(), sizes.end(), size_t{0}));
      for (size_t i = 0; i < own.size(); i++) own[i] = value(me, i);
      group.allgather(own.data(), all.data(), sizes, 0);
      size_t at = 0;
      for (size_t r = 0; r < sizes.size(); r++) {
        for (size_t i = 0; i < sizes[r]; i++) CHECK(all[at++] == value(r, i));
      }
    });
    CHECK(thrown == nothing(static_cast<int>(sizes.size())));
  }
}

TEST(group, every_type_sums_in_chunks_and_bit_by_bit) {
  for (int size : {2, 3, 5}) {
    Ranks ranks(size);
    const auto thrown = ranks.each([](Group& group) {
      for (size_t count : {size_t{0}, size_t{1}, size_t{4097}, size_t{1500001}}) {
        std::vector<uint16_t> halves(count, 0x3c00);  // 1.0 as float16
        group.allreduce(halves.data(), count, sumOf(DataType::kFloat16));
        for (uint16_t half : halves) CHECK(half == (group.size() == 2 ? 0x4000 : group.size() == 3 ? 0x4200 : 0x4500));
        Reduction packed = sumOf(DataType::kFloat32);
        packed.op = ReduceOp::kAverage;
        packed.wire = Wire::kBfloat16;
        packed.before = 2.0;
        std::vector<float> floats(count, static_cast<float>(group.rank()));
        group.allreduce(floats.data(), count, packed);
        for (float value : floats) CHECK(value == static_cast<float>(group.size() - 1));
        Reduction adaptive = sumOf(DataType::kFloat64);
        adaptive.op = ReduceOp::kAdasum;
        std::vector<double> same(count, 3.0);
        group.allreduce(same.data(), count, adaptive);
        for (double value : same) CHECK(value > 2.9999999 && value < 3.0000001);
      }
    });
    CHECK(thrown == nothing(size));
  }
}

TEST(group, rows_are_scattered_and_exchanged) {
  Ranks ranks(3);
  const auto thrown = ranks.each([](Group& group) {
    const std::vector<size_t> counts = {3, 0, 400000};
    std::vector<int16_t> data(400003, static_cast<int16_t>(group.rank() + 1)), part(counts[group.rank()] + 1, -1);
    group.reducescatter(data.data(), counts, part.data(), sumOf(DataType::kInt16));
    for (size_t i = 0; i + 1 < part.size(); i++) CHECK(part[i] == 6);
    CHECK(part.back() == -1);
    const auto own = static_cast<size_t>(group.rank());
    const std::vector<size_t> sent = {own, 0, 100000};
    const std::vector<size_t> come = own == 0   ? std::vector<size_t>{0, 1, 2}
                                     : own == 1 ? std::vector<size_t>{0, 0, 0}
                                                : std::vector<size_t>{100000, 100000, 100000};
    std::vector<char> from(own + 100000, static_cast<char>('a' + own)), to(come[0] + come[1] + come[2] + 1, 'z');
    Parts in, out;
    for (size_t r = 0, at = 0, place = 0; r < 3; at += sent[r], place += come[r++]) {
      in.push_back({from.data() + at, sent[r]});
      out.push_back({to.data() + place, come[r]});
    }
    group.alltoall(in, out, 0, false);
    for (size_t r = 0, at = 0; r < 3; at += come[r++]) {
      for (size_t i = 0; i < come[r]; i++) CHECK(to[at + i] == static_cast<char>('a' + r));
    }
    CHECK(to.back() == 'z');
  });
  CHECK(thrown == nothing(3));
}

TEST(group, a_reduction_of_another_kind_is_a_mismatch_on_every_rank) {
  Ranks ranks(3);
  ranks.each([](Group& group) { group.barrier(); });
  const auto thrown = ranks.each([](Group& group) {
    std::vector<float> data(10);
    Reduction reduction = sumOf(DataType::kFloat32);
    if (group.rank() == 1) reduction.wire = Wire::kFloat16;
    group.allreduce(data.data(), data.size(), reduction);
  });
  for (const auto& reason : thrown) {
    CHECK(reason.find("allreduce (sum, float32) of 40 bytes") != std::string::npos);
    CHECK(reason.find("rank 1 called allreduce (sum, float32 as float16) of 40 bytes") != std::string::npos);
  }
}

TEST(group, another_factor_on_the_result_is_a_mismatch_on_every_rank_and_one_on_an_operand_is_not) {
  for (const auto& hosts : {std::vector<int>{}, {0, 0}}) {
    Ranks ranks(2, 1, 20000, hosts);
    const auto reduced = [](Group& group, double before, double after) {
      std::vector<float> data(10, 1.0F);
      Reduction reduction = sumOf(DataType::kFloat32);
      reduction.before = before;
      reduction.after = after;
      group.allreduce(data.data(), data.size(), reduction);
      return data[0];
    };
    const auto weighed = ranks.each([&](Group& group) { CHECK(reduced(group, 1.0 + group.rank(), 0.5) == 1.5F); });
    CHECK(weighed == nothing(2));
    const auto thrown = ranks.each([&](Group& group) { reduced(group, 1.0, group.rank() == 0 ? 0.5 : 1.0); });
    for (const auto& reason : thrown) CHECK(reason.find("factor on the result") != std::string::npos);
  }
}

TEST(group, an_abort_from_another_thread_ends_all_waits_with_its_reason) {
  Ranks ranks(3);
  ranks.each([](Group& group) { group.barrier(); });
  std::atomic<int> turns{0};
  std::thread other([&] {
    while (turns < 20) std::this_thread::yield();
    ranks.groups[1]->abort("enough");
  });
  const auto thrown = ranks.each([&](Group& group) {
    for (;;) {
      sum(group, 200000, Algorithm::kRing);
      turns++;
    }
  });
  other.join();
  CHECK(thrown == std::vector<std::string>(3, "enough"));
}

// Rank 0 waits for rank 2, which does not come, and has not posted a receive for the frame that rank 1 sent.
TEST(group, an_abort_arrives_behind_an_unexpected_frame) {
  for (size_t count : {size_t{1000}, size_t{8} << 20}) {
    Ranks ranks(3);
    CHECK(ranks.each([](Group& group) { group.barrier(); }) == nothing(3));
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      ranks.groups[1]->abort("enough");
    });
    const auto thrown = ranks.each([&](Group& group) {
      if (group.rank() == 2) return;
      std::vector<double> data(count, 1.0);
      Reduction reduction = sumOf(DataType::kFloat64);
      reduction.op = ReduceOp::kAdasum;
      group.allreduce(data.data(), count, reduction);
    });
    other.join();
    // A frame that was only half sent is cut off, and the close frame with it.
    const bool heard = thrown[0] == "enough";
    CHECK(count == 1000 ? heard : heard || thrown[0].find("connection to rank 1") != std::string::npos);
  }
}

TEST(group, an_abort_ends_its_frame_for_a_peer_that_reads_late) {
  Ranks ranks(2);
  CHECK(ranks.each([](Group& group) { group.barrier(); }) == nothing(2));
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ranks.groups[0]->abort("enough");
  });
  const auto thrown = ranks.each([](Group& group) {
    std::vector<char> data(size_t{64} << 20);
    if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(130));
    group.broadcast(data.data(), data.size(), 0, 0);
    group.barrier();
  });
  other.join();
  CHECK(thrown == std::vector<std::string>(2, "enough"));
}

TEST(group, closing_under_a_running_collective_is_safe) {
  for (uint64_t turn = 1; turn <= 20; turn++) {
    Ranks ranks(2);
    CHECK(ranks.each([](Group& group) { group.barrier(); }) ==
          nothing(2));  // a group without connections can be closed
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(turn));
      ranks.groups[0]->close();
    });
    const auto thrown = ranks.each([](Group& group) {
      for (;;) sum(group, 100000, Algorithm::kRing);
    });
    other.join();
    CHECK(thrown[0].find("closed") != std::string::npos);
    CHECK(thrown[1].find("rank 0") != std::string::npos);
  }
}

TEST(group, several_threads_may_wait_on_one_mesh) {
  Ranks ranks(2, 1, 300);
  std::vector<std::thread> threads;
  std::atomic<int> thrown{0};
  for (int i = 0; i < 3; i++) {
    threads.emplace_back([&] { thrown += thrownBy([&] { ranks.groups[0]->barrier(); }).empty() ? 0 : 1; });
  }
  for (auto& thread : threads) thread.join();
  CHECK(thrown == 3);
}

TEST(group, generations_follow_one_another) {
  Ranks ranks(3);
  for (uint64_t generation = 2; generation < 60; generation++) {
    ranks.build(generation);
    CHECK(ranks.each([](Group& group) { sum(group, 100, Algorithm::kRing); }) == nothing(3));
  }
}

// Rank 1 waits for what it is to pass on to rank 3, and has not needed that connection yet.
TEST(group, a_rank_that_waits_is_not_blamed_by_one_to_which_it_has_no_connection) {
  Ranks ranks(4, 1, 2500);
  std::atomic<int> ended{0};
  const auto thrown = ranks.each([&](Group& group) {
    while (group.rank() == 0 && ended < 3) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::vector<char> data(100);
    const std::string why = thrownBy([&] { group.broadcast(data.data(), data.size(), 0, 0); });
    ended++;
    throw std::runtime_error(why);
  });
  for (size_t r : {1, 2, 3}) CHECK(thrown[r].find("waiting for rank(s) 0") != std::string::npos);
}
