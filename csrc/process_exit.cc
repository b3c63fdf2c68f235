#include "process_exit.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <string>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace elastic {
namespace {

constexpr unsigned long kThreadExits = 0x4;  // PF_EXITING, of the kernel
constexpr unsigned long kKilled = 1UL << (SIGKILL - 1);  // each thread of a killed process has it until it runs again

// From the kernel's record of a thread, in /proc. True for one that is gone.
bool isThreadExiting(const std::string& task) {
  const int file = open((task + "/stat").c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return true;
  char record[1024];
  const ssize_t length = read(file, record, sizeof record);
  close(file);
  if (length <= 0) return true;
  const std::string text(record, static_cast<size_t>(length));
  std::istringstream fields(text.substr(text.rfind(')') + 2));  // the name before may have any characters
  std::string field;
  unsigned long flags = 0, pending = 0;
  for (int number = 3; number <= 31 && fields >> field; number++) {  // by the numbers of proc(5)
    if (number == 9) flags = std::strtoul(field.c_str(), nullptr, 10);
    if (number == 31) pending = std::strtoul(field.c_str(), nullptr, 10);
  }
  return (flags & kThreadExits) || (pending & kKilled);
}

}  // namespace

bool isExiting(int pid) {
  const std::string tasks = "/proc/" + std::to_string(pid) + "/task";
  const std::string first = tasks + "/" + std::to_string(pid);
  // Most looks end here: a living process is rarely without its first thread.
  if (access(first.c_str(), F_OK) != 0 || !isThreadExiting(first)) return false;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(tasks.c_str()), closedir);
  if (!folder) return false;
  while (const dirent* entry = readdir(folder.get())) {
    if (entry->d_name[0] != '.' && !isThreadExiting(tasks + "/" + entry->d_name)) return false;
  }
  return true;
}

bool awaitExit(int pid, std::chrono::milliseconds period) {
  const int process = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (process < 0) return false;
  pollfd ended{process, POLLIN, 0};
  while (poll(&ended, 1, static_cast<int>(period.count())) <= 0 && !isExiting(pid)) {
  }
  close(process);
  return true;
}

}  // namespace elastic
