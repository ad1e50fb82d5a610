// Eight threads on one node, through the store as applications use it, with leases that lapse while
// they are read by, and somebody who asks for figures all the time. Made for the sanitizers.
#include <doctest/doctest.h>

#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core.h"
#include "transfers.h"
#include "transport_local.h"

namespace kvstore {
namespace {

constexpr uint32_t kKeys = 300;  // twice what the pool holds
constexpr unsigned kThreads = 8;
constexpr int kRounds = 800;  // a thread
constexpr uint64_t kPartBytes = 4096;

uint64_t length_of(uint32_t number) {
  constexpr uint64_t kLengths[] = {3, 700, 4096, 70'001, 300'000, (2 << 20) + 5'000};
  return kLengths[number % 6];
}

// One application thread: what it does is drawn, what it reads is checked.
class Actor {
 public:
  Actor(LocalStore& store, Transfers& transfers, uint64_t seed)
      : store_(store), transfers_(transfers), random_(seed) {}

  void run() {
    for (int round = 0; round < kRounds; ++round) step();
  }

  std::string fault;
  uint64_t num_checked = 0;

 private:
  void step() {
    const auto number = static_cast<uint32_t>(random_() % kKeys);
    switch (random_() % 12) {
      case 0:
      case 1:
      case 2:
        return put(number);
      case 3:
      case 4:
      case 5:
        return get(number);
      case 6:
        return hold(number);
      case 7:
        return view(number);
      case 8:
        return random_() % 2 == 0 ? get_in_background(number) : put_in_background(number);
      case 9:
        store_.match(keys_of(number, 8), 0, 1);
        store_.apply(KeyOperation::kTouch, keys_of(number, 4));
        return;
      case 10:
        if (store_.apply(KeyOperation::kPin, keys_of(number, 1)) == 1)
          store_.apply(KeyOperation::kUnpin, keys_of(number, 1));
        store_.session().revoke_overdue(monotonic_now());
        return;
      default:
        if (random_() % 100 == 0) {
          store_.clear();
        } else {
          store_.apply(KeyOperation::kRemove, keys_of(number, 1));
        }
    }
  }

  void put(uint32_t number) {
    std::vector<uint8_t> bytes = payload(number, new_attempt(), length_of(number));
    const std::vector<BlockKey> keys = keys_of(number, 1);
    const std::vector<uint64_t> lengths{bytes.size()};
    store_.put({keys, 0, lengths, {}, store_.version(), true}, memory(bytes), limits());
  }

  void get(uint32_t number) {
    std::vector<uint8_t> bytes(length_of(number));
    const GetOutcome outcome = store_.get(keys_of(number, 1), memory(bytes), limits());
    check(outcome.statuses[0], bytes, number);
  }

  void hold(uint32_t number) {
    const auto leases = store_.lookup(keys_of(number, 1), 0, true);
    if (random_() % 4 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // lapses
    if (!leases->items.empty()) {
      std::vector<uint8_t> bytes(length_of(number));
      check(store_.read(*leases, 0, memory(bytes), {}, limits()).statuses[0], bytes, number);
    }
    store_.release(*leases);
  }

  void view(uint32_t number) {
    const auto leases = store_.lookup(keys_of(number, 1), 0, true);
    if (!leases->items.empty() && store_.session().make_view(*leases)) {
      const Found& found = *leases->items[0];
      std::vector<uint8_t> bytes;
      for (const Extent& extent : store_.node().pool().extents(found.slot, found.length)) {
        const uint8_t* const start = store_.node().segment().data() + extent.offset;
        bytes.insert(bytes.end(), start, start + extent.bytes);
      }
      check(Status::kOk, bytes, number);
    }
    store_.release(*leases);
  }

  void get_in_background(uint32_t number) {
    auto bytes = std::make_shared<std::vector<uint8_t>>(length_of(number));
    finish(*submit([this, bytes, number](Transfer& running) {
      running.get = store_.get(keys_of(number, 1), memory(*bytes), limits(&running.cancelled));
      check(running.get.statuses[0], *bytes, number);
    }));
  }

  void put_in_background(uint32_t number) {
    auto bytes =
        std::make_shared<std::vector<uint8_t>>(payload(number, new_attempt(), length_of(number)));
    finish(*submit([this, bytes, number](Transfer& running) {
      const std::vector<BlockKey> keys = keys_of(number, 1);
      const std::vector<uint64_t> lengths{bytes->size()};
      running.put = store_.put({keys, 0, lengths, {}, store_.version(), true}, memory(*bytes),
                               limits(&running.cancelled));
    }));
  }

  std::shared_ptr<Transfer> submit(std::function<void(Transfer&)> work) {
    return transfers_.submit(std::move(work), false);
  }
  void finish(Transfer& transfer) {
    if (random_() % 2 == 0) {
      transfer.cancelled.store(true);
      store_.node().room_freed();
    }
    transfers_.wait(transfer, kNever);
  }

  void check(Status status, const std::vector<uint8_t>& bytes, uint32_t number) {
    if (status != Status::kOk || !fault.empty()) return;
    ++num_checked;
    fault = payload_fault(bytes, number, payload_attempt(bytes));
  }

  static std::vector<BlockMemory> memory(std::vector<uint8_t>& bytes) {
    return {BlockMemory(reinterpret_cast<uintptr_t>(bytes.data()), bytes.size())};
  }
  uint32_t new_attempt() { return 1 + static_cast<uint32_t>(random_() % 0xFFFFFE); }
  static CallLimits limits(const std::atomic<bool>* cancelled = nullptr) {
    return {monotonic_now() + 20'000 * kMillisecond, cancelled};
  }

  LocalStore& store_;
  Transfers& transfers_;
  std::mt19937_64 random_;
};

}  // namespace

TEST_CASE("eight threads get exactly what was put or nothing") {
  NodeOptions options;
  options.dram_bytes = uint64_t{64} << 20;
  options.copy_threads = 2;
  options.view_fraction = 1;
  options.lease = kMillisecond;
  std::string error;
  const auto node = Node::open(options, &error);
  REQUIRE_MESSAGE(node != nullptr, error);
  LocalStore first(node, "first", kPartBytes);
  LocalStore second(node, "second", kPartBytes);  // another namespace over the same memory
  Transfers transfers;
  std::vector<Actor> actors;
  for (unsigned i = 0; i < kThreads; ++i)
    actors.emplace_back(i % 4 == 0 ? second : first, transfers, i);
  std::vector<std::thread> threads;
  for (Actor& actor : actors) threads.emplace_back([&actor] { actor.run(); });
  std::atomic<bool> stopping{false};
  std::thread observer([&] {
    while (!stopping.load()) {
      node->describe_shortage(kFrameBytes);
      node->stuck_bytes();
      node->pool().usage();
      node->blocks().list(first.session().space());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  for (std::thread& thread : threads) thread.join();
  stopping.store(true);
  observer.join();

  uint64_t num_checked = 0;
  for (const Actor& actor : actors) {
    CHECK(actor.fault == "");
    num_checked += actor.num_checked;
  }
  CHECK(num_checked > 100);  // else nothing was read
  CHECK(node->blocks().counters().evictions.load() > 0);
  CHECK(node->settle(monotonic_now() + 20'000 * kMillisecond));
  CHECK(node->num_granted() == 0);
  CHECK(node->blocks().num_leased() == 0);
  CHECK(node->limits().view_bytes == 0);
  CHECK(node->audit() == "");
}

}  // namespace kvstore
