#include "transport_tcp.h"

#include <algorithm>
#include <thread>

#include "copy_blocks.h"
#include "crc32c.h"

namespace kvstore {
namespace {

constexpr uint64_t kChunkBytes = uint64_t{1} << 20;  // checked while in the cache, one system call
constexpr uint64_t kLaneBytes = uint64_t{4} << 20;   // less is not worth another connection

// The bytes of some blocks in order, cut into chunks, with a checksum a part: what one payload is.
class Stream {
 public:
  // Bytes [first, end) of a block, in memory that starts with `first`.
  struct Block {
    const BlockMemory* memory;
    uint64_t first;
    uint64_t end;
    uint64_t part_bytes;
  };
  explicit Stream(std::vector<Block> blocks) : blocks_(std::move(blocks)) {}

  bool finished() const { return at_ == blocks_.size(); }
  size_t block() const { return at_; }  // whose bytes come next; those before are complete
  // The pieces of the next chunk; a span into this object.
  std::span<iovec> next() {
    chunk_.clear();
    pieces_.clear();
    uint64_t bytes = 0;
    while (bytes < kChunkBytes && !finished()) {
      const Block& block = blocks_[at_];
      if (!cursor_) {
        cursor_.emplace(*block.memory, 0);
        position_ = block.first;
      }
      const uint64_t part_end =
          std::min(block.end, (position_ / block.part_bytes + 1) * block.part_bytes);
      const auto piece = cursor_->next(std::min(part_end - position_, kChunkBytes - bytes));
      position_ += piece.size();
      bytes += piece.size();
      pieces_.push_back({piece.data(), piece.size()});
      chunk_.push_back({at_, (position_ - 1) / block.part_bytes, position_ == part_end});
      if (position_ < block.end) continue;
      cursor_.reset();
      ++at_;
    }
    given_ = pieces_;
    return given_;
  }
  // The checksums of the chunk `next` gave: use(block, part, checksum) of each part that ends.
  template <class Use>
  void check(Use&& use) {
    for (size_t i = 0; i < chunk_.size(); ++i) {
      crc_ = crc32c(crc_, pieces_[i].iov_base, pieces_[i].iov_len);
      if (!chunk_[i].ends_part) continue;
      use(chunk_[i].block, chunk_[i].part, crc_);
      crc_ = 0;
    }
  }

 private:
  struct Piece {
    size_t block;
    uint64_t part;
    bool ends_part;
  };
  const std::vector<Block> blocks_;
  size_t at_ = 0;
  std::optional<MemoryCursor> cursor_;
  uint64_t position_ = 0;
  std::vector<iovec> pieces_, given_;  // sending uses them up
  std::vector<Piece> chunk_;
  uint32_t crc_ = 0;
};

uint64_t end_of(uint64_t length, ByteRange range) {
  return range.bytes >= length - range.first ? length : range.first + range.bytes;
}

// By any of the lanes that fill one outcome.
void mark_revoked(GetOutcome* outcome) { std::atomic_ref(outcome->revoked).store(true); }

}  // namespace

size_t TcpStore::num_lanes(uint64_t bytes, size_t items) const {
  const size_t cores = std::max(1U, std::thread::hardware_concurrency() / 2);
  const size_t most = std::min<size_t>(cores, remote_->options().connections);
  return std::clamp<size_t>(std::min<size_t>(bytes / kLaneBytes, items), 1, most);
}

// ---- put ---------------------------------------------------------------------------------------

// A write and its payload, without waiting for the answer.
Io TcpStore::send_items(Link& link, GrantBatch& grants, std::span<const uint32_t> items,
                        const std::vector<BlockMemory>& blocks, ByteRange range,
                        const Patience& patience) {
  wire::Write message{grants.id, {items.begin(), items.end()}, range.first, range.bytes};
  std::vector<Stream::Block> sent;
  uint64_t bytes = 0;
  for (const uint32_t item : items) {
    const uint64_t end = end_of(grants.items[item].length, range);
    sent.push_back({&blocks[item], range.first, end, grants.part_bytes});
    bytes += end - range.first;
  }
  Io io = link.say(message, patience, bytes);
  for (Stream stream(std::move(sent)); io == Io::kDone && !stream.finished();) {
    const std::span<iovec> chunk = stream.next();
    stream.check([&](size_t block, uint64_t part, uint32_t crc) {
      grants.items[items[block]].parts[part] = crc;
    });
    io = link.send_payload(chunk, patience);
  }
  return io;
}

Status TcpStore::write(GrantBatch& grants, const std::vector<BlockMemory>& blocks, ByteRange range,
                       const CallLimits& limits) {
  if (const Status early = early_end(limits); early != Status::kOk) return early;
  std::vector<uint32_t> items;
  uint64_t bytes = 0;
  for (size_t i = 0; i < grants.items.size(); ++i) {
    if (grants.statuses[i] != Status::kOk) continue;
    items.push_back(static_cast<uint32_t>(i));
    bytes += end_of(grants.items[i].length, range) - range.first;
  }
  if (items.empty()) return Status::kOk;
  const Patience patience = patience_of(limits);
  const size_t lanes = num_lanes(bytes, items.size());
  std::atomic<Io> ended{Io::kDone};
  copier_.run(lanes, lanes == 1, [&](size_t lane) {
    const size_t from = items.size() * lane / lanes, to = items.size() * (lane + 1) / lanes;
    Io io = Io::kDone;
    Remote::Line line = remote_->take(patience, &io);
    if (line) {
      wire::Written written;
      io = send_items(*line.link, grants, std::span(items).subspan(from, to - from), blocks, range,
                      patience);
      if (io == Io::kDone) io = line.link->hear(&written, patience);
      if (io == Io::kDone && written.status == Status::kOk) return remote_->give(std::move(line));
      remote_->drop(std::move(line));
    }
    ended.store(io == Io::kDone ? Io::kLost : io);
  });
  return status_of(ended.load());
}

// On one connection the commit follows the bytes at once.
PutOutcome TcpStore::write_and_commit(GrantBatch& grants, const std::vector<BlockMemory>& blocks,
                                      const CallLimits& limits) {
  std::vector<uint32_t> items;
  uint64_t bytes = 0;
  for (size_t i = 0; i < grants.items.size(); ++i) {
    if (grants.statuses[i] != Status::kOk) continue;
    items.push_back(static_cast<uint32_t>(i));
    bytes += grants.items[i].length;
  }
  const bool early = early_end(limits) != Status::kOk;
  if (items.empty() || early || num_lanes(bytes, items.size()) > 1)
    return RemoteStore::write_and_commit(grants, blocks, limits);
  const Patience patience = patience_of(limits);
  Io io = Io::kDone;
  wire::PutDone done;
  Remote::Line line = remote_->take(patience, &io);
  bool committing = false;
  if (line) {
    wire::Written written;
    io = send_items(*line.link, grants, items, blocks, {}, patience);
    committing = io == Io::kDone;
    if (committing)
      io = line.link->say(commit_message(grants, blocks.size(), Status::kCancelled), patience);
    if (io == Io::kDone) io = line.link->hear(&written, patience);
    if (io == Io::kDone) io = line.link->hear(&done, patience);
    if (io == Io::kDone) {
      remote_->give(std::move(line));
    } else {
      remote_->drop(std::move(line));
    }
  }
  return finish_put(grants, committing || io == Io::kDone ? blocks.size() : 0, io, std::move(done));
}

// ---- get ---------------------------------------------------------------------------------------

template <class Message>
void TcpStore::fetch(const Message& message, size_t first, size_t count,
                     const std::vector<BlockMemory>& blocks, ByteRange range,
                     const Patience& patience, GetOutcome* outcome, TooSmall* too_small) {
  const std::span<Status> statuses = std::span(outcome->statuses).subspan(first, count);
  Io io = Io::kDone;
  wire::Blocks answer;
  Remote::Line line = remote_->take(patience, &io);
  if (line) io = line.link->ask(message, &answer, patience);
  std::vector<Stream::Block> coming;
  std::vector<size_t> whose;
  uint64_t bytes = 0;
  bool sound = io == Io::kDone && answer.blocks.size() == count;
  for (size_t i = 0; sound && i < count; ++i) {
    const wire::SentBlock& block = answer.blocks[i];
    statuses[i] = block.status;
    if (block.status == Status::kUnavailable) mark_revoked(outcome);
    if (block.status != Status::kOk || answer.any_too_small) continue;
    sound = block.part_bytes > 0 && range.first < block.length;
    if (!sound) break;
    const uint64_t end = end_of(block.length, range);
    const uint64_t parts = (end - 1) / block.part_bytes - range.first / block.part_bytes + 1;
    sound = end - range.first <= blocks[first + i].bytes() && block.parts.size() == parts;
    coming.push_back({&blocks[first + i], range.first, end, block.part_bytes});
    whose.push_back(i);
    bytes += end - range.first;
  }
  if (!sound || line.link->payload_bytes() != bytes) {
    if (line) remote_->drop(std::move(line));
    std::ranges::fill(statuses, io == Io::kDone ? Status::kUnavailable : status_of(io));
    return;
  }
  if (answer.any_too_small && answer.too_small < count)
    *too_small = {first + answer.too_small, answer.blocks[answer.too_small].length};
  Stream stream(std::move(coming));
  while (io == Io::kDone && !stream.finished()) {
    const size_t incomplete = stream.block();
    io = line.link->receive_payload(stream.next(), patience);
    if (io == Io::kDone) {
      stream.check([&](size_t block, uint64_t part, uint32_t crc) {
        const wire::SentBlock& sent = answer.blocks[whose[block]];
        if (sent.parts[part - range.first / sent.part_bytes] != crc)
          statuses[whose[block]] = Status::kCorrupt;
      });
    } else {
      for (size_t i = incomplete; i < whose.size(); ++i) statuses[whose[i]] = status_of(io);
    }
  }
  if (io == Io::kDone) {
    remote_->give(std::move(line));
  } else {
    remote_->drop(std::move(line));
  }
  for (const size_t i : whose) {
    if (statuses[i] == Status::kOk) {
      outcome->bytes[first + i] = end_of(answer.blocks[i].length, range) - range.first;
    } else {
      zero(blocks[first + i]);  // what is not whole is not handed out
    }
  }
}

// Cuts the blocks into lanes: work(first, count, outcome, too_small) of each, side by side.
template <class Work>
GetOutcome TcpStore::in_lanes(const std::vector<BlockMemory>& blocks, Work&& work) {
  GetOutcome outcome;
  outcome.statuses.assign(blocks.size(), Status::kUnavailable);
  outcome.bytes.assign(blocks.size(), 0);
  uint64_t bytes = 0;
  for (const BlockMemory& block : blocks) bytes += block.bytes();
  const size_t lanes = num_lanes(bytes, blocks.size());
  std::vector<TooSmall> too_small(lanes);
  copier_.run(lanes, lanes == 1, [&](size_t lane) {
    const size_t from = blocks.size() * lane / lanes, to = blocks.size() * (lane + 1) / lanes;
    if (from < to) work(from, to - from, &outcome, &too_small[lane]);
  });
  for (const TooSmall& found : too_small) {
    if (found && !outcome.too_small) outcome.too_small = found;
  }
  return outcome;
}

GetOutcome TcpStore::get(std::span<const BlockKey> keys, const std::vector<BlockMemory>& blocks,
                         const CallLimits& limits) {
  const Patience patience = patience_of(limits);
  GetOutcome outcome = in_lanes(blocks, [&](size_t first, size_t count, auto* out, auto* small) {
    wire::Get message;
    const auto asked_for = keys.subspan(first, count);
    message.keys.assign(asked_for.begin(), asked_for.end());
    for (size_t i = 0; i < count; ++i) message.room.push_back(blocks[first + i].bytes());
    fetch(message, first, count, blocks, {}, patience, out, small);
  });
  // The owner looks for itself whether it was the wire or the block.
  for (size_t i = 0; i < keys.size(); ++i) {
    if (outcome.statuses[i] != Status::kCorrupt) continue;
    Io io = Io::kDone;
    const auto leases = lease(keys.subspan(i, 1), 0, false, remote_->patience(), &io);
    if (leases->id == 0) continue;
    complain(*leases, 0);
    remote_->tell_release(leases->id, leases->incarnation);
  }
  return outcome;
}

GetOutcome TcpStore::read(LeaseBatch& batch, size_t first, const std::vector<BlockMemory>& blocks,
                          ByteRange range, const CallLimits& limits) {
  const auto& leases = static_cast<RemoteLeases&>(batch);
  const Patience patience = patience_of(limits);
  GetOutcome outcome = in_lanes(blocks, [&](size_t from, size_t count, auto* out, auto* small) {
    if (leases.ended || leases.incarnation != remote_->incarnation()) {
      mark_revoked(out);
      return;
    }
    wire::Read message{
        leases.id, static_cast<uint32_t>(first + from), {}, range.first, range.bytes};
    for (size_t i = 0; i < count; ++i) message.room.push_back(blocks[from + i].bytes());
    fetch(message, from, count, blocks, range, patience, out, small);
  });
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (outcome.statuses[i] == Status::kCorrupt) complain(leases, first + i);
  }
  return outcome;
}

}  // namespace kvstore
