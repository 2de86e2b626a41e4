#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/util/SmallVector.h>

#include <vector>

/// What a run depends on besides its arguments: random generators and autocast.
namespace tessera::detail::checkpoint {

/// States of the CPU's default generator and of those of some devices.
class RandomState {
 public:
  /// The present one. Devices without a generator of their own are passed over.
  static RandomState of(const std::vector<at::Device>& devices);
  /// Of the same generators.
  RandomState present() const;
  void restore() const;
  bool operator==(const RandomState& other) const;

 private:
  struct Entry {
    at::Generator generator;
    at::Tensor state;
  };
  std::vector<Entry> entries_;
};

/// Autocast of every device type, on this thread.
class AutocastState {
 public:
  static AutocastState present();
  void restore() const;
  bool operator==(const AutocastState& other) const = default;

 private:
  struct Entry {
    bool enabled;
    at::ScalarType dtype;
    bool operator==(const Entry& other) const = default;
  };
  c10::SmallVector<Entry, 10> entries_;
  bool cache_enabled_ = true;
};

/// What a forward started from.
class RunState {
 public:
  RunState(bool with_random, const std::vector<at::Device>& devices);
  /// To be told when the forward has ended: if it drew no random numbers neither will another run,
  /// which then leaves the generators, shared by all threads, alone.
  void forward_ended();

  /// A run that starts from there. Afterwards everything is as before.
  class Scope {
   public:
    explicit Scope(const RunState& state);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    std::optional<RandomState> random_before_;
    std::optional<AutocastState> autocast_before_;
    bool outer_replays_random_;
  };
  /// Whether this thread is inside a Scope that puts the generators back.
  static bool replays_random();

 private:
  std::optional<RandomState> random_;
  AutocastState autocast_;
};

/// While it lives, this thread runs a checkpointed part, for the first time or again.
class RepeatedScope {
 public:
  RepeatedScope();
  ~RepeatedScope();
  RepeatedScope(const RepeatedScope&) = delete;
  RepeatedScope& operator=(const RepeatedScope&) = delete;
  static bool is_open();
};

}  // namespace tessera::detail::checkpoint
