#include "requests.h"

#include <algorithm>
#include <utility>

#include "crc32c.h"
#include "requests_parts.h"

namespace kvstore {
namespace {

constexpr uint64_t kAnswerPartsMax = wire::kBodyBytesMax / 8;

// ---- get: lookup → read → release --------------------------------------------------------------

// Whether one answer holds what stands beside these blocks; a key may be named again and again.
bool answerable(const LeaseBatch& leases) {
  uint64_t parts = 0;
  for (const auto& item : leases.items) parts += item ? item->parts.size() : 0;
  return parts <= kAnswerPartsMax;
}

Outcome too_many_parts() {
  return refused("more parts than one answer holds; ask for fewer blocks at once");
}

Reply leased(const RequestContext& context, const LeaseBatch& leases) {
  wire::Leased message;
  message.lease = leases.id;
  message.namespace_version = context.session->store.version();
  message.view = leases.kind == LeaseKind::kView;
  message.blocks.resize(leases.items.size());
  for (size_t i = 0; i < leases.items.size(); ++i) {
    const auto& item = leases.items[i];
    if (!item) continue;
    wire::LeasedBlock& block = message.blocks[i];
    block.held = true;
    block.length = item->length;
    block.part_bytes = item->part_bytes;
    block.slot = {item->slot, item->generation, {}};
    if (context.maps_memory) block.slot.extents = item->extents;
    block.parts.assign(item->parts.begin(), item->parts.end());
  }
  Reply reply = reply_with(message);
  // Nobody else could release what nobody knows of.
  reply.unheard = [context, id = leases.id] {
    if (const auto unknown = context.session->take_leases(id))
      context.session->store.release(*unknown);
  };
  return reply;
}

Outcome lookup(const RequestContext& context, const wire::Lookup& message) {
  if (message.skip > message.keys.size()) return refused("a look-up that skips beyond its keys");
  LocalStore& store = context.session->store;
  const auto leases = store.lookup(message.keys, message.skip, message.run);
  if (store.session().num_leased() > context.leases_max) {
    store.release(*leases);
    return answer(refuse(wire::Why::kTooMany, "this session leases more blocks than it may"));
  }
  if (!answerable(*leases)) {
    store.release(*leases);
    return too_many_parts();
  }
  if (message.view && context.maps_memory) store.session().make_view(*leases, true);
  context.session->keep(leases);
  return answer(leased(context, *leases));
}

Outcome redeem(const RequestContext& context, const wire::Redeem& message) {
  const auto leases = context.session->store.redeem(message.ticket);
  if (leases == nullptr) return answer_with(wire::Leased{});
  context.session->keep(leases);
  return answer(leased(context, *leases));
}

// Of items [first_item, first_item + room.size()) of what is leased and being read, the range.
// `done` is called when the bytes have left.
Reply blocks_of(LocalStore& store, const LeaseBatch& leases, size_t first_item,
                const std::vector<uint64_t>& room, uint64_t first, uint64_t bytes,
                std::function<void()> done) {
  wire::Blocks message;
  message.blocks.resize(room.size());
  std::vector<std::span<const uint8_t>> payload;
  for (size_t i = 0; i < room.size(); ++i) {
    const auto& item = leases.items[first_item + i];
    if (!item || first >= item->length) continue;
    wire::SentBlock& block = message.blocks[i];
    const uint64_t end = bytes >= item->length - first ? item->length : first + bytes;
    block.status = Status::kOk;
    block.length = item->length;
    block.part_bytes = item->part_bytes;
    if (end - first > room[i] && !message.any_too_small) {
      message.any_too_small = true;
      message.too_small = static_cast<uint32_t>(i);
    }
    for_each_piece(store.node().segment().data(), item->extents, first, end, item->part_bytes,
                   [&](uint64_t part, std::span<uint8_t> memory, bool ends_part) {
                     payload.emplace_back(memory);
                     if (ends_part) block.parts.push_back(item->parts[part]);
                   });
  }
  if (message.any_too_small) payload.clear();
  Reply reply = reply_with(message);
  reply.payload = std::move(payload);
  reply.sent = std::move(done);
  return reply;
}

Outcome get(const RequestContext& context, const wire::Get& message, Nanos now) {
  if (message.room.size() != message.keys.size()) return refused("a get without room for each");
  LocalStore& store = context.session->store;
  const auto leases = store.lookup_to_read(message.keys, now);
  if (!answerable(*leases)) {
    store.session().end_read(*leases);
    store.release(*leases);
    return too_many_parts();
  }
  return answer(blocks_of(store, *leases, 0, message.room, 0, UINT64_MAX, [context, leases] {
    LocalStore& own = context.session->store;
    own.session().end_read(*leases);
    own.release(*leases);
  }));
}

Outcome read(const RequestContext& context, const wire::Read& message) {
  LocalStore& store = context.session->store;
  const auto leases = context.session->leases(message.lease);
  if (leases != nullptr && (message.first_item > leases->items.size() ||
                            message.room.size() > leases->items.size() - message.first_item))
    return refused("a read of more blocks than are leased");
  if (leases == nullptr || !store.session().begin_read(*leases)) {
    wire::Blocks gone;
    gone.blocks.assign(message.room.size(), {Status::kUnavailable, 0, 0, {}});
    return answer_with(gone);
  }
  for (size_t i = 0; i < message.room.size(); ++i) {
    const auto& item = leases->items[message.first_item + i];
    const bool whole_parts =
        !item || (message.first % item->part_bytes == 0 &&
                  (message.bytes % item->part_bytes == 0 || message.first >= item->length ||
                   message.bytes >= item->length - message.first));
    if (whole_parts) continue;
    store.session().end_read(*leases);
    return refused("a read of less than whole parts");
  }
  return answer(
      blocks_of(store, *leases, message.first_item, message.room, message.first, message.bytes,
                [context, leases] { context.session->store.session().end_read(*leases); }));
}

Outcome release(const RequestContext& context, const wire::Release& message) {
  const auto leases = context.session->take_leases(message.lease);
  wire::Released answered;
  answered.held = leases != nullptr && context.session->store.release(*leases) == Released::kHeld;
  Reply reply = reply_with(answered);
  reply.none = message.quiet;
  return answer(std::move(reply));
}

// ---- the rest ----------------------------------------------------------------------------------

Outcome match(const RequestContext& context, const wire::Match& message) {
  if (message.skip > message.keys.size() || message.ranks == 0)
    return refused("a match that skips beyond its keys, or asks no rank");
  LocalStore& store = context.session->store;
  const size_t blocks = store.match(message.keys, message.skip, message.ranks);
  return answer_with(wire::Matched{static_cast<uint32_t>(blocks), store.version()});
}

Outcome exists(const RequestContext& context, const wire::Exists& message) {
  const std::vector<bool> held = context.session->store.exists(message.keys);
  return answer_with(wire::Held{{held.begin(), held.end()}});
}

Outcome make_view(const RequestContext& context, const wire::MakeView& message) {
  const auto leases = context.session->leases(message.lease);
  return answer_with(wire::ViewMade{context.maps_memory && leases != nullptr &&
                                    context.session->store.make_view(*leases)});
}

Outcome ticket(const RequestContext& context, const wire::Ticket& message) {
  const auto leases = context.session->leases(message.lease);
  if (leases == nullptr) return answer_with(wire::TicketIs{});
  return answer_with(wire::TicketIs{context.session->store.ticket(*leases)});
}

Outcome complain(const RequestContext& context, const wire::Complain& message) {
  LocalStore& store = context.session->store;
  const auto leases = context.session->leases(message.lease);
  if (leases != nullptr && message.item < leases->items.size() && leases->items[message.item] &&
      store.session().begin_read(*leases)) {
    store.node().blocks().check(leases->items[message.item]->entry);
    store.session().end_read(*leases);
  }
  Reply nothing;
  nothing.none = true;
  return answer(std::move(nothing));
}

Outcome apply(const RequestContext& context, const wire::Apply& message) {
  if (message.operation > static_cast<uint8_t>(KeyOperation::kUnpin))
    return refused("an operation that is none");
  const size_t held =
      context.session->store.apply(static_cast<KeyOperation>(message.operation), message.keys);
  return answer_with(wire::Applied{static_cast<uint32_t>(held)});
}

Reply listed(LocalStore& store) {
  wire::Listed message;
  uint64_t bytes = 0;
  for (Listed& block : store.list()) {
    bytes += kKeyBytes + 13 + block.text.size();
    message.all = bytes <= wire::kBodyBytesMax - 64;
    if (!message.all) break;
    message.blocks.push_back({block.key, block.length, std::move(block.text), block.pinned});
  }
  return reply_with(message);
}

Outcome usage(const RequestContext& context, const wire::Usage&) {
  const UsageReport report = context.session->store.usage();
  wire::UsageIs message;
  for (const auto& [name, value] : report.counts) message.counts.push_back({name, value});
  message.pages = report.pages;
  return answer_with(message);
}

Outcome on_another_thread(std::function<Reply()> work) {
  Outcome outcome;
  outcome.slow = true;
  outcome.again = [work = std::move(work)]() -> std::optional<Reply> { return work(); };
  return outcome;
}

Outcome settle(const RequestContext& context, const wire::Settle& message, Nanos now) {
  const Nanos until = message.wait_ns >= kNever - now ? kNever : now + message.wait_ns;
  Outcome outcome;
  outcome.again_until = until;
  outcome.again = [context, until]() -> std::optional<Reply> {
    const Nanos then = monotonic_now();
    const bool settled = context.session->store.settle(then);
    if (!settled && then < until) return std::nullopt;
    return reply_with(wire::Settled{settled});
  };
  return outcome;
}

Outcome leave(const RequestContext& context, const wire::Leave&) {
  context.session->store.end();
  return answer_with(wire::Left{});
}

Outcome verify(const RequestContext& context, const wire::Verify& message) {
  return on_another_thread([context, lease = message.lease] {
    const auto leases = context.session->leases(lease);
    wire::Verified verified;
    if (leases != nullptr) verified.statuses = context.session->store.verify(*leases);
    return reply_with(verified);
  });
}

Outcome clear(const RequestContext& context, const wire::Clear&) {
  return on_another_thread(
      [context] { return reply_with(wire::Cleared{context.session->store.clear()}); });
}

Outcome list(const RequestContext& context, const wire::List&) {
  return on_another_thread([context] { return listed(context.session->store); });
}

Outcome audit(const RequestContext& context, const wire::Audit&) {
  return on_another_thread(
      [context] { return reply_with(wire::AuditIs{context.session->store.audit()}); });
}

// Calls use(message) if the body is one; else refuses.
template <class Message, class Use>
Outcome with(std::span<const uint8_t> body, Use&& use) {
  std::optional<Message> message = wire::decode<Message>(body);
  if (!message) return refused("a body that is no message of its type");
  return use(std::move(*message));
}

template <class Message>
Outcome with(std::span<const uint8_t> body, const RequestContext& context,
             Outcome (*serve_one)(const RequestContext&, const Message&)) {
  return with<Message>(body, [&](const Message& message) { return serve_one(context, message); });
}

}  // namespace

void SinkCursor::advance(uint64_t bytes) {
  while (bytes > 0) {
    const Sink::Piece& piece = sink_.pieces[piece_];
    const uint64_t now = std::min<uint64_t>(bytes, piece.memory.size() - used_);
    if (piece.checksum != nullptr) checksum_ = crc32c(checksum_, piece.memory.data() + used_, now);
    bytes -= now;
    used_ += now;
    if (used_ < piece.memory.size()) return;
    if (piece.ends_part) {
      *piece.checksum = checksum_;
      checksum_ = 0;
    }
    ++piece_;
    used_ = 0;
  }
}

Reply refuse(wire::Why why, const std::string& message) {
  Reply reply = reply_with(wire::Refusal{why, message});
  reply.closes = true;
  return reply;
}

Outcome serve(const RequestContext& context, const wire::FrameHeader& header,
              std::span<const uint8_t> body, Nanos now) {
  using wire::Type;
  const bool carries = header.type == Type::kWrite || header.type == Type::kPut;
  if (!carries && header.payload_bytes > 0) return refused("a payload where none belongs");
  switch (header.type) {
    case Type::kMatch:
      return with(body, context, match);
    case Type::kExists:
      return with(body, context, exists);
    case Type::kReserve:
      return with<wire::Reserve>(body,
                                 [&](const auto& m) { return serve_reserve(context, m, now); });
    case Type::kReserveMore:
      return with<wire::ReserveMore>(
          body, [&](const auto& m) { return serve_reserve_more(context, m, now); });
    case Type::kWrite:
      return with<wire::Write>(
          body, [&](const auto& m) { return serve_write(context, m, header.payload_bytes); });
    case Type::kCommit:
      return with(body, context, serve_commit);
    case Type::kPut:
      return with<wire::Reserve>(
          body, [&](auto m) { return serve_put(context, std::move(m), header.payload_bytes); });
    case Type::kLookup:
      return with(body, context, lookup);
    case Type::kRedeem:
      return with(body, context, redeem);
    case Type::kGet:
      return with<wire::Get>(body, [&](const auto& m) { return get(context, m, now); });
    case Type::kRead:
      return with(body, context, read);
    case Type::kRelease:
      return with(body, context, release);
    case Type::kMakeView:
      return with(body, context, make_view);
    case Type::kTicket:
      return with(body, context, ticket);
    case Type::kVerify:
      return with(body, context, verify);
    case Type::kComplain:
      return with(body, context, complain);
    case Type::kApply:
      return with(body, context, apply);
    case Type::kClear:
      return with(body, context, clear);
    case Type::kList:
      return with(body, context, list);
    case Type::kUsage:
      return with(body, context, usage);
    case Type::kAudit:
      return with(body, context, audit);
    case Type::kLeave:
      return with(body, context, leave);
    case Type::kSettle:
      return with<wire::Settle>(body, [&](const auto& m) { return settle(context, m, now); });
    default:
      return refused("a message that is no request");
  }
}

}  // namespace kvstore
