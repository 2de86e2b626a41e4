#include <tessera/compile.h>

#include "compiler/passes/passes.h"
#include "compiler/programs/pipeline.h"
#include "support/message_of.h"
#include "support/temporary_folder.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace tessera::compiler {
namespace {

using testing::message_of;

Graph sample() {
  return Graph::parse(
      "input %0: float32[4] = argument \"x\"\n%1: float32[4] = aten::neg(%0)\n"
      "%2: float32[4] = aten::relu(%0)\nreturn %2\n");
}

std::string contents(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

TEST(RunPasses, DumpsOneFilePerPass) {
  const testing::TemporaryFolder folder;
  const auto dump = folder.path() / "dump";
  Graph graph = sample();
  const std::string before = graph.str();
  run_passes(graph, {find_pass("remove_dead_code"), find_pass("schedule_comm_wait")},
             {.dump_folder = dump.string()});
  EXPECT_EQ(contents(dump / "00-captured.txt"), before);
  EXPECT_EQ(contents(dump / "01-remove_dead_code.txt"), graph.str());
  EXPECT_EQ(contents(dump / "02-schedule_waits.txt"), graph.str());
  EXPECT_NE(before, graph.str());
  EXPECT_EQ(counters()["passes"], 2);
}

TEST(RunPasses, SkipsWhatIsDisabled) {
  Graph graph = sample();
  bool ran = false;
  const Pass own{"mine", [&](Graph&) { ran = true; }};
  run_passes(graph, {find_pass("remove_dead_code"), find_pass("schedule_waits"), own},
             {.disabled = {"remove_dead_code", "schedule_comm_wait"}});
  EXPECT_EQ(graph.str(), sample().str());
  EXPECT_TRUE(ran);
  EXPECT_EQ(counters()["passes"], 1);
}

TEST(RunPasses, NamesThePassThatBrokeTheGraph) {
  Graph graph = sample();
  const Pass broken{"drop_everything", [](Graph& each) { each.nodes.clear(); }};
  EXPECT_EQ(message_of([&] { run_passes(graph, {broken}); }),
            "compile: the graph after drop_everything is not well-formed: the outputs: %2 is used "
            "before it is defined (correct the pass drop_everything, or name it in "
            "disabled_passes)");
  graph = sample();
  const Pass unknown{"rename", [](Graph& each) { each.nodes[0].op = "my::neg"; }};
  EXPECT_NE(message_of([&] { run_passes(graph, {unknown}); })
                .find("the graph after rename is not well-formed: %1: float32[4] = my::neg(%0): "
                      "expected an operator that libtorch knows, not 'my::neg'"),
            std::string::npos);
}

/// Callers know what goes in and out: a pass that changes it is wrong, though the graph is one.
TEST(RunPasses, NamesThePassThatChangedWhatCallersSee) {
  const std::string text =
      "input %0: float32[4] = parameter \"w\"\ninput %1: float32[4] = argument \"x\"\n"
      "%2: float32[4] = aten::add.Tensor(%0, %1)\nreturn %2\nwrite %2 to %0\ngradient %1 of "
      "%0\n";
  const auto error_of = [&](const std::function<void(Graph&)>& change) {
    Graph graph = Graph::parse(text);
    return message_of([&] { run_passes(graph, {{"mine", change}}); });
  };
  const auto drops = [](OutputKind kind) {
    return [kind](Graph& graph) {
      std::erase_if(graph.outputs, [&](const GraphOutput& each) { return each.kind == kind; });
    };
  };
  EXPECT_EQ(error_of(drops(OutputKind::Write)),
            "compile: expected the pass mine to leave inputs and outputs of the graph as "
            "they are, but `write to \"w\"` became `gradient of \"w\"`; correct the pass, or name "
            "it in disabled_passes");
  EXPECT_NE(error_of(drops(OutputKind::Gradient)).find("`gradient of \"w\"` became `nothing`"),
            std::string::npos);
  EXPECT_NE(error_of([](Graph& graph) {
              graph.inputs.push_back({graph.add_value({}), InputKind::Outside, "new"});
            }).find("`return` became `input float32[] = outside \"new\"`"),
            std::string::npos);
  EXPECT_NE(error_of([](Graph& graph) {
              std::swap(graph.inputs[0], graph.inputs[1]);
            }).find("`input float32[4] = parameter \"w\"` became"),
            std::string::npos);
  EXPECT_NE(error_of([](Graph& graph) {
              graph.outputs[2].value = kNoValue;
            }).find("`gradient of \"w\"` became `gradient nothing of \"w\"`"),
            std::string::npos);
}

TEST(RunPasses, PassesOnWhatAPassThrows) {
  Graph graph = sample();
  const Pass standard{"lookup", [](Graph&) { throw std::runtime_error("no such row"); }};
  EXPECT_EQ(message_of<c10::Error>([&] { run_passes(graph, {standard}); }),
            "compile: the pass lookup failed: no such row");
  const Pass checked{"count", [](Graph&) { TORCH_CHECK_VALUE(false, "expected 2 nodes, got 3"); }};
  EXPECT_EQ(message_of<c10::Error>([&] { run_passes(graph, {checked}); }),
            "compile: the pass count failed: expected 2 nodes, got 3");
}

TEST(RunPasses, FindsPassesByOursAndUpstreamsNames) {
  for (const std::string& name : pass_names()) EXPECT_NO_THROW(find_pass(name)) << name;
  EXPECT_EQ(find_pass("fuse_ddp_with_coalesced_op").name, "bucket_all_reduces");
  EXPECT_EQ(find_pass("fuse_ddp_with_concat_op").name, "bucket_all_reduces_by_concat");
  EXPECT_EQ(find_pass("schedule_comm_wait").name, "schedule_waits");
}

TEST(PassOrder, IsWhatPassesDemand) {
  const auto listed = [](const std::vector<std::string>& names) {
    std::vector<Pass> passes;
    for (const auto& name : names) passes.push_back(find_pass(name));
    return passes;
  };
  EXPECT_NO_THROW(check_order(listed({"compress_to_float16", "fuse_ddp_with_coalesced_op",
                                      "schedule_comm_wait", "reuse_memory"})));
  EXPECT_NO_THROW(check_order(listed({"schedule_waits", "reuse_memory"})));
  EXPECT_EQ(message_of(
                [&] { check_order(listed({"schedule_comm_wait", "fuse_ddp_with_coalesced_op"})); }),
            "compile: expected the pass bucket_all_reduces before schedule_waits, which needs it "
            "done, got it after; change their order");
  auto own = listed({"bucket_all_gathers", "remove_dead_code"});
  own.insert(own.begin(), {"mine", [](Graph&) {}, {"remove_dead_code"}});
  EXPECT_NE(message_of([&] { check_order(own); }).find("the pass remove_dead_code before mine"),
            std::string::npos);
  own = {{"mine", [](Graph&) {}}, {"next", [](Graph&) {}, {"mine", "schedule_comm_wait"}}};
  EXPECT_NO_THROW(check_order(own));
  own[1].after = {"min"};
  EXPECT_NE(message_of([&] { check_order(own); })
                .find("compile: expected names of passes in Pass::after of the pass 'next', got "
                      "'min'; nearest names: 'mine'"),
            std::string::npos);
}

/// Every list that compile() may run is in order: nothing of it depends on the graph.
TEST(PassOrder, HoldsForOursAndIsAskedOfOthers) {
  for (const char* backend : {"codegen", "interpret"}) {
    EXPECT_NO_THROW(check_options({.backend = backend}));
    EXPECT_NO_THROW(check_options({.compress_gradients = at::kHalf, .backend = backend}));
  }
  EXPECT_NE(message_of([] {
              check_options({.passes = {find_pass("compress_to_float16")}});
            }).find("the pass compress_to_float16 before bucket_reduce_scatters"),
            std::string::npos);
  EXPECT_NE(message_of([] {
              ConfigPatch patch({.fuse_ddp_passes = {{"schedule_waits", "bucket_all_reduces"}}});
            }).find("the pass bucket_all_reduces before schedule_waits"),
            std::string::npos);
  EXPECT_EQ(message_of([] { check_options({.compress_gradients = at::kFloat}); }),
            "compile: expected compress_gradients to be torch::kHalf or torch::kBFloat16, got "
            "Float; leave it out to average gradients as they are");
}

TEST(CheckOptions, RefusesWhatNoCallCouldRun) {
  const std::string no_function =
      "compile: expected a function in Pass::run of the pass 'mine', got an empty one; give it a "
      "function that takes a Graph&";
  EXPECT_EQ(message_of([] { check_options({.passes = {{"mine", {}}}}); }), no_function);
  EXPECT_EQ(message_of([] {
              check_options(
                  {.parallel_mode = DataParallel("replicate", {.custom_passes = {{"mine", {}}}})});
            }),
            no_function);
  EXPECT_NE(
      message_of([] {
        check_options({.parallel_mode = DataParallel(
                           "replicate", {.custom_passes = {find_pass("compress_to_float16")}})});
      }).find("the pass compress_to_float16 before bucket_reduce_scatters"),
      std::string::npos);
  EXPECT_NE(message_of([] {
              check_options({.disabled_passes = {"nonsense"}});
            }).find("expected names of passes to disable, got 'nonsense'"),
            std::string::npos);
  EXPECT_NO_THROW(check_options(
      {.passes = {{"mine", [](Graph&) {}}}, .disabled_passes = {"mine", "schedule_comm_wait"}}));
}

TEST(RunPasses, ErrorsNameTheNearestPasses) {
  const auto unknown = message_of([] { find_pass("schedule_wait"); });
  EXPECT_TRUE(
      unknown.starts_with("compile: expected the name of a pass, got 'schedule_wait'; "
                          "nearest names: 'schedule_waits', 'schedule_comm_wait' and "))
      << unknown;
  Graph graph = sample();
  const auto message =
      message_of([&] { run_passes(graph, {}, {.disabled = {"remove_dead_cod"}}); });
  EXPECT_NE(message.find("compile: expected names of passes to disable, got 'remove_dead_cod'; "
                         "nearest names: 'remove_dead_code'"),
            std::string::npos)
      << message;
  const auto nearest =
      message_of([&] { check_disabled({find_pass("reuse_memory")}, {"reuse_memories"}); });
  EXPECT_NE(nearest.find("'reuse_memory'"), std::string::npos) << nearest;
  EXPECT_EQ(nearest.find("'reuse_memory'"), nearest.rfind("'reuse_memory'")) << nearest;
  EXPECT_NE(message_of([] { find_pass("bucket_all_reduces", 0); }).find("at least 1 byte, got 0"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera::compiler
