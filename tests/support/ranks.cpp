#include "support/ranks.h"

#include "comm/context.h"
#include "support/rank_run.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <ostream>
#include <stdexcept>

namespace tessera::testing {

namespace {

thread_local const RankRun* thread_run = nullptr;
const RankRun* process_run = nullptr;

void report_exceptions(const char* what, const RankBody& action) {
  try {
    action();
  } catch (const c10::Error& error) {
    ADD_FAILURE() << what << " threw c10::Error: " << error.what_without_backtrace();
  } catch (const std::exception& error) {
    ADD_FAILURE() << what << " threw std::exception: " << error.what();
  } catch (...) {
    ADD_FAILURE() << what << " threw something that is no std::exception";
  }
}

}  // namespace

// Assigned, not designated: g++ 12 suspects the members left out of being used uninitialised.
InitOptions rank_identity(int rank, int world_size, const RankOptions& options) {
  InitOptions result;
  result.backend = options.backend;
  result.rank = rank;
  result.world_size = world_size;
  result.local_rank = rank;
  result.timeout = options.timeout;
  return result;
}

const RankRun& current_run() {
  const RankRun* run = thread_run != nullptr ? thread_run : process_run;
  if (run == nullptr)
    throw std::logic_error("this is only possible inside the body of run_processes or run_threads");
  return *run;
}

void set_process_run(const RankRun* run) { process_run = run; }

ThreadRunScope::ThreadRunScope(const RankRun& run) { thread_run = &run; }
ThreadRunScope::~ThreadRunScope() { thread_run = nullptr; }

void run_body(const RankBody& body, const RankOptions& options) {
  report_exceptions("the rank", [&] {
    use_run_device();
    if (options.init) tessera::init(rank_init_options());
    body();
  });
  report_exceptions("shutdown", [] { tessera::shutdown(); });
}

InitOptions rank_init_options() { return current_run().init_options; }
int run_rank() { return *current_run().init_options.rank; }
int run_world_size() { return *current_run().init_options.world_size; }

void run_ranks(RankKind kind, int n, const RankBody& body, RankOptions options) {
  if (kind == RankKind::Threads) {
    run_threads(n, body, std::move(options));
  } else {
    run_processes(n, body, std::move(options));
  }
}

std::string to_string(RankKind kind) { return kind == RankKind::Threads ? "Threads" : "Processes"; }
void PrintTo(RankKind kind, std::ostream* out) { *out << to_string(kind); }

FakeWorld::FakeWorld(int rank, int world_size) : scope_(std::make_unique<comm::ContextScope>()) {
  InitOptions options = rank_identity(rank, world_size, {.backend = "fake"});
  options.store = c10::make_intrusive<c10d::HashStore>();
  options.dump_signal = 0;
  tessera::init(std::move(options));
}

FakeWorld::~FakeWorld() { tessera::shutdown(); }

FakeWorld fake_world(int rank, int world_size) { return {rank, world_size}; }

}  // namespace tessera::testing
