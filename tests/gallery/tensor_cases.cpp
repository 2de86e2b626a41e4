// Distributed tensors.
#include <tessera/dtensor.h>

#include "gallery/cases.h"

#include <c10/util/StringUtil.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

at::Tensor numbers(std::vector<int64_t> sizes) {
  return torch::arange(c10::multiply_integers(sizes), torch::kFloat).view(sizes);
}

DeviceMesh line() { return init_device_mesh(torch::kCPU, {world_size()}); }
DeviceMesh square() { return init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"}); }

DTensor distributed(const at::Tensor& whole, const DeviceMesh& mesh, Placements placements) {
  return distribute_tensor(whole, mesh, std::move(placements));
}

std::string whole_text(const at::Tensor& tensor) {
  return text_of(DTensor::of(tensor).full_tensor());
}

Shown view_across_shards() {
  const auto whole = numbers({12, 8});
  const auto viewed = distributed(whole, line(), {Shard(1)}).view({16, 6});
  return {text_of_right(whole.view({16, 6}), whole.view({16, 6})),
          text_of_right(DTensor::of(viewed).full_tensor(), whole.view({16, 6}))};
}

Shown flattened_all_gather() {
  const auto mesh = square();
  mesh.flatten();
  const auto whole = numbers({5, 3});
  const auto gathered =
      distributed(whole, mesh, {Shard(0), Shard(0)}).redistribute({Replicate(), Replicate()});
  return {text_of(whole.select(1, 0)), text_of(gathered.to_local().select(1, 0))};
}

Shown partial_plus_scalar() {
  const auto whole = numbers({10, 1});
  const auto sum = distributed(whole, line(), {Shard(0)}).sum();
  const auto one = torch::tensor(10);
  const auto both = [](const std::string& number, const std::string& tensor) {
    return "number: " + number + ", tensor: " + tensor;
  };
  return {both(text_of(whole.sum() + 10), text_of(whole.sum() + one)),
          both(text_or_error([&] { return whole_text(sum + 10); }),
               text_or_error([&] { return whole_text(sum + one); }))};
}

Shown uneven_strided_shard() {
  const auto whole = numbers({5});
  const auto placed = distributed(whole, square(), {Replicate(), Replicate()})
                          .redistribute({StridedShard(0, 2), Shard(0)});
  const auto part = whole.chunk(2)[rank() % 2].chunk(2);  // tp cuts first, then dp
  const auto shown = [](const at::Tensor& part, const at::Tensor& all) {
    return text_of(part) + " of " + text_of(all);
  };
  const auto index = static_cast<size_t>(rank() / 2);
  return {shown(index < part.size() ? part[index] : whole.narrow(0, 0, 0), whole),
          shown(placed.to_local(), placed.full_tensor())};
}

Shown offsets_on_two_dimensions() {
  const auto whole = numbers({5});
  const auto mesh = square();
  const auto tensor = distributed(whole, mesh, {Shard(0), Shard(0)});
  const auto shown = [](int64_t offset, int64_t length) {
    return c10::str(length, " at ", offset);
  };
  const auto part = whole.chunk(2)[rank() / 2].chunk(2)[rank() % 2];
  const auto shard = tensor.shards()[rank()];
  return {shown(part[0].item<int64_t>(), part.numel()), shown(shard.offset[0], shard.length[0])};
}

Shown function_of_parts() {
  const auto whole = numbers({5});
  const auto mesh = line();
  const auto part = distributed(whole, mesh, {Shard(0)}).to_local();
  const auto doubled =
      DTensor::from_local(part * 2, mesh, {Shard(0)},
                          {.shape = std::vector<int64_t>{5}, .stride = std::vector<int64_t>{1}});
  const auto shown = [](const at::Tensor& tensor, const at::Tensor& mean) {
    return c10::str("size ", tensor.size(0), ", mean ", text_of(mean));
  };
  return {shown(whole, (whole * 2).mean()),
          shown(doubled, DTensor::of(doubled.mean()).full_tensor())};
}

Shown mean_of_uneven() {
  const auto mesh = line();
  const auto whole = numbers({3, 4}), row = whole.narrow(0, 0, 1);
  return {text_of(whole.mean()) + ", " + text_of(row.mean()),
          whole_text(distributed(whole, mesh, {Shard(0)}).mean()) + ", " +
              whole_text(distributed(row.contiguous(), mesh, {Shard(0)}).mean())};
}

Shown convolution_backward() {
  const auto mesh = line();
  const auto images = torch::sin(numbers({2, 3, 8, 16}));
  const auto weight = torch::cos(numbers({4, 3, 4, 4}));
  const auto convolve = [](const at::Tensor& x, const at::Tensor& w) {
    return torch::conv2d(x, w, {}, 4).square().sum();
  };
  const auto plain = images.clone().requires_grad_();
  convolve(plain, weight).backward();
  std::string expected, shown;
  for (const int64_t dim : {2, 3}) {
    const auto name = c10::str(dim == 2 ? "height: " : ", width: ");
    expected += name + text_of_right(plain.grad(), plain.grad());
    shown += name + text_or_error([&] {
               auto input = distributed(images, mesh, {Shard(dim)});
               input.requires_grad_();
               convolve(input, distributed(weight, mesh, {Replicate()})).backward();
               return text_of_right(DTensor::of(input.grad()).full_tensor(), plain.grad());
             });
  }
  return {expected, shown};
}

Shown remembered_keywords() {
  const auto whole = numbers({4}) + 1;
  const auto tensor = distributed(whole, line(), {Shard(0)});
  const auto shown = [](const at::Tensor& from) {
    std::string text;
    for (const auto dtype : {torch::kDouble, torch::kInt, torch::kFloat})
      text += c10::str(text.empty() ? "" : " ",
                       from.nansum(at::OptionalIntArrayRef(), false, dtype).dtype().name());
    return text;
  };
  return {shown(whole), shown(tensor)};
}

Shown remembered_scalar() {
  const auto mesh = line();
  std::string expected, shown;
  for (int i = 1; i <= 3; ++i) {
    const auto one = torch::ones({1});
    const auto mean = DTensor::from_local(one, mesh, {Shard(0)}).mean();
    expected += c10::str(i == 1 ? "" : " ", text_of(one.mean() * i));
    shown += c10::str(i == 1 ? "" : " ", whole_text(mean * i));
  }
  return {expected, shown};
}

}  // namespace

std::vector<GalleryCase> tensor_cases() {
  const std::string pytorch = "https://github.com/pytorch/pytorch/issues/";
  const auto of = [&](const std::string& number, std::string what, int ranks, Shown (*show)()) {
    return GalleryCase{"pytorch " + number, pytorch + number, std::move(what), ranks, show};
  };
  return {
      of("179502", "view of a 12 x 8 tensor, Shard(1), as 16 x 6", 4, view_across_shards),
      of("194457", "gather of 5 rows, [Shard(0), Shard(0)] on 2 x 2 ranks with a flattened mesh", 4,
         flattened_all_gather),
      of("163193", "Partial sum of 0 to 9, plus 10", 2, partial_plus_scalar),
      of("168134", "5 elements sharded by tp, then by dp: a strided shard, and the whole again", 4,
         uneven_strided_shard),
      of("161368",
         "elements and offset of each rank: 5 elements, [Shard(0), Shard(0)] on 2 x 2 ranks", 4,
         offsets_on_two_dimensions),
      of("172812", "a function of uneven parts: 5 elements, doubled", 2, function_of_parts),
      of("162692", "mean of 3 rows, and of 1 row, on 2 ranks", 2, mean_of_uneven),
      of("191926", "gradient of a convolution's input, sharded along height or width", 2,
         convolution_backward),
      of("174301", "nansum with dtype double, int, float, one after another", 2,
         remembered_keywords),
      of("153603", "mean times 1, 2, 3, one after another", 2, remembered_scalar),
  };
}

}  // namespace tessera::testing
