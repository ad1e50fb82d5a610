// Nodes on virtual time. No thread and no clock: `now` is a number, random comes from the seed, and
// what peers do is one call after another. Who does what stands in actors.h.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "checker.h"

namespace kvstore {

// What a schedule is made of, drawn from its seed.
struct Plan {
  uint32_t frames, keys;
  uint64_t reserve_blocks;
  Nanos lease, grant;
  uint32_t writers, readers, viewers;
  uint64_t view_permille, stuck_permille;  // of the pool
  // How often a peer stops, gives up, dies; a bit flips; time leaps; the namespace is cleared.
  uint64_t stop_permille, abort_permille, death_permille, rot_permille, leap_permille,
      clear_permille;
  std::vector<uint64_t> sizes;
  int steps;
};

inline Plan draw_plan(std::mt19937_64& random) {
  static constexpr uint64_t kMiB = 1 << 20;
  static constexpr uint64_t kSmall[] = {1, 100, 5000, 70'000, 150'000, 300'000};
  static constexpr uint64_t kLarge[] = {
      700'000, kMiB, 1'200'000, 2 * kMiB, 2 * kMiB + 3000, 4 * kMiB + 500'000};
  const auto upto = [&](uint64_t most) { return random() % (most + 1); };
  const auto half_the_time = [&](uint64_t most) { return upto(1) == 0 ? 0 : upto(most); };
  Plan plan{};
  plan.frames = static_cast<uint32_t>(4 + upto(2));
  plan.keys = static_cast<uint32_t>(6 + upto(50));
  plan.reserve_blocks = upto(3);
  plan.lease = static_cast<Nanos>(1 + upto(3)) * 1000 * kMillisecond;
  plan.grant = static_cast<Nanos>(1 + upto(5)) * 1000 * kMillisecond;
  plan.writers = static_cast<uint32_t>(2 + upto(4));
  plan.readers = static_cast<uint32_t>(1 + upto(3));
  plan.viewers = static_cast<uint32_t>(upto(2));
  plan.view_permille = upto(1) == 0 ? 1000 : upto(100);
  plan.stuck_permille = upto(1) == 0 ? 1000 : upto(50);
  plan.stop_permille = half_the_time(100);
  plan.abort_permille = upto(300);
  plan.death_permille = half_the_time(80);
  plan.rot_permille = half_the_time(200);
  plan.leap_permille = half_the_time(30);
  plan.clear_permille = half_the_time(60);
  for (uint64_t count = 1 + upto(3); count > 0; --count) {
    plan.sizes.push_back(kSmall[upto(std::size(kSmall) - 1)]);
  }
  for (uint64_t count = upto(3); count > 0; --count) {
    plan.sizes.push_back(kLarge[upto(std::size(kLarge) - 1)]);
  }
  plan.steps = static_cast<int>(400 + upto(400));
  return plan;
}

inline std::string to_text(const Plan& plan) {
  std::string text;
  const auto add = [&](const char* name, uint64_t value) {
    text += std::string(text.empty() ? "" : ", ") + name + " " + std::to_string(value);
  };
  add("frames", plan.frames);
  add("keys", plan.keys);
  add("reserve", plan.reserve_blocks);
  add("lease_ms", static_cast<uint64_t>(plan.lease / kMillisecond));
  add("grant_ms", static_cast<uint64_t>(plan.grant / kMillisecond));
  add("writers", plan.writers);
  add("readers", plan.readers);
  add("viewers", plan.viewers);
  add("steps", static_cast<uint64_t>(plan.steps));
  add("permille of views", plan.view_permille);
  add("stuck", plan.stuck_permille);
  add("stops", plan.stop_permille);
  add("aborts", plan.abort_permille);
  add("deaths", plan.death_permille);
  add("rot", plan.rot_permille);
  add("leaps", plan.leap_permille);
  add("clears", plan.clear_permille);
  for (const uint64_t size : plan.sizes) add("size", size);
  return text;
}

// How often what happened, over all schedules: a fault that never comes tests nothing.
struct Tally {
  uint64_t committed = 0, existed = 0, stale = 0, refused = 0, aborted = 0, late = 0, stops = 0;
  uint64_t reads = 0, corrupt = 0, revoked = 0, views = 0, views_refused = 0, deaths = 0;
  uint64_t stuck = 0, evictions = 0;
};

// One peer, or the operator: does a little at each step.
class Actor {
 public:
  virtual ~Actor() = default;
  virtual void step() = 0;
  virtual bool idle() const = 0;  // holds nothing
  virtual void session_died(const Session&) {}
};

struct World;

struct SimulatedNode {
  SimulatedNode(World& within, const Plan& plan, uint64_t seed)
      : world(within), core(plan.frames, {seed, plan.reserve_blocks, false}, seed) {
    core.limits.lease = plan.lease;
    core.limits.grant = plan.grant;
    core.limits.view_bytes_max = core.segment->bytes() * plan.view_permille / 1000;
    core.limits.stuck_bytes_max = core.segment->bytes() * plan.stuck_permille / 1000;
    for (int i = 0; i < 3; ++i) sessions.push_back(open_session());
  }
  std::shared_ptr<Session> open_session() {
    return std::make_shared<Session>(core.blocks, core.space, core.limits, kSimulatedPart,
                                     *core.blocks.part_size(kSimulatedPart));
  }
  // A peer's process dies: what it was doing ends there, but for views, whose session stays.
  void kill(size_t which) {
    const std::shared_ptr<Session> gone = sessions[which];
    sessions[which] = open_session();
    dead.push_back(gone);
    gone->end();
    for (const auto& actor : actors) actor->session_died(*gone);
  }
  void census() {
    uint64_t grants = 0;
    uint64_t leases = 0;
    for (const auto* group : {&sessions, &dead}) {
      for (const auto& session : *group) {
        grants += session->num_granted();
        leases += session->num_leased();
      }
    }
    checker.census(grants, leases);
  }
  bool idle() const {
    return std::ranges::all_of(actors, [](const auto& actor) { return actor->idle(); });
  }

  World& world;
  Core core;
  Checker checker{core};
  std::vector<std::shared_ptr<Session>> sessions;
  std::vector<std::shared_ptr<Session>> dead;
  std::vector<std::unique_ptr<Actor>> actors;
};

struct World {
  // Two nodes with the same keys side by side: nothing is global.
  World(uint64_t seed, bool printing, Tally& counts)
      : random(seed), plan(draw_plan(random)), tally(counts), prints(printing) {
    for (int i = 0; i < 2; ++i) {
      nodes.push_back(std::make_unique<SimulatedNode>(*this, plan, random()));
    }
  }
  uint64_t below(uint64_t bound) { return random() % bound; }
  bool chance(uint64_t permille) { return !healing && below(1000) < permille; }
  void say(const char* format, ...) const __attribute__((format(printf, 2, 3))) {
    if (!prints) return;
    va_list arguments;
    va_start(arguments, format);
    printf("%5d %9.3f s  node %zu: ", step, static_cast<double>(now) / 1e9, at);
    vprintf(format, arguments);
    printf("\n");
    fflush(stdout);
    va_end(arguments);
  }

  std::mt19937_64 random;
  const Plan plan;
  Tally& tally;
  const bool prints;
  Nanos now = 0;
  int step = 0;
  size_t at = 0;         // the node whose turn it is
  bool healing = false;  // faults are over; everybody finishes
  uint32_t next_attempt = 1;
  std::vector<std::unique_ptr<SimulatedNode>> nodes;
};

}  // namespace kvstore
