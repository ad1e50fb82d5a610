// What a node keeps of one session of another process: its place in the table, and the grants and
// leases that its messages name.
//
// Threads: any; one mutex, taken before the session's own.
// Owns: the local transport that acts for it. `end` gives back everything it holds.
#pragma once

#include <cstdint>
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
  void keep(std::shared_ptr<GrantBatch> grants) {
    const std::lock_guard lock(mutex_);
    grants_.emplace(grants->id.high, std::move(grants));
  }
  std::shared_ptr<LeaseBatch> leases(uint64_t name) const {
    const std::lock_guard lock(mutex_);
    const auto at = leases_.find(name);
    return at == leases_.end() ? nullptr : at->second;
  }
  std::shared_ptr<GrantBatch> grants(const AttemptId& attempt) const {
    const std::lock_guard lock(mutex_);
    const auto at = grants_.find(attempt.high);
    return at == grants_.end() || at->second->id != attempt ? nullptr : at->second;
  }
  std::shared_ptr<LeaseBatch> take_leases(uint64_t name) {
    const std::lock_guard lock(mutex_);
    const auto at = leases_.find(name);
    if (at == leases_.end()) return nullptr;
    auto leases = std::move(at->second);
    leases_.erase(at);
    return leases;
  }
  std::shared_ptr<GrantBatch> take_grants(const AttemptId& attempt) {
    const std::lock_guard lock(mutex_);
    const auto at = grants_.find(attempt.high);
    if (at == grants_.end() || at->second->id != attempt) return nullptr;
    auto grants = std::move(at->second);
    grants_.erase(at);
    return grants;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<LeaseBatch>> leases_;
  std::unordered_map<uint64_t, std::shared_ptr<GrantBatch>> grants_;  // by the attempt's high half
};

}  // namespace kvstore
