#include "peers.h"

#include <poll.h>

#include <stdexcept>

#include "sha256.h"

namespace kvstore {
namespace {

bool dead(const PeerProcess& process) {
  pollfd waiting{process.pidfd.fd(), POLLIN, 0};
  return poll(&waiting, 1, 0) > 0;
}

AttemptId random_name() {
  AttemptId name;
  random_bytes({reinterpret_cast<uint8_t*>(&name), sizeof name});
  return name;
}

}  // namespace

std::string Peer::label() const {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string text;
  for (unsigned shift = 32; shift > 0; shift -= 4)
    text += kHex[session->id.low >> (shift - 4) & 15];
  return text;
}

Peers::Entered Peers::enter(const wire::Hello& hello, PeerProcess process, bool maps_memory,
                            uint64_t connection) {
  Entered entered;
  const wire::Digest hashed = sha256(hello.record.data(), hello.record.size());
  const std::string digest(hashed.begin(), hashed.end());
  const std::lock_guard lock(mutex_);
  if (const auto at = peers_.find(hello.session.high); at != peers_.end()) {
    const std::shared_ptr<Peer> known = at->second;
    const bool same = known->session->id == hello.session && known->session->digest == digest;
    // The name is a secret of its client. One that maps must be the same process too: what it holds
    // ends with that process.
    if (same && known->maps_memory && maps_memory && known->process.pid == process.pid &&
        !dead(known->process)) {
      known->control = connection;
      entered.peer = known;
      entered.taken_over = true;
      return entered;
    }
    if (same && !known->maps_memory) end(*known);  // its old control connection is half open
  }
  try {
    entered.peer =
        std::make_shared<Peer>(random_name(), node_, digest, hello.part_bytes, maps_memory);
  } catch (const std::length_error& full) {
    entered.refusal = full.what();
    return entered;
  }
  entered.peer->process = std::move(process);
  entered.peer->control = connection;
  peers_[entered.peer->session->id.high] = entered.peer;
  return entered;
}

std::shared_ptr<Peer> Peers::join(const AttemptId& name) {
  const std::lock_guard lock(mutex_);
  const auto at = peers_.find(name.high);
  if (at == peers_.end() || at->second->session->id != name) return nullptr;
  return at->second;
}

bool Peers::lost(Peer& peer, uint64_t connection) {
  const std::lock_guard lock(mutex_);
  if (peer.control != connection) return false;  // taken over before, or ended
  peer.control = 0;
  Session& session = peer.session->store.session();
  session.end_copying();
  if (peer.maps_memory && !dead(peer.process) && !session.end_all_if_idle()) return false;
  end(peer);
  return true;
}

void Peers::died(Peer& peer) {
  const std::lock_guard lock(mutex_);
  end(peer);
}

void Peers::end_all() {
  const std::lock_guard lock(mutex_);
  while (!peers_.empty()) end(*std::shared_ptr<Peer>(peers_.begin()->second));
}

// REQUIRES: mutex_ held.
void Peers::end(Peer& peer) {
  if (peer.over.exchange(true)) return;
  peer.control = 0;
  peer.session->store.session().end_all();
  peer.session->store.end();
  peers_.erase(peer.session->id.high);
}

size_t Peers::size() const {
  const std::lock_guard lock(mutex_);
  return peers_.size();
}

}  // namespace kvstore
