#include "policy.h"

namespace kvstore {

LruPolicy::LruPolicy() = default;

// The node a block of this stamp goes behind (the next newer one); kNone: it is the newest.
uint32_t LruPolicy::place_before(const List& list, Stamp stamp) const {
  if (list.newest == kNone || nodes_[list.newest].stamp <= stamp) return kNone;
  if (nodes_[list.oldest].stamp >= stamp) return list.oldest;
  // Blocks of one batch arrive from the newest to the oldest, each right behind the one before.
  if (list.hint != kNone && nodes_[list.hint].stamp >= stamp) {
    uint32_t at = list.hint;
    while (nodes_[nodes_[at].older].stamp > stamp) at = nodes_[at].older;
    return at;
  }
  // Batches that run side by side differ by little: walk from both ends at once.
  uint32_t from_new = list.newest;
  uint32_t from_old = list.oldest;
  while (true) {
    if (nodes_[nodes_[from_new].older].stamp <= stamp) return from_new;
    from_new = nodes_[from_new].older;
    if (nodes_[from_old].stamp > stamp) return from_old;
    from_old = nodes_[from_old].newer;
  }
}

void LruPolicy::insert(uint32_t id, SizeClass size_class, Stamp stamp) {
  if (id >= nodes_.size()) nodes_.resize(id + 1);
  List& list = lists_[size_class];
  const uint32_t newer = place_before(list, stamp);
  const uint32_t older = newer == kNone ? list.newest : nodes_[newer].older;
  nodes_[id] = {stamp, newer, older};
  (newer == kNone ? list.newest : nodes_[newer].older) = id;
  (older == kNone ? list.oldest : nodes_[older].newer) = id;
  list.hint = id;
  ++size_;
}

void LruPolicy::touch(uint32_t id, SizeClass size_class, Stamp stamp) {
  if (stamp <= nodes_[id].stamp) return;
  erase(id, size_class);
  insert(id, size_class, stamp);
}

void LruPolicy::erase(uint32_t id, SizeClass size_class) {
  List& list = lists_[size_class];
  const Node& node = nodes_[id];
  (node.newer == kNone ? list.newest : nodes_[node.newer].older) = node.older;
  (node.older == kNone ? list.oldest : nodes_[node.older].newer) = node.newer;
  if (list.hint == id) list.hint = node.newer;
  --size_;
}

std::optional<uint32_t> LruPolicy::victim(SizeClass size_class) const {
  const uint32_t id = lists_[size_class].oldest;
  return id == kNone ? std::nullopt : std::optional(id);
}

Stamp LruPolicy::oldest(SizeClass size_class) const {
  const uint32_t id = lists_[size_class].oldest;
  return id == kNone ? kNoStamp : nodes_[id].stamp;
}

std::string LruPolicy::audit() const {
  size_t seen = 0;
  for (const List& list : lists_) {
    Stamp last = kNoStamp;
    for (uint32_t id = list.newest; id != kNone; id = nodes_[id].older) {
      if (nodes_[id].stamp > last) return "lru list out of order";
      last = nodes_[id].stamp;
      if (++seen > size_) return "lru list longer than its count";
    }
  }
  return seen == size_ ? std::string() : "lru list shorter than its count";
}

}  // namespace kvstore
