// The programs of docs/tutorial.md, one function per step. All train the same net on the same
// batches, so all end with the same loss:
//   tessera run -n 2 -- 07_tutorial               every step
//   tessera run -n 2 -- 07_tutorial replicated    one of them
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <cmath>
#include <filesystem>
#include <iostream>
#include <optional>
#include <set>
#include <string>

namespace nn = tessera::nn;  // every torch::nn module, hookable
namespace F = torch::nn::functional;
constexpr int64_t kWidth = 64, kHeads = 4, kLayers = 4, kContext = 32, kBatch = 16, kSymbols = 128;
constexpr int kSteps = 40;

struct BlockImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {  // [batch, tokens, width]
    const auto heads = qkv(norm1(x)).unflatten(-1, {-1, 3, kWidth / kHeads});
    const auto parts = heads.permute({3, 0, 2, 1, 4});  // [3, batch, heads, tokens, size]
    const auto mixed = torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0,
                                                           /*is_causal=*/true);
    const auto y = x + out(mixed.transpose(1, 2).flatten(2));
    return y + down(torch::gelu(up(norm2(y))));
  }
  nn::LayerNorm norm1{
      register_module("norm1", nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))};
  nn::Linear qkv{register_module("qkv", nn::Linear(kWidth, 3 * kWidth))};
  nn::Linear out{register_module("out", nn::Linear(kWidth, kWidth))};
  nn::LayerNorm norm2{
      register_module("norm2", nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))};
  nn::Linear up{register_module("up", nn::Linear(kWidth, 4 * kWidth))};
  nn::Linear down{register_module("down", nn::Linear(4 * kWidth, kWidth))};
};
TESSERA_MODULE(Block);

struct GptImpl : torch::nn::Module {
  GptImpl() {
    for (int64_t i = 0; i < kLayers; ++i) blocks->push_back(Block());
  }
  torch::Tensor forward(const torch::Tensor& tokens) {     // [batch, tokens]
    return head(blocks->forward(words(tokens) + places));  // [batch, tokens, symbols]
  }
  nn::Embedding words{register_module("words", nn::Embedding(kSymbols, kWidth))};
  torch::Tensor places{register_parameter("places", 0.02 * torch::randn({kContext, kWidth}))};
  nn::Sequential blocks{register_module("blocks", nn::Sequential())};
  nn::Linear head{register_module("head", nn::Linear(kWidth, kSymbols))};
};
TESSERA_MODULE(Gpt);

/// Sums, "12+30=42 ", one after the other: the numbers of their characters.
torch::Tensor text() {
  std::string sums;
  for (int i = 0; i < 2000; ++i) {
    const int a = 37 * i % 100, b = 61 * i % 89;
    sums += std::to_string(a) + "+" + std::to_string(b) + "=" + std::to_string(a + b) + " ";
  }
  return torch::tensor(std::vector<int64_t>(sums.begin(), sums.end()));
}

/// Part `part` of `parts` of the windows of one step, and what comes after each character.
std::pair<torch::Tensor, torch::Tensor> batch(int step, int64_t part = 0, int64_t parts = 1) {
  static const torch::Tensor kCharacters = text();
  const auto starts = (torch::arange(kBatch) * 7919 + step * 104729) %
                      (kCharacters.size(0) - kContext);  // anywhere, but the same in every run
  const auto windows = kCharacters.index({starts.unsqueeze(1) + torch::arange(kContext + 1)});
  const auto mine = windows.chunk(parts)[part];
  return {mine.slice(1, 0, kContext), mine.slice(1, 1)};
}

torch::Tensor loss_of(const torch::Tensor& logits, const torch::Tensor& next) {
  return F::cross_entropy(logits.flatten(0, 1).to(torch::kFloat), next.flatten());
}

void print(int step, float loss) {
  if (step % 10 == 0) std::cout << "step " << step << "  loss " << loss << std::endl;
}

/// Step 1: one process.
float plain() {
  torch::manual_seed(1);
  Gpt net;
  torch::optim::AdamW optimizer(net->parameters(), 3e-3);
  float last = 0;
  for (int step = 1; step <= kSteps; ++step) {
    const auto [x, y] = batch(step);
    optimizer.zero_grad();
    const auto loss = loss_of(net(x), y);
    loss.backward();
    optimizer.step();
    last = loss.item<float>();
    print(step, last);
  }
  return last;
}

/// The mean of the ranks' losses; every rank calls it.
float mean_of_ranks(const torch::Tensor& loss) {
  return tessera::all_reduce(loss.detach(), tessera::ReduceOp::AVG).item<float>();
}

void print_on_first(int step, float loss) {
  if (tessera::rank() == 0) print(step, loss);
}

/// Whether every rank holds rank 0's parameters, bit for bit.
bool ranks_agree(Gpt& net) {
  bool same = true;
  for (const auto& parameter : net->parameters())
    same = torch::equal(tessera::broadcast(parameter.detach()), parameter) && same;
  return same;
}

/// Step 2: each rank has its part of the batch.
float replicated() {
  torch::manual_seed(1);
  Gpt net;
  tessera::replicate(net);
  torch::optim::AdamW optimizer(net->parameters(), 3e-3);
  float last = 0;
  for (int step = 1; step <= kSteps; ++step) {
    const auto [x, y] = batch(step, tessera::rank(), tessera::world_size());
    optimizer.zero_grad();
    const auto loss = loss_of(net(x), y);
    loss.backward();
    optimizer.step();
    last = mean_of_ranks(loss);
    print_on_first(step, last);
  }
  TORCH_CHECK(ranks_agree(net), "expected one model on all ranks");
  return last;
}

/// Step 2, with two batches per step of the optimizer, averaged once.
float accumulated() {
  torch::manual_seed(1);
  Gpt net;
  tessera::replicate(net);
  torch::optim::AdamW optimizer(net->parameters(), 3e-3);
  float last = 0;
  for (int step = 1; step <= kSteps; ++step) {
    optimizer.zero_grad();
    auto sum = torch::zeros({});
    for (int64_t half = 0; half < 2; ++half) {
      std::optional<tessera::NoSync> no_sync;
      if (half == 0) no_sync.emplace(net);  // around forward and backward
      const auto [x, y] = batch(step, 2 * tessera::rank() + half, 2 * tessera::world_size());
      const auto loss = loss_of(net(x), y) / 2;
      loss.backward();
      sum += loss.detach();
    }
    optimizer.step();
    last = mean_of_ranks(sum);
    print_on_first(step, last);
  }
  return last;
}

/// The loop of step 2, for a batch of which this rank has one of so many parts.
float train(Gpt& net, torch::optim::Optimizer& optimizer, int64_t part, int64_t parts,
            int first = 1, int steps = kSteps) {
  float last = 0;
  for (int step = first; step <= steps; ++step) {
    const auto [x, y] = batch(step, part, parts);
    optimizer.zero_grad();
    const auto loss = loss_of(net(x), y);
    loss.backward();
    optimizer.step();
    last = mean_of_ranks(loss);
    print_on_first(step, last);
  }
  return last;
}

/// What autograd keeps of one forward, besides parameters, in KiB.
int64_t saved_kib(Gpt& net) {
  std::set<const void*> seen;
  for (const auto& parameter : net->parameters()) seen.insert(parameter.storage().data());
  int64_t bytes = 0;
  const tessera::saved_tensor_hooks count(
      [&](const torch::Tensor& tensor) {
        if (seen.insert(tensor.storage().data()).second) bytes += tensor.storage().nbytes();
        return tensor;
      },
      [](const torch::Tensor& tensor) { return tensor; });
  const auto logits = net(batch(0).first);
  return bytes / 1024;
}

/// Step 3: blocks keep their inputs alone.
float checkpointed() {
  torch::manual_seed(1);
  Gpt net;
  const auto before = saved_kib(net);
  for (const auto& block : net->blocks->children()) tessera::checkpoint(block);
  const auto after = saved_kib(net);
  if (tessera::rank() == 0)
    std::cout << "kept for backward: " << before << " KiB, checkpointed " << after << std::endl;
  tessera::replicate(net);
  torch::optim::AdamW optimizer(net->parameters(), 3e-3);
  return train(net, optimizer, tessera::rank(), tessera::world_size());
}

/// Which layers are cut by outputs, and which by inputs, so that a pair communicates once.
tessera::ParallelPlan plan() {
  return {{"blocks.*.qkv", tessera::ColwiseParallel({.heads = kHeads})},
          {"blocks.*.out", tessera::RowwiseParallel({.heads = kHeads})},
          {"blocks.*.up", tessera::ColwiseParallel()},
          {"blocks.*.down", tessera::RowwiseParallel()}};
}

/// Step 4: two ranks share the weights of each block, pairs of them share the batch.
float tensor_parallel() {
  const auto mesh =
      tessera::init_device_mesh(torch::kCPU, {tessera::world_size() / 2, 2}, {"dp", "tp"});
  torch::manual_seed(1);
  Gpt net;
  tessera::parallelize_module(net, mesh["tp"], plan());
  for (const auto& block : net->blocks->children()) tessera::checkpoint(block);
  tessera::replicate(net, {.mesh = mesh["dp"]});
  torch::optim::AdamW optimizer(net->parameters(), 3e-3);
  if (tessera::rank() == 0) {
    const auto weight = tessera::DTensor::of(tessera::get_parameter(net, "blocks.0.up.weight"));
    std::cout << mesh << "\n"
              << weight.sizes() << " " << weight.placements() << ", here "
              << weight.to_local().sizes() << std::endl;
  }
  return train(net, optimizer, mesh["dp"].local_rank(), mesh["dp"].size());
}

/// How much of parameters, gradients and optimizer state this rank keeps.
void print_kept(Gpt& net, const tessera::optim::Optimizer& optimizer) {
  size_t whole = 0, here = 0;
  const auto count = [&](const torch::Tensor& tensor) {
    whole += tensor.nbytes();
    here += tessera::is_dtensor(tensor) ? tessera::DTensor::of(tensor).to_local().nbytes()
                                        : tensor.nbytes();
  };
  for (const auto& parameter : net->parameters()) {
    count(parameter);
    count(parameter.grad());
    for (const auto& [name, value] : optimizer.state_of(parameter)) count(value);
  }
  std::cout << "rank " << tessera::rank() << " keeps " << here / 1024 << " of " << whole / 1024
            << " KiB" << std::endl;
}

/// Step 5: each rank keeps its rows of everything.
float sharded() {
  torch::manual_seed(1);
  Gpt net;
  for (const auto& block : net->blocks->children())
    tessera::fully_shard(tessera::checkpoint(block));
  tessera::fully_shard(net);
  tessera::optim::AdamW optimizer(net->parameters(), {.lr = 3e-3});
  const auto last = train(net, optimizer, tessera::rank(), tessera::world_size());
  print_kept(net, optimizer);
  return last;
}

/// Step 5, with units by class, bfloat16 inside of them, two batches per step and clipping.
float in_bfloat16() {
  torch::manual_seed(1);
  Gpt net;
  for (const auto& block : net->blocks->children()) tessera::checkpoint(block);
  tessera::fully_shard(
      net, {.policy = tessera::ModuleWrapPolicy::of<BlockImpl>(),
            .mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}});
  tessera::optim::AdamW optimizer(net->parameters(), {.lr = 3e-3});
  float last = 0;
  for (int step = 1; step <= kSteps; ++step) {
    optimizer.zero_grad();
    auto sum = torch::zeros({});
    for (int64_t half = 0; half < 2; ++half) {
      const auto [x, y] = batch(step, 2 * tessera::rank() + half, 2 * tessera::world_size());
      const auto loss = loss_of(net(x), y) / 2;
      loss.backward();  // adds this rank's rows of the average to those that are there
      sum += loss.detach();
    }
    tessera::optim::clip_grad_norm_(net->parameters(), 1.0);
    optimizer.step();
    last = mean_of_ranks(sum);
    print_on_first(step, last);
  }
  return last;
}

/// Step 5 and step 4: a mesh of two dimensions, one for each.
float sharded_and_parallel() {
  const auto mesh =
      tessera::init_device_mesh(torch::kCPU, {tessera::world_size() / 2, 2}, {"dp", "tp"});
  torch::manual_seed(1);
  Gpt net;
  tessera::parallelize_module(net, mesh["tp"], plan());
  for (const auto& block : net->blocks->children())
    tessera::fully_shard(tessera::checkpoint(block), {.mesh = mesh["dp"]});
  tessera::fully_shard(net, {.mesh = mesh["dp"]});
  tessera::optim::AdamW optimizer(net->parameters(), {.lr = 3e-3});
  return train(net, optimizer, mesh["dp"].local_rank(), mesh["dp"].size());
}

/// Writes what Gpt itself has; torch::nn's modules start with their own values.
void init_own(torch::nn::Module& module) {
  if (auto* gpt = module.as<GptImpl>()) torch::nn::init::normal_(gpt->places, 0, 0.02);
}

/// A sharded net that was never whole on any rank.
Gpt sharded_from_shapes() {
  Gpt net = [] {
    const tessera::MetaInit no_memory;
    return Gpt();
  }();
  tessera::fully_shard(
      net, {.policy = tessera::ModuleWrapPolicy::of<BlockImpl>(), .param_init_fn = init_own});
  return net;
}

/// Step 6: the step of the loop is one program.
float compiled() {
  torch::manual_seed(1);
  Gpt net;
  tessera::replicate(net);
  tessera::optim::AdamW optimizer(net->parameters(), {.lr = 3e-3, .fused = true});
  auto train_step = tessera::compile(
      [&](const torch::Tensor& x, const torch::Tensor& y) {
        optimizer.zero_grad();
        const auto loss = loss_of(net(x), y);
        loss.backward();
        optimizer.step();
        return loss;
      },
      {.module = net, .optimizer = optimizer, .fullgraph = true});
  float last = 0;
  for (int step = 1; step <= kSteps; ++step) {
    const auto [x, y] = batch(step, tessera::rank(), tessera::world_size());
    last = mean_of_ranks(train_step(x, y));
    print_on_first(step, last);
  }
  if (tessera::rank() == 0) std::cout << tessera::explain(train_step);
  return last;
}

/// Step 7: step 5, which begins, or goes on with what it finds in the folder.
float train_until(int steps) {
  torch::manual_seed(1);
  Gpt net;
  for (const auto& block : net->blocks->children())
    tessera::fully_shard(tessera::checkpoint(block));
  tessera::fully_shard(net);
  tessera::optim::AdamW optimizer(net->parameters(), {.lr = 3e-3});
  int done = 0;
  if (const auto checkpoint = tessera::latest_checkpoint("tutorial-run"))
    done = std::stoi(tessera::load(*checkpoint, net, optimizer).at("step"));
  const auto last = train(net, optimizer, tessera::rank(), tessera::world_size(), done + 1, steps);
  const auto step = std::to_string(steps);
  tessera::save("tutorial-run/step-" + step, net, optimizer, {{"step", step}}, {.keep_last = 2});
  return last;
}

/// Step 7, stopped half-way; then the weights alone, for models that are parallel in other ways.
float saved() {
  if (tessera::rank() == 0) std::filesystem::remove_all("tutorial-run");
  tessera::barrier();
  train_until(kSteps / 2);
  const auto last = train_until(kSteps);  // makes all anew, and loads what the first has saved

  Gpt sharded = sharded_from_shapes(), plain;
  tessera::load("tutorial-run/step-40", sharded);
  tessera::export_safetensors("tutorial.safetensors", sharded);
  tessera::import_safetensors("tutorial.safetensors", plain);
  const auto [x, y] = batch(kSteps + 1);
  TORCH_CHECK(torch::allclose(loss_of(sharded(x), y), loss_of(plain(x), y)),
              "expected the same model");
  if (tessera::rank() == 0) std::cout << "saved and loaded" << std::endl;
  return last;
}

int main(int argc, char** argv) try {
  at::set_num_threads(1);
  tessera::init();
  const std::vector<std::pair<std::string, float (*)()>> steps = {
      {"plain", plain},
      {"replicated", replicated},
      {"accumulated", accumulated},
      {"checkpointed", checkpointed},
      {"tensor_parallel", tensor_parallel},
      {"sharded", sharded},
      {"in_bfloat16", in_bfloat16},
      {"sharded_and_parallel", sharded_and_parallel},
      {"compiled", compiled},
      {"saved", saved}};
  std::optional<float> expected;
  for (const auto& [name, run] : steps) {
    if (argc > 1 && argv[1] != name) continue;
    if (tessera::rank() == 0) std::cout << name << std::endl;
    const float loss = run();
    if (!expected) expected = loss;
    TORCH_CHECK(std::abs(loss - *expected) < (name == "in_bfloat16" ? 0.2 : 0.01), "expected ",
                name, " to end with a loss of ", *expected, ", got ", loss);
  }
  TORCH_CHECK(expected, "there is no step ", argv[1]);
  if (argc == 1 && tessera::rank() == 0) std::cout << "all steps agree" << std::endl;
  tessera::shutdown();
  return 0;
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
