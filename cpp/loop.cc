#include "loop.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <new>
#include <system_error>

namespace kvstore {
namespace {

constexpr int kEventsMax = 64;
constexpr Nanos kLook = 250 * kMillisecond;         // at all deadlines
constexpr Nanos kAcceptPause = 100 * kMillisecond;  // while there are no descriptors
constexpr Nanos kSpin = kMillisecond / 20;          // where cores are free
constexpr int kParkedPause = 1;  // ms; requests that wait for room ask this often
constexpr uint64_t kWakeId = 0;  // then the listeners, from 1
constexpr uint64_t kFirstWatch = uint64_t{1} << 31;  // then the connections, from 1 << 32

uint32_t interest(Connection::Wants wants) {
  if (wants == Connection::Wants::kNeither) return EPOLLRDHUP;
  return (wants == Connection::Wants::kOutput ? EPOLLOUT : EPOLLIN) | EPOLLRDHUP;
}

bool control(int epoll, int operation, int fd, uint64_t id, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  return epoll_ctl(epoll, operation, fd, &event) == 0;
}

// Whether the peer has ended a connection that wants nothing to be read.
bool hung_up(uint32_t events) { return (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0; }

}  // namespace

Loop::Loop(ServerParts& parts, std::function<void(Socket)> accepted, std::function<void()> closed)
    : parts_(parts),
      accepted_(std::move(accepted)),
      closed_(std::move(closed)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      spare_(eventfd(0, EFD_CLOEXEC)) {
  if (!epoll_ || !wake_ || !control(epoll_.fd(), EPOLL_CTL_ADD, wake_.fd(), kWakeId, EPOLLIN))
    throw std::system_error(errno, std::generic_category(), "no descriptor for an I/O thread");
}

Loop::~Loop() { join(); }

void Loop::listen(std::vector<Socket> listeners) {
  listeners_ = std::move(listeners);
  for (size_t i = 0; i < listeners_.size(); ++i)
    control(epoll_.fd(), EPOLL_CTL_ADD, listeners_[i].fd(), i + 1, EPOLLIN);
}

void Loop::start() {
  // Signals are for the threads of whoever runs this node.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// ---- from other threads ------------------------------------------------------------------------

void Loop::post(std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    posted_.push_back(std::move(work));
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.fd(), &one, sizeof one);
}

void Loop::add(uint64_t id, Socket socket) {
  post([this, id, holder = std::make_shared<Socket>(std::move(socket))] {
    const Nanos now = monotonic_now();
    auto connection = std::make_unique<Connection>(id, std::move(*holder), parts_, now);
    if (stopping_seen_ || !control(epoll_.fd(), EPOLL_CTL_ADD, connection->fd(), id,
                                   interest(Connection::Wants::kInput))) {
      closed_();
      return;
    }
    connections_.emplace(id, Served{std::move(connection)});
  });
}

void Loop::answer(uint64_t id, Reply reply) {
  post([this, id, holder = std::make_shared<Reply>(std::move(reply))] {
    const auto at = connections_.find(id);
    if (at == connections_.end()) return;  // it is over: nobody waits for this
    Connection& connection = *at->second.connection;
    keep_or_close(id, guarded(connection, [&] {
                    return connection.answer(std::move(*holder), monotonic_now());
                  }));
  });
}

void Loop::watch(std::shared_ptr<Peer> peer) {
  post([this, peer = std::move(peer)] {
    const uint64_t id = kFirstWatch + next_watch_++ % kFirstWatch;
    if (peer->over.load()) return;
    if (control(epoll_.fd(), EPOLL_CTL_ADD, peer->process.pidfd.fd(), id, EPOLLIN))
      watched_.emplace(id, peer);
  });
}

void Loop::sweep() {
  post([this] {
    std::vector<uint64_t> over;
    for (const auto& [id, served] : connections_) {
      if (served.connection->over()) over.push_back(id);
    }
    for (const uint64_t id : over) keep_or_close(id, false);
    std::erase_if(watched_, [&](const auto& watched) {
      if (!watched.second->over.load()) return false;
      control(epoll_.fd(), EPOLL_CTL_DEL, watched.second->process.pidfd.fd(), watched.first, 0);
      return true;
    });
  });
}

void Loop::stop() {
  post([this] {
    stopping_seen_ = true;
    listeners_.clear();
    const Nanos now = monotonic_now();
    std::vector<uint64_t> ids;
    ids.reserve(connections_.size());
    for (const auto& [id, served] : connections_) ids.push_back(id);
    for (const uint64_t id : ids) {
      Connection& connection = *connections_.at(id).connection;
      const bool under_way = !connection.idle();
      connection.stop_after_reply(now);
      keep_or_close(id, under_way && guarded(connection, [&] { return connection.advance(now); }));
    }
  });
}

bool Loop::wait(Nanos deadline) {
  const auto until = std::chrono::steady_clock::time_point(std::chrono::nanoseconds(deadline));
  std::unique_lock lock(mutex_);
  return emptied_.wait_until(lock, until, [this] { return emptied_by_stop_; });
}

void Loop::join() {
  if (!thread_.joinable()) return;
  post([this] { ending_ = true; });
  thread_.join();
}

// ---- its own thread ----------------------------------------------------------------------------

void Loop::run() {
  epoll_event events[kEventsMax];
  const bool may_spin = std::thread::hardware_concurrency() > 2;
  while (!ending_) {
    int count = 0;
    const Nanos began = monotonic_now();
    // Only while it pays: the last wait was as short as that.
    for (Nanos then = began; may_spin && spinning_ && count == 0 && then - began < kSpin;
         then = monotonic_now())
      count = epoll_wait(epoll_.fd(), events, kEventsMax, 0);
    if (count == 0) count = epoll_wait(epoll_.fd(), events, kEventsMax, pause());
    const Nanos now = monotonic_now();
    spinning_ = count > 0 && now - began < kSpin;
    for (int i = 0; i < count; ++i) on_event(events[i].data.u64, events[i].events);
    advance_unfinished();
    if (!parked_.empty() || now >= next_look_) tick(now);
    if (stopping_seen_ && connections_.empty()) {
      const std::lock_guard lock(mutex_);
      emptied_by_stop_ = true;
      emptied_.notify_all();
    }
  }
  for (size_t left = connections_.size(); left > 0; --left) closed_();
  connections_.clear();
}

// Each once more, those of before these events.
void Loop::advance_unfinished() {
  std::unordered_set<uint64_t> ids;
  ids.swap(unfinished_);
  for (const uint64_t id : ids) {
    const auto at = connections_.find(id);
    if (at == connections_.end() || !at->second.connection->unfinished()) continue;
    Connection& connection = *at->second.connection;
    keep_or_close(id, guarded(connection, [&] { return connection.advance(monotonic_now()); }));
  }
}

int Loop::pause() const {
  if (!unfinished_.empty()) return 0;
  if (!parked_.empty()) return kParkedPause;
  if (connections_.empty() && accept_again_ == 0) return -1;
  return static_cast<int>(std::max<Nanos>(1, (next_look_ - monotonic_now()) / kMillisecond + 1));
}

void Loop::on_event(uint64_t id, uint32_t events) {
  if (id == kWakeId) {
    take_posted();
  } else if (id <= listeners_.size()) {
    accept_all(listeners_[id - 1]);
  } else if (const auto watched = watched_.find(id); watched != watched_.end()) {
    const std::shared_ptr<Peer> peer = watched->second;
    control(epoll_.fd(), EPOLL_CTL_DEL, peer->process.pidfd.fd(), id, 0);
    watched_.erase(watched);
    parts_.peers.died(*peer);
    parts_.tell("info", "session ended", {{"session", peer->label()}, {"why", "its process died"}});
    parts_.sweep();
  } else if (const auto at = connections_.find(id); at != connections_.end()) {
    Connection& connection = *at->second.connection;
    const bool waiting = connection.wants() == Connection::Wants::kNeither;
    keep_or_close(id, !(waiting && hung_up(events)) &&
                          guarded(connection, [&] { return connection.advance(monotonic_now()); }));
  }
}

void Loop::take_posted() {
  uint64_t count;
  [[maybe_unused]] const ssize_t got = read(wake_.fd(), &count, sizeof count);
  std::vector<std::function<void()>> posted;
  {
    const std::lock_guard lock(mutex_);
    posted.swap(posted_);
  }
  for (const auto& work : posted) work();
}

void Loop::accept_all(Socket& listener) {
  bool exhausted = false;
  while (auto socket = accept_from(listener.fd(), &exhausted)) accepted_(std::move(*socket));
  if (!exhausted) return;
  // One is refused at once, by the descriptor kept for this; who waits would wait for nothing.
  spare_.reset();
  const bool refused = accept_from(listener.fd(), &exhausted).has_value();
  parts_.counters.refused.fetch_add(1);
  parts_.tell("warning", "connection refused", {{"why", "no descriptors left (ulimit -n)"}});
  spare_ = Socket(eventfd(0, EFD_CLOEXEC));
  if (refused) return;
  accept_again_ = monotonic_now() + kAcceptPause;
  for (size_t i = 0; i < listeners_.size(); ++i)
    control(epoll_.fd(), EPOLL_CTL_MOD, listeners_[i].fd(), i + 1, 0);
}

void Loop::tick(Nanos now) {
  std::vector<uint64_t> ids(parked_.begin(), parked_.end());
  if (now >= next_look_) {
    next_look_ = now + kLook;
    ids.clear();
    for (const auto& [id, served] : connections_) ids.push_back(id);
  }
  for (const uint64_t id : ids) {
    const auto at = connections_.find(id);
    if (at == connections_.end()) continue;
    Connection& connection = *at->second.connection;
    keep_or_close(id, guarded(connection, [&] { return connection.tick(now); }));
  }
  if (accept_again_ == 0 || now < accept_again_) return;
  accept_again_ = 0;
  for (size_t i = 0; i < listeners_.size(); ++i)
    control(epoll_.fd(), EPOLL_CTL_MOD, listeners_[i].fd(), i + 1, EPOLLIN);
}

// A request this machine has no memory for ends its connection, not the node.
template <class Step>
bool Loop::guarded(Connection& connection, Step&& step) {
  try {
    return step();
  } catch (const std::bad_alloc&) {
    parts_.tell("error", "out of memory", {{"descriptor", std::to_string(connection.fd())}});
    return false;
  }
}

void Loop::keep_or_close(uint64_t id, bool alive) {
  const auto at = connections_.find(id);
  if (!alive) {
    parked_.erase(id);
    unfinished_.erase(id);
    const auto ended = std::move(at->second.connection);
    connections_.erase(at);
    closed_();
    return;
  }
  Served& served = at->second;
  if (served.connection->unfinished()) unfinished_.insert(id);
  if (served.connection->parked()) {
    parked_.insert(id);
  } else {
    parked_.erase(id);
  }
  const Connection::Wants wants = served.connection->wants();
  if (wants == served.wants) return;
  served.wants = wants;
  control(epoll_.fd(), EPOLL_CTL_MOD, served.connection->fd(), id, interest(wants));
}

}  // namespace kvstore
