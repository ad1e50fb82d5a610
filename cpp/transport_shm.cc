#include "transport_shm.h"

#include <algorithm>

#include "copy_blocks.h"
#include "transport_tcp.h"

namespace kvstore {
namespace {

// What the node says of where a block is, is believed only inside the mapping.
bool lies_in(const Mapping& mapping, const std::vector<Extent>& extents, uint64_t length) {
  uint64_t bytes = 0;
  for (const Extent& extent : extents) {
    if (!mapping.contains(extent) || extent.bytes == 0) return false;
    bytes += extent.bytes;
  }
  return bytes >= length;
}

bool readable(const RemoteLeases& leases, const Found& found) {
  return leases.mapping != nullptr && found.part_bytes > 0 && found.length > 0 &&
         found.parts.size() == (found.length - 1) / found.part_bytes + 1 &&
         lies_in(*leases.mapping, found.extents, found.length);
}

// Nothing has taken the block's memory since it was leased.
bool unmoved(const RemoteLeases& leases, const Found& found) {
  return leases.mapping->generation(found.slot) == found.generation;
}

}  // namespace

std::unique_ptr<Transport> make_remote_store(std::shared_ptr<Remote> remote,
                                             unsigned copy_threads) {
  if (remote->shares_memory()) return std::make_unique<ShmStore>(std::move(remote), copy_threads);
  return std::make_unique<TcpStore>(std::move(remote), copy_threads);
}

// ---- put ---------------------------------------------------------------------------------------

Status ShmStore::write(GrantBatch& grants, const std::vector<BlockMemory>& blocks, ByteRange range,
                       const CallLimits& limits) {
  if (std::ranges::count(grants.statuses, Status::kOk) == 0) return Status::kOk;
  const auto mapping = remote_->mapping(static_cast<RemoteGrants&>(grants).incarnation);
  if (mapping == nullptr) return Status::kUnavailable;  // the node they were granted by is gone
  const bool first_put = !mapping->has_writable();
  uint8_t* const memory = mapping->writable();
  if (memory == nullptr) return Status::kUnavailable;
  if (first_put) remote_->wake_keeper();
  for (size_t i = 0; i < grants.items.size(); ++i) {
    const auto& item = grants.items[i];
    if (grants.statuses[i] == Status::kOk && !lies_in(*mapping, item.extents, item.length))
      return Status::kUnavailable;
  }
  return write_blocks(memory, copier_, grants.part_bytes, grants, blocks, range, limits);
}

// ---- get ---------------------------------------------------------------------------------------

GetOutcome ShmStore::get(std::span<const BlockKey> keys, const std::vector<BlockMemory>& blocks,
                         const CallLimits& limits) {
  Io failed = Io::kDone;
  const auto leases = lease(keys, 0, false, patience_of(limits), &failed);
  if (leases->items.size() != keys.size()) {
    GetOutcome outcome;
    outcome.statuses.assign(keys.size(),
                            failed == Io::kDone ? Status::kUnavailable : status_of(failed));
    outcome.bytes.assign(keys.size(), 0);
    return outcome;
  }
  GetOutcome outcome = read(*leases, 0, blocks, {}, limits);
  release(*leases);
  return outcome;
}

GetOutcome ShmStore::read(LeaseBatch& batch, size_t first, const std::vector<BlockMemory>& blocks,
                          ByteRange range, const CallLimits& limits) {
  const auto& leases = static_cast<RemoteLeases&>(batch);
  GetOutcome outcome;
  outcome.statuses.assign(blocks.size(), Status::kUnavailable);
  outcome.bytes.assign(blocks.size(), 0);
  outcome.revoked = true;  // unless it is found to hold
  if (leases.ended) return outcome;
  const auto held = std::span(leases.items).subspan(first, blocks.size());
  for (const auto& item : held) {
    if (item && !readable(leases, *item)) return outcome;
  }
  uint8_t* const memory = leases.mapping == nullptr ? nullptr : leases.mapping->readable();
  outcome = read_blocks(memory, copier_, leases, first, blocks, range, limits);
  if (outcome.too_small) return outcome;
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (!held[i]) continue;
    if (!unmoved(leases, *held[i])) {  // revoked: whatever was copied may be another block's
      zero(blocks[i]);
      outcome.statuses[i] = Status::kUnavailable;
      outcome.bytes[i] = 0;
      outcome.revoked = true;
    } else if (outcome.statuses[i] == Status::kCorrupt) {
      complain(leases, first + i);
    }
  }
  return outcome;
}

// Whether it was held until now is seen here; the node need not answer.
Released ShmStore::release(LeaseBatch& batch) {
  auto& leases = static_cast<RemoteLeases&>(batch);
  if (leases.ended) return leases.revoked ? Released::kRevoked : Released::kHeld;
  leases.ended = true;
  leases.revoked = !std::ranges::all_of(leases.items, [&](const auto& item) {
    return !item || (leases.mapping != nullptr && unmoved(leases, *item));
  });
  if (leases.id != 0) remote_->tell_release(leases.id, leases.incarnation);
  if (leases.kind == LeaseKind::kView) {
    if (!leases.looked_at) views_likely_.store(false);
    if (views_.fetch_sub(1) == 1 && ended_.load()) remote_->end();
  }
  return leases.revoked ? Released::kRevoked : Released::kHeld;
}

bool ShmStore::make_view(LeaseBatch& batch) {
  auto& leases = static_cast<RemoteLeases&>(batch);
  views_likely_.store(true);
  if (leases.ended || leases.incarnation != remote_->incarnation()) return false;
  for (const auto& item : leases.items) {
    if (item && !readable(leases, *item)) return false;
  }
  leases.looked_at = true;
  if (leases.kind == LeaseKind::kView) return true;
  wire::ViewMade answer;
  const Io io = remote_->ask(wire::MakeView{leases.id}, &answer, remote_->patience(), true);
  if (io != Io::kDone) fail(io);
  if (!answer.made) return false;
  leases.kind = LeaseKind::kView;
  views_.fetch_add(1);
  return true;
}

std::vector<std::span<uint8_t>> ShmStore::view(const LeaseBatch& batch, size_t item) {
  const auto& leases = static_cast<const RemoteLeases&>(batch);
  std::vector<std::span<uint8_t>> pieces;
  if (!leases.items[item]) return pieces;
  uint64_t left = leases.items[item]->length;
  for (const Extent& extent : leases.items[item]->extents) {
    const uint64_t bytes = std::min(left, extent.bytes);
    pieces.emplace_back(leases.mapping->readable() + extent.offset, bytes);
    left -= bytes;
  }
  return pieces;
}

}  // namespace kvstore
