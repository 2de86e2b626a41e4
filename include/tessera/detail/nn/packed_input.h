#pragma once

#include <tessera/nn/methods.h>

#include <torch/csrc/api/include/torch/nn/modules/adaptive.h>
#include <torch/csrc/api/include/torch/nn/modules/rnn.h>

/// torch::nn's own argument and result types, and the second entry point of its recurrent modules.
namespace tessera::nn {

using torch::nn::utils::rnn::PackedSequence;

template <class Visit>
void tessera_tensors(PackedSequence& sequence, Visit&& visit) {
  auto packed = sequence.data();
  visit(packed);
  if (packed.is_same(sequence.data())) return;
  sequence = PackedSequence(packed, sequence.batch_sizes(), sequence.sorted_indices(),
                            sequence.unsorted_indices());
}

template <class Visit>
void tessera_tensors(torch::nn::ASMoutput& result, Visit&& visit) {
  visit(result.output);
}

namespace detail {

template <class Base, class Impl, class State>
class WithPackedInput : public Base {
  struct Entry {
    static auto call(Base& self, const PackedSequence& input, State state) {
      return self.Impl::forward_with_packed_input(input, std::move(state));
    }
    static auto enter(Base& self, const PackedSequence& input, State state) {
      return static_cast<WithPackedInput&>(self).forward_with_packed_input(input, std::move(state));
    }
  };

 public:
  using Base::Base;
  auto forward_with_packed_input(const PackedSequence& input, State state = {}) {
    using Method = decltype(&Impl::forward_with_packed_input);
    return run_method<Entry, Method>(static_cast<Base&>(*this), input, std::move(state));
  }
};

#define TESSERA_NN_PACKED(Name, State)                                 \
  template <>                                                          \
  struct MethodsOf<torch::nn::Name##Impl> {                            \
    template <class Base>                                              \
    using Apply = WithPackedInput<Base, torch::nn::Name##Impl, State>; \
  }
TESSERA_NN_PACKED(RNN, at::Tensor);
TESSERA_NN_PACKED(GRU, at::Tensor);
using LstmState = std::optional<std::tuple<at::Tensor, at::Tensor>>;
TESSERA_NN_PACKED(LSTM, LstmState);
#undef TESSERA_NN_PACKED

}  // namespace detail
}  // namespace tessera::nn
