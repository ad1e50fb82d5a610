#include "transport_local.h"

#include <algorithm>

#include "crc32c.h"

namespace kvstore {
namespace {

// What one thread copies at a time: parts of one block, about this many bytes.
constexpr uint64_t kUnitBytes = uint64_t{1} << 20;
// Below this many bytes in all, waking a helper costs more than it brings.
constexpr uint64_t kAloneBytes = uint64_t{512} << 10;

struct Unit {
  size_t item;
  uint64_t first;
  uint64_t end;
};

// Cuts [first, end) of a block into units along part borders.
void add_units(size_t item, uint64_t first, uint64_t end, uint64_t part_bytes,
               std::vector<Unit>* units) {
  const uint64_t step = std::max<uint64_t>(1, kUnitBytes / part_bytes) * part_bytes;
  for (uint64_t at = first; at < end; at += step)
    units->push_back({item, at, std::min(end, at + step)});
}

// Walks a slot's memory from a byte offset, like MemoryCursor walks the caller's.
class SlotCursor {
 public:
  SlotCursor(uint8_t* base, std::span<const Extent> extents, uint64_t offset)
      : base_(base), extents_(extents) {
    while (offset > 0 && offset >= extents_[at_].bytes) offset -= extents_[at_++].bytes;
    used_ = offset;
  }
  std::span<uint8_t> next(uint64_t bytes_max) {
    if (used_ == extents_[at_].bytes) {
      ++at_;
      used_ = 0;
    }
    const uint64_t bytes = std::min(bytes_max, extents_[at_].bytes - used_);
    uint8_t* const start = base_ + extents_[at_].offset + used_;
    used_ += bytes;
    return {start, bytes};
  }

 private:
  uint8_t* base_;
  std::span<const Extent> extents_;
  size_t at_ = 0;
  uint64_t used_ = 0;
};

enum class Direction { kWrite, kRead };

// Copies [unit.first, unit.end) between a slot and the caller, part by part, with one checksum per
// part.
template <Direction direction, class PerPart>
void copy_unit(uint8_t* base, std::span<const Extent> extents, const BlockMemory& memory,
               uint64_t memory_offset, const Unit& unit, uint64_t part_bytes, PerPart&& per_part) {
  SlotCursor slot(base, extents, unit.first);
  MemoryCursor caller(memory, memory_offset);
  std::span<uint8_t> theirs;
  for (uint64_t at = unit.first; at < unit.end;) {
    const uint64_t part = at / part_bytes;
    const uint64_t part_end = std::min(unit.end, (part + 1) * part_bytes);
    uint32_t crc = 0;
    while (at < part_end) {
      if (theirs.empty()) theirs = caller.next(unit.end - at);
      const std::span<uint8_t> ours = slot.next(std::min<uint64_t>(theirs.size(), part_end - at));
      crc = direction == Direction::kWrite
                ? copy_crc32c(crc, ours.data(), theirs.data(), ours.size())
                : copy_crc32c(crc, theirs.data(), ours.data(), ours.size());
      theirs = theirs.subspan(ours.size());
      at += ours.size();
    }
    per_part(part, crc);
  }
}

Status early_end(const CallLimits& limits) {
  if (limits.stopped()) return Status::kCancelled;
  return limits.passed() ? Status::kTimedOut : Status::kOk;
}

BlockKey with_rank(BlockKey key, uint16_t rank) {
  key.bytes[kChainBytes] = static_cast<uint8_t>(rank >> 8);
  key.bytes[kChainBytes + 1] = static_cast<uint8_t>(rank);
  return key;
}

}  // namespace

LocalStore::LocalStore(std::shared_ptr<Node> node, const std::string& namespace_digest,
                       uint64_t part_bytes)
    : node_(std::move(node)), session_(node_->open_session(namespace_digest, part_bytes)) {}

LocalStore::~LocalStore() {
  session_->end();
  node_->room_freed();
}

// ---- put: reserve → write → commit | abort -----------------------------------------------------

PutOutcome LocalStore::put(const PutRequest& request, const std::vector<BlockMemory>& blocks,
                           const CallLimits& limits) {
  const auto grants = reserve(request);
  if (limits.waits) reserve_more(*grants, request.chain, limits);
  const Status written = write(*grants, blocks, {}, limits.for_copy());
  PutOutcome outcome = commit(*grants, written == Status::kOk ? blocks.size() : 0, written);
  if (limits.stopped()) {  // what was not done was cancelled, whatever it was waiting for
    std::ranges::replace(outcome.statuses, Status::kOutOfSpace, Status::kCancelled);
    outcome.message.clear();
  }
  return outcome;
}

std::shared_ptr<GrantBatch> LocalStore::reserve(const PutRequest& request) {
  return session_->reserve(request, monotonic_now());
}

void LocalStore::reserve_more(GrantBatch& grants, bool chain, const CallLimits& limits) {
  while (std::ranges::count(grants.statuses, Status::kOutOfSpace) > 0) {
    // Read before the attempt and before the look at `cancelled`, so that neither room made nor a
    // cancel is missed between them and the wait.
    const uint64_t frees = node_->frees();
    if (limits.stopped()) return;
    session_->reserve_more(grants, chain, monotonic_now());
    const auto own = static_cast<uint64_t>(std::ranges::count(grants.statuses, Status::kOk));
    if (std::ranges::count(grants.statuses, Status::kOutOfSpace) == 0) return;
    if (!node_->wait_for_room(own, frees, limits.deadline)) return;
  }
}

Status LocalStore::write(GrantBatch& grants, const std::vector<BlockMemory>& blocks,
                         ByteRange range, const CallLimits& limits) {
  const uint64_t part_bytes = session_->space().part_bytes;
  std::vector<Unit> units;
  std::vector<std::vector<Extent>> extents(grants.items.size());
  uint64_t bytes = 0;
  for (size_t i = 0; i < grants.items.size(); ++i) {
    if (grants.statuses[i] != Status::kOk) continue;
    extents[i] = node_->pool().extents(grants.items[i].taken.slot, grants.items[i].length);
    const uint64_t end = std::min(grants.items[i].length - range.first, range.bytes) + range.first;
    add_units(i, range.first, end, part_bytes, &units);
    bytes += end - range.first;
  }
  std::atomic<Status> ended{Status::kOk};
  node_->copier().run(units.size(), bytes < kAloneBytes, [&](size_t number) {
    if (ended.load(std::memory_order_relaxed) != Status::kOk) return;
    if (const Status early = early_end(limits); early != Status::kOk) {
      ended.store(early);
      return;
    }
    const Unit& unit = units[number];
    auto& parts = grants.items[unit.item].parts;
    copy_unit<Direction::kWrite>(node_->segment().data(), extents[unit.item], blocks[unit.item],
                                 unit.first - range.first, unit, part_bytes,
                                 [&](uint64_t part, uint32_t crc) { parts[part] = crc; });
  });
  return ended.load();
}

PutOutcome LocalStore::commit(GrantBatch& grants, size_t end, Status otherwise) {
  PutOutcome outcome;
  session_->commit(grants.id, end, otherwise);
  outcome.statuses = grants.statuses;
  outcome.parent_held = grants.parent_held;
  uint64_t last_length = 0;
  for (size_t i = 0; i < grants.items.size(); ++i) {
    const uint64_t length = grants.items[i].length;
    if (grants.statuses[i] == Status::kStale) outcome.stale = true;
    if (grants.statuses[i] == Status::kOutOfSpace && outcome.message.empty()) {
      outcome.message = node_->describe_shortage(length);
    }
    if (length != last_length) node_->room_used(length);
    last_length = length;
  }
  node_->room_freed();  // what was given up, and what eviction may take from now on
  return outcome;
}

// ---- get: lookup → read → release --------------------------------------------------------------

GetOutcome LocalStore::get(std::span<const BlockKey> keys, const std::vector<BlockMemory>& blocks,
                           const CallLimits& limits) {
  const auto leases = session_->lookup(keys, 0, false, monotonic_now(), true);
  GetOutcome outcome = read(*leases, 0, blocks, {}, limits);
  session_->end_read(*leases);
  release(*leases);
  return outcome;
}

size_t LocalStore::match(std::span<const BlockKey> keys, size_t skip, uint16_t ranks) const {
  const Blocks& blocks = node_->blocks();
  const Namespace& space = session_->space();
  const auto held_by_all = [&](const BlockKey& key) {
    for (uint16_t rank = 0; rank < ranks; ++rank) {
      if (!blocks.holds(with_rank(key, rank), space)) return false;
    }
    return true;
  };
  const std::span<const BlockKey> asked = keys.subspan(skip);
  size_t matched = 0;
  blocks.for_each(asked, [&](size_t i, uint64_t hashed) {
    if (!(ranks == 1 ? blocks.holds(asked[i], hashed, space) : held_by_all(asked[i]))) return false;
    ++matched;
    return true;
  });
  node_->blocks().counters().requested.fetch_add(asked.size(), std::memory_order_relaxed);
  node_->blocks().counters().hits.fetch_add(matched, std::memory_order_relaxed);
  return matched;
}

std::shared_ptr<LeaseBatch> LocalStore::lookup(std::span<const BlockKey> keys, size_t skip,
                                               bool run) {
  return session_->lookup(keys, skip, run, monotonic_now());
}

GetOutcome LocalStore::read(LeaseBatch& leases, size_t first,
                            const std::vector<BlockMemory>& blocks, ByteRange range,
                            const CallLimits& limits) {
  const uint64_t part_bytes = session_->space().part_bytes;
  GetOutcome outcome;
  outcome.statuses.assign(blocks.size(), Status::kMiss);
  outcome.bytes.assign(blocks.size(), 0);
  if (!session_->begin_read(leases)) {
    std::ranges::fill(outcome.statuses, Status::kUnavailable);
    return outcome;
  }
  std::vector<Unit> units;
  std::vector<std::vector<Extent>> extents(blocks.size());
  uint64_t bytes = 0;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const std::optional<Found>& found = leases.items[first + i];
    if (!found) continue;
    outcome.statuses[i] = Status::kOk;
    extents[i] = node_->pool().extents(found->slot, found->length);
    const uint64_t end = std::min(found->length - range.first, range.bytes) + range.first;
    outcome.bytes[i] = end - range.first;
    if (outcome.bytes[i] > blocks[i].bytes() && !outcome.too_small)
      outcome.too_small = {i, found->length};
    add_units(i, range.first, end, part_bytes, &units);
    bytes += outcome.bytes[i];
  }
  if (outcome.too_small) {
    session_->end_read(leases);
    return outcome;
  }
  std::vector<std::atomic<Status>> failed(blocks.size());
  for (auto& status : failed) status.store(Status::kOk, std::memory_order_relaxed);
  node_->copier().run(units.size(), bytes < kAloneBytes, [&](size_t number) {
    const Unit& unit = units[number];
    if (const Status early = early_end(limits); early != Status::kOk) {
      failed[unit.item].store(early, std::memory_order_relaxed);
      return;
    }
    const Found& found = *leases.items[first + unit.item];
    copy_unit<Direction::kRead>(node_->segment().data(), extents[unit.item], blocks[unit.item],
                                unit.first - range.first, unit, part_bytes,
                                [&](uint64_t part, uint32_t crc) {
                                  if (found.parts[part] != crc)
                                    failed[unit.item].store(Status::kCorrupt);
                                });
  });
  for (size_t i = 0; i < blocks.size(); ++i) {
    const Status status = failed[i].load(std::memory_order_relaxed);
    if (status == Status::kOk) continue;
    // The reader only complains; the owner's own check decides.
    if (status == Status::kCorrupt) node_->blocks().check(leases.items[first + i]->entry);
    zero(blocks[i]);
    outcome.statuses[i] = status;
    outcome.bytes[i] = 0;
  }
  session_->end_read(leases);
  return outcome;
}

Released LocalStore::release(LeaseBatch& leases) {
  const Released released = session_->release(leases);
  node_->room_freed();
  return released;
}

std::vector<Status> LocalStore::verify(LeaseBatch& leases) {
  std::vector<Status> statuses(leases.items.size(), Status::kMiss);
  if (!session_->begin_read(leases))
    return std::vector<Status>(leases.items.size(), Status::kUnavailable);
  for (size_t i = 0; i < leases.items.size(); ++i) {
    if (!leases.items[i]) continue;
    statuses[i] = node_->blocks().check(leases.items[i]->entry) ? Status::kOk : Status::kCorrupt;
  }
  session_->end_read(leases);
  return statuses;
}

// ---- the rest ----------------------------------------------------------------------------------

size_t LocalStore::remove(std::span<const BlockKey> keys) {
  const auto removed = static_cast<size_t>(std::ranges::count_if(
      keys, [&](const BlockKey& key) { return node_->blocks().remove(key, session_->space()); }));
  if (removed > 0) node_->room_freed();
  return removed;
}

size_t LocalStore::touch(std::span<const BlockKey> keys) {
  const uint64_t batch = node_->blocks().next_batch();
  size_t held = 0;
  for (size_t depth = 0; depth < keys.size(); ++depth) {
    held += node_->blocks().touch(keys[depth], session_->space(), make_stamp(batch, depth)) ? 1 : 0;
  }
  return held;
}

size_t LocalStore::pin(std::span<const BlockKey> keys) {
  return static_cast<size_t>(std::ranges::count_if(
      keys, [&](const BlockKey& key) { return node_->blocks().pin(key, session_->space()); }));
}

size_t LocalStore::unpin(std::span<const BlockKey> keys) {
  const auto unpinned = static_cast<size_t>(std::ranges::count_if(
      keys, [&](const BlockKey& key) { return node_->blocks().unpin(key, session_->space()); }));
  if (unpinned > 0) node_->room_freed();
  return unpinned;
}

uint32_t LocalStore::clear() {
  const uint32_t version = node_->blocks().clear(session_->space());
  node_->room_freed();
  return version;
}

}  // namespace kvstore
