#include "compiler/kernels/expression.h"
#include "compiler/kernels/kernel.h"
#include "compiler/kernels/lane.h"

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
class HostLane : LaneText {
 public:
  /// `is_counted`: one loop, as long as the parameter `count` says.
  HostLane(const Graph& body, const std::vector<std::string>& names, const Lane& lane,
           bool is_counted)
      : LaneText(body, names, lane), is_counted_(is_counted) {}

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

}  // namespace tessera::compiler
