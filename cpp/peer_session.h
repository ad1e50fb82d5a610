// What a node keeps of one session of another process: its place in the table, and the grants and
// leases that its messages name.
//
// Threads: any; one mutex, taken before the session's own.
// Owns: the local transport that acts for it. `end` gives back everything it holds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "transport_local.h"
#include "types.h"

namespace kvstore {

class PeerSession {
 public:
  PeerSession(AttemptId name, std::shared_ptr<Node> node, const std::string& namespace_digest,
              uint64_t part_bytes)
      : id(name), digest(namespace_digest), store(std::move(node), digest, part_bytes) {}

  const AttemptId id;
  const std::string digest;
  LocalStore store;

  uint64_t keep(std::shared_ptr<LeaseBatch> leases) {
    const std::lock_guard lock(mutex_);
    const uint64_t name = leases->id;
    leases_.emplace(name, std::move(leases));
    return name;
  }
  // A put begins, under the name its client has chosen. False: the name is in use, or its client
  // has given it up already, on another connection that was quicker.
  bool claim(const AttemptId& attempt) {
    const std::lock_guard lock(mutex_);
    if (std::ranges::find(given_up_, attempt) != given_up_.end()) return false;
    return grants_.emplace(attempt.high, nullptr).second;
  }
  // False: it was given up between.
  bool keep(std::shared_ptr<GrantBatch> grants) {
    const std::lock_guard lock(mutex_);
    const auto at = grants_.find(grants->id.high);
    if (at == grants_.end()) return false;
    at->second = std::move(grants);
    return true;
  }
  std::shared_ptr<LeaseBatch> leases(uint64_t name) const {
    const std::lock_guard lock(mutex_);
    const auto at = leases_.find(name);
    return at == leases_.end() ? nullptr : at->second;
  }
  std::shared_ptr<GrantBatch> grants(const AttemptId& attempt) const {
    const std::lock_guard lock(mutex_);
    const auto at = grants_.find(attempt.high);
    return is(at, attempt) ? at->second : nullptr;
  }
  std::shared_ptr<LeaseBatch> take_leases(uint64_t name) {
    const std::lock_guard lock(mutex_);
    const auto at = leases_.find(name);
    if (at == leases_.end()) return nullptr;
    auto leases = std::move(at->second);
    leases_.erase(at);
    return leases;
  }
  // What is not there yet is given up before it comes.
  std::shared_ptr<GrantBatch> take_grants(const AttemptId& attempt) {
    const std::lock_guard lock(mutex_);
    const auto at = grants_.find(attempt.high);
    if (!is(at, attempt)) {
      if (at != grants_.end() && at->second == nullptr) grants_.erase(at);
      given_up_.push_back(attempt);
      if (given_up_.size() > kGivenUpMax) given_up_.pop_front();
      return nullptr;
    }
    auto grants = std::move(at->second);
    grants_.erase(at);
    return grants;
  }

 private:
  static constexpr size_t kGivenUpMax = 256;
  using Grants = std::unordered_map<uint64_t, std::shared_ptr<GrantBatch>>;
  bool is(Grants::const_iterator at, const AttemptId& attempt) const {
    return at != grants_.end() && at->second != nullptr && at->second->id == attempt;
  }
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<LeaseBatch>> leases_;
  Grants grants_;                   // by the attempt's high half; null: being reserved
  std::deque<AttemptId> given_up_;  // names nobody will put under
};

}  // namespace kvstore
