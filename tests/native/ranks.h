// The groups of all ranks of a world in one process, for a thread each.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "group.h"

struct Ranks {
  // hosts[r]: the host that rank r names as its own; empty: sockets only.
  explicit Ranks(int size, uint64_t generation = 1, int timeout = 20000, std::vector<int> hosts = {},
                 bool encrypted = false)
      : hosts(std::move(hosts)) {
    for (int r = 0; r < size; r++) {
      endpoints.push_back(std::make_shared<elastic::Endpoint>("key", "127.0.0.1", 0, 0, "", encrypted));
    }
    build(generation, timeout);
  }

  void build(uint64_t generation, int timeout = 20000) {
    std::vector<std::string> peers;
    for (const auto& endpoint : endpoints) peers.push_back(endpoint->address());
    groups.clear();
    elastic::GroupOptions options;
    options.timeout = std::chrono::milliseconds(timeout);
    for (size_t r = 0; r < endpoints.size(); r++) {
      options.local.clear();
      for (size_t peer = 0; peer < hosts.size(); peer++) {
        if (hosts[peer] == hosts[r]) options.local.push_back(static_cast<int>(peer));
      }
      const elastic::Fence fence{1, generation};
      groups.push_back(std::make_unique<elastic::Group>(endpoints[r], static_cast<int>(r), peers, fence, options));
    }
  }

  // Runs the call for each rank in a thread of its own; returns what each of them threw.
  std::vector<std::string> each(const std::function<void(elastic::Group&)>& call) {
    std::vector<std::string> thrown(groups.size());
    std::vector<std::thread> threads;
    for (size_t r = 0; r < groups.size(); r++) {
      threads.emplace_back([&, r] { thrown[r] = thrownBy([&] { call(*groups[r]); }); });
    }
    for (auto& thread : threads) thread.join();
    return thrown;
  }

  std::mutex mutex;
  std::vector<std::string> told;  // guarded by the mutex while ranks run
  std::vector<int> hosts;
  std::vector<std::shared_ptr<elastic::Endpoint>> endpoints;
  std::vector<std::unique_ptr<elastic::Group>> groups;
};
