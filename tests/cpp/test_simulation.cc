// Seeded random schedules of the core on virtual time: two nodes, peers that stop, die, come too
// late or never let go. First safety while faults happen, then healing, then progress.
//
//   KVSTORE_SEED=n   replays one schedule and prints what everybody did
#include <doctest/doctest.h>

#include <cstdlib>

#include "actors.h"

using namespace kvstore;

namespace {

constexpr uint64_t kSchedules = 200;
constexpr int kHealingRounds = 200;

void populate(World& world) {
  for (const auto& node : world.nodes) {
    const auto add = [&]<class Kind>(uint32_t count, Kind*) {
      for (; count > 0; --count) node->actors.push_back(std::make_unique<Kind>(*node));
    };
    add(world.plan.writers, static_cast<Writer*>(nullptr));
    add(world.plan.readers, static_cast<Reader*>(nullptr));
    add(world.plan.viewers, static_cast<Viewer*>(nullptr));
    add(1, static_cast<Operator*>(nullptr));
  }
}

void run_faults(World& world) {
  for (; world.step < world.plan.steps; ++world.step) {
    world.now += static_cast<Nanos>(world.below(20)) * kMillisecond;
    if (world.chance(world.plan.leap_permille)) {
      world.now += world.plan.lease + world.plan.grant;
      world.say("time leaps");
    }
    world.at = world.below(world.nodes.size());
    SimulatedNode& node = *world.nodes[world.at];
    node.actors[world.below(node.actors.size())]->step();
    if (world.step % 25 == 0) node.census();
  }
}

// Everybody wakes up and finishes; views close.
void heal(World& world) {
  world.healing = true;
  for (int round = 0; round < kHealingRounds; ++round) {
    for (world.at = 0; world.at < world.nodes.size(); ++world.at) {
      SimulatedNode& node = *world.nodes[world.at];
      for (const auto& actor : node.actors) actor->step();
      node.census();
    }
    const bool quiet =
        std::ranges::all_of(world.nodes, [](const auto& node) { return node->idle(); });
    if (quiet) return;
  }
  FAIL("somebody never finishes");
}

// Nothing is held any more, and every size is stored and read.
void check_progress(World& world, SimulatedNode& node) {
  Core& core = node.core;
  REQUIRE(node.checker.nothing_claimed());
  REQUIRE(core.limits.view_bytes == 0);
  REQUIRE(core.blocks.num_leased() == 0);
  REQUIRE(core.pool.usage().slots == core.blocks.list(core.space).size());
  for (uint32_t block = 0; block < world.plan.keys + 4; ++block) {
    while (core.blocks.unpin(key_of(block), core.space)) {
    }
  }
  for (const uint64_t length : world.plan.sizes) {
    const uint32_t block = 60'000 + world.next_attempt;
    const uint32_t attempt = world.next_attempt++;
    CAPTURE(length);
    REQUIRE(put_block(core, block, length, attempt) == Status::kOk);
    const auto found = core.blocks.lease(key_of(block), core.space, 0);
    REQUIRE(found.has_value());
    REQUIRE(payload_fault(read_slot(core, found->slot, length), block, attempt) == "");
    core.blocks.release(found->entry);
  }
  REQUIRE(core.blocks.audit(0, 0) == "");
  core.blocks.clear(core.space);
  REQUIRE(core.pool.usage().slots == 0);
  REQUIRE(core.pool.usage().taken_bytes == 0);
  REQUIRE(core.blocks.audit(0, 0) == "");
}

void run_schedule(uint64_t seed, bool printing, Tally& tally) {
  World world(seed, printing, tally);
  const std::string plan = to_text(world.plan);
  INFO("KVSTORE_SEED=", seed, " draws ", plan);
  if (printing) printf("seed %lu: %s\n", seed, plan.c_str());
  populate(world);
  run_faults(world);
  heal(world);
  for (const auto& node : world.nodes) {
    tally.evictions += node->core.blocks.counters().evictions;
    check_progress(world, *node);
  }
}

TEST_CASE("seeded random schedules keep every promise and heal") {
  Tally tally;
  if (const char* chosen = getenv("KVSTORE_SEED")) {
    run_schedule(strtoull(chosen, nullptr, 10), true, tally);
    return;
  }
  // Named before it runs, so that a crash names it too.
  printf("simulation, seeds:");
  for (uint64_t seed = 1; seed <= kSchedules; ++seed) {
    printf(" %lu", seed);
    fflush(stdout);
    run_schedule(seed, false, tally);
  }
  printf("\n");
  CHECK(tally.committed > 1000);
  CHECK(tally.reads > 1000);
  CHECK(tally.existed > 20);
  CHECK(tally.stale > 20);
  CHECK(tally.refused > 20);
  CHECK(tally.aborted > 20);
  CHECK(tally.late > 20);
  CHECK(tally.stops > 20);
  CHECK(tally.corrupt > 20);
  CHECK(tally.revoked > 20);
  CHECK(tally.views > 20);
  CHECK(tally.views_refused > 20);
  CHECK(tally.deaths > 20);
  CHECK(tally.stuck > 20);
  CHECK(tally.evictions > 20);
}

}  // namespace
