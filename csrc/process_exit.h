// The end of another process of this host, seen before the kernel reports it. It frees the memory of a process first,
// which takes 0.1 s for a large one.
#pragma once

#include <chrono>

namespace elastic {

// Whether all threads of a process exit, have exited, or must exit next, as after SIGKILL. False if this process cannot
// see it.
bool isExiting(int pid);

// Blocks until the process exits or has ended; looks once a period. Returns false at once if it cannot be watched, as on
// a Linux before 5.3.
bool awaitExit(int pid, std::chrono::milliseconds period);

}  // namespace elastic
