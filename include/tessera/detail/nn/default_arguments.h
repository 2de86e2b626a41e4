#pragma once

#include <tessera/detail/nn/packed_input.h>
#include <tessera/detail/nn/plain_forward.h>

#include <torch/csrc/api/include/torch/nn/modules.h>

/// torch::nn's modules whose forward has default arguments: a deduced signature loses them, so they
/// are written out here.
namespace tessera::nn::detail {

using Pair = std::tuple<at::Tensor, at::Tensor>;
using StateAndPair = std::tuple<at::Tensor, Pair>;
using OptionalState = std::optional<Pair>;
using OptionalSizes = std::optional<at::IntArrayRef>;
using OptionalShape = std::optional<std::vector<int64_t>>;

/// forward_of with the types of a function type R(A...).
template <class Impl, class Function>
struct ForwardTo;
template <class Impl, class R, class... A>
struct ForwardTo<Impl, R(A...)> {
  static R call(const Hooked<Impl>& self, A... arguments) {
    return forward_of<Impl, R, A...>(self, std::forward<A>(arguments)...);
  }
};

}  // namespace tessera::nn::detail

namespace tessera::nn {

// Name, what forward returns, its parameters with defaults, their types, and the call.
#define TESSERA_NN_DEFAULTS(Name, Returned, Parameters, Types, Arguments)                   \
  template <>                                                                               \
  class Hooked<torch::nn::Name##Impl> : public detail::WithMethods<torch::nn::Name##Impl> { \
   public:                                                                                  \
    using detail::WithMethods<torch::nn::Name##Impl>::WithMethods;                          \
    Returned forward Parameters {                                                           \
      using ForwardCall = detail::ForwardTo<torch::nn::Name##Impl, Returned Types>;         \
      return ForwardCall::call Arguments;                                                   \
    }                                                                                       \
  }

#define TESSERA_NN_TRANSPOSED(Name)                                                               \
  TESSERA_NN_DEFAULTS(                                                                            \
      Name, at::Tensor, (const at::Tensor& input, const detail::OptionalSizes& output_size = {}), \
      (const at::Tensor&, const detail::OptionalSizes&), (*this, input, output_size))
TESSERA_NN_TRANSPOSED(ConvTranspose1d);
TESSERA_NN_TRANSPOSED(ConvTranspose2d);
TESSERA_NN_TRANSPOSED(ConvTranspose3d);
#undef TESSERA_NN_TRANSPOSED

#define TESSERA_NN_UNPOOL(Name)                                                             \
  TESSERA_NN_DEFAULTS(Name, at::Tensor,                                                     \
                      (const at::Tensor& input, const at::Tensor& indices,                  \
                       const detail::OptionalShape& size = {}),                             \
                      (const at::Tensor&, const at::Tensor&, const detail::OptionalShape&), \
                      (*this, input, indices, size))
TESSERA_NN_UNPOOL(MaxUnpool1d);
TESSERA_NN_UNPOOL(MaxUnpool2d);
TESSERA_NN_UNPOOL(MaxUnpool3d);
#undef TESSERA_NN_UNPOOL

TESSERA_NN_DEFAULTS(RNN, detail::Pair, (const at::Tensor& input, at::Tensor hx = {}),
                    (const at::Tensor&, at::Tensor), (*this, input, std::move(hx)));
TESSERA_NN_DEFAULTS(GRU, detail::Pair, (const at::Tensor& input, at::Tensor hx = {}),
                    (const at::Tensor&, at::Tensor), (*this, input, std::move(hx)));
TESSERA_NN_DEFAULTS(LSTM, detail::StateAndPair,
                    (const at::Tensor& input, detail::OptionalState hx = {}),
                    (const at::Tensor&, detail::OptionalState), (*this, input, std::move(hx)));
TESSERA_NN_DEFAULTS(RNNCell, at::Tensor, (const at::Tensor& input, const at::Tensor& hx = {}),
                    (const at::Tensor&, const at::Tensor&), (*this, input, hx));
TESSERA_NN_DEFAULTS(GRUCell, at::Tensor, (const at::Tensor& input, const at::Tensor& hx = {}),
                    (const at::Tensor&, const at::Tensor&), (*this, input, hx));
TESSERA_NN_DEFAULTS(LSTMCell, detail::Pair,
                    (const at::Tensor& input, detail::OptionalState hx = {}),
                    (const at::Tensor&, detail::OptionalState), (*this, input, std::move(hx)));

TESSERA_NN_DEFAULTS(EmbeddingBag, at::Tensor,
                    (const at::Tensor& input, const at::Tensor& offsets = {},
                     const at::Tensor& per_sample_weights = {}),
                    (const at::Tensor&, const at::Tensor&, const at::Tensor&),
                    (*this, input, offsets, per_sample_weights));
TESSERA_NN_DEFAULTS(MultiheadAttention, detail::Pair,
                    (const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const at::Tensor& key_padding_mask = {}, bool need_weights = true,
                     const at::Tensor& attn_mask = {}, bool average_attn_weights = true),
                    (const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                     bool, const at::Tensor&, bool),
                    (*this, query, key, value, key_padding_mask, need_weights, attn_mask,
                     average_attn_weights));

#define TESSERA_NN_ENCODER(Name)                                                 \
  TESSERA_NN_DEFAULTS(Name, at::Tensor,                                          \
                      (const at::Tensor& src, const at::Tensor& src_mask = {},   \
                       const at::Tensor& src_key_padding_mask = {}),             \
                      (const at::Tensor&, const at::Tensor&, const at::Tensor&), \
                      (*this, src, src_mask, src_key_padding_mask))
TESSERA_NN_ENCODER(TransformerEncoder);
TESSERA_NN_ENCODER(TransformerEncoderLayer);
#undef TESSERA_NN_ENCODER

// The layer takes its target by value, the stack of layers by reference.
#define TESSERA_NN_DECODER(Name, Target)                                                   \
  TESSERA_NN_DEFAULTS(                                                                     \
      Name, at::Tensor,                                                                    \
      (Target tgt, const at::Tensor& memory, const at::Tensor& tgt_mask = {},              \
       const at::Tensor& memory_mask = {}, const at::Tensor& tgt_key_padding_mask = {},    \
       const at::Tensor& memory_key_padding_mask = {}),                                    \
      (Target, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, \
       const at::Tensor&),                                                                 \
      (*this, tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask))
TESSERA_NN_DECODER(TransformerDecoder, const at::Tensor&);
TESSERA_NN_DECODER(TransformerDecoderLayer, at::Tensor);
#undef TESSERA_NN_DECODER

TESSERA_NN_DEFAULTS(Transformer, at::Tensor,
                    (const at::Tensor& src, const at::Tensor& tgt, const at::Tensor& src_mask = {},
                     const at::Tensor& tgt_mask = {}, const at::Tensor& memory_mask = {},
                     const at::Tensor& src_key_padding_mask = {},
                     const at::Tensor& tgt_key_padding_mask = {},
                     const at::Tensor& memory_key_padding_mask = {}),
                    (const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                     const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&),
                    (*this, src, tgt, src_mask, tgt_mask, memory_mask, src_key_padding_mask,
                     tgt_key_padding_mask, memory_key_padding_mask));
#undef TESSERA_NN_DEFAULTS

}  // namespace tessera::nn
