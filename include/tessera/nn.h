#pragma once

/// Modules that can be hooked, and what else modules lack in C++.
///   TESSERA_MODULE(Block);                   instead of TORCH_MODULE(Block)
///   tessera::nn::Linear up(256, 1024);       instead of torch::nn::Linear
///   auto handle = tessera::register_forward_hook(up, [](auto& module, auto& args, auto& out) {…});
#include <tessera/nn/decoder_layers.h>
#include <tessera/nn/fp8.h>
#include <tessera/nn/linear_cross_entropy.h>
#include <tessera/nn/methods.h>
#include <tessera/nn/modules.h>
#include <tessera/nn/services.h>
