#pragma once

#include <tessera/compile/options.h>

#include "base/capture.h"

#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <vector>

namespace tessera::compiler {

/// Note [objects by their bytes]
/// A step reads numbers, flags and tensors that no operator shows: members of modules, what a
/// lambda captures by value, variables that the user names. Their object representations are copied
/// when a recording begins, or when it reaches the module, and compared before each call. Bytes
/// that the step itself changes while it is recorded (a counter, a cached tensor) say nothing about
/// the next call: they are masked, one by one, and `explain` tells of them. Members that own memory
/// (a std::vector) are compared by their control words alone.
class Guards {
 public:
  Guards() = default;

  /// The function object, with what it captures by value.
  void watch_function(std::span<const std::byte> object);
  /// A variable that the user names; one that the step itself changes is an error, see broken().
  void watch_variable(const Watched& variable, size_t number);
  /// The members of the module, if its class is known: a hookable one, or one of torch::nn; of
  /// every module its training mode. False: the recording has reached it already.
  bool watch_module(const torch::nn::Module& module, const std::string& path);
  /// What `others` watch, as it is before the step runs. It stays if the recording reaches it.
  void expect(const Guards& others);

  /// The recording is over: masks what the step has changed, drops what it has not reached, or has
  /// destroyed.
  void end();
  /// Why the recording can't be run, after end(): it sets a variable that is watched.
  const std::string& broken() const { return broken_; }

  /// What has changed since, for a user; empty if nothing has.
  std::string changed() const;
  /// Another recording of the same program, which held when it began: masks what that has masked.
  /// True if this is more than before.
  bool merge(Guards other);
  /// For explain: a line for every object that is not watched as a whole.
  std::vector<std::string> masked() const;

 private:
  struct Part {
    const std::byte* at;
    size_t offset;  // in snapshot_
    size_t size;
  };
  struct Object {
    std::string name = {};                      // "'blocks.0'"
    std::string type = {};                      // "BlockImpl"
    std::span<const std::byte> bytes = {};      // all of it
    c10::SmallVector<Part, 2> parts = {};       // that are compared
    const torch::nn::Module* module = nullptr;  // whose training mode is compared; null: none
    const std::type_info* dynamic_type = nullptr;
    bool is_training = false;
    uint64_t (*contents)(const torch::nn::Module&) = nullptr;  // of memory that it owns, if any
    uint64_t expected_contents = 0;
    std::weak_ptr<const void> lifetime = {};
    bool has_lifetime = false;  // otherwise it lives as long as calls are made
    bool is_reached = true;
    const Watched* variable = nullptr;
    const void* key = nullptr;
    bool is_gone() const { return has_lifetime && lifetime.expired(); }
    /// Of one without a lifetime: a module of another class is in its place.
    bool is_another() const {
      return !has_lifetime && module != nullptr && typeid(*module) != *dynamic_type;
    }
  };

  Object* add(Object object, const void* key);  // null: there is one
  void add_part(Object& object, std::span<const std::byte> bytes);
  void copy(Object& object);
  bool mask_changes(Object& object);
  std::string change_of(const Object& object) const;

  std::vector<Object> objects_;
  std::unordered_map<const void*, size_t> places_;  // in objects_
  std::vector<std::byte> snapshot_;
  std::string broken_;
};

/// What is known of a module of one of torch::nn's classes, or derived from one.
struct LibraryModule {
  std::span<const std::byte> object;
  uint64_t (*contents)(const torch::nn::Module&) = nullptr;  // of options that own memory
};
/// None if it is of no such class.
std::optional<LibraryModule> find_library_module(const torch::nn::Module& module);

/// On what a recording depends: it holds while `read` returns `expected`.
struct Dependency {
  const void* who;
  std::string what;
  std::function<uint64_t()> read;
  uint64_t expected;
  bool is_of_module = false;
};

/// See capture::Observer::before_run.
struct FirstAction {
  const void* who;
  std::function<void()> act;
};

/// See capture::Observer::hyperparameter.
struct Hyperparameter {
  const void* who;
  std::string name;
  std::shared_ptr<capture::HostNumber> number;
  std::function<double()> read;
  double value;  // that it read
};

}  // namespace tessera::compiler
