// One rank of `tessera train`.
#include <tessera/comm.h>

#include "numbers.h"
#include "own_program.h"
#include "train/agreed.h"
#include "train/language_model.h"
#include "train/run_paths.h"
#include "train/settings_file.h"
#include "train/step.h"
#include "train/trainer.h"

#include <ATen/Context.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>

namespace {

using tessera::train::AgreedError;
using tessera::train::Ending;
using tessera::train::Origin;
using tessera::train::RankError;
using tessera::train::Settings;
using tessera::train::Start;

constexpr unsigned kSecondsForOthers = 10;

std::string command_of(int argc, char** argv) {
  std::string text = "tessera train";
  for (int i = 1; i < argc; ++i) text += std::string(" ") + argv[i];
  return text;
}

/// A failed job that was started anew goes on by itself, if it has something to go on from.
bool is_restart() {
  for (const char* name : {"TESSERA_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"}) {
    const char* count = std::getenv(name);
    if (count != nullptr && tessera::tool::parse_number<int64_t>(count).value_or(0) > 0)
      return true;
  }
  return false;
}

void check_device(const Settings& settings) {
  if (settings.device != "cuda") return;
  TORCH_CHECK_VALUE(at::hasCUDA(),
                    "--device cuda: expected a GPU, but libtorch finds none; use --device cpu, or "
                    "a CUDA build of libtorch where a GPU is visible");
}

/// Ends without taking the group down, which would wait for ranks that are gone.
[[noreturn]] void leave(int code) {
  std::cout.flush();
  std::fflush(nullptr);
  _exit(code);
}

/// The same with rank `first` before the others, whom its launcher then asks to end: this wakes
/// them.
[[noreturn]] void leave_behind(int first, int code) {
  if (tessera::rank() != first) sleep(kSecondsForOthers);
  leave(code);
}

int train_in(const std::string& run, const Settings& settings, const Origin& origin) {
  auto start = settings.resume ? Start::Resume : Start::New;
  if (is_restart())
    start = tessera::latest_checkpoint(run + "/checkpoints") ? Start::Restart : Start::Again;
  tessera::barrier();  // nobody looks for checkpoints once somebody may write them
  tessera::train::Trainer trainer(settings, origin, run, start);
  const Ending ending = trainer.run();
  tessera::barrier();
  if (ending.first >= 0) leave_behind(ending.first, ending.exit_code);
  return ending.exit_code;
}

int train(const Settings& given, const Origin& origin) {
  auto run = given.run;
  const bool is_made_for_it =
      run.empty() || std::getenv(tessera::train::kNewRunVariable) != nullptr;
  try {
    const auto settings = tessera::train::agree([&] {
      tessera::train::check_paths(given);
      check_device(given);
      auto sized = tessera::train::with_sizes(given);
      tessera::train::check(sized, tessera::world_size());
      tessera::train::check_memory(sized, tessera::world_size(), /*ranks_here=*/1);
      return sized;
    });
    tessera::train::choose_attention(settings);
    if (run.empty() && tessera::rank() == 0) run = tessera::train::make_run_folder();
    run = tessera::broadcast_bytes(run);
    return train_in(run, settings, origin);
  } catch (...) {
    if (is_made_for_it && tessera::rank() == 0) tessera::train::remove_unused_folder(run);
    throw;
  }
}

[[noreturn]] void end_job(const AgreedError& error) {
  // Rank 0's words are to be the job's last.
  if (tessera::rank() == 0) std::cerr << "tessera train: " << error.what() << std::endl;
  leave_behind(/*first=*/0, error.exit_code());
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // ulimit -f is to be an error that names the file
  CLI::App app("Trains a language model on text", "tessera train");
  Settings settings;
  const auto fields = tessera::train::add_settings(app, settings);
  try {
    tessera::train::parse_settings(app, fields, settings, {argv + 1, argv + argc});
    tessera::init({.timeout = std::chrono::duration_cast<std::chrono::milliseconds>(
                       std::chrono::duration<double>(settings.timeout))});
    const Origin origin{.command = command_of(argc, argv),
                        .config_toml = tessera::train::to_toml(fields),
                        .config = tessera::train::to_map(fields)};
    const int code = train(settings, origin);
    tessera::shutdown();
    return code;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    std::cerr << "tessera train: " << error.what() << "; see " << tessera::tool::tessera_command()
              << " train --help\n";
    return tessera::train::kWrongSettings;
  } catch (const AgreedError& error) {
    end_job(error);
  } catch (const RankError& error) {
    std::cerr << "tessera train: " << error.what() << std::endl;
    leave(error.exit_code());
  } catch (const std::exception& error) {
    std::cerr << tessera::train::message_of(error) << std::endl;
    leave(1);
  }
}
