#include "train/trainer.h"

#include <tessera/comm.h>
#include <tessera/trace.h>

#include "train/agreed.h"
#include "train/facts.h"
#include "train/schedule.h"
#include "train/signals.h"
#include "train/step.h"
#include "train/timeline.h"

#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace tessera::train {
namespace {

using nlohmann::json;

constexpr int kMostSkippedInARow = 20;
constexpr size_t kStepsForSpeed = 20;  // over which times are averaged
constexpr int64_t kStepsBeforeForecast = 60;

Model make_model(const Settings& settings, const Batches& batches, const Layout& layout,
                 const std::shared_ptr<PowerSGDState>& powersgd) {
  torch::manual_seed(settings.seed);
  auto model = agree(
      [&] { return make_language_model(settings, batches.sequences().tokenizer().vocabulary()); });
  parallelize(*model, layout, settings, powersgd);
  // Ranks of one model draw the same masks, parts of the batch others.
  torch::manual_seed(settings.seed + 1 + static_cast<uint64_t>(layout.data_rank));
  return model;
}

/// Beside adapters all are, the head among them.
double frozen_weights(const LanguageModel& model, const Settings& settings) {
  if (settings.lora == 0) return 0;
  double trained = 0;
  for (const auto& parameter : model.module()->parameters())
    trained += parameter.requires_grad() ? static_cast<double>(parameter.numel()) : 0;
  return std::max(0.0, model.weights_in_products() - trained);
}

/// A save fails on all ranks alike, unless a rank is lost.
template <class F>
void agree_on_save(F save) {
  try {
    save();
  } catch (const c10::DistError&) {
    throw;
  } catch (const std::exception& error) {
    throw AgreedError("expected a checkpoint, but nothing was saved: " + message_of(error),
                      kNotSaved);
  }
}

}  // namespace

Trainer::Trainer(const Settings& settings, const Origin& origin, const std::string& folder,
                 Start start)
    : settings_(settings),
      origin_(origin),
      device_(device_of(settings)),
      layout_(make_layout(settings)),
      batches_(make_batches(settings, layout_, device_)),
      powersgd_(make_powersgd(settings)),
      model_(make_model(settings, batches_, layout_, powersgd_)),
      optimizer_(make_optimizer(*model_, settings)),
      average_(make_average(*model_, settings)),
      step_(model_, *optimizer_, settings,
            /*has_data_ranks=*/layout_.gradients && layout_.gradients->size() > 1),
      units_(model_->module()),
      folder_(folder, start),
      journal_(folder_, settings.log_every),
      training_(*model_, module_with(*model_, average_.get()), *optimizer_, step_, batches_,
                layout_, settings, powersgd_),
      devices_(used_devices(device_)),
      peak_flops_(peak_of(devices_, settings.precision)),
      work_per_token_(flops_per_token({.weights = model_->weights_in_products(),
                                       .frozen = frozen_weights(*model_, settings),
                                       .blocks = settings.blocks,
                                       .attention_width = model_->attention_width(),
                                       .context = settings.context})) {
  if (!peak_flops_) peak_flops_ = measured_peak(device_, settings.precision);
  for (const auto& line :
       introduction(*model_, batches_, layout_, devices_, settings, step_.choice(), folder))
    journal_.say(line);
  if (start == Start::Resume || start == Start::Restart) resume(start);
  if (!has_nothing_to_do_) record_start(start);
}

void Trainer::record_start(Start start) {
  // Those of an earlier start tell of other ranks; this one writes them anew if it gets that far.
  for (const char* name : {"communication.json", "timeline.json", "trace.json", "program.cpp",
                           "program.txt", "program-part.txt"}) {
    if (start != Start::New) journal_.remove(name);
  }
  const auto facts = facts_of(*model_, layout_, batches_, origin_.command);
  const auto first_step = position_.step + 1;
  journal_.file("run.json", with_starts(facts, folder_.read("run.json"), first_step).dump(1));
  journal_.file("config.json", origin_.config.dump(1));
  journal_.file("config.toml", origin_.config_toml);
}

/// From the newest checkpoint; from the one before it if that is damaged.
void Trainer::resume(Start start) {
  const auto checkpoints = training_.checkpoints(folder_);
  if (checkpoints.empty())
    throw AgreedError("--resume: expected a checkpoint in " + folder_.checkpoints() +
                          ", found none; leave --resume out and use another --run",
                      kWrongSettings);
  for (size_t i = 0; i < checkpoints.size(); ++i) {
    try {
      position_ = training_.load(checkpoints[i]);
      break;
    } catch (const c10::ValueError& error) {  // the same on all ranks
      if (i + 1 == checkpoints.size()) throw AgreedError(message_of(error));
      journal_.say(message_of(error) + "\ntrying the one before it");
    }
  }
  saved_step_ = position_.step;
  // After a failure the end may lack what comes behind the last step.
  has_nothing_to_do_ = start == Start::Resume && is_over();
  if (has_nothing_to_do_) return;
  journal_.event("resumed", position_.step, "goes on after step " + std::to_string(position_.step));
}

bool Trainer::is_time_over() const {
  return settings_.minutes > 0 && position_.elapsed >= 60 * settings_.minutes;
}

bool Trainer::is_over() const { return position_.step >= settings_.steps || is_time_over(); }

bool Trainer::is_ending() const { return is_over() || stop_.signal != 0; }

std::string Trainer::what_is_saved(const char* condition) const {
  const auto last = latest_checkpoint(folder_.checkpoints());
  if (!last) return "nothing is saved in " + folder_.path();
  return "the last saved checkpoint is " + *last + "; " + condition + "go on with --resume --run " +
         folder_.path();
}

Ending Trainer::run() {
  if (has_nothing_to_do_) {
    journal_.say("nothing to do: the run is at step " + std::to_string(position_.step) + " of " +
                 std::to_string(settings_.steps) +
                 (is_time_over() ? ", and its --minutes have passed; " : "; ") + what_is_saved() +
                 (position_.step >= settings_.steps ? " --steps MORE" : "") +
                 (is_time_over() ? " --minutes MORE" : ""));
    return {};
  }
  note_signals();
  try {
    train_steps();
    return finish();
  } catch (const AgreedError& error) {
    throw AgreedError(std::string(error.what()) + "; " + what_is_saved(), error.exit_code());
  } catch (const std::exception& error) {
    // A launcher that has asked the job to end takes other failures for its end.
    const bool is_asked_to_end = stop_.signal != 0 || noted_signal().number != 0;
    const bool is_of_text = dynamic_cast<const TextError*>(&error) != nullptr;
    throw RankError((is_asked_to_end ? "saved no more: " : "") + message_of(error) + "; " +
                        what_is_saved(is_of_text ? "once the text is as it was, " : ""),
                    is_asked_to_end ? kNotSaved : 1);
  }
}

void Trainer::train_steps() {
  clock_start_ = now() - position_.elapsed;
  elapsed_before_ = position_.elapsed;
  const auto first = position_.step;
  Recordings recordings(settings_, settings_.steps - first);
  const auto is_due = [](int64_t every, int64_t step) { return every > 0 && step % every == 0; };
  while (!is_ending()) {
    const auto step = position_.step + std::ssize(issued_) + 1;
    const auto step_here = step - 1 - first;
    if (recordings.begin_with(step_here)) {
      settle();
      if (is_ending()) break;
      recordings.begin(step_here);
    }
    issued_.push_back(issue_step());
    if (const auto fallback = step_.new_fallback(); !fallback.empty())
      journal_.event("eager", step, fallback);
    const bool is_last_step = step >= settings_.steps;
    const bool is_recorded = recordings.end_with(step_here, is_last_step);
    const bool is_halt = is_last_step || is_recorded || is_due(settings_.save_every, step) ||
                         is_due(settings_.eval_every, step);
    settle(is_halt || device_.is_cpu() ? 0 : 1);  // the CPU has done what it has issued
    const bool is_last = is_ending();
    if (is_last) settle();
    if (is_recorded || (recordings.is_on() && is_last)) {
      recordings.end(step_here, journal_);
      if (step_.choice().is_on && !recordings.is_trace(step_here)) {
        for (const auto& [name, text] : step_.program_files()) journal_.file(name, text);
      }
    }
    if (is_last || !issued_.empty()) continue;
    // After a step that was left out the model may be one that has come to nothing.
    if (is_due(settings_.save_every, step) && last_is_finite_) save();
    if (is_due(settings_.eval_every, step)) validate(Batches::Part::Trend);
  }
  if (last_is_finite_ && std::max(saved_step_, saving_step_) != position_.step) save();
}

IssuedStep Trainer::issue_step() {
  const auto begun = now();
  DeviceEvent begun_on_device(device_);
  const auto communicated = communication_seconds();
  const auto step = position_.step + std::ssize(issued_);
  // Always by the time two steps before, whether or not the one between is read already.
  const double elapsed = issued_.empty() ? elapsed_before_ : position_.elapsed;
  const double rate = learning_rate(settings_, schedule_position(settings_, step, elapsed));
  set_learning_rate(*optimizer_, rate);
  const auto place = batches_.position();
  std::vector<Batch> batches;
  units_.begin_step();
  const auto values = step_.run([&] {
    batches.push_back(batches_.next());
    return batches.back();
  });
  units_.end_step();
  if (average_) {
    const Span span(SpanKind::Optimizer, "average");
    average_->update();
  }
  StepMessage message(values,
                      {.seconds = now() - begun,
                       .communication = communication_seconds() - communicated,
                       .elapsed = now() - clock_start_,
                       .has_saved = training_.has_saved()},
                      step_.may_overflow());
  return {.begun = std::move(begun_on_device),
          .done = DeviceEvent(device_),
          .issued_at = now(),
          .learning_rate = rate,
          .epoch = batches_.epoch(),
          .place = place,
          .batches = std::move(batches),
          .message = std::move(message)};
}

Measured Trainer::read(const IssuedStep& step) {
  Measured measured{.learning_rate = step.learning_rate, .epoch = step.epoch};
  measured.told = step.message.told();
  {
    const bool has_come = step.done.has_come();
    const Span span(SpanKind::Other, "read");
    step.done.wait();
    // How long the device was busy with what was issued; nobody knows if it was done before.
    if (!device_.is_cpu()) measured.host_lead = has_come ? 0 : now() - step.issued_at;
  }
  measured.seconds = step.done.seconds_since(last_done_ ? *last_done_ : step.begun);
  measured.loss = step.message.loss();
  measured.gradient_norm = step.message.gradient_norm();
  measured.is_finite = step.message.is_finite();
  return measured;
}

void Trainer::settle(size_t left) {
  while (issued_.size() > left) {
    const bool is_behind_the_end = is_ending();
    const auto measured = read(issued_.front());
    auto step = std::move(issued_.front());
    issued_.pop_front();
    // It updated nothing and its batches are read again. What it drew stays drawn, and a scale of
    // fp16 that it lowered stays lower.
    if (is_behind_the_end && !measured.is_finite) {
      batches_.seek(step.place);
      continue;
    }
    last_done_ = std::move(step.done);
    last_is_finite_ = measured.is_finite;
    if (stop_.signal == 0) stop_ = measured.told.stop;
    position_.seconds += measured.seconds;
    elapsed_before_ = std::exchange(position_.elapsed, measured.told.elapsed);
    position_.tokens += settings_.batch * settings_.context;
    if (measured.is_finite) {
      skipped_in_a_row_ = 0;
    } else {
      handle_nonfinite(measured, step.batches);
    }
    ++position_.step;
    log(measured);
    if (measured.told.have_saved) finish_saving();
  }
  if (left == 0) last_done_.reset();
}

void Trainer::handle_nonfinite(const Measured& measured, const std::vector<Batch>& batches) {
  const auto step = std::to_string(position_.step + 1);
  const auto culprit = find_nonfinite(*model_, step_, batches);
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
  throw AgreedError("expected a finite loss, but " + what + "; " + remedy);
}

void Trainer::log(const Measured& measured) {
  recent_seconds_.push_back(measured.seconds);
  if (recent_seconds_.size() > kStepsForSpeed) recent_seconds_.erase(recent_seconds_.begin());
  const double mean = std::accumulate(recent_seconds_.begin(), recent_seconds_.end(), 0.0) /
                      static_cast<double>(recent_seconds_.size());
  double left = mean * static_cast<double>(settings_.steps - position_.step);
  if (settings_.minutes > 0) left = std::min(left, 60 * settings_.minutes - position_.elapsed);
  const double speed = static_cast<double>(settings_.batch * settings_.context) / mean;
  std::optional<double> utilization;
  if (peak_flops_) utilization = speed * work_per_token_ / *peak_flops_;
  json further = {{"tokens", position_.tokens},       {"grad_norm", measured.gradient_norm},
                  {"step_seconds", measured.seconds}, {"seconds", position_.seconds},
                  {"elapsed", position_.elapsed},     {"epoch", measured.epoch}};
  if (measured.host_lead) further["host_lead_seconds"] = *measured.host_lead;
  journal_.step(
      {.step = position_.step,
       .steps = settings_.steps,
       .loss = measured.loss,
       .learning_rate = measured.learning_rate,
       .tokens_per_second = speed,
       .ranks = world_size(),
       .communication = measured.told.communication,
       .memory = measured.told.memory,
       .utilization = utilization,
       .nats_per_byte = nats_per_byte_,
       .seconds_left = left,
       .done = is_over() ? 1
                         : schedule_position(settings_, position_.step, position_.elapsed) /
                               static_cast<double>(settings_.steps),
       .is_last = is_over() && issued_.empty()},
      further);
  const bool is_of_text = settings_.sft.empty() && settings_.lora == 0;
  if (++steps_read_ == kStepsBeforeForecast && !device_.is_cpu() && is_of_text)
    journal_.say(forecast_of(speed, settings_.context));
}

void Trainer::save() {
  finish_saving();
  agree_on_save([&] { training_.save(folder_, position_); });
  saving_step_ = position_.step;
}

void Trainer::finish_saving() {
  if (saving_step_ < 0) return;
  const auto step = std::exchange(saving_step_, -1);
  agree_on_save([&] { training_.finish_saving(); });
  saved_step_ = step;
  journal_.event("saved", saved_step_, "");
}

}  // namespace tessera::train
