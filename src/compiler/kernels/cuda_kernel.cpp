#include "compiler/kernels/kernels.h"
#include "compiler/kernels/loop_nest.h"
#include "compiler/kernels/pointwise_rules.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace tessera::compiler {
namespace {

/// Writes one lane as a kernel: threads take elements, or runs of `vector` elements, by turns.
class CudaLane : LaneEmitter {
 public:
  CudaLane(const Graph& body, const std::vector<std::string>& names, const Lane& lane,
           int64_t vector)
      : LaneEmitter(body, names, lane), vector_(vector) {}

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

// Kernels over lists of tensors on a GPU: all addresses are one parameter, and a block looks up
// whose part it has.

namespace {

/// The struct that it takes, its head, and the list that the block has a part of.
constexpr const char* kHead = R"(
struct @_tensors {
  void* at[2 * LISTS];
};
extern "C" __global__ void __launch_bounds__(256) @(const @_tensors tensors) {
  int list = 0;
  for (int step = 256; step > 0; step /= 2) {
    if (list + step < LISTS && @_first[list + step] <= blockIdx.x) list += step;
  }
  const FROM* const in = static_cast<const FROM*>(tensors.at[list]);
  TO* const out = static_cast<TO*>(tensors.at[LISTS + list]);
)";

/// 32 columns by 8 threads each, which go through parts by turns.
constexpr const char* kSumPartsText = R"(
  const int columns = @_columns[list], parts = @_parts[list];
  const int lane = threadIdx.x % 32, turn = threadIdx.x / 32;
  const int column = (blockIdx.x - @_first[list]) * 32 + lane;
  FROM sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (int part = turn; part < parts; part += 8) sum += in[int64_t{columns} * part + column];
  }
  __shared__ FROM sums[8][32];
  sums[turn][lane] = sum;
  __syncthreads();
  if (turn != 0 || column >= columns) return;
  for (int i = 1; i < 8; ++i) sum += sums[i][lane];
  out[column] = sum;  // tessera.sum_parts
}
)";

constexpr int64_t kCastBlock = 8192;  // elements

constexpr const char* kCastsText = R"(
  const int64_t begin = (blockIdx.x - @_first[list]) * int64_t{8192};
  const int count = @_count[list] - begin < 8192 ? static_cast<int>(@_count[list] - begin) : 8192;
  const bool is_aligned = (reinterpret_cast<uint64_t>(in) | reinterpret_cast<uint64_t>(out)) % 16 == 0;
  const int aligned = is_aligned ? count / 4 * 4 : 0;
#pragma unroll 4
  for (int i = threadIdx.x * 4; i < aligned; i += 1024) {
    const auto from = *reinterpret_cast<const Pack<FROM, 4>*>(in + begin + i);
    Pack<TO, 4> to;
    for (int v = 0; v < 4; ++v) to.at[v] = store<TO>(from.at[v]);
    *reinterpret_cast<Pack<TO, 4>*>(out + begin + i) = to;
  }
  for (int i = aligned + threadIdx.x; i < count; i += 256)
    out[begin + i] = store<TO>(in[begin + i]);  // tessera.casts
}
)";

std::string constant_text(const char* name, const char* type, const std::vector<int64_t>& numbers) {
  std::string text = c10::str("__constant__ ", type, " ", kKernelName, "_", name, "[] = {");
  for (size_t i = 0; i < numbers.size(); ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(numbers[i]);
  return text + "};\n";
}

void replace_all(std::string& text, const std::string& from, const std::string& to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
}

const ValueType& input_type(const Graph& body, size_t input) {
  return body.type(body.inputs[input].value);
}

void finish(const Graph& body, Kernel& kernel, int64_t blocks, const char* rest) {
  TORCH_INTERNAL_ASSERT(kernel.inputs.size() == kernel.outputs, "a result for each of the list");
  kernel.grid = {blocks, 256};
  kernel.takes_list = true;
  std::string function = std::string(kHead) + rest;
  replace_all(function, "@", std::string(1, kKernelName));
  replace_all(function, "LISTS", std::to_string(kernel.inputs.size()));
  replace_all(function, "FROM", memory_type(input_type(body, kernel.inputs.at(0)).dtype));
  replace_all(function, "TO", memory_type(body.type(body.outputs.at(0).value).dtype));
  kernel.text += function;
}

}  // namespace

void write_cuda_sum_parts(const Graph& body, Kernel& kernel) {
  std::vector<int64_t> first, columns, parts;
  int64_t blocks = 0;
  for (const size_t input : kernel.inputs) {
    const ValueType& type = input_type(body, input);
    first.push_back(blocks);
    parts.push_back(type.sizes[0]);
    columns.push_back(type.sizes[1]);
    blocks += (type.sizes[1] + 31) / 32;
  }
  kernel.text = constant_text("first", "int", first) + constant_text("columns", "int", columns) +
                constant_text("parts", "int", parts);
  finish(body, kernel, blocks, kSumPartsText);
}

void write_cuda_casts(const Graph& body, Kernel& kernel) {
  std::vector<int64_t> first, count;
  int64_t blocks = 0;
  for (const size_t input : kernel.inputs) {
    first.push_back(blocks);
    count.push_back(input_type(body, input).numel());
    blocks += (count.back() + kCastBlock - 1) / kCastBlock;
  }
  kernel.text = constant_text("first", "int", first) + constant_text("count", "int64_t", count);
  finish(body, kernel, blocks, kCastsText);
}

}  // namespace tessera::compiler
