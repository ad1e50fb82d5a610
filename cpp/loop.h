// One thread of a server with the connections dealt to it.
//
// Threads: its own; the public calls from any.
// Owns: its epoll and its connections.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "connection.h"
#include "sockets.h"

namespace kvstore {

class Loop {
 public:
  // `accepted`: somebody has connected. `closed`: one of its connections is over.
  Loop(ServerParts& parts, std::function<void(Socket)> accepted, std::function<void()> closed);
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  void start();
  void listen(std::vector<Socket> listeners);  // before start()
  void add(uint64_t id, Socket socket);
  void answer(uint64_t id, Reply reply);
  void watch(std::shared_ptr<Peer> peer);  // until its process is dead
  void sweep();                            // closes the connections of peers that are over
  // Takes no more; connections end with the message they are at. wait(): true once all have.
  void stop();
  bool wait(Nanos deadline);
  void join();  // closes what is left

 private:
  void post(std::function<void()> work);
  void run();
  void on_event(uint64_t id, uint32_t events);
  void take_posted();
  void accept_all(Socket& listener);
  void tick(Nanos now);
  void advance_unfinished();
  void keep_or_close(uint64_t id, bool alive);
  template <class Step>
  bool guarded(Connection& connection, Step&& step);
  int pause() const;

  ServerParts& parts_;
  const std::function<void(Socket)> accepted_;
  const std::function<void()> closed_;
  Socket epoll_;
  Socket wake_;
  Socket spare_;  // given up to be able to refuse who comes when descriptors are out
  std::vector<Socket> listeners_;
  struct Served {
    std::unique_ptr<Connection> connection;
    Connection::Wants wants = Connection::Wants::kInput;
  };
  std::unordered_map<uint64_t, Served> connections_;
  std::unordered_set<uint64_t> parked_;
  std::unordered_set<uint64_t> unfinished_;  // whose turn comes again after the others'
  std::unordered_map<uint64_t, std::shared_ptr<Peer>> watched_;
  uint64_t next_watch_ = 0;
  Nanos next_look_ = 0;     // at all deadlines
  Nanos accept_again_ = 0;  // descriptors were out; zero: they are not
  bool spinning_ = false;   // the last wait was short
  bool stopping_seen_ = false;
  bool ending_ = false;

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<std::function<void()>> posted_;
  bool emptied_by_stop_ = false;
  std::condition_variable emptied_;
  std::thread thread_;
};

}  // namespace kvstore
