// Background calls: every one ends, is told of once, and can be cancelled.
#include "transfers.h"

#include <doctest/doctest.h>
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <set>
#include <thread>
#include <vector>

#include "core.h"

namespace kvstore {
namespace {

bool readable(int fd, int timeout_ms = 0) {
  pollfd watched{fd, POLLIN, 0};
  return poll(&watched, 1, timeout_ms) == 1;
}

// A call that goes on until it is told to end.
void until_cancelled(Transfer& transfer) {
  while (!transfer.cancelled.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

TEST_CASE("a transfer done where it was submitted needs no worker") {
  Transfers transfers;
  const auto thread = std::this_thread::get_id();
  bool same = false;
  const auto transfer =
      transfers.submit([&](Transfer&) { same = std::this_thread::get_id() == thread; }, true);
  CHECK(same);
  CHECK(transfer->done.load());
}

TEST_CASE("drain names every finished transfer once and quiets the descriptor") {
  Transfers transfers;
  CHECK_FALSE(readable(transfers.event_fd()));
  for (int i = 0; i < 10; ++i) transfers.submit([](Transfer&) {}, i % 2 == 0);
  std::vector<uint64_t> seen;
  while (seen.size() < 10) {
    for (const auto& transfer : transfers.drain()) seen.push_back(transfer->id);
  }
  std::ranges::sort(seen);
  for (uint64_t i = 0; i < 10; ++i) CHECK(seen[i] == i + 1);
  CHECK(transfers.drain().empty());
  CHECK_FALSE(readable(transfers.event_fd()));
}

TEST_CASE("a transfer that was waited for is not drained") {
  Transfers transfers;
  const auto waited = transfers.submit([](Transfer&) {}, false);
  CHECK(transfers.wait(*waited, kNever));
  CHECK(transfers.drain().empty());
  CHECK(transfers.wait(*waited, kNever));  // again is harmless
}

TEST_CASE("waiting ends at its deadline and the transfer goes on") {
  Transfers transfers;
  const auto transfer = transfers.submit(until_cancelled, false);
  CHECK_FALSE(transfers.wait(*transfer, monotonic_now() + 20 * kMillisecond));
  CHECK(transfers.num_unfinished() == 1);
  transfer->cancelled.store(true);
  CHECK(transfers.wait(*transfer, kNever));
  CHECK(transfers.num_unfinished() == 0);
}

TEST_CASE("what a transfer held is gone when it is called done") {
  Transfers transfers;
  auto held = std::make_shared<int>(1);
  const auto transfer = transfers.submit([held](Transfer&) {}, false);
  CHECK(transfers.wait(*transfer, kNever));
  CHECK(held.use_count() == 1);
}

TEST_CASE("destruction cancels what is queued and running, and waits for it") {
  std::atomic<int> ended{0};
  {
    Transfers transfers;
    for (int i = 0; i < 20; ++i) {
      transfers.submit(
          [&](Transfer& transfer) {
            until_cancelled(transfer);
            ended.fetch_add(1);
          },
          false);
    }
  }
  CHECK(ended.load() == 20);
}

TEST_CASE("finished transfers nobody collects are bounded") {
  Transfers transfers;
  for (size_t i = 0; i < Transfers::kFinishedMax; ++i) {
    REQUIRE(transfers.submit([](Transfer&) {}, true) != nullptr);
  }
  CHECK(transfers.submit([](Transfer&) {}, true) == nullptr);
  CHECK(transfers.drain().size() == Transfers::kFinishedMax);
  CHECK(transfers.submit([](Transfer&) {}, true) != nullptr);
}

TEST_CASE("finished transfers are drained in the order of finishing") {
  Transfers transfers;
  const auto slow = transfers.submit(until_cancelled, false);
  const auto here = transfers.submit([](Transfer&) {}, true);
  const auto quick = transfers.submit([](Transfer&) {}, false);
  while (transfers.num_unfinished() > 1) std::this_thread::yield();
  slow->cancelled.store(true);
  while (transfers.num_unfinished() > 0) std::this_thread::yield();
  const std::vector<std::shared_ptr<Transfer>> wanted{here, quick, slow};
  CHECK(transfers.drain() == wanted);
}

TEST_CASE("a loop that sleeps on the event descriptor misses no transfer") {
  constexpr size_t kSubmitters = 3;
  constexpr size_t kEach = 700;
  Transfers transfers;
  std::vector<std::thread> submitters;
  for (size_t i = 0; i < kSubmitters; ++i) {
    submitters.emplace_back([&transfers, i] {
      for (size_t n = 0; n < kEach; ++n) transfers.submit([](Transfer&) {}, n % (i + 2) == 0);
    });
  }
  std::set<uint64_t> seen;
  // Woken for every one of them, or it would sleep until the test fails.
  while (seen.size() < kSubmitters * kEach && readable(transfers.event_fd(), 20'000)) {
    for (const auto& transfer : transfers.drain()) {
      CHECK(transfer->done.load());
      CHECK(seen.insert(transfer->id).second);
    }
  }
  CHECK(seen.size() == kSubmitters * kEach);
  for (std::thread& submitter : submitters) submitter.join();
}

TEST_CASE("the descriptor for awaiting loops is signalled only while somebody awaits") {
  Transfers transfers;
  transfers.submit([](Transfer&) {}, true);
  CHECK_FALSE(readable(transfers.await_fd()));
  transfers.set_awaiting(true);
  transfers.submit([](Transfer&) {}, true);
  CHECK(readable(transfers.await_fd()));
}

TEST_CASE("everybody who waits for one transfer is told") {
  Transfers transfers;
  const auto transfer = transfers.submit(until_cancelled, false);
  std::atomic<int> told{0};
  std::vector<std::thread> waiters;
  for (int i = 0; i < 4; ++i) {
    waiters.emplace_back([&] {
      if (transfers.wait(*transfer, kNever)) told.fetch_add(1);
    });
  }
  transfers.cancel_all();
  for (std::thread& waiter : waiters) waiter.join();
  CHECK(told.load() == 4);
}

// A node of one frame, and somebody else's put that has all of it.
struct FullNode {
  FullNode() {
    NodeOptions options;
    options.dram_bytes = kFrameBytes;
    std::string error;
    node = Node::open(options, &error);
    REQUIRE_MESSAGE(node != nullptr, error);
    REQUIRE(node->settle(kNever));
    store = std::make_unique<LocalStore>(node, "first", kOpaquePartBytes);
    writer = std::make_unique<LocalStore>(node, "first", kOpaquePartBytes);
    grants = writer->reserve({taken, 0, lengths, {}, 1, true}, {});
    REQUIRE(grants->statuses[0] == Status::kOk);
  }
  std::shared_ptr<Transfer> put() {
    return transfers.submit(
        [this](Transfer& running) {
          running.put = store->put({wanted, 0, lengths, {}, 1, true}, memory,
                                   {monotonic_now() + 60'000 * kMillisecond, &running.cancelled});
        },
        false);
  }
  bool wait(Transfer& transfer) {
    return transfers.wait(transfer, monotonic_now() + 20'000 * kMillisecond);
  }

  std::vector<BlockKey> taken = keys_of(1, 1);
  std::vector<BlockKey> wanted = keys_of(2, 1);
  std::vector<uint64_t> lengths{kFrameBytes};
  std::vector<uint8_t> bytes = payload(2, 1, kFrameBytes);
  std::vector<BlockMemory> memory{
      BlockMemory(reinterpret_cast<uintptr_t>(bytes.data()), bytes.size())};
  std::shared_ptr<Node> node;
  std::unique_ptr<LocalStore> store, writer;
  std::shared_ptr<GrantBatch> grants;
  Transfers transfers;  // the last: its work uses the others
};

TEST_CASE("cancelling a put that waits for room ends it at once, whenever it comes") {
  FullNode full;
  std::mt19937_64 random(3);
  for (int round = 0; round < 3000; ++round) {
    const auto transfer = full.put();
    for (uint64_t spin = random() % 3000; spin > 0; --spin) full.node->frees();
    transfer->cancelled.store(true);
    full.node->room_freed();
    REQUIRE(full.wait(*transfer));
    REQUIRE(transfer->put.statuses[0] == Status::kCancelled);
  }
  full.writer->commit(*full.grants, 0, Status::kCancelled);
  CHECK(full.node->audit() == "");
}

TEST_CASE("a put that waits has the room as soon as another's put ends, either way") {
  for (const bool commits : {false, true}) {
    CAPTURE(commits);
    FullNode full;
    const auto transfer = full.put();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // it waits by now
    CHECK_FALSE(transfer->done.load());
    if (commits) full.writer->write(*full.grants, full.memory, {}, {});
    full.writer->commit(*full.grants, commits ? 1 : 0, Status::kCancelled);
    CHECK(full.grants->statuses[0] == (commits ? Status::kOk : Status::kCancelled));
    REQUIRE(full.wait(*transfer));
    CHECK(transfer->put.statuses[0] == Status::kOk);
    CHECK(full.node->audit() == "");
  }
}

}  // namespace kvstore
