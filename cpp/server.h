// Serves a node to other processes: listens, deals connections to its loops, and ends sessions
// whose process is dead.
//
// Threads: any. Its own: the loops, each with an epoll and the connections dealt to it, and one for
//   requests that take long.
// Owns: listeners, loops, sessions. Holds the node.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "connection.h"
#include "loop.h"
#include "node.h"
#include "peers.h"
#include "sockets.h"

namespace kvstore {

struct ServerOptions {
  std::vector<Address> listen;
  std::string token;
  unsigned io_threads = 0;  // 0: chosen by the number of cores
  uint32_t connections_max = 4096;
  uint32_t connections_of_a_peer = 64;
  uint64_t leases_max = uint64_t{1} << 20;  // blocks a session may lease
  Nanos hello = 5'000 * kMillisecond;
  Nanos stall = 30'000 * kMillisecond;
};

struct ServerEvent {
  std::string level;
  std::string event;
  std::vector<std::pair<std::string, std::string>> fields;
};

class Server {
 public:
  // Null with a reason.
  static std::unique_ptr<Server> start(std::shared_ptr<Node> node, const ServerOptions& options,
                                       std::string* error);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  const std::vector<Address>& addresses() const { return bound_; }
  uint64_t epoch() const { return parts_.epoch; }
  std::vector<std::pair<std::string, uint64_t>> counts() const;
  // What an operator should hear of; the descriptor is readable while there is something.
  std::vector<ServerEvent> take_events();
  int event_fd() const { return event_fd_.fd(); }
  // No new connections or requests; what is under way ends. True: all of it did in time.
  bool stop(Nanos deadline);

 private:
  struct SlowWork {
    uint64_t connection;
    std::function<std::optional<Reply>()> work;
  };

  Server(std::shared_ptr<Node> node, const ServerOptions& options);
  bool listen(std::string* error);
  void start_threads();
  void tell(const std::string& level, const std::string& event,
            std::vector<std::pair<std::string, std::string>> fields);
  void admit(Socket socket);
  Loop& loop_of(uint64_t connection);
  void run_slow_work();

  const ServerOptions options_;
  Peers peers_;
  ServerParts parts_;
  std::vector<Address> bound_;
  std::vector<Socket> listeners_;
  std::vector<std::unique_ptr<Loop>> loops_;
  std::atomic<uint64_t> next_connection_{0};
  std::atomic<uint32_t> num_connections_{0};

  Socket event_fd_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::deque<ServerEvent> events_;
  uint64_t events_dropped_ = 0;
  std::deque<SlowWork> slow_work_;
  bool stopping_slow_ = false;
  bool stopped_ = false;
  std::condition_variable slow_;
  std::thread slow_thread_;
};

}  // namespace kvstore
