// Sequences cut for ranks, and modules that see the whole of them all the same.
#include <tessera/comm.h>
#include <tessera/nn/decoder_layers.h>
#include <tessera/nn/hooks.h>
#include <tessera/parallel/context.h>

#include "nn/positions.h"
#include "parallel/boundary.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/api/include/torch/nn/modules/embedding.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace tessera {
namespace parallel {
namespace {

constexpr const char* kContextStyle = "ContextParallel";

void require_line(const char* function, const DeviceMesh& mesh) {
  TORCH_CHECK_VALUE(mesh.ndim() == 1, function, ": expected a 1-D mesh, got ", mesh.ndim(), "-D ",
                    c10::str(mesh), "; slice it first, e.g. mesh[\"cp\"]");
}

int64_t wrapped_dim(const char* function, const at::Tensor& tensor, int64_t dim) {
  TORCH_CHECK_VALUE(tensor.defined() && tensor.layout() == c10::kStrided, function,
                    ": expected a dense tensor, got ",
                    tensor.defined() ? c10::str(tensor.layout()) : "an undefined one");
  TORCH_CHECK_VALUE(dim >= -tensor.dim() && dim < tensor.dim(), function,
                    ": expected a seq_dim of a tensor of sizes ", tensor.sizes(), ", got ", dim);
  return dim < 0 ? dim + tensor.dim() : dim;
}

/// The chunks of the sequence that a rank has, in the order in which it has them.
std::vector<int64_t> chunks_of(int64_t rank, int64_t ranks, const ContextParallelOptions& options) {
  if (!options.load_balance) return {rank};
  return {rank, 2 * ranks - 1 - rank};
}

/// How long a chunk is, where a rank has so many elements in all.
int64_t chunk_length(const char* function, int64_t local_length,
                     const ContextParallelOptions& options) {
  if (!options.load_balance) return local_length;
  TORCH_CHECK_VALUE(local_length % 2 == 0, function,
                    ": expected an even local_length, two chunks of the sequence, got ",
                    local_length, "; cut the sequence by context_parallel_shard");
  return local_length / 2;
}

// Note [redirected attention]
// Within the forward of a ContextParallel module scaled_dot_product_attention goes to a kernel for
// the dispatch key PreDispatch, which lies above autocast, autograd and DTensor, is nobody's at run
// time and falls through for all other operators. The thread includes the key for the scope alone;
// the kernel is registered when the first module asks for it.

/// A forward that runs.
struct Redirection {
  const torch::nn::Module* module;
  DeviceMesh mesh;
  ContextParallelOptions options;
  int64_t calls = 0;
  bool was_included = false;  // the key, outside of it
};

std::vector<Redirection>& redirections() {
  thread_local std::vector<Redirection> running;
  return running;
}

constexpr auto kRedirecting = c10::DispatchKey::PreDispatch;

at::Tensor redirected_attention(const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, const std::optional<at::Tensor>& attn_mask,
                                double dropout_p, bool is_causal, std::optional<double> scale,
                                bool enable_gqa) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKeySet{kRedirecting});
  if (redirections().empty())
    return at::scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal,
                                            scale, enable_gqa);
  auto& redirection = redirections().back();
  ++redirection.calls;
  TORCH_CHECK_NOT_IMPLEMENTED(!attn_mask || !attn_mask->defined(), kContextStyle,
                              ": expected attention without attn_mask, or with is_causal, got a "
                              "mask of ",
                              attn_mask->sizes(),
                              "; the ranks have parts of it only, and packed rows can't be cut");
  TORCH_CHECK_NOT_IMPLEMENTED(dropout_p == 0, kContextStyle,
                              ": expected attention without dropout, got dropout_p = ", dropout_p,
                              "; make the module without, or call eval()");
  return ring_attention(query, key, value,
                        {.mesh = redirection.mesh,
                         .is_causal = is_causal,
                         .scale = scale,
                         .enable_gqa = enable_gqa,
                         .load_balance = redirection.options.load_balance});
}

void register_redirection() {
  static auto& library = [&]() -> torch::Library& {
    auto& made =
        *new torch::Library(torch::Library::IMPL, "aten", kRedirecting, __FILE__, __LINE__);
    made.impl("scaled_dot_product_attention", &redirected_attention);
    return made;
  }();
  static_cast<void>(library);
}

void begin_redirection(Redirection redirection) {
  redirection.was_included = c10::impl::tls_is_dispatch_key_included(kRedirecting);
  redirections().push_back(std::move(redirection));
  c10::impl::tls_set_dispatch_key_included(kRedirecting, true);
}

/// The calls of the innermost redirection, if it is the module's: a hook before ours may have
/// thrown.
std::optional<int64_t> end_redirection(const torch::nn::Module& module) {
  auto& running = redirections();
  if (running.empty() || running.back().module != &module) return std::nullopt;
  const auto calls = running.back().calls;
  c10::impl::tls_set_dispatch_key_included(kRedirecting, running.back().was_included);
  running.pop_back();
  // An outer one has made these calls, too.
  if (!running.empty()) running.back().calls += calls;
  return calls;
}

class LocalPositions final : public nn::Positions {
 public:
  LocalPositions(DeviceMesh mesh, ContextParallelOptions options)
      : mesh_(std::move(mesh)), options_(options) {}

  at::Tensor of(int64_t length, c10::Device device, int64_t largest,
                const char* module) const override {
    TORCH_CHECK_VALUE(length * mesh_.size() <= largest, kContextStyle, ": expected ", module,
                      " to have positions for the whole sequence, ", mesh_.size(), " ranks of ",
                      length, " tokens, got ", largest, "; make it with more");
    return context_parallel_positions(length, mesh_, options_, device);
  }

 private:
  DeviceMesh mesh_;
  ContextParallelOptions options_;
};

class RedirectedState final : public nn::ComposableState {};

void apply_once(torch::nn::Module& module, std::shared_ptr<nn::ComposableState> state) {
  nn::apply_composable(module, {.function = nn::kPositions}, [&] { return std::move(state); });
}

void place_rotary(torch::nn::Module& module, const DeviceMesh& mesh,
                  const ContextParallelOptions& options) {
  apply_once(module, std::make_shared<LocalPositions>(mesh, options));
}

/// Indices that count the tokens of this rank become positions.
void place_embedding(const StyleTarget& target, const torch::nn::EmbeddingImpl& embedding,
                     const ContextParallelOptions& options) {
  require_hookable(target, kContextStyle);
  const auto local = std::make_shared<LocalPositions>(target.mesh, options);
  apply_once(target.module, local);
  const Reporter reporter{kContextStyle, describe(target)};
  register_forward_pre_hook(
      target.module, [local, reporter, largest = embedding.options.num_embeddings()](
                         torch::nn::Module&, nn::Arguments& arguments) {
        auto& indices = first_tensor(arguments, reporter);
        TORCH_CHECK_VALUE(indices.dim() == 1 || indices.dim() == 2, reporter.style, ": expected ",
                          reporter.module, " to get indices of [length] or [batch, length], got ",
                          indices.sizes());
        const auto positions =
            local->of(indices.size(-1), indices.device(), largest, reporter.module.c_str());
        indices = positions.index_select(0, indices.flatten()).view(indices.sizes());
      });
}

void redirect_attention(const StyleTarget& target, const ContextParallelOptions& options) {
  require_hookable(target, kContextStyle);
  apply_once(target.module, std::make_shared<RedirectedState>());
  register_redirection();
  for (const auto& part : target.module.modules(/*include_self=*/false)) {
    const auto* rotary = dynamic_cast<nn::RotaryEmbeddingImpl*>(part.get());
    if (rotary != nullptr && !nn::find_positions(*part)) place_rotary(*part, target.mesh, options);
  }
  register_forward_pre_hook(
      target.module, [mesh = target.mesh, options](torch::nn::Module& module, nn::Arguments&) {
        begin_redirection({.module = &module, .mesh = mesh, .options = options});
      });
  register_forward_hook(
      target.module,
      [reporter = Reporter{kContextStyle, describe(target)}](torch::nn::Module& module,
                                                             nn::Arguments&, nn::Result& result) {
        const auto calls = end_redirection(module);
        TORCH_CHECK_VALUE(
            result.has_failed() || !calls || *calls > 0, reporter.style, ": expected forward of ",
            reporter.module,
            " to call scaled_dot_product_attention, got none: its tokens would not "
            "see those of other ranks; call it, or ring_attention without this style");
      },
      {.always_call = true});
}

}  // namespace
}  // namespace parallel

at::Tensor context_parallel_shard(const at::Tensor& whole, int64_t seq_dim, const DeviceMesh& mesh,
                                  const ContextParallelOptions& options) {
  constexpr const char* kName = "context_parallel_shard";
  parallel::require_line(kName, mesh);
  const auto dim = parallel::wrapped_dim(kName, whole, seq_dim);
  const auto chunks = mesh.size() * (options.load_balance ? 2 : 1);
  const auto length = whole.size(dim);
  TORCH_CHECK_VALUE(length > 0 && length % chunks == 0, kName, ": expected a sequence of ", chunks,
                    " equal chunks, ", options.load_balance ? "two for each rank, " : "",
                    "got length ", length, " in dimension ", dim, " of ", whole.sizes(),
                    "; cut it to ", length / chunks * chunks, ", or pad it to ",
                    (length / chunks + 1) * chunks,
                    ": at the end, with causal attention and targets that do not count");
  std::vector<at::Tensor> parts;
  for (const auto chunk : parallel::chunks_of(mesh.local_rank(), mesh.size(), options))
    parts.push_back(whole.narrow(dim, chunk * (length / chunks), length / chunks));
  return at::cat(parts, dim);
}

at::Tensor context_parallel_unshard(const at::Tensor& local, int64_t seq_dim,
                                    const DeviceMesh& mesh, const ContextParallelOptions& options) {
  constexpr const char* kName = "context_parallel_unshard";
  parallel::require_line(kName, mesh);
  const auto dim = parallel::wrapped_dim(kName, local, seq_dim);
  const auto length = parallel::chunk_length(kName, local.size(dim), options);
  const auto joined = all_gather(local, dim, mesh.group());
  std::vector<at::Tensor> chunks(joined.size(dim) / std::max<int64_t>(length, 1));
  int64_t begin = 0;
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    for (const auto chunk : parallel::chunks_of(rank, mesh.size(), options)) {
      chunks[chunk] = joined.narrow(dim, begin, length);
      begin += length;
    }
  }
  return at::cat(chunks, dim);
}

at::Tensor context_parallel_positions(int64_t local_length, const DeviceMesh& mesh,
                                      const ContextParallelOptions& options, c10::Device device) {
  constexpr const char* kName = "context_parallel_positions";
  parallel::require_line(kName, mesh);
  const auto length = parallel::chunk_length(kName, local_length, options);
  std::vector<at::Tensor> parts;
  for (const auto chunk : parallel::chunks_of(mesh.local_rank(), mesh.size(), options))
    parts.push_back(at::arange(chunk * length, (chunk + 1) * length,
                               at::TensorOptions(device).dtype(at::kLong)));
  return at::cat(parts);
}

ContextParallel::ContextParallel(ContextParallelOptions options) : options_(options) {}

void ContextParallel::apply(const StyleTarget& target) const {
  if (const auto* embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(&target.module)) {
    parallel::place_embedding(target, *embedding, options_);
  } else if (dynamic_cast<const nn::RotaryEmbeddingImpl*>(&target.module) != nullptr) {
    parallel::place_rotary(target.module, target.mesh, options_);
  } else {
    parallel::redirect_attention(target, options_);
  }
}

}  // namespace tessera
