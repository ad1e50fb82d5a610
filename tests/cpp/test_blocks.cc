// The table of blocks: one commit point, first writer wins, leases and pins against removal and
// eviction, versions, the order of eviction, and a random run against a naive model.
#include "blocks.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>

#include "core.h"

using namespace kvstore;

namespace {

constexpr uint64_t kBlock = 300 << 10;  // six cells a frame
constexpr uint32_t kCells = 6;

std::optional<Found> lease(Core& core, uint32_t block) {
  return core.blocks.lease(key_of(block), core.space, make_stamp(core.blocks.next_batch(), 0));
}

bool holds(const Core& core, uint32_t block) {
  return core.blocks.holds(key_of(block), core.space);
}

uint64_t slots(const Core& core) { return core.pool.usage().slots; }

TEST_CASE("a granted block is not found before its commit") {
  Core core(2);
  Pool::Taken taken{};
  const Stamp stamp = make_stamp(core.blocks.next_batch(), 0);
  REQUIRE(core.blocks.reserve(key_of(1), core.space, 1, kBlock, stamp, stamp, &taken) ==
          Status::kOk);
  const auto unseen = [&] {
    CHECK_FALSE(holds(core, 1));
    CHECK_FALSE(lease(core, 1).has_value());
    CHECK_FALSE(core.blocks.touch(key_of(1), core.space, stamp));
    CHECK_FALSE(core.blocks.pin(key_of(1), core.space));
    CHECK(core.blocks.list(core.space).empty());
    CHECK(core.segment->header(taken.slot).generation.load() % 2 == 1);
  };
  unseen();
  write_slot(core, taken.slot, 1, 9, 0, kBlock / 2);
  unseen();
  write_slot(core, taken.slot, 1, 9, kBlock / 2, kBlock);
  unseen();
  CHECK(core.blocks.audit(1, 0) == "");
  REQUIRE(core.blocks.commit({key_of(1), &core.space, 1, taken.slot, kBlock, stamp,
                              checksums(payload(1, 9, kBlock), kOpaquePartBytes), "name"}) ==
          Status::kOk);
  const auto found = lease(core, 1);
  REQUIRE(found.has_value());
  CHECK(found->length == kBlock);
  CHECK(found->generation == taken.generation + 1);
  CHECK(payload_fault(read_slot(core, found->slot, kBlock), 1, 9) == "");
  CHECK(core.blocks.list(core.space).at(0).text == "name");
  core.blocks.release(found->entry);
  CHECK(core.blocks.audit(0, 0) == "");
}

TEST_CASE("the first of two writers wins, the other leaves no trace") {
  Core core(2);
  Pool::Taken taken[2];
  const Stamp stamp = make_stamp(core.blocks.next_batch(), 0);
  for (Pool::Taken& each : taken) {
    REQUIRE(core.blocks.reserve(key_of(1), core.space, 1, kBlock, stamp, stamp, &each) ==
            Status::kOk);
  }
  write_slot(core, taken[0].slot, 1, 10, 0, kBlock);
  write_slot(core, taken[1].slot, 1, 11, 0, kBlock);
  const auto commit = [&](int which, uint32_t attempt) {
    return core.blocks.commit({key_of(1),
                               &core.space,
                               1,
                               taken[which].slot,
                               kBlock,
                               stamp,
                               checksums(payload(1, attempt, kBlock), kOpaquePartBytes),
                               {}});
  };
  CHECK(commit(1, 11) == Status::kOk);
  CHECK(commit(0, 10) == Status::kExists);
  CHECK(slots(core) == 1);
  const auto found = lease(core, 1);
  CHECK(payload_fault(read_slot(core, found->slot, kBlock), 1, 11) == "");
  core.blocks.release(found->entry);
  CHECK(put_block(core, 1, kBlock) == Status::kExists);
  CHECK(core.blocks.audit(0, 0) == "");
}

TEST_CASE("a removed block stays readable under its lease and its memory follows") {
  Core core(1);
  REQUIRE(put_block(core, 1, kBlock, 5) == Status::kOk);
  const auto first = lease(core, 1);
  const auto second = lease(core, 1);
  REQUIRE((first && second));
  CHECK(core.blocks.remove(key_of(1), core.space));
  CHECK_FALSE(core.blocks.remove(key_of(1), core.space));
  CHECK_FALSE(holds(core, 1));
  // The key may come back while the old bytes are still being read, and is another block then.
  REQUIRE(put_block(core, 1, kBlock, 6) == Status::kOk);
  CHECK(slots(core) == 2);
  CHECK(core.blocks.audit(0, 2) == "");
  for (uint32_t block = 100; block < 100 + 2 * kCells; ++block) put_block(core, block, kBlock);
  CHECK(payload_fault(read_slot(core, first->slot, kBlock), 1, 5) == "");
  core.blocks.release(first->entry);
  CHECK(payload_fault(read_slot(core, second->slot, kBlock), 1, 5) == "");
  CHECK(core.segment->header(second->slot).generation.load() == second->generation);
  const uint64_t before = slots(core);
  core.blocks.release(second->entry);
  CHECK(slots(core) == before - 1);
  CHECK(core.segment->header(second->slot).generation.load() > second->generation);
  CHECK(core.blocks.audit(0, 0) == "");
}

TEST_CASE("leased and pinned blocks outlast any pressure") {
  Core core(1);
  for (uint32_t block = 0; block < kCells; ++block) put_block(core, block, kBlock, 3);
  const auto held = lease(core, 0);
  REQUIRE(core.blocks.pin(key_of(1), core.space));
  REQUIRE(core.blocks.pin(key_of(1), core.space));
  CHECK(core.blocks.num_evictable() == kCells - 2);
  for (uint32_t block = 100; block < 200; ++block) {
    REQUIRE(put_block(core, block, kBlock) == Status::kOk);
  }
  CHECK(holds(core, 0));
  CHECK(holds(core, 1));
  CHECK(payload_fault(read_slot(core, held->slot, kBlock), 0, 3) == "");
  // Let go, they are the oldest and go first; a pin counts.
  core.blocks.release(held->entry);
  CHECK(core.blocks.unpin(key_of(1), core.space));
  put_block(core, 300, kBlock);
  put_block(core, 301, kBlock);
  CHECK(holds(core, 1));
  CHECK_FALSE(holds(core, 100));
  CHECK(core.blocks.unpin(key_of(1), core.space));
  CHECK_FALSE(core.blocks.unpin(key_of(1), core.space));
  for (uint32_t block = 400; block < 400 + kCells; ++block) put_block(core, block, kBlock);
  CHECK_FALSE(holds(core, 0));
  CHECK_FALSE(holds(core, 1));
  CHECK(core.blocks.audit(0, 0) == "");
}

TEST_CASE("a victim pinned after it was chosen is spared") {
  Core core(1);
  LruPolicy policy;  // chooses as the table's does, from the same stamps
  const SizeClass size_class = shape_of(kBlock).size_class();
  for (uint32_t block = 0; block < kCells; ++block) {
    const uint64_t batch = core.blocks.next_batch();
    REQUIRE(put_block(core, block, kBlock, 1, batch) == Status::kOk);
    policy.insert(block, size_class, make_stamp(batch, 0));
  }
  std::vector<uint32_t> victims;
  for (int i = 0; i < 3; ++i) {
    victims.push_back(policy.victim(size_class).value());
    policy.erase(victims.back(), size_class);
  }
  CHECK(victims == std::vector<uint32_t>{0, 1, 2});
  REQUIRE(core.blocks.pin(key_of(victims[1]), core.space));
  for (uint32_t block = 100; block < 102; ++block) {
    REQUIRE(put_block(core, block, kBlock) == Status::kOk);
  }
  CHECK_FALSE(holds(core, victims[0]));
  CHECK(holds(core, victims[1]));
  CHECK_FALSE(holds(core, victims[2]));
  CHECK(core.blocks.counters().evictions == 2);
  CHECK(core.blocks.audit(0, 0) == "");
}

TEST_CASE("everything held is out of space, and one release is room") {
  Core core(2);
  std::vector<Found> held;
  for (uint32_t block = 0; block < 2 * kCells; ++block) {
    REQUIRE(put_block(core, block, kBlock) == Status::kOk);
    held.push_back(*lease(core, block));
  }
  CHECK(core.blocks.num_evictable() == 0);
  CHECK(put_block(core, 100, kBlock) == Status::kOutOfSpace);
  CHECK(put_block(core, 101, 1) == Status::kOutOfSpace);
  core.blocks.release(held[3].entry);
  CHECK(put_block(core, 101, kFrameBytes) == Status::kOutOfSpace);  // its neighbours are held
  CHECK(holds(core, 3));  // refused without evicting what would not have sufficed
  CHECK(put_block(core, 100, kBlock) == Status::kOk);
  CHECK_FALSE(holds(core, 3));
  // One whole frame let go is a frame for any size.
  std::map<uint64_t, std::vector<EntryRef>> by_frame;
  for (uint32_t block = 0; block < 2 * kCells; ++block) {
    if (block == 3) continue;
    by_frame[core.pool.frames_of(held[block].slot)[0]].push_back(held[block].entry);
  }
  for (const EntryRef entry : by_frame.begin()->second) core.blocks.release(entry);
  CHECK(put_block(core, 101, kFrameBytes) == Status::kOk);
  CHECK(core.blocks.audit(0, by_frame.rbegin()->second.size()) == "");
}

TEST_CASE("a batch never evicts what it has just used") {
  Core core(1);
  for (uint32_t block = 0; block < kCells; ++block) put_block(core, block, kBlock);
  const uint64_t batch = core.blocks.next_batch();
  for (uint32_t block = 0; block < kCells; ++block) {
    REQUIRE(core.blocks.touch(key_of(block), core.space, make_stamp(batch, block)));
  }
  CHECK(put_block(core, 100, kBlock, 1, batch, kCells) == Status::kOutOfSpace);
  CHECK(put_block(core, 100, kBlock) == Status::kOk);
  CHECK_FALSE(holds(core, kCells - 1));  // the tail of that chain
}

TEST_CASE("a chain is evicted from its tail to its head") {
  std::mt19937_64 random(4);
  constexpr uint32_t kDepth = 9;
  for (int round = 0; round < 30; ++round) {
    Core core(2, {random(), 0, true});
    const uint64_t batch = core.blocks.next_batch();
    for (uint32_t block = 0; block < kDepth; ++block) {
      REQUIRE(put_block(core, block, kBlock, 1, batch, block) == Status::kOk);
    }
    // Used in part, as requests that share a prefix do: from the head down to some depth.
    for (int use = 0; use < 5; ++use) {
      const uint64_t number = core.blocks.next_batch();
      const auto depth = static_cast<uint32_t>(random() % kDepth);
      for (uint32_t block = 0; block <= depth; ++block) {
        core.blocks.touch(key_of(block), core.space, make_stamp(number, block));
      }
      if (random() % 3 == 0) {  // read, and let go in the middle of pressure
        std::vector<EntryRef> held;
        for (uint32_t block = 0; block <= depth; ++block) {
          const auto found =
              core.blocks.lease(key_of(block), core.space, make_stamp(number, block));
          if (!found) break;
          held.push_back(found->entry);
        }
        for (uint32_t other = 0; other < kCells / 2; ++other) {
          put_block(core, 1000 + static_cast<uint32_t>(random() % 9999), kBlock);
        }
        for (const EntryRef entry : held) core.blocks.release(entry);
      }
    }
    for (uint32_t other = 0; other < 2 * kCells; ++other) put_block(core, 100 + other, kBlock);
    uint32_t next = kDepth;
    for (const BlockKey& key : core.blocks.take_evicted()) {
      if (number_of(key) >= kDepth) continue;
      REQUIRE(number_of(key) == --next);
    }
    CHECK(next == 0);
    CHECK(core.blocks.audit(0, 0) == "");
  }
}

TEST_CASE("background eviction keeps a reserve of free slots for each size in use") {
  Core core(4, {1, 3, false});
  for (uint32_t block = 0; block < 20; ++block) put_block(core, block, kBlock);
  for (uint32_t block = 100; block < 110; ++block) put_block(core, block, 900 << 10);
  CHECK(core.blocks.refill_reserves());
  for (const uint64_t length : {kBlock, uint64_t{900} << 10}) {
    CHECK(core.blocks.reserve_full(shape_of(length)));
    CHECK(core.pool.free_slots(shape_of(length), 3) == 3);
  }
  const uint64_t evictions = core.blocks.counters().evictions;
  CHECK(core.blocks.refill_reserves());
  CHECK(core.blocks.counters().evictions == evictions);
  CHECK(core.blocks.audit(0, 0) == "");
}

TEST_CASE("a size whose reserve cannot be had does not starve the others") {
  Core core(2, {1, 3, false});
  put_block(core, 100, 900 << 10);
  put_block(core, 101, 900 << 10);
  const EntryRef held[] = {lease(core, 100)->entry, lease(core, 101)->entry};
  for (uint32_t block = 0; block < kCells; ++block) put_block(core, block, kBlock);
  CHECK_FALSE(core.blocks.refill_reserves());
  CHECK(core.blocks.reserve_full(shape_of(kBlock)));
  CHECK_FALSE(holds(core, 2));
  CHECK(holds(core, 3));
  for (const EntryRef entry : held) core.blocks.release(entry);
  CHECK(core.blocks.audit(0, 0) == "");
}

TEST_CASE("nothing is evicted while memory is still being populated") {
  Core core(1);
  for (uint32_t block = 0; block < kCells; ++block) put_block(core, block, kBlock);
  core.blocks.set_growing(true);
  CHECK(put_block(core, 100, kBlock) == Status::kOutOfSpace);
  core.blocks.set_growing(false);
  CHECK(put_block(core, 100, kBlock) == Status::kOk);
}

TEST_CASE("after a clear no older block is answered and no older put commits") {
  Core core(2);
  Namespace& other = *core.blocks.open_namespace("second");
  REQUIRE(put_block(core, 1, kBlock, 5) == Status::kOk);
  REQUIRE(put_block(core, 2, kBlock) == Status::kOk);
  REQUIRE(core.blocks.pin(key_of(2), core.space));
  const auto found = lease(core, 1);
  Pool::Taken taken{};
  const Stamp stamp = make_stamp(core.blocks.next_batch(), 0);
  REQUIRE(core.blocks.reserve(key_of(3), core.space, 1, kBlock, stamp, stamp, &taken) ==
          Status::kOk);
  CHECK(core.blocks.clear(core.space) == 2);
  CHECK(other.version == 1);
  CHECK(core.space.blocks == 0);
  CHECK(core.space.bytes == 0);
  for (const uint32_t block : {1U, 2U}) CHECK_FALSE(holds(core, block));
  CHECK(core.blocks.commit({key_of(3), &core.space, 1, taken.slot, kBlock, stamp, {1}, {}}) ==
        Status::kStale);
  CHECK(core.blocks.reserve(key_of(3), core.space, 1, kBlock, stamp, stamp, &taken) ==
        Status::kStale);
  CHECK(slots(core) == 1);  // the leased one
  CHECK(payload_fault(read_slot(core, found->slot, kBlock), 1, 5) == "");
  CHECK(core.blocks.audit(0, 1) == "");
  core.blocks.release(found->entry);
  CHECK(slots(core) == 0);
  CHECK(put_block(core, 1, kBlock) == Status::kOk);
  CHECK(core.blocks.audit(0, 0) == "");
}

TEST_CASE("a key is answered in its own namespace only") {
  Core core(2);
  Namespace& other = *core.blocks.open_namespace("second");
  CHECK(core.blocks.open_namespace("second") == &other);
  REQUIRE(put_block(core, 1, kBlock) == Status::kOk);
  CHECK_FALSE(core.blocks.holds(key_of(1), other));
  CHECK_FALSE(core.blocks.lease(key_of(1), other, 1).has_value());
  CHECK_FALSE(core.blocks.remove(key_of(1), other));
  CHECK_FALSE(core.blocks.pin(key_of(1), other));
  CHECK(core.blocks.list(other).empty());
  core.blocks.clear(other);
  CHECK(holds(core, 1));
}

TEST_CASE("the owner's own check drops a block that went bad, and only that") {
  Core core(4);
  const uint64_t length = 2 * kFrameBytes + 70'000;  // several extents and parts
  REQUIRE(put_block(core, 1, length) == Status::kOk);
  REQUIRE(put_block(core, 2, kBlock) == Status::kOk);
  const auto good = lease(core, 2);
  const auto bad = lease(core, 1);
  CHECK(core.blocks.check(bad->entry));
  visit_slot(core, bad->slot, length - 1, 1,
             [](std::span<uint8_t> piece, uint64_t) { piece[0] ^= 1; });
  CHECK_FALSE(core.blocks.check(bad->entry));
  CHECK_FALSE(core.blocks.check(bad->entry));
  CHECK(core.blocks.check(good->entry));
  CHECK_FALSE(holds(core, 1));
  CHECK(holds(core, 2));
  CHECK(core.blocks.counters().corrupt == 1);
  core.blocks.release(bad->entry);
  core.blocks.release(good->entry);
  CHECK(core.blocks.audit(0, 0) == "");
}

TEST_CASE("scrubbing finds what went bad and nothing else, and holds nothing") {
  Core core(40);
  const uint64_t length = 2 * kFrameBytes + 70'000;
  for (uint32_t block = 1; block <= 20; ++block) {
    REQUIRE(put_block(core, block, block == 7 ? length : kBlock / block) == Status::kOk);
  }
  const auto flip = [&](uint32_t block, uint64_t at) {
    const auto found = lease(core, block);
    visit_slot(core, found->slot, at, 1, [](std::span<uint8_t> piece, uint64_t) { piece[0] ^= 1; });
    core.blocks.release(found->entry);
  };
  core.blocks.scrub(UINT64_MAX, 20);  // once round
  CHECK(core.blocks.counters().scrubbed >= 20);
  CHECK(core.blocks.counters().corrupt == 0);
  flip(7, length - 1);
  flip(3, 0);
  const auto held = lease(core, 12);
  flip(12, 100);
  for (int i = 0; i < 40; ++i) core.blocks.scrub(1, 1000);  // a block at a time
  CHECK(core.blocks.counters().corrupt == 3);
  for (uint32_t block = 1; block <= 20; ++block) {
    CHECK(holds(core, block) == (block != 3 && block != 7 && block != 12));
  }
  CHECK(core.pool.usage().slots == 18);  // the reader keeps what it holds
  core.blocks.release(held->entry);
  CHECK(core.blocks.audit(0, 0) == "");
}

TEST_CASE("audit names what does not agree") {
  Core core(1);
  REQUIRE(put_block(core, 1, kBlock) == Status::kOk);
  const auto found = lease(core, 1);
  CHECK(core.blocks.audit(0, 1) == "");
  CHECK(core.blocks.audit(0, 0) == "table and sessions differ in leases");
  CHECK(core.blocks.audit(1, 1).starts_with("table and grants hold 2 slots"));
  core.segment->header(found->slot).key = key_of(2);
  CHECK(core.blocks.audit(0, 1).ends_with("an entry's slot holds another key"));
  core.segment->header(found->slot).key = key_of(1);
  core.segment->header(found->slot).content_id ^= 1;
  CHECK(core.blocks.audit(0, 1).ends_with("a content id does not match its part table"));
  core.segment->header(found->slot).content_id ^= 1;
  core.space.bytes.fetch_add(1);
  CHECK(core.blocks.audit(0, 1) == "a namespace's usage is miscounted");
}

TEST_CASE("many keys in few stripes are all found again") {
  Core core(1);
  std::mt19937_64 random(2);
  std::map<uint32_t, bool> held;
  for (int step = 0; step < 40'000; ++step) {
    const auto block = static_cast<uint32_t>(random() % 9000);
    if (random() % 3 == 0) {
      REQUIRE(core.blocks.remove(key_of(block), core.space) == held[block]);
      held[block] = false;
    } else {
      REQUIRE(put_block(core, block, 1) == (held[block] ? Status::kExists : Status::kOk));
      held[block] = true;
    }
  }
  for (const auto& [block, is_held] : held) REQUIRE(holds(core, block) == is_held);
  CHECK(core.blocks.audit(0, 0) == "");
}

}  // namespace
