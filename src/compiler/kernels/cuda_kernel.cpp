#include "compiler/kernels/expression.h"
#include "compiler/kernels/kernel.h"
#include "compiler/kernels/lane.h"

#include <algorithm>

namespace tessera::compiler {
namespace {

/// Writes one lane as a kernel: threads take elements, or runs of `vector` elements, by turns.
class CudaLane : LaneText {
 public:
  CudaLane(const Graph& body, const std::vector<std::string>& names, const Lane& lane,
           int64_t vector)
      : LaneText(body, names, lane), vector_(vector) {}

  std::string write() {
    parameters();
    const std::string index = index_type();
    line("const " + index + " step = gridDim.x * blockDim.x;");
    line("for (" + index + " at = blockIdx.x * blockDim.x + threadIdx.x; at < " +
         std::to_string(lane_.nest.count() / vector_) + "; at += step) {");
    ++depth_;
    counters(index);
    vector_ == 1 ? elements() : runs();
    --depth_;
    line("}");
    text_ += "}\n";
    return std::move(text_);
  }

 private:
  void parameters() {
    text_ = std::string("extern \"C\" __global__ void ") + kKernelName +
            (vector_ == 1 ? "" : kVectorSuffix) + "(";
    std::string list;
    for (const ValueId value : lane_.reads)
      list += ", const " + memory_type(body_.type(value).dtype) + "* in" + number(value);
    for (const ValueId value : lane_.writes)
      list += ", " + memory_type(body_.type(value).dtype) + "* out" + number(value);
    text_ += list.substr(2) + ") {\n";
  }

  /// 32 bits where they hold every index, and twice the count.
  std::string index_type() const {
    int64_t largest = lane_.nest.count();
    for (const auto& strides : lane_.nest.strides) {
      int64_t last = 0;
      for (size_t loop = 0; loop < strides.size(); ++loop)
        last += (lane_.nest.sizes[loop] - 1) * strides[loop];
      largest = std::max(largest, last);
    }
    return largest < (int64_t{1} << 30) ? "uint32_t" : "int64_t";
  }

  /// Which turn of each loop it is, from the number of the run.
  void counters(const std::string& index) {
    const auto& sizes = lane_.nest.sizes;
    std::string rest = "at";
    for (size_t loop = sizes.size(); loop-- > 0;) {
      const bool is_last = loop + 1 == sizes.size();
      const int64_t turns = is_last ? sizes[loop] / vector_ : sizes[loop];
      std::string turn = loop == 0 ? rest : rest + " % " + std::to_string(turns);
      if (is_last && vector_ > 1) turn = "(" + turn + ") * " + std::to_string(vector_);
      line("const " + index + " " + counter(loop) + " = " + turn + ";");
      rest = loop + 1 == sizes.size() ? "at / " + std::to_string(turns)
                                      : "(" + rest + ") / " + std::to_string(turns);
    }
  }

  const std::vector<int64_t>& strides_of_read(size_t read) const {
    return lane_.nest.strides[lane_.writes.size() + read];
  }

  std::string pack(const std::string& type) const {
    return "Pack<" + type + ", " + std::to_string(vector_) + ">";
  }
  std::string pack(ValueId value) const { return pack(memory_type(body_.type(value).dtype)); }

  void load(size_t read, const std::string& from) {
    const auto dtype = body_.type(lane_.reads[read]).dtype;
    line("const " + register_type(dtype) + " x" + std::to_string(read) + " = " +
         load_text(from, dtype) + ";");
  }

  void elements() {
    for (size_t i = 0; i < lane_.reads.size(); ++i)
      load(i, "in" + std::to_string(i) + "[" + place(lane_.writes.size() + i) + "]");
    for (const auto& statement : statements()) line(statement);
    for (size_t i = 0; i < lane_.writes.size(); ++i) {
      const ValueId value = lane_.writes[i];
      line("out" + number(value) + "[" + place(i) +
           "] = " + store_text(variable_of(value), body_.type(value).dtype) + ";");
    }
  }

  void runs() {
    for (size_t i = 0; i < lane_.reads.size(); ++i) {
      const std::string number = std::to_string(i);
      const std::string where = place(lane_.writes.size() + i);
      if (strides_of_read(i).back() == 0) {
        load(i, "in" + number + "[" + where + "]");
      } else {
        const std::string type = pack(lane_.reads[i]);
        line("const " + type + " p" + number + " = *reinterpret_cast<const " + type + "*>(in" +
             number + " + " + where + ");");
      }
    }
    for (const ValueId value : lane_.writes)
      line(pack(register_type(body_.type(value).dtype)) + " q" + number(value) + ";");
    line("#pragma unroll");
    line("for (int v = 0; v < " + std::to_string(vector_) + "; ++v) {");
    ++depth_;
    for (size_t i = 0; i < lane_.reads.size(); ++i) {
      if (strides_of_read(i).back() != 0) load(i, "p" + std::to_string(i) + ".at[v]");
    }
    for (const auto& statement : statements(" + v")) line(statement);
    for (const ValueId value : lane_.writes)
      line("q" + number(value) + ".at[v] = " + variable_of(value) + ";");
    --depth_;
    line("}");
    for (size_t i = 0; i < lane_.writes.size(); ++i) {
      const ValueId value = lane_.writes[i];
      line("*reinterpret_cast<" + pack(value) + "*>(out" + number(value) + " + " + place(i) +
           ") = " + store_pack_text("q" + number(value), body_.type(value).dtype) + ";");
    }
  }

  const int64_t vector_;
};

/// As many elements as 16 bytes hold of the widest dtype, if the innermost loop can be cut into
/// runs of that in every tensor.
int64_t vector_of(const Graph& body, const Lane& lane) {
  if (lane.nest.sizes.empty()) return 1;
  constexpr int64_t kBytes = 16;
  int64_t vector = kBytes;
  std::vector<ValueId> tensors = lane.writes;
  tensors.insert(tensors.end(), lane.reads.begin(), lane.reads.end());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (lane.nest.strides[i].back() > 1) return 1;
    if (lane.nest.strides[i].back() == 1)
      vector = std::min(
          vector, kBytes / static_cast<int64_t>(c10::elementSize(body.type(tensors[i]).dtype)));
  }
  vector = std::min<int64_t>(vector, 8);
  if (uses_places(body) && lane.nest.strides.back().back() != 1) return 1;
  if (lane.nest.sizes.back() % vector != 0) return 1;
  for (const auto& strides : lane.nest.strides) {
    if (strides.back() == 0) continue;
    for (size_t loop = 0; loop + 1 < strides.size(); ++loop) {
      if (strides[loop] % vector != 0) return 1;
    }
  }
  return vector;
}

/// Threads that go on by turns, where blocks end.
Kernel::Grid grid_of(int64_t turns) {
  constexpr int64_t kBlock = 256, kMostBlocks = int64_t{1} << 20;
  return {std::min((turns + kBlock - 1) / kBlock, kMostBlocks), kBlock};
}

}  // namespace

void write_cuda_kernel(const Graph& body, const std::vector<std::string>& names, Kernel& kernel) {
  const Lane lane = plan_lane(body, 0);
  const int64_t elements = lane.nest.count();
  kernel.vector = elements == 0 ? 1 : vector_of(body, lane);
  kernel.grid = grid_of(elements);
  kernel.vector_grid = grid_of(elements / kernel.vector);
  kernel.text = CudaLane(body, names, lane, 1).write();
  if (kernel.vector > 1) kernel.text += "\n" + CudaLane(body, names, lane, kernel.vector).write();
}

}  // namespace tessera::compiler
