// How wire messages become bytes and back (wire.h). A message names its fields once, in fields(),
// for both directions. Decoding is a function of the bytes alone: no allocation beyond what they
// can fill, and nothing but "not a message" for whatever is not one.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "status.h"
#include "types.h"

namespace kvstore::wire {

inline constexpr uint32_t kTextBytesMax = 64 << 10;

class Writer {
 public:
  template <class T>
  void number(T value) {
    using Unsigned = std::make_unsigned_t<T>;
    auto bits = static_cast<Unsigned>(value);
    for (size_t i = 0; i < sizeof(T); ++i) {
      out_.push_back(static_cast<uint8_t>(bits));
      if constexpr (sizeof(T) > 1) bits = static_cast<Unsigned>(bits >> 8);
    }
  }
  void raw(const void* bytes, size_t count) {
    const auto* start = static_cast<const uint8_t*>(bytes);
    if (out_.capacity() < out_.size() + count) out_.reserve(out_.size() + count + kSlack);
    out_.insert(out_.end(), start, start + count);
  }
  std::vector<uint8_t> take() { return std::move(out_); }

 private:
  static constexpr size_t kSlack = 64;  // for the fields behind a list of keys
  std::vector<uint8_t> out_;
};

class Reader {
 public:
  explicit Reader(std::span<const uint8_t> bytes) : bytes_(bytes) {}
  template <class T>
  T number() {
    using Unsigned = std::make_unsigned_t<T>;
    uint8_t raw_bytes[sizeof(T)] = {};
    raw(raw_bytes, sizeof(T));
    uint64_t bits = 0;
    for (size_t i = 0; i < sizeof(T); ++i) bits |= uint64_t{raw_bytes[i]} << (8 * i);
    return static_cast<T>(static_cast<Unsigned>(bits));
  }
  void raw(void* out, size_t count) {
    if (!ok_ || count > bytes_.size()) {
      ok_ = false;
      return;
    }
    if (count > 0) memcpy(out, bytes_.data(), count);
    bytes_ = bytes_.subspan(count);
  }
  void fail() { ok_ = false; }
  bool ok() const { return ok_; }
  bool finished() const { return ok_ && bytes_.empty(); }
  size_t left() const { return bytes_.size(); }

 private:
  std::span<const uint8_t> bytes_;
  bool ok_ = true;
};

// One direction of fields(): Coder<Writer> or Coder<Reader>.
template <class Side>
class Coder {
 public:
  static constexpr bool kReads = std::is_same_v<Side, Reader>;
  explicit Coder(Side& side) : side_(side) {}

  template <class T>
    requires std::is_integral_v<T>
  Coder& operator()(T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      uint8_t byte = value ? 1 : 0;
      (*this)(byte);
      if constexpr (kReads) {
        if (byte > 1) side_.fail();
        value = byte == 1;
      }
    } else if constexpr (kReads) {
      value = side_.template number<T>();
    } else {
      side_.number(value);
    }
    return *this;
  }
  // An enum of values below `end`.
  template <class T>
    requires std::is_enum_v<T>
  Coder& operator()(T& value, std::underlying_type_t<T> end) {
    auto number = static_cast<std::underlying_type_t<T>>(value);
    (*this)(number);
    if constexpr (kReads) {
      if (number >= end) side_.fail();
      value = number < end ? static_cast<T>(number) : T{};
    }
    return *this;
  }
  template <size_t N>
  Coder& operator()(std::array<uint8_t, N>& bytes) {
    return raw(bytes.data(), N);
  }
  Coder& operator()(BlockKey& key) { return (*this)(key.bytes); }
  Coder& operator()(AttemptId& id) { return (*this)(id.high)(id.low); }
  Coder& operator()(Extent& extent) { return (*this)(extent.offset)(extent.bytes); }
  Coder& operator()(Status& status) { return (*this)(status, static_cast<uint8_t>(kStatusCount)); }
  Coder& operator()(std::string& text, uint32_t bytes_max = kTextBytesMax) {
    if (count(text, 1, bytes_max)) raw(text.data(), text.size());
    return *this;
  }
  // Each item takes at least `item_bytes` on the wire, so that a short message cannot ask for a
  // long list.
  template <class T, class Each>
  Coder& list(std::vector<T>& items, size_t item_bytes, uint32_t items_max, Each&& each) {
    if (!count(items, item_bytes, items_max)) return *this;
    for (T& item : items) {
      each(item);
      if constexpr (kReads) {
        if (!side_.ok()) break;
      }
    }
    return *this;
  }
  template <class T>
  Coder& list(std::vector<T>& items, uint32_t items_max) {
    return list(items, sizeof(T), items_max, [this](T& item) { (*this)(item); });
  }
  Coder& list(std::vector<BlockKey>& keys) {  // in one piece: batches of keys are the hot messages
    if (count(keys, kKeyBytes, kBatchBlocksMax)) raw(keys.data(), keys.size() * kKeyBytes);
    return *this;
  }

 private:
  template <class Items>
  bool count(Items& items, size_t item_bytes, uint32_t items_max) {
    auto number = static_cast<uint32_t>(items.size());
    (*this)(number);
    if constexpr (kReads) {
      if (!side_.ok() || number > items_max || number > side_.left() / item_bytes) {
        side_.fail();
        return false;
      }
      items.resize(number);
    }
    return true;
  }
  Coder& raw(void* bytes, size_t count) {
    side_.raw(bytes, count);
    return *this;
  }
  Side& side_;
};

template <class Message>
std::vector<uint8_t> encode(const Message& message) {
  Writer writer;
  Coder<Writer> coder(writer);
  const_cast<Message&>(message).fields(coder);  // a writing coder changes nothing
  return writer.take();
}

// None unless all of the bytes are one valid message.
template <class Message>
std::optional<Message> decode(std::span<const uint8_t> bytes) {
  Message message;
  Reader reader(bytes);
  Coder<Reader> coder(reader);
  message.fields(coder);
  if (!reader.finished()) return std::nullopt;
  return message;
}

}  // namespace kvstore::wire
