// The clients of a server: who may come back to which session, and when one is over.
//
// Life of a client: enter() with its control connection → join() with others → lost(), when the
//   control connection ends. A client that maps the memory and holds grants or views then lives on
//   until its process is dead, or takes it over with a new control connection; any other is over.
// Threads: any; one mutex, innermost but for the sessions'.
// Owns: the sessions.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "peer_session.h"
#include "sockets.h"
#include "wire.h"

namespace kvstore {

struct Peer {
  Peer(AttemptId name, const std::shared_ptr<Node>& node, const std::string& digest,
       uint64_t part_bytes, bool maps)
      : session(std::make_shared<PeerSession>(name, node, digest, part_bytes)), maps_memory(maps) {}
  const std::shared_ptr<PeerSession> session;
  const bool maps_memory;  // copies by itself: over a unix socket, from a process with a name here
  PeerProcess process;     // of a peer that maps; constant once entered
  uint64_t watch = 0;      // its pidfd's name in the server
  uint64_t control = 0;    // its control connection, guarded by Peers; zero: lost
  std::atomic<uint32_t> connections{0};
  std::atomic<bool> over{false};  // its connections are to be closed
  std::string label() const;      // in log lines; the name itself is a secret
};

class Peers {
 public:
  explicit Peers(std::shared_ptr<Node> node) : node_(std::move(node)) {}

  struct Entered {
    std::shared_ptr<Peer> peer;  // null: refused
    bool taken_over = false;
    wire::Why why = wire::Why::kNamespace;
    std::string refusal;
  };
  // A control connection. `maps_memory`: the client's process is known and wants to.
  Entered enter(const wire::Hello& hello, PeerProcess process, bool maps_memory,
                uint64_t connection);
  std::shared_ptr<Peer> join(const AttemptId& name);  // null: no such session
  // The control connection has ended. True: so has the session.
  bool lost(Peer& peer, uint64_t connection);
  void died(Peer& peer);  // its process
  void end_all();
  size_t size() const;

 private:
  void end(Peer& peer);

  const std::shared_ptr<Node> node_;
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Peer>> peers_;  // by the name's high half; guarded
};

}  // namespace kvstore
