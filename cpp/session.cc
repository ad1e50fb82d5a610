#include "session.h"

#include <algorithm>
#include <new>

namespace kvstore {
namespace {

// Checksums of an item's parts; none if a part was not written.
std::vector<uint32_t> written_parts(const GrantBatch::Item& item) {
  const auto written = [](const std::optional<uint32_t>& part) { return part.has_value(); };
  if (!std::ranges::all_of(item.parts, written)) return {};
  std::vector<uint32_t> parts;
  parts.reserve(item.parts.size());
  for (const auto& part : item.parts) parts.push_back(*part);
  return parts;
}

// The same depth in another batch.
Stamp restamp(Stamp stamp, uint64_t number) {
  const Stamp depth_bits = (Stamp{1} << kDepthBits) - 1;
  return number << kDepthBits | (stamp & depth_bits);
}

}  // namespace

Session::~Session() { end(); }

// ---- reserve → write → commit | abort ----------------------------------------------------------

std::shared_ptr<GrantBatch> Session::reserve(const PutRequest& request, Nanos now) {
  auto batch = std::make_shared<GrantBatch>();
  batch->id = request.attempt == AttemptId{} ? AttemptId{limits_.random(), limits_.random()}
                                             : request.attempt;
  batch->version = request.version;
  batch->part_bytes = part_bytes_;
  batch->deadline = now + limits_.grant;
  const uint64_t number = blocks_.next_batch();
  // The whole chain is touched, the part the engine already had included, the head as the youngest:
  // a parent never becomes older than its child. From the head down, so that this holds at every
  // moment too.
  blocks_.for_each(request.keys.first(request.skip), [&](size_t depth, uint64_t hashed) {
    batch->parent_held =
        blocks_.touch(request.keys[depth], hashed, space_, make_stamp(number, depth));
    return true;
  });
  const size_t count = request.keys.size() - request.skip;
  batch->items.resize(count);
  batch->statuses.assign(count, Status::kOutOfSpace);
  for (size_t i = 0; i < count; ++i) {
    const size_t depth = request.skip + i;
    GrantBatch::Item& item = batch->items[i];
    item.key = request.keys[depth];
    item.length = request.lengths[i];
    item.stamp = make_stamp(number, request.chain ? depth : 0);
    item.parts.resize((item.length + part_bytes_ - 1) / part_bytes_);
    if (!request.texts.empty()) item.text = request.texts[depth];
  }
  if (stuck_bytes(now) <= limits_.stuck_bytes_max) grant_items(*batch, request.chain);
  if (std::ranges::count(batch->statuses, Status::kOutOfSpace) > 0) {
    batch->skipped.assign(request.keys.begin(), request.keys.begin() + request.skip);
  }
  const std::lock_guard lock(mutex_);
  if (over_) {
    give_up(*batch);
  } else {
    grants_.emplace(batch->id.high, batch);
  }
  return batch;
}

// REQUIRES: the batch is not among the session's.
void Session::give_up(GrantBatch& batch) {
  batch.given_up = true;
  for (size_t i = 0; i < batch.items.size(); ++i) {
    if (batch.statuses[i] == Status::kOk) blocks_.abort(batch.items[i].taken.slot);
    if (batch.statuses[i] != Status::kExists) batch.statuses[i] = Status::kUnavailable;
  }
}

bool Session::reserve_more(GrantBatch& batch, bool chain, Nanos now) {
  if (stuck_bytes(now) > limits_.stuck_bytes_max) return false;
  const std::lock_guard lock(mutex_);  // the batch is known to the session by now
  if (!grants_.contains(batch.id.high)) return false;
  // A new number: else everything used since the first try would be too young to make room.
  const uint64_t number = blocks_.next_batch();
  for (size_t depth = 0; depth < batch.skipped.size(); ++depth) {
    batch.parent_held = blocks_.touch(batch.skipped[depth], space_, make_stamp(number, depth));
  }
  for (size_t i = 0; i < batch.items.size(); ++i) {
    GrantBatch::Item& item = batch.items[i];
    item.stamp = restamp(item.stamp, number);
    if (batch.statuses[i] == Status::kExists) blocks_.touch(item.key, space_, item.stamp);
  }
  return grant_items(batch, chain);
}

bool Session::grant_items(GrantBatch& batch, bool chain) {
  bool any = false;
  for (size_t i = 0; i < batch.items.size(); ++i) {
    if (batch.statuses[i] != Status::kOutOfSpace) continue;
    GrantBatch::Item& item = batch.items[i];
    const Stamp limit = item.stamp >> kDepthBits << kDepthBits;
    batch.statuses[i] = blocks_.reserve(item.key, space_, batch.version, item.length, item.stamp,
                                        limit, &item.taken);
    if (batch.statuses[i] != Status::kOutOfSpace) {
      any = true;
    } else if (chain) {
      break;
    }
  }
  return any;
}

// An entry the table has no memory for is one more that found no room.
Status Session::commit_item(const GrantBatch& batch, GrantBatch::Item& item,
                            std::vector<uint32_t> parts) {
  try {
    return blocks_.commit({item.key, &space_, batch.version, item.taken.slot, item.length,
                           item.stamp, std::move(parts), std::move(item.text), part_size_});
  } catch (const std::bad_alloc&) {
    blocks_.abort(item.taken.slot);
    return Status::kOutOfSpace;
  }
}

bool Session::commit(const AttemptId& id, size_t end, Status otherwise) {
  std::shared_ptr<GrantBatch> batch;
  {
    const std::lock_guard lock(mutex_);
    const auto at = grants_.find(id.high);
    if (at == grants_.end() || at->second->id != id) return false;
    if (at->second->writing > 0) {
      at->second->given_up = true;
      return false;
    }
    batch = std::move(at->second);
    grants_.erase(at);
  }
  for (size_t i = 0; i < batch->items.size(); ++i) {
    if (batch->statuses[i] == Status::kExists && batch->version != space_.version.load()) {
      batch->statuses[i] = Status::kStale;  // what was held then has been cleared since
    }
    if (batch->statuses[i] != Status::kOk) continue;
    GrantBatch::Item& item = batch->items[i];
    std::vector<uint32_t> parts = written_parts(item);
    if (i < end && !parts.empty()) {
      batch->statuses[i] = commit_item(*batch, item, std::move(parts));
    } else {
      blocks_.abort(item.taken.slot);
      batch->statuses[i] = i < end ? Status::kCancelled : otherwise;
    }
  }
  return true;
}

bool Session::begin_write(GrantBatch& batch) {
  const std::lock_guard lock(mutex_);
  if (batch.given_up || !grants_.contains(batch.id.high)) return false;
  ++batch.writing;
  return true;
}

void Session::end_write(GrantBatch& batch) {
  {
    const std::lock_guard lock(mutex_);
    if (--batch.writing > 0 || !batch.given_up) return;
  }
  abort(batch.id);
}

bool Session::close_to_writers(GrantBatch& batch) {
  const std::lock_guard lock(mutex_);
  batch.given_up = true;
  return batch.writing == 0;
}

// ---- lookup → read → release -------------------------------------------------------------------

void Session::keep(const std::shared_ptr<LeaseBatch>& batch, Nanos now) {
  batch->id = limits_.random();
  batch->deadline = now + limits_.lease;
  for (const auto& item : batch->items) batch->bytes += item ? item->length : 0;
  const std::lock_guard lock(mutex_);
  leases_.emplace(batch->id, batch);
  if (!over_) return;
  batch->release_asked = true;
  if (batch->reading == 0) let_go(*batch, true);
}

std::shared_ptr<LeaseBatch> Session::lookup(std::span<const BlockKey> keys, size_t skip, bool run,
                                            Nanos now, bool begin_read) {
  auto batch = std::make_shared<LeaseBatch>();
  batch->reading = begin_read ? 1 : 0;
  const uint64_t number = blocks_.next_batch();
  blocks_.for_each(keys.first(skip), [&](size_t depth, uint64_t hashed) {
    blocks_.touch(keys[depth], hashed, space_, make_stamp(number, depth));
    return true;
  });
  batch->items.reserve(keys.size() - skip);
  size_t hits = 0;
  blocks_.for_each(keys.subspan(skip), [&](size_t i, uint64_t hashed) {
    const Stamp stamp = make_stamp(number, skip + i);
    batch->items.push_back(blocks_.lease(keys[skip + i], hashed, space_, stamp));
    if (batch->items.back()) {
      ++hits;
    } else if (run) {
      batch->items.pop_back();
      return false;
    }
    return true;
  });
  if (!run) {  // a run was asked for, and counted, by the match before
    blocks_.counters().requested.fetch_add(keys.size() - skip, std::memory_order_relaxed);
    blocks_.counters().hits.fetch_add(hits, std::memory_order_relaxed);
  }
  keep(batch, now);
  return batch;
}

bool Session::begin_read(LeaseBatch& batch) {
  const std::lock_guard lock(mutex_);
  if (batch.ended || batch.release_asked) return false;
  ++batch.reading;
  return true;
}

void Session::end_read(LeaseBatch& batch) {
  const std::lock_guard lock(mutex_);
  if (--batch.reading == 0 && batch.release_asked) let_go(batch, false);
}

Released Session::release(LeaseBatch& batch) {
  const std::lock_guard lock(mutex_);
  if (batch.ended) return batch.revoked ? Released::kRevoked : Released::kHeld;
  batch.release_asked = true;
  if (batch.reading == 0) let_go(batch, false);
  return Released::kHeld;
}

// REQUIRES: mutex_ held, nobody reading.
void Session::let_go(LeaseBatch& batch, bool revoked) {
  batch.ended = true;
  batch.revoked = revoked;
  if (batch.kind == LeaseKind::kView) limits_.view_bytes.fetch_sub(batch.bytes);
  for (const auto& item : batch.items) {
    if (item) blocks_.release(item->entry);
  }
  leases_.erase(batch.id);
}

bool Session::make_view(LeaseBatch& batch, bool guess) {
  const std::lock_guard lock(mutex_);
  if (batch.ended) return false;
  if (batch.kind == LeaseKind::kView) return true;
  const uint64_t before = limits_.view_bytes.fetch_add(batch.bytes);
  if (before + batch.bytes > limits_.view_bytes_max / (guess ? 2 : 1)) {
    limits_.view_bytes.fetch_sub(batch.bytes);
    return false;
  }
  batch.kind = LeaseKind::kView;
  batch.deadline = kNever;
  return true;
}

AttemptId Session::ticket(LeaseBatch& batch) {
  const std::lock_guard lock(mutex_);
  if (batch.ticket == AttemptId{}) batch.ticket = {limits_.random(), limits_.random()};
  return batch.ticket;
}

std::shared_ptr<LeaseBatch> Session::find_ticket(const AttemptId& ticket) {
  if (ticket == AttemptId{}) return nullptr;  // what a lease nobody asked a ticket of carries
  const std::lock_guard lock(mutex_);
  for (const auto& [id, batch] : leases_) {
    if (batch->ticket == ticket) return batch;
  }
  return nullptr;
}

std::shared_ptr<LeaseBatch> Session::adopt(Session& issuer, LeaseBatch& source, Nanos now) {
  // The issuer's lease is held open meanwhile, so that there is something to share.
  if (!issuer.begin_read(source)) return nullptr;
  auto batch = std::make_shared<LeaseBatch>();
  batch->items = source.items;
  for (const auto& item : batch->items) {
    if (item) blocks_.lease_again(item->entry);
  }
  issuer.end_read(source);
  keep(batch, now);
  return batch;
}

// ---- time and end ------------------------------------------------------------------------------

size_t Session::revoke_overdue(Nanos now) {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<LeaseBatch>> overdue;
  for (const auto& [id, batch] : leases_) {
    if (batch->kind == LeaseKind::kCopying && batch->deadline < now && batch->reading == 0)
      overdue.push_back(batch);
  }
  size_t blocks = 0;
  for (const auto& batch : overdue) {
    blocks += batch->items.size();
    let_go(*batch, true);
  }
  return blocks;
}

uint64_t Session::stuck_bytes(Nanos now) const {
  const std::lock_guard lock(mutex_);
  uint64_t bytes = 0;
  for (const auto& [id, batch] : grants_) {
    if (batch->deadline >= now) continue;
    for (size_t i = 0; i < batch->items.size(); ++i) {
      if (batch->statuses[i] == Status::kOk) bytes += batch->items[i].length;
    }
  }
  return bytes;
}

// Ends copying leases, or all; what is being read goes with its last reader.
// REQUIRES: mutex_ held.
void Session::let_go_of(bool views) {
  std::vector<std::shared_ptr<LeaseBatch>> ending;
  for (const auto& [id, batch] : leases_) {
    if (views || batch->kind == LeaseKind::kCopying) ending.push_back(batch);
  }
  for (const auto& batch : ending) {
    batch->release_asked = true;
    if (batch->reading == 0) let_go(*batch, true);
  }
}

void Session::end_copying() {
  const std::lock_guard lock(mutex_);
  let_go_of(false);
}

void Session::end_all() {
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  end();
  const std::lock_guard lock(mutex_);
  let_go_of(true);
}

bool Session::end_all_if_idle() {
  {
    const std::lock_guard lock(mutex_);
    const bool views = std::ranges::any_of(
        leases_, [](const auto& named) { return named.second->kind == LeaseKind::kView; });
    if (views || !grants_.empty()) return false;
    over_ = true;
  }
  end_all();
  return true;
}

void Session::end() {
  std::vector<AttemptId> attempts;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [high, batch] : grants_) attempts.push_back(batch->id);
    let_go_of(false);
  }
  for (const AttemptId& attempt : attempts) abort(attempt);
}

uint64_t Session::num_granted() const {
  const std::lock_guard lock(mutex_);
  uint64_t count = 0;
  for (const auto& [high, batch] : grants_) {
    count += static_cast<uint64_t>(std::ranges::count(batch->statuses, Status::kOk));
  }
  return count;
}

Nanos Session::first_lapse() const {
  const std::lock_guard lock(mutex_);
  Nanos first = kNever;
  for (const auto& [id, batch] : leases_) {
    if (batch->kind == LeaseKind::kCopying) first = std::min(first, batch->deadline);
  }
  return first;
}

uint64_t Session::num_leased() const {
  const std::lock_guard lock(mutex_);
  uint64_t count = 0;
  for (const auto& [id, batch] : leases_) {
    count += static_cast<uint64_t>(
        std::ranges::count_if(batch->items, [](const auto& item) { return item.has_value(); }));
  }
  return count;
}

}  // namespace kvstore
