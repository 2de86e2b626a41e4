// Data parallel, sharded and tensor parallel training.
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/parallelize.h>
#include <tessera/replicate.h>

#include "gallery/cases.h"

#include <c10/util/StringUtil.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

/// Without a bias, its weights numbered: nothing is drawn.
nn::Linear numbered_linear(int64_t in, int64_t out) {
  nn::Linear linear(torch::nn::LinearOptions(in, out).bias(false));
  const torch::NoGradGuard no_grad;
  linear->weight.copy_(torch::arange(in * out, torch::kFloat).view({out, in}));
  return linear;
}

nn::Linear linear_of_ones(int64_t in, int64_t out) {
  auto linear = numbered_linear(in, out);
  const torch::NoGradGuard no_grad;
  linear->weight.fill_(1);
  return linear;
}

at::Tensor whole(const at::Tensor& tensor) { return DTensor::of(tensor.detach()).full_tensor(); }

/// One step of gradient descent on the sum of outputs, at rate 1.
void descend(nn::Linear& linear, const at::Tensor& x) {
  linear(x).sum().backward();
  torch::optim::SGD(linear->parameters(), 1.0).step();
}

Shown sharded_tensor_parallel() {
  const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
  const auto x = torch::tensor({{1.0F, 2.0F}});
  auto plain = numbered_linear(2, 5), net = numbered_linear(2, 5);
  descend(plain, x);
  parallelize_module(net, mesh["tp"], ColwiseParallel());
  fully_shard(net, {.mesh = mesh["dp"]});
  descend(net, x);
  return {text_of(plain->weight.select(1, 0)), text_of(whole(net->weight).select(1, 0))};
}

Shown uneven_columns() {
  const auto x = torch::arange(5, torch::kFloat).view({1, 5});
  auto plain = numbered_linear(5, 3);
  descend(plain, x);
  return {text_of_right(plain->weight, plain->weight), text_or_error([&] {
            auto net = numbered_linear(5, 3);
            fully_shard(net, {.shard_placement_fn = [](const at::Tensor&) {
                          return std::optional(Shard(1));
                        }});
            descend(net, x);
            return text_of_right(whole(net->weight), plain->weight);
          })};
}

Shown sums_of_hybrid_shards() {
  const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"replicas", "shards"});
  auto plain = linear_of_ones(2, 4), net = linear_of_ones(2, 4);
  fully_shard(net, {.strategy = ShardingStrategy::HYBRID_SHARD,
                    .mixed_precision = {.reduce_dtype = torch::kBFloat16},
                    .mesh = mesh});
  for (int batch = 0; batch < 9; ++batch) {
    const auto x = torch::full({1, 2}, batch == 0 ? 256.0F : 1.0F);
    plain(x).sum().backward();
    set_requires_all_reduce(net, batch == 8);
    net(x).sum().backward();
  }
  return {text_of(plain->weight.grad()[0][0]), text_of(whole(net->weight.grad())[0][0])};
}

struct TwoImpl : torch::nn::Module {
  TwoImpl()
      : first(register_module("first", linear_of_ones(4, 4))),
        second(register_module("second", linear_of_ones(4, 4))) {}
  at::Tensor forward(const at::Tensor& x, bool uses_both) {
    const auto h = first(x);
    return uses_both ? h + second(h) : h;
  }
  nn::Linear first, second;
};
TESSERA_MODULE(Two);

std::string gradients_of(const Two& net) {
  const auto shown = [](const at::Tensor& gradient) {
    if (!gradient.defined()) return std::string("none");
    return text_of((is_dtensor(gradient) ? whole(gradient) : gradient)[0][0]);
  };
  return shown(net->first->weight.grad()) + ", " + shown(net->second->weight.grad());
}

Shown parameter_of_the_last_batch() {
  const auto x = torch::ones({1, 4});
  Two plain, net;
  for (const bool is_last : {false, true}) plain(x, is_last).sum().backward();
  return {gradients_of(plain), text_or_error([&] {
            fully_shard(net, {.mixed_precision = {.param_dtype = torch::kBFloat16,
                                                  .reduce_dtype = torch::kFloat}});
            for (const bool is_last : {false, true}) {
              set_requires_gradient_sync(net, is_last);
              net(x, is_last).sum().backward();
            }
            return gradients_of(net);
          })};
}

Shown accumulated_gradients() {
  auto net = linear_of_ones(2, 4), plain = linear_of_ones(2, 4);
  fully_shard(net, {.accumulate_sharded = true});
  int64_t kept = 0;
  for (const bool is_last : {false, false, true}) {
    for (int other = 0; other < world_size(); ++other)
      (plain(torch::full({1, 2}, 1.0F + other)).sum() / world_size()).backward();
    set_requires_gradient_sync(net, is_last);
    net(torch::full({1, 2}, 1.0F + rank())).sum().backward();
    if (!is_last) kept = DTensor::of(net->weight.grad()).to_local().numel();
  }
  const auto shown = [&](int64_t numel, const at::Tensor& gradient) {
    return c10::str(numel, " of ", plain->weight.numel(), " kept, gradient ",
                    text_of(gradient[0][0]));
  };
  return {shown(plain->weight.numel() / world_size(), plain->weight.grad()),
          shown(kept, whole(net->weight.grad()))};
}

/// Objects are on rank 0's images alone, so that the other's loss leaves the head for them out.
/// First with find_unused_parameters, then two steps without.
Shown batch_without_objects() {
  const auto x = torch::ones({1, 4});
  Two plain, net, careless;
  for (const bool has_objects : {true, false}) (plain(x, has_objects).sum() / 2).backward();
  const auto shown = [](const std::string& found, const std::string& without) {
    return found + "; without find_unused_parameters: " + without;
  };
  replicate(net, {.find_unused_parameters = true});
  net(x, rank() == 0).sum().backward();
  const auto found = gradients_of(net);
  const auto without = text_or_error([&] {
    replicate(careless, {});
    for (int step = 0; step < 2; ++step) careless(x, rank() == 0).sum().backward();
    return gradients_of(careless);
  });
  return {shown(gradients_of(plain), "error"),
          shown(found, without.starts_with("error: ") ? "error" : without)};
}

}  // namespace

std::vector<GalleryCase> training_cases() {
  const std::string pytorch = "https://github.com/pytorch/pytorch/issues/";
  const auto of = [&](const std::string& number, std::string what, int ranks, Shown (*show)()) {
    return GalleryCase{"pytorch " + number, pytorch + number, std::move(what), ranks, show};
  };
  return {
      of("186282", "fully_shard over tensor parallelism, both along 5 rows: weights after a step",
         4, sharded_tensor_parallel),
      of("136221", "fully_shard along 5 columns on 2 ranks: weights after a step", 2,
         uneven_columns),
      of("194628", "hybrid shards, reduced in bfloat16: 9 batches of gradients 256, 1, …, 1", 4,
         sums_of_hybrid_shards),
      of("196996", "bfloat16 parameters, reduced in float32; one is used by the last batch alone",
         2, parameter_of_the_last_batch),
      {"verl 7458", "https://github.com/verl-project/verl/pull/7458",
       "batches without synchronisation: gradients that a rank keeps", 2, accumulated_gradients},
      {"Ultralytics 24675", "https://github.com/ultralytics/ultralytics/issues/24675",
       "data parallel, one rank's batches have no objects", 2, batch_without_objects},
  };
}

}  // namespace tessera::testing
