// Server and clients in one process, over real sockets and real mappings: what the sanitizers see
// of both sides. What only several processes show, the Python tests look at.
#include <doctest/doctest.h>

#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core.h"
#include "server.h"
#include "transport_remote.h"

namespace kvstore {
namespace {

constexpr uint64_t kPart = 64 << 10;
const std::string kSocket = "/tmp/kvstore-test-" + std::to_string(getpid()) + ".sock";

struct Served {
  explicit Served(uint32_t frames = 16, Nanos lease = 30'000 * kMillisecond) {
    NodeOptions options;
    options.dram_bytes = frames * kFrameBytes;
    options.copy_threads = 1;
    options.lease = lease;
    options.view_fraction = 0.5;
    node = Node::open(options, &error);
    REQUIRE_MESSAGE(node != nullptr, error);
    REQUIRE(node->settle(monotonic_now() + 60'000 * kMillisecond));
    serve();
  }
  void serve() {
    ServerOptions options;
    options.listen = {*Address::parse("127.0.0.1:" + std::to_string(port), &error),
                      *Address::parse("unix:" + kSocket, &error)};
    options.token = "token";
    options.io_threads = 2;
    server = Server::start(node, options, &error);
    REQUIRE_MESSAGE(server != nullptr, error);
    port = server->addresses()[0].port;
  }
  std::unique_ptr<Transport> connect(Way way, const std::string& token = "token") {
    RemoteOptions options;
    options.address = server->addresses()[0];
    options.token = token;
    options.record = "a namespace";
    options.part_bytes = kPart;
    options.way = way;
    options.timeout = 10'000 * kMillisecond;
    Io failed = Io::kDone;
    auto remote = Remote::connect(options, &failed, &error);
    if (remote == nullptr) return nullptr;
    return make_remote_store(std::move(remote), 2);
  }
  // Until the sessions of clients that are gone have ended.
  void settle() {
    while (server->counts()[1].second > 0) std::this_thread::yield();
    CHECK(node->num_granted() == 0);
    CHECK(node->audit() == "");
  }
  std::shared_ptr<Node> node;
  std::unique_ptr<Server> server;
  std::string error;
  uint16_t port = 0;
};

struct Batch {
  Batch(uint32_t first, std::vector<uint64_t> bytes) : keys(keys_of(first, bytes.size())) {
    for (uint32_t i = 0; i < bytes.size(); ++i) {
      data.push_back(payload(first + i, 1, bytes[i]));
      got.emplace_back(bytes[i]);
    }
    lengths = std::move(bytes);
    for (size_t i = 0; i < data.size(); ++i) {
      sources.emplace_back(reinterpret_cast<uintptr_t>(data[i].data()), lengths[i]);
      targets.emplace_back(reinterpret_cast<uintptr_t>(got[i].data()), lengths[i]);
    }
  }
  PutRequest request(uint32_t version, bool chain = true) const {
    return {keys, 0, lengths, {}, version, chain};
  }
  std::vector<BlockKey> keys;
  std::vector<uint64_t> lengths;
  std::vector<std::vector<uint8_t>> data, got;
  std::vector<BlockMemory> sources, targets;
};

CallLimits soon() { return {monotonic_now() + 20'000 * kMillisecond, nullptr, true}; }
const std::vector<Status> kFourOk(4, Status::kOk);

}  // namespace

TEST_CASE("put, get, lease and view over each way") {
  Served served;
  for (const Way way : {Way::kTcp, Way::kShm}) {
    const auto store = served.connect(way);
    REQUIRE_MESSAGE(store != nullptr, served.error);
    CHECK(std::string(store->name()) == (way == Way::kTcp ? "tcp" : "shm"));
    const uint32_t first = way == Way::kTcp ? 0 : 100;
    for (const uint64_t bytes : {uint64_t{1}, kPart, 3 * kPart + 1, kFrameBytes + 5}) {
      Batch batch(first + static_cast<uint32_t>(bytes % 97), {bytes, bytes, bytes, bytes});
      CHECK(store->put(batch.request(1), batch.sources, soon()).statuses == kFourOk);
      CHECK(store->match(batch.keys, 0, 1) == 4);
      CHECK(store->get(batch.keys, batch.targets, soon()).statuses == kFourOk);
      CHECK(batch.got == batch.data);
      const auto leases = store->lookup(batch.keys, 0, true);
      REQUIRE(leases->items.size() == 4);
      for (auto& got : batch.got) std::ranges::fill(got, 0);
      CHECK(store->read(*leases, 0, batch.targets, {}, soon()).statuses == kFourOk);
      CHECK(batch.got == batch.data);
      CHECK(store->verify(*leases) == kFourOk);
      const auto again = store->redeem(store->ticket(*leases));
      REQUIRE(again != nullptr);
      CHECK(store->make_view(*again) == (way == Way::kShm));
      if (way == Way::kShm) {
        std::vector<uint8_t> seen;
        for (const auto piece : store->view(*again, 2))
          seen.insert(seen.end(), piece.begin(), piece.end());
        CHECK(seen == batch.data[2]);
      }
      CHECK(store->release(*again) == Released::kHeld);
      CHECK(store->release(*leases) == Released::kHeld);
    }
    store->end();
  }
  served.settle();
}

TEST_CASE("a put that was granted and never ended leaves nothing when its store is closed") {
  Served served;
  for (const Way way : {Way::kTcp, Way::kShm}) {
    const auto store = served.connect(way);
    const Batch batch(1, {kFrameBytes, kFrameBytes, kFrameBytes, kFrameBytes});
    const auto grants = store->reserve(batch.request(1), soon());
    CHECK(grants->statuses == kFourOk);
    CHECK(served.node->num_granted() == 4);
    store->end();
    served.settle();
  }
}

TEST_CASE("a node that went and came back is the next incarnation") {
  Served served;
  for (const Way way : {Way::kTcp, Way::kShm}) {
    const auto store = served.connect(way);
    Batch batch(way == Way::kTcp ? 1 : 10, {kPart, kPart, kPart, kPart});
    REQUIRE(store->put(batch.request(1), batch.sources, soon()).statuses == kFourOk);
    const auto leases = store->lookup(batch.keys, 0, true);
    served.server.reset();
    CHECK(served.node->audit() == "");
    CHECK(served.node->blocks().num_leased() == 0);
    served.serve();  // the same blocks, another epoch: as another node with the same address
    const Nanos patience = monotonic_now() + 10'000 * kMillisecond;
    GetOutcome outcome;
    do {
      outcome = store->get(batch.keys, batch.targets, soon());
    } while (outcome.statuses != kFourOk && monotonic_now() < patience);
    CHECK(outcome.statuses == kFourOk);
    CHECK(batch.got == batch.data);
    if (way == Way::kTcp) {
      const auto gone = store->read(*leases, 0, batch.targets, {}, soon());
      CHECK(gone.statuses == std::vector<Status>(4, Status::kUnavailable));
      CHECK(store->release(*leases) == Released::kRevoked);
    }
    if (!leases->ended) store->release(*leases);
    store->end();
    served.settle();
  }
}

TEST_CASE("both sides refuse another token") {
  Served served;
  CHECK(served.connect(Way::kTcp, "other") == nullptr);
  CHECK(served.error.find("token") != std::string::npos);
  CHECK(served.connect(Way::kShm, "") == nullptr);
}

TEST_CASE("stopping ends what waits for room") {
  Served served(4);
  const auto store = served.connect(Way::kTcp);
  const Batch all(1, {kFrameBytes, kFrameBytes, kFrameBytes, kFrameBytes});
  REQUIRE(store->put(all.request(1), all.sources, soon()).statuses == kFourOk);
  const auto leases = store->lookup(all.keys, 0, true);  // nothing can be evicted
  const Batch more(10, {kFrameBytes});
  PutOutcome outcome;
  std::thread waiting([&] { outcome = store->put(more.request(1), more.sources, soon()); });
  while (served.server->counts()[5].second < 5) std::this_thread::yield();
  CHECK(served.server->stop(monotonic_now() + 5'000 * kMillisecond));
  waiting.join();
  CHECK(outcome.statuses[0] != Status::kOk);
  CHECK(served.node->num_granted() == 0);
  CHECK(served.node->audit() == "");
}

TEST_CASE("many clients, both ways, a pool too small, sessions cut") {
  Served served(12, 50 * kMillisecond);
  std::atomic<int> hits{0}, wrong{0};
  std::vector<std::thread> threads;
  for (uint32_t number = 0; number < 6; ++number) {
    threads.emplace_back([&, number] {
      std::mt19937 random(number);
      for (int life = 0; life < 4; ++life) {
        const auto store = served.connect(number % 2 == 0 ? Way::kShm : Way::kTcp);
        if (store == nullptr) continue;
        for (int round = 0; round < 25; ++round) {
          const uint32_t first = random() % 60;
          const uint64_t bytes = 1 + random() % (random() % 3 == 0 ? 3 * kPart : 20'000);
          Batch batch(first, {bytes, bytes, bytes});
          if (random() % 2 == 0) {
            store->put(batch.request(1, false), batch.sources, soon());
            continue;
          }
          const auto leases = store->lookup(batch.keys, 0, true);
          std::vector<std::vector<uint8_t>> got;
          std::vector<BlockMemory> targets;
          for (const auto& item : leases->items) {
            got.emplace_back(item->length);
            targets.emplace_back(reinterpret_cast<uintptr_t>(got.back().data()), item->length);
          }
          if (random() % 4 == 0) store->make_view(*leases);
          const auto outcome = store->read(*leases, 0, targets, {}, soon());
          for (size_t i = 0; i < got.size(); ++i) {
            if (outcome.statuses[i] != Status::kOk) continue;
            ++hits;
            if (got[i] != payload(first + static_cast<uint32_t>(i), 1, got[i].size())) ++wrong;
          }
          if (random() % 8 != 0) store->release(*leases);
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(hits > 0);
  CHECK(wrong == 0);
  served.server.reset();
  CHECK(served.node->num_granted() == 0);
  CHECK(served.node->blocks().num_leased() == 0);
  CHECK(served.node->audit() == "");
}

}  // namespace kvstore
