// The node is in this process: put, get and match as function calls.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "node.h"
#include "transport.h"

namespace kvstore {

class LocalStore final : public Transport {
 public:
  // Blocks are cut into parts of `part_bytes`, the last one shorter.
  LocalStore(std::shared_ptr<Node> node, const std::string& namespace_digest, uint64_t part_bytes);
  ~LocalStore() override;
  LocalStore(const LocalStore&) = delete;
  LocalStore& operator=(const LocalStore&) = delete;

  Node& node() { return *node_; }
  const std::shared_ptr<Node>& shared_node() const { return node_; }
  Session& session() { return *session_; }

  const char* name() const override { return "local"; }
  bool local() const override { return true; }
  uint32_t version() override { return session_->space().version.load(); }
  uint64_t pool_bytes() override { return node_->segment().bytes(); }
  uint64_t view_bytes_max() override { return node_->limits().view_bytes_max; }
  Loans& loans() override { return node_->loans(); }

  PutOutcome put(const PutRequest& request, const std::vector<BlockMemory>& blocks,
                 const CallLimits& limits) override;
  std::shared_ptr<GrantBatch> reserve(const PutRequest& request, const CallLimits& limits) override;
  bool reserve_more(GrantBatch& grants, bool chain, const CallLimits& limits) override;
  Status write(GrantBatch& grants, const std::vector<BlockMemory>& blocks, ByteRange range,
               const CallLimits& limits) override;
  PutOutcome commit(GrantBatch& grants, size_t end, Status otherwise) override;

  GetOutcome get(std::span<const BlockKey> keys, const std::vector<BlockMemory>& blocks,
                 const CallLimits& limits) override;
  size_t match(std::span<const BlockKey> keys, size_t skip, uint16_t ranks) override;
  std::vector<bool> exists(std::span<const BlockKey> keys) override;
  std::shared_ptr<LeaseBatch> lookup(std::span<const BlockKey> keys, size_t skip,
                                     bool run) override;
  // Leases every key that is held, a read begun: end it, then release.
  std::shared_ptr<LeaseBatch> lookup_to_read(std::span<const BlockKey> keys, Nanos now);
  GetOutcome read(LeaseBatch& leases, size_t first, const std::vector<BlockMemory>& blocks,
                  ByteRange range, const CallLimits& limits) override;
  Released release(LeaseBatch& leases) override;
  bool make_view(LeaseBatch& leases) override { return session_->make_view(leases); }
  std::vector<std::span<uint8_t>> view(const LeaseBatch& leases, size_t item) override;
  std::vector<Status> verify(LeaseBatch& leases) override;
  AttemptId ticket(LeaseBatch& leases) override { return session_->ticket(leases); }
  std::shared_ptr<LeaseBatch> redeem(const AttemptId& ticket) override;

  size_t apply(KeyOperation operation, std::span<const BlockKey> keys) override;
  uint32_t clear() override;
  std::vector<Listed> list() override;
  UsageReport usage() override;
  std::string audit() override { return node_->audit(); }
  bool settle(Nanos deadline) override { return node_->settle(deadline); }
  std::vector<BlockKey> take_evicted() override { return node_->blocks().take_evicted(); }

  void wake() override { node_->room_freed(); }
  void end() override;

 private:
  void find_extents(GrantBatch& grants);
  void find_extents(LeaseBatch& leases);

  const std::shared_ptr<Node> node_;
  const std::shared_ptr<Session> session_;
};

}  // namespace kvstore
