// config.json: fields are taken out of the object one by one; what is left is kept for writing.
#include <tessera/models/config.h>

#include "base/text.h"
#include "state/files/disk.h"
#include "state/files/json_text.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>

namespace tessera::models {
namespace {

using state::Json;
using ScalingType = nn::RotaryScaling::Type;

constexpr uint64_t kMaxFile = 10'000'000;

struct ScalingRow {
  const char* name;
  ScalingType type;
};
constexpr ScalingRow kScalings[] = {{"default", ScalingType::Default},
                                    {"linear", ScalingType::Linear},
                                    {"llama3", ScalingType::Llama3},
                                    {"yarn", ScalingType::Yarn}};

/// An object whose fields are taken out of it by name. Null counts as none.
class Fields {
 public:
  Fields(const state::FileName& file, Json object) : file_(file), object_(std::move(object)) {
    file_.require(object_.is_object(), "expected a JSON object, got ", object_.type_name());
  }

  const state::FileName& file() const { return file_; }
  Json take(const char* name) {
    const auto found = object_.find(name);
    if (found == object_.end()) return nullptr;
    Json value = std::move(*found);
    object_.erase(found);
    return value;
  }
  int64_t size(const char* name, std::optional<int64_t> otherwise = std::nullopt) {
    const auto value = take(name);
    if (value.is_null() && otherwise) return *otherwise;
    file_.require(value.is_number_integer(), "expected a whole number as '", name, "', got ",
                  shown(value));
    const bool fits =
        !value.is_number_unsigned() || value.get<uint64_t>() <= std::numeric_limits<int64_t>::max();
    file_.require(fits, "expected '", name, "' below 2^63, got ", shown(value));
    return value.get<int64_t>();
  }
  double number(const char* name, std::optional<double> otherwise = std::nullopt) {
    const auto value = take(name);
    if (value.is_null() && otherwise) return *otherwise;
    file_.require(value.is_number(), "expected a number as '", name, "', got ", shown(value));
    return value.get<double>();
  }
  std::optional<double> optional_number(const char* name) {
    const auto found = object_.find(name);
    if (found == object_.end() || found->is_null()) return std::nullopt;
    return number(name);
  }
  bool flag(const char* name, bool otherwise) {
    const auto value = take(name);
    if (value.is_null()) return otherwise;
    file_.require(value.is_boolean(), "expected true or false as '", name, "', got ", shown(value));
    return value.get<bool>();
  }
  std::string text(const char* name, const std::string& otherwise) {
    const auto value = take(name);
    if (value.is_null()) return otherwise;
    file_.require(value.is_string(), "expected text as '", name, "', got ", shown(value));
    return value.get<std::string>();
  }
  /// Refuses a model of a kind that is not computed here.
  void expect(bool holds, const std::string& what) const {
    TORCH_CHECK_NOT_IMPLEMENTED(holds, file_.function, ": ", file_.path, ": expected a model with ",
                                printable(what), "; others are not known to this library");
  }
  const Json& rest() const { return object_; }

  static std::string shown(const Json& value) {
    if (value.is_null()) return "none";
    if (value.is_structured()) return value.is_array() ? "a list" : "an object";  // of any depth
    const auto text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
    return text.size() > 60 ? text.substr(0, 60) + "…" : text;
  }

 private:
  state::FileName file_;
  Json object_;
};

std::string expect_text(Fields& fields, const char* name, const std::vector<std::string>& known) {
  auto value = fields.text(name, known.front());
  fields.expect(std::ranges::count(known, value) > 0,
                std::string(name) + " " + format_list(known) + ", got '" + value + "'");
  return value;
}

/// Yarn's of DeepSeek give it by two numbers.
std::optional<double> take_attention_factor(Fields& fields, double factor) {
  const auto given = fields.optional_number("attention_factor");
  const auto mscale = fields.number("mscale", 0),
             mscale_all_dim = fields.number("mscale_all_dim", 0);
  if (given || mscale == 0 || mscale_all_dim == 0) return given;
  const auto scaling_of = [&](double scale) {
    return factor <= 1 ? 1.0 : 0.1 * scale * std::log(factor) + 1;
  };
  return scaling_of(mscale) / scaling_of(mscale_all_dim);
}

nn::RotaryScaling read_scaling(Fields& fields, int64_t context) {
  const auto older = fields.text("type", "default");
  const auto name = fields.text("rope_type", older);
  const auto* row = std::ranges::find_if(
      kScalings, [&](const ScalingRow& candidate) { return name == candidate.name; });
  std::vector<std::string> names;
  for (const auto& known : kScalings) names.emplace_back(known.name);
  fields.expect(row != std::end(kScalings),
                "a rope_type of " + format_list(names) + ", got '" + name + "'");
  fields.expect(fields.number("partial_rotary_factor", 1) == 1,
                "rotation of whole heads, got a partial_rotary_factor");
  nn::RotaryScaling scaling{.type = row->type};
  if (scaling.type == ScalingType::Default) return scaling;
  if (scaling.type != ScalingType::Linear)
    scaling.original_max_position = fields.size("original_max_position_embeddings", context);
  if (scaling.type == ScalingType::Yarn) {
    const auto stretch =
        static_cast<double>(context) / static_cast<double>(scaling.original_max_position);
    scaling.factor = fields.number("factor", stretch);
    scaling.attention_factor = take_attention_factor(fields, scaling.factor);
    scaling.beta_fast = fields.number("beta_fast", 32);
    scaling.beta_slow = fields.number("beta_slow", 1);
    scaling.truncate = fields.flag("truncate", true);
    return scaling;
  }
  scaling.factor = fields.number("factor");
  if (scaling.type == ScalingType::Llama3) {
    scaling.low_freq_factor = fields.number("low_freq_factor");
    scaling.high_freq_factor = fields.number("high_freq_factor");
  }
  return scaling;
}

/// What is left must not change the rotation: numbers of another rope_type, which `transformers`
/// does not read either.
void refuse_other_scaling(const Fields& fields) {
  constexpr const char* kHarmless[] = {"factor",           "original_max_position_embeddings",
                                       "low_freq_factor",  "beta_fast",
                                       "high_freq_factor", "beta_slow",
                                       "truncate",         "attention_factor",
                                       "mscale",           "finetuned",
                                       "mscale_all_dim"};
  for (const auto& item : fields.rest().items()) {
    const bool is_known = item.value().is_null() || std::ranges::any_of(kHarmless, [&](auto* name) {
                            return item.key() == name && !item.value().is_structured();
                          });
    fields.expect(is_known,
                  "parameters of the rotation that are known, got " + state::in_quotes(item.key()));
  }
}

/// `rope_parameters`, or what came before it: `rope_scaling` beside `rope_theta`.
void read_rotary(Fields& fields, DecoderConfig& config) {
  auto older = fields.take("rope_scaling");
  auto parameters = fields.take("rope_parameters");
  const auto theta = fields.number("rope_theta", 10000);
  fields.expect(fields.number("partial_rotary_factor", 1) == 1,
                "rotation of whole heads, got a partial_rotary_factor");
  if (!older.is_null()) parameters = std::move(older);
  Fields rotary(fields.file(), parameters.is_null() ? Json::object() : std::move(parameters));
  config.rope_theta = rotary.number("rope_theta", theta);
  config.rope_scaling = read_scaling(rotary, config.max_position_embeddings);
  refuse_other_scaling(rotary);
}

void refuse_windows(Fields& fields) {
  const bool slides = fields.flag("use_sliding_window", false);
  fields.expect(!slides, "attention to all tokens, got \"use_sliding_window\": true");
  const auto types = fields.take("layer_types");
  for (const auto& type : types) {
    fields.expect(type == "full_attention",
                  "layer_types of \"full_attention\", got " + Fields::shown(type));
  }
}

void read_gpt2(Fields& fields, DecoderConfig& config) {
  config.hidden_size = fields.size("n_embd");
  config.num_hidden_layers = fields.size("n_layer");
  config.num_attention_heads = config.num_key_value_heads = fields.size("n_head");
  config.max_position_embeddings = fields.size("n_positions");
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // as check() has it
  const auto width = std::clamp<int64_t>(config.hidden_size, 0, kMost);
  config.intermediate_size = fields.size("n_inner", 4 * width);
  config.norm_eps = fields.number("layer_norm_epsilon", 1e-5);
  config.embd_pdrop = fields.number("embd_pdrop", 0.1);
  config.resid_pdrop = fields.number("resid_pdrop", 0.1);
  config.attention_dropout = fields.number("attn_pdrop", 0.1);
  config.exact_gelu = expect_text(fields, "activation_function",
                                  {"gelu_new", "gelu_pytorch_tanh", "gelu"}) == "gelu";
  fields.expect(fields.flag("scale_attn_weights", true),
                "scaled attention, got \"scale_attn_weights\": false");
  fields.expect(!fields.flag("scale_attn_by_inverse_layer_idx", false),
                "the same attention in all layers, got \"scale_attn_by_inverse_layer_idx\": true");
  fields.expect(!fields.flag("add_cross_attention", false),
                "self attention alone, got \"add_cross_attention\": true");
}

void read_decoder(Fields& fields, DecoderConfig& config) {
  config.hidden_size = fields.size("hidden_size");
  config.intermediate_size = fields.size("intermediate_size");
  config.num_hidden_layers = fields.size("num_hidden_layers");
  config.num_attention_heads = fields.size("num_attention_heads");
  config.num_key_value_heads = fields.size("num_key_value_heads", config.num_attention_heads);
  config.max_position_embeddings = fields.size("max_position_embeddings");
  const auto of_family = config.family == Family::Qwen3 ? 128 : 0;
  const auto head_dim = fields.size("head_dim", of_family);
  if (head_dim != 0) config.head_dim = head_dim;
  config.norm_eps = fields.number("rms_norm_eps", 1e-6);
  config.attention_dropout = fields.number("attention_dropout", 0);
  if (config.family != Family::Qwen2) config.attention_bias = fields.flag("attention_bias", false);
  if (config.family == Family::Llama) config.mlp_bias = fields.flag("mlp_bias", false);
  expect_text(fields, "hidden_act", {"silu", "swish"});
  refuse_windows(fields);
  read_rotary(fields, config);
}

Family read_family(Fields& fields) {
  const auto name = fields.text("model_type", "none");
  std::vector<std::string> known;
  for (const auto family : {Family::GPT2, Family::Llama, Family::Qwen2, Family::Qwen3})
    known.emplace_back(name_of(family));
  fields.expect(std::ranges::count(known, name) > 0,
                "a model_type of " + format_list(known) + ", got '" + name + "'");
  return family_of(name);
}

Json scaling_to_json(const nn::RotaryScaling& scaling) {
  Json json = {{"factor", scaling.factor}};
  for (const auto& row : kScalings) {
    if (row.type == scaling.type) json["rope_type"] = row.name;
  }
  if (scaling.type == ScalingType::Linear) return json;
  json["original_max_position_embeddings"] = scaling.original_max_position;
  if (scaling.type == ScalingType::Llama3) {
    json["low_freq_factor"] = scaling.low_freq_factor;
    json["high_freq_factor"] = scaling.high_freq_factor;
    return json;
  }
  json["beta_fast"] = scaling.beta_fast;
  json["beta_slow"] = scaling.beta_slow;
  json["truncate"] = scaling.truncate;
  if (scaling.attention_factor) json["attention_factor"] = *scaling.attention_factor;
  return json;
}

void write_gpt2(const DecoderConfig& config, Json& json) {
  json["n_embd"] = config.hidden_size;
  json["n_layer"] = config.num_hidden_layers;
  json["n_head"] = config.num_attention_heads;
  json["n_positions"] = json["n_ctx"] = config.max_position_embeddings;
  json["n_inner"] = config.intermediate_size;
  json["layer_norm_epsilon"] = config.norm_eps;
  json["embd_pdrop"] = config.embd_pdrop;
  json["resid_pdrop"] = config.resid_pdrop;
  json["attn_pdrop"] = config.attention_dropout;
  json["activation_function"] = config.exact_gelu ? "gelu" : "gelu_new";
}

void write_decoder(const DecoderConfig& config, Json& json) {
  json["hidden_size"] = config.hidden_size;
  json["intermediate_size"] = config.intermediate_size;
  json["num_hidden_layers"] = config.num_hidden_layers;
  json["num_attention_heads"] = config.num_attention_heads;
  json["num_key_value_heads"] = config.num_key_value_heads;
  json["head_dim"] = config.size_of_head();
  json["max_position_embeddings"] = config.max_position_embeddings;
  json["rms_norm_eps"] = config.norm_eps;
  json["attention_dropout"] = config.attention_dropout;
  if (config.family != Family::Qwen2) json["attention_bias"] = config.attention_bias;
  if (config.family == Family::Llama) json["mlp_bias"] = config.mlp_bias;
  json["hidden_act"] = "silu";
  json["rope_theta"] = config.rope_theta;
  if (config.rope_scaling.type != ScalingType::Default)
    json["rope_scaling"] = scaling_to_json(config.rope_scaling);
}

const char* dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false,
                                  "config_text: expected weights of float32, float64, "
                                  "float16 or bfloat16, got ",
                                  c10::toString(dtype));
  }
}

const char* architecture_of(Family family) {
  switch (family) {
    case Family::GPT2:
      return "GPT2LMHeadModel";
    case Family::Llama:
      return "LlamaForCausalLM";
    case Family::Qwen2:
      return "Qwen2ForCausalLM";
    default:
      return "Qwen3ForCausalLM";
  }
}

}  // namespace

DecoderConfig read_config(const std::string& folder) {
  const state::InputFile file(
      {"read_config", (std::filesystem::path(folder) / "config.json").string()});
  file.name().require(file.bytes() <= kMaxFile, "expected at most 10 MB, got ", file.bytes(),
                      " bytes");
  Fields fields(file.name(), state::parse_json(file.name(), file.read(0, file.bytes())));
  DecoderConfig config{.family = read_family(fields)};
  const bool is_gpt2 = config.family == Family::GPT2;
  fields.expect(fields.take("quantization_config").is_null(),
                "weights that are not quantized, got a quantization_config");
  config.vocab_size = fields.size("vocab_size");
  config.tie_word_embeddings = fields.flag("tie_word_embeddings", is_gpt2);
  config.initializer_range = fields.number("initializer_range", 0.02);
  is_gpt2 ? read_gpt2(fields, config) : read_decoder(fields, config);
  for (const auto* name : {"architectures", "dtype", "torch_dtype"}) fields.take(name);
  config.other = state::to_text("read_config", fields.rest());
  try {
    check(config);
  } catch (const c10::ValueError& error) {
    file.name().refuse(error.what_without_backtrace());
  }
  return config;
}

std::string config_text(const DecoderConfig& config, at::ScalarType dtype) {
  check(config);
  auto json = state::parse_json({"config_text", "DecoderConfig::other"}, config.other);
  TORCH_CHECK_VALUE(json.is_object(),
                    "config_text: expected DecoderConfig::other to be a JSON "
                    "object, got ",
                    json.type_name());
  json["model_type"] = name_of(config.family);
  json["architectures"] = {architecture_of(config.family)};
  json["torch_dtype"] = dtype_name(dtype);
  json["vocab_size"] = config.vocab_size;
  json["tie_word_embeddings"] = config.tie_word_embeddings;
  json["initializer_range"] = config.initializer_range;
  config.family == Family::GPT2 ? write_gpt2(config, json) : write_decoder(config, json);
  return json.dump(2) + "\n";
}

}  // namespace tessera::models
