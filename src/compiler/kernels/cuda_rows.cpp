#include "compiler/kernels/kernels.h"
#include "compiler/kernels/pointwise_rules.h"
#include "compiler/kernels/row_emitter.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace tessera::compiler {
namespace {

constexpr int64_t kBlock = 256;
constexpr int64_t kMostThreads = 1024;
// Of a row that a thread has, with registers for what is read and added up; twice as many where
// little is read.
constexpr int64_t kElements = kMostColumnSums / kMostThreads;
// Two such blocks or more share a processor, so that one computes while the other waits.
constexpr int64_t kLongRowThreads = 512;
constexpr int64_t kMostShared = int64_t{112} << 10;  // of the 227 KiB that a processor has
// A row that is longer yet has a processor to itself.
constexpr int64_t kMostSharedOfOne = int64_t{220} << 10;

/// How the threads of a block share rows: `threads` for each, `block / threads` rows at once.
struct ThreadTiling {
  int64_t vector;    // elements that a thread reads at once
  int64_t threads;   // of a row
  int64_t turns;     // of a thread over its row
  bool keeps_reads;  // in registers, from phase to phase
  int64_t kept;      // turns whose reads are kept in shared memory otherwise
  int64_t shared;    // its bytes, where the GPU has them

  int64_t rows() const { return std::max<int64_t>(kBlock / threads, 1); }
  int64_t block() const { return rows() * threads; }
};

/// Threads that divide the row better, among those that have no more turns.
int64_t fitted(int64_t threads, int64_t vector, int64_t columns) {
  const int64_t turns = (columns + threads * vector - 1) / (threads * vector);
  const int64_t fewest = (columns + turns * vector - 1) / (turns * vector);
  return (fewest + 31) / 32 * 32;
}

bool is_read_again(const RowPlan& plan, size_t read) {
  const auto phases = std::count_if(plan.phases.begin(), plan.phases.end(), [&](const auto& phase) {
    return std::ranges::find(phase.reads, read) != phase.reads.end();
  });
  return phases > 1;
}

/// Of what all threads read in so many turns.
int64_t shared_bytes(const ValueType& type, const ThreadTiling& tiling, int64_t turns) {
  const int64_t elements = turns * tiling.threads * tiling.vector;
  return (elements * static_cast<int64_t>(c10::elementSize(type.dtype)) + 15) / 16 * 16;
}

int64_t turns_of(const ThreadTiling& tiling, int64_t columns) {
  const int64_t run = tiling.threads * tiling.vector;
  return (columns + run - 1) / run;
}

/// As few threads as have registers for the row: one warp adds up by shuffles alone, without a
/// barrier. A row that is too long for the registers of any block is kept in shared memory, each
/// thread's part by itself, as far as that goes, and read again in each phase beyond.
ThreadTiling choose_tiling(const Graph& body, const RowPlan& plan, int64_t vector) {
  int64_t reads = 0;
  for (size_t i = 0; i < plan.reads.size(); ++i) reads += plan.is_element_read(i) ? 1 : 0;
  const int64_t most = plan.parts > 0 || reads > 3 ? kElements : 2 * kElements;
  ThreadTiling tiling{
      .vector = vector, .threads = 32, .turns = 0, .keeps_reads = true, .kept = 0, .shared = 0};
  while (plan.columns > tiling.threads * most && tiling.threads < kMostThreads) tiling.threads *= 2;
  tiling.keeps_reads = plan.columns <= tiling.threads * most;
  if (tiling.keeps_reads) {
    tiling.threads = fitted(tiling.threads, vector, plan.columns);
    tiling.turns = turns_of(tiling, plan.columns);
    return tiling;
  }
  for (const bool is_alone : {false, true}) {
    tiling.threads = is_alone ? kMostThreads : kLongRowThreads;
    tiling.turns = turns_of(tiling, plan.columns);
    int64_t of_turn = 0;
    for (size_t i = 0; i < plan.reads.size(); ++i) {
      if (is_read_again(plan, i)) of_turn += shared_bytes(body.type(plan.reads[i]), tiling, 1);
    }
    const int64_t most_shared = is_alone ? kMostSharedOfOne : kMostShared;
    tiling.kept = of_turn == 0 ? 0 : std::min(tiling.turns, most_shared / of_turn);
    tiling.shared = tiling.kept * of_turn;
    if (of_turn == 0 || tiling.kept == tiling.turns) break;
  }
  return tiling;
}

class CudaRows : RowEmitter {
 public:
  CudaRows(const Graph& body, const std::vector<std::string>& names, const RowPlan& plan,
           const ThreadTiling& tiling)
      : RowEmitter(body, names, plan), tiling_(tiling) {}

  std::string write() {
    parameters();
    line("const int thread = threadIdx.x % " + threads() + ";");
    for (const auto& phase : plan_.phases) shared_memory(phase);
    if (tiling_.shared > 0) row_memory();
    columns_begin();
    if (plan_.parts > 0 && tiling_.rows() > 1) column_memory();
    rows_begin();
    row_loads();
    row_columns();
    std::vector<bool> is_kept(plan_.reads.size(), false);
    for (const auto& phase : plan_.phases) {
      for (const size_t node : phase.of_row) line(statement(node));
      if (!phase.is_pass()) continue;
      pass(phase, is_kept);
      for (const size_t node : phase.reductions) reduce(node);
    }
    row_writes();
    close();
    columns_end();
    text_ += "}\n";
    return std::move(text_);
  }

 private:
  std::string column() const override { return "at + v"; }
  std::string hot_column(size_t node) const override { return "hot" + std::to_string(node); }
  /// Where one_hot is true, in 32 bits: nowhere, of what is no column.
  void row_columns() {
    for (size_t i = 0; i < body_.nodes.size(); ++i) {
      if (!is_one_hot(body_.nodes[i])) continue;
      const std::string from = input_of(i);
      line("const int hot" + std::to_string(i) + " = " + from + " >= 0 && " + from + " < " +
           std::to_string(plan_.columns) + " ? static_cast<int>(" + from + ") : -1;");
    }
  }
  std::string threads() const { return std::to_string(tiling_.threads); }
  std::string vector() const { return std::to_string(tiling_.vector); }
  bool is_even() const {
    const int64_t rows = plan_.parts > 0 ? plan_.rows / plan_.parts : plan_.rows;
    return rows % tiling_.rows() == 0;
  }

  void parameters() {
    text_ = "extern \"C\" __global__ void __launch_bounds__(" + std::to_string(tiling_.block()) +
            ") " + kKernelName + (tiling_.vector == 1 ? "" : kVectorSuffix) + "(";
    std::string list;
    for (size_t i = 0; i < plan_.reads.size(); ++i)
      list +=
          ", const " + memory_type(type_of_read(i).dtype) + "* __restrict__ in" + std::to_string(i);
    for (size_t i = 0; i < plan_.writes.size(); ++i)
      list += ", " + memory_type(type_of_write(i).dtype) + "* __restrict__ out" + std::to_string(i);
    text_ += list.substr(2) + ") {\n";
  }

  void shared_memory(const RowPlan::Phase& phase) {
    if (tiling_.threads == 32) return;
    for (const size_t node : phase.reductions)
      line("__shared__ " + sum_type(node) + " shared" + std::to_string(node) + "[" +
           std::to_string(tiling_.block() / 32) + "];");
  }

  /// For rows: the launch says whether there is any.
  void row_memory() {
    line("extern __shared__ __align__(16) char shared_rows[];");
    line("const bool has_shared = shared_size() >= " + std::to_string(tiling_.shared) + ";");
    int64_t at = 0;
    for (size_t read = 0; read < plan_.reads.size(); ++read) {
      if (!is_read_again(plan_, read)) continue;
      const std::string type = pack(type_of_read(read));
      line(type + "* const k" + std::to_string(read) + " = reinterpret_cast<" + type +
           "*>(shared_rows + " + std::to_string(at) + ") + thread;");
      at += shared_bytes(type_of_read(read), tiling_, tiling_.kept);
    }
  }

  void rows_begin() {
    const std::string at_once = std::to_string(tiling_.rows());
    const std::string rows = std::to_string(plan_.rows);
    if (plan_.parts > 0) {
      const std::string part = std::to_string(plan_.rows / plan_.parts);
      line("const int64_t end = (blockIdx.x + int64_t{1}) * " + part + ";");
      // Nothing but loads: those of the next rows need not wait for this one.
      if (plan_.phases.size() == 1 && plan_.phases[0].of_elements.empty()) line("#pragma unroll 4");
      open("for (int64_t first = blockIdx.x * int64_t{" + part +
           "}; first < end; first += " + at_once + ") {");
    } else {
      line("const int64_t end = " + rows + ";");
      open("for (int64_t first = blockIdx.x * int64_t{" + at_once +
           "}; first < end; first += gridDim.x * int64_t{" + at_once + "}) {");
    }
    const std::string own = "first + threadIdx.x / " + threads();
    if (is_even()) {
      line("const int64_t row = " + own + ";");
    } else {
      // All go through the barriers; those without a row compute the last one and drop it.
      line("const bool is_row = " + own + " < end;");
      line("const int64_t row = is_row ? " + own + " : end - 1;");
    }
    row_counters("int64_t");
  }

  std::string pack(const ValueType& type) const { return pack_of(memory_type(type.dtype)); }
  std::string pack_of(const std::string& type) const {
    return "Pack<" + type + ", " + vector() + ">";
  }

  void pass(const RowPlan::Phase& phase, std::vector<bool>& is_kept) {
    for (const size_t node : phase.reductions)
      line(sum_type(node) + " r" + std::to_string(node) + " = " + reduction(node).identity + ";");
    if (tiling_.keeps_reads) {
      for (const size_t read : phase.reads) {
        if (!is_kept[read])
          line(pack(type_of_read(read)) + " p" + std::to_string(read) + "[" +
               std::to_string(tiling_.turns) + "];");
      }
    }
    const int64_t whole = plan_.columns / (tiling_.threads * tiling_.vector);
    const int64_t kept = std::min(tiling_.kept, whole);
    turns(phase, is_kept, 0, kept);
    turns(phase, is_kept, kept, whole);
    if (whole < tiling_.turns) turns(phase, is_kept, whole, tiling_.turns);
    for (const size_t read : phase.reads) is_kept[read] = true;
  }

  /// Turns in which every thread has elements, or the last one; with shared memory for what they
  /// read, or without. No branch between them: loads of several are under way at once.
  void turns(const RowPlan::Phase& phase, const std::vector<bool>& is_kept, int64_t begin,
             int64_t end) {
    if (begin == end) return;
    line(tiling_.keeps_reads ? "#pragma unroll" : "#pragma unroll 4");
    open("for (int turn = " + std::to_string(begin) + "; turn < " + std::to_string(end) +
         "; ++turn) {");
    line("const int at = (turn * " + threads() + " + thread) * " + vector() + ";");
    const bool is_cut = end * tiling_.threads * tiling_.vector > plan_.columns;
    if (is_cut) open("if (at < " + std::to_string(plan_.columns) + ") {");
    for (const size_t read : phase.reads) read_pack(read, is_kept[read], end <= tiling_.kept);
    elements(phase);
    if (is_cut) close();
    close();
  }

  void read_pack(size_t read, bool is_kept, bool has_place) {
    const std::string number = std::to_string(read);
    const std::string type = pack(type_of_read(read));
    const std::string from =
        "*reinterpret_cast<const " + type + "*>(in" + number + " + " + place(read, "at") + ")";
    if (tiling_.keeps_reads) {
      if (!is_kept) line("p" + number + "[turn] = " + from + ";");
      return;
    }
    const bool is_shared = has_place && is_read_again(plan_, read);
    const std::string kept = "k" + number + "[turn * " + threads() + "]";
    line("const " + type + " p" + number + " = " +
         (is_shared && is_kept ? "has_shared ? " + kept + " : " : "") + from + ";");
    if (is_shared && !is_kept) line("if (has_shared) " + kept + " = p" + number + ";");
  }

  void elements(const RowPlan::Phase& phase) {
    const std::string turn = tiling_.keeps_reads ? "[turn]" : "";
    for (const size_t write : phase.writes)
      line(pack_of(register_type(type_of_write(write).dtype)) + " q" + std::to_string(write) + ";");
    line("#pragma unroll");
    open("for (int v = 0; v < " + vector() + "; ++v) {");
    for (const size_t read : phase.reads) load(read, "p" + std::to_string(read) + turn + ".at[v]");
    for (const size_t node : phase.of_elements) line(statement(node));
    for (const size_t node : phase.reductions) {
      const std::string sum = "r" + std::to_string(node);
      line(sum + " = " + reduction(node).combine + "::of(" + sum + ", " + sum_type(node) + "(" +
           input_of(node) + "));");
    }
    for (const size_t node : phase.columns)
      line(std::string(is_even() ? "" : "if (is_row) ") + "c" + std::to_string(node) + "[turn * " +
           vector() + " + v] += " + input_of(node) + ";  // tessera.column_sums");
    for (const size_t write : phase.writes)
      line("q" + std::to_string(write) + ".at[v] = " + variable_of(plan_.writes[write]) + ";");
    close();
    for (const size_t write : phase.writes) {
      const std::string number = std::to_string(write);
      line(std::string(is_even() ? "" : "if (is_row) ") + "*reinterpret_cast<" +
           pack(type_of_write(write)) + "*>(out" + number + " + " +
           place(tensor_of_write(write), "at") +
           ") = " + store_pack_text("q" + number, type_of_write(write).dtype) + ";");
    }
  }

  void reduce(size_t node) {
    const std::string number = std::to_string(node);
    const std::string combine = reduction(node).combine;
    const std::string sum = tiling_.threads == 32 ? "across_warp<" + combine + ">(r" + number + ")"
                                                  : "across_block<" + combine + ", " + threads() +
                                                        ">(r" + number + ", shared" + number + ")";
    line(reduced(node, sum));
  }

  void row_writes() {
    for (const size_t write : plan_.row_writes)
      line(std::string("if (thread == 0") + (is_even() ? "" : " && is_row") + ") out" +
           std::to_string(write) + "[" + number_place(tensor_of_write(write)) +
           "] = " + store_text(variable_of(plan_.writes[write]), type_of_write(write).dtype) + ";");
  }

  template <class Function>
  void for_columns(const Function& function) const {
    for (const auto& phase : plan_.phases) {
      for (const size_t node : phase.columns) function(node);
    }
  }

  void columns_begin() {
    for_columns([&](size_t node) {
      line(sum_type(node) + " c" + std::to_string(node) + "[" +
           std::to_string(tiling_.turns * tiling_.vector) + "] = {};");
    });
  }

  /// One for all sums: of the widest type, they come one after the other.
  void column_memory() {
    std::string type = "float";
    for_columns([&](size_t node) {
      if (sum_type(node) == "double") type = "double";
    });
    line("__shared__ " + type + " sums[" + std::to_string(plan_.columns) + "];");
  }

  /// Adds up what the rows of the block have, one group of threads after the other.
  void columns_end() {
    for_columns([&](size_t node) {
      const std::string number = std::to_string(node);
      const std::string columns = std::to_string(plan_.columns);
      const std::string out = "out" + std::to_string(write_of(node)) + "[blockIdx.x * int64_t{" +
                              columns + "} + at + v]";
      const std::string own = "c" + number + "[turn * " + vector() + " + v]";
      open("{");
      if (tiling_.rows() > 1) {
        open("for (int group = 0; group < " + std::to_string(tiling_.rows()) + "; ++group) {");
        open("if (threadIdx.x / " + threads() + " == group) {");
        over_own_columns("sums[at + v] = group == 0 ? " + own + " : sums[at + v] + " + own + ";");
        close();
        line("__syncthreads();");
        close();
        open("if (threadIdx.x / " + threads() + " == 0) {");
        over_own_columns(out + " = sums[at + v];");
        close();
        line("__syncthreads();");
      } else {
        over_own_columns(out + " = " + own + ";");
      }
      close();
    });
  }

  void over_own_columns(const std::string& statement) {
    line("#pragma unroll");
    open("for (int turn = 0; turn < " + std::to_string(tiling_.turns) + "; ++turn) {");
    line("const int at = (turn * " + threads() + " + thread) * " + vector() + ";");
    line("#pragma unroll");
    open("for (int v = 0; v < " + vector() + "; ++v) {");
    line("if (at + v < " + std::to_string(plan_.columns) + ") " + statement);
    close();
    close();
  }

  const ThreadTiling tiling_;
};

/// Elements of 16 bytes of the widest dtype, if rows can be cut into runs of that in every tensor.
int64_t vector_of(const Graph& body, const RowPlan& plan) {
  int64_t vector = 8;
  const auto look = [&](ValueId value, size_t tensor) {
    if (plan.along_row[tensor] == 0) return;
    if (plan.along_row[tensor] != 1) vector = 1;
    vector = std::min(vector, 16 / static_cast<int64_t>(c10::elementSize(body.type(value).dtype)));
    while (plan.columns % vector != 0) vector /= 2;
    for (const int64_t stride : plan.nest.strides[tensor]) {
      while (stride % vector != 0) vector /= 2;
    }
  };
  for (size_t i = 0; i < plan.reads.size(); ++i) look(plan.reads[i], i);
  for (size_t i = 0; i < plan.writes.size(); ++i) look(plan.writes[i], plan.reads.size() + i);
  return std::max<int64_t>(vector, 1);
}

Kernel::Grid grid_of(const RowPlan& plan, const ThreadTiling& tiling) {
  constexpr int64_t kMostBlocks = int64_t{1} << 30;
  const int64_t blocks = (plan.rows + tiling.rows() - 1) / tiling.rows();
  return {plan.parts > 0 ? plan.parts : std::min(blocks, kMostBlocks), tiling.block(),
          tiling.shared};
}

}  // namespace

void write_cuda_rows(const Graph& body, const std::vector<std::string>& names, Kernel& kernel) {
  const RowPlan plan = plan_rows(body);
  kernel.vector = vector_of(body, plan);
  const ThreadTiling tiling = choose_tiling(body, plan, 1);
  kernel.grid = grid_of(plan, tiling);
  kernel.text = CudaRows(body, names, plan, tiling).write();
  if (kernel.vector == 1) return;
  const ThreadTiling by_vector = choose_tiling(body, plan, kernel.vector);
  kernel.vector_grid = grid_of(plan, by_vector);
  kernel.text += "\n" + CudaRows(body, names, plan, by_vector).write();
}

}  // namespace tessera::compiler
