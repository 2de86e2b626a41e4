#include <tessera/tessera.h>

#include <ATen/ATen.h>

#include <iostream>

int main() {
  tessera::init();
  auto mesh = tessera::init_device_mesh(at::kCPU, {tessera::world_size()}, {"dp"});
  auto ranks = tessera::all_reduce(at::ones({2}), tessera::ReduceOp::SUM, mesh.group("dp"));
  std::cout << mesh << ": " << ranks.sum().item<double>() / 2 << " ranks\n";
  bool right = ranks.equal(at::full({2}, tessera::world_size()));
  tessera::shutdown();
  return right ? 0 : 1;
}
