// Who holds memory and who gets it: random pins, leases and removals against a naive model, and
// churn of mixed sizes against a count of the frames that could be evicted.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <list>
#include <random>

#include "blocks.h"
#include "core.h"

using namespace kvstore;

namespace {

constexpr uint64_t kBlock = 300 << 10;
constexpr uint32_t kCells = 6;  // of that size in a frame
constexpr uint32_t kKeys = 9;

// Blocks of one size in one frame, as plainly as it can be said.
struct Model {
  struct Block {
    uint32_t key;
    uint32_t leases = 0;
    uint32_t pins = 0;
    bool gone = false;  // its key no longer names it
    bool busy() const { return leases > 0 || pins > 0; }
  };
  std::list<Block> blocks;  // the oldest first

  std::list<Block>::iterator find(uint32_t key) {
    return std::ranges::find_if(blocks, [&](const Block& b) { return b.key == key && !b.gone; });
  }
  bool touch(uint32_t key) {
    const auto at = find(key);
    if (at == blocks.end()) return false;
    blocks.splice(blocks.end(), blocks, at);
    return true;
  }
  // Freed exactly when no lease is left and the key is gone.
  void settle(std::list<Block>::iterator at) {
    if (at->gone && at->leases == 0) blocks.erase(at);
  }
  bool evict() {
    const auto at =
        std::ranges::find_if(blocks, [](const Block& b) { return !b.gone && !b.busy(); });
    if (at == blocks.end()) return false;
    blocks.erase(at);
    return true;
  }
  template <class Counts>
  uint64_t count(Counts&& counts) const {
    return static_cast<uint64_t>(std::ranges::count_if(blocks, counts));
  }
};

struct Run {
  Core core{1, {7, 1, false}};
  Model model;
  std::vector<std::pair<EntryRef, std::list<Model::Block>::iterator>> leases;

  Stamp stamp() { return make_stamp(core.blocks.next_batch(), 0); }

  void put(uint32_t key) {
    Status wanted = Status::kOk;
    if (model.touch(key)) {
      wanted = Status::kExists;
    } else if (model.blocks.size() < kCells || model.evict()) {
      model.blocks.push_back({key});
    } else {
      wanted = Status::kOutOfSpace;
    }
    const Stamp now = stamp();
    Pool::Taken taken{};
    Status status =
        core.blocks.reserve(key_of(key), core.space, core.space.version, kBlock, now, now, &taken);
    if (status == Status::kOk) {
      status = core.blocks.commit(
          {key_of(key), &core.space, core.space.version, taken.slot, kBlock, now, {1}, {}});
    }
    REQUIRE(status == wanted);
  }
  void lookup(uint32_t key) {
    const auto found = core.blocks.lease(key_of(key), core.space, stamp());
    REQUIRE(found.has_value() == model.touch(key));
    if (!found) return;
    const auto at = model.find(key);
    ++at->leases;
    leases.emplace_back(found->entry, at);
  }
  void release(uint64_t which) {
    if (leases.empty()) return;
    std::swap(leases[which % leases.size()], leases.back());
    const auto [entry, at] = leases.back();
    leases.pop_back();
    core.blocks.release(entry);
    --at->leases;
    model.settle(at);
  }
  void remove(uint32_t key) {
    const auto at = model.find(key);
    REQUIRE(core.blocks.remove(key_of(key), core.space) == (at != model.blocks.end()));
    if (at == model.blocks.end()) return;
    at->gone = true;
    model.settle(at);
  }
  void pin(uint32_t key) {
    const auto at = model.find(key);
    REQUIRE(core.blocks.pin(key_of(key), core.space) == (at != model.blocks.end()));
    if (at != model.blocks.end()) ++at->pins;
  }
  void unpin(uint32_t key) {
    const auto at = model.find(key);
    const bool pinned = at != model.blocks.end() && at->pins > 0;
    REQUIRE(core.blocks.unpin(key_of(key), core.space) == pinned);
    if (pinned) --at->pins;
  }
  void evict() {
    core.blocks.refill_reserves();
    if (model.blocks.size() == kCells) model.evict();
  }
  void clear() {
    core.blocks.clear(core.space);
    for (auto at = model.blocks.begin(); at != model.blocks.end();) {
      const auto next = std::next(at);
      at->gone = true;
      model.settle(at);
      at = next;
    }
  }
  void check() {
    REQUIRE(core.pool.usage().slots == model.blocks.size());
    REQUIRE(core.blocks.num_leased() == leases.size());
    REQUIRE(core.blocks.num_evictable() ==
            static_cast<int64_t>(model.count([](const auto& b) { return !b.gone && !b.busy(); })));
    REQUIRE(core.blocks.num_pinned() ==
            model.count([](const auto& b) { return !b.gone && b.pins > 0; }));
  }
};

TEST_CASE("random pins leases and removals agree with a model") {
  Run run;
  for (uint64_t seed = 1; seed <= 10'000; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    // Some sequences hold much, some little.
    const uint64_t release_share = random() % 20;
    for (uint64_t step = 10 + random() % 20; step > 0; --step) {
      const auto key = static_cast<uint32_t>(random() % kKeys);
      const uint64_t dice = random() % 100;
      if (dice < 40)
        run.put(key);
      else if (dice < 55)
        run.lookup(key);
      else if (dice < 55 + release_share)
        run.release(random());
      else if (dice < 80)
        run.pin(key);
      else if (dice < 87)
        run.unpin(key);
      else if (dice < 94)
        run.remove(key);
      else if (dice < 99)
        run.evict();
      else
        run.clear();
      run.check();
    }
    for (uint32_t key = 0; key < kKeys; ++key) {
      REQUIRE(run.core.blocks.holds(key_of(key), run.core.space) ==
              (run.model.find(key) != run.model.blocks.end()));
    }
    while (!run.leases.empty()) run.release(0);
    run.clear();
    run.check();
    REQUIRE(run.core.pool.usage().slots == 0);
    REQUIRE(run.core.blocks.audit(0, 0) == "");
  }
}

// ---- churn of mixed sizes ----------------------------------------------------------------------

struct Churn {
  Core core{128};
  std::mt19937_64 random{11};
  std::vector<Found> held;
  uint64_t held_bytes = 0;
  uint32_t next_key = 0;

  // By a walk over everything: free or filled with blocks nobody holds.
  uint32_t evictable_frames() {
    std::vector<bool> is_held(core.pool.num_frames() * kSlotsPerFrameMax);
    for (const Found& found : held) is_held[found.slot] = true;
    uint32_t frames = 0;
    for (uint32_t frame = 0; frame < core.pool.num_frames(); ++frame) {
      const auto tenants = core.pool.tenants(frame).tenants;
      frames += std::ranges::all_of(tenants, [&](const Pool::Tenant& tenant) {
        return tenant.entry != kNoEntry && !is_held[tenant.slot];
      });
    }
    return frames;
  }
  void let_go(size_t which) {
    std::swap(held[which], held.back());
    held_bytes -= held.back().length;
    core.blocks.release(held.back().entry);
    held.pop_back();
  }
};

TEST_CASE("churn of mixed sizes never runs out of space while evictable frames suffice") {
  constexpr uint64_t kMost = 8 << 20;
  Churn churn;
  int refused = 0;
  uint64_t stored = 0;
  for (int put = 1; put <= 50'000; ++put) {
    const double exponent = std::uniform_real_distribution<double>(
        0, std::log2(static_cast<double>(kMost)))(churn.random);
    const auto length = static_cast<uint64_t>(std::exp2(exponent));
    const BlockKey key = key_of(churn.next_key++);
    const Stamp stamp = make_stamp(churn.core.blocks.next_batch(), 0);
    Pool::Taken taken{};
    const Status status =
        churn.core.blocks.reserve(key, churn.core.space, 1, length, stamp, stamp, &taken);
    const Shape shape = shape_of(length);
    if (status == Status::kOk) {
      REQUIRE(churn.core.blocks.commit(
                  {key, &churn.core.space, 1, taken.slot, length, stamp, {1}, {}}) == Status::kOk);
      ++stored;
    } else {
      CAPTURE(put);
      CAPTURE(length);
      REQUIRE(status == Status::kOutOfSpace);
      REQUIRE(churn.evictable_frames() < shape.frames + (shape.tail == kNoTail ? 0 : 1));
      ++refused;
    }
    // Readers come and go; now and then they let nothing go, until they hold nearly all of the
    // pool.
    const bool greedy = put / 1000 % 10 == 9;
    if (status == Status::kOk && (greedy || churn.random() % 4 == 0)) {
      churn.held.push_back(*churn.core.blocks.lease(key, churn.core.space, stamp));
      churn.held_bytes += length;
    }
    const uint64_t bound = churn.core.segment->bytes() / (greedy ? 1 : 3);
    while (!churn.held.empty() &&
           (churn.held_bytes > bound || (!greedy && churn.random() % 8 == 0))) {
      churn.let_go(churn.random() % churn.held.size());
    }
    if (put % 1000 == 0) REQUIRE(churn.core.blocks.audit(0, churn.held.size()) == "");
  }
  CHECK(refused > 0);  // else the comparison was never made
  CHECK(stored > 45'000);
  while (!churn.held.empty()) churn.let_go(0);
  churn.core.blocks.clear(churn.core.space);
  CHECK(churn.core.pool.usage().taken_bytes == 0);
  CHECK(churn.core.blocks.audit(0, 0) == "");
}

}  // namespace
