// The order of eviction: by stamp, whatever the order of calls; and a random run against a sorted
// map.
#include "policy.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>

using namespace kvstore;

namespace {

constexpr SizeClass kClass = 7;

// Ids of a class from the oldest to the newest, by evicting them all.
std::vector<uint32_t> drain(Policy& policy, SizeClass size_class = kClass) {
  std::vector<uint32_t> order;
  while (const auto id = policy.victim(size_class)) {
    REQUIRE(policy.oldest(size_class) == policy.stamp_of(*id));
    policy.erase(*id, size_class);
    order.push_back(*id);
  }
  REQUIRE(policy.oldest(size_class) == kNoStamp);
  return order;
}

TEST_CASE("a later batch is newer, and a head is newer than its tail") {
  CHECK(make_stamp(2, 65535) > make_stamp(1, 0));
  CHECK(make_stamp(5, 0) > make_stamp(5, 1));
  CHECK(make_stamp(uint64_t{1} << 40, 3) < kNoStamp);
}

TEST_CASE("the order of eviction is by stamp under any order of insertion") {
  std::vector<uint32_t> ids(7);
  std::iota(ids.begin(), ids.end(), 0U);
  const std::vector<uint32_t> sorted = ids;
  do {
    LruPolicy policy;
    for (const uint32_t id : ids) policy.insert(id, kClass, 10 + id);
    REQUIRE(policy.size() == ids.size());
    REQUIRE(policy.audit() == "");
    REQUIRE(drain(policy) == sorted);
  } while (std::ranges::next_permutation(ids).found);
}

TEST_CASE("chains that arrive side by side are ordered by batch, then from tail to head") {
  LruPolicy policy;
  constexpr uint32_t kDepth = 50;
  // Three batches, block by block in turn: ids say batch and depth.
  for (uint32_t depth = 0; depth < kDepth; ++depth) {
    for (const uint32_t batch : {2U, 0U, 1U}) {
      policy.insert(batch * kDepth + depth, kClass, make_stamp(batch + 1, depth));
    }
  }
  REQUIRE(policy.audit() == "");
  std::vector<uint32_t> wanted;
  for (uint32_t batch = 0; batch < 3; ++batch) {
    for (uint32_t depth = kDepth; depth-- > 0;) wanted.push_back(batch * kDepth + depth);
  }
  CHECK(drain(policy) == wanted);
}

TEST_CASE("a touch with an older stamp changes nothing") {
  LruPolicy policy;
  for (uint32_t id = 0; id < 3; ++id) policy.insert(id, kClass, 10 * (id + 1));
  policy.touch(2, kClass, 5);
  policy.touch(0, kClass, 25);
  CHECK(policy.stamp_of(2) == 30);
  CHECK(policy.stamp_of(0) == 25);
  CHECK(drain(policy) == std::vector<uint32_t>{1, 0, 2});
  CHECK(policy.size() == 0);
}

TEST_CASE("classes are ordered apart") {
  LruPolicy policy;
  policy.insert(1, 3, 100);
  policy.insert(2, kLargeClass, 50);
  policy.insert(3, 3, 70);
  CHECK(policy.oldest(3) == 70);
  CHECK(policy.oldest(kLargeClass) == 50);
  CHECK(policy.oldest(4) == kNoStamp);
  CHECK_FALSE(policy.victim(4).has_value());
  CHECK(drain(policy, 3) == std::vector<uint32_t>{3, 1});
  CHECK(policy.size() == 1);
}

TEST_CASE("lru agrees with a sorted map") {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    LruPolicy policy;
    std::map<uint32_t, std::pair<SizeClass, Stamp>> held;
    std::set<std::pair<Stamp, uint32_t>> ordered[2];  // by class
    uint64_t batch = 1;
    for (int step = 0; step < 3000; ++step) {
      const auto id = static_cast<uint32_t>(random() % 60);
      // Batches run side by side, and a block that was held long comes back with an old stamp.
      batch += random() % 3 == 0 ? 1 : 0;
      const uint64_t back = random() % 10 == 0 ? random() % 40 : random() % 3;
      const Stamp stamp = make_stamp(batch - std::min(batch, back), random() % 5);
      const auto at = held.find(id);
      if (at == held.end()) {
        const auto size_class = static_cast<SizeClass>(random() % 2);
        policy.insert(id, size_class, stamp);
        held[id] = {size_class, stamp};
        ordered[size_class].insert({stamp, id});
      } else if (random() % 3 == 0) {
        policy.erase(id, at->second.first);
        ordered[at->second.first].erase({at->second.second, id});
        held.erase(at);
      } else {
        policy.touch(id, at->second.first, stamp);
        if (stamp > at->second.second) {
          ordered[at->second.first].erase({at->second.second, id});
          ordered[at->second.first].insert({stamp, id});
          at->second.second = stamp;
        }
      }
      REQUIRE(policy.size() == held.size());
      for (const SizeClass size_class : {SizeClass{0}, SizeClass{1}}) {
        const bool empty = ordered[size_class].empty();
        REQUIRE(policy.oldest(size_class) ==
                (empty ? kNoStamp : ordered[size_class].begin()->first));
        const auto victim = policy.victim(size_class);
        REQUIRE(victim.has_value() == !empty);
        if (victim) REQUIRE(held.at(*victim).second == policy.oldest(size_class));
      }
      if (step % 50 == 0) REQUIRE(policy.audit() == "");
    }
    for (const SizeClass size_class : {SizeClass{0}, SizeClass{1}}) {
      Stamp last = 0;
      for (const uint32_t id : drain(policy, size_class)) {
        REQUIRE(held.at(id).second >= last);
        last = held.at(id).second;
      }
    }
    CHECK(policy.size() == 0);
  }
}

}  // namespace
