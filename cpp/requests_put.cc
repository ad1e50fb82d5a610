// put: reserve → write → commit | abort (requests.h).
#include <algorithm>
#include <functional>
#include <utility>

#include "requests_parts.h"

namespace kvstore {
namespace {

// Whether a pool of this size could hold each of them.
bool lengths_fit(const std::vector<uint64_t>& lengths, uint64_t pool_bytes) {
  return std::ranges::all_of(lengths, [&](uint64_t length) {
    return length > 0 && length <= std::min(pool_bytes, kBlockBytesMax) &&
           shape_bytes(shape_of(length)) <= pool_bytes;
  });
}

// Their checksums must fit one commit; and what a put costs here is bounded, whatever its parts.
bool parts_fit(const std::vector<uint64_t>& lengths, uint64_t part_bytes) {
  uint64_t parts = 0;
  for (const uint64_t length : lengths) parts += (length - 1) / part_bytes + 1;
  return parts <= wire::kBodyBytesMax / sizeof(uint32_t);
}

bool well_formed(const wire::Reserve& message, uint64_t pool_bytes, uint64_t part_bytes) {
  return message.skip <= message.keys.size() &&
         message.lengths.size() == message.keys.size() - message.skip &&
         (message.texts.empty() || message.texts.size() == message.keys.size()) &&
         lengths_fit(message.lengths, pool_bytes) && parts_fit(message.lengths, part_bytes);
}

PutRequest put_request(const wire::Reserve& message, LocalStore& store) {
  return {message.keys,
          message.skip,
          message.lengths,
          message.texts,
          message.version == 0 ? store.version() : message.version,
          message.chain,
          message.attempt};
}

uint64_t sum(std::span<const Sink::Piece> pieces) {
  uint64_t bytes = 0;
  for (const Sink::Piece& piece : pieces) bytes += piece.memory.size();
  return bytes;
}

Reply granted(const RequestContext& context, const GrantBatch& grants, bool more) {
  wire::Granted message;
  message.attempt = grants.id;
  message.statuses = grants.statuses;
  message.parent_held = grants.parent_held;
  message.more = more;
  message.slots.resize(grants.items.size());
  for (size_t i = 0; i < grants.items.size(); ++i) {
    if (grants.statuses[i] != Status::kOk) continue;
    message.slots[i].slot = grants.items[i].taken.slot;
    message.slots[i].generation = grants.items[i].taken.generation;
    if (context.maps_memory) message.slots[i].extents = grants.items[i].extents;
  }
  const auto lacking = std::ranges::find(grants.statuses, Status::kOutOfSpace);
  if (lacking != grants.statuses.end()) {
    const auto item = static_cast<size_t>(lacking - grants.statuses.begin());
    message.message = context.session->store.node().describe_shortage(grants.items[item].length);
  }
  return reply_with(message);
}

// Answers once nothing lacks room, waiting is useless, or the time is over.
Outcome granted_in_time(const RequestContext& context, const std::shared_ptr<GrantBatch>& grants,
                        bool chain, int64_t wait_ns, Nanos now) {
  const auto lacking = [](const GrantBatch& batch) {
    return std::ranges::count(batch.statuses, Status::kOutOfSpace) > 0;
  };
  if (!lacking(*grants) || wait_ns <= 0) return answer(granted(context, *grants, true));
  Outcome outcome;
  outcome.again_until = wait_ns >= kNever - now ? kNever : now + wait_ns;
  outcome.again = [context, grants, chain, lacking,
                   until = outcome.again_until]() -> std::optional<Reply> {
    const Nanos then = monotonic_now();
    LocalStore& store = context.session->store;
    store.reserve_more(*grants, chain, {then, nullptr, true});
    if (!lacking(*grants)) return granted(context, *grants, true);
    const auto own = static_cast<uint64_t>(std::ranges::count(grants->statuses, Status::kOk));
    if (!store.node().room_may_come(own)) return granted(context, *grants, false);
    if (then >= until) return granted(context, *grants, true);
    return std::nullopt;
  };
  return outcome;
}

}  // namespace

Outcome serve_reserve(const RequestContext& context, const wire::Reserve& message, Nanos now) {
  LocalStore& store = context.session->store;
  if (!well_formed(message, store.pool_bytes(), store.session().part_bytes()))
    return refused("a put that is none");
  if (message.attempt == AttemptId{} || !context.session->claim(message.attempt))
    return refused("a put by a name that is in use, or was given up");
  auto grants = store.reserve(put_request(message, store), {});
  if (!context.session->keep(grants)) store.commit(*grants, 0, Status::kCancelled);
  return granted_in_time(context, grants, message.chain, message.wait_ns, now);
}

Outcome serve_reserve_more(const RequestContext& context, const wire::ReserveMore& message,
                           Nanos now) {
  auto grants = context.session->grants(message.attempt);
  if (grants == nullptr) return answer_with(wire::Granted{});
  return granted_in_time(context, grants, message.chain, message.wait_ns, now);
}

namespace {

// One piece of memory for what nobody wants: blocks of an inline put that were held already.
std::span<uint8_t> nowhere(uint64_t bytes) {
  thread_local std::vector<uint8_t> memory(wire::kInlineBytesMax);
  return std::span(memory).first(std::min<uint64_t>(bytes, memory.size()));
}

void add_block(LocalStore& store, GrantBatch& grants, size_t item, uint64_t first, uint64_t bytes,
               std::vector<Sink::Piece>* pieces) {
  GrantBatch::Item& block = grants.items[item];
  const uint64_t end = bytes >= block.length - first ? block.length : first + bytes;
  for_each_piece(store.node().segment().data(), block.extents, first, end, grants.part_bytes,
                 [&](uint64_t part, std::span<uint8_t> memory, bool ends_part) {
                   block.parts[part].reset();  // until all of it has come
                   pieces->push_back({memory, &block.parts[part], ends_part});
                 });
}

}  // namespace

Outcome serve_write(const RequestContext& context, const wire::Write& message,
                    uint64_t payload_bytes) {
  LocalStore& store = context.session->store;
  const auto grants = context.session->grants(message.attempt);
  if (grants == nullptr || !store.session().begin_write(*grants))
    return refused("a write to a put that is over");
  Outcome outcome;
  Sink& sink = outcome.sink.emplace();
  bool valid = message.first % grants->part_bytes == 0 &&
               std::ranges::adjacent_find(message.items, std::greater_equal()) ==
                   message.items.end();  // each once
  for (const uint32_t item : message.items) {
    valid = valid && item < grants->items.size() && grants->statuses[item] == Status::kOk &&
            message.first < grants->items[item].length &&
            (message.bytes % grants->part_bytes == 0 ||
             message.bytes >= grants->items[item].length - message.first);
    if (!valid) break;
    add_block(store, *grants, item, message.first, message.bytes, &sink.pieces);
  }
  if (!valid || sum(sink.pieces) != payload_bytes) {
    store.session().end_write(*grants);
    return refused("a write beyond its blocks");
  }
  sink.full = [context, grants] {
    context.session->store.session().end_write(*grants);
    return reply_with(wire::Written{Status::kOk});
  };
  sink.broken = [context, grants] { context.session->store.session().end_write(*grants); };
  return outcome;
}

namespace {

// Takes the checksums of a client that wrote by itself; else compares with what has come. A block
// with a part that differs, or without checksums, was damaged on its way and is not committed.
std::vector<size_t> settle_checksums(GrantBatch& grants, size_t end, bool maps_memory,
                                     const std::vector<std::vector<uint32_t>>& parts) {
  std::vector<size_t> damaged;
  for (size_t i = 0; i < std::min(grants.items.size(), end); ++i) {
    if (grants.statuses[i] != Status::kOk) continue;
    auto& own = grants.items[i].parts;
    bool good = i < parts.size() && parts[i].size() == own.size();
    for (size_t part = 0; good && part < own.size(); ++part) {
      if (maps_memory) own[part] = parts[i][part];
      good = own[part] == parts[i][part];
    }
    if (good) continue;
    damaged.push_back(i);
    own.assign(own.size(), std::nullopt);
  }
  return damaged;
}

Reply put_done(LocalStore& store, GrantBatch& grants, size_t end, Status otherwise,
               const std::vector<size_t>& damaged) {
  PutOutcome outcome = store.commit(grants, end, otherwise);
  for (const size_t item : damaged) outcome.statuses[item] = Status::kCorrupt;
  wire::PutDone message;
  message.statuses = std::move(outcome.statuses);
  message.parent_held = outcome.parent_held;
  message.stale = outcome.stale;
  message.namespace_version = store.version();
  message.message = std::move(outcome.message);
  return reply_with(message);
}

}  // namespace

Outcome serve_commit(const RequestContext& context, const wire::Commit& message) {
  wire::PutDone unknown;
  unknown.known = false;
  const auto grants = context.session->take_grants(message.attempt);
  if (grants == nullptr) return answer_with(unknown);
  std::vector<size_t> damaged;
  if (context.session->store.session().close_to_writers(*grants))
    damaged = settle_checksums(*grants, message.end, context.maps_memory, message.parts);
  return answer(put_done(context.session->store, *grants, message.end, message.otherwise, damaged));
}

// reserve → write → commit in one message. Nothing waits: without room it says so, and the client
// goes the longer way.
Outcome serve_put(const RequestContext& context, wire::Reserve message, uint64_t payload_bytes) {
  LocalStore& store = context.session->store;
  uint64_t total = 0;
  for (const uint64_t length : message.lengths) total += std::min(length, payload_bytes + 1);
  if (!well_formed(message, store.pool_bytes(), store.session().part_bytes()) ||
      total != payload_bytes || payload_bytes > wire::kInlineBytesMax ||
      message.parts.size() != message.lengths.size())
    return refused("an inline put that is none");
  message.attempt = {};  // it ends with its connection: nobody needs to name it
  const auto grants = store.reserve(put_request(message, store), {});
  if (!store.session().begin_write(*grants)) return refused("a put of a session that is over");
  Outcome outcome;
  Sink& sink = outcome.sink.emplace();
  for (size_t i = 0; i < grants->items.size(); ++i) {
    if (grants->statuses[i] == Status::kOk) {
      add_block(store, *grants, i, 0, UINT64_MAX, &sink.pieces);
    } else {
      sink.pieces.push_back({nowhere(message.lengths[i]), nullptr, false});
    }
  }
  sink.full = [context, grants, parts = std::move(message.parts)] {
    LocalStore& own = context.session->store;
    own.session().end_write(*grants);
    const auto damaged = settle_checksums(*grants, grants->items.size(), false, parts);
    return put_done(own, *grants, grants->items.size(), Status::kOk, damaged);
  };
  sink.broken = [context, grants] {
    LocalStore& own = context.session->store;
    own.session().end_write(*grants);
    own.commit(*grants, 0, Status::kCancelled);
  };
  return outcome;
}

}  // namespace kvstore
