// put and get of the embedded store beside others who want the same room.
#include <doctest/doctest.h>

#include <atomic>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "core.h"
#include "transport_local.h"

namespace kvstore {
namespace {

constexpr uint32_t kFrames = 8;

std::shared_ptr<Node> open_node(Nanos lease = 30'000 * kMillisecond) {
  NodeOptions options;
  options.dram_bytes = kFrames * kFrameBytes;
  options.copy_threads = 1;
  options.lease = lease;
  options.view_fraction = 1;
  std::string error;
  auto node = Node::open(options, &error);
  REQUIRE_MESSAGE(node != nullptr, error);
  REQUIRE(node->settle(monotonic_now() + 60'000 * kMillisecond));
  return node;
}

// Blocks of one frame each, all of the same bytes.
struct Chain {
  Chain(uint32_t first, uint32_t count)
      : keys(keys_of(first, count)),
        lengths(count, kFrameBytes),
        bytes(payload(first, 1, kFrameBytes)),
        blocks(count, BlockMemory(reinterpret_cast<uintptr_t>(bytes.data()), bytes.size())) {}
  PutRequest request(LocalStore& store) const {
    return {keys, 0, lengths, {}, store.version(), true};
  }
  std::vector<BlockKey> keys;
  std::vector<uint64_t> lengths;
  std::vector<uint8_t> bytes;
  std::vector<BlockMemory> blocks;
};

}  // namespace

TEST_CASE("two puts that each hold half of the pool do not wait for one another") {
  const auto node = open_node();
  LocalStore first(node, "space", kFrameBytes);
  LocalStore second(node, "space", kFrameBytes);
  const Chain held(1, 4);
  const CallLimits limits{monotonic_now() + 60'000 * kMillisecond, nullptr, true};
  REQUIRE(first.put(held.request(first), held.blocks, limits).statuses.back() == Status::kOk);
  const auto view = first.lookup(held.keys, 0, true);
  REQUIRE(first.session().make_view(*view));

  // Each wants six frames and finds four.
  const Chain a(100, 6);
  const Chain b(200, 6);
  const auto grants_a = first.reserve(a.request(first), limits);
  first.apply(KeyOperation::kRemove, held.keys);
  first.release(*view);
  const auto grants_b = second.reserve(b.request(second), limits);
  const auto granted = [](const GrantBatch& grants) {
    return std::ranges::count(grants.statuses, Status::kOk);
  };
  REQUIRE(granted(*grants_a) == 4);
  REQUIRE(granted(*grants_b) == 4);

  const auto finish = [&limits](LocalStore& store, GrantBatch& grants, const Chain& chain) {
    store.reserve_more(grants, true, limits);
    REQUIRE(store.write(grants, chain.blocks, {}, limits) == Status::kOk);
    store.commit(grants, chain.keys.size(), Status::kOk);
  };
  const Nanos began = monotonic_now();
  std::thread other([&] { finish(second, *grants_b, b); });
  finish(first, *grants_a, a);
  other.join();
  CHECK(monotonic_now() - began < 30'000 * kMillisecond);  // neither waited for its deadline
  // The one that gave up kept its leading run until the other took from its end.
  const auto smaller = std::min(granted(*grants_a), granted(*grants_b));
  const auto larger = std::max(granted(*grants_a), granted(*grants_b));
  CHECK(smaller == 4);
  CHECK(larger == 6);
  CHECK(node->audit() == "");
}

TEST_CASE("a get is not cut short by the shortest lease") {
  const auto node = open_node(0);
  LocalStore store(node, "space", kFrameBytes);
  const CallLimits limits{monotonic_now() + 60'000 * kMillisecond, nullptr, true};
  std::vector<uint8_t> bytes = payload(1, 1, 1000);
  const std::vector<BlockMemory> blocks{
      BlockMemory(reinterpret_cast<uintptr_t>(bytes.data()), bytes.size())};
  const std::vector<BlockKey> keys = keys_of(1, 1);
  const std::vector<uint64_t> lengths{1000};
  REQUIRE(store.put({keys, 0, lengths, {}, store.version(), true}, blocks, limits).statuses[0] ==
          Status::kOk);
  std::atomic<bool> done{false};
  std::thread revoker([&] {
    while (!done.load()) store.session().revoke_overdue(monotonic_now() + kMillisecond);
  });
  int cut_short = 0;
  for (int i = 0; i < 50'000; ++i) {
    cut_short += store.get(keys, blocks, limits).statuses[0] != Status::kOk;
  }
  done.store(true);
  revoker.join();
  CHECK(cut_short == 0);
  CHECK(node->audit() == "");
}

TEST_CASE("what is held all the time is never missed while the index grows and shrinks") {
  constexpr uint32_t kKept = 200;
  constexpr uint32_t kOthers = 30'000;
  const CallLimits limits{monotonic_now() + 60'000 * kMillisecond, nullptr, true};
  std::vector<uint8_t> bytes(64, 1);
  const BlockMemory memory(reinterpret_cast<uintptr_t>(bytes.data()), bytes.size());
  const std::vector<BlockKey> kept = keys_of(1, kKept);
  const std::vector<BlockKey> absent = keys_of(5'000'000, kKept);
  uint64_t matches = 0;
  uint64_t missed = 0;
  uint64_t invented = 0;
  for (int round = 0; round < 10; ++round) {
    const auto node = open_node();  // its index is small, and grows
    LocalStore store(node, "space", kFrameBytes);
    const auto put = [&](uint32_t first, uint32_t count) {
      const std::vector<BlockKey> keys = keys_of(first, count);
      const std::vector<uint64_t> lengths(count, bytes.size());
      store.put({keys, 0, lengths, {}, store.version(), false},
                std::vector<BlockMemory>(count, memory), limits);
    };
    put(1, kKept);
    std::atomic<bool> done{false};
    std::thread others([&] {
      put(10'000, kOthers);
      store.apply(KeyOperation::kRemove, keys_of(10'000, kOthers));
      done.store(true);
    });
    while (!done.load()) {
      ++matches;
      missed += kKept - store.match(kept, 0, 1);
      invented += store.match(absent, 0, 1);
    }
    others.join();
    CHECK(node->audit() == "");
  }
  CHECK(matches > 100);
  CHECK(missed == 0);
  CHECK(invented == 0);
}

}  // namespace kvstore
