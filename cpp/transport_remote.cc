#include "transport_remote.h"

#include <algorithm>
#include <system_error>

#include "crc32c.h"

namespace kvstore {
namespace {

constexpr Nanos kWaitSlice = 50 * kMillisecond;  // for room; then `cancelled` is looked at
constexpr Nanos kCopyPatience = 30'000 * kMillisecond;

AttemptId new_attempt() {
  AttemptId attempt;
  random_bytes({reinterpret_cast<uint8_t*>(&attempt), sizeof attempt});
  return attempt;
}

wire::Reserve reserve_message(const PutRequest& request) {
  wire::Reserve message;
  message.keys.assign(request.keys.begin(), request.keys.end());
  message.skip = static_cast<uint32_t>(request.skip);
  message.lengths.assign(request.lengths.begin(), request.lengths.end());
  message.texts.assign(request.texts.begin(), request.texts.end());
  message.version = request.version;
  message.chain = request.chain;
  return message;
}

size_t num_parts(uint64_t length, uint64_t part_bytes) {
  return (length + part_bytes - 1) / part_bytes;
}

// The bytes of all blocks in order, as they are sent, and the checksums of their parts.
std::vector<iovec> gather(const std::vector<BlockMemory>& blocks, uint64_t part_bytes,
                          std::vector<std::vector<uint32_t>>* parts) {
  std::vector<iovec> pieces;
  for (const BlockMemory& block : blocks) {
    std::vector<uint32_t>& sums = parts->emplace_back();
    MemoryCursor cursor(block, 0);
    for (uint64_t at = 0; at < block.bytes();) {
      uint32_t crc = 0;
      for (const uint64_t end = std::min(block.bytes(), at + part_bytes); at < end;) {
        const std::span<uint8_t> piece = cursor.next(end - at);
        crc = crc32c(crc, piece.data(), piece.size());
        pieces.push_back({piece.data(), piece.size()});
        at += piece.size();
      }
      sums.push_back(crc);
    }
  }
  return pieces;
}

}  // namespace

Status status_of(Io io) {
  if (io == Io::kDone) return Status::kOk;
  if (io == Io::kTimedOut) return Status::kTimedOut;
  return io == Io::kCancelled ? Status::kCancelled : Status::kUnavailable;
}

RemoteStore::RemoteStore(std::shared_ptr<Remote> remote, unsigned copy_threads)
    : remote_(std::move(remote)), copier_(copy_threads) {}

RemoteStore::~RemoteStore() { remote_->end(); }

void RemoteStore::end() {
  if (ended_.exchange(true)) return;
  remote_->leave();
  if (views_.load() == 0) remote_->end();  // else the last view's end does
}

void RemoteStore::fail(Io io) const {
  const std::string place = remote_->options().address.text();
  if (io == Io::kTimedOut)
    throw std::system_error(std::make_error_code(std::errc::timed_out),
                            place + ": no answer in time");
  if (io == Io::kCancelled)
    throw std::system_error(std::make_error_code(std::errc::operation_canceled),
                            place + ": the store was closed meanwhile");
  throw std::system_error(std::make_error_code(std::errc::not_connected), remote_->last_error());
}

Patience RemoteStore::patience_of(const CallLimits& limits) const {
  const Nanos most = monotonic_now() + std::max(kCopyPatience, remote_->options().timeout);
  return {std::min(limits.deadline, most), limits.cancelled};
}

// ---- put: reserve → write → commit | abort -----------------------------------------------------

PutOutcome RemoteStore::put_failed(size_t blocks, Status status) const {
  PutOutcome outcome;
  outcome.statuses.assign(blocks, status);
  if (status == Status::kUnavailable) outcome.message = remote_->last_error();
  return outcome;
}

PutOutcome RemoteStore::put(const PutRequest& request, const std::vector<BlockMemory>& blocks,
                            const CallLimits& limits) {
  uint64_t bytes = 0;
  for (const BlockMemory& block : blocks) bytes += block.bytes();
  if (puts_inline(bytes)) {
    PutOutcome outcome = put_inline(request, blocks, limits);
    const bool lacks_room = std::ranges::count(outcome.statuses, Status::kOutOfSpace) > 0;
    if (!lacks_room || !limits.waits) return outcome;
  }
  const auto grants = reserve(request, limits);
  if (limits.waits) reserve_more(*grants, request.chain, limits);
  PutOutcome outcome = write_and_commit(*grants, blocks, limits.for_copy());
  if (limits.stopped()) outcome.cancel_rest();
  return outcome;
}

PutOutcome RemoteStore::write_and_commit(GrantBatch& grants, const std::vector<BlockMemory>& blocks,
                                         const CallLimits& limits) {
  const Status written = write(grants, blocks, {}, limits);
  return commit(grants, written == Status::kOk ? blocks.size() : 0, written);
}

// One message, blocks and all. It is never sent twice: what became of a lost one, nobody knows.
PutOutcome RemoteStore::put_inline(const PutRequest& request,
                                   const std::vector<BlockMemory>& blocks,
                                   const CallLimits& limits) {
  const Patience patience = patience_of(limits);
  wire::Reserve message = reserve_message(request);
  std::vector<iovec> pieces = gather(blocks, remote_->options().part_bytes, &message.parts);
  uint64_t bytes = 0;
  for (const iovec& piece : pieces) bytes += piece.iov_len;
  Io io = Io::kDone;
  Remote::Line line = remote_->take(patience, &io);
  if (!line) return put_failed(blocks.size(), status_of(io));
  wire::PutDone done;
  io = line.link->say(message, patience, bytes, wire::Type::kPut);
  if (io == Io::kDone) io = line.link->send_payload(pieces, patience);
  const bool sent = io == Io::kDone;  // the node commits nothing it has not got all of
  if (sent) io = line.link->hear(&done, patience);
  const uint64_t incarnation = line.incarnation;
  if (io != Io::kDone || done.statuses.size() != blocks.size()) {
    const bool known = !sent || io == Io::kRefused;
    remote_->drop(std::move(line));
    return put_failed(blocks.size(), known ? status_of(io) : Status::kOutcomeUnknown);
  }
  remote_->give(std::move(line));
  remote_->saw_version(done.namespace_version, incarnation);
  return {std::move(done.statuses), done.parent_held, done.stale, shown(std::move(done.message))};
}

std::shared_ptr<GrantBatch> RemoteStore::reserve(const PutRequest& request,
                                                 const CallLimits& limits) {
  auto grants = std::make_shared<RemoteGrants>();
  grants->id = new_attempt();
  grants->version = request.version;
  grants->part_bytes = remote_->options().part_bytes;
  grants->items.resize(request.lengths.size());
  for (size_t i = 0; i < grants->items.size(); ++i) {
    grants->items[i].key = request.keys[request.skip + i];
    grants->items[i].length = request.lengths[i];
    grants->items[i].parts.resize(num_parts(request.lengths[i], grants->part_bytes));
  }
  wire::Reserve message = reserve_message(request);
  message.attempt = grants->id;
  const Patience patience = limits.deadline == kNever ? remote_->patience() : patience_of(limits);
  Io io = Io::kDone;
  Remote::Line line = remote_->take(patience, &io);
  wire::Granted granted;
  if (line) {
    grants->incarnation = line.incarnation;
    io = line.link->ask(message, &granted, patience);
    if (io == Io::kDone && granted.statuses.size() == grants->items.size() &&
        granted.slots.size() == grants->items.size()) {
      remote_->give(std::move(line));
      take_granted(*grants, std::move(granted));
      return grants;
    }
    remote_->drop(std::move(line));
    remote_->owe_abort(grants->id, grants->incarnation);
  }
  grants->statuses.assign(grants->items.size(), status_of(io));
  grants->given_up = true;
  return grants;
}

void RemoteStore::take_granted(GrantBatch& grants, wire::Granted granted) const {
  grants.parent_held = granted.parent_held;
  grants.statuses = std::move(granted.statuses);
  for (size_t i = 0; i < grants.items.size(); ++i) {
    if (grants.statuses[i] != Status::kOk) continue;
    grants.items[i].taken = {granted.slots[i].slot, granted.slots[i].generation};
    grants.items[i].extents = std::move(granted.slots[i].extents);
  }
}

bool RemoteStore::reserve_more(GrantBatch& grants, bool chain, const CallLimits& limits) {
  while (std::ranges::count(grants.statuses, Status::kOutOfSpace) > 0) {
    if (limits.stopped() || limits.passed()) return limits.passed();
    wire::ReserveMore message{grants.id, chain, kWaitSlice};
    if (limits.deadline != kNever)
      message.wait_ns = std::min(kWaitSlice, limits.deadline - monotonic_now());
    wire::Granted granted;
    // The node answers after the slice at the latest; a little longer for the way there and back.
    Nanos until = monotonic_now() + kWaitSlice + remote_->options().timeout;
    if (limits.deadline != kNever) until = std::min(until, limits.deadline + 2 * kWaitSlice);
    const Io io = remote_->ask(message, &granted, {until, limits.cancelled}, true);
    if (io != Io::kDone || granted.statuses.size() != grants.items.size() ||
        granted.slots.size() != grants.items.size()) {
      // What it has granted meanwhile is not known here: the put ends without any of it.
      remote_->owe_abort(grants.id, static_cast<RemoteGrants&>(grants).incarnation);
      const Status failed = io == Io::kDone ? Status::kUnavailable : status_of(io);
      std::ranges::replace(grants.statuses, Status::kOutOfSpace, failed);
      std::ranges::replace(grants.statuses, Status::kOk, failed);
      grants.given_up = true;
      return false;
    }
    const bool more = granted.more;
    take_granted(grants, std::move(granted));
    if (!more) return false;
  }
  return false;
}

wire::Commit RemoteStore::commit_message(const GrantBatch& grants, size_t end,
                                         Status otherwise) const {
  wire::Commit message;
  message.attempt = grants.id;
  message.end = static_cast<uint32_t>(end);
  message.otherwise = otherwise;
  message.parts.resize(end);
  for (size_t i = 0; i < end; ++i) {
    if (grants.statuses[i] != Status::kOk) continue;
    const auto& parts = grants.items[i].parts;
    if (!std::ranges::all_of(parts, [](const auto& part) { return part.has_value(); })) continue;
    for (const auto& part : parts) message.parts[i].push_back(*part);
  }
  return message;
}

// A commit is asked once: without an answer nobody knows.
PutOutcome RemoteStore::commit(GrantBatch& grants, size_t end, Status otherwise) {
  wire::PutDone done;
  if (grants.given_up) return finish_put(grants, 0, Io::kDone, {});
  const Io io =
      remote_->ask(commit_message(grants, end, otherwise), &done, remote_->patience(), false);
  return finish_put(grants, end, io, std::move(done));
}

PutOutcome RemoteStore::finish_put(GrantBatch& grants, size_t end, Io io, wire::PutDone done) {
  PutOutcome outcome;
  outcome.statuses = grants.statuses;
  outcome.parent_held = grants.parent_held;
  const bool again = grants.given_up;
  grants.given_up = true;
  if (again) {
    outcome.message = std::ranges::count(grants.statuses, Status::kUnavailable) > 0
                          ? remote_->last_error()
                          : std::string();
    return outcome;
  }
  const uint64_t incarnation = static_cast<RemoteGrants&>(grants).incarnation;
  if (io != Io::kDone) {
    remote_->owe_abort(grants.id, incarnation);
    std::ranges::replace(outcome.statuses, Status::kOk,
                         end == 0 ? status_of(io) : Status::kOutcomeUnknown);
    outcome.message = remote_->last_error();
  } else if (!done.known || done.statuses.size() != grants.items.size()) {
    std::ranges::replace(outcome.statuses, Status::kOk, Status::kUnavailable);
    outcome.message = "the node no longer knows this put: it was restarted, or gave it up";
  } else {
    for (size_t i = 0; i < done.statuses.size(); ++i) {
      const auto& parts = grants.items[i].parts;
      const bool whole = std::ranges::all_of(parts, [](const auto& p) { return p.has_value(); });
      // Not damaged, but never written.
      if (done.statuses[i] == Status::kCorrupt && !whole) done.statuses[i] = Status::kCancelled;
    }
    outcome = {std::move(done.statuses), done.parent_held, done.stale,
               shown(std::move(done.message))};
    remote_->saw_version(done.namespace_version, incarnation);
  }
  grants.statuses = outcome.statuses;
  return outcome;
}

// ---- get: lookup → read → release --------------------------------------------------------------

size_t RemoteStore::match(std::span<const BlockKey> keys, size_t skip, uint16_t ranks) {
  wire::Match message{{keys.begin(), keys.end()}, static_cast<uint32_t>(skip), ranks};
  uint64_t incarnation = 0;
  const auto matched = asked<wire::Matched>(message, true, &incarnation);
  remote_->saw_version(matched.namespace_version, incarnation);
  return std::min<size_t>(matched.blocks, keys.size() - skip);
}

std::vector<bool> RemoteStore::exists(std::span<const BlockKey> keys) {
  const auto held = asked<wire::Held>(wire::Exists{{keys.begin(), keys.end()}}, true).held;
  if (held.size() != keys.size()) fail(Io::kLost);
  return {held.begin(), held.end()};
}

std::shared_ptr<RemoteLeases> RemoteStore::leases_of(wire::Leased answer, uint64_t incarnation) {
  auto leases = std::make_shared<RemoteLeases>();
  leases->id = answer.lease;
  leases->incarnation = incarnation;
  leases->mapping = remote_->mapping(incarnation);
  if (answer.view) {
    leases->kind = LeaseKind::kView;
    views_.fetch_add(1);
  }
  leases->items.resize(answer.blocks.size());
  leases->parts.resize(answer.blocks.size());
  for (size_t i = 0; i < answer.blocks.size(); ++i) {
    wire::LeasedBlock& block = answer.blocks[i];
    if (!block.held) continue;
    leases->parts[i] = std::move(block.parts);
    Found& found = leases->items[i].emplace();
    found.slot = block.slot.slot;
    found.generation = block.slot.generation;
    found.length = block.length;
    found.part_bytes = block.part_bytes;
    found.parts = leases->parts[i];
    found.extents = std::move(block.slot.extents);
    leases->bytes += block.length;
  }
  return leases;
}

std::shared_ptr<RemoteLeases> RemoteStore::lease(std::span<const BlockKey> keys, size_t skip,
                                                 bool run, const Patience& patience, Io* failed,
                                                 bool view) {
  wire::Lookup message{{keys.begin(), keys.end()}, static_cast<uint32_t>(skip), run, view};
  wire::Leased answer;
  uint64_t incarnation = 0;
  *failed = remote_->ask(message, &answer, patience, true, &incarnation);
  const size_t most = keys.size() - skip;
  if (*failed != Io::kDone || answer.blocks.size() > most || (!run && answer.blocks.size() < most))
    answer = {};
  remote_->saw_version(answer.namespace_version, incarnation);
  return leases_of(std::move(answer), incarnation);
}

std::shared_ptr<LeaseBatch> RemoteStore::lookup(std::span<const BlockKey> keys, size_t skip,
                                                bool run) {
  Io failed = Io::kDone;
  // None, if it cannot be asked.
  return lease(keys, skip, run, remote_->patience(), &failed, run && views_likely_.load());
}

Released RemoteStore::release(LeaseBatch& batch) {
  auto& leases = static_cast<RemoteLeases&>(batch);
  if (leases.ended) return leases.revoked ? Released::kRevoked : Released::kHeld;
  leases.ended = true;
  wire::Released released{false};
  if (leases.id == 0) {
    released.held = true;
  } else if (leases.incarnation == remote_->incarnation()) {
    const Io io =
        remote_->ask(wire::Release{leases.id, false}, &released, remote_->patience(), true);
    if (io != Io::kDone) released.held = false;
  }
  leases.revoked = !released.held;
  return released.held ? Released::kHeld : Released::kRevoked;
}

std::vector<Status> RemoteStore::verify(LeaseBatch& batch) {
  const auto& leases = static_cast<RemoteLeases&>(batch);
  std::vector<Status> statuses(leases.items.size(), Status::kUnavailable);
  if (leases.items.empty() || leases.incarnation != remote_->incarnation()) return statuses;
  auto verified = asked<wire::Verified>(wire::Verify{leases.id}, true, nullptr, kLong);
  return verified.statuses.size() == statuses.size() ? verified.statuses : statuses;
}

AttemptId RemoteStore::ticket(LeaseBatch& batch) {
  const auto& leases = static_cast<RemoteLeases&>(batch);
  if (leases.incarnation != remote_->incarnation()) return {};  // as of a lease that has ended
  return asked<wire::TicketIs>(wire::Ticket{leases.id}, true).ticket;
}

std::shared_ptr<LeaseBatch> RemoteStore::redeem(const AttemptId& ticket) {
  uint64_t incarnation = 0;
  auto answer = asked<wire::Leased>(wire::Redeem{ticket}, true, &incarnation);
  return answer.lease == 0 ? nullptr : leases_of(std::move(answer), incarnation);
}

void RemoteStore::complain(const RemoteLeases& leases, size_t item) {
  Io io = Io::kDone;
  const Patience patience = remote_->patience();
  Remote::Line line = remote_->take(patience, &io);
  if (!line) return;  // a node that cannot be told checks by itself, in the background
  io = line.link->say(wire::Complain{leases.id, static_cast<uint32_t>(item)}, patience);
  if (io == Io::kDone) return remote_->give(std::move(line));
  remote_->drop(std::move(line));
}

// ---- the rest ----------------------------------------------------------------------------------

size_t RemoteStore::apply(KeyOperation operation, std::span<const BlockKey> keys) {
  // A pin, an unpin or a removal whose answer was lost is not asked again: it may count twice.
  const bool again = operation == KeyOperation::kTouch;
  const wire::Apply message{static_cast<uint8_t>(operation), {keys.begin(), keys.end()}};
  return asked<wire::Applied>(message, again).count;
}

uint32_t RemoteStore::clear() {
  uint64_t incarnation = 0;
  const auto cleared = asked<wire::Cleared>(wire::Clear{}, false, &incarnation, kLong);
  const uint32_t version = cleared.namespace_version;
  remote_->saw_version(version, incarnation);
  return version;
}

std::vector<Listed> RemoteStore::list() {
  auto answer = asked<wire::Listed>(wire::List{}, true, nullptr, kLong);
  if (!answer.all) {
    throw std::system_error(std::make_error_code(std::errc::message_size),
                            "the namespace has more blocks than one message can list");
  }
  std::vector<Listed> blocks;
  blocks.reserve(answer.blocks.size());
  for (auto& block : answer.blocks)
    blocks.push_back({block.key, block.length, std::move(block.text), block.pinned});
  return blocks;
}

UsageReport RemoteStore::usage() {
  auto answer = asked<wire::UsageIs>(wire::Usage{}, true);
  UsageReport report;
  for (auto& count : answer.counts)
    report.counts.emplace_back(shown(std::move(count.name)), count.value);
  report.pages = shown(std::move(answer.pages));
  return report;
}

std::string RemoteStore::audit() {
  return shown(asked<wire::AuditIs>(wire::Audit{}, true, nullptr, kLong).problem);
}

bool RemoteStore::settle(Nanos deadline) {
  while (true) {
    const Nanos left = deadline - monotonic_now();
    if (asked<wire::Settled>(wire::Settle{std::clamp<Nanos>(left, 0, kWaitSlice)}, true).settled)
      return true;
    if (left <= kWaitSlice) return false;
  }
}

}  // namespace kvstore
