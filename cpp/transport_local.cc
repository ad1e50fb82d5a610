#include "transport_local.h"

#include <algorithm>
#include <stdexcept>

#include "copy_blocks.h"

namespace kvstore {
namespace {

BlockKey with_rank(BlockKey key, uint16_t rank) {
  key.bytes[kChainBytes] = static_cast<uint8_t>(rank >> 8);
  key.bytes[kChainBytes + 1] = static_cast<uint8_t>(rank);
  return key;
}

}  // namespace

LocalStore::LocalStore(std::shared_ptr<Node> node, const std::string& namespace_digest,
                       uint64_t part_bytes)
    : node_(std::move(node)), session_(node_->open_session(namespace_digest, part_bytes)) {
  if (session_ == nullptr)
    throw std::length_error("this node has no names left for another namespace or size of parts");
}

LocalStore::~LocalStore() { end(); }

void LocalStore::end() {
  session_->end();
  node_->room_freed();
}

// Known once, since a lease may be read by several threads.
void LocalStore::find_extents(GrantBatch& grants) {
  for (size_t i = 0; i < grants.items.size(); ++i) {
    GrantBatch::Item& item = grants.items[i];
    if (grants.statuses[i] == Status::kOk && item.extents.empty())
      item.extents = node_->pool().extents(item.taken.slot, item.length);
  }
}

void LocalStore::find_extents(LeaseBatch& leases) {
  for (auto& item : leases.items) {
    if (item) item->extents = node_->pool().extents(item->slot, item->length);
  }
}

// ---- put: reserve → write → commit | abort -----------------------------------------------------

PutOutcome LocalStore::put(const PutRequest& request, const std::vector<BlockMemory>& blocks,
                           const CallLimits& limits) {
  const auto grants = reserve(request, limits);
  if (limits.waits) reserve_more(*grants, request.chain, limits);
  const Status written = write(*grants, blocks, {}, limits.for_copy());
  PutOutcome outcome = commit(*grants, written == Status::kOk ? blocks.size() : 0, written);
  if (limits.stopped()) outcome.cancel_rest();
  return outcome;
}

std::shared_ptr<GrantBatch> LocalStore::reserve(const PutRequest& request, const CallLimits&) {
  auto grants = session_->reserve(request, monotonic_now());
  find_extents(*grants);
  return grants;
}

bool LocalStore::reserve_more(GrantBatch& grants, bool chain, const CallLimits& limits) {
  while (std::ranges::count(grants.statuses, Status::kOutOfSpace) > 0) {
    // Read before the attempt and before the look at `cancelled`, so that neither room made nor a
    // cancel is missed between them and the wait.
    const uint64_t frees = node_->frees();
    if (limits.stopped()) return false;
    session_->reserve_more(grants, chain, monotonic_now());
    find_extents(grants);
    const auto own = static_cast<uint64_t>(std::ranges::count(grants.statuses, Status::kOk));
    if (std::ranges::count(grants.statuses, Status::kOutOfSpace) == 0) return false;
    if (!node_->wait_for_room(own, frees, limits.deadline)) return limits.passed();
  }
  return false;
}

Status LocalStore::write(GrantBatch& grants, const std::vector<BlockMemory>& blocks,
                         ByteRange range, const CallLimits& limits) {
  return write_blocks(node_->segment().data(), node_->copier(), session_->part_bytes(), grants,
                      blocks, range, limits);
}

PutOutcome LocalStore::commit(GrantBatch& grants, size_t end, Status otherwise) {
  PutOutcome outcome;
  const bool ended = session_->commit(grants.id, end, otherwise);
  outcome.statuses = grants.statuses;
  if (!ended)  // it was over before, or its slots are still being written
    std::ranges::replace(outcome.statuses, Status::kOk, Status::kCancelled);
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
  const auto leases = lookup_to_read(keys, monotonic_now());
  GetOutcome outcome = read(*leases, 0, blocks, {}, limits);
  session_->end_read(*leases);
  release(*leases);
  return outcome;
}

size_t LocalStore::match(std::span<const BlockKey> keys, size_t skip, uint16_t ranks) {
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

std::vector<bool> LocalStore::exists(std::span<const BlockKey> keys) {
  std::vector<bool> held(keys.size());
  const Blocks& blocks = node_->blocks();
  blocks.for_each(keys, [&](size_t i, uint64_t hashed) {
    held[i] = blocks.holds(keys[i], hashed, session_->space());
    return true;
  });
  return held;
}

std::shared_ptr<LeaseBatch> LocalStore::lookup_to_read(std::span<const BlockKey> keys, Nanos now) {
  auto leases = session_->lookup(keys, 0, false, now, true);
  find_extents(*leases);
  return leases;
}

std::shared_ptr<LeaseBatch> LocalStore::lookup(std::span<const BlockKey> keys, size_t skip,
                                               bool run) {
  auto leases = session_->lookup(keys, skip, run, monotonic_now());
  find_extents(*leases);
  return leases;
}

GetOutcome LocalStore::read(LeaseBatch& leases, size_t first,
                            const std::vector<BlockMemory>& blocks, ByteRange range,
                            const CallLimits& limits) {
  if (!session_->begin_read(leases)) {
    GetOutcome gone;
    gone.statuses.assign(blocks.size(), Status::kUnavailable);
    gone.bytes.assign(blocks.size(), 0);
    gone.revoked = true;
    return gone;
  }
  GetOutcome outcome =
      read_blocks(node_->segment().data(), node_->copier(), leases, first, blocks, range, limits);
  for (size_t i = 0; i < blocks.size(); ++i) {
    // The reader only complains; the owner's own check decides.
    if (outcome.statuses[i] == Status::kCorrupt)
      node_->blocks().check(leases.items[first + i]->entry);
  }
  session_->end_read(leases);
  return outcome;
}

std::vector<std::span<uint8_t>> LocalStore::view(const LeaseBatch& leases, size_t item) {
  std::vector<std::span<uint8_t>> pieces;
  if (!leases.items[item]) return pieces;
  for (const Extent& extent : leases.items[item]->extents)
    pieces.emplace_back(node_->segment().data() + extent.offset, extent.bytes);
  return pieces;
}

std::shared_ptr<LeaseBatch> LocalStore::redeem(const AttemptId& ticket) {
  return node_->redeem(ticket, *session_);  // with the extents of the lease it stands for
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

size_t LocalStore::apply(KeyOperation operation, std::span<const BlockKey> keys) {
  Blocks& blocks = node_->blocks();
  const Namespace& space = session_->space();
  const uint64_t batch = operation == KeyOperation::kTouch ? blocks.next_batch() : 0;
  size_t held = 0;
  for (size_t depth = 0; depth < keys.size(); ++depth) {
    bool done = false;
    switch (operation) {
      case KeyOperation::kRemove:
        done = blocks.remove(keys[depth], space);
        break;
      case KeyOperation::kTouch:
        done = blocks.touch(keys[depth], space, make_stamp(batch, depth));
        break;
      case KeyOperation::kPin:
        done = blocks.pin(keys[depth], space);
        break;
      case KeyOperation::kUnpin:
        done = blocks.unpin(keys[depth], space);
        break;
    }
    held += done ? 1 : 0;
  }
  if (held > 0) node_->room_freed();
  return held;
}

uint32_t LocalStore::clear() {
  const uint32_t version = node_->blocks().clear(session_->space());
  node_->room_freed();
  return version;
}

std::vector<Listed> LocalStore::list() { return node_->blocks().list(session_->space()); }

UsageReport LocalStore::usage() {
  const Namespace& space = session_->space();
  const PoolUsage pool = node_->pool().usage();
  const BlockCounters& counters = node_->blocks().counters();
  UsageReport report;
  report.counts = {
      {"blocks", static_cast<uint64_t>(space.blocks.load())},
      {"bytes", static_cast<uint64_t>(space.bytes.load())},
      {"version", space.version.load()},
      {"capacity_bytes", pool.capacity_bytes},
      {"pool_bytes", node_->segment().bytes()},
      {"free_bytes", pool.free_bytes},
      {"taken_bytes", pool.taken_bytes},
      {"largest_free_bytes", uint64_t{pool.largest_free_run} * kFrameBytes},
      {"slots", pool.slots},
      {"granted_blocks", node_->num_granted()},
      {"stuck_bytes", node_->stuck_bytes()},
      {"leased_blocks", node_->blocks().num_leased()},
      {"pinned_blocks", node_->blocks().num_pinned()},
      {"view_bytes", node_->limits().view_bytes.load()},
      {"view_bytes_max", node_->limits().view_bytes_max},
      {"requested", counters.requested.load()},
      {"hits", counters.hits.load()},
      {"commits", counters.commits.load()},
      {"evictions", counters.evictions.load()},
      {"removals", counters.removals.load()},
      {"corrupt", counters.corrupt.load()},
      {"scrubbed", counters.scrubbed.load()},
      {"populating", node_->populating() ? 1 : 0},
  };
  report.pages = node_->segment().pages();
  return report;
}

}  // namespace kvstore
