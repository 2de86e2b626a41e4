#include "run.h"

#include "launcher/job.h"
#include "numbers.h"

#include <fcntl.h>

#include <algorithm>
#include <iomanip>
#include <memory>
#include <sstream>
#include <utility>

namespace tessera::tool {
namespace {

using launcher::Job;
using launcher::JobOptions;
using launcher::JobOutcome;
using launcher::RankFailure;
using launcher::Session;

// As env and timeout have it; 126 and 127 speak of the program.
constexpr int kLauncherFailed = 125;
constexpr int kMostRanks = 4096;
constexpr int kMostRestarts = 1'000'000;
constexpr int kLargestCode = 255;
constexpr double kLongestGrace = 1e6;

struct RunOptions {
  JobOptions job;
  std::vector<std::string> settings;  // "NAME=VALUE", as given
  bool no_prefix = false;
  double grace_seconds = 5;
  double stopped_seconds = 30;
  double restart_delay = 1;
  int max_restarts = 0;
  std::vector<int> quiet_codes;
};

std::string describe(const RankFailure& failure, int ranks) {
  std::ostringstream text;
  text << "rank " << failure.rank << " of " << ranks << " failed with ";
  if (failure.end.signal != 0) {
    text << launcher::signal_name(failure.end.signal) << " (exit code " << failure.end.code << ")";
  } else {
    text << "exit code " << failure.end.code;
  }
  text << " after " << std::fixed << std::setprecision(1) << failure.seconds << " s";
  return text.str();
}

void report(const RankFailure& failure, int ranks, launcher::Output& output) {
  std::string rest = "; its last lines:";
  if (failure.last_lines.empty()) rest = "; it wrote nothing";
  if (failure.was_stopped)
    rest = failure.last_lines.empty() ? "; it was stopped" : "; it was stopped; its last lines:";
  else if (failure.last_lines.empty() && failure.end.signal == SIGKILL)
    rest = "; it was killed from outside, maybe for want of memory (dmesg tells)";
  output.say(describe(failure, ranks) + rest);
  const std::string prefix = launcher::rank_prefix(failure.rank, output.err().is_coloured());
  for (const auto& line : failure.last_lines) output.err().append(prefix + line + "\n");
}

/// How long a job that fails waits before it is started again.
class RestartDelay {
 public:
  explicit RestartDelay(double first) : first_(first), next_(first) {}

  /// After a start that failed when it had run for `seconds`.
  double take(double seconds) {
    if (seconds >= kGoodRun) next_ = first_;
    return std::exchange(next_, std::min(2 * next_, std::max(first_, kLongestDelay)));
  }

 private:
  static constexpr double kGoodRun = 60;
  static constexpr double kLongestDelay = 30;
  const double first_;
  double next_;
};

int run_job(const RunOptions& options, Session& session) {
  RestartDelay restart_delay(options.restart_delay);
  for (int restart = 0;; ++restart) {
    Job job(options.job, restart, session);
    const JobOutcome outcome = job.run();
    if (!outcome.failure && outcome.was_killed) return 128 + SIGKILL;
    if (!outcome.failure) return outcome.signal == 0 ? 0 : 128 + outcome.signal;
    const bool ends =
        restart == options.max_restarts || outcome.failure->end.is_one_of(options.job.final_codes);
    if (outcome.signal != 0 || ends) {
      if (!outcome.failure->end.is_one_of(options.quiet_codes))
        report(*outcome.failure, options.job.ranks, session.output);
      return outcome.failure->end.code;
    }
    const double delay = restart_delay.take(outcome.failure->seconds);
    std::ostringstream words;
    words << describe(*outcome.failure, options.job.ranks) << "; restart " << restart + 1 << " of "
          << options.max_restarts;
    if (delay > 0) words << " in " << delay << " s";
    session.output.say(words.str());
    if (const int signal = session.pause(std::chrono::duration<double>(delay))) return 128 + signal;
  }
}

/// A pipe that took the number of a closed stdin, stdout or stderr would be mistaken for it.
void open_standard_descriptors() {
  int fd = 0;
  while (fd >= 0 && fd <= STDERR_FILENO) fd = ::open("/dev/null", O_RDWR);
  if (fd >= 0) ::close(fd);
}

int run(const RunOptions& options) {
  open_standard_descriptors();
  Session session;
  int exit_code = kLauncherFailed;
  try {
    exit_code = run_job(options, session);
  } catch (const launcher::StartError& error) {
    session.output.say(error.what());
    exit_code = error.exit_code();
  } catch (const std::system_error& error) {
    const bool needs_more_files = error.code() == std::errc::too_many_files_open;
    session.output.say(std::string(error.what()) +
                       (needs_more_files ? "; raise the limit with ulimit -n" : ""));
  }
  const int signal = session.flush();
  return exit_code == 0 && signal != 0 ? 128 + signal : exit_code;
}

CLI::Validator setting() {
  const auto check = [](std::string& text) -> std::string {
    try {
      launcher::parse_setting(text);
      return {};
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
  };
  return CLI::Validator(check, "NAME=VALUE");
}

}  // namespace

void add_run_command(CLI::App& app, CommandLine& line) {
  auto* run_app = app.add_subcommand("run", "Start N local ranks of a program");
  auto options = std::make_shared<RunOptions>();
  run_app->footer(
      "tessera run -n N [OPTIONS] [--] PROGRAM [ARGUMENTS...]\n"
      "Ends with the exit code of the rank that failed first, 128 + signal when interrupted, 137\n"
      "when interrupted and ranks had to be killed.");
  add_number(*run_app, "-n,--ranks", options->job.ranks, 1, kMostRanks, "Number of ranks")
      ->required()
      ->default_str("")
      ->type_name("N");
  add_number(*run_app, "--max-restarts", options->max_restarts, 0, kMostRestarts,
             "Start again after so many failures")
      ->type_name("K");
  add_numbers(*run_app, "--no-restart-on", options->job.final_codes, 1, kLargestCode,
              "Do not start again after this exit code, and end with it even when told to end; may "
              "be repeated")
      ->allow_extra_args(false)
      ->type_name("CODE");
  add_numbers(*run_app, "--quiet-on", options->quiet_codes, 1, kLargestCode,
              "Add nothing to the words of a rank with this exit code; may be repeated")
      ->allow_extra_args(false)
      ->type_name("CODE");
  run_app->add_option("--env", options->settings, "Set a variable for all ranks; may be repeated")
      ->allow_extra_args(false)
      ->check(setting());
  run_app->add_flag("--no-prefix", options->no_prefix, "Leave out the rank before each line");
  add_number(*run_app, "--grace", options->grace_seconds, 0, kLongestGrace,
             "From the request to end until SIGKILL")
      ->type_name("SECONDS");
  add_number(*run_app, "--stopped-timeout", options->stopped_seconds, 0, kLongestGrace,
             "Kill a rank that is stopped for so long; 0: never, for debuggers")
      ->type_name("SECONDS");
  add_number(*run_app, "--restart-delay", options->restart_delay, 0, kLongestGrace,
             "Before the first restart; doubles with each failure in a row, up to 30 s")
      ->envname("TESSERA_RESTART_DELAY")
      ->type_name("SECONDS");
  run_app->callback([options, &line] {
    if (line.program.empty()) {
      throw CLI::ValidationError("program", "expected -- PROGRAM [ARGUMENTS...] at the end");
    }
    options->job.command = line.program;
    options->job.has_prefix = !options->no_prefix;
    options->job.grace = std::chrono::duration<double>(options->grace_seconds);
    options->job.stopped_timeout = std::chrono::duration<double>(options->stopped_seconds);
    for (const auto& text : options->settings) {
      options->job.settings.push_back(launcher::parse_setting(text));
    }
    line.exit_code = run(*options);
  });
}

void take_program(const CLI::App& app, std::vector<std::string>& arguments, CommandLine& line) {
  const CLI::App* run_app = app.get_subcommand("run");
  const bool is_run = !arguments.empty() && arguments[0] == "run";
  std::size_t at = is_run ? 1 : 0;
  for (; at < arguments.size() && arguments[at] != "--"; ++at) {
    if (!is_run) continue;
    const std::string& word = arguments[at];
    if (!word.starts_with('-') || word == "-") break;
    const auto* option = run_app->get_option_no_throw(word);  // finds neither "-n4" nor "--env=A=1"
    const bool takes_value = option != nullptr && option->get_items_expected_min() > 0;
    if (takes_value && at + 1 < arguments.size()) ++at;
  }
  if (at >= arguments.size()) return;
  const std::size_t first = arguments[at] == "--" ? at + 1 : at;
  line.program.assign(arguments.begin() + static_cast<std::ptrdiff_t>(first), arguments.end());
  arguments.resize(at);
}

}  // namespace tessera::tool
