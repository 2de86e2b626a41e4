#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

/// What the rest of the library tells a recorder of operators. A recording is run later without
/// the code that issued the operators, so that code says on what its choices depended.
namespace tessera::capture {

/// The dispatch key through which operators, under autograd, come to a recorder.
constexpr auto kRecordKey = c10::DispatchKey::PrivateUse2;

/// A number of the host in a 0-dim tensor, so that a program reads it at each run: a learning rate.
class HostNumber {
 public:
  HostNumber(c10::Device device, at::ScalarType dtype);
  /// By no operator that a recorder sees. On a GPU: in the order of the current stream.
  void set(double value);
  const at::Tensor& tensor() const { return tensor_; }

 private:
  at::Tensor tensor_;
  std::optional<double> held_;
};

class Observer {
 public:
  Observer();
  virtual ~Observer() = default;
  const uint64_t number;  // of this recording; no two have the same

  // `who` tells things of one name apart; what is said again by the same one counts once.

  /// The recording holds as long as `read` returns what it returns at this moment. `what` names it
  /// for a user: "training mode of fc1".
  virtual void depend_on(const void* who, std::string what, std::function<uint64_t()> read) = 0;
  /// Operators are given the tensor of `number`. Before every run it is set to what `read` returns:
  /// NaN if whoever had it is gone. `name` is for a user: "lr of SGD's group 0".
  virtual void hyperparameter(const void* who, std::string name,
                              const std::shared_ptr<HostNumber>& number,
                              std::function<double()> read) = 0;
  /// Until end_random(): random numbers are drawn that `who` draws again later, from the same state
  /// of the generator, which a program does not know of; or, if `again`, it draws them again.
  virtual void begin_random(const void* who, bool again) = 0;
  virtual void end_random() = 0;
  /// Whether it wants to know of calls of modules.
  virtual bool watches_modules() const = 0;
  /// Until leave_module(): operators come from a forward of this module. The recording holds as
  /// long as `read` returns what it returns at this moment: its training mode and hooks.
  virtual void enter_module(const torch::nn::Module& module, std::function<uint64_t()> read) = 0;
  virtual void leave_module() = 0;
  /// Whether averages of gradients are to be operators; otherwise their engine does as ever.
  virtual bool takes_averages() const = 0;
  /// An optimizer works on these: their gradients may be cleared, or read, also where the recorded
  /// function does not use them.
  virtual void note_parameters(const std::vector<at::Tensor>& parameters) = 0;
  /// `action` is part of every later run, before its first operator: what the code that issued the
  /// operators did besides them.
  virtual void before_run(const void* who, std::function<void()> action) = 0;
  /// Asked when the recorded function has ended: why the recording can't be run after all, which
  /// operators do not show; empty if it can.
  virtual void at_end(const void* who, std::function<std::string()> objection) = 0;
  /// A message will be sent now that is no part of the recording; programs don't send it.
  virtual void before_hidden_message() = 0;
  /// Something happened that operators do not show, so that the recording can't be run.
  virtual void give_up(const std::string& why) = 0;
  /// Averages that come from now on travel in buckets that are closed at these sizes, in bytes: the
  /// first, and those after it.
  virtual void size_buckets(int64_t first, int64_t later) = 0;
  /// Whether an engine averages between programs, each of which ends where a bucket is complete.
  virtual bool cuts_at_buckets() const = 0;
  /// What was put off is computed now; what comes next is another program's.
  virtual void cut() = 0;
};

/// Of this thread, or of that whose backward it runs; null: nobody records.
Observer* observer();

/// Calls `say` with whoever records; nothing if nobody does.
template <class Say>
void tell(const Say& say) {
  if (auto* listening = observer()) say(*listening);
}

/// Makes `observer` this thread's, while it lives.
class ObserverScope {
 public:
  explicit ObserverScope(Observer* observer);
  ~ObserverScope();
  ObserverScope(const ObserverScope&) = delete;
  ObserverScope& operator=(const ObserverScope&) = delete;

 private:
  c10::DebugInfoGuard guard_;
};

/// Keys of a thread without the recorder's.
c10::impl::LocalDispatchKeySet without_recorder(c10::impl::LocalDispatchKeySet keys);

/// What happens while it lives is nothing to the recorder: operators run, nobody observes.
class Hidden {
 public:
  Hidden();
  ~Hidden();
  Hidden(const Hidden&) = delete;
  Hidden& operator=(const Hidden&) = delete;

 private:
  c10::impl::LocalDispatchKeySet keys_;
  ObserverScope observer_;
};

/// The same where messages are sent, which the recorder is told of first.
class HiddenMessage {
  struct Announcement {
    Announcement();
  };
  Announcement announcement_;
  Hidden hidden_;
};

/// A copy that a compiled program does not take for `tensor`, so that what is computed from it is
/// computed a second time, in backward, and need not be kept from forward on. `tensor` itself if
/// nobody records.
at::Tensor again(const at::Tensor& tensor);
/// The operator of that name; a pass takes it away when equal values have been merged.
constexpr const char* kAgain = "tessera::again";

}  // namespace tessera::capture
