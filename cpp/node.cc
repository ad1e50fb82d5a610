#include "node.h"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <random>

namespace kvstore {
namespace {

constexpr uint32_t kPopulateFrames =
    16;  // 32 MiB a step: first puts need not wait for the whole pool

// Background scrubbing: at most 16 MiB a second, a few thousandths of one core.
constexpr std::chrono::milliseconds kScrubPause{250};
constexpr uint64_t kScrubBytes = uint64_t{4} << 20;
constexpr uint32_t kScrubBlocks = 1000;

constexpr Nanos kLookAgain = 10 * kMillisecond;  // while waiting for a lapsed lease's reader

uint64_t random_word() {
  uint64_t word = 0;
  while (getrandom(&word, sizeof word, 0) != static_cast<ssize_t>(sizeof word)) {
  }
  return word;
}

// Names of grants, leases and tickets. One generator a thread, seeded by the kernel: a system call
// per batch would cost as much as the batch.
uint64_t next_random() {
  thread_local std::mt19937_64 generator(random_word());
  return generator();
}

std::chrono::steady_clock::time_point to_time_point(Nanos when) {
  return std::chrono::steady_clock::time_point(std::chrono::nanoseconds(when));
}

std::string mib(uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

}  // namespace

std::shared_ptr<Node> Node::open(const NodeOptions& options, std::string* error) {
  auto segment = Segment::create({options.dram_bytes, options.lock_memory}, error);
  if (segment == nullptr) return nullptr;
  // In a forked child the threads are gone: what the parent owns is left alone.
  return {new Node(std::move(segment), options), [owner = getpid()](Node* node) {
            if (getpid() == owner) delete node;
          }};
}

Node::Node(std::unique_ptr<Segment> segment, const NodeOptions& options)
    : segment_(std::move(segment)),
      pool_(*segment_),
      blocks_(*segment_, pool_, {random_word(), options.reserve_blocks, options.log_evictions}),
      copier_(options.copy_threads) {
  limits_.lease = options.lease;
  limits_.grant = options.grant;
  limits_.view_bytes_max =
      static_cast<uint64_t>(options.view_fraction * static_cast<double>(segment_->bytes()));
  limits_.stuck_bytes_max = segment_->bytes() / 4;
  limits_.random = next_random;
  blocks_.set_growing(true);
  try {
    populator_ = std::thread([this] { populate(); });
    evictor_ = std::thread([this] { evict_in_background(); });
#ifndef __SANITIZE_THREAD__  // it looks at memory that others may write, and then forgets it
    scrubber_ = std::thread([this] { scrub_in_background(); });
#endif
  } catch (...) {
    stop();
    throw;
  }
}

Node::~Node() { stop(); }

void Node::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  evict_.notify_all();
  room_.notify_all();
  scrub_.notify_all();
  for (std::thread* thread : {&populator_, &evictor_, &scrubber_}) {
    if (thread->joinable()) thread->join();
  }
}

std::shared_ptr<Session> Node::open_session(const std::string& namespace_digest,
                                            uint64_t part_bytes) {
  Namespace* const space = blocks_.open_namespace(namespace_digest);
  const auto part_size = blocks_.part_size(part_bytes);
  if (space == nullptr || !part_size) return nullptr;
  auto session = std::make_shared<Session>(blocks_, *space, limits_, part_bytes, *part_size);
  const std::lock_guard lock(mutex_);
  std::erase_if(sessions_, [](const auto& gone) { return gone.expired(); });
  sessions_.push_back(session);
  return session;
}

std::vector<std::shared_ptr<Session>> Node::sessions() {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Session>> alive;
  for (const auto& session : sessions_) {
    if (auto held = session.lock()) alive.push_back(std::move(held));
  }
  return alive;
}

std::shared_ptr<LeaseBatch> Node::redeem(const AttemptId& ticket, Session& session) {
  for (const auto& issuer : sessions()) {
    if (&issuer->space() != &session.space()) continue;
    const auto batch = issuer->find_ticket(ticket);
    if (batch != nullptr) return session.adopt(*issuer, *batch, monotonic_now());
  }
  return nullptr;
}

// ---- population --------------------------------------------------------------------------------

void Node::populate() {
  const uint32_t frames = segment_->num_frames();
  for (uint32_t first = 0; first < frames; first += kPopulateFrames) {
    const uint32_t count = std::min(kPopulateFrames, frames - first);
    std::string error;
    const bool done = segment_->populate(first, count, &error);
    if (done) pool_.add_frames(first, count);
    {
      const std::lock_guard lock(mutex_);
      if (!done) population_error_ = error;
      if (!done || stopping_) break;
    }
    room_freed();
  }
  blocks_.set_growing(false);
  {
    const std::lock_guard lock(mutex_);
    ++refills_wanted_;
  }
  evict_.notify_one();
  room_freed();
}

std::string Node::population_error() const {
  const std::lock_guard lock(mutex_);
  return population_error_;
}

// ---- room --------------------------------------------------------------------------------------

void Node::room_freed() {
  frees_.fetch_add(1);
  if (num_waiting_.load() == 0) return;  // a waiter counts itself before it looks at frees_
  const std::lock_guard lock(mutex_);
  room_.notify_all();
}

void Node::room_used(uint64_t length) {
  if (blocks_.reserve_full(shape_of(length))) return;
  {
    const std::lock_guard lock(mutex_);
    ++refills_wanted_;
  }
  evict_.notify_one();
}

void Node::evict_in_background() {
  std::unique_lock lock(mutex_);
  while (true) {
    evict_.wait(lock, [this] { return stopping_ || refills_wanted_ != refills_done_; });
    if (stopping_) return;
    const uint64_t wanted = refills_wanted_;
    lock.unlock();
    blocks_.refill_reserves();
    lock.lock();
    refills_done_ = wanted;
    frees_.fetch_add(1);
    room_.notify_all();
  }
}

void Node::scrub_in_background() {
  std::unique_lock lock(mutex_);
  while (!scrub_.wait_for(lock, kScrubPause, [this] { return stopping_; })) {
    lock.unlock();
    blocks_.scrub(kScrubBytes, kScrubBlocks);
    lock.lock();
  }
}

// What stands in the way of room; what is overdue goes at once.
Node::Outlook Node::look_for_room(Nanos now) {
  Outlook outlook;
  for (const auto& session : sessions()) {
    outlook.revoked += session->revoke_overdue(now);
    outlook.granted += session->num_granted();
    outlook.lapse = std::min(outlook.lapse, session->first_lapse());
  }
  return outlook;
}

bool Node::room_may_come(uint64_t own) {
  const auto [granted, revoked, lapse] = look_for_room(monotonic_now());
  return populating() || revoked > 0 || lapse != kNever || granted > own;
}

bool Node::wait_for_room(uint64_t own, uint64_t frees, Nanos deadline) {
  const Nanos now = monotonic_now();
  if (now >= deadline) return false;
  const auto [granted, revoked, lapse] = look_for_room(now);
  if (revoked > 0) return true;
  // A lapse gives no signal, nor does the end of a read under a lapsed lease: look again then.
  const Nanos again = lapse == kNever ? deadline : std::max(lapse + 1, now + kLookAgain);
  num_waiting_.fetch_add(1);
  std::unique_lock lock(mutex_);
  granted_to_waiting_ += own;
  // Puts that all wait for one another would wait for ever: the last to come takes what it has.
  const bool hopeless = !populating() && granted <= granted_to_waiting_ && lapse == kNever;
  if (!hopeless) {
    room_.wait_until(lock, to_time_point(std::min(deadline, again)),
                     [&] { return stopping_ || frees_.load() != frees; });
  }
  granted_to_waiting_ -= own;
  num_waiting_.fetch_sub(1);
  return hopeless ? frees_.load() != frees : !stopping_;
}

bool Node::settle(Nanos deadline) {
  std::unique_lock lock(mutex_);
  return room_.wait_until(lock, to_time_point(deadline),
                          [this] { return !populating() && refills_wanted_ == refills_done_; });
}

std::string Node::describe_shortage(uint64_t length) {
  const PoolUsage usage = pool_.usage();
  std::string text = "pool full: a block needs " + std::to_string(shape_bytes(shape_of(length))) +
                     " bytes, " + mib(usage.free_bytes) + " of " + mib(usage.capacity_bytes) +
                     " free (longest run " + mib(uint64_t{usage.largest_free_run} * kFrameBytes) +
                     "), " + std::to_string(blocks_.num_pinned()) + " blocks pinned, " +
                     std::to_string(blocks_.num_leased()) + " leased, " +
                     mib(limits_.view_bytes.load()) + " held by views";
  const std::string error = population_error();
  if (!error.empty()) text += "; the pool stopped growing: " + error;
  return text;
}

uint64_t Node::num_granted() {
  uint64_t granted = 0;
  for (const auto& session : sessions()) granted += session->num_granted();
  return granted;
}

uint64_t Node::stuck_bytes() {
  uint64_t bytes = 0;
  for (const auto& session : sessions()) bytes += session->stuck_bytes(monotonic_now());
  return bytes;
}

std::string Node::audit() {
  uint64_t leased = 0;
  for (const auto& session : sessions()) leased += session->num_leased();
  return blocks_.audit(num_granted(), leased);
}

}  // namespace kvstore
