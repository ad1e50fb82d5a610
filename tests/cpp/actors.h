// Who works on a simulated node: writers, readers, viewers and an operator, as step machines.
#pragma once

#include "simulation.h"

namespace kvstore {

class Peer : public Actor {
 public:
  explicit Peer(SimulatedNode& node) : node_(node), world_(node.world) {}

 protected:
  Core& core() { return node_.core; }
  Checker& checker() { return node_.checker; }
  void choose_session() { session_ = node_.sessions[world_.below(node_.sessions.size())]; }
  void choose_keys() {
    keys_ = keys_of(static_cast<uint32_t>(world_.below(world_.plan.keys)),
                    static_cast<uint32_t>(1 + world_.below(4)));
  }

  SimulatedNode& node_;
  World& world_;
  std::shared_ptr<Session> session_;
  std::vector<BlockKey> keys_;
};

// reserve, write half, write the rest, commit | abort; stops anywhere, for as long as it likes.
class Writer final : public Peer {
 public:
  using Peer::Peer;
  bool idle() const override { return batch_ == nullptr; }

  void step() override {
    if (world_.step < asleep_until_ && !world_.healing) return;
    if (batch_ == nullptr) {
      if (!world_.healing) reserve();
    } else if (died_) {
      come_late();
    } else if (!write()) {
      end();
    }
    if (batch_ != nullptr && world_.chance(world_.plan.stop_permille)) {
      asleep_until_ = world_.step + 50 + static_cast<int>(world_.below(400));
      ++world_.tally.stops;
      world_.say("writer of %u stops until %d", number_of(keys_[0]), asleep_until_);
    }
  }

  void session_died(const Session& session) override {
    if (batch_ == nullptr || session_.get() != &session) return;
    died_ = true;
    for (const Item& item : items_) {
      if (item.attempt != 0) checker().ended(item.attempt, false);
    }
  }

 private:
  struct Item {
    Status told = Status::kOutOfSpace;
    uint32_t attempt = 0;  // once granted
    uint64_t written = 0;  // bytes
  };

  void reserve() {
    choose_keys();
    choose_session();
    const size_t skip = world_.below(4) == 0 ? world_.below(keys_.size()) : 0;
    lengths_.clear();
    for (size_t i = skip; i < keys_.size(); ++i) {
      lengths_.push_back(world_.plan.sizes[world_.below(world_.plan.sizes.size())]);
    }
    // Now and then the keys are from before the last clear.
    if (version_ == 0 || world_.below(2) == 0) version_ = core().space.version;
    chain_ = world_.below(4) != 0;
    const bool stuck = session_->stuck_bytes(world_.now) > core().limits.stuck_bytes_max;
    world_.tally.stuck += stuck ? 1 : 0;
    batch_ = session_->reserve({keys_, skip, lengths_, {}, version_, chain_}, world_.now);
    items_.assign(lengths_.size(), {});
    died_ = false;
    admit(stuck);
  }

  // Tells the checker what the node has decided now.
  void admit(bool stuck) {
    bool refused = false;
    for (size_t i = 0; i < items_.size(); ++i) {
      const GrantBatch::Item& item = batch_->items[i];
      const bool current = version_ == core().space.version;
      const bool held = core().blocks.holds(item.key, core().space);
      if (items_[i].told != Status::kOutOfSpace) continue;
      items_[i].told = batch_->statuses[i];
      switch (items_[i].told) {
        case Status::kOk:
          REQUIRE_FALSE((stuck || held || !current));
          items_[i].attempt = world_.next_attempt++;
          checker().granted(*batch_, i, items_[i].attempt);
          world_.say("grant %u, %lu bytes, put %u", number_of(item.key), item.length,
                     items_[i].attempt);
          break;
        case Status::kExists:
          REQUIRE(held);
          ++world_.tally.existed;
          break;
        case Status::kStale:
          REQUIRE_FALSE(current);
          ++world_.tally.stale;
          break;
        default:
          REQUIRE(items_[i].told == Status::kOutOfSpace);
          if (!refused && !stuck) checker().refused(item.length, keys_);
          refused = true;
          ++world_.tally.refused;
          world_.say("no room for %u, %lu bytes", number_of(item.key), item.length);
      }
    }
  }

  // Half of each granted block at a time; false once all are whole.
  bool write() {
    if (world_.below(3) == 0 && version_ == core().space.version &&
        session_->reserve_more(*batch_, chain_, world_.now)) {
      admit(false);
    }
    bool wrote = false;
    for (size_t i = 0; i < items_.size(); ++i) {
      GrantBatch::Item& item = batch_->items[i];
      Item& own = items_[i];
      if (own.attempt == 0 || own.written == item.length) continue;
      const uint64_t end = own.written == 0 && item.length > 1 ? item.length / 2 : item.length;
      const uint32_t block = number_of(item.key);
      write_slot(core(), item.taken.slot, block, own.attempt, own.written, end);
      own.written = end;
      wrote = true;
      if (end < item.length) continue;
      const auto parts = checksums(payload(block, own.attempt, item.length), kSimulatedPart);
      std::ranges::copy(parts, item.parts.begin());
    }
    return wrote;
  }

  void end() {
    const bool aborts = world_.below(1000) < world_.plan.abort_permille;
    const size_t upto = aborts ? 0 : items_.size() - (world_.below(8) == 0 ? 1 : 0);
    std::vector<Status> expected(items_.size());
    for (size_t i = 0; i < items_.size(); ++i) {
      expected[i] = batch_->statuses[i];
      if (expected[i] == Status::kExists && batch_->version != session_->space().version.load()) {
        expected[i] = Status::kStale;  // it was held at reserve, and cleared since
      }
      if (items_[i].attempt == 0) continue;
      checker().written(items_[i].attempt);
      expected[i] = i < upto ? checker().expected(items_[i].attempt) : Status::kCancelled;
    }
    REQUIRE(session_->commit(batch_->id, upto, Status::kCancelled));
    REQUIRE(batch_->statuses == expected);
    for (size_t i = 0; i < items_.size(); ++i) {
      if (items_[i].attempt == 0) continue;
      const bool committed = expected[i] == Status::kOk;
      checker().ended(items_[i].attempt, committed);
      world_.tally.committed += committed ? 1 : 0;
      world_.tally.existed += expected[i] == Status::kExists ? 1 : 0;
      world_.tally.stale += expected[i] == Status::kStale ? 1 : 0;
      world_.tally.aborted += expected[i] == Status::kCancelled ? 1 : 0;
      world_.say("end put %u of %u: status %d", items_[i].attempt, number_of(batch_->items[i].key),
                 static_cast<int>(expected[i]));
    }
    come_late();
  }

  // The attempt is over; saying so again does nothing.
  void come_late() {
    if (world_.below(2) == 0) {
      REQUIRE_FALSE(session_->commit(batch_->id, items_.size(), Status::kCancelled));
    } else {
      REQUIRE_FALSE(session_->abort(batch_->id));
    }
    world_.tally.late += died_ ? 1 : 0;
    batch_ = nullptr;
  }

  std::shared_ptr<GrantBatch> batch_;
  std::vector<uint64_t> lengths_;
  std::vector<Item> items_;
  uint32_t version_ = 0;
  bool chain_ = true;
  bool died_ = false;
  int asleep_until_ = 0;
};

// A peer with a lease on what it looked up.
class Leaseholder : public Peer {
 public:
  using Peer::Peer;
  bool idle() const override { return lease_ == nullptr; }

 protected:
  void lookup() {
    choose_keys();
    choose_session();
    const bool run = world_.below(2) == 0;
    std::vector<bool> held;
    for (const BlockKey& key : keys_) {
      held.push_back(core().blocks.holds(key, core().space));
      if (run && !held.back()) break;
    }
    if (run && !held.back()) held.pop_back();
    version_ = core().space.version;
    lease_ = session_->lookup(keys_, 0, run, world_.now);
    REQUIRE(lease_->items.size() == held.size());
    for (size_t i = 0; i < held.size(); ++i) REQUIRE(lease_->items[i].has_value() == held[i]);
    checker().leased(lease_);
  }
  void release() {
    const Released released = session_->release(*lease_);
    REQUIRE((released == Released::kRevoked) == lease_->revoked);
    REQUIRE(lease_->ended);
    world_.tally.revoked += lease_->revoked ? 1 : 0;
    if (lease_->revoked) world_.say("reader of %u is told: revoked", number_of(keys_[0]));
    lease_ = nullptr;
  }

  std::shared_ptr<LeaseBatch> lease_;
  uint32_t version_ = 0;  // of the namespace, at the lookup
};

// lookup, begin_read, copy half, copy the rest, end_read with the check, release; now and then the
// release is asked for in the middle of the read.
class Reader final : public Leaseholder {
 public:
  using Leaseholder::Leaseholder;

  void step() override {
    switch (stage_) {
      case Stage::kLookup:
        if (world_.healing) return;
        lookup();
        break;
      case Stage::kBegin:
        if (!session_->begin_read(*lease_)) {
          REQUIRE(lease_->ended);  // revoked, or the session died
          stage_ = Stage::kRelease;
          return;
        }
        copies_.assign(lease_->items.size(), {});
        break;
      case Stage::kHalf:
      case Stage::kRest:
        copy();
        if (world_.below(8) == 0) REQUIRE(session_->release(*lease_) == Released::kHeld);
        break;
      case Stage::kCheck:
        check();
        session_->end_read(*lease_);
        break;
      case Stage::kRelease:
        release();
        stage_ = Stage::kLookup;
        return;
    }
    stage_ = static_cast<Stage>(static_cast<int>(stage_) + 1);
  }

 private:
  enum class Stage { kLookup, kBegin, kHalf, kRest, kCheck, kRelease };

  void copy() {
    for (size_t i = 0; i < lease_->items.size(); ++i) {
      const auto& found = lease_->items[i];
      if (!found) continue;
      checker().unmoved(*found);
      const uint64_t end = stage_ == Stage::kHalf ? found->length / 2 : found->length;
      visit_slot(core(), found->slot, copies_[i].size(), end - copies_[i].size(),
                 [&](std::span<uint8_t> piece, uint64_t) {
                   copies_[i].insert(copies_[i].end(), piece.begin(), piece.end());
                 });
    }
  }

  void check() {
    for (size_t i = 0; i < lease_->items.size(); ++i) {
      const auto& found = lease_->items[i];
      if (!found) continue;
      checker().unmoved(*found);
      REQUIRE(copies_[i].size() == found->length);
      if (std::ranges::equal(checksums(copies_[i], kSimulatedPart), found->parts)) {
        checker().read(number_of(keys_[i]), copies_[i], version_);
        ++world_.tally.reads;
        continue;
      }
      // The reader only complains; the owner's own check decides, and drops the block.
      REQUIRE(checker().is_rotted(*found));
      const bool in_table = is_current(keys_[i], *found);
      REQUIRE_FALSE(core().blocks.check(found->entry));
      if (in_table) checker().gone(keys_[i]);
      ++world_.tally.corrupt;
      world_.say("corrupt %u", number_of(keys_[i]));
    }
  }

  // Whether the key still names the block under our lease.
  bool is_current(const BlockKey& key, const Found& found) {
    const auto now = core().blocks.lease(key, core().space, 0);
    if (!now) return false;
    core().blocks.release(now->entry);
    return now->slot == found.slot && now->generation == found.generation;
  }

  Stage stage_ = Stage::kLookup;
  std::vector<std::vector<uint8_t>> copies_;
};

// Holds views, some for ever, and looks at the bytes where they stand.
class Viewer final : public Leaseholder {
 public:
  using Leaseholder::Leaseholder;

  void step() override {
    if (lease_ == nullptr) {
      if (!world_.healing) open();
      return;
    }
    const auto& found = lease_->items[world_.below(lease_->items.size())];
    if (found) {
      checker().unmoved(*found);
      if (!checker().is_rotted(*found)) {
        const size_t i = static_cast<size_t>(&found - lease_->items.data());
        checker().read(number_of(keys_[i]), read_slot(core(), found->slot, found->length),
                       version_);
      }
    }
    if (world_.healing || world_.step >= until_) {
      REQUIRE_FALSE(lease_->revoked);
      release();
    }
  }

 private:
  void open() {
    lookup();
    const uint64_t bytes = core().limits.view_bytes;
    const bool granted = session_->make_view(*lease_);
    REQUIRE(granted == (bytes + lease_->bytes <= core().limits.view_bytes_max));
    ++(granted ? world_.tally.views : world_.tally.views_refused);
    if (!granted || lease_->items.empty()) {
      release();
      return;
    }
    until_ = world_.below(4) == 0 ? INT32_MAX : world_.step + static_cast<int>(world_.below(200));
    world_.say("view of %u until %d", number_of(keys_[0]), until_);
  }

  int until_ = 0;
};

// Everything else that happens to a node: background eviction, revoking, removal, pins, clears;
// deaths and rot.
class Operator final : public Peer {
 public:
  using Peer::Peer;
  bool idle() const override { return true; }

  void step() override {
    const BlockKey key = key_of(static_cast<uint32_t>(world_.below(world_.plan.keys)));
    if (world_.chance(world_.plan.clear_permille)) {
      world_.say("clear: version %u", core().blocks.clear(core().space));
      checker().cleared();
    }
    if (world_.chance(world_.plan.death_permille)) {
      node_.kill(world_.below(node_.sessions.size()));
      ++world_.tally.deaths;
      world_.say("a session dies");
    }
    if (world_.chance(world_.plan.rot_permille)) rot(key);
    const bool held = core().blocks.holds(key, core().space);
    switch (world_.below(5)) {
      case 0:
        core().blocks.refill_reserves();
        break;
      case 1:
        for (const auto& session : node_.sessions) session->revoke_overdue(world_.now);
        break;
      case 2:
        REQUIRE(core().blocks.touch(key, core().space, make_stamp(core().blocks.next_batch(), 0)) ==
                held);
        break;
      case 3:
        if (world_.below(2) == 0 && !world_.healing) {
          REQUIRE(core().blocks.pin(key, core().space) == held);
          if (held) checker().pinned(key, 1);
        } else {
          const bool pinned = checker().is_pinned(key);
          REQUIRE(core().blocks.unpin(key, core().space) == pinned);
          if (pinned) checker().pinned(key, -1);
        }
        break;
      default:
        if (world_.below(3) != 0 || world_.healing) break;
        REQUIRE(core().blocks.remove(key, core().space) == held);
        checker().gone(key);
        world_.say("remove %u: %s", number_of(key), held ? "held" : "not held");
    }
  }

 private:
  void rot(const BlockKey& key) {
    const auto found = core().blocks.lease(key, core().space, 0);
    if (!found) return;
    visit_slot(core(), found->slot, world_.below(found->length), 1,
               [](std::span<uint8_t> piece, uint64_t) { piece[0] ^= 0x10; });
    checker().rotted(found->slot);
    core().blocks.release(found->entry);
    world_.say("rot in %u", number_of(key));
  }
};

}  // namespace kvstore
