// Transcripts: what a few peers do to one node and what it answers, as text with a story in it.
// Each file of scenarios/ is replayed and compared line by line.
//
//   KVSTORE_REWRITE=1   writes the answers of today into the files; read the difference
//
// A file holds comments (#), and blocks of commands, a line of dashes and the answers:
//
//   node frames=1 [lease_s=30] [grant_s=60] [view_kib=...] [stuck_kib=...]     first of all
//   time SECONDS                              lets time pass
//   reserve SESSION PUT KEY[,KEY...] KIB      a chain; PUT names it from then on
//   write PUT half | rest                     of every granted block
//   commit PUT     abort PUT
//   lookup SESSION LEASE KEY[,KEY...]         the leading run; LEASE names it from then on
//   begin LEASE    read LEASE    end LEASE    begin_read, copy with check, end_read
//   look LEASE                                reads in place, as a view does
//   view LEASE     release LEASE
//   fill SESSION PREFIX COUNT KIB             so many puts of one block each, keys PREFIX0, ...
//   remove KEY     pin KEY     unpin KEY     clear     revoke     end SESSION     state
#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>

#include "core.h"

using namespace kvstore;

namespace {

using Words = std::vector<std::string>;

Words split(const std::string& text, char at) {
  Words words;
  std::stringstream stream(text);
  for (std::string word; std::getline(stream, word, at);) {
    if (!word.empty()) words.push_back(word);
  }
  return words;
}

std::string name_of(Status status) {
  static constexpr const char* kNames[kStatusCount] = {
      "ok",          "exists",    "miss",      "out of space",    "corrupt",
      "unavailable", "timed out", "cancelled", "outcome unknown", "stale"};
  return kNames[static_cast<size_t>(status)];
}

std::string count(uint64_t number, const std::string& noun) {
  return std::to_string(number) + " " + noun + (number == 1 ? "" : "s");
}

class Scenario {
 public:
  std::string run(const std::string& line) {
    const Words words = split(line, ' ');
    const std::string& verb = words[0];
    answer_.clear();
    if (verb == "node") {
      open(words);
    } else {
      REQUIRE_MESSAGE(core_ != nullptr, "a scenario begins with its node");
      REQUIRE_MESSAGE((put(words) || get(words) || other(words)), line);
      uint64_t grants = 0;
      uint64_t leases = 0;
      for (const auto& [name, session] : sessions_) {
        grants += session->num_granted();
        leases += session->num_leased();
      }
      REQUIRE(core_->blocks.audit(grants, leases) == "");
    }
    return answer_;
  }

 private:
  struct Put {
    std::shared_ptr<Session> session;
    std::shared_ptr<GrantBatch> batch;
    uint32_t attempt;
    bool half = false;
  };
  struct Lease {
    std::shared_ptr<Session> session;
    std::shared_ptr<LeaseBatch> batch;
    std::vector<BlockKey> keys;
  };

  void say(const std::string& text) { answer_ += text + "\n"; }

  // ---- names

  BlockKey key(const std::string& name) {
    const auto [at, fresh] = key_numbers_.try_emplace(name, key_names_.size());
    if (fresh) key_names_.push_back(name);
    return key_of(at->second);
  }
  std::vector<BlockKey> keys(const std::string& names) {
    std::vector<BlockKey> keys;
    for (const std::string& name : split(names, ',')) keys.push_back(key(name));
    return keys;
  }
  const std::string& name_of_key(const BlockKey& key) const { return key_names_[number_of(key)]; }
  std::shared_ptr<Session> session(const std::string& name) {
    auto& session = sessions_[name];
    if (session == nullptr) {
      session = std::make_shared<Session>(core_->blocks, core_->space, core_->limits);
    }
    return session;
  }
  std::string place(SlotId slot) const {
    return "slot " + std::to_string(slot) + ", generation " +
           std::to_string(core_->segment->header(slot).generation.load());
  }
  // Which put the bytes are from, every word of them.
  std::string origin(const BlockKey& key, std::span<const uint8_t> bytes) const {
    const uint32_t attempt = payload_attempt(bytes);
    const std::string fault = payload_fault(bytes, number_of(key), attempt);
    if (!fault.empty() || attempt == 0 || attempt > put_names_.size()) return "WRONG: " + fault;
    return std::to_string(bytes.size() >> 10) + " KiB of " + put_names_[attempt - 1];
  }

  // ---- commands

  void open(const Words& words) {
    std::map<std::string, int64_t> options{
        {"frames", 1}, {"lease_s", 30}, {"grant_s", 60}, {"view_kib", 0}, {"stuck_kib", 0}};
    for (size_t i = 1; i < words.size(); ++i) {
      const Words pair = split(words[i], '=');
      REQUIRE(options.contains(pair[0]));
      options[pair[0]] = std::stoll(pair[1]);
    }
    core_ = std::make_unique<Core>(static_cast<uint32_t>(options["frames"]));
    core_->limits.lease = options["lease_s"] * 1000 * kMillisecond;
    core_->limits.grant = options["grant_s"] * 1000 * kMillisecond;
    core_->limits.view_bytes_max = static_cast<uint64_t>(options["view_kib"]) << 10;
    core_->limits.stuck_bytes_max = static_cast<uint64_t>(options["stuck_kib"]) << 10;
  }

  std::shared_ptr<GrantBatch> reserve(const std::shared_ptr<Session>& by,
                                      const std::vector<BlockKey>& chain, uint64_t kib) {
    const std::vector<uint64_t> lengths(chain.size(), kib << 10);
    return by->reserve({chain, 0, lengths, {}, core_->space.version, true}, now_);
  }
  void write(GrantBatch& batch, uint32_t attempt, bool first, bool rest) {
    for (size_t i = 0; i < batch.items.size(); ++i) {
      GrantBatch::Item& item = batch.items[i];
      if (item.taken.slot == kNoSlot) continue;
      const uint32_t block = number_of(item.key);
      if (first) write_slot(*core_, item.taken.slot, block, attempt, 0, item.length / 2);
      if (!rest) continue;
      write_slot(*core_, item.taken.slot, block, attempt, item.length / 2, item.length);
      const auto parts = checksums(payload(block, attempt, item.length), kOpaquePartBytes);
      std::ranges::copy(parts, item.parts.begin());
    }
  }
  uint32_t new_attempt(const std::string& name) {
    put_names_.push_back(name);
    return static_cast<uint32_t>(put_names_.size());
  }

  bool put(const Words& words) {
    if (words[0] == "reserve") {
      const auto by = session(words[1]);
      const auto batch = reserve(by, keys(words[3]), std::stoull(words[4]));
      puts_[words[2]] = {by, batch, new_attempt(words[2])};
      for (size_t i = 0; i < batch->items.size(); ++i) {
        const std::string name = name_of_key(batch->items[i].key);
        const bool granted = batch->statuses[i] == Status::kOk;
        say(name + ": " +
            (granted ? "granted " + place(batch->items[i].taken.slot)
                     : name_of(batch->statuses[i])));
      }
    } else if (words[0] == "write") {
      Put& put = puts_.at(words[1]);
      write(*put.batch, put.attempt, words[2] == "half", words[2] == "rest");
    } else if (words[0] == "commit" || words[0] == "abort") {
      Put& put = puts_.at(words[1]);
      const bool known =
          words[0] == "abort"
              ? put.session->abort(put.batch->id)
              : put.session->commit(put.batch->id, put.batch->items.size(), Status::kCancelled);
      if (!known) say("refused: no such attempt");
      for (size_t i = 0; known && i < put.batch->items.size(); ++i) {
        say(name_of_key(put.batch->items[i].key) + ": " + name_of(put.batch->statuses[i]));
      }
    } else if (words[0] == "fill") {
      fill(words);
    } else {
      return false;
    }
    return true;
  }

  void fill(const Words& words) {
    const auto by = session(words[1]);
    std::map<std::string, int> outcomes;
    for (uint64_t i = 0; i < std::stoull(words[3]); ++i) {
      const std::string name = words[2] + std::to_string(i);
      const auto batch = reserve(by, {key(name)}, std::stoull(words[4]));
      write(*batch, new_attempt(name), true, true);
      by->commit(batch->id, 1, Status::kCancelled);
      ++outcomes[name_of(batch->statuses[0])];
    }
    for (const auto& [outcome, times] : outcomes) say(std::to_string(times) + " " + outcome);
  }

  bool get(const Words& words) {
    if (words[0] == "lookup") {
      const auto by = session(words[1]);
      const auto chain = keys(words[3]);
      const auto batch = by->lookup(chain, 0, true, now_);
      leases_[words[2]] = {by, batch, chain};
      for (size_t i = 0; i < batch->items.size(); ++i) {
        say(name_of_key(chain[i]) + ": leased " + place(batch->items[i]->slot));
      }
      if (batch->items.size() < chain.size()) {
        say(name_of_key(chain[batch->items.size()]) + ": miss");
      }
      return true;
    }
    static constexpr const char* kVerbs[] = {"begin", "read", "look", "end", "view", "release"};
    if (words.size() != 2 || std::ranges::find(kVerbs, words[0]) == std::end(kVerbs) ||
        !leases_.contains(words[1])) {
      return false;
    }
    Lease& lease = leases_.at(words[1]);
    if (words[0] == "begin") {
      if (!lease.session->begin_read(*lease.batch)) say("refused: the lease has ended");
    } else if (words[0] == "read") {
      read(lease, true);
    } else if (words[0] == "look") {
      read(lease, false);
    } else if (words[0] == "end") {
      lease.session->end_read(*lease.batch);
    } else if (words[0] == "view") {
      say(lease.session->make_view(*lease.batch) ? "ok" : "refused");
    } else {
      say(lease.session->release(*lease.batch) == Released::kHeld ? "held until now" : "revoked");
    }
    return true;
  }

  void read(const Lease& lease, bool check) {
    for (size_t i = 0; i < lease.batch->items.size(); ++i) {
      const Found& found = *lease.batch->items[i];
      const auto bytes = read_slot(*core_, found.slot, found.length);
      const bool good =
          !check || std::ranges::equal(checksums(bytes, kOpaquePartBytes), found.parts);
      say(name_of_key(lease.keys[i]) + ": " +
          (good ? origin(lease.keys[i], bytes) : "checksums differ"));
    }
  }

  bool other(const Words& words) {
    const auto answer = [&](bool done) { say(done ? "ok" : "not held"); };
    if (words[0] == "time") {
      now_ += std::stoll(words[1]) * 1000 * kMillisecond;
    } else if (words[0] == "remove") {
      answer(core_->blocks.remove(key(words[1]), core_->space));
    } else if (words[0] == "pin") {
      answer(core_->blocks.pin(key(words[1]), core_->space));
    } else if (words[0] == "unpin") {
      answer(core_->blocks.unpin(key(words[1]), core_->space));
    } else if (words[0] == "clear") {
      say("version " + std::to_string(core_->blocks.clear(core_->space)));
    } else if (words[0] == "revoke") {
      uint64_t blocks = 0;
      for (const auto& [name, session] : sessions_) blocks += session->revoke_overdue(now_);
      say(count(blocks, "block") + " let go");
    } else if (words[0] == "end") {
      session(words[1])->end();
    } else if (words[0] == "state") {
      state();
    } else {
      return false;
    }
    return true;
  }

  // The pool, every block in it, and what is owed to whom.
  void state() {
    const PoolUsage usage = core_->pool.usage();
    say(count(usage.slots, "slot") + " taken, " + count(usage.free_frames, "frame") + " free");
    std::map<SlotId, BlockKey> committed;
    for (uint32_t frame = 0; frame < core_->pool.num_frames(); ++frame) {
      for (const Pool::Tenant& tenant : core_->pool.tenants(frame).tenants) {
        if (tenant.entry == kNoEntry) continue;
        committed[tenant.slot] = core_->segment->header(tenant.slot).key;
      }
    }
    for (const auto& [slot, key] : committed) {
      const auto current = core_->blocks.lease(key, core_->space, 0);
      if (current) core_->blocks.release(current->entry);
      const bool gone = !current || current->slot != slot;
      say(name_of_key(key) + ": " + place(slot) + (gone ? ", out of the table" : ""));
    }
    for (const auto& [name, session] : sessions_) {
      const uint64_t granted = session->num_granted();
      const uint64_t leased = session->num_leased();
      const uint64_t stuck = session->stuck_bytes(now_);
      if (granted + leased + stuck == 0) continue;
      say(name + ": " + count(granted, "grant") + ", " + count(leased, "leased block") +
          (stuck > 0 ? ", " + std::to_string(stuck >> 10) + " KiB stuck" : ""));
    }
    if (const uint64_t views = core_->limits.view_bytes) {
      say("views: " + std::to_string(views >> 10) + " KiB");
    }
  }

  std::unique_ptr<Core> core_;
  Nanos now_ = 0;
  std::string answer_;
  std::map<std::string, uint32_t> key_numbers_;
  std::vector<std::string> key_names_;
  std::vector<std::string> put_names_;  // by attempt, from 1
  std::map<std::string, std::shared_ptr<Session>> sessions_;
  std::map<std::string, Put> puts_;
  std::map<std::string, Lease> leases_;
};

// ---- files -------------------------------------------------------------------------------------

// The file with the answers of today.
std::string replay(const std::string& text) {
  Scenario scenario;
  std::string replayed;
  std::stringstream lines(text);
  std::string commands;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("#") || line.empty()) {
      REQUIRE_MESSAGE(commands.empty(), "a block of commands ends with ----");
      replayed += line + "\n";
    } else if (line != "----") {
      commands += line + "\n";
    } else {
      replayed += commands + "----\n";
      for (const std::string& command : split(commands, '\n')) replayed += scenario.run(command);
      replayed += "\n";
      commands.clear();
      while (std::getline(lines, line) && !line.empty()) {  // the answers of before
      }
    }
  }
  while (replayed.ends_with("\n\n")) replayed.pop_back();
  return replayed;
}

// From wherever the binary is started.
std::filesystem::path scenario_folder() {
  const auto beside_source = std::filesystem::path(__FILE__).parent_path() / "scenarios";
  if (std::filesystem::exists(beside_source)) return beside_source;
  return std::filesystem::canonical("/proc/self/exe").parent_path() / "../../scenarios";
}

TEST_CASE("scenarios go as they are written down") {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(scenario_folder())) {
    if (entry.path().extension() != ".txt") continue;
    ++files;
    const std::string name = entry.path().filename().string();
    CAPTURE(name);
    std::ifstream in(entry.path());
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    const std::string replayed = replay(text);
    if (getenv("KVSTORE_REWRITE") != nullptr) {
      std::ofstream(entry.path()) << replayed;
      continue;
    }
    const Words wanted = split(text, '\n');
    const Words got = split(replayed, '\n');
    for (size_t i = 0; i < std::max(wanted.size(), got.size()); ++i) {
      CAPTURE(i);
      REQUIRE((i < got.size() ? got[i] : "(end)") == (i < wanted.size() ? wanted[i] : "(end)"));
    }
    CHECK(text == replayed);
  }
  CHECK(files >= 7);
}

}  // namespace
