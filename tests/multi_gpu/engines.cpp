// The engines against one process, in float64: what differs is an error, not rounding.
#include <tessera/tessera.h>

#include "checks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <sstream>

namespace multi_gpu {
namespace {

namespace tnn = tessera::nn;
using tessera::DeviceMesh;
using tessera::DTensor;
using tessera::Partial;
using tessera::Placement;
using tessera::Replicate;
using tessera::Shard;

constexpr int64_t kWidth = 64;
constexpr int64_t kHidden = 840;  // divisible by 1 to 8 ranks
constexpr int64_t kRowsPerRank = 8;
constexpr int64_t kSteps = 5;
constexpr double kTolerance = 1e-9;

struct BlockImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(norm(x)))); }
  tnn::LayerNorm norm{
      register_module("norm", tnn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))};
  tnn::Linear up{register_module("up", tnn::Linear(kWidth, kHidden))};
  tnn::Linear down{register_module("down", tnn::Linear(kHidden, kWidth))};
};
TESSERA_MODULE(Block);

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return head(blocks(x)); }
  tnn::Sequential blocks{
      register_module("blocks", tnn::Sequential(Block(), Block(), Block(), Block()))};
  tnn::Linear head{register_module("head", tnn::Linear(kWidth, 3))};
};
TESSERA_MODULE(Net);

/// The same values on every rank.
Net make_net(c10::Device device) {
  torch::manual_seed(1);
  Net net;
  net->to(device, at::kDouble);
  return net;
}

tessera::optim::AdamW make_optimizer(const Net& net) {
  return tessera::optim::AdamW(net->parameters(), {.lr = 1e-3, .fused = true});
}

at::Tensor draw(at::IntArrayRef sizes, int64_t seed, c10::Device device) {
  const auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed));
  return at::randn(sizes, generator, at::kDouble).to(device);
}

/// Which of how many equal parts of every batch this rank trains on.
struct Part {
  int64_t index = 0;
  int64_t count = 1;
  tessera::Group group = {};  // of the ranks that have the others
};

/// The losses of whole batches, from step `first` on.
std::vector<double> train(Net& net, tessera::optim::AdamW& optimizer, const Part& part,
                          c10::Device device, int64_t first = 0, int64_t end = kSteps) {
  std::vector<double> losses;
  for (int64_t step = first; step < end; ++step) {
    const auto batch = draw({kRowsPerRank * tessera::world_size(), kWidth}, 100 + step, device);
    const auto x = batch.chunk(part.count)[part.index];
    const auto loss = torch::mse_loss(net(x), x.narrow(1, 0, 3).sin());
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    const auto mean = part.count == 1
                          ? loss.detach()
                          : tessera::all_reduce(loss.detach(), tessera::ReduceOp::AVG, part.group);
    losses.push_back(mean.item<double>());
  }
  return losses;
}

/// Whole plain tensors, by name. Every rank calls it.
std::vector<at::Tensor> values_of(const Net& net) {
  std::vector<at::Tensor> values;
  for (const auto& [name, tensor] : tessera::state_dict(net)) {
    const auto whole = tessera::is_dtensor(tensor) ? DTensor::of(tensor).full_tensor() : tensor;
    values.push_back(whole.detach().cpu());
  }
  return values;
}

struct Trained {
  std::vector<double> losses;
  std::vector<at::Tensor> values;
};

Trained train_alone(c10::Device device) {
  auto net = make_net(device);
  auto optimizer = make_optimizer(net);
  auto losses = train(net, optimizer, {}, device);
  return {std::move(losses), values_of(net)};
}

/// The largest difference, relative to the largest value of each.
double difference(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected) {
  TORCH_CHECK(got.size() == expected.size(), "expected ", expected.size(), " tensors, got ",
              got.size());
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const auto scale = std::max(expected[i].abs().max().item<double>(), 1e-6);
    const auto one = (got[i] - expected[i]).abs().max().item<double>() / scale;
    if (!(one <= worst)) worst = one;  // NaN as well
  }
  return worst;
}

double difference(const std::vector<double>& got, const std::vector<double>& expected) {
  return difference({at::tensor(got, at::kDouble)}, {at::tensor(expected, at::kDouble)});
}

Outcome compare(const Trained& got, const Trained& expected) {
  const double losses = difference(got.losses, expected.losses);
  const double values = difference(got.values, expected.values);
  std::ostringstream text;
  text << kSteps << " steps differ from one process's by " << losses << " (losses) and " << values
       << " (parameters), at most " << kTolerance;
  return {losses <= kTolerance && values <= kTolerance, text.str()};
}

void shard_units(const Net& net, const DeviceMesh& mesh) {
  for (const auto& block : net->blocks->children()) tessera::fully_shard(block, {.mesh = mesh});
  tessera::fully_shard(net, {.mesh = mesh});
}

Part part_along(const DeviceMesh& mesh) { return {mesh.local_rank(), mesh.size(), mesh.group()}; }

DeviceMesh flat_mesh(c10::Device device) {
  return tessera::init_device_mesh(device.type(), {tessera::world_size()}, {"dp"});
}

/// The smallest factor of the number of ranks.
int64_t tensor_parallel_ranks() {
  const int64_t ranks = tessera::world_size();
  for (int64_t factor = 2; factor < ranks; ++factor) {
    if (ranks % factor == 0) return factor;
  }
  return ranks;
}

/// Names of what did not come out as it should.
class Complaints {
 public:
  void require(bool right, const std::string& what) {
    ++count_;
    if (!right) text_ += (text_.empty() ? "" : ", ") + what;
  }
  Outcome outcome(const std::string& done) const {
    if (text_.empty()) return {true, std::to_string(count_) + " " + done};
    return {false, "wrong: " + text_};
  }

 private:
  int count_ = 0;
  std::string text_;
};

}  // namespace

Outcome check_replicate(const Setting& setting) {
  const auto expected = train_alone(setting.device);
  auto net = tessera::replicate(make_net(setting.device));
  auto optimizer = make_optimizer(net);
  auto losses = train(net, optimizer, part_along(flat_mesh(setting.device)), setting.device);
  return compare({std::move(losses), values_of(net)}, expected);
}

Outcome check_fully_shard(const Setting& setting) {
  const auto expected = train_alone(setting.device);
  const auto mesh = flat_mesh(setting.device);
  auto net = make_net(setting.device);
  shard_units(net, mesh);
  auto optimizer = make_optimizer(net);
  auto losses = train(net, optimizer, part_along(mesh), setting.device);
  return compare({std::move(losses), values_of(net)}, expected);
}

Outcome check_tensor_parallel(const Setting& setting) {
  const auto expected = train_alone(setting.device);
  const auto tp = tensor_parallel_ranks();
  const auto mesh = tessera::init_device_mesh(setting.device.type(),
                                              {tessera::world_size() / tp, tp}, {"dp", "tp"});
  auto net = make_net(setting.device);
  tessera::parallelize_module(
      net, mesh["tp"],
      {{"blocks.*.up", tessera::ColwiseParallel()}, {"blocks.*.down", tessera::RowwiseParallel()}});
  shard_units(net, mesh["dp"]);
  auto optimizer = make_optimizer(net);
  auto losses = train(net, optimizer, part_along(mesh["dp"]), setting.device);
  auto outcome = compare({std::move(losses), values_of(net)}, expected);
  std::ostringstream text;
  text << mesh << ", " << outcome.text;
  return {outcome.passed, text.str()};
}

Outcome check_redistribute(const Setting& setting) {
  const auto mesh = flat_mesh(setting.device);
  const int64_t ranks = tessera::world_size();
  const auto whole = draw({3 * ranks + 1, 2 * ranks + 1}, 7, setting.device);  // uneven shards
  Complaints complaints;
  const std::vector<Placement> places = {Replicate(), Shard(0), Shard(1)};
  const auto way = [](const Placement& from, const Placement& to) {
    std::ostringstream text;
    text << tessera::Placements{from} << " to " << tessera::Placements{to};
    return text.str();
  };
  for (const auto& from : places) {
    const auto placed = tessera::distribute_tensor(whole, mesh, {from});
    for (const auto& to : places)
      complaints.require(at::equal(placed.redistribute({to}).full_tensor(), whole), way(from, to));
    const auto product = at::mm(placed, tessera::distribute_tensor(whole.t(), mesh, {Shard(0)}));
    complaints.require(
        at::allclose(DTensor::of(product).full_tensor(), at::mm(whole, whole.t()), 1e-9, 1e-9),
        "mm of " + way(from, Shard(0)));
  }
  // Whole numbers, so that sums are exact in any order.
  const auto summand = (whole * 16).round();
  const auto partial = DTensor::from_local(summand * (tessera::rank() + 1), mesh, {Partial()});
  const auto sum = summand * (ranks * (ranks + 1) / 2);
  for (const auto& to : places)
    complaints.require(at::equal(partial.redistribute({to}).full_tensor(), sum),
                       way(Partial(), to));
  return complaints.outcome("ways give what one process has");
}

Outcome check_checkpoint(const Setting& setting) {
  const auto mesh = flat_mesh(setting.device);
  const auto part = part_along(mesh);
  auto net = make_net(setting.device);
  shard_units(net, mesh);
  auto optimizer = make_optimizer(net);
  train(net, optimizer, part, setting.device, 0, 3);
  const auto saved = values_of(net);
  auto pending = tessera::save_async(setting.folder, net, optimizer);
  const auto expected = train(net, optimizer, part, setting.device, 3);  // while it is written
  pending.wait();

  Complaints complaints;
  auto resumed = make_net(setting.device);
  shard_units(resumed, mesh);
  auto resumed_optimizer = make_optimizer(resumed);
  tessera::load(setting.folder, resumed, resumed_optimizer);
  complaints.require(difference(values_of(resumed), saved) == 0, "values of sharded parameters");
  const auto losses = train(resumed, resumed_optimizer, part, setting.device, 3);
  complaints.require(difference(losses, expected) <= kTolerance, "losses after resuming");
  auto plain = make_net(setting.device);
  tessera::load(setting.folder, plain);
  complaints.require(difference(values_of(plain), saved) == 0, "values in one process");
  return complaints.outcome("comparisons after saving and loading agree");
}

}  // namespace multi_gpu
