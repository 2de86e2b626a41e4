// The graphs and kernels that are made of the benchmarks' jobs, byte for byte: a change of the
// compiler that was to change nothing leaves them as they are, any other is seen as a diff.
#include <tessera/compile.h>
#include <tessera/optim.h>

#include "base/torch_versions.h"
#include "benchmarks/jobs.h"
#include "benchmarks/train_modes.h"
#include "compiler/kernels/kernels.h"
#include "support/few_cores.h"
#include "support/ranks.h"
#include "support/subprocess.h"
#include "support/temporary_folder.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

const fs::path kFolder = TESSERA_GOLDENS;
constexpr auto* kRemedy =
    "if the change is meant, renew the files: TESSERA_WRITE_GOLDENS=1 build/release/bin/tests/"
    "compiler --gtest_filter='*Golden*', and commit them";

std::string read(const fs::path& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void write(const fs::path& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  ASSERT_FALSE(file.fail()) << path;
}

bool renews() {
  const auto* value = std::getenv("TESSERA_WRITE_GOLDENS");
  return value != nullptr && std::string(value) == "1";
}

/// Libtorch's versions differ in what operators their autograd calls.
std::string libtorch_version() { return torch_minor_version() + "\n"; }

/// Two blocks of the gpt: further ones repeat them.
benchmarks::Job make(const std::string& name, int rank) {
  return name == "gpt" ? benchmarks::make_gpt(rank, /*blocks=*/2)
                       : benchmarks::make_job(name, rank);
}

std::string source_of(const std::string& name, const std::string& mode) {
  keep_to_cores(2);  // what ranks do in turn depends on it
  auto job = make(name, benchmarks::batch_rank(mode));
  benchmarks::parallelise(job, mode);
  optim::AdamW optimizer(job.model->parameters(), {.lr = 1e-3, .fused = true});
  auto step = compile(
      [&] {
        optimizer.zero_grad();
        auto loss = job.loss(job.forward());
        loss.backward();
        optimizer.step();
        return loss;
      },
      {.module = *job.model, .optimizer = optimizer, .fullgraph = true});
  constexpr int kMostCalls = 6;
  for (int i = 0; i < kMostCalls && step.step().graph() == nullptr; ++i) step();
  const auto* graph = step.step().graph();
  EXPECT_NE(graph, nullptr) << explain(step);
  if (graph == nullptr) return "";
  auto text = graph->str();
  for (const auto& source : compiler::write_kernels(*graph).sources) text += source.definitions;
  return text;
}

void compare(const std::string& name, const std::string& source) {
  const auto path = kFolder / (name + ".txt");
  if (renews()) return write(path, source);
  if (read(path) == source) return;
  const TemporaryFolder folder;
  const auto now = folder.path() / "now.txt";
  write(now, source);
  const auto diff = run_program({.arguments = {"diff", "-u", path, now}});
  ADD_FAILURE() << "what is made of " << name << " is another one than in " << path << ":\n"
                << diff.output << "\n"
                << kRemedy;
}

struct Golden {
  std::string job, mode;
  int ranks;
};

std::string file_of(const Golden& golden) {
  auto name = golden.job + "_" + golden.mode;
  std::replace(name.begin(), name.end(), '+', '_');
  return name;
}

class GoldenSourceRanks : public ::testing::TestWithParam<Golden> {};
INSTANTIATE_TEST_SUITE_P(Every, GoldenSourceRanks, ::testing::ValuesIn([] {
                           std::vector<Golden> all;
                           for (const std::string job : {"mlp", "net2000", "gpt"}) {
                             all.push_back({job, "compile", 1});
                             all.push_back({job, "replicate+compile", 2});
                             all.push_back({job, "fully_shard+compile", 2});
                           }
                           return all;
                         }()),
                         [](const auto& info) { return file_of(info.param); });

TEST_P(GoldenSourceRanks, IsAsItWas) {
  const auto version = read(kFolder / "libtorch.txt");
  if (version != libtorch_version() && !renews())
    GTEST_SKIP() << "the files are those of libtorch " << version << ", this is "
                 << libtorch_version();
  run_processes(GetParam().ranks, [] {
    const auto source = source_of(GetParam().job, GetParam().mode);
    if (rank() == 0) compare(file_of(GetParam()), source);
  });
  if (renews()) write(kFolder / "libtorch.txt", libtorch_version());
}

}  // namespace
}  // namespace tessera::testing
