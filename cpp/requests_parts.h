// What the files of requests share: replies from messages, and blocks as pieces of memory.
#pragma once

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "requests.h"

namespace kvstore {

template <class Message>
Reply reply_with(const Message& message) {
  Reply reply;
  reply.type = Message::kType;
  reply.body = wire::encode(message);
  return reply;
}

inline Outcome answer(Reply reply) {
  Outcome outcome;
  outcome.reply = std::move(reply);
  return outcome;
}

template <class Message>
Outcome answer_with(const Message& message) {
  return answer(reply_with(message));
}

inline Outcome refused(const std::string& message) {
  return answer(refuse(wire::Why::kProtocol, message));
}

// The pieces of [first, end) of a slot, cut at extents and at parts.
template <class Use>
void for_each_piece(uint8_t* segment, std::span<const Extent> extents, uint64_t first, uint64_t end,
                    uint64_t part_bytes, Use&& use) {
  uint64_t start = 0;  // of the extent, in the block
  for (const Extent& extent : extents) {
    uint64_t at = std::max(first, start);
    const uint64_t stop = std::min(end, start + extent.bytes);
    while (at < stop) {
      const uint64_t part = at / part_bytes;
      const uint64_t until = std::min(stop, (part + 1) * part_bytes);
      use(part, std::span(segment + extent.offset + (at - start), until - at),
          until == end || until % part_bytes == 0);
      at = until;
    }
    start += extent.bytes;
  }
}

// put (requests_put.cc)
Outcome serve_reserve(const RequestContext& context, const wire::Reserve& message, Nanos now);
Outcome serve_reserve_more(const RequestContext& context, const wire::ReserveMore& message,
                           Nanos now);
Outcome serve_write(const RequestContext& context, const wire::Write& message,
                    uint64_t payload_bytes);
Outcome serve_commit(const RequestContext& context, const wire::Commit& message);
Outcome serve_put(const RequestContext& context, wire::Reserve message, uint64_t payload_bytes);

}  // namespace kvstore
