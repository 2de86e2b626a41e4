#include "nn/module_rows.h"

namespace tessera::testing {
namespace {

namespace options = torch::nn;

TEST(NnModules, RecurrentsAsTorchs) {
  MODULE_ROW(RNN, (3, 4), (input({5, 2, 3})));
  MODULE_ROW(RNN, (3, 4), (input({5, 2, 3}), input({1, 2, 4})));
  MODULE_ROW(GRU, (options::GRUOptions(3, 4).num_layers(2)), (input({5, 2, 3})));
  MODULE_ROW(GRU, (3, 4), (input({5, 2, 3}), input({1, 2, 4})));
  MODULE_ROW(LSTM, (options::LSTMOptions(3, 4).bidirectional(true)), (input({5, 2, 3})));
  MODULE_ROW(LSTM, (3, 4), (input({5, 2, 3}), std::tuple(input({1, 2, 4}), input({1, 2, 4}))));
  MODULE_ROW(RNNCell, (3, 4), (input({2, 3})));
  MODULE_ROW(RNNCell, (3, 4), (input({2, 3}), input({2, 4})));
  MODULE_ROW(GRUCell, (3, 4), (input({2, 3})));
  MODULE_ROW(LSTMCell, (3, 4), (input({2, 3})));
  MODULE_ROW(LSTMCell, (3, 4), (input({2, 3}), std::tuple(input({2, 4}), input({2, 4}))));
}

TEST(NnModules, PackedSequencesAreHookedToo) {
  const auto packed =
      torch::nn::utils::rnn::pack_padded_sequence(input({5, 2, 3}), at::tensor({5, 3}, at::kLong));
  auto [reference, module] = std::pair(seeded(3, [] { return torch::nn::LSTM(3, 4); }),
                                       seeded(3, [] { return nn::LSTM(3, 4); }));
  const auto expected = tensors_of(reference->forward_with_packed_input(packed));
  expect_same(tensors_of(module->forward_with_packed_input(packed)), expected, "plain");
  Counts counts;
  count_calls(module, counts);
  expect_same(tensors_of(module->forward_with_packed_input(packed)), expected, "hooked");
  EXPECT_EQ(counts.before, 1);
  EXPECT_EQ(counts.results, 3);
  register_forward_pre_hook(module, [](auto&, nn::Arguments& arguments) {
    arguments.for_each_tensor([](at::Tensor& tensor) { tensor = at::zeros_like(tensor); });
  });
  EXPECT_FALSE(tensors_bitwise_equal(tensors_of(module->forward_with_packed_input(packed)).front(),
                                     expected.front()));
}

TEST(NnModules, AttentionAndTransformersAsTorchs) {
  MODULE_ROW(MultiheadAttention, (8, 2), (input({3, 2, 8}), input({4, 2, 8}), input({4, 2, 8})));
  MODULE_ROW(MultiheadAttention, (8, 2),
             (input({3, 2, 8}), input({4, 2, 8}), input({4, 2, 8}), at::Tensor(), false));
  MODULE_ROW(TransformerEncoderLayer, (8, 2), (input({3, 2, 8})));
  MODULE_ROW(TransformerDecoderLayer, (8, 2), (input({3, 2, 8}), input({4, 2, 8})));
  MODULE_ROW(TransformerEncoder,
             (options::TransformerEncoderLayer(options::TransformerEncoderLayerOptions(8, 2)), 2),
             (input({3, 2, 8})));
  MODULE_ROW(TransformerDecoder,
             (options::TransformerDecoderLayer(options::TransformerDecoderLayerOptions(8, 2)), 2),
             (input({3, 2, 8}), input({4, 2, 8})));
  MODULE_ROW(Transformer,
             (options::TransformerOptions(8, 2).num_encoder_layers(1).num_decoder_layers(1)),
             (input({3, 2, 8}), input({4, 2, 8})));
}

TEST(NnModules, SequentialAsTorchs) {
  MODULE_ROW(Sequential, (torch::nn::Linear(4, 3), torch::nn::ReLU(), torch::nn::Linear(3, 2)),
                             ->forward(input({2, 4})));
  MODULE_ROW(Sequential, ({{"up", torch::nn::Linear(4, 3)}, {"down", torch::nn::Linear(3, 2)}}),
                             ->forward(input({2, 4})));
}

TEST(NnModules, ContainersWithoutForwardHoldHookableModules) {
  nn::ModuleList list(nn::Linear(4, 4), nn::ReLU());
  nn::ModuleDict dict;
  dict->update(std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>{
      {"fc", nn::Linear(4, 4).ptr()}});
  int calls = 0;
  for (const auto& module : {list[0], dict["fc"]}) {
    register_forward_hook(module, [&](auto&, auto&, auto&) { ++calls; });
    module->as<nn::Linear>()->forward(input({2, 4}));
  }
  EXPECT_EQ(calls, 2);
  EXPECT_TRUE(is_hookable(clone_module(list)[0]));
  EXPECT_TRUE(is_hookable(clone_module(dict)["fc"]));
  EXPECT_FALSE(is_hookable(list));
}

TEST(NnModules, ParameterContainersCanBeCloned) {
  nn::ParameterList list(at::ones({2}).requires_grad_(), at::zeros({3}));
  nn::ParameterDict dict;
  dict->insert("w", at::ones({2}).requires_grad_());
  auto list_clone = clone_module(list);
  auto dict_clone = clone_module(dict);
  expect_same(list_clone->parameters(), list->parameters(), "ParameterList");
  expect_same(dict_clone->parameters(), dict->parameters(), "ParameterDict");
  EXPECT_TRUE(list_clone->parameters()[0].requires_grad());
  EXPECT_FALSE(list_clone->parameters()[1].requires_grad());
  EXPECT_FALSE(dict_clone["w"].is_alias_of(dict["w"]));
  EXPECT_EQ(printed(list_clone), printed(list));
}

TEST(NnModules, EmbeddingsFromPretrained) {
  const auto table = input({6, 3});
  auto embedding = nn::Embedding::from_pretrained(table);
  auto bag = nn::EmbeddingBag::from_pretrained(table);
  int calls = 0;
  register_forward_hook(embedding, [&](auto&, auto&, auto&) { ++calls; });
  register_forward_hook(bag, [&](auto&, auto&, auto&) { ++calls; });
  expect_bitwise_equal(embedding(indices({4}, 6)), table.index_select(0, indices({4}, 6)));
  EXPECT_EQ(bag(indices({2, 2}, 6)).sizes(), at::IntArrayRef({2, 3}));
  EXPECT_EQ(calls, 2);
  EXPECT_FALSE(embedding->weight.requires_grad());
}

}  // namespace
}  // namespace tessera::testing
