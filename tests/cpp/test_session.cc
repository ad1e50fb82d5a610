// Grants and leases of one peer: how each begins, what ends it, and what it can no longer do then.
// Time is a number here.
#include "session.h"

#include <doctest/doctest.h>

#include <algorithm>

#include "core.h"

using namespace kvstore;

namespace {

constexpr uint64_t kBlock = 300 << 10;
constexpr uint32_t kCells = 6;  // of that size in a frame
constexpr Nanos kSecond = 1000 * kMillisecond;

struct Peer {
  explicit Peer(uint32_t frames = 2) : core(frames) {
    core.limits.lease = 30 * kSecond;
    core.limits.grant = 60 * kSecond;
  }

  // Reserves `count` blocks of a chain that begins at `first`; the first `skip` are not sent.
  std::shared_ptr<GrantBatch> reserve(uint32_t first, uint32_t count, Nanos now = 0,
                                      size_t skip = 0, bool chain = true,
                                      uint64_t length = kBlock) {
    keys = keys_of(first, count);
    lengths.assign(count - skip, length);
    return session.reserve({keys, skip, lengths, {}, core.space.version.load(), chain}, now);
  }
  // Writes what put `attempt` stores, but for the last `missing` parts of each block.
  void write(GrantBatch& batch, uint32_t attempt, size_t missing = 0) {
    for (size_t i = 0; i < batch.items.size(); ++i) {
      if (batch.statuses[i] != Status::kOk) continue;
      GrantBatch::Item& item = batch.items[i];
      const uint32_t block = number_of(item.key);
      write_slot(core, item.taken.slot, block, attempt, 0, item.length);
      const auto parts = checksums(payload(block, attempt, item.length), kPart);
      for (size_t part = 0; part + missing < parts.size(); ++part) item.parts[part] = parts[part];
    }
  }
  void put(uint32_t first, uint32_t count, uint32_t attempt = 1) {
    const auto batch = reserve(first, count);
    write(*batch, attempt);
    REQUIRE(session.commit(batch->id, count, Status::kCancelled));
    REQUIRE(std::ranges::count(batch->statuses, Status::kOk) == count);
  }
  std::shared_ptr<LeaseBatch> lookup(uint32_t first, uint32_t count, Nanos now = 0,
                                     bool run = true) {
    return session.lookup(keys_of(first, count), 0, run, now);
  }
  std::string audit() const {
    return core.blocks.audit(session.num_granted(), session.num_leased());
  }
  uint64_t slots() const { return core.pool.usage().slots; }
  bool holds(uint32_t block) const { return core.blocks.holds(key_of(block), core.space); }

  static constexpr uint64_t kPart = 100 << 10;  // three parts a block
  Core core;
  Session session{core.blocks, core.space, core.limits, kPart, *core.blocks.part_size(kPart)};
  std::vector<BlockKey> keys;
  std::vector<uint64_t> lengths;
};

// ---- grants ------------------------------------------------------------------------------------

TEST_CASE("a block with an unwritten part cannot be committed") {
  Peer peer;
  for (const size_t missing : {size_t{1}, size_t{3}}) {
    const auto batch = peer.reserve(1, 2);
    REQUIRE(batch->items[0].parts.size() == 3);
    peer.write(*batch, 1, missing);
    // The second block is whole: it enters all the same.
    const auto parts = checksums(payload(2, 1, kBlock), Peer::kPart);
    for (size_t part = 0; part < 3; ++part) batch->items[1].parts[part] = parts[part];
    REQUIRE(peer.session.commit(batch->id, 2, Status::kUnavailable));
    CHECK(batch->statuses[0] == Status::kCancelled);
    CHECK_FALSE(peer.holds(1));
    CHECK(peer.holds(2));
    CHECK(peer.slots() == 1);
    CHECK(peer.audit() == "");
    peer.core.blocks.remove(key_of(2), peer.core.space);
  }
  peer.put(1, 1);
  CHECK(peer.holds(1));
}

TEST_CASE("a session that ends aborts its grants") {
  Peer peer;
  const auto batch = peer.reserve(1, 3);
  peer.write(*batch, 1);
  const auto held = peer.reserve(9, 1);
  CHECK(peer.slots() == 4);
  CHECK(peer.session.num_granted() == 4);
  peer.session.end();
  CHECK(peer.slots() == 0);
  CHECK(peer.session.num_granted() == 0);
  CHECK_FALSE(peer.holds(1));
  // A late commit or attempt finds nothing.
  batch->statuses[0] = Status::kOutOfSpace;
  CHECK_FALSE(peer.session.reserve_more(*batch, true, 0));
  CHECK_FALSE(peer.session.commit(batch->id, 3, Status::kCancelled));
  CHECK_FALSE(peer.holds(1));
  Session other(peer.core.blocks, peer.core.space, peer.core.limits, Peer::kPart, 1);
  const auto again = other.reserve({peer.keys, 0, peer.lengths, {}, 1, true}, 0);
  CHECK(again->statuses == std::vector<Status>{Status::kOk});
  CHECK(peer.core.blocks.audit(1, 0) == "");
}

TEST_CASE("a commit or an abort is good once, and only under its own name") {
  Peer peer;
  const auto batch = peer.reserve(1, 2);
  peer.write(*batch, 4);
  AttemptId forged = batch->id;
  forged.low ^= 1;
  CHECK_FALSE(peer.session.commit(forged, 2, Status::kCancelled));
  CHECK_FALSE(peer.session.abort(forged));
  CHECK_FALSE(peer.session.commit({batch->id.low, batch->id.high}, 2, Status::kCancelled));
  CHECK(peer.session.num_granted() == 2);
  // The first only; the second is given up.
  CHECK(peer.session.commit(batch->id, 1, Status::kTimedOut));
  CHECK(batch->statuses == std::vector<Status>{Status::kOk, Status::kTimedOut});
  CHECK(peer.slots() == 1);
  CHECK_FALSE(peer.session.abort(batch->id));
  CHECK_FALSE(peer.session.commit(batch->id, 2, Status::kCancelled));
  CHECK(peer.holds(1));
  CHECK_FALSE(peer.holds(2));
  const auto given_up = peer.reserve(5, 2);
  CHECK(peer.session.abort(given_up->id));
  CHECK(given_up->statuses == std::vector<Status>{Status::kCancelled, Status::kCancelled});
  CHECK_FALSE(peer.session.commit(given_up->id, 2, Status::kCancelled));
  CHECK(peer.slots() == 1);
  CHECK(peer.audit() == "");
}

TEST_CASE("a chain stops at the first block without room, other blocks go on") {
  for (const bool chain : {true, false}) {
    CAPTURE(chain);
    Peer peer(1);
    peer.put(100, 4);
    const auto held = peer.lookup(100, 4);
    // Two cells are left; the fourth key is held already.
    const auto batch = peer.reserve(97, 5, 0, 0, chain);
    const std::vector<Status> wanted =
        chain ? std::vector<Status>{Status::kOk, Status::kOk, Status::kOutOfSpace,
                                    Status::kOutOfSpace, Status::kOutOfSpace}
              : std::vector<Status>{Status::kOk, Status::kOk, Status::kOutOfSpace, Status::kExists,
                                    Status::kExists};
    CHECK(batch->statuses == wanted);
    CHECK_FALSE(peer.session.reserve_more(*batch, chain, 0));
    CHECK(peer.session.release(*held) == Released::kHeld);
    CHECK(peer.session.reserve_more(*batch, chain, 0));
    CHECK(batch->statuses[2] == Status::kOk);
    peer.write(*batch, 2);
    REQUIRE(peer.session.commit(batch->id, 5, Status::kCancelled));
    for (uint32_t block = 97; block < 100; ++block) CHECK(peer.holds(block));
    CHECK(peer.audit() == "");
  }
}

TEST_CASE("a put that waited may have the room of what came after it") {
  Peer peer(1);
  peer.put(1, kCells);
  const auto all_held = peer.lookup(1, kCells);
  // A chain of which one block is skipped, one held already; the third finds no room.
  const auto batch = peer.reserve(kCells - 1, 3, 0, 1);
  REQUIRE(batch->statuses == std::vector<Status>{Status::kExists, Status::kOutOfSpace});
  peer.session.release(*all_held);
  for (uint32_t block = 100; block < 100 + 2 * kCells; ++block) {
    REQUIRE(put_block(peer.core, block, kBlock) == Status::kOk);
    for (uint32_t own = kCells - 1; own <= kCells; ++own) {
      peer.core.blocks.touch(key_of(own), peer.core.space,
                             make_stamp(peer.core.blocks.next_batch(), 0));
    }
  }
  REQUIRE(peer.holds(kCells));
  REQUIRE(peer.session.reserve_more(*batch, true, 0));
  CHECK(batch->statuses[1] == Status::kOk);
  peer.write(*batch, 1);
  REQUIRE(peer.session.commit(batch->id, 2, Status::kCancelled));
  // But not of its own chain, which is the youngest again, as a whole.
  for (uint32_t block = 200; block < 200 + kCells - 3; ++block) put_block(peer.core, block, kBlock);
  for (uint32_t own = kCells - 1; own <= kCells + 1; ++own) CHECK(peer.holds(own));
  put_block(peer.core, 300, kBlock);
  CHECK_FALSE(peer.holds(kCells + 1));
  CHECK(peer.holds(kCells));
  CHECK(peer.audit() == "");
}

TEST_CASE("the part of a chain that is not sent is touched and reported") {
  Peer peer(1);
  peer.put(1, 3);
  peer.put(50, 2);
  // Skips 1 and 2: they become the youngest, and do not make room for their child.
  const auto batch = peer.reserve(1, 4, 0, 2);
  CHECK(batch->parent_held);
  CHECK(batch->statuses == std::vector<Status>{Status::kExists, Status::kOk});
  peer.write(*batch, 1);
  REQUIRE(peer.session.commit(batch->id, 2, Status::kCancelled));
  for (uint32_t block = 60; block < 62; ++block) peer.put(block, 1);
  CHECK_FALSE(peer.holds(50));
  for (uint32_t block = 1; block < 5; ++block) CHECK(peer.holds(block));
  const auto orphan = peer.reserve(70, 3, 0, 2);
  CHECK_FALSE(orphan->parent_held);
  peer.session.abort(orphan->id);
}

TEST_CASE("overdue grants keep their memory and are counted until their writer speaks") {
  Peer peer;
  peer.core.limits.stuck_bytes_max = kBlock;
  const auto one = peer.reserve(1, 1, 0);
  const auto two = peer.reserve(2, 1, 10 * kSecond);
  CHECK(peer.session.stuck_bytes(60 * kSecond) == 0);
  CHECK(peer.session.stuck_bytes(61 * kSecond) == kBlock);
  CHECK(peer.reserve(3, 1, 61 * kSecond)->statuses[0] == Status::kOk);
  CHECK(peer.session.stuck_bytes(71 * kSecond) == 2 * kBlock);
  // Beyond the bound this session gets nothing more; another one does.
  const auto refused = peer.reserve(4, 1, 71 * kSecond);
  CHECK(refused->statuses[0] == Status::kOutOfSpace);
  CHECK_FALSE(peer.session.reserve_more(*refused, true, 71 * kSecond));
  Session other(peer.core.blocks, peer.core.space, peer.core.limits, Peer::kPart, 1);
  CHECK(other.reserve({peer.keys, 0, peer.lengths, {}, 1, true}, 71 * kSecond)->statuses[0] ==
        Status::kOk);
  // Late is not too late: the memory was its own all the time.
  peer.write(*two, 8);
  CHECK(peer.session.commit(two->id, 1, Status::kCancelled));
  CHECK(peer.holds(2));
  CHECK(peer.session.abort(one->id));
  CHECK(peer.session.stuck_bytes(71 * kSecond) == 0);
  CHECK(peer.reserve(5, 1, 71 * kSecond)->statuses[0] == Status::kOk);
}

// ---- leases ------------------------------------------------------------------------------------

TEST_CASE("a lookup leases exactly the leading run, or all that is held") {
  Peer peer;
  peer.put(1, 2);
  peer.put(4, 1);
  const auto run = peer.lookup(1, 4, 0, true);
  CHECK(run->items.size() == 2);
  CHECK(run->bytes == 2 * kBlock);
  CHECK(peer.session.num_leased() == 2);
  const auto all = peer.lookup(1, 4, 0, false);
  REQUIRE(all->items.size() == 4);
  CHECK(all->items[1].has_value());
  CHECK_FALSE(all->items[2].has_value());
  CHECK(all->items[3]->parts.size() == 3);
  CHECK(peer.session.num_leased() == 5);
  CHECK(peer.audit() == "");
  peer.session.release(*run);
  peer.session.release(*all);
  CHECK(peer.session.release(*all) == Released::kHeld);
  CHECK(peer.session.num_leased() == 0);
  CHECK(peer.audit() == "");
}

TEST_CASE("a copying lease is revoked after its deadline, but never under a reader") {
  Peer peer;
  peer.put(1, 2);
  const auto lease = peer.lookup(1, 2, 5 * kSecond);
  CHECK(peer.session.first_lapse() == 35 * kSecond);
  CHECK(peer.session.revoke_overdue(35 * kSecond) == 0);
  REQUIRE(peer.session.begin_read(*lease));
  CHECK(peer.session.revoke_overdue(36 * kSecond) == 0);
  peer.session.end_read(*lease);
  // Late, and nobody wanted the room so far: still good.
  REQUIRE(peer.session.begin_read(*lease));
  peer.session.end_read(*lease);
  CHECK(peer.session.revoke_overdue(36 * kSecond) == 2);
  CHECK(peer.session.num_leased() == 0);
  CHECK(peer.session.first_lapse() == kNever);
  CHECK_FALSE(peer.session.begin_read(*lease));
  CHECK_FALSE(peer.session.make_view(*lease));
  CHECK(peer.session.release(*lease) == Released::kRevoked);
  CHECK(peer.session.release(*lease) == Released::kRevoked);
  CHECK(peer.holds(1));
  CHECK(peer.audit() == "");
}

TEST_CASE("a release during a read takes effect when the read ends") {
  Peer peer;
  peer.put(1, 1, 6);
  const auto lease = peer.lookup(1, 1);
  REQUIRE(peer.session.begin_read(*lease));
  REQUIRE(peer.session.begin_read(*lease));
  CHECK(peer.session.release(*lease) == Released::kHeld);
  peer.core.blocks.remove(key_of(1), peer.core.space);
  CHECK_FALSE(peer.session.begin_read(*lease));
  peer.session.end_read(*lease);
  CHECK(peer.session.num_leased() == 1);
  CHECK(payload_fault(read_slot(peer.core, lease->items[0]->slot, kBlock), 1, 6) == "");
  peer.session.end_read(*lease);
  CHECK(peer.session.num_leased() == 0);
  CHECK(peer.slots() == 0);
  CHECK(peer.audit() == "");
}

TEST_CASE("views are bounded, and end by release only") {
  Peer peer;
  peer.core.limits.view_bytes_max = 3 * kBlock;
  peer.put(1, 4);
  const auto two = peer.lookup(1, 2);
  const auto three = peer.lookup(1, 3);
  CHECK(peer.session.make_view(*two));
  CHECK(peer.session.make_view(*two));
  CHECK(peer.core.limits.view_bytes == 2 * kBlock);
  CHECK_FALSE(peer.session.make_view(*three));
  CHECK(peer.core.limits.view_bytes == 2 * kBlock);
  REQUIRE(peer.session.begin_read(*three));  // reading still works
  peer.session.end_read(*three);
  CHECK(peer.session.revoke_overdue(kNever - 1) == 3);
  CHECK(peer.session.num_leased() == 2);
  peer.session.end();
  CHECK(peer.session.num_leased() == 2);
  for (uint32_t block = 100; block < 100 + 3 * kCells; ++block) peer.put(block, 1);
  CHECK(peer.holds(1));
  CHECK(payload_fault(read_slot(peer.core, two->items[1]->slot, kBlock), 2, 1) == "");
  CHECK(peer.session.release(*two) == Released::kHeld);
  CHECK(peer.core.limits.view_bytes == 0);
  CHECK(peer.session.num_leased() == 0);
  CHECK(peer.audit() == "");
}

TEST_CASE("the end of a session ends its copying leases, a read under way first") {
  Peer peer;
  peer.put(1, 3);
  const auto idle = peer.lookup(1, 2);
  const auto read = peer.lookup(1, 3);
  REQUIRE(peer.session.begin_read(*read));
  peer.session.end();
  CHECK(peer.session.num_leased() == 3);
  CHECK_FALSE(peer.session.begin_read(*idle));
  CHECK_FALSE(peer.session.begin_read(*read));
  peer.session.end_read(*read);
  CHECK(peer.session.num_leased() == 0);
  CHECK(peer.session.release(*idle) == Released::kRevoked);  // what was copied by it proves nothing
  CHECK(peer.session.release(*read) == Released::kHeld);
  CHECK(peer.audit() == "");
}

TEST_CASE("a ticket opens a lease in another session, and each releases its own") {
  Peer peer;
  peer.put(1, 2, 3);
  Session worker(peer.core.blocks, peer.core.space, peer.core.limits, Peer::kPart, 1);
  const auto lease = peer.lookup(1, 2, kSecond);
  CHECK(peer.session.find_ticket({1, 2}) == nullptr);
  CHECK(peer.session.find_ticket({}) == nullptr);
  const AttemptId ticket = peer.session.ticket(*lease);
  CHECK(ticket == peer.session.ticket(*lease));
  REQUIRE(peer.session.find_ticket(ticket) == lease);
  const auto own = worker.adopt(peer.session, *lease, 2 * kSecond);
  REQUIRE(own != nullptr);
  CHECK(own->deadline == 32 * kSecond);
  CHECK(own->items.size() == 2);
  CHECK(peer.core.blocks.num_leased() == 4);
  peer.session.release(*lease);
  // An unredeemed ticket dies with the matcher's lease.
  CHECK(peer.session.find_ticket(ticket) == nullptr);
  CHECK(worker.adopt(peer.session, *lease, 2 * kSecond) == nullptr);
  peer.core.blocks.clear(peer.core.space);
  REQUIRE(worker.begin_read(*own));
  CHECK(payload_fault(read_slot(peer.core, own->items[1]->slot, kBlock), 2, 3) == "");
  worker.end_read(*own);
  CHECK(worker.release(*own) == Released::kHeld);
  CHECK(peer.slots() == 0);
  CHECK(peer.core.blocks.audit(0, 0) == "");
}

TEST_CASE("a put of keys from before a clear is stale at reserve and at commit") {
  Peer peer;
  const auto batch = peer.reserve(1, 2);
  peer.write(*batch, 1);
  peer.core.blocks.clear(peer.core.space);
  REQUIRE(peer.session.commit(batch->id, 2, Status::kCancelled));
  CHECK(batch->statuses == std::vector<Status>{Status::kStale, Status::kStale});
  const auto keys = keys_of(1, 1);
  const std::vector<uint64_t> lengths{kBlock};
  const auto late = peer.session.reserve({keys, 0, lengths, {}, 1, true}, 0);
  CHECK(late->statuses == std::vector<Status>{Status::kStale});
  CHECK(peer.session.num_granted() == 0);
  CHECK(peer.slots() == 0);
}

TEST_CASE("the same key twice in a batch is stored once") {
  Peer peer;
  const std::vector<BlockKey> keys{key_of(1), key_of(1)};
  const std::vector<uint64_t> lengths{kBlock, kBlock};
  const auto batch = peer.session.reserve({keys, 0, lengths, {}, 1, true}, 0);
  peer.write(*batch, 1);
  REQUIRE(peer.session.commit(batch->id, 2, Status::kCancelled));
  CHECK(batch->statuses == std::vector<Status>{Status::kOk, Status::kExists});
  CHECK(peer.slots() == 1);
  CHECK(peer.audit() == "");
}

}  // namespace
