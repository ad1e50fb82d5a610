// A peer's standing at a node: the grants and leases it holds, and nothing else of it.
//
// Grants and leases are taken and ended by the batch, under one name. A grant's name is random (an
// attempt id): a late commit or abort finds nothing and is refused. A lease is (block, generation);
// a *copying* lease may be revoked once its deadline has passed and nobody is reading by it, a
// *view* never ends but by release. Overdue grants end by commit or abort only: their memory stays
// out of use and is counted as stuck.
//
// Threads: any; one mutex a session, taken before the table's. No clock in here: `now` is an
//   argument.
// Owns: what it names. end() gives back everything but views, end_all() those too.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "blocks.h"
#include "status.h"
#include "types.h"

namespace kvstore {

enum class LeaseKind : uint8_t { kCopying, kView };
enum class Released : uint8_t { kHeld, kRevoked };

// Bounds and counts shared by all sessions of a node.
struct SessionLimits {
  Nanos lease = 30'000 * kMillisecond;
  Nanos grant = 60'000 * kMillisecond;  // after this a grant counts as stuck
  uint64_t view_bytes_max = 0;
  uint64_t stuck_bytes_max = 0;  // per session; beyond it nothing more is granted
  std::function<uint64_t()> random;
  std::atomic<uint64_t> view_bytes{0};
};

// A put under way. `statuses[i]` is kOk while item i is granted.
struct GrantBatch {
  struct Item {
    BlockKey key;
    uint64_t length = 0;
    Stamp stamp = 0;
    Pool::Taken taken{kNoSlot, 0};
    std::vector<Extent> extents;                 // filled by the transport that writes
    std::vector<std::optional<uint32_t>> parts;  // checksum per part; empty: not written yet
    std::string text;
  };
  AttemptId id;
  uint32_t version = 0;
  Nanos deadline = kNever;
  bool parent_held = false;
  uint64_t part_bytes = 0;
  std::vector<Status> statuses;
  std::vector<Item> items;
  std::vector<BlockKey> skipped;  // what the engine already had; kept while items lack room
  uint32_t writing = 0;           // writers at work on its slots; guarded by the session
  bool given_up = false;          // it ends with the last of them
};

// What a put names: the whole chain, of which the first `skip` blocks are not sent.
struct PutRequest {
  std::span<const BlockKey> keys;
  size_t skip = 0;
  std::span<const uint64_t> lengths;   // of keys[skip..]
  std::span<const std::string> texts;  // empty, or one a key
  uint32_t version = 0;
  bool chain =
      true;  // later blocks are useless without earlier ones: stop at the first that finds no room
  AttemptId attempt{};  // zero: the session chooses one; else it is not in use
};

// Blocks under lease. Items are constant; `reading` and `ended` are guarded by the session.
struct LeaseBatch {
  uint64_t id = 0;
  AttemptId ticket;  // zero until asked for
  LeaseKind kind = LeaseKind::kCopying;
  Nanos deadline = kNever;
  std::vector<std::optional<Found>> items;
  uint64_t bytes = 0;
  uint32_t reading = 0;
  bool release_asked = false;
  bool revoked = false;
  bool ended = false;
};

class Session {
 public:
  // What it puts is cut into parts of `part_bytes`, the last one shorter.
  Session(Blocks& blocks, Namespace& space, SessionLimits& limits,
          uint64_t part_bytes = kOpaquePartBytes, PartSizeId part_size = 0)
      : blocks_(blocks),
        space_(space),
        limits_(limits),
        part_bytes_(part_bytes),
        part_size_(part_size) {}
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  Namespace& space() const { return space_; }
  uint64_t part_bytes() const { return part_bytes_; }

  // ---- put: reserve → write → commit | abort
  // Grants what it can. An item without room is kOutOfSpace, and with it, in a chain, all that
  // follow.
  std::shared_ptr<GrantBatch> reserve(const PutRequest& request, Nanos now);
  // Tries again for the items left kOutOfSpace, the chain being the youngest again; true if any was
  // granted.
  bool reserve_more(GrantBatch& batch, bool chain, Nanos now);
  // Commits the granted items before `end` and gives up the others with `otherwise`; an item with
  // an unwritten part is given up as kCancelled. False: no such attempt.
  bool commit(const AttemptId& id, size_t end, Status otherwise);
  bool abort(const AttemptId& id) { return commit(id, 0, Status::kCancelled); }
  // Between begin_write (true) and end_write the slots stay granted, whatever ends the put: bytes
  // are on their way into them. A commit meanwhile is refused.
  bool begin_write(GrantBatch& batch);
  void end_write(GrantBatch& batch);
  // Nobody begins to write from now on. False: somebody is at it, and the put ends with them.
  bool close_to_writers(GrantBatch& batch);

  // ---- get: lookup → read → release
  // Leases every key that is held; with `run`, only the leading run; with `begin_read` as if that
  // had been called, so that not even the shortest lease can lapse before.
  std::shared_ptr<LeaseBatch> lookup(std::span<const BlockKey> keys, size_t skip, bool run,
                                     Nanos now, bool begin_read = false);
  // Between begin_read (true) and end_read nothing under the lease moves.
  bool begin_read(LeaseBatch& batch);
  void end_read(LeaseBatch& batch);
  Released release(LeaseBatch& batch);
  // Copying leases become views, within the bound; false if it is reached or the lease is gone. A
  // guess that views will be wanted takes no more than half of it.
  bool make_view(LeaseBatch& batch, bool guess = false);
  AttemptId ticket(LeaseBatch& batch);
  // Leases of the same blocks for another session, if this one has issued `ticket` and still holds
  // it.
  std::shared_ptr<LeaseBatch> find_ticket(const AttemptId& ticket);
  std::shared_ptr<LeaseBatch> adopt(Session& issuer, LeaseBatch& batch, Nanos now);

  // ---- time and end
  // Ends copying leases whose deadline has passed; the number of blocks let go.
  size_t revoke_overdue(Nanos now);
  uint64_t stuck_bytes(Nanos now) const;
  void end();
  // The peer cannot be reached: what it only copies by is let go.
  void end_copying();
  // The peer is dead: views too. Nothing is granted or leased any more.
  void end_all();
  // The same, if it holds no grant and no view; else false.
  bool end_all_if_idle();

  uint64_t num_granted() const;  // blocks
  Nanos first_lapse() const;     // earliest deadline of a copying lease; kNever: none
  uint64_t num_leased() const;

 private:
  Status commit_item(const GrantBatch& batch, GrantBatch::Item& item, std::vector<uint32_t> parts);
  bool grant_items(GrantBatch& batch, bool chain);
  void let_go(LeaseBatch& batch, bool revoked);
  void let_go_of(bool views);
  void give_up(GrantBatch& batch);
  void keep(const std::shared_ptr<LeaseBatch>& batch, Nanos now);

  Blocks& blocks_;
  Namespace& space_;
  SessionLimits& limits_;
  const uint64_t part_bytes_;
  const PartSizeId part_size_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::unordered_map<uint64_t, std::shared_ptr<GrantBatch>>
      grants_;  // by the attempt id's high half
  std::unordered_map<uint64_t, std::shared_ptr<LeaseBatch>> leases_;
  bool over_ = false;  // what is reserved or leased beside the end is given back at once
};

}  // namespace kvstore
