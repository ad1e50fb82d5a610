// Wire v1: what is asked and answered once both sides are known (docs/wire.md), in the order of the
// data's way: reserve → write → commit, lookup → read → release, and the rest.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "status.h"
#include "types.h"
#include "wire.h"

namespace kvstore::wire {

inline constexpr uint32_t kPartsMax = 1 << 22;         // of one block
inline constexpr uint32_t kExtentsMax = 1 << 20;       // of one block
inline constexpr uint32_t kCountsMax = 256;            // of a usage report
inline constexpr uint64_t kInlineBytesMax = 64 << 10;  // of a put that is one message

// ---- the data's way ----------------------------------------------------------------------------

// A request that says no more than what it is; and one that names a lease.
template <Type kRequest>
struct Bare {
  static constexpr Type kType = kRequest;
  template <class C>
  void fields(C&) {}
};
template <Type kRequest>
struct OfLease {
  static constexpr Type kType = kRequest;
  uint64_t lease = 0;
  template <class C>
  void fields(C& c) {
    c(lease);
  }
};
using MakeView = OfLease<Type::kMakeView>;
using Ticket = OfLease<Type::kTicket>;
using Verify = OfLease<Type::kVerify>;
using Clear = Bare<Type::kClear>;
using List = Bare<Type::kList>;
using Usage = Bare<Type::kUsage>;
using Audit = Bare<Type::kAudit>;
using Leave = Bare<Type::kLeave>;  // ends the session's grants and copying leases
using Left = Bare<Type::kLeft>;

struct Match {
  static constexpr Type kType = Type::kMatch;
  std::vector<BlockKey> keys;
  uint32_t skip = 0;
  uint16_t ranks = 1;
  template <class C>
  void fields(C& c) {
    c.list(keys);
    c(skip)(ranks);
  }
};
struct Matched {
  static constexpr Type kType = Type::kMatched;
  uint32_t blocks = 0;
  uint32_t namespace_version = 0;
  template <class C>
  void fields(C& c) {
    c(blocks)(namespace_version);
  }
};

struct Exists {
  static constexpr Type kType = Type::kExists;
  std::vector<BlockKey> keys;
  template <class C>
  void fields(C& c) {
    c.list(keys);
  }
};
struct Held {
  static constexpr Type kType = Type::kHeld;
  std::vector<uint8_t> held;  // 0 or 1 a key
  template <class C>
  void fields(C& c) {
    c.list(held, kBatchBlocksMax);
  }
};

// A put's reservation; in kPut the blocks' bytes follow as payload. The client names the attempt,
// so that it can give up what it never heard the answer of.
struct Reserve {
  static constexpr Type kType = Type::kReserve;
  AttemptId attempt;
  std::vector<BlockKey> keys;
  uint32_t skip = 0;
  std::vector<uint64_t> lengths;
  std::vector<std::string> texts;
  uint32_t version = 0;
  bool chain = true;
  int64_t wait_ns = 0;                       // for room
  std::vector<std::vector<uint32_t>> parts;  // kPut: checksums a block
  template <class C>
  void fields(C& c) {
    c(attempt);
    c.list(keys);
    c(skip);
    c.list(lengths, kBatchBlocksMax);
    c.list(texts, 4, kBatchBlocksMax, [&](std::string& text) { c(text, kTextKeyBytesMax); });
    c(version)(chain)(wait_ns);
    c.list(parts, 4, kBatchBlocksMax,
           [&](std::vector<uint32_t>& sums) { c.list(sums, kPartsMax); });
  }
};
struct ReserveMore {
  static constexpr Type kType = Type::kReserveMore;
  AttemptId attempt;
  bool chain = true;
  int64_t wait_ns = 0;
  template <class C>
  void fields(C& c) {
    c(attempt)(chain)(wait_ns);
  }
};

struct Slot {
  uint32_t slot = 0;
  uint64_t generation = 0;
  std::vector<Extent> extents;  // only where the client maps the memory
  template <class C>
  void fields(C& c) {
    c(slot)(generation);
    c.list(extents, kExtentsMax);
  }
};
struct Granted {
  static constexpr Type kType = Type::kGranted;
  AttemptId attempt;
  std::vector<Status> statuses;
  std::vector<Slot> slots;  // one a status; empty where not granted
  bool parent_held = false;
  bool more = false;  // waiting longer might help
  std::string message;
  template <class C>
  void fields(C& c) {
    c(attempt);
    c.list(statuses, kBatchBlocksMax);
    c.list(slots, 16, kBatchBlocksMax, [&](Slot& slot) { slot.fields(c); });
    c(parent_held)(more)(message);
  }
};

// The payload is the range of each named item, one after the other.
struct Write {
  static constexpr Type kType = Type::kWrite;
  AttemptId attempt;
  std::vector<uint32_t> items;
  uint64_t first = 0;
  uint64_t bytes = 0;  // of each; beyond its end: to the end
  template <class C>
  void fields(C& c) {
    c(attempt);
    c.list(items, kBatchBlocksMax);
    c(first)(bytes);
  }
};
struct Written {
  static constexpr Type kType = Type::kWritten;
  Status status = Status::kOk;
  template <class C>
  void fields(C& c) {
    c(status);
  }
};

// `parts`: checksums as the writer saw them, one list an item, empty where it was not granted.
struct Commit {
  static constexpr Type kType = Type::kCommit;
  AttemptId attempt;
  uint32_t end = 0;
  Status otherwise = Status::kCancelled;
  std::vector<std::vector<uint32_t>> parts;
  template <class C>
  void fields(C& c) {
    c(attempt)(end)(otherwise);
    c.list(parts, 4, kBatchBlocksMax,
           [&](std::vector<uint32_t>& sums) { c.list(sums, kPartsMax); });
  }
};
struct PutDone {
  static constexpr Type kType = Type::kPutDone;
  bool known = true;  // false: no such attempt
  std::vector<Status> statuses;
  bool parent_held = false;
  bool stale = false;
  uint32_t namespace_version = 0;
  std::string message;
  template <class C>
  void fields(C& c) {
    c(known);
    c.list(statuses, kBatchBlocksMax);
    c(parent_held)(stale)(namespace_version)(message);
  }
};

struct Lookup {
  static constexpr Type kType = Type::kLookup;
  std::vector<BlockKey> keys;
  uint32_t skip = 0;
  bool run = true;
  bool view = false;  // as views at once, if that may be
  template <class C>
  void fields(C& c) {
    c.list(keys);
    c(skip)(run)(view);
  }
};
struct Redeem {
  static constexpr Type kType = Type::kRedeem;
  AttemptId ticket;
  template <class C>
  void fields(C& c) {
    c(ticket);
  }
};
struct LeasedBlock {
  bool held = false;
  uint64_t length = 0;
  uint64_t part_bytes = 0;
  Slot slot;
  std::vector<uint32_t> parts;
  template <class C>
  void fields(C& c) {
    c(held);
    if (!held) return;
    c(length)(part_bytes);
    slot.fields(c);
    c.list(parts, kPartsMax);
  }
};
struct Leased {
  static constexpr Type kType = Type::kLeased;
  uint64_t lease = 0;  // zero: nothing is leased
  uint32_t namespace_version = 0;
  bool view = false;
  std::vector<LeasedBlock> blocks;
  template <class C>
  void fields(C& c) {
    c(lease)(namespace_version)(view);
    c.list(blocks, 1, kBatchBlocksMax, [&](LeasedBlock& block) { block.fields(c); });
  }
};

// lookup → read → release in one message. `room`: bytes the caller has for each block.
struct Get {
  static constexpr Type kType = Type::kGet;
  std::vector<BlockKey> keys;
  std::vector<uint64_t> room;
  template <class C>
  void fields(C& c) {
    c.list(keys);
    c.list(room, kBatchBlocksMax);
  }
};
struct Read {
  static constexpr Type kType = Type::kRead;
  uint64_t lease = 0;
  uint32_t first_item = 0;
  std::vector<uint64_t> room;
  uint64_t first = 0;
  uint64_t bytes = 0;
  template <class C>
  void fields(C& c) {
    c(lease)(first_item);
    c.list(room, kBatchBlocksMax);
    c(first)(bytes);
  }
};
struct SentBlock {
  Status status = Status::kMiss;
  uint64_t length = 0;  // of the block
  uint64_t part_bytes = 0;
  std::vector<uint32_t> parts;  // of what is sent
  template <class C>
  void fields(C& c) {
    c(status);
    if (status != Status::kOk) return;
    c(length)(part_bytes);
    c.list(parts, kPartsMax);
  }
};
// The payload is what is sent of each block that is ok, one after the other. Nothing is sent if a
// block is longer than its room: `too_small` names it, and its length stands in it.
struct Blocks {
  static constexpr Type kType = Type::kBlocks;
  std::vector<SentBlock> blocks;
  bool any_too_small = false;
  uint32_t too_small = 0;
  template <class C>
  void fields(C& c) {
    c.list(blocks, 1, kBatchBlocksMax, [&](SentBlock& block) { block.fields(c); });
    c(any_too_small)(too_small);
  }
};

struct Release {
  static constexpr Type kType = Type::kRelease;
  uint64_t lease = 0;
  bool quiet = false;  // no reply
  template <class C>
  void fields(C& c) {
    c(lease)(quiet);
  }
};
struct Released {
  static constexpr Type kType = Type::kReleased;
  bool held = true;  // until now
  template <class C>
  void fields(C& c) {
    c(held);
  }
};
struct ViewMade {
  static constexpr Type kType = Type::kViewMade;
  bool made = false;
  template <class C>
  void fields(C& c) {
    c(made);
  }
};
struct TicketIs {
  static constexpr Type kType = Type::kTicketIs;
  AttemptId ticket;
  template <class C>
  void fields(C& c) {
    c(ticket);
  }
};
struct Verified {
  static constexpr Type kType = Type::kVerified;
  std::vector<Status> statuses;
  template <class C>
  void fields(C& c) {
    c.list(statuses, kBatchBlocksMax);
  }
};
// A reader saw a wrong checksum; the node checks for itself.
struct Complain {
  static constexpr Type kType = Type::kComplain;
  uint64_t lease = 0;
  uint32_t item = 0;
  template <class C>
  void fields(C& c) {
    c(lease)(item);
  }
};

// ---- the rest ----------------------------------------------------------------------------------

struct Apply {
  static constexpr Type kType = Type::kApply;
  uint8_t operation = 0;  // KeyOperation
  std::vector<BlockKey> keys;
  template <class C>
  void fields(C& c) {
    c(operation);
    c.list(keys);
  }
};
struct Applied {
  static constexpr Type kType = Type::kApplied;
  uint32_t count = 0;
  template <class C>
  void fields(C& c) {
    c(count);
  }
};
struct Cleared {
  static constexpr Type kType = Type::kCleared;
  uint32_t namespace_version = 0;
  template <class C>
  void fields(C& c) {
    c(namespace_version);
  }
};
struct ListedBlock {
  BlockKey key;
  uint64_t length = 0;
  std::string text;
  bool pinned = false;
  template <class C>
  void fields(C& c) {
    c(key)(length)(text, kTextKeyBytesMax)(pinned);
  }
};
struct Listed {
  static constexpr Type kType = Type::kListed;
  std::vector<ListedBlock> blocks;
  bool all = true;  // false: more than one message holds
  template <class C>
  void fields(C& c) {
    c.list(blocks, 45, 1 << 24, [&](ListedBlock& block) { block.fields(c); });
    c(all);
  }
};
struct Count {
  std::string name;
  uint64_t value = 0;
  template <class C>
  void fields(C& c) {
    c(name, 64)(value);
  }
};
struct UsageIs {
  static constexpr Type kType = Type::kUsageIs;
  std::vector<Count> counts;
  std::string pages;
  template <class C>
  void fields(C& c) {
    c.list(counts, 12, kCountsMax, [&](Count& count) { count.fields(c); });
    c(pages);
  }
};
struct AuditIs {
  static constexpr Type kType = Type::kAuditIs;
  std::string problem;
  template <class C>
  void fields(C& c) {
    c(problem);
  }
};
struct Settle {
  static constexpr Type kType = Type::kSettle;
  int64_t wait_ns = 0;
  template <class C>
  void fields(C& c) {
    c(wait_ns);
  }
};
struct Settled {
  static constexpr Type kType = Type::kSettled;
  bool settled = false;
  template <class C>
  void fields(C& c) {
    c(settled);
  }
};

}  // namespace kvstore::wire
