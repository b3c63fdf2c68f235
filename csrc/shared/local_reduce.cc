// Reductions in shared memory: small ones by everybody, larger ones part by part, through slots or in place.
#include <algorithm>
#include <cstring>

#include "shared/local_group.h"

namespace elastic {
namespace {

constexpr size_t kSmall = size_t{32} << 10;  // bytes up to which every member reduces everything: one meeting
constexpr size_t kLine = 64;

// Where the members' parts of `count` elements begin; full cache lines each, so that nobody writes into another's.
size_t startOf(int member, int members, size_t count, size_t width) {
  const size_t line = kLine / width, each = (count + static_cast<size_t>(members) - 1) / static_cast<size_t>(members);
  return std::min(count, (each + line - 1) / line * line * static_cast<size_t>(member));
}

}  // namespace

// One reduction that goes through the slots. All chunks are cut into parts at the same places: a slot holds the result
// for one chunk beside what is copied in of the next.
struct LocalGroup::Chunked {
  Chunked(void* operand, size_t count, const Reduction& reduction, const Call& call, size_t slot, int members)
      : data(static_cast<char*>(operand)),
        count(count),
        width(widthOf(reduction.type)),
        reduction(reduction),
        call(call) {
    const size_t unit = kLine / width * static_cast<size_t>(members);
    const size_t most = slot / width / unit * unit, chunks = (count + most - 1) / most;
    chunk = ((count + chunks - 1) / chunks + unit - 1) / unit * unit;
    part = chunk / static_cast<size_t>(members);
  }

  size_t chunks() const { return (count + chunk - 1) / chunk; }
  size_t lengthOf(size_t c) const { return std::min(chunk, count - c * chunk); }
  char* at(size_t c) const { return data + c * chunk * width; }
  // Where a member's part of chunk c begins.
  size_t startOf(int member, size_t c) const { return std::min(lengthOf(c), part * static_cast<size_t>(member)); }

  char* const data;
  const size_t count, width;
  const Reduction& reduction;
  const Call& call;
  bool toAll = true;
  size_t chunk, part;  // elements
};

void LocalGroup::allreduce(void* data, size_t count, const Reduction& reduction, const Call& call, bool toAll) {
  const size_t width = widthOf(reduction.type), bytes = count * width;
  memories_.forget();
  if (bytes <= kSmall) return reduceSmall(data, count, reduction, call);
  Chunked work(data, count, reduction, call, segment_->chunk(), members_);
  work.toAll = toAll;
  const uint32_t bank = gate_.bank();
  post(call, data, bytes);
  const bool shared = segment_->notice(bank, self_).extent != 0;
  if (!shared) return reduceChunks(work, true);
  gate_.pass();
  check(bank, call);
  if (extents(bank) == members_) return reduceInPlace(bank, count, reduction, toAll);
  reduceChunks(work, false);
}

void LocalGroup::reduceSmall(void* data, size_t count, const Reduction& reduction, const Call& call) {
  const uint32_t bank = gate_.bank();
  std::memcpy(segment_->slot(bank, self_), data, count * widthOf(reduction.type));
  post(call, nullptr, 0);
  gate_.pass();
  check(bank, call);
  std::vector<const char*> parts;
  for (int m = 0; m < members_; m++) parts.push_back(segment_->slot(bank, m));
  foldParts(reduction, parts, count, scratch_.get(), static_cast<char*>(data));
}

// Phase p copies chunk p in, reduces this member's part of chunk p - 1 and copies chunk p - 2 out. `mayRestart`: this
// is also the first meeting, at which it shows whether others wait to see that not all operands lie in shared memory.
void LocalGroup::reduceChunks(Chunked& work, bool mayRestart) {
  const size_t chunks = work.chunks();
  for (size_t p = 0; p < chunks + 2; p++) {
    const uint32_t now = gate_.bank(), before = now ^ 1;
    if (p < chunks) copyIn(work, p, now);
    if (p >= 1 && p - 1 < chunks) reducePart(work, p - 1, before, now);
    if (p >= 2 && (work.toAll || self_ == 0)) copyOut(work, p - 2, before);
    if (p == chunks + 1) return;
    gate_.pass();
    if (p > 0 || !mayRestart) continue;
    check(now, work.call);
    if (extents(now) > 0) return reduceChunks(work, false);
  }
}

// What others reduce; one's own part is read where it lies.
void LocalGroup::copyIn(const Chunked& work, size_t c, uint32_t bank) {
  const size_t count = work.lengthOf(c), width = work.width;
  const size_t first = work.startOf(self_, c), last = work.startOf(self_ + 1, c);
  char* const slot = segment_->slot(bank, self_);
  std::memcpy(slot, work.at(c), first * width);
  std::memcpy(slot + last * width, work.at(c) + last * width, (count - last) * width);
}

// The result goes to its place in the slot, which held nothing, and into the operand.
void LocalGroup::reducePart(const Chunked& work, size_t c, uint32_t from, uint32_t to) {
  const size_t width = work.width;
  const size_t last = work.startOf(self_ + 1, c);
  std::vector<const char*> parts(static_cast<size_t>(members_));
  for (size_t at = work.startOf(self_, c); at < last; at += kBlock / width) {
    const size_t some = std::min(kBlock / width, last - at);
    for (int m = 0; m < members_; m++) {
      parts[static_cast<size_t>(m)] = (m == self_ ? work.at(c) : segment_->slot(from, m)) + at * width;
    }
    char* const out = work.at(c) + at * width;
    foldParts(work.reduction, parts, some, scratch_.get(), out);
    std::memcpy(segment_->slot(to, self_) + at * width, out, some * width);
  }
}

void LocalGroup::copyOut(const Chunked& work, size_t c, uint32_t bank) {
  const size_t width = work.width;
  for (int m = 0; m < members_; m++) {
    if (m == self_) continue;
    const size_t first = work.startOf(m, c), last = work.startOf(m + 1, c);
    std::memcpy(work.at(c) + first * width, segment_->slot(bank, m) + first * width, (last - first) * width);
  }
}

// All operands lie in shared memory: each member reduces its part of them and writes it to all.
void LocalGroup::reduceInPlace(uint32_t bank, size_t count, const Reduction& reduction, bool toAll) {
  const size_t width = widthOf(reduction.type);
  std::vector<char*> operands;
  for (int m = 0; m < members_; m++) operands.push_back(operandOf(m, bank, count * width));
  char* const mine = operands[toAll ? static_cast<size_t>(self_) : 0];
  std::vector<const char*> parts(operands.size());
  const size_t last = startOf(self_ + 1, members_, count, width);
  for (size_t at = startOf(self_, members_, count, width); at < last; at += kBlock / width) {
    const size_t some = std::min(kBlock / width, last - at);
    for (size_t m = 0; m < parts.size(); m++) parts[m] = operands[m] + at * width;
    char* const out = mine + at * width;
    foldParts(reduction, parts, some, scratch_.get(), out);
    for (char* operand : operands) {
      if (toAll && operand != mine) std::memcpy(operand + at * width, out, some * width);
    }
  }
  gate_.pass();
}

}  // namespace elastic
