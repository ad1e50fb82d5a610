// A node inside a process: the shell around the core. It has the clock and the threads; what is
// decided, is decided in pool, blocks and session.
//
// Threads: any. Its own: one populates the memory, one evicts in the background, the copier's help
//   with copies.
// Owns: everything below it. It outlives its stores; a view keeps it alive.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "blocks.h"
#include "copier.h"
#include "loans.h"
#include "memory.h"
#include "pool.h"
#include "segment.h"
#include "session.h"
#include "types.h"

namespace kvstore {

struct NodeOptions {
  uint64_t dram_bytes = 0;
  bool lock_memory = false;
  uint64_t reserve_blocks = 0;
  double view_fraction = 0.25;
  Nanos lease = 30'000 * kMillisecond;
  Nanos grant = 60'000 * kMillisecond;
  unsigned copy_threads = 0;
  bool log_evictions = false;
};

class Node {
 public:
  // Null with a reason. Returns at once: memory is populated in the background.
  static std::shared_ptr<Node> open(const NodeOptions& options, std::string* error);
  ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  // Null if more namespaces, or sizes of parts, are in use than a node can name.
  std::shared_ptr<Session> open_session(const std::string& namespace_digest, uint64_t part_bytes);
  // Leases of a ticket any session of this node has issued, for `session`.
  std::shared_ptr<LeaseBatch> redeem(const AttemptId& ticket, Session& session);

  Segment& segment() { return *segment_; }
  Pool& pool() { return pool_; }
  Blocks& blocks() { return blocks_; }
  Copier& copier() { return copier_; }
  SessionLimits& limits() { return limits_; }
  Loans& loans() { return loans_; }

  // Waits until something was given back since `frees` was read, or `deadline`. False if waiting is
  // useless: nothing that ends by itself (a put under way, a copying lease, memory still to be
  // populated) stands in the way. `own` grants are the caller's.
  bool wait_for_room(uint64_t own, uint64_t frees, Nanos deadline);
  // Whether such a wait might help.
  bool room_may_come(uint64_t own);
  uint64_t frees() const { return frees_.load(); }
  // After anything that may have made room; after a put of blocks of `length` bytes.
  void room_freed();
  void room_used(uint64_t length);
  // Until eviction has caught up and all memory is populated; false at the deadline.
  bool settle(Nanos deadline);
  bool populating() const { return blocks_.growing(); }
  std::string population_error() const;
  // Why a block of `length` bytes finds no room, for a person.
  std::string describe_shortage(uint64_t length);
  uint64_t num_granted();  // blocks of puts under way
  uint64_t stuck_bytes();
  std::string audit();

 private:
  explicit Node(std::unique_ptr<Segment> segment, const NodeOptions& options);
  struct Outlook {
    uint64_t granted = 0;  // blocks of puts under way
    size_t revoked = 0;    // blocks let go just now
    Nanos lapse = kNever;  // when the first copying lease may be revoked
  };
  Outlook look_for_room(Nanos now);
  void stop();
  void populate();
  void evict_in_background();
  void scrub_in_background();
  std::vector<std::shared_ptr<Session>> sessions();

  std::unique_ptr<Segment> segment_;
  Pool pool_;
  Blocks blocks_;
  SessionLimits limits_;
  Copier copier_;
  Loans loans_;

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<std::weak_ptr<Session>> sessions_;
  std::string population_error_;
  uint64_t refills_wanted_ = 0;
  uint64_t refills_done_ = 0;
  bool stopping_ = false;
  std::condition_variable room_;  // somebody may find room now
  std::atomic<uint64_t> frees_{0};
  std::atomic<uint32_t> num_waiting_{0};  // in wait_for_room
  uint64_t granted_to_waiting_ = 0;       // their `own`
  std::condition_variable evict_;         // the evicting thread has work
  std::thread populator_;
  std::thread evictor_;
  std::condition_variable scrub_;  // only to stop
  std::thread scrubber_;
};

}  // namespace kvstore
