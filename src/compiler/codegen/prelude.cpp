#include "compiler/codegen/prelude.h"

#include "compiler/codegen/prelude_math.h"
#include "compiler/codegen/program_interface.h"

#include <cctype>
#include <sstream>
#include <vector>

namespace tessera::compiler {
namespace {

// The same declarations as program_interface.h.
constexpr const char* kInterface = R"source(#include <cmath>
#include <cstdint>
#include <cstring>

struct Frame;

struct ProgramInterface {
  void (*call)(Frame*, int node);
  void (*make)(Frame*, int value);
  void (*make_in_place)(Frame*, int value, int input);
  void* (*address)(Frame*, int value);
  void (*drop)(Frame*, int value);
  void (*deliver)(Frame*, int output);
  void (*parallel)(int64_t count, int64_t grain, void (*part)(const void*, int64_t, int64_t),
                   const void* closure);
};

namespace {

struct Tessera {
  const ProgramInterface* api;
  Frame* frame;

  // Runs an operator: node `node` of the graph.
  void call(int node) const { api->call(frame, node); }
  // Gives a value memory, for a kernel to write.
  void make(int value) const { api->make(frame, value); }
  // Gives it the memory of an input that is overwritten by it.
  void make_in_place(int value, int input) const { api->make_in_place(frame, value, input); }
  template <class T>
  T* at(int value) const { return static_cast<T*>(api->address(frame, value)); }
  // The value is used no more.
  void drop(int value) const { api->drop(frame, value); }
  // Hands an output to the caller.
  void deliver(int output) const { api->deliver(frame, output); }
  template <class Part>
  void parallel(int64_t count, int64_t grain, const Part& part) const {
    api->parallel(
        count, grain,
        [](const void* closure, int64_t begin, int64_t end) {
          (*static_cast<const Part*>(closure))(begin, end);
        },
        &part);
  }
};

}  // namespace
)source";

constexpr const char* kMarks = R"source(
// INDEPENDENT: no iteration of the loop reads what another writes.
// SHARED: one function for all its calls.
// UNOPTIMISED: a list of calls, over which optimisers take long and find nothing.
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#define SHARED __attribute__((noinline))
#define UNOPTIMISED __attribute__((noinline, optnone))
#elif defined(__GNUC__)
#define INDEPENDENT _Pragma("GCC ivdep")
#define SHARED __attribute__((noinline, noclone))
#define UNOPTIMISED __attribute__((optimize("O0")))
#else
#define INDEPENDENT
#define SHARED
#define UNOPTIMISED
#endif
)source";

bool is_identifier_character(char character) {
  return std::isalnum(static_cast<unsigned char>(character)) != 0 || character == '_';
}

bool mentions(const std::string& text, const std::string& word) {
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
    const size_t end = at + word.size();
    if ((at == 0 || !is_identifier_character(text[at - 1])) &&
        (end == text.size() || !is_identifier_character(text[end])))
      return true;
  }
  return false;
}

bool mentions_one(const std::string& text, const char* words) {
  std::istringstream stream(words);
  for (std::string word; stream >> word;) {
    if (mentions(text, word)) return true;
  }
  return false;
}

}  // namespace

std::string prelude_for(const std::string& kernels) {
  std::vector<const char*> chosen;
  std::string users = kernels;
  // A piece may use those before it.
  const auto& pieces = math_pieces();
  for (auto piece = pieces.rbegin(); piece != pieces.rend(); ++piece) {
    if (!mentions_one(users, piece->words)) continue;
    chosen.push_back(piece->text);
    users += piece->text;
  }
  std::string prelude = std::string(kInterface) + kMarks;
  if (!chosen.empty()) {
    prelude += "\nnamespace {\n";
    for (auto piece = chosen.rbegin(); piece != chosen.rend(); ++piece) prelude += *piece;
    prelude += "\n}  // namespace\n";
  }
  // In braces, or it would be a constant of this file alone.
  prelude +=
      "\nextern \"C\" {\nextern const int tessera_program_interface;\n"
      "const int tessera_program_interface = " +
      std::to_string(kProgramInterface) + ";\n}\n";
  return prelude;
}

}  // namespace tessera::compiler
