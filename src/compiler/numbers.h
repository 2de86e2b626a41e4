#pragma once

#include "compiler/call_shape.h"
#include "compiler/trace/recording.h"

#include <optional>
#include <vector>

/// Note [numbers among arguments]
/// A double or an integer that a step is called with may be a number of the program, read at each
/// call, instead of one that the program is made for. Which it is can't be told from one recording,
/// where it may happen to equal a constant: two are compared that were made with different numbers.
/// If they are the same but for numbers that operators were given, each of which is one of the
/// arguments in both, times a power of two, and each argument that differs is among them, then
/// these arguments are read at each call. Otherwise the recordings are of different kinds of calls:
/// a number that set sizes, counted turns of a loop or steered a branch has changed something else.
///
/// A branch that went the same way in both recordings is not seen. Such branches mostly ask whether
/// a number is 0, 1 or negative: calls share a program only if they agree on that. For any other
/// branch the caller passes a bool.
namespace tessera::compiler {

/// Where a graph uses a number among the arguments: factor times the number.
struct NumberUse {
  size_t node, argument;
  size_t number;
  double factor;
  bool operator==(const NumberUse&) const = default;
};

/// The number that a call brings; it is not Fixed.
double number_of(uint64_t bits, detail::NumberKind kind);
/// Whether a number may change from the one to the other without another program.
bool may_vary(uint64_t from, uint64_t to, detail::NumberKind kind);

/// `call` as if made with the numbers of `other`, where they may vary.
CallShape with_numbers_of(CallShape call, const CallShape& other);

/// Where numbers of the arguments are used, if the recordings differ in these alone; none if they
/// differ in something else, or a number that differs is not among them.
std::optional<std::vector<NumberUse>> find_uses(const Recording& first, const CallShape& call,
                                                const Recording& second,
                                                const CallShape& other_call);

/// The numbers that are used, in order: scalars of the graph, behind those it has.
std::vector<size_t> used_numbers(const std::vector<NumberUse>& uses);
/// With scalars where numbers are used.
Graph with_numbers(Graph graph, const std::vector<NumberUse>& uses);

}  // namespace tessera::compiler
