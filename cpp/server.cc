#include "server.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace kvstore {
namespace {

constexpr size_t kEventsMax = 1000;
constexpr unsigned kIoThreadsMax = 4;
constexpr uint64_t kFirstConnection = uint64_t{1} << 32;  // below are a loop's own names

}  // namespace

std::unique_ptr<Server> Server::start(std::shared_ptr<Node> node, const ServerOptions& options,
                                      std::string* error) {
  try {
    std::unique_ptr<Server> server(new Server(std::move(node), options));
    if (!server->listen(error)) return nullptr;
    server->start_threads();
    return server;
  } catch (const std::system_error& failed) {
    *error = failed.what();
    return nullptr;
  }
}

Server::Server(std::shared_ptr<Node> node, const ServerOptions& options)
    : options_(options),
      peers_(node),
      parts_(peers_),
      event_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_fd_) throw std::system_error(errno, std::generic_category(), "no event descriptor");
  parts_.node = std::move(node);
  parts_.token = options.token;
  parts_.leases_max = options.leases_max;
  parts_.connections_of_a_peer = options.connections_of_a_peer;
  parts_.hello = options.hello;
  parts_.stall = options.stall;
  random_bytes({reinterpret_cast<uint8_t*>(&parts_.epoch), sizeof parts_.epoch});
  parts_.tell = [this](const std::string& level, const std::string& event, auto fields) {
    tell(level, event, std::move(fields));
  };
  parts_.run_slowly = [this](uint64_t connection, auto work) {
    {
      const std::lock_guard lock(mutex_);
      slow_work_.push_back({connection, std::move(work)});
    }
    slow_.notify_one();
  };
  parts_.watch = [this](const std::shared_ptr<Peer>& peer) { loops_.front()->watch(peer); };
  parts_.sweep = [this] {
    for (const auto& loop : loops_) loop->sweep();
  };
}

bool Server::listen(std::string* error) {
  for (const Address& address : options_.listen) {
    Address bound;
    std::string reason;
    Socket listener = listen_on(address, &bound, &reason);
    if (!listener) {
      *error = "cannot listen on " + address.text() + ": " + reason;
      return false;
    }
    if (bound.local() && parts_.socket_path.empty()) parts_.socket_path = bound.path;
    bound_.push_back(std::move(bound));
    listeners_.push_back(std::move(listener));
  }
  return true;
}

void Server::start_threads() {
  const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
  const unsigned count =
      options_.io_threads > 0 ? options_.io_threads : std::min(cores, kIoThreadsMax);
  for (unsigned i = 0; i < count; ++i) {
    loops_.push_back(std::make_unique<Loop>(
        parts_, [this](Socket socket) { admit(std::move(socket)); },
        [this] { num_connections_.fetch_sub(1); }));
  }
  loops_.front()->listen(std::move(listeners_));
  slow_thread_ = std::thread([this] { run_slow_work(); });
  for (const auto& loop : loops_) loop->start();
}

Server::~Server() { stop(0); }

bool Server::stop(Nanos deadline) {
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return true;
    stopped_ = true;
  }
  bool in_time = true;
  for (const auto& loop : loops_) loop->stop();
  for (const auto& loop : loops_) in_time = loop->wait(deadline) && in_time;
  {
    const std::lock_guard lock(mutex_);
    stopping_slow_ = true;
    slow_work_.clear();
  }
  slow_.notify_all();
  if (slow_thread_.joinable()) slow_thread_.join();
  for (const auto& loop : loops_) loop->join();
  peers_.end_all();
  for (const Address& address : bound_) {
    if (address.local()) unlink(address.path.c_str());
  }
  return in_time;
}

// ---- connections -------------------------------------------------------------------------------

void Server::admit(Socket socket) {
  if (num_connections_.fetch_add(1) >= options_.connections_max) {
    num_connections_.fetch_sub(1);
    parts_.counters.refused.fetch_add(1);
    const std::string why = "this node has " + std::to_string(options_.connections_max) +
                            " connections, the most there may be (connections_max)";
    parts_.tell("warning", "connection refused", {{"why", why}});
    const Reply reply = refuse(wire::Why::kTooMany, why);
    wire::FrameHeader header;
    header.type = reply.type;
    header.body_bytes = static_cast<uint32_t>(reply.body.size());
    std::array<uint8_t, wire::kHeaderBytes> head;
    wire::encode(header, head);
    const iovec pieces[] = {{head.data(), head.size()},
                            {const_cast<uint8_t*>(reply.body.data()), reply.body.size()}};
    send_some(socket.fd(), pieces);  // it is closed either way
    return;
  }
  parts_.counters.accepted.fetch_add(1);
  const uint64_t id = kFirstConnection + next_connection_.fetch_add(1);
  loop_of(id).add(id, std::move(socket));
}

Loop& Server::loop_of(uint64_t connection) { return *loops_[connection % loops_.size()]; }

void Server::run_slow_work() {
  std::unique_lock lock(mutex_);
  while (true) {
    slow_.wait(lock, [this] { return stopping_slow_ || !slow_work_.empty(); });
    if (stopping_slow_) return;
    SlowWork next = std::move(slow_work_.front());
    slow_work_.pop_front();
    lock.unlock();
    try {
      if (auto reply = next.work())
        loop_of(next.connection).answer(next.connection, std::move(*reply));
    } catch (const std::bad_alloc&) {
      tell("error", "out of memory", {{"connection", std::to_string(next.connection)}});
      loop_of(next.connection)
          .answer(next.connection,
                  refuse(wire::Why::kTooMany, "the node has no memory for this answer"));
    }
    lock.lock();
  }
}

// ---- what an operator hears --------------------------------------------------------------------

void Server::tell(const std::string& level, const std::string& event,
                  std::vector<std::pair<std::string, std::string>> fields) {
  {
    const std::lock_guard lock(mutex_);
    if (events_.size() >= kEventsMax) {
      ++events_dropped_;
      return;
    }
    events_.push_back({level, event, std::move(fields)});
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(event_fd_.fd(), &one, sizeof one);
}

std::vector<ServerEvent> Server::take_events() {
  uint64_t count;
  [[maybe_unused]] const ssize_t got = read(event_fd_.fd(), &count, sizeof count);
  const std::lock_guard lock(mutex_);
  std::vector<ServerEvent> events(events_.begin(), events_.end());
  events_.clear();
  if (events_dropped_ > 0) {
    events.push_back({"warning", "events dropped", {{"count", std::to_string(events_dropped_)}}});
    events_dropped_ = 0;
  }
  return events;
}

std::vector<std::pair<std::string, uint64_t>> Server::counts() const {
  const ServerCounters& counters = parts_.counters;
  return {{"connections", num_connections_.load()}, {"sessions", peers_.size()},
          {"accepted", counters.accepted.load()},   {"refused", counters.refused.load()},
          {"stalled", counters.stalled.load()},     {"requests", counters.requests.load()},
          {"bytes_in", counters.bytes_in.load()},   {"bytes_out", counters.bytes_out.load()}};
}

}  // namespace kvstore
