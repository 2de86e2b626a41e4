#pragma once

#include <cstdint>

/// What generated programs and the runtime know of each other. Every generated source repeats these
/// declarations (prelude.cpp), since it includes no header of ours; whoever changes them changes
/// kProgramInterface too, so that no program made for another interface is loaded.
namespace tessera::compiler {

/// One run of one program: its values and operators. The runtime's own.
struct Frame;

struct ProgramInterface {
  /// Runs the operator of Graph::nodes[node]: takes its arguments from the frame, puts its results
  /// there.
  void (*call)(Frame*, int node);
  /// Gives a value memory of its type, uninitialised, for a kernel to write.
  void (*make)(Frame*, int value);
  /// Gives a value the memory of the input that it is written to at the end, which nothing else
  /// reads from here on. The runtime may give it memory of its own instead.
  void (*make_in_place)(Frame*, int value, int input);
  /// Where the first element is.
  void* (*address)(Frame*, int value);
  /// The value is used no more.
  void (*drop)(Frame*, int value);
  /// Does what Graph::outputs[output] says: keeps the value for the caller, or copies it into an
  /// input.
  void (*deliver)(Frame*, int output);
  /// Calls `part` for ranges that make up [0, count), on several threads if they can be `grain`
  /// long.
  void (*parallel)(int64_t count, int64_t grain, void (*part)(const void*, int64_t, int64_t),
                   const void* closure);
};

/// The symbols a program exports.
constexpr const char* kProgramSymbol = "tessera_program";              // a ProgramFunction
constexpr const char* kInterfaceSymbol = "tessera_program_interface";  // an int, kProgramInterface
constexpr int kProgramInterface = 2;

using ProgramFunction = void (*)(const ProgramInterface*, Frame*);

}  // namespace tessera::compiler
