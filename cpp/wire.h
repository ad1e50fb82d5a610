// Wire v1: the messages between a client and a node (docs/wire.md). Values and a codec, nothing
// that reads or writes a socket: decoding is a function of the bytes alone.
//
// A frame is a fixed header, a body of fields, and a payload of raw block bytes, whose length is
// known before the first of them is read. Numbers are little-endian. Every list and text has a
// bound; what lies beyond it, is left over or is missing, makes the whole message invalid.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "status.h"
#include "types.h"
#include "wire_codec.h"

namespace kvstore::wire {

inline constexpr uint32_t kMagic = 0x3153'564B;  // "KVS1" as bytes
inline constexpr uint16_t kVersionMin = 1;
inline constexpr uint16_t kVersionMax = 1;
inline constexpr uint32_t kHelloBytesMax = 64 << 10;  // a body before both sides are known
inline constexpr uint32_t kBodyBytesMax = 64 << 20;
inline constexpr uint64_t kPayloadBytesMax = kBlockBytesMax;

using TraceId = std::array<uint8_t, 16>;
using Digest = std::array<uint8_t, 32>;
using Nonce = std::array<uint8_t, 32>;

enum class Type : uint16_t {
  kHello = 1,
  kChallenge,
  kProof,
  kWelcome,
  kRefusal,  // in place of any reply; the sender closes the connection
  kMatch,
  kMatched,
  kExists,
  kHeld,
  kReserve,
  kReserveMore,
  kGranted,
  kWrite,
  kWritten,
  kCommit,
  kPut,
  kPutDone,
  kLookup,
  kRedeem,
  kLeased,
  kGet,
  kRead,
  kBlocks,
  kRelease,
  kReleased,
  kMakeView,
  kViewMade,
  kTicket,
  kTicketIs,
  kVerify,
  kVerified,
  kComplain,  // no reply
  kApply,
  kApplied,
  kClear,
  kCleared,
  kList,
  kListed,
  kUsage,
  kUsageIs,
  kAudit,
  kAuditIs,
  kSettle,
  kSettled,
  kLeave,
  kLeft,
};
inline constexpr uint16_t kTypesEnd = static_cast<uint16_t>(Type::kLeft) + 1;

struct FrameHeader {
  Type type{};
  uint32_t body_bytes = 0;
  uint64_t payload_bytes = 0;
  uint64_t request = 0;  // a reply carries its request's
  TraceId trace{};       // of the call that caused it, all zero where nobody asked for one
};
inline constexpr size_t kHeaderBytes = 4 + 2 + 2 + 4 + 4 + 8 + 8 + 16;

void encode(const FrameHeader& header, std::span<uint8_t, kHeaderBytes> out);
// None: no frame of ours, or beyond `body_bytes_max`.
std::optional<FrameHeader> decode_header(std::span<const uint8_t, kHeaderBytes> bytes,
                                         uint32_t body_bytes_max);

// ---- hello: who is there, and may they ---------------------------------------------------------

// client → node. `session` names the one to join (a data connection) or to take over (a control
// connection of the same process); zero: a new one.
struct Hello {
  static constexpr Type kType = Type::kHello;
  uint16_t version_min = kVersionMin;
  uint16_t version_max = kVersionMax;
  bool data = false;          // joins `session`; else the control connection
  bool wants_memory = false;  // over a unix socket: pass the segment
  Nonce nonce{};
  AttemptId session;
  uint64_t epoch = 0;  // of the node it knew; zero: none
  std::string record;  // the namespace, canonical; its SHA-256 is the namespace's digest
  uint64_t part_bytes = 0;
  template <class C>
  void fields(C& c) {
    c(version_min)(version_max)(data)(wants_memory)(nonce)(session)(epoch)(record)(part_bytes);
  }
};

// node → client: proves the token for the client's nonce.
struct Challenge {
  static constexpr Type kType = Type::kChallenge;
  uint16_t version = kVersionMax;
  Nonce nonce{};
  Digest proof{};
  uint64_t epoch = 0;
  template <class C>
  void fields(C& c) {
    c(version)(nonce)(proof)(epoch);
  }
};

// client → node: proves it for the node's nonce.
struct Proof {
  static constexpr Type kType = Type::kProof;
  Digest proof{};
  template <class C>
  void fields(C& c) {
    c(proof);
  }
};

struct Welcome {
  static constexpr Type kType = Type::kWelcome;
  AttemptId session;
  uint64_t epoch = 0;
  uint32_t namespace_version = 0;
  uint64_t lease_ns = 0;
  uint64_t pool_bytes = 0;
  uint64_t header_bytes = 0;  // of the memory passed beside this; zero: none was
  uint64_t view_bytes_max = 0;
  bool taken_over = false;
  std::string socket;  // path of the node's unix socket, for clients on its machine; may be empty
  template <class C>
  void fields(C& c) {
    c(session)(epoch)(namespace_version)(lease_ns)(pool_bytes)(header_bytes);
    c(view_bytes_max)(taken_over)(socket);
  }
};

enum class Why : uint8_t {
  kProtocol,   // not understood
  kVersion,    // no version in common
  kToken,      // the proof is wrong
  kNamespace,  // the record is not one, or the node has no names left
  kSession,    // no such session
  kTooMany,    // connections, leases, requests: a bound of the session or the node
  kStopping,
};

struct Refusal {
  static constexpr Type kType = Type::kRefusal;
  Why why = Why::kProtocol;
  std::string message;
  template <class C>
  void fields(C& c) {
    c(why, static_cast<uint8_t>(Why::kStopping) + 1)(message);
  }
};

// HMAC-SHA256 over both nonces, the role and the rest of the hello, so that neither side's proof
// can be sent back to it, nor a hello be changed on its way.
Digest prove(const std::string& token, bool node, const Hello& hello, const Challenge& challenge);
bool equal(const Digest& a, const Digest& b);  // in constant time

}  // namespace kvstore::wire
