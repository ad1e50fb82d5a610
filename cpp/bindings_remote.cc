// A node elsewhere as Python sees it, and serving one.
#include <pybind11/stl.h>

#include <system_error>
#include <utility>

#include "bindings.h"
#include "remote.h"
#include "server.h"
#include "transport_remote.h"

namespace py = pybind11;

namespace kvstore {
namespace {

Address to_address(const std::string& text) {
  std::string error;
  const auto address = Address::parse(text, &error);
  if (!address) raise_error("InvalidArgument", error);
  return *address;
}

std::shared_ptr<Store> connect(const std::string& address, const std::string& token,
                               const std::string& record, uint64_t part_bytes,
                               const std::string& transport, unsigned connections,
                               unsigned copy_threads, int64_t timeout_ns) {
  RemoteOptions options;
  options.address = to_address(address);
  options.token = token;
  options.record = record;
  options.part_bytes = part_bytes;
  options.connections = connections;
  if (timeout_ns > 0) options.timeout = timeout_ns;
  if (transport == "shm") {
    options.way = Way::kShm;
  } else if (transport == "tcp") {
    options.way = Way::kTcp;
  } else if (transport != "auto") {
    raise_error("InvalidArgument", "transport=\"" + transport + "\"; use auto, shm or tcp");
  }
  Io failed = Io::kDone;
  std::string error;
  std::unique_ptr<Transport> store;
  without_gil_if(true, [&] {
    try {
      auto remote = Remote::connect(options, &failed, &error);
      if (remote != nullptr) store = make_remote_store(std::move(remote), copy_threads);
    } catch (const std::system_error& no_thread) {
      error = std::string("no threads for a connection: ") + no_thread.what();
    }
  });
  if (store == nullptr)
    raise_error(failed == Io::kRefused ? "NodeRefused" : "NodeUnavailable", error);
  return std::make_shared<Store>(std::move(store), address);
}

// Serving ends with the object; a forked child leaves its parent's alone.
class ServerHandle {
 public:
  ServerHandle(std::shared_ptr<Node> node, const std::vector<std::string>& listen,
               const std::string& socket, const std::string& token, unsigned io_threads,
               uint32_t connections_max, int64_t hello_ns, int64_t stall_ns)
      : pid_(getpid()) {
    ServerOptions options;
    for (const std::string& address : listen) options.listen.push_back(to_address(address));
    if (!socket.empty()) options.listen.push_back(to_address("unix:" + socket));
    options.token = token;
    options.io_threads = io_threads;
    options.connections_max = connections_max;
    if (hello_ns > 0) options.hello = hello_ns;
    if (stall_ns > 0) options.stall = stall_ns;
    if (options.listen.empty()) raise_error("InvalidArgument", "a server listens somewhere");
    std::string error;
    without_gil_if(true, [&] {
      server_ = std::shared_ptr<Server>(Server::start(std::move(node), options, &error).release(),
                                        ForkAware{pid_});
    });
    if (server_ == nullptr) raise_error("CannotListen", error);
  }
  ~ServerHandle() {
    if (getpid() == pid_) without_gil_if(true, [&] { server_.reset(); });
  }
  ServerHandle(const ServerHandle&) = delete;
  ServerHandle& operator=(const ServerHandle&) = delete;

  std::vector<std::string> addresses() const {
    std::vector<std::string> texts;
    for (const Address& address : server().addresses()) texts.push_back(address.text());
    return texts;
  }
  uint64_t epoch() const { return server().epoch(); }
  int event_fd() const { return server().event_fd(); }
  py::list take_events() const {
    py::list events;
    for (const ServerEvent& event : server().take_events()) {
      py::dict fields;
      for (const auto& [name, value] : event.fields) fields[name.c_str()] = value;
      events.append(py::make_tuple(event.level, event.event, fields));
    }
    return events;
  }
  py::dict counts() const {
    py::dict counts;
    for (const auto& [name, value] : server().counts()) counts[name.c_str()] = value;
    return counts;
  }
  bool stop(int64_t timeout_ns) const {
    bool in_time = true;
    Server& stopping = server();
    without_gil_if(true, [&] { in_time = stopping.stop(deadline_after(timeout_ns)); });
    return in_time;
  }

 private:
  Server& server() const {
    check_fork(pid_);
    return *server_;
  }
  const pid_t pid_;
  std::shared_ptr<Server> server_;
};

// NOLINTNEXTLINE(performance-unnecessary-value-param): the signature pybind11 asks for
void translate_lost_node(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const std::system_error& lost) {
    const py::object type = py::module_::import("kvstore.errors").attr("NodeUnavailable");
    std::string message = lost.what();  // ends with the code's own words
    const std::string words = ": " + lost.code().message();
    if (message.ends_with(words)) message.resize(message.size() - words.size());
    PyErr_SetString(type.ptr(), message.c_str());
  }
}

}  // namespace

void bind_remote(py::module_& m, StoreClass& store) {
  py::register_exception_translator(translate_lost_node);
  store.def("place", &Store::place).def("transport", &Store::way);
  m.def("connect", &connect, py::arg("address"), py::arg("token"), py::arg("record"),
        py::arg("part_bytes"), py::arg("transport"), py::arg("connections"),
        py::arg("copy_threads"), py::arg("timeout_ns"));
  py::class_<ServerHandle>(m, "Server")
      .def(py::init<std::shared_ptr<Node>, const std::vector<std::string>&, const std::string&,
                    const std::string&, unsigned, uint32_t, int64_t, int64_t>(),
           py::arg("node"), py::kw_only(), py::arg("listen"), py::arg("socket"), py::arg("token"),
           py::arg("io_threads"), py::arg("connections_max"), py::arg("hello_ns") = 0,
           py::arg("stall_ns") = 0)
      .def("addresses", &ServerHandle::addresses)
      .def("epoch", &ServerHandle::epoch)
      .def("event_fd", &ServerHandle::event_fd)
      .def("take_events", &ServerHandle::take_events)
      .def("counts", &ServerHandle::counts)
      .def("stop", &ServerHandle::stop);
}

}  // namespace kvstore
