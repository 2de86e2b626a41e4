// Making, ending and the parts of a group that are no collectives. See Note [what gloo lacks].
#include "comm/gloo/gloo_backend.h"

#include "base/environment.h"
#include "base/error_text.h"
#include "base/text.h"
#include "comm/gloo/call.h"
#include "comm/store_exchange.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <sstream>

namespace tessera::comm::gloo {

void Watchers::add(std::function<void()> wait, WorkPtr inner) {
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) {
      watchers_.remove_if([](Watcher& watcher) {
        if (!watcher.done) return false;
        watcher.thread.join();
        return true;
      });
      auto& watcher = watchers_.emplace_back();
      watcher.inner = std::move(inner);
      watcher.thread = std::thread([&watcher, wait = std::move(wait)]() mutable {
        wait();
        wait = nullptr;  // the work goes before its thread counts as ended
        watcher.done = true;
      });
      return;
    }
  }
  wait();
}

void Watchers::close() {
  std::list<Watcher> rest;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    rest.swap(watchers_);
  }
  for (auto& watcher : rest) {
    if (!watcher.done) watcher.inner->abort();
  }
  for (auto& watcher : rest) watcher.thread.join();
}

namespace {

constexpr const char* kInterfaces = "GLOO_SOCKET_IFNAME";  // comma-separated; PyTorch's name for it

constexpr const char* kLoopback = "127.0.0.1";
constexpr const char* kConnected = "gloo/connected";

constexpr std::chrono::seconds kGrace(5);  // for collectives that are under way at the end

c10::intrusive_ptr<c10d::ProcessGroupGloo::Options> make_options(const BackendRequest& request) {
  auto options = c10d::ProcessGroupGloo::Options::create(request.timeout);
  std::istringstream names(Environment().get(kInterfaces).value_or(""));
  for (std::string name; std::getline(names, name, ',');) {
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(name));
  }
  // On one host nobody on the network has to reach it.
  if (options->devices.empty() && request.shares_network)
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(kLoopback));
  // The address the host's name stands for, or the loopback device if it stands for none.
  if (options->devices.empty())
    options->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
  return options;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make(const BackendRequest& request) {
  const StoreGroup group{.store = *request.store,
                         .rank = request.rank,
                         .size = request.size,
                         .timeout = request.timeout,
                         .caller = c10::str("gloo: group '", request.group_name, "'"),
                         .processes = request.processes};
  // gloo itself would wait for a missing rank without a word of who it is.
  const std::string own = request.check_calls ? "on" : "off";
  const auto checks = exchange(group, "gloo/arrived", own);
  for (size_t peer = 0; peer < checks.size(); ++peer) {
    TORCH_CHECK_VALUE(checks[peer] == own, group.caller,
                      ": expected check_calls (or TESSERA_CHECK_CALLS) alike on all ranks, got ",
                      own, " on rank ", request.rank, " and ", checks[peer], " on rank ", peer);
  }
  c10::intrusive_ptr<Engine> engine;
  try {
    const SignalBlock block(SIGPIPE);  // also in the threads that gloo begins here, which write
    engine = c10::make_intrusive<Engine>(request.store, request.rank, request.size,
                                         make_options(request));
  } catch (const std::exception&) {
    const auto error = c10::str(group.caller, ": rank ", request.rank, " of ", request.size,
                                " could not connect to its peers within ",
                                format_seconds(static_cast<double>(request.timeout.count()) / 1e3),
                                "; if the hosts see each other by another interface than the one "
                                "their names stand for, name it by ",
                                kInterfaces, " (", text_of(std::current_exception()), ")");
    tell(group, kConnected, error);
    C10_THROW_ERROR(DistBackendError, error);
  }
  // A connection counts for gloo once the kernel has made it. Nobody may go on, and perhaps leave,
  // before its peers have taken up their ends of it.
  for (const auto& verdict : exchange(group, kConnected, kConnected))
    TORCH_CHECK_WITH(DistBackendError, verdict == kConnected, verdict);
  return c10::make_intrusive<GlooBackend>(request, std::move(engine));
}

bool available() { return true; }

bool supports(c10::DeviceType device, c10::ScalarType dtype) {
  const bool has_device = device == c10::DeviceType::CPU ||
                          (device == c10::DeviceType::CUDA && at::hasCUDA());  // Note [staging]
  return has_device && !c10::isQIntType(dtype);
}

GlooBackend::GlooBackend(const BackendRequest& request, c10::intrusive_ptr<Engine> engine)
    : Backend(request.rank, request.size),
      engine_(std::move(engine)),
      store_(request.store),
      processes_(request.processes),
      log_(std::make_shared<GroupLog>(request)),
      queue_(request.check_calls && request.size > 1
                 ? std::make_shared<CallQueue>(request, engine_, log_)
                 : nullptr),
      watchdog_(request, log_, [this] { end_all(); }) {}

GlooBackend::~GlooBackend() {
  shutdown();
  if (queue_) queue_->close();
  // gloo ends only with its last collective, which may have to time out first: nobody shall wait
  // for that.
  if (!log_->await_idle(std::chrono::milliseconds(0))) {
    std::thread([engine = std::move(engine_)]() mutable { engine.reset(); }).detach();
  }
}

void GlooBackend::shutdown() {
  watchdog_.close();
  log_->close();
  watchers_->close();
  // What waits for a peer that will never come must not hold up the end of this rank.
  const auto grace = close_by_ ? std::max(*close_by_ - Clock::now(), Clock::duration(0)) : kGrace;
  const auto deadline = Clock::now() + grace;
  if (log_->has_failed() || !log_->await_idle(std::chrono::ceil<std::chrono::milliseconds>(grace)))
    return abort();
  if (queue_) queue_->flush(deadline);
}

void GlooBackend::begin_close(Clock::time_point deadline) {
  close_by_ = std::min(deadline, Clock::now() + kGrace);
}

void GlooBackend::abort() {
  log_->close();
  end_all();
}

void GlooBackend::end_all() {
  engine_->close_connections();
  if (queue_) queue_->abort();
  log_->cancel_all();
}

c10d::ErrorType GlooBackend::getError() {
  return log_->has_failed() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

void GlooBackend::startCoalescing() {
  TORCH_CHECK(!coalescing_, "gloo: startCoalescing: already coalescing; call endCoalescing first");
  coalescing_.emplace();
}

WorkPtr GlooBackend::endCoalescing() {
  TORCH_CHECK(coalescing_, "gloo: endCoalescing: call startCoalescing first");
  const auto parts = std::move(*coalescing_);
  coalescing_.reset();
  return join(c10d::OpType::COALESCED, parts, {});
}

WorkPtr GlooBackend::join(c10d::OpType type, const std::vector<WorkPtr>& parts, Tensors outputs) {
  DeviceCallPtr device_call;
  const bool has_outputs = !outputs.empty();
  for (const auto& part : parts) {
    const auto& own = static_cast<const GlooWork&>(*part).device_call();
    if (!own) continue;
    TORCH_CHECK_VALUE(!device_call || device_call->stream().device() == own->stream().device(),
                      "gloo: endCoalescing: expected tensors of one GPU, got some on ",
                      own->stream().device(), " and some on ", device_call->stream().device(),
                      "; coalesce the calls of each device apart");
    device_call = own;
    if (has_outputs) continue;
    const auto results = part->result();
    outputs.insert(outputs.end(), results.begin(), results.end());
  }
  auto work = c10::make_intrusive<CollectiveWork>(
      type, log_->add(c10::str("coalesced (", parts.size(), " collectives)"), sequence_), log_,
      std::move(outputs), device_call);
  CollectiveWork::begin(work, {});
  CollectiveWork::follow(work, parts);
  return work;
}

WorkPtr GlooBackend::point(c10d::OpType type, const char* name, Tensors& tensors, int peer,
                           int tag) {
  const at::AutoDispatchBelowADInplaceOrView unseen_by_autograd;
  Call call(*this, name, type, c10d::kUnsetTimeout);
  const auto& tensor = call.check().only(tensors);
  const bool is_send = type == c10d::OpType::SEND;
  const bool is_any = type == c10d::OpType::RECVANYSOURCE;
  if (!is_send) call.check().check_written(tensor);
  TORCH_CHECK_VALUE(is_any || (peer >= 0 && peer < size_ && peer != rank_), "gloo: ", name,
                    ": expected a peer from 0 to ", size_ - 1, " other than this rank (", rank_,
                    "), got ", peer);
  TORCH_CHECK_VALUE(tag >= 0 && tag < kHeaderTag, "gloo: ", name, ": expected a tag from 0 to ",
                    kHeaderTag - 1, ", got ", tag);
  call.describe(is_send ? Kind::Send : Kind::Receive, {tensor}, -1, peer);
  Tensors memory{is_send ? call.read(tensor) : call.write(tensor)};
  WorkPtr inner = engine_->start([&](auto& gloo) {
    return is_send  ? gloo.send(memory, peer, tag)
           : is_any ? gloo.recvAnysource(memory, tag)
                    : gloo.recv(memory, peer, tag);
  });
  const auto sequence = ++point_sequence_;
  auto watch = [watchers = watchers_, inner](std::function<void()> wait) {
    watchers->add(std::move(wait), inner);
  };
  auto work = c10::make_intrusive<PointWork>(type, log_->add(call.title(sequence), sequence), log_,
                                             tensors, call.device_call(), inner,
                                             call.take_afterwards(), std::move(watch));
  if (coalescing_) coalescing_->push_back(work);
  return work;
}

WorkPtr GlooBackend::send(Tensors& tensors, int destination, int tag) {
  return point(c10d::OpType::SEND, "send", tensors, destination, tag);
}

WorkPtr GlooBackend::recv(Tensors& tensors, int source, int tag) {
  return point(c10d::OpType::RECV, "recv", tensors, source, tag);
}

WorkPtr GlooBackend::recvAnysource(Tensors& tensors, int tag) {
  return point(c10d::OpType::RECVANYSOURCE, "recv", tensors, -1, tag);
}

void GlooBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool /*wait_all_ranks*/) {
  log_->check_usable("monitored_barrier");
  const auto timeout =
      opts.timeout == c10d::kUnsetTimeout ? engine_->getOptions()->timeout : opts.timeout;
  const auto number = ++monitored_barriers_;
  exchange({.store = *store_,
            .rank = rank_,
            .size = size_,
            .timeout = timeout,
            .caller = c10::str("gloo: monitored_barrier #", number, log_->place()),
            .processes = processes_},
           c10::str("gloo/monitored_barrier/", number), "here");
}

}  // namespace tessera::comm::gloo
