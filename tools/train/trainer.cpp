#include "train/trainer.h"

#include <tessera/comm.h>
#include <tessera/trace.h>

#include "base/text.h"
#include "train/agreed.h"
#include "train/generate.h"
#include "train/nonfinite.h"
#include "train/schedule.h"
#include "train/signals.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <torch/utils.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <numeric>
#include <utility>

namespace tessera::train {
namespace {

using nlohmann::json;

constexpr int64_t kMostUntraced = 5;
constexpr int kMostSkippedInARow = 20;
constexpr size_t kStepsForSpeed = 20;  // over which times are averaged

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Of this rank: on a device what its allocator holds, otherwise the process's.
int64_t memory_in_use(at::Device device) {
  if (!device.is_cpu()) {
    constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const auto stats = at::getDeviceAllocator(device.type())->getDeviceStats(device.index());
    return stats.reserved_bytes[kAll].current;
  }
  std::ifstream file("/proc/self/statm");
  int64_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

at::Device device_of(const Settings& settings) {
  const auto type = device_type_of(settings);
  return type == at::kCPU ? at::Device(type)
                          : at::Device(type, static_cast<c10::DeviceIndex>(local_rank()));
}

Gpt make_model(const Settings& settings, const Batches& batches, const Layout& layout,
               const std::shared_ptr<PowerSGDState>& powersgd, at::Device device) {
  torch::manual_seed(settings.seed);
  Gpt model(ModelShape{.vocabulary = batches.corpus().tokenizer().vocabulary(),
                       .blocks = settings.blocks,
                       .width = settings.width,
                       .heads = settings.heads,
                       .context = settings.context,
                       .dropout = settings.dropout});
  model->to(device);
  parallelize(model, layout, settings, powersgd);
  // Ranks of one model draw the same masks, parts of the batch others.
  torch::manual_seed(settings.seed + 1 + static_cast<uint64_t>(layout.data_rank));
  return model;
}

std::string signal_name(int signal) { return signal == SIGINT ? "SIGINT" : "SIGTERM"; }

}  // namespace

Trainer::Trainer(const Settings& settings, const Origin& origin, const std::string& folder,
                 Start start)
    : settings_(settings),
      origin_(origin),
      device_(device_of(settings)),
      layout_(make_layout(settings)),
      batches_(make_batches(settings, layout_, device_)),
      powersgd_(make_powersgd(settings)),
      model_(make_model(settings, batches_, layout_, powersgd_, device_)),
      optimizer_(make_optimizer(*model_, settings)),
      step_(model_, optimizer_, settings, /*has_data_ranks=*/layout_.data_ranks > 1),
      folder_(folder, start),
      journal_(folder_, settings.log_every),
      trainee_(model_, optimizer_, step_, batches_, layout_, settings, powersgd_) {
  introduce();
  if (start == Start::Resume || start == Start::Restart) resume(start);
  if (!has_nothing_to_do_) record_start(start);
}

void Trainer::record_start(Start start) {
  // Those of an earlier start tell of other ranks; this one writes them anew if it gets that far.
  for (const char* name : {"timeline.json", "trace.json", "program.cpp"}) {
    if (start != Start::New) journal_.remove(name);
  }
  const auto facts = facts_of(model_, layout_, batches_, origin_.command);
  const auto first_step = position_.step + 1;
  journal_.file("run.json", with_starts(facts, folder_.read("run.json"), first_step).dump(1));
  journal_.file("config.json", origin_.config.dump(1));
  journal_.file("config.toml", origin_.config_toml);
}

int64_t Trainer::sequences_per_part() const {
  return settings_.batch / layout_.data_ranks / settings_.accumulate;
}

void Trainer::introduce() {
  char text[256];
  std::snprintf(
      text, sizeof text,
      "GPT of %.2f M parameters (%lld blocks, width %lld), %lld tokens of text in %lld files",
      static_cast<double>(parameter_count(model_)) / 1e6, static_cast<long long>(settings_.blocks),
      static_cast<long long>(settings_.width), static_cast<long long>(batches_.corpus().tokens()),
      static_cast<long long>(batches_.corpus().files()));
  journal_.say(text);
  std::string ranks = std::to_string(world_size()) + (world_size() == 1 ? " rank" : " ranks");
  if (world_size() > 1) ranks += " (" + settings_.parallel;
  for (size_t i = 0; world_size() > 1 && i < layout_.mesh.dim_names().size(); ++i)
    ranks += ", " + layout_.mesh.dim_names()[i] + "=" + std::to_string(layout_.mesh.size(i));
  journal_.say(ranks + (world_size() > 1 ? ")" : "") + (settings_.compile ? ", compiled" : "") +
               ", " + settings_.precision + "; run folder " + folder_.path());
}

/// From the newest checkpoint; from the one before it if that is damaged.
void Trainer::resume(Start start) {
  const auto checkpoints = trainee_.checkpoints(folder_);
  if (checkpoints.empty())
    throw AgreedError("--resume: expected a checkpoint in " + folder_.checkpoints() +
                          ", found none; leave --resume out and use another --run",
                      kWrongSettings);
  for (size_t i = 0; i < checkpoints.size(); ++i) {
    try {
      position_ = trainee_.load(checkpoints[i]);
      break;
    } catch (const c10::ValueError& error) {  // the same on all ranks
      if (i + 1 == checkpoints.size()) throw AgreedError(message_of(error));
      journal_.say(message_of(error) + "\ntrying the one before it");
    }
  }
  saved_step_ = position_.step;
  // After a failure the end may lack what comes behind the last step.
  has_nothing_to_do_ = start == Start::Resume && position_.step >= settings_.steps;
  if (has_nothing_to_do_) return;
  journal_.event("resumed", position_.step, "goes on after step " + std::to_string(position_.step));
}

int Trainer::run() {
  if (has_nothing_to_do_) {
    journal_.say("nothing to do: the run is at step " + std::to_string(position_.step) + " of " +
                 std::to_string(settings_.steps) + "; raise --steps");
    return 0;
  }
  note_signals();
  int signal = 0;
  const auto first = position_.step;
  // Earlier steps are slower: memory is new, programs are made.
  first_traced_ =
      std::clamp<int64_t>(settings_.steps - first - settings_.trace - 1, 0, kMostUntraced);
  while (position_.step < settings_.steps && signal == 0) {
    begin_timeline(position_.step - first);
    const auto measured = train_step();
    signal = measured.signal;
    const bool is_last = position_.step + 1 == settings_.steps || signal != 0;
    end_timeline(position_.step - first, is_last);
    ++position_.step;
    log(measured);
    const auto is_due = [&](int64_t every) { return every > 0 && position_.step % every == 0; };
    // After a step that was left out the model may be one that has come to nothing.
    if ((is_due(settings_.save_every) || is_last) && measured.is_finite) save();
    if (trainee_.has_saved()) finish_saving();
    if (is_due(settings_.eval_every) && !is_last) validate();
  }
  return finish(signal);
}

Trainer::Measured Trainer::train_step() {
  const auto begun = now();
  const auto communicated = communication_seconds();
  set_learning_rate(optimizer_, learning_rate(settings_, position_.step));
  last_batches_.clear();
  const auto loss = step_.backward([&] {
    last_batches_.push_back(batches_.next(sequences_per_part()));
    return last_batches_.back();
  });
  const auto norm = step_.clip();
  auto measured = exchange(loss.item<double>(), now() - begun,
                           communication_seconds() - communicated, norm.item<double>());
  if (measured.is_finite) {
    skipped_in_a_row_ = 0;
    step_.update();
  } else {
    handle_nonfinite(measured);
  }
  measured.seconds = now() - begun;
  position_.seconds += measured.seconds;
  position_.tokens += settings_.batch * settings_.context;
  return measured;
}

/// One small message per step: what all ranks have measured, and whether one was told to stop.
Trainer::Measured Trainer::exchange(double loss, double seconds, double communication,
                                    double norm) const {
  const std::vector<double> own = {loss, communication / seconds, norm,
                                   static_cast<double>(memory_in_use(device_)),
                                   static_cast<double>(noted_signal())};
  auto all =
      at::zeros({world_size(), static_cast<int64_t>(own.size())}, at::TensorOptions(at::kDouble));
  all[rank()] = at::tensor(own, at::kDouble);
  all = all_reduce(all.to(device_)).to(at::kCPU);
  const auto column = [&](int64_t i) { return all.select(1, i); };
  // fp16 overflows now and then by design; its scaler leaves such steps out.
  const bool is_finite =
      std::isfinite(column(0).sum().item<double>()) &&
      (settings_.precision == "fp16" || std::isfinite(column(2).sum().item<double>()));
  return {.loss = column(0).mean().item<double>(),
          .seconds = seconds,
          .communication = column(1).mean().item<double>(),
          .gradient_norm = norm,
          .memory = static_cast<int64_t>(column(3).max().item<double>()),
          .signal = static_cast<int>(column(4).max().item<double>()),
          .is_finite = is_finite};
}

void Trainer::handle_nonfinite(const Measured& measured) {
  step_.discard();
  const auto step = std::to_string(position_.step + 1);
  const auto culprit = find_nonfinite(model_, step_, last_batches_);
  const auto what = "the " + std::string(std::isfinite(measured.loss) ? "gradient" : "loss") +
                    " of step " + step + " is not finite; first not finite: " +
                    culprit.value_or("a gradient (forward is finite)");
  if (settings_.skip_nonfinite && ++skipped_in_a_row_ <= kMostSkippedInARow) {
    ++position_.skipped;
    return journal_.event("nonfinite", position_.step + 1, what + "; step left out");
  }
  journal_.event("nonfinite", position_.step + 1, "");
  finish_saving();
  const auto remedy =
      settings_.skip_nonfinite
          ? std::to_string(kMostSkippedInARow) +
                " steps in a row were left out before it; lower --lr or give --clip"
          : "lower --lr, give --clip, or leave such steps out with --skip-nonfinite";
  throw AgreedError("expected a finite loss, but " + what + "; " + remedy +
                    (saved_step_ < 0
                         ? "; there is no checkpoint"
                         : "; the last checkpoint is of step " + std::to_string(saved_step_)));
}

void Trainer::log(const Measured& measured) {
  recent_seconds_.push_back(measured.seconds);
  if (recent_seconds_.size() > kStepsForSpeed) recent_seconds_.erase(recent_seconds_.begin());
  const double mean = std::accumulate(recent_seconds_.begin(), recent_seconds_.end(), 0.0) /
                      static_cast<double>(recent_seconds_.size());
  journal_.step(
      {.step = position_.step,
       .steps = settings_.steps,
       .loss = measured.loss,
       .learning_rate = learning_rate(settings_, position_.step - 1),
       .tokens_per_second = static_cast<double>(settings_.batch * settings_.context) / mean,
       .ranks = world_size(),
       .communication = measured.communication,
       .memory = measured.memory,
       .seconds_left = mean * static_cast<double>(settings_.steps - position_.step)},
      {{"tokens", position_.tokens},
       {"grad_norm", measured.gradient_norm},
       {"step_seconds", measured.seconds},
       {"seconds", position_.seconds},
       {"epoch", batches_.epoch()}});
}

void Trainer::validate() {
  const auto count = batches_.validations(sequences_per_part());
  if (count == 0) return;
  model_->eval();
  double sum = 0, sequences = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto [batch, counted] = batches_.validation(i, sequences_per_part());
    sum += step_.evaluate(batch).item<double>() * static_cast<double>(counted);
    sequences += static_cast<double>(counted);
  }
  model_->train();
  const auto all = all_reduce(at::tensor({sum, sequences}, at::kDouble).to(device_)).to(at::kCPU);
  journal_.validation(position_.step, (all[0] / all[1]).item<double>(), position_.seconds);
}

void Trainer::save() {
  finish_saving();
  trainee_.save(folder_, position_);
  saving_step_ = position_.step;
}

void Trainer::finish_saving() {
  if (saving_step_ < 0) return;
  trainee_.finish_saving();
  saved_step_ = std::exchange(saving_step_, -1);
  journal_.event("saved", saved_step_, "");
}

void Trainer::begin_timeline(int64_t step_here) {
  if (settings_.trace > 0 && step_here == first_traced_)
    timeline_ = std::make_unique<Timeline>(/*with_operators=*/true);
  if (step_here == first_traced_ + settings_.trace)
    timeline_ = std::make_unique<Timeline>(/*with_operators=*/false);
}

void Trainer::end_timeline(int64_t step_here, bool is_last) {
  if (!timeline_) return;
  const bool is_trace = step_here < first_traced_ + settings_.trace;
  if (is_trace && !is_last && step_here + 1 < first_traced_ + settings_.trace) return;
  journal_.file(is_trace ? "trace.json" : "timeline.json", timeline_->gather());
  timeline_.reset();
  if (!is_trace && settings_.compile) journal_.file("program.cpp", step_.program());
}

int Trainer::finish(int signal) {
  if (signal == 0) validate();
  finish_saving();
  if (signal != 0) {
    const auto stopped = "stopped by " + signal_name(signal) + " after step " +
                         std::to_string(position_.step) + "; ";
    // None: all steps so far were left out.
    journal_.say(stopped + (saved_step_ < 0
                                ? "there is no checkpoint"
                                : "the checkpoint of step " + std::to_string(saved_step_) +
                                      " is saved; go on with --resume --run " + folder_.path()));
    return 128 + signal;
  }
  if (settings_.sample > 0) {
    const auto text = generate(model_, batches_.corpus().tokenizer(), settings_.prompt,
                               settings_.sample, settings_.seed, device_);
    journal_.say("\n" + printable(settings_.prompt + text, "\n\t") + "\n");
    journal_.file("sample.txt", settings_.prompt + text);
  }
  journal_.say("look at it: tessera report " + folder_.path());
  return 0;
}

}  // namespace tessera::train
