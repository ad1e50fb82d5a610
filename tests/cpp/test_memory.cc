// The description of the caller's memory against a plain list of addresses.
#include "memory.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

using namespace kvstore;

namespace {

using Random = std::mt19937_64;
using Addresses = std::vector<uintptr_t>;

uint64_t draw(Random& random, uint64_t low, uint64_t high) {
  return std::uniform_int_distribution<uint64_t>(low, high)(random);
}

struct Array {
  uint64_t item_bytes = 1;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
};

// Small, any order of axes, with gaps, repeats, broadcasts and steps backwards.
Array random_array(Random& random) {
  Array array;
  array.item_bytes = draw(random, 1, 4);
  const size_t dims = draw(random, 0, 4);
  for (size_t i = 0; i < dims; ++i) array.shape.push_back(static_cast<int64_t>(draw(random, 1, 4)));
  std::vector<size_t> order(dims);
  std::iota(order.begin(), order.end(), size_t{0});
  if (draw(random, 0, 1) == 1) std::shuffle(order.begin(), order.end(), random);
  array.strides.resize(dims);
  auto stride = static_cast<int64_t>(array.item_bytes);
  for (size_t i = dims; i-- > 0;) {
    const auto kind = draw(random, 0, 9);
    int64_t& own = array.strides[order[i]];
    own = stride;
    if (kind == 0) own += static_cast<int64_t>(draw(random, 1, 5));
    if (kind == 1) own = static_cast<int64_t>(draw(random, 0, 12));
    stride = std::max<int64_t>(own, 1) * array.shape[order[i]];
    if (kind == 2) own = -own;
  }
  return array;
}

Addresses naive(uintptr_t base, const Array& array) {
  Addresses items{base};
  for (size_t axis = 0; axis < array.shape.size(); ++axis) {
    Addresses longer;
    for (const uintptr_t item : items) {
      for (int64_t i = 0; i < array.shape[axis]; ++i) {
        longer.push_back(item + static_cast<uintptr_t>(i * array.strides[axis]));
      }
    }
    items = longer;
  }
  Addresses bytes;
  for (const uintptr_t item : items) {
    for (uint64_t i = 0; i < array.item_bytes; ++i) bytes.push_back(item + i);
  }
  return bytes;
}

struct Sample {
  BlockMemory memory;
  Addresses bytes;
};

Sample random_block(Random& random, uintptr_t base) {
  Sample sample;
  BlockMemory::Runs runs;
  for (uint64_t run = draw(random, 1, 3); run > 0; --run) {
    const Array array = random_array(random);
    append_run(&runs, make_run(base, array.item_bytes, array.shape, array.strides));
    const Addresses bytes = naive(base, array);
    sample.bytes.insert(sample.bytes.end(), bytes.begin(), bytes.end());
    base += draw(random, 0, 3) == 0 ? draw(random, 0, 60) : bytes.size();
  }
  // Runs are relative to the block: move both, and mean the same.
  const uintptr_t origin = draw(random, 0, 1) * 1000;
  for (StridedRun& run : runs) run.base -= origin;
  sample.memory = BlockMemory(origin, std::make_shared<const BlockMemory::Runs>(std::move(runs)));
  return sample;
}

Addresses walk(const BlockMemory& memory, uint64_t offset, Random& random, uint64_t bytes_max) {
  Addresses bytes;
  MemoryCursor cursor(memory, offset);
  for (;;) {
    const auto limit = draw(random, 1, bytes_max);
    const auto piece = cursor.next(limit);
    if (piece.empty()) break;
    CHECK(piece.size() <= limit);
    for (size_t i = 0; i < piece.size(); ++i) {
      bytes.push_back(reinterpret_cast<uintptr_t>(piece.data()) + i);
    }
  }
  CHECK(cursor.next(1).empty());
  return bytes;
}

bool repeats(Addresses bytes) {
  std::sort(bytes.begin(), bytes.end());
  return std::adjacent_find(bytes.begin(), bytes.end()) != bytes.end();
}

BlockMemory one_run(uintptr_t base, uint64_t item_bytes, std::vector<int64_t> shape,
                    std::vector<int64_t> strides) {
  return {0, std::make_shared<const BlockMemory::Runs>(
                 BlockMemory::Runs{make_run(base, item_bytes, shape, strides)})};
}

constexpr uintptr_t kBase = 1 << 20;  // never dereferenced, but in the test of zero

}  // namespace

TEST_CASE("contiguous arrays become one piece") {
  const std::vector<int64_t> shape{3, 1, 4, 5};
  CHECK(make_run(kBase, 2, shape, {}).dims.empty());
  CHECK(make_run(kBase, 2, shape, std::vector<int64_t>{40, 7, 10, 2}).piece_bytes == 120);
  CHECK(BlockMemory(kBase, 120).runs() == nullptr);
  CHECK(one_run(kBase, 2, {3, 4}, {8, 2}).runs() == nullptr);
}

TEST_CASE("dimensions that continue each other are merged") {
  const auto run =
      make_run(kBase, 2, std::vector<int64_t>{3, 4, 5}, std::vector<int64_t>{80, 20, 4});
  REQUIRE(run.dims.size() == 1);
  CHECK(run.dims[0].count == 60);
  CHECK(run.dims[0].stride == 4);
}

TEST_CASE("an array without items is an empty run") {
  BlockMemory::Runs runs;
  append_run(&runs, make_run(kBase, 2, std::vector<int64_t>{3, 0}, {}));
  CHECK(runs.empty());
  MemoryCursor cursor(one_run(kBase, 2, {3, 0}, {4, 2}), 0);
  CHECK(cursor.next(1).empty());
}

TEST_CASE("touching pieces become one") {
  BlockMemory::Runs runs;
  append_run(&runs, make_run(kBase, 8, {}, {}));
  append_run(&runs, make_run(kBase + 8, 4, {}, {}));
  append_run(&runs, make_run(kBase + 13, 4, {}, {}));
  REQUIRE(runs.size() == 2);
  CHECK(runs[0].piece_bytes == 12);
}

TEST_CASE("cursor visits the logical bytes from any offset") {
  Random random(1);
  for (int round = 0; round < 3000; ++round) {
    CAPTURE(round);
    const Sample sample = random_block(random, kBase);
    REQUIRE(sample.memory.bytes() == sample.bytes.size());
    const uint64_t offset = draw(random, 0, sample.bytes.size());
    const Addresses expected(sample.bytes.begin() + static_cast<ptrdiff_t>(offset),
                             sample.bytes.end());
    REQUIRE(walk(sample.memory, offset, random, draw(random, 1, 40)) == expected);
  }
}

TEST_CASE("overlap of blocks is that of their sets of bytes") {
  Random random(2);
  int found = 0;
  for (int round = 0; round < 5000; ++round) {
    CAPTURE(round);
    std::vector<BlockMemory> blocks;
    Addresses bytes;
    uintptr_t base = kBase;
    for (uint64_t block = draw(random, 1, 4); block > 0; --block) {
      const Sample sample = random_block(random, base);
      blocks.push_back(sample.memory);
      bytes.insert(bytes.end(), sample.bytes.begin(), sample.bytes.end());
      base += draw(random, 0, 2) == 0 ? draw(random, 0, 9) : 300;
    }
    std::shuffle(blocks.begin(), blocks.end(), random);
    const bool expected = repeats(bytes);
    found += expected ? 1 : 0;
    REQUIRE(any_overlap(blocks) == expected);
  }
  CHECK(found > 500);
  CHECK(found < 4500);
}

TEST_CASE("overlap of two sides ignores what each shares with itself") {
  Random random(3);
  int found = 0;
  for (int round = 0; round < 5000; ++round) {
    CAPTURE(round);
    std::array<std::vector<BlockMemory>, 2> sides;
    std::array<std::set<uintptr_t>, 2> bytes;
    for (size_t side = 0; side < 2; ++side) {
      uintptr_t base = kBase + draw(random, 0, 40);
      for (uint64_t block = draw(random, 1, 3); block > 0; --block) {
        const Sample sample = random_block(random, base);
        sides[side].push_back(sample.memory);
        bytes[side].insert(sample.bytes.begin(), sample.bytes.end());
        base += draw(random, 0, 80);
      }
    }
    const bool expected = std::any_of(bytes[0].begin(), bytes[0].end(),
                                      [&](uintptr_t byte) { return bytes[1].contains(byte); });
    found += expected ? 1 : 0;
    REQUIRE(any_overlap(sides[0], sides[1]) == expected);
    REQUIRE(any_overlap(sides[1], sides[0]) == expected);
  }
  CHECK(found > 500);
  CHECK(found < 4500);
}

TEST_CASE("an empty run overlaps nothing") {
  const BlockMemory block(0, std::make_shared<const BlockMemory::Runs>(
                                 BlockMemory::Runs{{kBase + 5, 0, {}}, {kBase + 100, 10, {}}}));
  CHECK_FALSE(any_overlap(std::vector{block, BlockMemory(kBase, 10)}));
}

TEST_CASE("blocks woven into each other do not overlap") {
  // A cache of shape (64 layers, 4096 pages, 4 KiB), a block being one page of every layer.
  std::vector<BlockMemory> pages;
  for (uintptr_t page = 0; page < 4096; ++page) {
    pages.push_back(one_run(kBase + page * 4096, 4096, {64}, {4096 * 4096}));
  }
  CHECK_FALSE(any_overlap(pages));
  CHECK_FALSE(any_overlap(std::span(pages).first(2048), std::span(pages).last(2048)));
  pages.push_back(BlockMemory(kBase + (uintptr_t{17} << 24) + 4096 * 5 + 4095, 1));
  CHECK(any_overlap(pages));
  CHECK(any_overlap(std::span(pages).first(4096), std::span(pages).last(1)));
}

TEST_CASE("overlap of millions of pieces is found in bounded time") {
  constexpr int64_t kMany = 1 << 22;
  const BlockMemory even = one_run(kBase, 1, {kMany}, {2});
  const BlockMemory odd = one_run(kBase + 1, 1, {kMany}, {2});
  CHECK_FALSE(any_overlap(std::vector{even, odd}));
  CHECK(any_overlap(std::vector{even, odd, BlockMemory(kBase + kMany, 1)}));
  // What one lane has to itself is skipped.
  const BlockMemory long_one = one_run(kBase, 1, {int64_t{1} << 40}, {2});
  const BlockMemory middle(kBase + (uintptr_t{1} << 39) + 1, 1);
  CHECK_FALSE(any_overlap(std::vector{long_one, middle}));
  CHECK(any_overlap(std::vector{long_one, middle, BlockMemory(kBase + (uintptr_t{1} << 40), 1)}));
  // Transposed, backwards, sliding and repeated arrays are decided without visiting their pieces.
  CHECK_FALSE(any_overlap(std::vector{one_run(kBase, 1, {1 << 20, 1 << 20}, {1, 1 << 20})}));
  CHECK_FALSE(any_overlap(std::vector{one_run(uintptr_t{1} << 41, 1, {int64_t{1} << 40}, {-1})}));
  CHECK(any_overlap(std::vector{one_run(kBase, 2, {1 << 20, 1 << 20}, {2, 2})}));
  CHECK(any_overlap(std::vector{one_run(kBase, 2, {1 << 20, 1 << 20}, {0, 2})}));
  // Nothing proves this one in reasonable time: it counts as overlapping.
  CHECK(any_overlap(std::vector{one_run(kBase, 1, {1 << 21, 1 << 21, 2}, {1 << 25, 18, 2000001})}));
}

TEST_CASE("zero reaches every byte of a block and no other") {
  std::vector<uint8_t> bytes(64, 0xff);
  const auto base = reinterpret_cast<uintptr_t>(bytes.data());
  zero(one_run(base + 30, 2, {3, 3}, {-12, 4}));
  const Addresses zeroed = naive(base + 30, {2, {3, 3}, {-12, 4}});
  for (size_t i = 0; i < bytes.size(); ++i) {
    const bool inside = std::find(zeroed.begin(), zeroed.end(), base + i) != zeroed.end();
    CHECK(bytes[i] == (inside ? 0 : 0xff));
  }
}
