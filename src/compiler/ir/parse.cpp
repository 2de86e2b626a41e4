#include "compiler/ir/line_parser.h"
#include "compiler/ir/operators.h"
#include "compiler/ir/text.h"
#include "compiler/ir/verify.h"

#include <algorithm>
#include <array>
#include <map>
#include <string_view>

namespace tessera {
namespace compiler {
namespace {

constexpr std::array kKinds = {InputKind::Parameter, InputKind::Buffer,   InputKind::State,
                               InputKind::Gradient,  InputKind::Argument, InputKind::Outside};

struct Line {
  std::string_view text;
  int64_t number;
};

/// Blank lines and lines that are comments are left out.
std::vector<Line> lines_of(std::string_view text) {
  std::vector<Line> lines;
  for (int64_t number = 1; !text.empty(); ++number) {
    const auto end = text.find('\n');
    const auto line = text.substr(0, end);
    const auto begin = line.find_first_not_of(' ');
    if (begin != std::string_view::npos && line[begin] != '#') lines.push_back({line, number});
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return lines;
}

std::vector<int64_t> parse_numbers(Cursor& cursor, const char* what) {
  cursor.expect("[");
  std::vector<int64_t> numbers;
  while (!cursor.accept("]")) {
    if (!numbers.empty()) cursor.expect(",");
    numbers.push_back(cursor.integer(what));
  }
  return numbers;
}

Placement parse_placement(Cursor& cursor) {
  const auto name = cursor.word("a placement");
  cursor.expect("(");
  Placement placement;
  try {
    if (name == "Shard") {
      placement = Shard(cursor.integer("a tensor dimension"));
    } else if (name == "StridedShard") {
      const int64_t dim = cursor.integer("a tensor dimension");
      cursor.expect(",");
      placement = StridedShard(dim, cursor.integer("a split factor"));
    } else if (name == "Partial") {
      placement = Partial(cursor.word("the name of a reduction"));
    } else if (name != "Replicate") {
      cursor.fail("Shard, StridedShard, Replicate or Partial before this");
    }
  } catch (const c10::ValueError& error) {
    const std::string what = error.what_without_backtrace();
    if (what.starts_with("Graph::parse")) throw;
    cursor.fail("a placement before this (" + what + ")");
  }
  cursor.expect(")");
  return placement;
}

/// A text may say anything, but sizes whose product overflows would be undefined behaviour later.
void check_sizes(Cursor& cursor, const std::vector<int64_t>& sizes) {
  constexpr int64_t kLargestElement = 16;
  int64_t bytes = kLargestElement;
  for (const int64_t size : sizes) {
    if (size < 0 || __builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes))
      cursor.fail("sizes of a tensor that fits into memory before this");
  }
}

ValueType parse_type(Cursor& cursor) {
  ValueType type;
  const auto dtype = dtype_of_name(cursor.word("a dtype"));
  if (!dtype) cursor.fail("a dtype such as float32 before this");
  type.dtype = *dtype;
  type.sizes = parse_numbers(cursor, "a size");
  check_sizes(cursor, type.sizes);
  type.strides = contiguous_strides(type.sizes);
  if (cursor.accept("strides")) {
    cursor.expect("=");
    type.strides = parse_numbers(cursor, "a stride");
    if (type.strides.size() != type.sizes.size()) cursor.fail("one stride per size before this");
  }
  if (cursor.accept("device")) {
    cursor.expect("=");
    const std::string device(cursor.until(" ,]"));
    try {
      type.device = c10::Device(device);
    } catch (const c10::Error&) {
      cursor.fail("a device instead of '" + device + "'");
    }
  }
  if (cursor.accept("placement")) {
    cursor.expect("=");
    type.placement = parse_placement(cursor);
  }
  return type;
}

/// Reads lines into a graph, up to the closing brace for the body of a fused node.
class Parser {
 public:
  /// `room`: how many numbers of values may still be taken, those of bodies included.
  Parser(const std::vector<Line>& lines, size_t& next, int64_t& room, int depth)
      : lines_(lines), next_(next), room_(room), depth_(depth) {}

  Graph graph() {
    while (next_ < lines_.size()) {
      Cursor cursor(lines_[next_].text, lines_[next_].number);
      if (depth_ > 0 && cursor.accept("}")) return closed(cursor);
      ++next_;
      line(cursor);
    }
    if (depth_ > 0) {
      const int64_t last = lines_.back().number;
      Cursor("", last).fail("'}' below: the body of a fused node is not closed");
    }
    return finished();
  }

 private:
  enum class Part { Inputs, Nodes, Outputs };

  Graph closed(Cursor& cursor) {
    cursor.expect_end();
    ++next_;
    return finished();
  }

  Graph finished() {
    const ValueId count = types_.empty() ? 0 : types_.rbegin()->first + 1;
    for (ValueId value = 0; value < count; ++value) {
      const auto found = types_.find(value);
      graph_.add_value(found == types_.end() ? ValueType{} : found->second);
    }
    return std::move(graph_);
  }

  void line(Cursor& cursor) {
    if (cursor.accept("input")) {
      enter(cursor, Part::Inputs, "inputs before operators and outputs");
      input(cursor);
    } else if (cursor.accept("return")) {
      output(cursor, OutputKind::Result, "");
    } else if (cursor.accept("write")) {
      output(cursor, OutputKind::Write, "to");
    } else if (cursor.accept("gradient")) {
      output(cursor, OutputKind::Gradient, "of");
    } else {
      enter(cursor, Part::Nodes, "operators before outputs");
      node(cursor);
    }
  }

  void enter(Cursor& cursor, Part part, const char* order) {
    if (part < part_) cursor.fail(order);
    part_ = part;
  }

  /// "%3: float32[4]"; counts as defined once the line has been read.
  ValueId define(Cursor& cursor) {
    if (cursor.accept("_")) return kNoValue;
    const ValueId value = parse_value_number(cursor);
    cursor.expect(":");
    fresh_.emplace_back(value, parse_type(cursor));
    return value;
  }

  void commit(Cursor& cursor) {
    for (auto& [value, type] : fresh_) {
      // A graph has a type for every number up to its largest.
      const ValueId taken = types_.empty() ? 0 : types_.rbegin()->first + 1;
      room_ -= std::max<int64_t>(value + 1 - taken, 0);
      if (room_ < 0) cursor.fail("fewer or smaller numbers of values, with those of bodies");
      if (!types_.emplace(value, std::move(type)).second)
        cursor.fail("a value that is not defined above, not %" + std::to_string(value) + ",");
    }
    fresh_.clear();
  }

  void input(Cursor& cursor) {
    GraphInput input;
    input.value = define(cursor);
    if (input.value == kNoValue) cursor.fail("a value before this");
    cursor.expect("=");
    const auto kind = cursor.word("the kind of an input");
    const auto found = std::find_if(kKinds.begin(), kKinds.end(),
                                    [&](InputKind each) { return name_of(each) == kind; });
    if (found == kKinds.end())
      cursor.fail("parameter, buffer, state, gradient, argument or outside before this");
    input.kind = *found;
    input.name = cursor.quoted();
    cursor.expect_end();
    commit(cursor);
    graph_.inputs.push_back(std::move(input));
  }

  void output(Cursor& cursor, OutputKind kind, std::string_view word) {
    enter(cursor, Part::Outputs, "outputs last");
    GraphOutput output;
    output.kind = kind;
    output.value = parse_use(cursor, known());
    if (kind != OutputKind::Result) {
      cursor.expect(word);
      output.target = parse_use(cursor, known());
      const auto is_target = [&](const GraphInput& each) { return each.value == output.target; };
      if (std::none_of(graph_.inputs.begin(), graph_.inputs.end(), is_target))
        cursor.fail("an input of the graph before this");
    }
    cursor.expect_end();
    graph_.outputs.push_back(output);
  }

  DefinedValues known() const {
    return {[this](ValueId value) { return types_.count(value) != 0; }};
  }

  void node(Cursor& cursor) {
    Node node;
    node.results = results(cursor);
    node.op = cursor.word("an operator such as aten::mm");
    const auto op = find_operator(node.op);
    if (!op && node.op != kFused)
      cursor.fail("an operator that libtorch knows, not '" + node.op + "',");
    op ? arguments(cursor, node, op->schema()) : fused_arguments(cursor, node);
    const bool has_body = cursor.accept("{");
    if (has_body && op) cursor.fail("no body of an operator but tessera::fused");
    if (cursor.accept("#"))
      node.module = cursor.peek() == '"' ? cursor.quoted() : std::string(cursor.until(" "));
    cursor.expect_end();
    commit(cursor);
    if (has_body) {
      constexpr int kDeepest = 4;
      if (depth_ == kDeepest) cursor.fail("bodies not deeper than 4 in each other");
      node.body = std::make_shared<const Graph>(Parser(lines_, next_, room_, depth_ + 1).graph());
    }
    if (const auto complaint = schema_mismatch(node); !complaint.empty())
      cursor.fail(complaint.substr(std::string_view("expected ").size()) + ";");
    graph_.nodes.push_back(std::move(node));
  }

  /// None if the line begins with the operator.
  std::vector<Argument> results(Cursor& cursor) {
    std::vector<Argument> results;
    if (cursor.peek() != '%' && cursor.peek() != '[' && !Cursor(cursor).accept("_")) return results;
    do {
      if (!cursor.accept("[")) {
        results.push_back(Argument::of(define(cursor)));
        continue;  // to the condition: a comma
      }
      std::vector<ValueId> list;
      while (!cursor.accept("]")) {
        if (!list.empty()) cursor.expect(",");
        list.push_back(define(cursor));
      }
      results.push_back(Argument::of(std::move(list)));
    } while (cursor.accept(","));
    cursor.expect("=");
    return results;
  }

  void fused_arguments(Cursor& cursor, Node& node) const {
    cursor.expect("(");
    while (!cursor.accept(")")) {
      if (!node.arguments.empty()) cursor.expect(",");
      auto parsed = parse_argument(cursor, nullptr, known());
      if (parsed.marked) cursor.fail("no '!' at an argument of a fused node");
      node.arguments.push_back(std::move(parsed.argument));
    }
  }

  void arguments(Cursor& cursor, Node& node, const c10::FunctionSchema& schema) const {
    const auto& declared = schema.arguments();
    std::vector<std::optional<ParsedArgument>> given(declared.size());
    cursor.expect("(");
    for (size_t next = 0; !cursor.accept(")"); ++next) {
      if (next > 0) cursor.expect(",");
      const size_t index = argument_index(cursor, schema, next);
      if (given[index]) cursor.fail("argument '" + declared[index].name() + "' once");
      given[index] = parse_argument(cursor, &declared[index], known());
    }
    for (size_t i = 0; i < declared.size(); ++i) {
      if (!given[i] && !declared[i].default_value())
        cursor.fail("an argument '" + declared[i].name() + "' before this");
      node.arguments.push_back(given[i] ? given[i]->argument
                                        : Argument::of(*declared[i].default_value()));
    }
    for (size_t i = 0; i < declared.size(); ++i) {
      const bool is_empty_list = given[i] && given[i]->argument.values.empty();
      if (given[i] && !is_empty_list && given[i]->marked != writes(node, i))
        cursor.fail(std::string(given[i]->marked ? "no " : "a ") + "'!' at argument '" +
                    declared[i].name() + "' before this");
    }
  }

  /// Which argument comes next: the one that is named, or the next in order.
  static size_t argument_index(Cursor& cursor, const c10::FunctionSchema& schema, size_t next) {
    const auto& declared = schema.arguments();
    Cursor ahead = cursor;
    if (std::isalpha(static_cast<unsigned char>(ahead.peek())) != 0 || ahead.peek() == '_') {
      const std::string name(ahead.word("a name"));
      if (ahead.accept("=")) {
        for (size_t i = 0; i < declared.size(); ++i) {
          if (declared[i].name() != name) continue;
          cursor = ahead;
          return i;
        }
        cursor.fail("an argument of " + compiler::name_of(schema));
      }
    }
    if (next >= declared.size() || declared[next].kwarg_only())
      cursor.fail("')' or the name of an argument");
    return next;
  }

  const std::vector<Line>& lines_;
  size_t& next_;
  int64_t& room_;
  const int depth_;
  Graph graph_;
  std::map<ValueId, ValueType> types_;
  std::vector<std::pair<ValueId, ValueType>> fresh_;
  Part part_ = Part::Inputs;
};

}  // namespace
}  // namespace compiler

Graph Graph::parse(const std::string& text) {
  const auto lines = compiler::lines_of(text);
  size_t next = 0;
  int64_t room = int64_t{1} << 21;
  return compiler::Parser(lines, next, room, 0).graph();
}

}  // namespace tessera
