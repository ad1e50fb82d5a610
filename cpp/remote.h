// A node in another process, as its client knows it: a session, a pool of connections, and what is
// still owed to the node.
//
// Life: connect() → take() a connection, talk, give() it back → end(). A lost node is tried again
//   with growing pauses; a node that has come back under another epoch begins a new *incarnation*,
//   and what was leased or granted in an older one is gone. A node that has not answered in time is
//   *silent* until the keeper has had an answer: nobody else waits for it meanwhile.
// Threads: any. Its own: the keeper, which reconnects, pays debts and fills page tables.
// Owns: its connections and the mapping, which leases and views hold too.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "link.h"
#include "mapping.h"

namespace kvstore {

enum class Way : uint8_t { kAuto, kShm, kTcp };

struct RemoteOptions {
  Address address;
  std::string token;
  std::string record;  // of the namespace
  uint64_t part_bytes = 0;
  Way way = Way::kAuto;
  unsigned connections = 4;  // for one large batch
  Nanos timeout = 1'000 * kMillisecond;
};

class Remote {
 public:
  // Null, with `failed` (kRefused, or another reason) and what a person should know.
  static std::shared_ptr<Remote> connect(const RemoteOptions& options, Io* failed,
                                         std::string* error);
  ~Remote();
  Remote(const Remote&) = delete;
  Remote& operator=(const Remote&) = delete;

  const RemoteOptions& options() const { return options_; }
  bool shares_memory() const { return shares_memory_; }
  // For calls without a deadline of their own.
  Patience patience() const { return {monotonic_now() + options_.timeout, &ending_}; }

  // A connection, for one exchange or several in a row.
  struct Line {
    std::unique_ptr<Link> link;
    uint64_t incarnation = 0;
    explicit operator bool() const { return link != nullptr; }
  };
  // `check`: not one whose node is known to have gone; where asking again is no harm, that need not
  // be looked at before.
  Line take(const Patience& patience, Io* failed, bool check = true);
  void give(Line line);  // whole: what was asked has been answered
  void drop(Line line);  // broken, or in the middle of something

  // One exchange, in some incarnation. `again`: it may be asked twice, where the node was lost in
  // between.
  template <class Message, class Answer>
  Io ask(const Message& message, Answer* answer, const Patience& patience, bool again,
         uint64_t* incarnation = nullptr) {
    while (true) {
      Io io = Io::kDone;
      Line line = take(patience, &io, !again);
      if (!line) return io;
      if (incarnation != nullptr) *incarnation = line.incarnation;
      io = line.link->ask(message, answer, patience);
      if (io == Io::kDone) {
        give(std::move(line));
        return io;
      }
      drop(std::move(line));
      if (io != Io::kLost || !again) return io;
      again = false;
    }
  }
  // Without an answer; on failure it stays owed.
  void tell_release(uint64_t lease, uint64_t incarnation);
  void owe_abort(const AttemptId& attempt, uint64_t incarnation);

  uint64_t incarnation() const { return incarnation_.load(); }
  uint64_t pool_bytes() const { return pool_bytes_.load(); }
  uint64_t view_bytes_max() const { return view_bytes_max_.load(); }
  std::shared_ptr<Mapping> mapping(uint64_t incarnation) const;  // null: over, or none is shared
  void wake_keeper();  // there is a writable mapping to fill
  uint32_t version() const { return version_.load(); }
  void saw_version(uint32_t version, uint64_t incarnation);
  std::string last_error() const;

  void leave();  // gives up every grant and copying lease; views stay
  void end();

 private:
  struct Debt {
    AttemptId attempt;   // to give up
    uint64_t lease = 0;  // to release, if not zero
    uint64_t incarnation = 0;
  };
  struct Opened {
    std::unique_ptr<Link> control;
    Address address;  // of the connections to come
    bool shares_memory = false;
  };
  explicit Remote(const RemoteOptions& options) : options_(options) {}
  bool ensure_session(const Patience& patience, Io* failed);
  std::unique_ptr<Link> open_link(const Patience& patience, Io* failed, wire::Why* why,
                                  uint64_t* incarnation);
  void suspect();  // REQUIRES: mutex_
  void probe();
  Opened open_control(const Patience& patience, Io* failed, std::string* error);
  bool install(Opened opened, std::string* error);
  Link::Wanted wanted(const Address& address) const;
  void keep();
  bool pay_debts();
  bool populate();

  const RemoteOptions options_;
  bool shares_memory_ = false;  // constant once connected
  std::atomic<bool> ending_{false};
  std::atomic<uint64_t> incarnation_{0};
  std::atomic<uint64_t> pool_bytes_{0};
  std::atomic<uint64_t> view_bytes_max_{0};
  std::atomic<uint32_t> version_{0};

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::unique_ptr<Link> control_;
  bool connecting_ = false;  // somebody is at it
  unsigned failures_ = 0;    // in a row
  Nanos next_try_ = 0;
  Nanos silent_since_ = 0;  // zero: it answers
  AttemptId session_;
  uint64_t epoch_ = 0;
  Address address_;
  std::shared_ptr<Mapping> mapping_;
  std::vector<std::unique_ptr<Link>> idle_;
  unsigned num_out_ = 0;
  std::vector<Debt> debts_;
  std::string last_error_;
  bool woken_ = false;
  std::condition_variable given_;  // a connection, or the end of connecting
  std::condition_variable keeper_wakes_;
  std::thread keeper_;
};

}  // namespace kvstore
