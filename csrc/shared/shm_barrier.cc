#include "shared/shm_barrier.h"

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

#include "transport/failure.h"

namespace elastic {
namespace {

using Clock = Mesh::Clock;

constexpr uint32_t kFailed = 1;
// Spin, then sleep: a yield may cost a time slice if other processes compute. A sleeper resumes some 50 microseconds
// after it was woken, and is then late for the next barrier as well; so a waiter spins for twice as long.
constexpr std::chrono::microseconds kSpin{100}, kSpinWhenCrowded{1};
constexpr int kPausesPerClockRead = 16;
constexpr std::chrono::milliseconds kSleepSlice{3};        // a member's death is seen within this time
constexpr std::chrono::milliseconds kReportInterval{200};  // interval of checks for Ctrl-C and of reports
constexpr std::chrono::seconds kSilenceLimit{
    1};  // a live member that waits for other hosts increments its heartbeat more often
constexpr std::chrono::seconds kGrace{3};  // longer than other ranks need to report the cause
constexpr std::chrono::milliseconds kFailureWriteTimeout{50};

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  // The caller rechecks the word, so errors do not matter. Not a private futex: processes share the word.
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

// With fewer processors than members, a spinning member would keep the one that it waits for from running.
std::chrono::microseconds spinFor(size_t members) {
  cpu_set_t processors;
  CPU_ZERO(&processors);
  if (sched_getaffinity(0, sizeof processors, &processors) != 0) return kSpinWhenCrowded;
  return members <= static_cast<size_t>(CPU_COUNT(&processors)) ? kSpin : kSpinWhenCrowded;
}

}  // namespace

// State of one wait.
struct SharedBarrier::WaitState {
  Clock::time_point begin = Clock::now();
  Clock::time_point nextReport = begin + kReportInterval, nextTimeoutCheck = begin;
  // Since when only members that wait for other hosts are missing, without progress.
  Clock::time_point onlyCrossHostSince = Clock::time_point::max();
  std::vector<uint32_t> heartbeats;
  uint32_t progress = 0;  // of all missing members
};

SharedBarrier::SharedBarrier(std::shared_ptr<Segment> segment, std::vector<int> ranks, int self, Mesh& mesh)
    : segment_(std::move(segment)),
      ranks_(std::move(ranks)),
      self_(self),
      mesh_(mesh),
      spin_(spinFor(ranks_.size())),
      lost_(ranks_.size()) {}

void SharedBarrier::arriveAndWait() {
  SegmentHeader& header = segment_->header();
  turn_++;
  if (header.arrivals.fetch_add(1, std::memory_order_acq_rel) + 1 == ranks_.size()) {
    header.arrivals.store(0, std::memory_order_relaxed);  // no member arrives again before the phase changes
    // Sequentially consistent, like the sleeper's side: either it sees the new phase or we see the sleeper.
    header.phase.fetch_add(2, std::memory_order_seq_cst);
    if (header.sleepers.load(std::memory_order_seq_cst) > 0) wakeAll(header.phase);
  }
  // After the counter: a lost member without this mark has not arrived.
  segment_->memberState(self_).arrived.store(turn_, std::memory_order_release);
  setCrossHost(CrossHost::kIdle);
  if (!isReleased()) spin();
  if (!isReleased()) sleep();
  if (failed()) raise();
}

bool SharedBarrier::isReleased() const {
  const uint32_t phase = segment_->header().phase.load(std::memory_order_acquire);
  return (phase & kFailed) != 0 || phase >> 1 == (turn_ & (UINT32_MAX >> 1));
}

void SharedBarrier::spin() const {
  const auto until = Clock::now() + spin_;
  do {
    for (int i = 0; i < kPausesPerClockRead; i++) {
      if (isReleased()) return;
      relax();
    }
  } while (Clock::now() < until);
}

void SharedBarrier::sleep() {
  SegmentHeader& header = segment_->header();
  const timespec slice{0, std::chrono::nanoseconds(kSleepSlice).count()};
  WaitState watch;
  struct Sleeper {
    std::atomic<uint32_t>& count;
    explicit Sleeper(std::atomic<uint32_t>& count) : count(count) { count.fetch_add(1, std::memory_order_seq_cst); }
    ~Sleeper() { count.fetch_sub(1, std::memory_order_relaxed); }
  } sleeper(header.sleepers);
  while (!isReleased()) {
    const uint32_t phase = header.phase.load(std::memory_order_seq_cst);
    if (isReleased()) return;
    const auto before = Clock::now();
    futex(header.phase, FUTEX_WAIT, phase, &slice);
    if (isReleased()) return;
    const auto now = Clock::now();
    if (now - before > kReportInterval) watch.begin += now - before;  // this process or the whole machine was stopped
    mesh_.pollOnce();
    if (now >= watch.nextReport) {
      mesh_.onWaitInterval(watch.begin, ranksToReport());
      watch.nextReport = now + kReportInterval;
    }
    failOnLostMember();
    if (now >= std::max(watch.nextTimeoutCheck, mesh_.deadlineOf(watch.begin))) failOnTimeout(watch);
  }
}

std::vector<int> SharedBarrier::missing() const {
  std::vector<int> members;
  for (int m = 0; m < static_cast<int>(ranks_.size()); m++) {
    if (segment_->memberState(m).arrived.load(std::memory_order_acquire) != turn_) members.push_back(m);
  }
  return members;
}

// Missing ranks that do not wait for other hosts. Only the first member that has arrived reports them.
std::vector<int> SharedBarrier::ranksToReport() const {
  std::vector<int> ranks;
  const std::vector<int> members = missing();
  for (int m = 0; m < self_; m++) {
    if (std::find(members.begin(), members.end(), m) == members.end()) return ranks;
  }
  for (int m : members) {
    if (segment_->memberState(m).crossHost.load(std::memory_order_relaxed) == CrossHost::kIdle)
      ranks.push_back(ranks_[static_cast<size_t>(m)]);
  }
  return ranks;
}

void SharedBarrier::failOnLostMember() {
  for (size_t m = 0; m < ranks_.size(); m++) {
    // In this order: an arrival before the member ended counts.
    if (!lost_[m]) continue;
    const MemberState& state = segment_->memberState(static_cast<int>(m));
    if (state.arrived.load(std::memory_order_acquire) == turn_) continue;
    if (isReleased()) return;
    const Failure loss = makeLossFailure(static_cast<int>(m));
    mesh_.abort(loss.cause, loss.ranks, loss.what());
    mesh_.check();
  }
}

Failure SharedBarrier::makeLossFailure(int member) const {
  const int rank = ranks_[static_cast<size_t>(member)];
  return Failure(Cause::kPeerLost, {rank},
                 "rank " + std::to_string(mesh_.rank) + ": rank " + std::to_string(rank) +
                     ", on the same host: its process has ended, or it has closed the group");
}

// A member that waits for other hosts will report the cause itself, as long as it is alive and has a deadline. That
// deadline is for one of its many waits, so each that succeeds gives it as much time again.
void SharedBarrier::failOnTimeout(WaitState& watch) {
  const auto now = Clock::now();
  std::vector<int> ranks, acrossHosts;
  std::vector<uint32_t> heartbeats;
  uint32_t progress = 0;
  for (int m : missing()) {
    const MemberState& state = segment_->memberState(m);
    const size_t nth = heartbeats.size();
    progress += state.progress.load(std::memory_order_relaxed);
    heartbeats.push_back(state.heartbeat.load(std::memory_order_relaxed));
    const bool crossHost = state.crossHost.load(std::memory_order_relaxed) != CrossHost::kIdle;
    const bool alive = nth >= watch.heartbeats.size() || watch.heartbeats[nth] != heartbeats[nth];
    const bool excused = crossHost && (watch.onlyCrossHostSince > now || alive);
    (excused ? acrossHosts : ranks).push_back(ranks_[static_cast<size_t>(m)]);
  }
  if (watch.onlyCrossHostSince > now || progress != watch.progress) watch.onlyCrossHostSince = now;
  watch.progress = progress;
  if (ranks.empty() && now < watch.onlyCrossHostSince + mesh_.limit() + kGrace) {
    watch.heartbeats = std::move(heartbeats);
    watch.nextTimeoutCheck = now + kSilenceLimit;
    return;
  }
  if (isReleased()) return;
  const bool onlyAcrossHosts = ranks.empty();
  if (onlyAcrossHosts) ranks = std::move(acrossHosts);
  std::string names;
  for (int rank : ranks) names += (names.empty() ? "" : ", ") + std::to_string(rank);
  mesh_.abort(Cause::kTimeout, ranks,
              "rank " + std::to_string(mesh_.rank) + ": shared memory timed out after " +
                  std::to_string(mesh_.limit().count()) + " ms, waiting for rank(s) " + names +
                  (onlyAcrossHosts ? ", which wait for other hosts" : ""));
  mesh_.check();
}

void SharedBarrier::publish(const Failure& failure) {
  SegmentHeader& header = segment_->header();
  uint32_t none = 0;
  if (header.failureState.compare_exchange_strong(none, 1, std::memory_order_acq_rel)) {
    std::vector<char> body = encodeFailure(failure);
    if (body.size() > kMaxFailureBytes) body = encodeFailure(Failure(failure.cause, {}, failure.what()));
    std::memcpy(header.body, body.data(), body.size());
    header.bodySize = static_cast<uint32_t>(body.size());
    header.failureState.store(2, std::memory_order_release);
  }
  header.phase.fetch_or(kFailed, std::memory_order_seq_cst);
  wakeAll(header.phase);
}

Failure SharedBarrier::failure() const {
  const SegmentHeader& header = segment_->header();
  const auto until = Clock::now() + kFailureWriteTimeout;
  while (header.failureState.load(std::memory_order_acquire) != 2) {
    // The member that began to write it has died.
    if (Clock::now() > until) return Failure(Cause::kAborted, {}, "a member of this host ended the group");
    std::this_thread::yield();
  }
  return decodeFailure(std::vector<char>(header.body, header.body + header.bodySize), ranks_[0]);
}

void SharedBarrier::raise() {
  const Failure failure = this->failure();
  mesh_.abort(failure.cause, failure.ranks, failure.what());
  mesh_.check();
  throw failure;
}

}  // namespace elastic
