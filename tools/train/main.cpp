// One rank of `tessera train`.
#include <tessera/comm.h>

#include "train/run_paths.h"
#include "train/settings.h"
#include "train/trainer.h"

#include <ATen/Parallel.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>

namespace {

using tessera::train::Settings;

constexpr int kUsageError = 2;
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
    if (count != nullptr && std::atoi(count) > 0) return true;
  }
  return false;
}

int train(const Settings& settings, tessera::train::Origin origin) {
  tessera::train::check(settings, tessera::world_size());
  auto run = settings.run;
  if (run.empty() && tessera::rank() == 0) run = tessera::train::make_run_folder();
  run = tessera::broadcast_bytes(run);
  using Start = tessera::train::Start;
  auto start = settings.resume ? Start::Resume : Start::New;
  if (is_restart())
    start = tessera::latest_checkpoint(run + "/checkpoints") ? Start::Resume : Start::Again;
  tessera::barrier();  // nobody looks for checkpoints once somebody may write them
  tessera::train::Trainer trainer(settings, origin, run, start);
  const int code = trainer.run();
  tessera::barrier();
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains a GPT on text", "tessera train");
  Settings settings;
  tessera::train::add_settings(app, settings);
  try {
    tessera::train::parse_settings(app, settings, {argv + 1, argv + argc});
    tessera::init();
    tessera::train::Origin origin{.command = command_of(argc, argv),
                                  .config_toml = tessera::train::to_toml(app),
                                  .config = tessera::train::to_map(app)};
    const int code = train(settings, std::move(origin));
    tessera::shutdown();
    return code;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    std::cerr << "tessera train: " << error.what() << "; see tessera train --help\n";
    return kUsageError;
  } catch (const tessera::train::AgreedError& error) {
    if (tessera::rank() == 0) {
      std::cerr << error.what() << std::endl;
    } else {
      sleep(kSecondsForOthers);  // rank 0's words are to be the job's last
    }
    return 1;
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << std::endl;
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
