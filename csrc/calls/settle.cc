// How the ranks of a world find out who shares memory: the driver names them, and each proves it.
//
//   1. Everybody tells its first local rank; that one adds the name under which it hands out the memory.
//   2. The others fetch and map it, and look for the number that came by the mesh.
//   3. Everybody tells whether that went well. A host where it did not for any rank does without, all of it.
#include <algorithm>
#include <cstring>
#include <map>
#include <stdexcept>

#include "calls/hosts.h"

namespace elastic {
namespace {

struct Card {
  int32_t leader = 0;
  uint32_t gives = 0;  // whether it has memory to hand out
  Nonce name{};
  Nonce probe{};
};

template <typename T>
std::vector<char> bytesOf(const T& value) {
  const auto first = reinterpret_cast<const char*>(&value);
  return std::vector<char>(first, first + sizeof value);
}

std::vector<Card> deal(const Card& own, const Gather& gather) {
  std::vector<Card> cards;
  for (const auto& bytes : gather(bytesOf(own))) {
    Card card;
    if (bytes.size() != sizeof card) throw std::runtime_error("a rank's card has another size than ours");
    std::memcpy(&card, bytes.data(), sizeof card);
    cards.push_back(card);
  }
  return cards;
}

// By the leaders that the ranks name; one whose leader names another is alone. The same on all ranks.
Level levelOf(const std::vector<int>& leaders, int self) {
  std::map<int, std::vector<int>> byLeader;
  for (int rank = 0; rank < static_cast<int>(leaders.size()); rank++) {
    const int leader = leaders[static_cast<size_t>(rank)];
    const bool sound = leader >= 0 && leader <= rank && leaders[static_cast<size_t>(leader)] == leader;
    byLeader[sound ? leader : rank].push_back(rank);
  }
  Level level;
  for (const auto& [leader, ranks] : byLeader) {
    const auto found = std::find(ranks.begin(), ranks.end(), self);
    if (found != ranks.end()) {
      level.mine = level.hosts.size();
      level.member = static_cast<int>(found - ranks.begin());
    }
    level.hosts.push_back(ranks);
  }
  return level;
}

std::vector<int> leadersOf(const std::vector<Card>& cards) {
  std::vector<int> leaders;
  for (const Card& card : cards) leaders.push_back(card.leader);
  return leaders;
}

// What this rank holds of its host's memory; nothing where that is refused.
struct Share {
  std::shared_ptr<Segment> segment;
  std::unique_ptr<Giver> giver;  // of the first member
  Lifelines lifelines;           // of the others
};

Share offer(Mesh& mesh, const std::string& key, Fence fence, int members, Card& card, std::string& why) {
  Share share;
  if (members < 2) return share;
  if (members > kMostMembers) {
    why = "shared memory is for " + std::to_string(kMostMembers) + " ranks of a host at most";
    return share;
  }
  card.name = freshNonce();
  card.probe = freshNonce();
  try {
    share.segment = Segment::create({fence, card.probe, members});
    share.giver = std::make_unique<Giver>(mesh, key, card.name, share.segment->fd(), members);
    card.gives = 1;
  } catch (const std::runtime_error& error) {
    why = error.what();
    share = Share();  // the host does without: the others learn it from the card
  }
  return share;
}

Share take(Mesh& mesh, const std::string& key, Fence fence, const Level& level, const Card& card, std::string& why) {
  Share share;
  const int members = static_cast<int>(level.hosts[level.mine].size());
  if (card.gives == 0 || members > kMostMembers) return share;
  const auto until = Mesh::Clock::now() + mesh.getTimeout() / 2;
  try {
    Handed handed = fetch(mesh, key, card.name, level.member, members, until);
    share.segment = Segment::open(handed.memory.release(), {fence, card.probe, members});
    share.lifelines = std::move(handed.lifelines);
  } catch (const Failure&) {
    throw;
  } catch (const std::runtime_error& error) {
    why = error.what();
    share = Share();  // not fatal: all ranks of the host will hear of it
  }
  return share;
}

// The hosts that remain once each rank has said whether it shares its host's memory.
std::vector<int> agree(bool well, const std::vector<int>& leaders, const Level& level, const Gather& gather) {
  const auto said = gather(bytesOf(static_cast<uint8_t>(well)));
  std::vector<int> agreed = leaders;
  for (const auto& ranks : level.hosts) {
    const bool all = std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
      const auto& word = said[static_cast<size_t>(rank)];
      return word.size() == 1 && word[0] == 1;
    });
    for (int rank : ranks) agreed[static_cast<size_t>(rank)] = all ? ranks.front() : rank;
  }
  return agreed;
}

}  // namespace

std::unique_ptr<Hosts> Hosts::settle(const std::shared_ptr<Mesh>& mesh, const std::string& key, Fence fence,
                                     const std::vector<int>& local, const Gather& gather, std::string& why) {
  const int self = mesh->rank;
  Card card;
  card.leader = local.front();
  Share share;
  if (card.leader == self) share = offer(*mesh, key, fence, static_cast<int>(local.size()), card, why);
  const std::vector<Card> cards = deal(card, gather);
  const std::vector<int> leaders = leadersOf(cards);
  const Level wished = levelOf(leaders, self);
  if (wished.hosts.size() == cards.size()) return nullptr;
  const auto& host = wished.hosts[wished.mine];
  const bool asExpected = host == local;
  if (asExpected && wished.member > 0) {
    share = take(*mesh, key, fence, wished, cards[static_cast<size_t>(host.front())], why);
  }
  if (!asExpected) why = "its ranks were told of different neighbours";
  const bool well = host.size() == 1 || (asExpected && share.segment != nullptr);
  Level level = levelOf(agree(well, leaders, wished, gather), self);
  if (level.hosts.size() == cards.size()) return nullptr;
  std::unique_ptr<LocalGroup> group;
  if (level.hosts[level.mine].size() > 1) {
    if (share.giver) share.lifelines = share.giver->takeOwn();
    group = std::make_unique<LocalGroup>(share.segment, std::move(share.lifelines), host, level.member, *mesh);
  }
  return std::unique_ptr<Hosts>(new Hosts(mesh, std::move(level), std::move(group)));
}

}  // namespace elastic
