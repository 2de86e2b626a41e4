#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

/// What the rest of the library tells a recorder of operators. A recording is run later without
/// the code that issued the operators, so that code says on what its choices depended.
namespace tessera::capture {

class Observer {
 public:
  virtual ~Observer() = default;
  /// The recording holds as long as `read` returns what it returns at this moment. `what` names it
  /// for a user: "training mode of fc1".
  virtual void depend_on(std::string what, std::function<uint64_t()> read) = 0;
  /// Until end_vary(): a number equal to factor * read() that operators are given as `argument` is
  /// read anew at every run.
  virtual void vary(const std::string& name, const std::string& argument, double factor,
                    std::function<double()> read) = 0;
  virtual void end_vary() = 0;
  /// Until it is called with -1: random numbers that are drawn are drawn again later, from the same
  /// state of the generator, which a program does not know of.
  virtual void watch_random(int change) = 0;
  /// Whether averages of gradients are to be operators; otherwise their engine does as ever.
  virtual bool takes_averages() const = 0;
  /// Something happened that operators do not show, so that the recording can't be run.
  virtual void give_up(const std::string& why) = 0;
};

/// Of this thread; null: nobody records.
Observer* observer();

/// Makes `observer` this thread's, while it lives.
class ObserverScope {
 public:
  explicit ObserverScope(Observer* observer);
  ~ObserverScope();
  ObserverScope(const ObserverScope&) = delete;
  ObserverScope& operator=(const ObserverScope&) = delete;

 private:
  Observer* before_;
};

/// Numbers that may change from run to run, while it lives; see Observer::vary. Nothing if nobody
/// records.
class Varying {
 public:
  Varying(const std::string& name, const std::string& argument, double factor,
          std::function<double()> read) {
    if (auto* current = observer()) current->vary(name, argument, factor, std::move(read));
  }
  ~Varying() {
    if (auto* current = observer()) current->end_vary();
  }
  Varying(const Varying&) = delete;
  Varying& operator=(const Varying&) = delete;
};

}  // namespace tessera::capture
