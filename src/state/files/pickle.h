#pragma once

#include "state/files/file_name.h"

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

/// Python's pickles, of protocol 2 to 5, as data: nothing is imported, nothing is called.
namespace tessera::state {

struct PickleValue {
  enum class Kind : uint8_t {
    None,
    Bool,        // integer
    Int,         // integer
    Float,       // number
    String,      // text
    List,        // items
    Tuple,       // items
    Dict,        // items: key, value, key, value, …
    Global,      // text: "torch.FloatStorage"
    Call,        // text: what would be called; items: one, the tuple of its arguments
    Persistent,  // items: one, which says what lies outside of the pickle
  };
  Kind kind = Kind::None;
  int64_t integer = 0;
  double number = 0;
  std::string text;
  std::vector<uint32_t> items;  // in Pickle::values
};

/// Values refer to each other by number, so that cycles and deep nesting do no harm; whoever walks
/// through them must know how far.
struct Pickle {
  std::vector<PickleValue> values;
  uint32_t top = 0;

  const PickleValue& operator[](uint32_t number) const { return values[number]; }
};

/// Throws for a name that a pickle must not have.
using CheckGlobal = std::function<void(const std::string& name)>;

/// Throws a ValueError unless it is a whole pickle of what PickleValue can hold, and of globals
/// that `check` lets pass. An OrderedDict is a Dict, without attributes of its own.
Pickle parse_pickle(const FileName& file, std::string_view bytes, const CheckGlobal& check);

/// "a dict", "a string", … for messages.
std::string kind_name(const PickleValue& value);

}  // namespace tessera::state
