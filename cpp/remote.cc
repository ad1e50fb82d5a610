#include "remote.h"

#include <algorithm>
#include <system_error>

namespace kvstore {
namespace {

constexpr unsigned kLinksMax = 32;
constexpr Nanos kFirstPause = 10 * kMillisecond;  // after a failed try, then twice as long
constexpr unsigned kPauseDoublings = 7;           // up to 1.28 s
constexpr Nanos kSilence = 100 * kMillisecond;    // given to a node that may only have been busy
constexpr std::chrono::milliseconds kKeeperPause{100};
constexpr std::chrono::milliseconds kQuietPause{1000};

bool over(const Patience& patience, Io* failed) {
  const Io io = patience_over(patience);
  if (io != Io::kDone) *failed = io;
  return io != Io::kDone;
}

std::chrono::steady_clock::time_point slice_end(const Patience& patience) {
  const Nanos until = std::min(patience.deadline, monotonic_now() + kIoSlice);
  return std::chrono::steady_clock::time_point(std::chrono::nanoseconds(until));
}

}  // namespace

std::shared_ptr<Remote> Remote::connect(const RemoteOptions& options, Io* failed,
                                        std::string* error) {
  std::shared_ptr<Remote> remote(new Remote(options));
  Opened opened = remote->open_control(remote->patience(), failed, error);
  if (opened.control == nullptr) return nullptr;
  remote->shares_memory_ = opened.shares_memory;
  *failed = Io::kLost;
  if (!remote->install(std::move(opened), error)) return nullptr;
  remote->keeper_ = std::thread([self = remote.get()] { self->keep(); });
  return remote;
}

Remote::~Remote() { end(); }

void Remote::leave() {
  const std::lock_guard lock(mutex_);
  if (control_ == nullptr) return;
  wire::Left left;
  // A node that does not answer finds out by the connection's end.
  if (control_->ask(wire::Leave{}, &left, {monotonic_now() + options_.timeout, nullptr}) !=
      Io::kDone)
    control_.reset();
}

void Remote::end() {
  ending_.store(true);
  {
    const std::lock_guard lock(mutex_);
    woken_ = true;
  }
  keeper_wakes_.notify_all();
  given_.notify_all();
  if (keeper_.joinable()) keeper_.join();
  const std::lock_guard lock(mutex_);
  idle_.clear();
  control_.reset();
}

// ---- the session -------------------------------------------------------------------------------

Link::Wanted Remote::wanted(const Address& address) const {
  Link::Wanted wanted;
  wanted.address = address;
  wanted.token = options_.token;
  wanted.hello.record = options_.record;
  wanted.hello.part_bytes = options_.part_bytes;
  return wanted;
}

// The node's memory is shared if its unix socket can be reached from here, and the node behind it
// has the epoch of the one at the address: names and addresses prove nothing.
Remote::Opened Remote::open_control(const Patience& patience, Io* failed, std::string* error) {
  Opened opened;
  opened.address = options_.address;
  const bool may_share = options_.way != Way::kTcp;
  Link::Wanted first = wanted(options_.address);
  AttemptId session;
  uint64_t epoch;
  {
    const std::lock_guard lock(mutex_);
    session = session_;
    epoch = epoch_;
  }
  if (options_.address.local()) {
    first.hello.wants_memory = may_share;
    first.hello.session = session;
    first.hello.epoch = epoch;
  }
  opened.control = Link::open(first, patience, failed, error);
  if (opened.control == nullptr) return opened;
  if (!options_.address.local() && may_share && !opened.control->welcome().socket.empty()) {
    Link::Wanted second = wanted({});
    second.address.path = opened.control->welcome().socket;
    second.hello.wants_memory = true;
    second.hello.session = session;
    second.hello.epoch = epoch;
    second.only_epoch = opened.control->welcome().epoch;
    auto local = Link::open(second, patience, failed, error);
    if (local != nullptr && local->welcome().header_bytes > 0) {
      opened.control = std::move(local);
      opened.address = second.address;
    }
  }
  opened.shares_memory = opened.control->welcome().header_bytes > 0;
  const bool must_share = options_.way == Way::kShm || shares_memory_;
  if (!must_share || opened.shares_memory) return opened;
  *failed = Io::kRefused;
  *error = options_.address.text() + ": the node's memory cannot be shared with this process (" +
           (error->empty() ? "it passes none here" : *error) + "); transport=\"tcp\" works";
  opened.control.reset();
  return opened;
}

bool Remote::install(Opened opened, std::string* error) {
  const wire::Welcome& welcome = opened.control->welcome();
  std::shared_ptr<Mapping> mapping;
  if (opened.shares_memory && !welcome.taken_over) {
    auto& passed = opened.control->descriptors();
    if (passed.size() != 2) {
      *error = "the node passed " + std::to_string(passed.size()) + " descriptors, not 2";
      return false;
    }
    mapping = Mapping::map(std::move(passed[0]), passed[1], welcome.pool_bytes,
                           welcome.header_bytes, error);
    if (mapping == nullptr) return false;
  }
  opened.control->descriptors().clear();
  const std::lock_guard lock(mutex_);
  if (!welcome.taken_over) {
    incarnation_.fetch_add(1);
    version_.store(welcome.namespace_version);
    mapping_ = std::move(mapping);
    idle_.clear();
  }
  session_ = welcome.session;
  epoch_ = welcome.epoch;
  address_ = opened.address;
  pool_bytes_.store(welcome.pool_bytes);
  view_bytes_max_.store(welcome.view_bytes_max);
  control_ = std::move(opened.control);
  last_error_.clear();
  return true;
}

// One thread connects, the others wait for what comes of it.
bool Remote::ensure_session(const Patience& patience, Io* failed) {
  std::unique_lock lock(mutex_);
  while (true) {
    if (control_ != nullptr && control_->idle_and_alive()) return true;
    if (!connecting_) break;
    if (over(patience, failed)) return false;
    given_.wait_until(lock, slice_end(patience));
  }
  *failed = Io::kLost;
  if (monotonic_now() < next_try_) return false;
  connecting_ = true;
  lock.unlock();
  std::string error;
  Opened opened = open_control(patience, failed, &error);
  const bool connected = opened.control != nullptr && install(std::move(opened), &error);
  lock.lock();
  connecting_ = false;
  next_try_ =
      connected ? 0 : monotonic_now() + (kFirstPause << std::min(failures_, kPauseDoublings));
  failures_ = connected ? 0 : failures_ + 1;
  if (!connected) last_error_ = std::move(error);
  if (!connected && *failed == Io::kTimedOut) {
    suspect();
  } else {
    silent_since_ = 0;  // it answers, or is known to be gone
  }
  given_.notify_all();
  return connected;
}

// For one exchange, or several in a row.
std::unique_ptr<Link> Remote::open_link(const Patience& patience, Io* failed, wire::Why* why,
                                        uint64_t* incarnation) {
  if (!ensure_session(patience, failed)) return nullptr;
  Link::Wanted next;
  {
    const std::lock_guard lock(mutex_);
    next.address = address_;
    next.token = options_.token;
    next.hello.data = true;
    next.hello.session = session_;
    next.only_epoch = epoch_;
    *incarnation = incarnation_.load();
  }
  std::string error;
  auto link = Link::open(next, patience, failed, &error, why);
  const std::lock_guard lock(mutex_);
  if (link == nullptr) last_error_ = std::move(error);
  if (link == nullptr && *failed == Io::kTimedOut) suspect();
  return link;
}

// ---- a node that does not answer ---------------------------------------------------------------

// By one call, whose own deadline may have been short: the keeper finds out at once.
void Remote::suspect() {
  if (silent_since_ != 0) return;
  silent_since_ = monotonic_now();
  last_error_ = options_.address.text() + ": no answer in time; nothing is asked until it answers";
  woken_ = true;
  keeper_wakes_.notify_all();
}

void Remote::probe() {
  {
    const std::lock_guard lock(mutex_);
    if (silent_since_ == 0) return;
    ++num_out_;
  }
  Io failed = Io::kDone;
  wire::Why why{};
  Line line;
  line.link = open_link(patience(), &failed, &why, &line.incarnation);
  {
    const std::lock_guard lock(mutex_);
    if (failed == Io::kTimedOut) {
      --num_out_;
      return;
    }
    silent_since_ = 0;
    if (!line) --num_out_;
  }
  if (line) give(std::move(line));
  given_.notify_all();
}

std::string Remote::last_error() const {
  const std::lock_guard lock(mutex_);
  return last_error_.empty() ? options_.address.text() + ": the connection was lost" : last_error_;
}

std::shared_ptr<Mapping> Remote::mapping(uint64_t incarnation) const {
  const std::lock_guard lock(mutex_);
  return incarnation == incarnation_.load() ? mapping_ : nullptr;
}

// Versions only grow, within one life of the node.
void Remote::saw_version(uint32_t version, uint64_t incarnation) {
  uint32_t known = version_.load();
  while (version > known && incarnation == incarnation_.load() &&
         !version_.compare_exchange_weak(known, version)) {
  }
}

// ---- connections -------------------------------------------------------------------------------

Remote::Line Remote::take(const Patience& patience, Io* failed, bool check) {
  bool tried_again = false;
  wire::Why why{};
  std::unique_lock lock(mutex_);
  while (true) {
    if (silent_since_ != 0 && monotonic_now() - silent_since_ >= kSilence) {
      *failed = Io::kLost;
      return {};
    }
    while (silent_since_ == 0 && !idle_.empty()) {
      Line line{std::move(idle_.back()), incarnation_.load()};
      idle_.pop_back();
      if (check && !line.link->idle_and_alive()) continue;
      ++num_out_;
      return line;
    }
    if (over(patience, failed)) return {};
    if (silent_since_ != 0 || num_out_ >= kLinksMax) {
      given_.wait_until(lock, slice_end(patience));
      continue;
    }
    ++num_out_;
    lock.unlock();
    Line line;
    line.link = open_link(patience, failed, &why, &line.incarnation);
    lock.lock();
    if (line) return line;
    --num_out_;
    given_.notify_all();
    // The session has ended, or the node is another by now: once more, with a new one.
    const bool ended = *failed == Io::kRefused && why == wire::Why::kSession;
    if (!ended || tried_again) return {};
    tried_again = true;
    control_.reset();
  }
}

void Remote::give(Line line) {
  {
    const std::lock_guard lock(mutex_);
    --num_out_;
    if (line.incarnation == incarnation_.load() && !ending_.load())
      idle_.push_back(std::move(line.link));
  }
  given_.notify_all();
}

void Remote::drop(Line line) {
  {
    const std::lock_guard lock(mutex_);
    --num_out_;
    if (!line.link->refusal().empty()) last_error_ = line.link->refusal();
    if (line.link->timed_out()) suspect();
  }
  given_.notify_all();
}

// ---- what is owed ------------------------------------------------------------------------------

void Remote::tell_release(uint64_t lease, uint64_t incarnation) {
  if (incarnation != incarnation_.load()) return;  // gone with the node it was leased of
  Io io = Io::kDone;
  const Patience patience{monotonic_now() + options_.timeout, nullptr};
  Line line = take(patience, &io);
  if (line && line.incarnation == incarnation) {
    io = line.link->say(wire::Release{lease, true}, patience);
    if (io == Io::kDone) return give(std::move(line));
  }
  if (line) drop(std::move(line));
  const std::lock_guard lock(mutex_);
  debts_.push_back({{}, lease, incarnation});
}

void Remote::owe_abort(const AttemptId& attempt, uint64_t incarnation) {
  {
    const std::lock_guard lock(mutex_);
    debts_.push_back({attempt, 0, incarnation});
    woken_ = true;
  }
  keeper_wakes_.notify_all();
}

// False: some are left.
bool Remote::pay_debts() {
  std::vector<Debt> debts;
  {
    const std::lock_guard lock(mutex_);
    debts.swap(debts_);
  }
  while (!debts.empty()) {
    const Debt& debt = debts.back();
    Io io = Io::kDone;
    if (debt.incarnation == incarnation_.load()) {
      wire::Released released;
      wire::PutDone done;
      wire::Commit abort;
      abort.attempt = debt.attempt;
      io = debt.lease != 0 ? ask(wire::Release{debt.lease, false}, &released, patience(), true)
                           : ask(abort, &done, patience(), true);
    }
    if (io != Io::kDone) break;
    debts.pop_back();
  }
  const std::lock_guard lock(mutex_);
  debts_.insert(debts_.end(), debts.begin(), debts.end());
  return debts_.empty();
}

// ---- the keeper --------------------------------------------------------------------------------

void Remote::keep() {
  bool quiet = false;
  while (!ending_.load()) {
    {
      std::unique_lock lock(mutex_);
      keeper_wakes_.wait_for(lock, quiet ? kQuietPause : kKeeperPause, [this] { return woken_; });
      woken_ = false;
    }
    if (ending_.load()) return;
    Io failed = Io::kDone;
    probe();
    quiet = ensure_session(patience(), &failed) && pay_debts() && populate();
  }
}

void Remote::wake_keeper() {
  {
    const std::lock_guard lock(mutex_);
    woken_ = true;
  }
  keeper_wakes_.notify_all();
}

// True: all of the mapped memory is in the page tables.
bool Remote::populate() {
  const uint64_t incarnation = incarnation_.load();
  const std::shared_ptr<Mapping> mapped = mapping(incarnation);
  if (mapped == nullptr || mapped->populated()) return true;
  wire::UsageIs usage;
  if (ask(wire::Usage{}, &usage, patience(), true) != Io::kDone) return false;
  uint64_t backed = 0;  // the node backs its memory from the front
  for (const wire::Count& count : usage.counts) {
    if (count.name == "capacity_bytes") backed = std::min(count.value, mapped->bytes());
  }
  return incarnation == incarnation_.load() && mapped->populate(backed, ending_);
}

}  // namespace kvstore
