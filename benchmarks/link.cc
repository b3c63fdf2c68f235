// A wire between two network namespaces: packets arrive after a delay, and no faster than a rate.
//
//     link /run/netns/A /run/netns/B BITS_PER_SECOND DELAY_SECONDS
//
// The kernel's netem does the same where it is built in. Each end is a tun device named wire0, one thread carries each
// direction, a queue that is longer than BACKLOG drops its tail as a switch does. "ready" is printed once both are
// there.

#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr double kBacklog = 0.020;  // seconds that a queue may hold
constexpr size_t kLargest = 65536;  // bytes of a packet

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::exit(1);
}

int open_end(const char* space) {
  const int home = ::open("/proc/self/ns/net", O_RDONLY);
  const int away = ::open(space, O_RDONLY);
  if (home < 0 || away < 0 || ::setns(away, CLONE_NEWNET) != 0) fail(space);
  const int end = ::open("/dev/net/tun", O_RDWR | O_NONBLOCK);
  if (end < 0) fail("/dev/net/tun");
  ifreq request{};
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  std::strncpy(request.ifr_name, "wire0", IFNAMSIZ - 1);
  if (::ioctl(end, TUNSETIFF, &request) != 0) fail("TUNSETIFF");
  if (::setns(home, CLONE_NEWNET) != 0) fail("setns");
  ::close(home);
  ::close(away);
  return end;
}

struct Packet {
  Clock::time_point due;
  std::vector<char> bytes;
};

class Direction {
 public:
  Direction(int from, int to, double rate, double delay) : from_(from), to_(to), rate_(rate), delay_(delay) {}

  void carry() {
    for (;;) {
      await();
      take_in();
      hand_out();
    }
  }

 private:
  void await() {
    pollfd readable{from_, POLLIN, 0};
    timespec until_due{};
    if (!queue_.empty()) {
      const auto left = std::chrono::nanoseconds(queue_.front().due - Clock::now()).count();
      until_due.tv_nsec = left > 0 ? left : 0;  // the queue is shorter than a second
    }
    ::ppoll(&readable, 1, queue_.empty() ? nullptr : &until_due, nullptr);
  }

  void take_in() {
    for (;;) {
      const ssize_t length = ::read(from_, room_, sizeof room_);
      if (length <= 0) return;
      const auto now = Clock::now();
      const auto begins = std::max(now, free_at_);
      if (Seconds(begins - now).count() > kBacklog) continue;
      free_at_ = begins + std::chrono::duration_cast<Clock::duration>(Seconds(length * 8 / rate_));
      const auto due = free_at_ + std::chrono::duration_cast<Clock::duration>(Seconds(delay_));
      queue_.push_back({due, std::vector<char>(room_, room_ + length)});
    }
  }

  void hand_out() {
    for (const auto now = Clock::now(); !queue_.empty() && queue_.front().due <= now; queue_.pop_front()) {
      const auto& bytes = queue_.front().bytes;
      if (::write(to_, bytes.data(), bytes.size()) < 0) continue;  // lost, as on any wire
    }
  }

  int from_, to_;
  double rate_, delay_;
  Clock::time_point free_at_{};
  std::deque<Packet> queue_;
  char room_[kLargest];
};

}  // namespace

int main(int count, char** words) {
  if (count != 5) return 2;
  const int one = open_end(words[1]), other = open_end(words[2]);
  const double rate = std::atof(words[3]), delay = std::atof(words[4]);
  std::puts("ready");
  std::fflush(stdout);
  std::thread([&] { Direction(one, other, rate, delay).carry(); }).detach();
  Direction(other, one, rate, delay).carry();
}
