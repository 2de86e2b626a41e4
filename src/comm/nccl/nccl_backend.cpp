// Making, watching and ending; what all calls share. See Note [watching NCCL].
#include "comm/nccl/nccl_backend.h"

#include "base/environment.h"
#include "base/error_text.h"
#include "base/text.h"
#include "comm/backends.h"
#include "comm/completed_work.h"
#include "comm/store_exchange.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <c10/util/env.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <future>
#include <thread>

namespace tessera::comm::nccl {
namespace {

// c10d's own timeout comes only after ours, which can say more.
constexpr std::chrono::minutes kAfterOurs(1);
constexpr std::chrono::seconds kCloseGrace(5);

/// c10d's watchdog cleans up and leaves the rest to us, at once and without ending the process.
/// What the user has set stays, but for what takes the watchdog away: then nobody learns which
/// calls have completed.
void tame_watchdog() {
  for (const char* name : {"TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"}) {
    if (Environment().get(name).value_or("0") == "0") continue;
    TORCH_WARN_ONCE("nccl: ", name,
                    " is ignored: timeouts and dead peers are watched for without it; to wait on "
                    "the host, synchronize the stream after wait()");
    c10::utils::set_env(name, "0");
  }
  c10::utils::set_env("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2", /*overwrite=*/false);  // CleanUpOnly
  c10::utils::set_env("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", /*overwrite=*/false);
  c10::utils::set_env("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "0", /*overwrite=*/false);
  c10::utils::set_env("TORCH_NCCL_ENABLE_MONITORING", "0", /*overwrite=*/false);
}

/// A rank may have to capture a graph again that the others keep; to register the graphs' memory
/// all would have to meet. What the user has set stays.
void leave_graph_memory_unregistered() {
  c10::utils::set_env("NCCL_GRAPH_REGISTER", "0", /*overwrite=*/false);
}

/// NCCL moves what goes over TCP by one thread and one socket per peer and channel, which a fast
/// network, and two ranks of one host, are not busy with. Users set both or neither: NCCL takes 64
/// sockets at most.
void use_several_sockets() {
  constexpr const char* kThreads = "NCCL_SOCKET_NTHREADS";
  constexpr const char* kSockets = "NCCL_NSOCKS_PERTHREAD";
  for (const char* name : {kThreads, kSockets, "NCCL_CONF_FILE"})
    if (c10::utils::has_env(name)) return;
  c10::utils::set_env(kThreads, "4");
  c10::utils::set_env(kSockets, "4");
}

EnginePtr make_engine(const BackendRequest& request) {
  auto options = Engine::Options::create(/*is_high_priority_stream=*/true);
  options->timeout = request.timeout + kAfterOurs;
  options->group_name = request.group_name;
  options->global_ranks_in_group.assign(request.world_ranks.begin(), request.world_ranks.end());
  return c10::make_intrusive<Engine>(request.store, request.rank, request.size, std::move(options));
}

bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

/// NCCL refuses it ("invalid usage") or hangs, unless every rank says that it is another host.
void check_devices(const BackendRequest& request) {
  if (Environment().get("NCCL_HOSTID")) return;
  const auto shared = find_shared_device(request.devices);
  TORCH_CHECK_VALUE(shared.first < 0, "nccl: group '", request.group_name,
                    "': expected a GPU for each rank, but ranks ", shared.first, " and ",
                    shared.second, " share ", request.devices[std::max(shared.first, 0)],
                    "; use the backend shm (ranks of one host), give each rank a device by ",
                    "InitOptions::device or CUDA_VISIBLE_DEVICES, or, for tests alone, set another "
                    "NCCL_HOSTID on each rank");
}

void end_quietly(const std::function<void(Engine&)>& how, Engine& engine) {
  try {
    how(engine);
  } catch (const std::exception& error) {
    TORCH_WARN("nccl: a communicator did not end cleanly: ", error.what());
  }
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make(const BackendRequest& request) {
  TORCH_CHECK_VALUE(available(), "nccl: group '", request.group_name, "' on rank ", request.rank,
                    ": expected a CUDA device, found none; use the backend shm (ranks of one host) "
                    "or gloo with CPU tensors");
  check_devices(request);
  // Here, in init(): the environment is not to change later, with threads about.
  tame_watchdog();
  leave_graph_memory_unregistered();
  use_several_sockets();
  auto backend = c10::make_intrusive<NcclBackend>(request);
  if (request.binds_device) backend->connect_now();
  return backend;
}

bool available() { return c10::cuda::device_count() > 0; }

NcclBackend::NcclBackend(const BackendRequest& request)
    : Backend(request.rank, request.size),
      request_(request),
      log_(std::make_shared<GroupLog>(request, "nccl")),
      timeout_(request.timeout) {}

NcclBackend::~NcclBackend() {
  try {
    shutdown();
  } catch (const std::exception& error) {
    TORCH_WARN("nccl: group '", request_.group_name, "' did not end cleanly: ", error.what());
  }
}

Engine& NcclBackend::engine() {
  if (engine_) return *engine_;
  engine_ = make_engine(request_);
  // Works may keep the watch; it lets go of the engine when it is closed, and must not wait for it.
  watch_ = std::make_shared<Watchdog>(request_, log_, [engine = engine_] {
    std::thread([engine] { end_quietly([](Engine& nccl) { nccl.abort(); }, *engine); }).detach();
  });
  return *engine_;
}

void NcclBackend::connect_now() {
  meet({.type = c10d::OpType::BARRIER, .descriptor = {}});
  const c10::cuda::CUDAGuard on_device(*request_.device);
  engine().setBoundDeviceId(request_.device);
  engine_->eagerConnectSingleDevice(*request_.device);
}

void NcclBackend::meet(const Call& call) {
  if (has_met_ || size_ == 1) return;
  exchange({.store = *request_.store,
            .rank = rank_,
            .size = size_,
            .timeout = call.timeout == c10d::kUnsetTimeout ? timeout_ : call.timeout,
            .caller = c10::str("nccl: the first call", log_->place()),
            .processes = request_.processes},
           "nccl/first", "here");
  has_met_ = true;
}

void NcclBackend::meet_peer(int peer) {
  if (has_met_ && request_.binds_device) return;
  if (met_peers_.contains(peer)) return;
  const int low = std::min(rank_, peer);
  const int high = std::max(rank_, peer);
  c10d::PrefixStore store(c10::str("nccl/pair/", low, "/", high), request_.store);
  Processes processes;
  if (!request_.processes.empty()) processes = {request_.processes[low], request_.processes[high]};
  exchange({.store = store,
            .rank = rank_ == low ? 0 : 1,
            .size = 2,
            .timeout = timeout_,
            .caller = c10::str("nccl: the first message with ", log_->label(peer), log_->place(),
                               " (the two are counted 0 and 1)"),
            .processes = processes},
           "first", "here");
  met_peers_.insert(peer);
}

NcclBackend::Check NcclBackend::check(const char* name) {
  log_->check_usable(name);
  return {*this, name};
}

NcclBackend::Check::~Check() {
  if (std::uncaught_exceptions() > exceptions_ && backend_.coalesced_) backend_.drop_coalesced();
}

void NcclBackend::drop_coalesced() {
  coalesced_.reset();
  end_quietly([](Engine& nccl) { nccl.endCoalescing(); }, *engine_);
}

WorkPtr NcclBackend::run(Call call, const Start& start) {
  const bool is_point = call.peer >= 0;
  if (coalesced_) {
    ++coalesced_->count;
    is_point ? void(coalesced_->peer = call.peer) : void(coalesced_->has_collectives = true);
    return start(engine());
  }
  // Coalesced calls use the communicator of the whole group, messages alone one of the two ranks.
  is_point&& call.type != c10d::OpType::COALESCED ? meet_peer(call.peer) : meet(call);
  auto& used = engine();
  const bool is_captured = is_capturing();
  auto& sequence = is_captured ? captured_ : is_point ? point_sequence_ : sequence_;
  call.descriptor.sequence = ++sequence;
  const auto what = call.count < 0 ? describe(call.descriptor)
                                   : c10::str("coalesced #", call.descriptor.sequence, " (",
                                              call.count, " calls)");
  const auto issue = log_->add(is_captured ? "captured " + what : what, call.descriptor.sequence);
  if (!is_captured)
    watch_->add(issue, call.timeout == c10d::kUnsetTimeout ? timeout_ : call.timeout, call.peer);
  WorkPtr inner;
  try {
    inner = start(used);
  } catch (...) {
    // A call of one rank that its peers will wait for.
    if (is_captured) throw;
    std::rethrow_exception(watch_->fail(*issue, text_of(std::current_exception())));
  }
  if (!inner) {  // nothing was coalesced
    issue->state = gloo::CallRecord::State::Done;
    return completed_work(call.type, {});
  }
  if (is_captured) {
    issue->state = gloo::CallRecord::State::Done;  // events of a capture can't be asked
  } else {
    // Completed by c10d's watchdog, when the device has done it.
    inner->getFutureResult()->addCallback(
        [issue, watch = std::weak_ptr(watch_)](c10::ivalue::Future& future) {
          const auto result = static_cast<c10d::WorkResult>(future.constValue().toInt());
          if (result == c10d::WorkResult::SUCCESS) {
            issue->state = gloo::CallRecord::State::Done;
          } else if (const auto known = watch.lock()) {
            known->fail(*issue, "a peer or the connection to it is gone");
          }
        });
  }
  auto work = c10::make_intrusive<NcclWork>(call.type, std::move(inner), issue, log_, watch_,
                                            std::move(call.outputs));
  if (!call.in_background) work->wait(kNoTimeout);
  return work;
}

void NcclBackend::note_capture(std::weak_ptr<CapturedGraph> graph, int64_t calls) {
  std::erase_if(graphs_, [](const auto& other) { return other.expired(); });
  graphs_.push_back(std::move(graph));
  captured_known_ += static_cast<uint64_t>(calls);
}

void NcclBackend::note_replay(int64_t calls) {
  sequence_ += static_cast<uint64_t>(calls);
  const auto issue =
      log_->add(c10::str("CUDA graph up to #", sequence_, " (", calls, " collectives)"), sequence_);
  watch_->add(issue, timeout_, /*peer=*/-1);
  // Told by the stream: who asks the driver while a graph stands still may have to wait for it.
  auto told = std::make_unique<CallRecordPtr>(issue);
  C10_CUDA_CHECK(cudaLaunchHostFunc(
      c10::cuda::getCurrentCUDAStream(),
      [](void* given) {
        const std::unique_ptr<CallRecordPtr> done(static_cast<CallRecordPtr*>(given));
        (*done)->state = gloo::CallRecord::State::Done;
      },
      told.get()));
  [[maybe_unused]] const auto* its = told.release();
}

void NcclBackend::startCoalescing() {
  log_->check_usable("startCoalescing");
  TORCH_CHECK(!coalesced_, "nccl: startCoalescing: already coalescing; call endCoalescing first");
  meet({.type = c10d::OpType::COALESCED, .descriptor = {}});
  engine().startCoalescing();
  coalesced_.emplace();
}

WorkPtr NcclBackend::endCoalescing() {
  TORCH_CHECK(coalesced_, "nccl: endCoalescing: call startCoalescing first");
  const auto coalesced = *std::exchange(coalesced_, std::nullopt);
  return run({.type = c10d::OpType::COALESCED,
              .descriptor = {},
              .peer = coalesced.has_collectives ? -1 : coalesced.peer,
              .count = coalesced.count},
             [](Engine& nccl) { return nccl.endCoalescing(); });
}

c10::intrusive_ptr<c10d::Backend::Options> NcclBackend::getBackendOptions() {
  if (engine_) return engine_->getBackendOptions();
  return c10::make_intrusive<Options>("nccl", timeout_);
}

void NcclBackend::setTimeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  if (engine_) engine_->setTimeout(timeout + kAfterOurs);
}

c10d::ErrorType NcclBackend::getError() {
  if (log_->has_failed()) return c10d::ErrorType::COMM_ERROR;
  return engine_ ? engine_->getError() : c10d::ErrorType::SUCCESS;
}

void NcclBackend::shutdown() {
  log_->close();
  if (!engine_ || has_ended_) return;
  const auto grace = close_by_ ? std::max(*close_by_ - Clock::now(), Clock::duration(0))
                               : Clock::duration(kCloseGrace);
  const bool is_idle = !log_->has_failed() &&
                       watch_->await_idle(std::chrono::ceil<std::chrono::milliseconds>(grace / 2));
  for (const auto& known : graphs_) {
    const auto graph = known.lock();
    if (graph && is_idle) graph->release();
  }
  // To shut down is to wait for the peers and for graphs that hold the communicator.
  const bool waits = is_idle && captured_ == captured_known_;
  end([waits](Engine& nccl) { waits ? nccl.shutdown() : nccl.abort(); });
}

void NcclBackend::abort() {
  log_->close();
  if (engine_ && !has_ended_) end([](Engine& nccl) { nccl.abort(); });
}

void NcclBackend::end(const std::function<void(Engine&)>& how) {
  has_ended_ = true;
  watch_->close();
  // On a thread that can be left behind, with the engine: NCCL waits without an end for graphs
  // that are still alive.
  std::promise<void> ended;
  auto done = ended.get_future();
  std::thread([how, ended = std::move(ended), engine = std::move(engine_),
               device = request_.device]() mutable {
    end_quietly(
        [&](Engine& nccl) {
          const c10::cuda::OptionalCUDAGuard on_device(device);
          how(nccl);
        },
        *engine);
    engine.reset();
    ended.set_value();
  }).detach();
  const auto deadline =
      std::max(close_by_.value_or(Clock::now() + kCloseGrace), Clock::now() + kCloseGrace / 5);
  if (done.wait_until(deadline) == std::future_status::ready) return;
  TORCH_WARN("nccl: group '", request_.group_name,
             "' did not end in time and was left behind; release CUDA graphs with collectives "
             "before tessera::shutdown()");
}

}  // namespace tessera::comm::nccl
