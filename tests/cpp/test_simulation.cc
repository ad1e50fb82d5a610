// The core on virtual time: two nodes side by side, peers that stop, die, come too late or never let
// go, and a checker apart from them (simulation.h). Safety while faults happen; then healing and
// progress.
//
//   KVSTORE_SEED=n   replays one schedule and prints what everybody did
#include <doctest/doctest.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "simulation.h"

using namespace kvstore;

namespace {

constexpr uint64_t kSchedules = 200;
constexpr uint64_t kMiB = 1 << 20;

// ---- what a schedule is made of, drawn from its seed -------------------------------------------

struct Plan {
  uint32_t frames;
  uint32_t keys;
  uint64_t reserve_blocks;
  Nanos lease;
  Nanos grant;
  uint64_t view_permille;   // of the pool
  uint64_t stuck_permille;  // of the pool
  uint32_t writers, readers, viewers;
  uint64_t stop_permille, abort_permille, death_permille, rot_permille, leap_permille;
  uint64_t clear_permille;
  std::vector<uint64_t> sizes;
  int steps;
};

Plan draw_plan(std::mt19937_64& random) {
  static constexpr uint64_t kSmall[] = {1, 100, 5000, 70'000, 200'000, 300'000};
  static constexpr uint64_t kLarge[] = {700'000,    kMiB,           1'200'000,
                                        2 * kMiB, 2 * kMiB + 3000, 4 * kMiB + 500'000};
  const auto of = [&](uint64_t most) { return random() % (most + 1); };
  Plan plan{};
  plan.frames = static_cast<uint32_t>(5 + of(3));
  plan.keys = static_cast<uint32_t>(6 + of(30));
  plan.reserve_blocks = of(3);
  plan.lease = static_cast<Nanos>(1 + of(3)) * 1000 * kMillisecond;
  plan.grant = static_cast<Nanos>(1 + of(5)) * 1000 * kMillisecond;
  plan.view_permille = of(1) == 0 ? 1000 : of(500);
  plan.stuck_permille = of(1) == 0 ? 1000 : of(300);
  plan.writers = static_cast<uint32_t>(2 + of(3));
  plan.readers = static_cast<uint32_t>(1 + of(3));
  plan.viewers = static_cast<uint32_t>(of(2));
  plan.stop_permille = of(1) == 0 ? 0 : of(80);
  plan.abort_permille = of(300);
  plan.death_permille = of(1) == 0 ? 0 : of(60);
  plan.rot_permille = of(2) != 0 ? 0 : of(100);
  plan.leap_permille = of(1) == 0 ? 0 : of(20);
  plan.clear_permille = of(1) == 0 ? 0 : of(60);
  for (uint64_t count = 1 + of(3); count > 0; --count) {
    plan.sizes.push_back(kSmall[of(std::size(kSmall) - 1)]);
  }
  for (uint64_t count = of(2); count > 0; --count) {
    plan.sizes.push_back(kLarge[of(std::size(kLarge) - 1)]);
  }
  plan.steps = static_cast<int>(300 + of(300));
  return plan;
}

std::string to_text(const Plan& plan) {
  std::string text = std::to_string(plan.frames) + " frames, " + std::to_string(plan.keys) +
                     " keys, reserve " + std::to_string(plan.reserve_blocks) + ", lease " +
                     std::to_string(plan.lease / kMillisecond) + " ms, grant " +
                     std::to_string(plan.grant / kMillisecond) + " ms, writers " +
                     std::to_string(plan.writers) + ", readers " + std::to_string(plan.readers) +
                     ", viewers " + std::to_string(plan.viewers) + "; permille: views " +
                     std::to_string(plan.view_permille) + ", stuck " +
                     std::to_string(plan.stuck_permille) + ", stops " +
                     std::to_string(plan.stop_permille) + ", aborts " +
                     std::to_string(plan.abort_permille) + ", deaths " +
                     std::to_string(plan.death_permille) + ", rot " +
                     std::to_string(plan.rot_permille) + ", leaps " +
                     std::to_string(plan.leap_permille) + ", clears " +
                     std::to_string(plan.clear_permille) + "; sizes";
  for (const uint64_t size : plan.sizes) text += " " + std::to_string(size);
  return text;
}

// How often what happened, over all schedules: a fault that never comes tests nothing.
struct Tally {
  uint64_t committed = 0, existed = 0, stale = 0, refused = 0, aborted = 0, late = 0, stops = 0;
  uint64_t reads = 0, corrupt = 0, revoked = 0, views = 0, views_refused = 0, deaths = 0;
  uint64_t evictions = 0;
};

// ---- the world ---------------------------------------------------------------------------------

struct World;

struct Actor {
  virtual ~Actor() = default;
  virtual void step() = 0;
  virtual bool idle() const = 0;
  virtual void session_died(const Session&) {}
};

struct SimNode {
  SimNode(World& within, const Plan& plan, uint64_t seed);
  std::shared_ptr<Session> any_session();
  void kill_session();
  void census();

  World& world;
  Core core;
  Checker checker{core};
  std::vector<std::shared_ptr<Session>> sessions;
  std::vector<std::shared_ptr<Session>> dead;  // their views are still open
  std::vector<std::unique_ptr<Actor>> actors;
};

struct World {
  World(uint64_t seed, bool printing, Tally& counts)
      : random(seed), plan(draw_plan(random)), tally(counts), prints(printing) {
    for (uint64_t number = 0; number < 2; ++number) {
      nodes.push_back(std::make_unique<SimNode>(*this, plan, random()));
    }
  }
  uint64_t below(uint64_t bound) { return random() % bound; }
  bool chance(uint64_t permille) { return !healing && below(1000) < permille; }
  void say(const char* format, ...) const __attribute__((format(printf, 2, 3))) {
    if (!prints) return;
    va_list arguments;
    va_start(arguments, format);
    printf("%6d %8.3f s  ", step, static_cast<double>(now) / 1e9);
    vprintf(format, arguments);
    printf("\n");
    va_end(arguments);
  }

  std::mt19937_64 random;
  Plan plan;
  Tally& tally;
  bool prints;
  Nanos now = 0;
  int step = 0;
  bool healing = false;
  uint32_t next_attempt = 1;
  std::vector<std::unique_ptr<SimNode>> nodes;
};

// ---- actors ------------------------------------------------------------------------------------

// reserve, write half, write the rest, commit | abort; stops at any of them, for as long as it likes.
class Writer final : public Actor {
 public:
  explicit Writer(SimNode& node) : node_(node), world_(node.world) {}
  bool idle() const override { return batch_ == nullptr; }

  void step() override {
    if (world_.step < asleep_until_ && !world_.healing) return;
    if (batch_ == nullptr) {
      if (!world_.healing) reserve();
    } else if (died_) {
      come_late();
    } else if (written_ < 2) {
      write();
    } else {
      end();
    }
    if (batch_ != nullptr && world_.chance(world_.plan.stop_permille)) {
      asleep_until_ = world_.step + 50 + static_cast<int>(world_.below(400));
      ++world_.tally.stops;
      world_.say("writer of %u stops", number_of(keys_[0]));
    }
  }

  void session_died(const Session& session) override {
    if (batch_ == nullptr || session_.get() != &session) return;
    died_ = true;
    for (const uint32_t attempt : attempts_) {
      if (attempt != 0) node_.checker.ended(attempt, false);
    }
  }

 private:
  void reserve() {
    const auto count = static_cast<uint32_t>(1 + world_.below(4));
    const size_t skip = world_.below(4) == 0 ? world_.below(count) : 0;
    keys_ = keys_of(static_cast<uint32_t>(world_.below(world_.plan.keys)), count);
    lengths_.clear();
    for (size_t i = skip; i < count; ++i) {
      lengths_.push_back(world_.plan.sizes[world_.below(world_.plan.sizes.size())]);
    }
    if (version_ == 0 || world_.below(2) == 0) version_ = node_.core.space.version;
    session_ = node_.any_session();
    chain_ = world_.below(4) != 0;
    const bool stuck =
        session_->stuck_bytes(world_.now) > node_.core.limits.stuck_bytes_max;
    batch_ = session_->reserve(
        {keys_, skip, lengths_, {}, kSimulatedPart, version_, chain_}, world_.now);
    attempts_.assign(lengths_.size(), 0);
    written_ = 0;
    died_ = false;
    admit(stuck);
    world_.say("reserve %u..%u skip %zu: %s", number_of(keys_[0]), number_of(keys_.back()), skip,
               statuses().c_str());
  }

  // Tells the checker what the node has decided, and checks that it could.
  void admit(bool stuck) {
    bool any_refused = false;
    for (size_t i = 0; i < batch_->items.size(); ++i) {
      const GrantBatch::Item& item = batch_->items[i];
      const Status status = batch_->statuses[i];
      const bool current = version_ == node_.core.space.version;
      if (status == Status::kOk && attempts_[i] == 0) {
        REQUIRE_FALSE((current && node_.core.blocks.holds(item.key, node_.core.space)));
        attempts_[i] = world_.next_attempt++;
        node_.checker.granted(*batch_, i, attempts_[i]);
      } else if (status == Status::kStale) {
        REQUIRE_FALSE(current);
      } else if (status == Status::kOutOfSpace && !any_refused) {
        any_refused = true;
        ++world_.tally.refused;
        if (!stuck) node_.checker.refused(item.length, keys_);
      }
    }
  }

  void write() {
    if (world_.below(3) == 0 && session_->reserve_more(*batch_, chain_)) admit(false);
    for (size_t i = 0; i < batch_->items.size(); ++i) {
      if (attempts_[i] == 0) continue;
      GrantBatch::Item& item = batch_->items[i];
      const uint32_t block = number_of(item.key);
      // What was granted late is written whole in the last step.
      const uint64_t half = item.parts_begun ? item.length / 2 : 0;
      (void)half;
      (void)block;
    }
    ++written_;
  }

  SimNode& node_;
  World& world_;
};

}  // namespace
