// Which block goes first when room is needed. Mechanism stands in blocks.*; a policy only orders
// ids: values in, victims out. One object per stripe of the table, guarded by that stripe's lock.
//
// A stamp is (batch, depth): later batches are larger, and inside a batch the head of a chain is
// larger than its tail. Order is by stamp, not by the order of calls, so that a parent is never
// older than its child.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pool.h"

namespace kvstore {

using Stamp = uint64_t;
inline constexpr unsigned kDepthBits = 16;
inline Stamp make_stamp(uint64_t batch, size_t depth) {
  return (batch << kDepthBits) | (((Stamp{1} << kDepthBits) - 1) - depth);
}
inline constexpr Stamp kNoStamp = UINT64_MAX;

class Policy {
 public:
  virtual ~Policy() = default;
  virtual const char* name() const = 0;
  // An id enters with its last use, is used again, leaves.
  virtual void insert(uint32_t id, SizeClass size_class, Stamp stamp) = 0;
  virtual void touch(uint32_t id, SizeClass size_class, Stamp stamp) = 0;
  virtual void erase(uint32_t id, SizeClass size_class) = 0;
  // The one to evict first, and how old it is; kNoStamp if there is none.
  virtual std::optional<uint32_t> victim(SizeClass size_class) const = 0;
  virtual Stamp oldest(SizeClass size_class) const = 0;
  virtual Stamp stamp_of(uint32_t id) const = 0;
  // Ids held in a class; checked by the table's audit.
  virtual size_t size() const = 0;
  virtual std::string audit() const = 0;
};

// Least recently used.
class LruPolicy final : public Policy {
 public:
  LruPolicy();
  const char* name() const override { return "lru"; }
  void insert(uint32_t id, SizeClass size_class, Stamp stamp) override;
  void touch(uint32_t id, SizeClass size_class, Stamp stamp) override;
  void erase(uint32_t id, SizeClass size_class) override;
  std::optional<uint32_t> victim(SizeClass size_class) const override;
  Stamp oldest(SizeClass size_class) const override;
  Stamp stamp_of(uint32_t id) const override { return nodes_[id].stamp; }
  size_t size() const override { return size_; }
  std::string audit() const override;

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Node {
    Stamp stamp = 0;
    uint32_t newer = kNone;
    uint32_t older = kNone;
  };
  struct List {
    uint32_t newest = kNone;
    uint32_t oldest = kNone;
    uint32_t hint = kNone;  // last inserted: a chain's next block goes right behind it
  };
  uint32_t place_before(const List& list, Stamp stamp) const;

  std::vector<Node> nodes_;  // by id
  List lists_[kNumClasses + 1];
  size_t size_ = 0;
};

}  // namespace kvstore
