#include "shared/shm_gate.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <thread>

#include "transport/goodbye.h"

namespace elastic {
namespace {

using Clock = Mesh::Clock;

constexpr uint32_t kFailed = 1;
// Then sleep: a yield may cost a time slice where others compute. A sleeper is back some 50 microseconds after it was
// woken, so that it comes late to the next meeting as well; how long a pause takes depends on the processor.
constexpr std::chrono::microseconds kSpin{100}, kSpinWhenCrowded{1};
constexpr int kPausesBetweenLooksAtTheClock = 16;
constexpr std::chrono::milliseconds kSlice{3};   // how late the death of a member is seen, at most
constexpr std::chrono::milliseconds kIdle{200};  // how often a waiter looks for Ctrl-C
constexpr std::chrono::seconds kSilent{1};       // somebody who is away and lives shows it more often than this
constexpr std::chrono::seconds kGrace{3};        // more than what others take to tell who is to blame
constexpr std::chrono::milliseconds kVerdictWithin{50};

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  // Whatever comes of it, the caller looks at the word again. Not a private futex: the word is shared by processes.
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

void wakeAll(std::atomic<uint32_t>& word) { futex(word, FUTEX_WAKE, INT_MAX, nullptr); }

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// With fewer processors than members, whoever spins keeps the one from running that it waits for.
std::chrono::microseconds spinFor(size_t members) {
  cpu_set_t processors;
  CPU_ZERO(&processors);
  if (sched_getaffinity(0, sizeof processors, &processors) != 0) return kSpinWhenCrowded;
  return members <= static_cast<size_t>(CPU_COUNT(&processors)) ? kSpin : kSpinWhenCrowded;
}

}  // namespace

// One wait: since when, when to see to what, and what was last seen of those who are away.
struct Gate::Watch {
  Clock::time_point begin = Clock::now();
  Clock::time_point idle = begin + kIdle, again = begin;
  Clock::time_point late = Clock::time_point::max();  // since when nobody but those who are away is missing
  std::vector<uint32_t> pulses;
};

Gate::Gate(std::shared_ptr<Segment> segment, std::vector<int> ranks, int self, Mesh& mesh)
    : segment_(std::move(segment)),
      ranks_(std::move(ranks)),
      self_(self),
      mesh_(mesh),
      spin_(spinFor(ranks_.size())),
      gone_(ranks_.size()) {}

void Gate::pass() {
  SegmentHeader& header = segment_->header();
  turn_++;
  if (header.gathered.fetch_add(1, std::memory_order_acq_rel) + 1 == ranks_.size()) {
    header.gathered.store(0, std::memory_order_relaxed);  // nobody comes again before the phase has changed
    // Sequentially consistent, as is what a sleeper does: it sees the new phase, or we see the sleeper.
    header.phase.fetch_add(2, std::memory_order_seq_cst);
    if (header.sleepers.load(std::memory_order_seq_cst) > 0) wakeAll(header.phase);
  }
  // After the count: whoever lacks this mark when it is gone has not come.
  segment_->line(self_).arrived.store(turn_, std::memory_order_release);
  if (!open()) spin();
  if (!open()) sleep();
  if (failed()) raise();
}

bool Gate::open() const {
  const uint32_t phase = segment_->header().phase.load(std::memory_order_acquire);
  return (phase & kFailed) != 0 || phase >> 1 == (turn_ & (UINT32_MAX >> 1));
}

void Gate::spin() const {
  const auto until = Clock::now() + spin_;
  do {
    for (int i = 0; i < kPausesBetweenLooksAtTheClock; i++) {
      if (open()) return;
      relax();
    }
  } while (Clock::now() < until);
}

void Gate::sleep() {
  SegmentHeader& header = segment_->header();
  const timespec slice{0, std::chrono::nanoseconds(kSlice).count()};
  Watch watch;
  struct Sleeper {
    std::atomic<uint32_t>& count;
    explicit Sleeper(std::atomic<uint32_t>& count) : count(count) { count.fetch_add(1, std::memory_order_seq_cst); }
    ~Sleeper() { count.fetch_sub(1, std::memory_order_relaxed); }
  } sleeper(header.sleepers);
  while (!open()) {
    const uint32_t phase = header.phase.load(std::memory_order_seq_cst);
    if (open()) return;
    const auto before = Clock::now();
    futex(header.phase, FUTEX_WAIT, phase, &slice);
    if (open()) return;
    const auto now = Clock::now();
    if (now - before > kIdle) watch.begin += now - before;  // this process was stopped, or the machine with all members
    mesh_.attend();
    if (now >= watch.idle) {
      mesh_.attendToWait(watch.begin, toTell());
      watch.idle = now + kIdle;
    }
    blameTheDead();
    if (now >= std::max(watch.again, mesh_.deadlineOf(watch.begin))) blameTheLate(watch);
  }
}

std::vector<int> Gate::missing() const {
  std::vector<int> members;
  for (int m = 0; m < static_cast<int>(ranks_.size()); m++) {
    if (segment_->line(m).arrived.load(std::memory_order_acquire) != turn_) members.push_back(m);
  }
  return members;
}

// Ranks that are missing and not away: known to all who have come, told by the first of them.
std::vector<int> Gate::toTell() const {
  std::vector<int> ranks;
  const std::vector<int> members = missing();
  for (int m = 0; m < self_; m++) {
    if (std::find(members.begin(), members.end(), m) == members.end()) return ranks;
  }
  for (int m : members) {
    if (segment_->line(m).away.load(std::memory_order_relaxed) == Away::kNot)
      ranks.push_back(ranks_[static_cast<size_t>(m)]);
  }
  return ranks;
}

void Gate::blameTheDead() {
  for (size_t m = 0; m < ranks_.size(); m++) {
    // In this order: what it did before it went counts.
    if (!gone_[m] || segment_->line(static_cast<int>(m)).arrived.load(std::memory_order_acquire) == turn_) continue;
    if (open()) return;
    const Failure loss = lossOf(static_cast<int>(m));
    mesh_.abort(loss.cause, loss.ranks, loss.what());
    mesh_.check();
  }
}

Failure Gate::lossOf(int member) const {
  const int rank = ranks_[static_cast<size_t>(member)];
  return Failure(Cause::kPeerLost, {rank},
                 "rank " + std::to_string(mesh_.rank) + ": rank " + std::to_string(rank) +
                     ", on the same host: its process has ended, or it has closed the group");
}

// One who is away waits for other hosts, and will tell who is to blame: as long as it lives, and unless it has no
// deadline itself.
void Gate::blameTheLate(Watch& watch) {
  const auto now = Clock::now();
  std::vector<int> ranks;
  std::vector<uint32_t> pulses;
  std::string names;
  for (int m : missing()) {
    const Line& line = segment_->line(m);
    const size_t nth = pulses.size();
    pulses.push_back(line.pulse.load(std::memory_order_relaxed));
    const bool away = line.away.load(std::memory_order_relaxed) != Away::kNot;
    const bool alive = nth >= watch.pulses.size() || watch.pulses[nth] != pulses[nth];
    if (away && (watch.late > now || alive)) continue;
    ranks.push_back(ranks_[static_cast<size_t>(m)]);
    names += (names.empty() ? "" : ", ") + std::to_string(ranks.back());
  }
  watch.late = std::min(watch.late, now);
  if (ranks.empty() && now < watch.late + mesh_.limit() + kGrace) {
    watch.pulses = std::move(pulses);
    watch.again = now + kSilent;
    return;
  }
  if (open()) return;
  mesh_.abort(Cause::kTimeout, ranks,
              "rank " + std::to_string(mesh_.rank) + ": shared memory timed out after " +
                  std::to_string(mesh_.limit().count()) + " ms, waiting for " +
                  (names.empty() ? "other hosts" : "rank(s) " + names));
  mesh_.check();
}

void Gate::publish(const Failure& failure) {
  SegmentHeader& header = segment_->header();
  uint32_t none = 0;
  if (header.verdict.compare_exchange_strong(none, 1, std::memory_order_acq_rel)) {
    std::vector<char> body = encodeGoodbye(failure);
    if (body.size() > kMostBody) body = encodeGoodbye(Failure(failure.cause, {}, failure.what()));
    std::memcpy(header.body, body.data(), body.size());
    header.bodySize = static_cast<uint32_t>(body.size());
    header.verdict.store(2, std::memory_order_release);
  }
  header.phase.fetch_or(kFailed, std::memory_order_seq_cst);
  wakeAll(header.phase);
}

Failure Gate::failure() const {
  const SegmentHeader& header = segment_->header();
  const auto until = Clock::now() + kVerdictWithin;
  while (header.verdict.load(std::memory_order_acquire) != 2) {
    // Whoever began to publish it has died.
    if (Clock::now() > until) return Failure(Cause::kAborted, {}, "a member of this host ended the group");
    std::this_thread::yield();
  }
  return decodeGoodbye(std::vector<char>(header.body, header.body + header.bodySize), ranks_[0]);
}

void Gate::raise() {
  const Failure failure = this->failure();
  mesh_.abort(failure.cause, failure.ranks, failure.what());
  mesh_.check();
  throw failure;
}

}  // namespace elastic
