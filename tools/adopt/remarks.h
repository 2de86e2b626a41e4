#pragma once

#include "adopt/rewrite.h"

#include <map>
#include <string>
#include <string_view>

namespace tessera::adopt {

inline constexpr const char* kFunctions = "functions stay torch's";
inline constexpr const char* kCast =
    "finds torch's modules and Tessera's; calls through what it returns run no hooks";
inline constexpr const char* kImplPointer =
    "calls through a reference or pointer to the Impl class run no hooks: take the holder, or its "
    "::Impl";
inline constexpr const char* kInDirective = "in a macro or condition: change it by hand";
inline constexpr const char* kOddMacro = "expected the name of a class in it";
inline constexpr const char* kOwnName =
    "the program has something of this name: write torch::nn:: or tessera::nn:: before the one "
    "that is meant";
inline constexpr const char* kUnknownSpace =
    "what nn is stands in a header that was not found: name that file, too";

/// Whether a name found through `using namespace torch::nn` is one of torch's that stay.
bool is_class_of_torch(std::string_view name);

/// Collects what stays, one note for each reason.
class Remarks {
 public:
  void stays(int line, const std::string& name, const std::string& reason);
  void by_hand(int line, const std::string& name, const std::string& reason);
  /// A class or function of torch::nn that tessera::nn does not have.
  void torchs(int line, const std::string& name, bool is_base);

  std::vector<Note> notes() const;  // in the order of their lines

 private:
  void add(int line, bool needs_hand, const std::string& name, const std::string& reason);

  std::map<std::string, Note> by_reason_;
};

}  // namespace tessera::adopt
