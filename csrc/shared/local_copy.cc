// Broadcast and gather in shared memory: chunk p is copied in while chunk p - 1 is copied out.
#include <algorithm>
#include <cstring>

#include "shared/local_group.h"

namespace elastic {

void LocalGroup::broadcast(void* data, size_t bytes, int root, const Call& call) {
  const size_t chunk = segment_->chunk() * static_cast<size_t>(members_);  // all slots of a bank, side by side
  const auto operand = static_cast<char*>(data);
  memories_.forget();
  uint32_t now = gate_.bank();
  post(call, data, bytes);
  const bool shared = segment_->notice(now, self_).extent != 0;
  for (size_t at = 0; at < bytes; at += chunk) {
    now = gate_.bank();
    char* const slots = segment_->slot(now, 0);
    if (self_ == root && !shared) std::memcpy(slots, operand + at, std::min(chunk, bytes - at));
    gate_.pass();
    if (at == 0) check(now, call);
    if (at == 0 && segment_->notice(now, root).extent != 0) return broadcastInPlace(operand, bytes, root, now);
    if (self_ != root) std::memcpy(operand + at, slots, std::min(chunk, bytes - at));
  }
}

// The root's operand lies in shared memory: all copy it from there.
void LocalGroup::broadcastInPlace(char* operand, size_t bytes, int root, uint32_t bank) {
  if (self_ != root) std::memcpy(operand, operandOf(root, bank, bytes), bytes);
  gate_.pass();
}

void LocalGroup::gather(const void* own, const std::vector<char*>& out, const std::vector<size_t>& sizes,
                        const Call& call) {
  const size_t chunk = segment_->chunk(), longest = *std::max_element(sizes.begin(), sizes.end());
  const size_t mine = sizes[static_cast<size_t>(self_)];
  if (out[static_cast<size_t>(self_)] != own && mine > 0) std::memcpy(out[static_cast<size_t>(self_)], own, mine);
  for (size_t at = 0; at < longest; at += chunk) {
    const uint32_t now = gate_.bank();
    if (at == 0) post(call, nullptr, 0);
    if (at < mine)
      std::memcpy(segment_->slot(now, self_), static_cast<const char*>(own) + at, std::min(chunk, mine - at));
    gate_.pass();
    if (at == 0) check(now, call);
    for (int m = 0; m < members_; m++) {
      const size_t size = sizes[static_cast<size_t>(m)];
      if (m == self_ || at >= size) continue;
      std::memcpy(out[static_cast<size_t>(m)] + at, segment_->slot(now, m), std::min(chunk, size - at));
    }
  }
}

}  // namespace elastic
