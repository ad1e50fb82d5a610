// Watches one node of a simulation from outside: keeps its own ledger of what was put, of who may
// write where and of who reads where, and fails the run (doctest) on the first contradiction.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core.h"

namespace kvstore {

inline constexpr uint64_t kSimulatedPart = 256 << 10;

class Checker {
 public:
  explicit Checker(Core& core) : core_(core) {}

  // ---- puts. Numbers of attempts are never used twice, on any node.

  struct Put {
    uint32_t block;
    uint64_t length;
    uint32_t version;
    bool committed = false;
  };

  // Item `i` of `batch` has been granted: nobody else may have a byte of its memory.
  void granted(const GrantBatch& batch, size_t i, uint32_t attempt) {
    const GrantBatch::Item& item = batch.items[i];
    REQUIRE(attempt != 0);
    REQUIRE(
        puts_.try_emplace(attempt, Put{number_of(item.key), item.length, batch.version}).second);
    Claim claim{item.taken.slot, item.taken.generation, attempt, nullptr,
                core_.pool.extents(item.taken.slot, item.length)};
    drop_ended();
    for (const Claim& other : claims_) REQUIRE_FALSE(overlap(claim, other));
    claims_.push_back(std::move(claim));
  }

  // The writer is about to commit: what it wrote still stands there.
  void written(uint32_t attempt) const {
    const auto at = std::ranges::find(claims_, attempt, &Claim::attempt);
    REQUIRE(at != claims_.end());
    const Put& put = puts_.at(attempt);
    REQUIRE(header(at->slot).generation.load() == at->generation);
    REQUIRE(payload_fault(read_slot(core_, at->slot, put.length), put.block, attempt) == "");
  }

  // Exactly what a commit must answer, asked before it.
  Status expected(uint32_t attempt) const {
    const Put& put = puts_.at(attempt);
    if (put.version != core_.space.version.load()) return Status::kStale;
    return core_.blocks.holds(key_of(put.block), core_.space) ? Status::kExists : Status::kOk;
  }
  void ended(uint32_t attempt, bool committed) {
    REQUIRE(std::erase_if(claims_, [&](const Claim& c) { return c.attempt == attempt; }) == 1);
    Put& put = puts_.at(attempt);
    put.committed = committed;
    if (committed) REQUIRE(core_.blocks.holds(key_of(put.block), core_.space));
  }

  // A block of `length` bytes was refused, by a batch that has used `keys`.
  void refused(uint64_t length, std::span<const BlockKey> keys) {
    const Shape shape = shape_of(length);
    const uint32_t wanted = shape.frames + (shape.tail == kNoTail ? 0 : 1);
    REQUIRE(evictable_frames(keys) < wanted);
  }

  // ---- gets

  void leased(const std::shared_ptr<LeaseBatch>& batch) {
    drop_ended();
    for (const auto& found : batch->items) {
      if (!found) continue;
      REQUIRE(found->generation % 2 == 0);
      REQUIRE(header(found->slot).generation.load() == found->generation);
      Claim claim{found->slot, found->generation, 0, batch,
                  core_.pool.extents(found->slot, found->length)};
      for (const Claim& other : claims_) {
        if (overlap(claim, other)) {  // two readers of one block share it, nobody else
          REQUIRE(other.lease != nullptr);
          REQUIRE((other.slot == claim.slot && other.generation == claim.generation));
        }
      }
      claims_.push_back(std::move(claim));
    }
  }

  // Under an open lease: the slot is still the one that was leased.
  void unmoved(const Found& found) const {
    REQUIRE(header(found.slot).generation.load() == found.generation);
  }

  // A read that passed its checksums: what some put committed under this key, since the last clear
  // before the lookup, and nothing else.
  void read(uint32_t block, std::span<const uint8_t> bytes, uint32_t version) const {
    const auto is_put = [&](const auto& record) {
      const auto& [attempt, put] = record;
      return put.committed && put.block == block && put.length == bytes.size() &&
             put.version == version && payload_fault(bytes, block, attempt).empty();
    };
    if (bytes.size() < 3) {
      REQUIRE(std::ranges::any_of(puts_, is_put));
      return;
    }
    const auto at = puts_.find(payload_attempt(bytes));
    REQUIRE(at != puts_.end());
    REQUIRE(payload_fault(bytes, block, at->first) == "");
    REQUIRE(is_put(*at));
  }

  // ---- faults and holds

  // A bit of this block was flipped: checksums must say so from now on.
  void rotted(SlotId slot) { rotted_.insert({slot, header(slot).generation.load()}); }
  bool is_rotted(const Found& found) const {
    return rotted_.contains({found.slot, found.generation});
  }

  void pinned(const BlockKey& key, int change) {
    if ((pins_[number_of(key)] += change) == 0) pins_.erase(number_of(key));
  }
  bool is_pinned(const BlockKey& key) const { return pins_.contains(number_of(key)); }
  void gone(const BlockKey& key) {  // removed, or dropped as corrupt
    pins_.erase(number_of(key));
    REQUIRE_FALSE(core_.blocks.holds(key, core_.space));
  }
  void cleared() {
    pins_.clear();
    REQUIRE(core_.space.blocks == 0);
    REQUIRE(core_.blocks.list(core_.space).empty());
  }

  // ---- the whole

  // No slot has two owners, no pinned block has gone, and the node's own audit agrees.
  void census(uint64_t grants, uint64_t leases) {
    drop_ended();
    REQUIRE(core_.blocks.audit(grants, leases) == "");
    std::map<uint64_t, uint64_t> ranges;  // begin → end
    const auto add = [&](SlotId slot, uint64_t length) {
      for (const Extent& extent : core_.pool.extents(slot, length)) {
        if (extent.bytes == 0) continue;
        const auto next = ranges.upper_bound(extent.offset);
        if (next != ranges.end()) REQUIRE(extent.offset + extent.bytes <= next->first);
        if (next != ranges.begin()) REQUIRE(std::prev(next)->second <= extent.offset);
        ranges[extent.offset] = extent.offset + extent.bytes;
      }
    };
    std::set<SlotId> seen;
    for (uint32_t frame = 0; frame < core_.pool.num_frames(); ++frame) {
      for (const Pool::Tenant& tenant : core_.pool.tenants(frame).tenants) {
        if (tenant.entry == kNoEntry || !seen.insert(tenant.slot).second) continue;
        add(tenant.slot, header(tenant.slot).length);
      }
    }
    for (const Claim& claim : claims_) {
      if (claim.lease == nullptr) add(claim.slot, puts_.at(claim.attempt).length);
    }
    for (const auto& [block, pins] : pins_) {
      CAPTURE(block);
      REQUIRE(core_.blocks.holds(key_of(block), core_.space));
    }
  }
  bool nothing_claimed() {
    drop_ended();
    return claims_.empty();
  }

 private:
  struct Claim {
    SlotId slot;
    uint64_t generation;
    uint32_t attempt;                   // of a writer
    std::shared_ptr<LeaseBatch> lease;  // of a reader
    std::vector<Extent> extents;
  };

  static bool overlap(const Claim& a, const Claim& b) {
    for (const Extent& x : a.extents) {
      for (const Extent& y : b.extents) {
        if (x.offset < y.offset + y.bytes && y.offset < x.offset + x.bytes) return true;
      }
    }
    return false;
  }
  const SlotHeader& header(SlotId slot) const { return core_.segment->header(slot); }
  void drop_ended() {
    std::erase_if(claims_, [](const Claim& c) { return c.lease != nullptr && c.lease->ended; });
  }
  // Free, or filled with blocks that nobody holds and that are not in `used`.
  uint32_t evictable_frames(std::span<const BlockKey> used) {
    drop_ended();
    uint32_t frames = 0;
    for (uint32_t frame = 0; frame < core_.pool.num_frames(); ++frame) {
      frames += std::ranges::all_of(core_.pool.tenants(frame).tenants, [&](const auto& tenant) {
        const BlockKey& key = header(tenant.slot).key;
        return tenant.entry != kNoEntry &&
               std::ranges::find(claims_, tenant.slot, &Claim::slot) == claims_.end() &&
               !pins_.contains(number_of(key)) && std::ranges::find(used, key) == used.end();
      });
    }
    return frames;
  }

  Core& core_;
  std::map<uint32_t, Put> puts_;  // by attempt
  std::vector<Claim> claims_;
  std::map<uint32_t, int> pins_;
  std::set<std::pair<SlotId, uint64_t>> rotted_;
};

}  // namespace kvstore
