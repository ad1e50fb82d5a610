// Slots in a segment: shapes, kept shapes and how they are broken, what a failed allocation leaves
// behind, and a random run against a list of byte ranges.
#include "pool.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "core.h"

using namespace kvstore;

namespace {

constexpr uint64_t kKiB = 1024;
constexpr uint64_t kMiB = 1024 * kKiB;

struct SmallPool {
  explicit SmallPool(uint32_t frames) : segment(make_segment(frames)), pool(*segment) {
    pool.add_frames(0, frames);
  }
  SlotId take(uint64_t bytes) {
    const auto taken = pool.take(bytes);
    REQUIRE(taken.has_value());
    return taken->slot;
  }
  uint64_t generation(SlotId slot) const { return segment->header(slot).generation.load(); }

  std::unique_ptr<Segment> segment;
  Pool pool;
};

uint64_t bytes_of(const std::vector<Extent>& extents) {
  uint64_t bytes = 0;
  for (const Extent& extent : extents) bytes += extent.bytes;
  return bytes;
}

// Log-uniform, so that every class comes up.
uint64_t draw_bytes(std::mt19937_64& random, uint64_t most) {
  const double exponent =
      std::uniform_real_distribution<double>(0, std::log2(static_cast<double>(most)))(random);
  return std::min(most, static_cast<uint64_t>(std::exp2(exponent)));
}

TEST_CASE("a block's shape has room for it and wastes little") {
  for (SizeClass size_class = 0; size_class < kNumClasses; ++size_class) {
    CAPTURE(int{size_class});
    REQUIRE(cell_bytes(size_class) % kSlotAlign == 0);
    REQUIRE(cell_bytes(size_class) * cells_per_frame(size_class) <= kFrameBytes);
    if (size_class > 0) {
      REQUIRE(cells_per_frame(size_class) > cells_per_frame(SizeClass(size_class - 1)));
    }
  }
  std::mt19937_64 random(1);
  for (int i = 0; i < 100'000; ++i) {
    const uint64_t bytes = i < 70'000 ? uint64_t(i) * 30 + 1 : draw_bytes(random, 100 * kMiB);
    const Shape shape = shape_of(bytes);
    CAPTURE(bytes);
    REQUIRE(shape_bytes(shape) >= bytes);
    // Four classes per power of two: a fifth, and what aligning small cells costs. Between 1 MiB
    // and a frame there is no class.
    const uint64_t tail = bytes % kFrameBytes;
    if (shape.tail != kNoTail && shape.tail >= 2) {
      REQUIRE(cell_bytes(shape.tail) - tail <= cell_bytes(shape.tail) / 5 + 2 * kSlotAlign);
    }
    REQUIRE(shape_bytes(shape) - bytes < kMiB);
  }
  CHECK(shape_of(1).size_class() == kNumClasses - 1);
  CHECK(shape_of(kFrameBytes) == Shape{1, kNoTail});
  CHECK(shape_of(kFrameBytes + 1) == Shape{1, kNumClasses - 1});
  CHECK(shape_of(kFrameBytes - 1) == Shape{1, kNoTail});
  CHECK(shape_of(kFrameBytes / 2) == Shape{0, 0});
  CHECK(shape_of(3 * kFrameBytes + 700 * kKiB).size_class() == kLargeClass);
}

TEST_CASE("extents cover a block in order") {
  SmallPool small(8);
  const uint64_t length = 3 * kFrameBytes + 5000;
  const SlotId slot = small.take(length);
  const auto extents = small.pool.extents(slot, length);
  REQUIRE(extents.size() == 2);
  CHECK(extents[0].bytes == 3 * kFrameBytes);
  CHECK(extents[1].bytes == 5000);
  CHECK(extents[1].offset % kSlotAlign == 0);
  // A shorter block in the same slot uses the front of it.
  CHECK(bytes_of(small.pool.extents(slot, kFrameBytes + 1)) == kFrameBytes + 1);
  CHECK(small.pool.frames_of(slot).size() == 4);
  CHECK(small.pool.shape_of_slot(slot) == shape_of(length));
}

TEST_CASE("a generation is even while committed, odd otherwise, and only grows") {
  SmallPool small(2);
  for (const uint64_t bytes : {uint64_t{100}, kFrameBytes + 100}) {
    uint64_t last = 0;
    for (int round = 0; round < 3; ++round) {
      const auto taken = small.pool.take(bytes);
      REQUIRE(taken.has_value());
      const SlotId slot = taken->slot;
      CHECK(taken->generation % 2 == 1);
      CHECK(taken->generation > last);
      CHECK(small.generation(slot) == taken->generation);
      if (round != 1) {
        CHECK(small.pool.commit(slot, key_of(7), bytes, 42, 3) == taken->generation + 1);
        CHECK(small.segment->header(slot).length == bytes);
        CHECK(small.segment->header(slot).key == key_of(7));
        CHECK(small.segment->header(slot).content_id == 42);
      }
      const uint64_t held = small.generation(slot);
      CHECK(held % 2 == (round == 1 ? 1 : 0));
      small.pool.free(slot);
      CHECK(small.generation(slot) % 2 == 1);
      CHECK(small.generation(slot) > held);
      last = small.generation(slot);
      CHECK(small.pool.audit() == "");
    }
  }
}

TEST_CASE("small blocks share a cut frame") {
  SmallPool small(2);
  const SizeClass size_class = shape_of(60 * kKiB).tail;
  std::vector<SlotId> slots;
  for (uint32_t i = 0; i < cells_per_frame(size_class); ++i) slots.push_back(small.take(60 * kKiB));
  CHECK(small.pool.usage().free_frames == 1);
  CHECK(small.pool.tenants(small.pool.frames_of(slots[0])[0]).tenants.size() == slots.size());
  small.take(60 * kKiB);
  CHECK(small.pool.usage().free_frames == 0);
  CHECK(small.pool.usage().taken_bytes == (slots.size() + 1) * cell_bytes(size_class));
  CHECK(small.pool.audit() == "");
}

TEST_CASE("a freed slot keeps its shape for the next block of its size") {
  for (const uint64_t bytes : {uint64_t{1}, 60 * kKiB, kFrameBytes, 2 * kFrameBytes + 9}) {
    CAPTURE(bytes);
    SmallPool small(6);
    const SlotId slot = small.take(bytes);
    const auto before = small.pool.extents(slot, bytes);
    small.pool.free(slot);
    // Another size that needs no more room leaves it alone.
    small.take(700 * kKiB);
    const SlotId again = small.take(bytes);
    CHECK(again == slot);
    CHECK(small.pool.extents(again, bytes)[0].offset == before[0].offset);
    CHECK(small.pool.audit() == "");
  }
}

TEST_CASE("kept shapes are broken when another size needs the room") {
  SmallPool small(4);
  const auto fill_and_free = [&](uint64_t bytes) {
    std::vector<SlotId> slots;
    while (const auto taken = small.pool.take(bytes)) slots.push_back(taken->slot);
    const size_t count = slots.size();
    for (const SlotId slot : slots) small.pool.free(slot);
    CHECK(small.pool.audit() == "");
    CHECK(small.pool.usage().taken_bytes == 0);
    return count;
  };
  // Each size gets the whole pool after each other one, whatever shapes they left.
  for (int round = 0; round < 3; ++round) {
    CHECK(fill_and_free(1000) == 4 * cells_per_frame(shape_of(1000).tail));
    CHECK(fill_and_free(4 * kFrameBytes) == 1);
    CHECK(fill_and_free(kFrameBytes + 10) == 3);  // the tails share the fourth frame
    CHECK(fill_and_free(700 * kKiB) == 8);
    CHECK(fill_and_free(3 * kFrameBytes) == 1);
    CHECK(fill_and_free(kFrameBytes) == 4);
  }
}

TEST_CASE("a frame with one slot in use is not taken from its size") {
  SmallPool small(2);
  const SlotId held = small.take(700 * kKiB);
  const SlotId other = small.take(700 * kKiB);
  small.pool.free(other);
  CHECK(small.pool.take(kFrameBytes).has_value());
  CHECK_FALSE(small.pool.take(kFrameBytes).has_value());
  CHECK_FALSE(small.pool.take(1000).has_value());
  CHECK(small.pool.take(700 * kKiB)->slot == other);
  small.pool.free(held);
  CHECK(small.pool.audit() == "");
}

TEST_CASE("an allocation that fails part way gives everything back") {
  constexpr uint32_t kExtents = 16;
  for (const bool with_tail : {false, true}) {
    for (uint32_t room = 0; room <= kExtents; ++room) {
      CAPTURE(room);
      CAPTURE(with_tail);
      // Every second frame is taken, so that no two free ones are neighbours; one more for tails.
      SmallPool small(2 * kExtents + 1);
      std::vector<SlotId> taken;
      for (uint32_t i = 0; i <= 2 * kExtents; ++i) taken.push_back(small.take(kFrameBytes));
      std::ranges::sort(taken, {}, [&](SlotId slot) { return small.pool.frames_of(slot)[0]; });
      SlotId tail = kNoSlot;
      if (with_tail) {
        small.pool.free(taken[2 * kExtents]);
        tail = small.take(5000);  // cuts that frame
      }
      for (uint32_t i = 0; i < room; ++i) small.pool.free(taken[2 * i]);
      const PoolUsage before = small.pool.usage();
      const uint64_t bytes = kExtents * kFrameBytes + (with_tail ? 5000 : 0);
      const uint64_t one_frame = small.pool.free_slots(Shape{1, kNoTail}, 100);
      const auto got = small.pool.take(bytes);
      if (room < kExtents) {
        REQUIRE_FALSE(got.has_value());
        const PoolUsage after = small.pool.usage();
        CHECK(after.free_bytes == before.free_bytes);
        CHECK(after.taken_bytes == before.taken_bytes);
        CHECK(after.slots == before.slots);
        CHECK(small.pool.free_slots(Shape{1, kNoTail}, 100) == one_frame);
        CHECK(one_frame == room);
      } else {
        REQUIRE(got.has_value());
        CHECK(small.pool.extents(got->slot, bytes).size() == kExtents + (with_tail ? 1 : 0));
      }
      CHECK(small.pool.audit() == "");
      if (with_tail) small.pool.free(tail);
      CHECK(small.pool.audit() == "");
    }
  }
}

TEST_CASE("neighbouring frames are joined into one extent where there is such a run") {
  SmallPool small(8);
  std::vector<SlotId> taken;
  for (int i = 0; i < 8; ++i) taken.push_back(small.take(kFrameBytes));
  std::ranges::sort(taken, {}, [&](SlotId slot) { return small.pool.frames_of(slot)[0]; });
  for (const int frame : {0, 2, 4, 5, 6}) small.pool.free(taken[static_cast<size_t>(frame)]);
  const SlotId slot = small.take(3 * kFrameBytes);
  const auto extents = small.pool.extents(slot, 3 * kFrameBytes);
  REQUIRE(extents.size() == 1);
  CHECK(extents[0].offset == 4 * kFrameBytes);
  CHECK(small.pool.usage().largest_free_run <= 1);
}

TEST_CASE("audit names a contradiction") {
  SmallPool small(2);
  const SlotId slot = small.take(5000);
  small.pool.commit(slot, key_of(1), 5000, 0, 0);
  REQUIRE(small.pool.audit() == "");
  SlotHeader& header = small.segment->header(slot);
  header.generation.fetch_add(1);
  CHECK(small.pool.audit() != "");
  header.generation.fetch_sub(1);
  header.offset += kSlotAlign;
  CHECK(small.pool.audit() != "");
  header.offset -= kSlotAlign;
  CHECK(small.pool.audit() == "");
}

// ---- random runs -------------------------------------------------------------------------------

struct Range {
  uint64_t begin;
  uint64_t end;
};

// What the pool promises, from the list of live blocks alone.
struct NaivePool {
  struct Live {
    SlotId slot;
    uint64_t bytes;
    std::vector<Range> ranges;
  };
  std::vector<Live> live;

  bool overlaps(const std::vector<Extent>& extents) const {
    for (const Live& block : live) {
      for (const Range& range : block.ranges) {
        for (const Extent& extent : extents) {
          if (extent.offset < range.end && range.begin < extent.offset + extent.bytes) return true;
        }
      }
    }
    return false;
  }
  // Frames no live block has a byte in: any size may have them.
  uint32_t unused_frames(uint32_t num_frames) const {
    std::vector<bool> used(num_frames);
    for (const Live& block : live) {
      for (const Range& range : block.ranges) {
        for (uint64_t frame = range.begin / kFrameBytes; frame * kFrameBytes < range.end; ++frame) {
          used[frame] = true;
        }
      }
    }
    return static_cast<uint32_t>(std::ranges::count(used, false));
  }
};

// One random step; frees about as often as it takes. True if take() was asked and refused.
template <class Check>
void random_step(SmallPool& small, NaivePool& naive, std::mt19937_64& random, Check&& check) {
  const bool shrinking = random() % 12 < naive.live.size();
  if (!naive.live.empty() && shrinking) {
    std::swap(naive.live[random() % naive.live.size()], naive.live.back());
    small.pool.free(naive.live.back().slot);
    naive.live.pop_back();
    return;
  }
  // A handful of sizes comes back again and again, as namespaces do.
  static constexpr uint64_t kSizes[] = {
      40, 3000, 300 * kKiB, kMiB, kFrameBytes, 3 * kMiB + 5, 2 * kFrameBytes + 3000};
  const uint64_t bytes =
      random() % 2 == 0 ? kSizes[random() % std::size(kSizes)] : draw_bytes(random, 8 * kMiB);
  const uint32_t unused = naive.unused_frames(small.pool.num_frames());
  const auto taken = small.pool.take(bytes);
  const Shape shape = shape_of(bytes);
  check(shape, unused, taken.has_value());
  if (!taken) return;
  const auto extents = small.pool.extents(taken->slot, bytes);
  REQUIRE(bytes_of(extents) == bytes);
  REQUIRE_FALSE(naive.overlaps(extents));
  if (random() % 2 == 0) small.pool.commit(taken->slot, key_of(1), bytes, 0, 0);
  NaivePool::Live block{taken->slot, bytes, {}};
  for (const Extent& extent : extents) {
    block.ranges.push_back({extent.offset, extent.offset + extent.bytes});
  }
  naive.live.push_back(std::move(block));
}

TEST_CASE("the pool agrees with a list of byte ranges") {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    SmallPool small(static_cast<uint32_t>(3 + random() % 10));
    NaivePool naive;
    for (int step = 0; step < 1500; ++step) {
      random_step(small, naive, random, [&](const Shape& shape, uint32_t unused, bool taken) {
        // Frames that suffice are always found, a frame of fresh cells for the tail included.
        if (unused >= shape.frames + (shape.tail == kNoTail ? 0 : 1)) REQUIRE(taken);
        if (unused < shape.frames) REQUIRE_FALSE(taken);
      });
      uint64_t bytes = 0;
      for (const auto& block : naive.live) bytes += shape_bytes(shape_of(block.bytes));
      const PoolUsage usage = small.pool.usage();
      REQUIRE(usage.taken_bytes == bytes);
      REQUIRE(usage.slots == naive.live.size());
      if (step % 10 == 0) REQUIRE(small.pool.audit() == "");
    }
    for (const auto& block : naive.live) small.pool.free(block.slot);
    CHECK(small.pool.usage().taken_bytes == 0);
    CHECK(small.pool.take(uint64_t{small.pool.num_frames()} * kFrameBytes).has_value());
    CHECK(small.pool.audit() == "");
  }
}

TEST_CASE("the tail of a kept large slot is room for a small block") {
  SmallPool small(3);
  small.take(3000);  // so that the frame of tails is in use
  const SlotId large = small.take(kFrameBytes + 3000);
  small.pool.free(large);
  const Shape shape = shape_of(3000);
  const uint64_t said = small.pool.free_slots(shape, UINT64_MAX);
  CHECK(said == 3 * cells_per_frame(shape.tail) - 1);
  uint64_t got = 0;
  while (small.pool.take(3000)) ++got;
  CHECK(got == said);
}

TEST_CASE("free_slots says what take hands out") {
  static constexpr uint64_t kSizes[] = {
      40, 3000, 300 * kKiB, kMiB, kFrameBytes, 3 * kMiB - 5, 2 * kFrameBytes + 3000};
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    SmallPool small(static_cast<uint32_t>(3 + random() % 8));
    NaivePool naive;
    const uint64_t steps = random() % 60;
    for (uint64_t step = 0; step < steps; ++step) {
      random_step(small, naive, random, [](const Shape&, uint32_t, bool) {});
    }
    const uint64_t bytes = kSizes[random() % std::size(kSizes)];
    const Shape shape = shape_of(bytes);
    const uint64_t said = small.pool.free_slots(shape, UINT64_MAX);
    CHECK(small.pool.free_slots(shape, 3) == std::min<uint64_t>(3, said));
    uint64_t got = 0;
    while (small.pool.take(bytes)) ++got;
    CAPTURE(bytes);
    // A frame counted as a source of tails may also go whole.
    if (shape.frames > 0 && shape.tail != kNoTail) {
      REQUIRE(said <= got);
    } else {
      REQUIRE(said == got);
    }
    REQUIRE(small.pool.free_slots(shape, 1) == 0);
  }
}

}  // namespace
