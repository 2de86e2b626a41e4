#include "train/export.h"

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>
#include <torch/utils.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>

namespace tessera::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// In UTF-8.
std::string character(int code) {
  if (code < 0x80) return {static_cast<char>(code)};
  return {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
}

/// By what byte-level tokenizers write each byte: itself where it is a visible character of
/// Latin-1, the others from U+0100 on in turn.
std::string written_byte(int byte) {
  const auto is_visible = [](int code) {
    return (code >= '!' && code <= '~') || (code >= 0xA1 && code <= 0xFF && code != 0xAD);
  };
  if (is_visible(byte)) return character(byte);
  int hidden = 0;
  for (int before = 0; before < byte; ++before) hidden += is_visible(before) ? 0 : 1;
  return character(0x100 + hidden);
}

/// One token per byte, without a merge.
json tokenizer_of_bytes() {
  json vocabulary;
  for (int byte = 0; byte < 256; ++byte) vocabulary[written_byte(byte)] = byte;
  const json cut = {{"type", "ByteLevel"},
                    {"add_prefix_space", false},
                    {"trim_offsets", false},
                    {"use_regex", false}};
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", json::array()},
          {"normalizer", nullptr},
          {"pre_tokenizer", cut},
          {"post_processor", nullptr},
          {"decoder", cut},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"vocab", vocabulary},
            {"merges", json::array()}}}};
}

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK_VALUE(file, "export: expected a tokenizer that can be read, got ", path.string());
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void write_file(const fs::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  TORCH_CHECK(file, "export: expected to write ", path.string(),
              ", but it could not be written whole; is the disk full?");
}

/// With what `transformers` asks for beside it.
void write_tokenizer(const fs::path& folder, const std::string& text) {
  write_file(folder / "tokenizer.json", text);
  write_file(folder / "tokenizer_config.json",
             json({{"tokenizer_class", "PreTrainedTokenizerFast"}}).dump(2) + "\n");
}

/// Features ordered [head, query or key or value, size] as [query or key or value, head, size].
at::Tensor reordered(const at::Tensor& qkv, int64_t heads) {
  return qkv.unflatten(0, {heads, 3, -1}).transpose(0, 1).flatten(0, 2);
}

/// Of a block, ours and GPT-2's.
constexpr std::pair<const char*, const char*> kNames[] = {{"attention_norm", "ln_1"},
                                                          {"mlp_norm", "ln_2"},
                                                          {"projection", "attn.c_proj"},
                                                          {"up", "mlp.c_fc"},
                                                          {"down", "mlp.c_proj"}};

std::map<std::string, at::Tensor> values_of(const Gpt& net) {
  const auto& shape = net->shape();
  std::map<std::string, at::Tensor> ours, values;
  for (const auto& parameter : net->named_parameters()) ours[parameter.key()] = parameter.value();
  values["transformer.wte.weight"] = ours.at("tokens.weight");
  values["transformer.wpe.weight"] = ours.at("positions.weight");
  values["lm_head.weight"] = ours.at("head.weight");
  for (const std::string kind : {".weight", ".bias"}) {
    values["transformer.ln_f" + kind] = ours.at("norm" + kind);
    for (int64_t i = 0; i < shape.blocks; ++i) {
      const auto from = "blocks." + std::to_string(i) + ".";
      const auto to = "transformer.h." + std::to_string(i) + ".";
      values[to + "attn.c_attn" + kind] = reordered(ours.at(from + "qkv" + kind), shape.heads);
      for (const auto& [ours_name, name] : kNames)
        values[to + name + kind] = ours.at(from + ours_name + kind);
    }
  }
  return values;
}

}  // namespace

models::CausalLM as_gpt2(const Gpt& net) {
  const auto& shape = net->shape();
  models::CausalLM made(models::DecoderConfig{.family = models::Family::GPT2,
                                              .vocab_size = shape.vocabulary,
                                              .hidden_size = shape.width,
                                              .intermediate_size = 4 * shape.width,
                                              .num_hidden_layers = shape.blocks,
                                              .num_attention_heads = shape.heads,
                                              .num_key_value_heads = shape.heads,
                                              .max_position_embeddings = shape.context,
                                              .norm_eps = 1e-5,
                                              .tie_word_embeddings = false,
                                              .embd_pdrop = 0,
                                              .resid_pdrop = shape.dropout,
                                              .attention_dropout = 0,
                                              .exact_gelu = true});
  const torch::NoGradGuard no_grad;
  made->to(net->parameters().front().scalar_type());
  auto values = values_of(net);
  for (auto& parameter : made->named_parameters())
    parameter.value().copy_(values.at(parameter.key()));
  made->eval();
  return made;
}

void export_pretrained(const models::CausalLM& net, const std::string& folder,
                       const std::string& tokenizer) {
  const fs::path file(tokenizer);
  models::SavePretrainedOptions options;
  if (file.filename() == "tokenizer.json")
    options.tokenizer_from = file.has_parent_path() ? file.parent_path().string() : ".";
  const auto other = tokenizer == "bytes"     ? tokenizer_of_bytes().dump(1) + "\n"
                     : options.tokenizer_from ? std::string()
                                              : read_file(file);
  models::save_pretrained(net, folder, options);
  if (!other.empty()) write_tokenizer(folder, other);
}

}  // namespace tessera::train
