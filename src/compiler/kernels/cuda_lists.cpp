// Kernels over lists of tensors on a GPU: all addresses are one parameter, and a block looks up
// whose part it has.
#include "compiler/kernels/expression.h"
#include "compiler/kernels/kernel.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace tessera::compiler {
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
