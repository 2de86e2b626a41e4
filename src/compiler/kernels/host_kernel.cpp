#include "compiler/kernels/kernels.h"
#include "compiler/kernels/loop_nest.h"
#include "compiler/kernels/pointwise_rules.h"
#include "compiler/kernels/row_emitter.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

namespace tessera::compiler {

std::string host_head(const Graph& body, const std::vector<size_t>& inputs) {
  std::string text = std::string("extern \"C\" void ") + kKernelName +
                     "(const Host& host, void* const* tensors) {\n";
  size_t next = 0;
  const auto name = [&](const std::string& type, const std::string& as) {
    text += "  " + type + "* const " + as + " = static_cast<" + type + "*>(tensors[" +
            std::to_string(next++) + "]);\n";
  };
  for (size_t i = 0; i < inputs.size(); ++i)
    name("const " + memory_type(body.type(body.inputs[inputs[i]].value).dtype),
         "in" + std::to_string(i));
  for (size_t i = 0; i < body.outputs.size(); ++i)
    name(memory_type(body.type(body.outputs[i].value).dtype), "out" + std::to_string(i));
  return text;
}

namespace {

/// Writes the loops of one lane.
class HostLane : LaneEmitter {
 public:
  /// `is_counted`: one loop, as long as the parameter `count` says.
  HostLane(const Graph& body, const std::vector<std::string>& names, const Lane& lane,
           bool is_counted)
      : LaneEmitter(body, names, lane), is_counted_(is_counted) {}

  /// For a function that lanes share: "(const Host& host, const float* in0, float* out0) {…}".
  std::string with_parameters() {
    std::string text = "(const Host& host";
    for (const ValueId value : lane_.reads)
      text += ", const " + memory_type(body_.type(value).dtype) + "* in" + number(value);
    for (const ValueId value : lane_.writes)
      text += ", " + memory_type(body_.type(value).dtype) + "* out" + number(value);
    return text + (is_counted_ ? ", int64_t count) {\n" : ") {\n") + loops() + "}\n";
  }

  std::string loops() {
    const int64_t count = lane_.nest.count();
    const bool is_parallel = is_counted_ || count > kGrain;
    if (is_parallel) {
      const int64_t outer = is_counted_ ? 0 : lane_.nest.sizes[0];
      const int64_t grain = is_counted_ ? kGrain : std::max<int64_t>(1, kGrain / (count / outer));
      line("host.parallel(" + (is_counted_ ? "count" : std::to_string(outer)) + ", " +
           std::to_string(grain) + ", [=](int64_t begin, int64_t end) {");
      ++depth_;
    }
    if (count != 0) nest(is_parallel);
    if (is_parallel) {
      --depth_;
      line("});");
    }
    return std::move(text_);
  }

 private:
  void nest(bool is_parallel) {
    const size_t loops = lane_.nest.sizes.size();
    loads(0);
    for (size_t loop = 0; loop < loops; ++loop) {
      const std::string i = counter(loop);
      if (loop + 1 == loops) line("INDEPENDENT");
      const bool is_shared = is_parallel && loop == 0;
      line("for (int64_t " + i + " = " + (is_shared ? "begin" : "0") + "; " + i + " < " +
           (is_shared ? "end" : std::to_string(lane_.nest.sizes[loop])) + "; ++" + i + ") {");
      ++depth_;
      loads(loop + 1);
    }
    for (const auto& statement : statements()) line(statement);
    for (size_t i = 0; i < lane_.writes.size(); ++i) {
      const ValueId value = lane_.writes[i];
      line("out" + number(value) + "[" + place(i) +
           "] = " + store_text(variable_of(value), body_.type(value).dtype) + ";");
    }
    for (size_t loop = 0; loop < loops; ++loop) {
      --depth_;
      line("}");
    }
  }

  /// What is read in loop number `loop` and not in one further in.
  void loads(size_t loop) {
    for (size_t i = 0; i < lane_.reads.size(); ++i) {
      const size_t tensor = lane_.writes.size() + i;
      const auto& strides = lane_.nest.strides[tensor];
      size_t deepest = 0;
      for (size_t each = 0; each < strides.size(); ++each) {
        if (strides[each] != 0) deepest = each + 1;
      }
      if (deepest != loop) continue;
      const auto dtype = body_.type(lane_.reads[i]).dtype;
      const std::string name = std::to_string(i);
      line("const " + register_type(dtype) + " x" + name + " = " +
           load_text("in" + name + "[" + place(tensor) + "]", dtype) + ";");
    }
  }

  const bool is_counted_;
};

/// A kernel of several lanes: one function for all that differ by their tensors alone, and the
/// kernel itself, which calls it for each.
class HostLanes {
 public:
  HostLanes(const Graph& body, const std::vector<std::string>& names)
      : body_(body), names_(names) {}

  std::string write(const std::vector<size_t>& inputs, size_t lanes) {
    for (size_t i = 0; i < inputs.size(); ++i)
      name_of_[body_.inputs[inputs[i]].value] = "in" + std::to_string(i);
    for (size_t i = 0; i < body_.outputs.size(); ++i)
      name_of_[body_.outputs[i].value] = "out" + std::to_string(i);
    std::string text = host_head(body_, inputs);
    for (size_t i = 0; i < lanes; ++i) {
      const Lane lane = plan_lane(body_, i);
      if (!lane.writes.empty() && lane.nest.count() != 0) text += "  " + call(lane) + "\n";
    }
    return parts_ + text + "}\n";
  }

 private:
  std::string call(const Lane& lane) {
    const bool is_counted = lane.nest.sizes.size() == 1;
    const std::string text = HostLane(body_, names_, lane, is_counted).with_parameters();
    auto& name = part_names_[text];
    if (name.empty()) {
      name = std::string(1, kKernelName) + "_part" + std::to_string(part_names_.size() - 1);
      parts_ += "SHARED static void " + name + text + "\n";
    }
    std::string call = name + "(host";
    for (size_t i = 0; i < lane.reads.size(); ++i)
      call += argument(lane.reads[i], lane.offsets[lane.writes.size() + i]);
    for (size_t i = 0; i < lane.writes.size(); ++i)
      call += argument(lane.writes[i], lane.offsets[i]);
    if (is_counted) call += ", " + std::to_string(lane.nest.count());
    return call + ");";
  }

  std::string argument(ValueId value, int64_t offset) const {
    return ", " + name_of_.at(value) + (offset == 0 ? "" : " + " + std::to_string(offset));
  }

  const Graph& body_;
  const std::vector<std::string>& names_;
  std::unordered_map<ValueId, std::string> name_of_;         // of the kernel's tensors
  std::unordered_map<std::string, std::string> part_names_;  // by text
  std::string parts_;
};

}  // namespace

std::string write_host_kernel(const Graph& body, const std::vector<std::string>& names,
                              const std::vector<size_t>& inputs) {
  const size_t lanes = kernel_lanes(body);
  if (lanes > 1) return HostLanes(body, names).write(inputs, lanes);
  const Lane lane = plan_lane(body, 0);
  return host_head(body, inputs) + HostLane(body, names, lane, /*is_counted=*/false).loops() +
         "}\n";
}

namespace {

// Of a row at once, each added to a sum of its own: a vector, or two. across() knows of it.
constexpr int64_t kLanes = 16;

/// Writes a kernel over rows: threads take rows, or parts of column_sums.
class HostRows : RowEmitter {
 public:
  using RowEmitter::RowEmitter;

  std::string write(const std::vector<size_t>& inputs) {
    text_ = host_head(body_, inputs);
    const int64_t units = plan_.parts > 0 ? plan_.parts : plan_.rows;
    const int64_t elements = plan_.rows * plan_.columns;
    const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements / units));
    open("host.parallel(" + std::to_string(units) + ", " + std::to_string(grain) +
         ", [=](int64_t begin, int64_t end) {");
    if (plan_.parts > 0) {
      const std::string rows = std::to_string(plan_.rows / plan_.parts);
      open("for (int64_t part = begin; part < end; ++part) {");
      columns_begin();
      open("for (int64_t row = part * " + rows + "; row < (part + 1) * " + rows + "; ++row) {");
    } else {
      open("for (int64_t row = begin; row < end; ++row) {");
    }
    row();
    close();
    if (plan_.parts > 0) close();
    close("});");
    text_ += "}\n";
    return std::move(text_);
  }

 private:
  std::string column() const override { return "at"; }
  std::string hot_column(size_t node) const override { return input_of(node); }

  void columns_begin() {
    for (const auto& phase : plan_.phases) {
      for (const size_t node : phase.columns) {
        const std::string columns = std::to_string(plan_.columns);
        const auto sums = c10::str("c", node);
        line(sum_type(node) + "* const " + sums + " = out" + std::to_string(write_of(node)) +
             " + part * " + columns + ";");
        line("for (int64_t at = 0; at < " + columns + "; ++at) " + sums + "[at] = 0;");
      }
    }
  }

  void row() {
    row_counters("int64_t");
    row_loads();
    for (const auto& phase : plan_.phases) {
      for (const size_t node : phase.of_row) line(statement(node));
      if (phase.is_pass()) pass(phase);
      for (const size_t node : phase.reductions)
        line(reduced(node, std::string("across<") + reduction(node).combine + ">(r" +
                               std::to_string(node) + ")"));
    }
    for (const size_t write : plan_.row_writes)
      line("out" + std::to_string(write) + "[" + number_place(tensor_of_write(write)) +
           "] = " + store_text(variable_of(plan_.writes[write]), type_of_write(write).dtype) + ";");
  }

  void pass(const RowPlan::Phase& phase) {
    const std::string lanes = std::to_string(kLanes);
    for (const size_t node : phase.reductions) {
      const std::string sums = "r" + std::to_string(node);
      line(sum_type(node) + " " + sums + "[" + lanes + "];");
      line("for (int v = 0; v < " + lanes + "; ++v) " + sums + "[v] = " + reduction(node).identity +
           ";");
    }
    const int64_t rest = plan_.columns % kLanes;
    const std::string whole = std::to_string(plan_.columns - rest);
    if (rest != plan_.columns) {
      open("for (int64_t first = 0; first < " + whole + "; first += " + lanes + ") {");
      elements(phase, "first", lanes);
      close();
    }
    if (rest != 0) elements(phase, whole, std::to_string(rest));
  }

  void elements(const RowPlan::Phase& phase, const std::string& first, const std::string& count) {
    line("INDEPENDENT");
    open("for (int v = 0; v < " + count + "; ++v) {");
    line("const int64_t at = " + first + " + v;");
    for (const size_t read : phase.reads)
      load(read, "in" + std::to_string(read) + "[" + place(read, "at") + "]");
    for (const size_t node : phase.of_elements) line(statement(node));
    for (const size_t node : phase.reductions) {
      const std::string sum = "r" + std::to_string(node) + "[v]";
      line(sum + " = " + reduction(node).combine + "::of(" + sum + ", " + sum_type(node) + "(" +
           input_of(node) + "));");
    }
    for (const size_t node : phase.columns)
      line("c" + std::to_string(node) + "[at] += " + input_of(node) + ";  // tessera.column_sums");
    for (const size_t write : phase.writes)
      line("out" + std::to_string(write) + "[" + place(tensor_of_write(write), "at") +
           "] = " + store_text(variable_of(plan_.writes[write]), type_of_write(write).dtype) + ";");
    close();
  }
};

}  // namespace

std::string write_host_rows(const Graph& body, const std::vector<std::string>& names,
                            const std::vector<size_t>& inputs) {
  const RowPlan plan = plan_rows(body);
  return HostRows(body, names, plan).write(inputs);
}

}  // namespace tessera::compiler
