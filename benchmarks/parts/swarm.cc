// Thousands of slots and workers as the rendezvous server sees them: real connections, signed requests, long polls. One
// thread, epoll. It checks the proof of every answer, as the real client does.
//
//   swarm HOST PORT KEY-IN-HEX WORKERS CONNECTIONS
//
// CONNECTIONS is 4, what a real slot and its worker have (a long poll and all else, each), or 1: a worker that sends its
// requests one after the other, where this machine has too few files for more. Orders come as lines, and each is
// answered by a line of numbers: seconds (monotonic) of its begin and its end, own processor seconds since the start of
// the process, then the count and the bytes (heads, bodies) of the answers that came for this order.
//
//   come | rendezvous | lose INDEX | beat SECONDS PACED
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <openssl/sha.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <string>
#include <vector>

using std::string;

namespace {

constexpr int kAtOnce = 64;  // workers that come at the same time
constexpr int kPerHost = 8;
constexpr int kVersion = WIRE_VERSION;
constexpr int kWorldsToldAll = SMALL_WORLD;  // members of a world up to this size are told all addresses

[[noreturn]] void die(const string& why) {
  fprintf(stderr, "swarm: %s\n", why.c_str());
  exit(1);
}

double now(clockid_t clock = CLOCK_MONOTONIC) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// ---- HMAC-SHA256 under the job's key, whose two first blocks are digested once

SHA256_CTX inner, outer;

void setKey(const string& key) {
  unsigned char pad[64];
  for (const auto& [context, mask] : {std::pair{&inner, 0x36}, std::pair{&outer, 0x5c}}) {
    for (size_t i = 0; i < sizeof pad; i++) pad[i] = static_cast<unsigned char>((i < key.size() ? key[i] : 0) ^ mask);
    SHA256_Init(context);
    SHA256_Update(context, pad, sizeof pad);
  }
}

string sign(const string& head, const char* body, size_t size) {
  unsigned char digest[32];
  SHA256_CTX context = inner;
  SHA256_Update(&context, "spark-elastic/1\n", 16);
  SHA256_Update(&context, head.data(), head.size());
  SHA256_Update(&context, body, size);
  SHA256_Final(digest, &context);
  context = outer;
  SHA256_Update(&context, digest, sizeof digest);
  SHA256_Final(digest, &context);
  string hex;
  for (const unsigned char byte : digest) {
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  return hex.substr(0, SIGNATURE_DIGITS);
}

// ---- what an answer says

// JSON of a reply: a list, or the text of anything else. Fields at their default are missing at the end of a list.
struct Row {
  string text;  // without quotes
  std::vector<Row> items;

  const Row& at(size_t place) const {
    static const Row none;
    return place < items.size() ? items[place] : none;
  }
  long number() const { return atol(text.c_str()); }
};

Row parse(const string& body, size_t& at) {
  Row row;
  if (body[at] != '[') {
    const bool isQuoted = body[at] == '"';
    const size_t from = at + isQuoted, end = body.find_first_of(isQuoted ? "\"" : ",]", from);
    row.text = body.substr(from, end - from);
    at = end + isQuoted;
    return row;
  }
  while (body.at(++at) != ']') {
    row.items.push_back(parse(body, at));
    if (body.at(at) == ']') break;
  }
  at++;
  return row;
}

// ---- connections

using OnAnswer = std::function<void(const Row& reply)>;

int epoll = -1;
sockaddr_in server{};
size_t answers = 0, headBytes = 0, bodyBytes = 0;
std::mt19937_64 random64(7);

class Line {
 public:
  // `onAnswer` gets the reply. One request at a time.
  void post(const string& kind, const string& message, double hold, OnAnswer onAnswer) {
    char head[96];
    snprintf(head, sizeof head, "{\"v\":%d,\"attempt\":1,\"hold\":%g,\"message\":{", kVersion, hold);
    const string path = "/rendezvous/" + kind, body = head + message + "}}";
    if (fd_ >= 0) return send(path, body, std::move(onAnswer));
    open();
    session_.clear();
    for (int i = 0; i < 32; i++) session_ += "0123456789abcdef"[random64() & 15];
    send("/rendezvous/hello", "", [this, path, body, onAnswer = std::move(onAnswer)](const Row& session) mutable {
      session_ = session.text;
      send(path, body, std::move(onAnswer));
    });
  }

  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

  void onReadable() {
    char buffer[65536];
    const ssize_t size = recv(fd_, buffer, sizeof buffer, 0);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (size <= 0) die("the server closed a connection for " + waitsFor_);
    received_.append(buffer, static_cast<size_t>(size));
    const size_t end = received_.find("\r\n\r\n");
    if (end == string::npos) return;
    const string head = received_.substr(0, end + 2);
    const size_t length = static_cast<size_t>(atol(field(head, "content-length").c_str()));
    if (received_.size() < end + 4 + length) return;
    const string body = received_.substr(end + 4, length);
    received_.erase(0, end + 4 + length);
    const string status = head.substr(9, 3);
    const string proof = "reply\n" + session_ + "\n" + std::to_string(count_ - 1) + "\n" + status + "\n";
    const string session = "{\"session\":\"";
    const bool isSession = body.compare(0, session.size(), session) == 0;
    if (status != "200" || (body[0] != '[' && !isSession)) die(head + body.substr(0, 500));
    if (field(head, SIGNATURE_FIELD) != sign(proof, body.data(), body.size())) die("a wrong proof");
    answers++;
    headBytes += end + 4;
    bodyBytes += length;
    const OnAnswer onAnswer = std::move(onAnswer_);
    onAnswer_ = nullptr;
    size_t begin = isSession ? session.size() - 1 : 0;
    onAnswer(parse(body, begin));
  }

 private:
  static string field(const string& head, const string& name) {
    const size_t at = head.find("\r\n" + name + ": ");
    if (at == string::npos) die("an answer has no " + name + ": " + head);
    const size_t from = at + name.size() + 4;
    return head.substr(from, head.find("\r\n", from) - from);
  }

  void open() {
    fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd_ < 0) die(string("socket: ") + strerror(errno));
    const int one = 1;
    setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(fd_, reinterpret_cast<const sockaddr*>(&server), sizeof server) != 0) die(strerror(errno));
    fcntl(fd_, F_SETFL, O_NONBLOCK);
    count_ = 0;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = this;
    epoll_ctl(epoll, EPOLL_CTL_ADD, fd_, &event);
  }

  void send(const string& path, const string& body, OnAnswer onAnswer) {
    if (onAnswer_) die("a second request on a connection: " + path);
    waitsFor_ = path;
    const string count = std::to_string(count_++);
    const string head = "request\nPOST\n" + path + "\n" + session_ + "\n" + count + "\n";
    const string text = "POST " + path + " HTTP/1.1\r\nhost: driver\r\ncontent-length: " + std::to_string(body.size()) +
                        "\r\nauthorization: Elastic " + session_ + "." + count + "." +
                        sign(head, body.data(), body.size()) + "\r\n\r\n" + body;
    onAnswer_ = std::move(onAnswer);
    if (::send(fd_, text.data(), text.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(text.size())) die("send");
  }

  int fd_ = -1;
  string session_, received_, waitsFor_;
  long count_ = 0;
  OnAnswer onAnswer_;
};

// ---- workers

int connections = 4;
size_t pending = 0;  // workers that have not done what was ordered
double finished = 0.0;
std::priority_queue<std::pair<double, std::function<void()>*>, std::vector<std::pair<double, std::function<void()>*>>,
                    std::greater<>>
    timers;

void callAt(double when, std::function<void()> call) { timers.emplace(when, new std::function<void()>(std::move(call))); }

void finish() {
  finished = now();
  pending--;
}

class Worker {
 public:
  explicit Worker(int job)
      : slot_(std::to_string(job) + "-0"), name_(slot_ + ".1"), host_("host-" + std::to_string(job / kPerHost)) {
    address_ = "10.1." + std::to_string(job / 250) + "." + std::to_string(job % 250) + ":40001";
  }

  void come(const std::function<void()>& done) {
    const string slot = "\"slot\":\"" + slot_ + "\"";
    line(kSlot).post("RegisterSlot", slot + ",\"host\":\"" + host_ + "\",\"launch\":" + slot_.substr(0, slot_.find('-')), 0,
                     [this, slot, done](const Row&) {
      line(kSlot).post("WorkerStarted", slot + ",\"worker\":\"" + name_ + "\"", 0, [this, done](const Row&) {
        if (connections > 1) watchSlot();
        if (connections > 1) watch();
        done();
      });
    });
  }

  void ask(bool planned, int suspect = -1) {
    string message = me() + ",\"fence\":" + fence_ + ",\"planned\":" +
                     (planned ? "true" : "false") + ",\"address\":\"" + address_ + "\"";
    if (generation_ > 0) message += ",\"position\":{\"epoch\":0,\"phase\":0,\"step\":" + std::to_string(generation_) + "}";
    if (suspect >= 0) message += ",\"reason\":\"its group broke\",\"suspected_ranks\":[" + std::to_string(suspect) + "]";
    line(kWorker).post("RequestNextWorld", message, 20, [this, planned, suspect](const Row& reply) {
      const Row& world = reply.at(0);
      if (world.items.empty()) return ask(planned, suspect);
      generation_ = world.at(0).at(1).number();
      fence_ = fenceOf(world.at(0));
      rank_ = world.at(2).at(3).number();
      const long size = world.at(1).number();
      moveKnown(reply.at(3));
      if (size <= kWorldsToldAll) return tellFormed();
      // What its collectives need: the next rank's and, among hosts' first ranks, those at the distances of a tree.
      std::vector<long> ranks;
      if (rank_ + 1 < size) need(rank_ + 1, ranks);
      for (long step = kPerHost; rank_ % kPerHost == 0 && rank_ + step < size; step *= 2) need(rank_ + step, ranks);
      if (ranks.empty()) return tellFormed();
      string listed;
      for (const long rank : ranks) listed += (listed.empty() ? "" : ",") + std::to_string(rank);
      line(kWorker).post("FindAddresses", me() + ",\"fence\":" + fence_ + ",\"ranks\":[" + listed + "]", 0,
                         [this, ranks](const Row& found) {
        for (size_t i = 0; i < ranks.size(); i++) known_[ranks[i]] = found.at(0).at(i).text;
        tellFormed();
      });
    });
  }

  void beat(double due, double end, bool paced) {
    if (due >= end) return finish();
    callAt(due, [this, due, end, paced] {
      const string message = "\"slot\":\"" + slot_ + "\",\"worker\":\"" + name_ +
                             "\",\"state\":\"S\",\"waits\":true,\"seconds\":0.1";
      line(kSlot).post("Heartbeat", message, 0, [this, due, end, paced](const Row& reply) {
        const double every = reply.items.empty() ? 1.0 : atof(reply.at(0).text.c_str());
        beat(std::max(due + (paced ? every : 0.0), now()), end, paced);
      });
    });
  }

  // Its process is killed; its slot reports that.
  void die() {
    isDead_ = true;
    all_[kWorker].close();
    all_[kWorkerWatch].close();
    const string message = "\"slot\":\"" + slot_ + "\",\"worker\":\"" + name_ + "\",\"exit_code\":-9";
    if (connections > 1) line(kSlot).post("WorkerExited", message, 0, [](const Row&) {});
    else reporter_.post("WorkerExited", message, 0, [](const Row&) {});
  }

  bool isDead() const { return isDead_; }
  void setSuspect(long suspect) { suspect_ = suspect; }
  long rank() const { return rank_; }

 private:
  enum { kSlot, kWorker, kSlotWatch, kWorkerWatch };

  static string fenceOf(const Row& fence) {
    return "{\"attempt\":" + fence.at(0).text + ",\"generation\":" + fence.at(1).text + "}";
  }

  // The addresses that it knows, by the ranks of the world that it got now.
  void moveKnown(const Row& runs) {
    std::map<long, string> known;
    long rank = 0;
    for (const Row& run : runs.items) {
      const long first = run.at(0).number(), count = run.at(1).number();
      for (auto at = known_.lower_bound(first); first >= 0 && at != known_.end() && at->first < first + count; at++) {
        known[at->first + rank - first] = at->second;
      }
      rank += count;
    }
    known_.swap(known);
  }

  void need(long rank, std::vector<long>& ranks) const {
    if (known_.count(rank) == 0) ranks.push_back(rank);
  }

  string me() const { return "\"worker\":\"" + name_ + "\""; }
  Line& line(size_t which) { return all_[connections > 1 ? which : static_cast<size_t>(kWorker)]; }

  void tellFormed() {
    line(kWorker).post("WorldFormed", me() + ",\"fence\":" + fence_, 0, [this](const Row&) {
      finish();
      if (connections == 1) watch();
    });
  }

  void watchSlot() {
    line(kSlotWatch).post("WatchSlot", "\"slot\":\"" + slot_ + "\",\"seen\":0", 20, [this](const Row& commands) {
      if (commands.items.size() < 3) watchSlot();
    });
  }

  void watch() {
    const string message = me() + ",\"ended_fence\":" + ended_ + ",\"version\":" + version_;
    line(kWorkerWatch).post("WatchWorker", message, 20, [this](const Row& update) {
      const string before = ended_;
      if (!update.at(0).items.empty()) ::die("no order announces a change");
      if (update.items.size() > 1) ended_ = fenceOf(update.at(1));
      if (connections > 1) watch();
      const bool isOver = ended_ != before && ended_ == fence_;
      if (isOver && suspect_ >= 0) return ask(false, static_cast<int>(suspect_));
      if (connections == 1) watch();
    });
  }

  const string slot_, name_, host_;
  std::map<long, string> known_;  // addresses of members of its world, by rank
  string address_, fence_ = "null", ended_ = "null", version_ = "{\"number\":0,\"job_ends\":false,\"update\":0}";
  long generation_ = 0, rank_ = -1, suspect_ = -1;
  bool isDead_ = false;
  std::array<Line, 4> all_;
  Line reporter_;
};

std::vector<std::unique_ptr<Worker>> workers;

void runUntilDone() {
  std::vector<epoll_event> events(512);
  while (pending > 0) {
    const double left = timers.empty() ? 1.0 : timers.top().first - now();
    const int ready = epoll_wait(epoll, events.data(), static_cast<int>(events.size()),
                                 static_cast<int>(std::max(0.0, std::min(1.0, left) * 1000)));
    for (int i = 0; i < ready; i++) static_cast<Line*>(events[static_cast<size_t>(i)].data.ptr)->onReadable();
    while (!timers.empty() && timers.top().first <= now()) {
      const std::unique_ptr<std::function<void()>> call(timers.top().second);
      timers.pop();
      (*call)();
    }
  }
}

void obey(const string& line) {
  char what[32] = "";
  double first = 0, second = 0;
  sscanf(line.c_str(), "%31s %lf %lf", what, &first, &second);
  answers = headBytes = bodyBytes = 0;
  const double begun = now();
  const string order = what;
  size_t next = 0;
  std::function<void()> comeNext = [&] {
    if (next < workers.size()) workers[next++]->come([&] { finish(), comeNext(); });
  };
  for (auto& worker : workers) pending += !worker->isDead();
  if (order == "come") {
    for (int i = 0; i < kAtOnce; i++) comeNext();
  } else if (order == "rendezvous") {
    for (auto& worker : workers) {
      if (!worker->isDead()) worker->ask(true);
    }
  } else if (order == "lose") {
    Worker& lost = *workers.at(static_cast<size_t>(first));
    for (auto& worker : workers) worker->setSuspect(lost.rank());
    pending--;
    lost.die();
  } else {
    size_t i = 0;
    for (auto& worker : workers) {
      const double offset = second != 0 ? first * static_cast<double>(i++) / static_cast<double>(workers.size()) : 0;
      if (!worker->isDead()) worker->beat(begun + std::min(offset, 1.0), begun + first, second != 0);
    }
  }
  runUntilDone();
  printf("%.9f %.9f %.9f %zu %zu %zu\n", begun, finished, now(CLOCK_PROCESS_CPUTIME_ID), answers, headBytes, bodyBytes);
  fflush(stdout);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 6) die("five arguments are needed");
  server.sin_family = AF_INET;
  inet_pton(AF_INET, arguments[1], &server.sin_addr);
  server.sin_port = htons(static_cast<uint16_t>(atoi(arguments[2])));
  string key;
  for (const char* at = arguments[3]; at[0] != 0 && at[1] != 0; at += 2) {
    key += static_cast<char>(strtol(string(at, 2).c_str(), nullptr, 16));
  }
  setKey(key);
  connections = atoi(arguments[5]);
  epoll = epoll_create1(EPOLL_CLOEXEC);
  for (int job = 1; job <= atoi(arguments[4]); job++) workers.push_back(std::make_unique<Worker>(job));
  char line[128];
  // Between orders the long polls that are open are answered late, which no order measures.
  while (fgets(line, sizeof line, stdin) != nullptr) obey(line);
}
