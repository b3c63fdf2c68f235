// Links between network namespaces: packets arrive after a delay, and leave and reach each host no faster than a rate.
//
//     link NAMESPACE ...
//
// The kernel's netem does the same where it is built in. Each host is a namespace with a tun device named wire0, which
// this program makes; packets find their host by the last byte of their address, 1 for the first one. Nothing is lost:
// queues have no end. A line "BITS_PER_SECOND DELAY_SECONDS" changes all links; the answer has the mean seconds by which
// packets were late since the last one. One thread does everything.

#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <queue>
#include <string>
#include <tuple>
#include <vector>

namespace {

constexpr size_t kLargest = 65536;    // bytes of a packet
constexpr int kAtOnce = 8;            // packets of one host that are read before others get a turn
constexpr size_t kDestination = 19;   // where the last byte of an IPv4 destination is

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::exit(1);
}

int openEnd(const std::string& space) {
  const int home = ::open("/proc/self/ns/net", O_RDONLY);
  const int away = ::open(("/run/netns/" + space).c_str(), O_RDONLY);
  if (home < 0 || away < 0 || ::setns(away, CLONE_NEWNET) != 0) fail(space.c_str());
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

struct Host {
  int end;
  double outFree = 0, inFree = 0;  // when its link has carried what it has
};

struct Packet {
  double due;
  size_t number;  // packets that are due at once stay in order
  size_t to;
  size_t bytes;
  std::unique_ptr<char[]> data;
  bool operator<(const Packet& other) const { return std::tie(due, number) > std::tie(other.due, other.number); }
};

class Links {
 public:
  explicit Links(std::vector<Host> hosts) : hosts_(std::move(hosts)) {
    for (const Host& host : hosts_) waits_.push_back({host.end, POLLIN, 0});
    waits_.push_back({STDIN_FILENO, POLLIN, 0});
  }

  void carry() {
    for (;;) {
      await();
      if (waits_.back().revents != 0 && !obey()) return;
      for (size_t i = 0; i < hosts_.size(); i++) {
        if (waits_[i].revents != 0) takeIn(hosts_[i]);
      }
      handOut();
    }
  }

 private:
  void await() {
    const double left = queue_.empty() ? 0.5 : std::clamp(queue_.top().due - now(), 0.0, 0.5);
    const timespec untilDue{0, static_cast<long>(left * 1e9)};
    ::ppoll(waits_.data(), waits_.size(), &untilDue, nullptr);
  }

  bool obey() {
    char line[128];
    const ssize_t length = ::read(STDIN_FILENO, line, sizeof line - 1);
    if (length <= 0) return false;
    line[length] = 0;
    if (std::sscanf(line, "%lf %lf", &rate_, &delay_) != 2) return false;
    std::printf("%.9f\n", carried_ == 0 ? 0.0 : late_ / static_cast<double>(carried_));
    std::fflush(stdout);
    late_ = 0, carried_ = 0;
    return true;
  }

  void takeIn(Host& from) {
    for (int i = 0; i < kAtOnce; i++) {
      const ssize_t length = ::read(from.end, room_, sizeof room_);
      if (length <= 0) return;
      const size_t to = static_cast<unsigned char>(room_[kDestination]) - size_t{1};
      if ((room_[0] >> 4) != 4 || to >= hosts_.size()) continue;
      const double takes = static_cast<double>(length) * 8 / rate_;
      from.outFree = std::max(now(), from.outFree) + takes;
      // It reaches the other host bit by bit, unless other packets come at the same time.
      double& inFree = hosts_[to].inFree;
      inFree = std::max(from.outFree + delay_, inFree + takes);
      auto data = std::make_unique<char[]>(static_cast<size_t>(length));
      std::memcpy(data.get(), room_, static_cast<size_t>(length));
      queue_.push({inFree, number_++, to, static_cast<size_t>(length), std::move(data)});
    }
  }

  void handOut() {
    for (double at = now(); !queue_.empty() && queue_.top().due <= at; queue_.pop()) {
      const Packet& packet = queue_.top();
      late_ += at - packet.due, carried_++;
      if (::write(hosts_[packet.to].end, packet.data.get(), packet.bytes) < 0) continue;  // a host that is down
    }
  }

  std::vector<Host> hosts_;
  std::vector<pollfd> waits_;
  std::priority_queue<Packet> queue_;
  size_t number_ = 0, carried_ = 0;
  double rate_ = 1e9, delay_ = 0, late_ = 0;
  char room_[kLargest];
};

}  // namespace

int main(int count, char** words) {
  ::prctl(PR_SET_TIMERSLACK, 1);
  std::vector<Host> hosts;
  for (int i = 1; i < count; i++) hosts.push_back({openEnd(words[i])});
  std::puts("ready");
  std::fflush(stdout);
  Links(std::move(hosts)).carry();
}
