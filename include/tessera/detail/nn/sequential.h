#pragma once

#include <tessera/detail/nn/default_arguments.h>

#include <torch/csrc/api/include/torch/nn/modules/container/sequential.h>
#include <torch/csrc/api/include/torch/nn/modules/embedding.h>

/// Modules that are more than their Impl: Sequential, whose forward is a template, and the
/// embeddings, which have a second way to be made.
namespace tessera::nn {

template <>
constexpr auto detail::signature_of<torch::nn::SequentialImpl>() {
  return std::type_identity<void>{};
}

template <>
class Hooked<torch::nn::SequentialImpl> : public detail::HookedBase<torch::nn::SequentialImpl> {
 public:
  using HookedBase::HookedBase;

  template <class R = at::Tensor, class... A>
  R forward(A&&... inputs) {
    if (!tessera_hook_point().is_hooked()) [[likely]]
      return SequentialImpl::forward<R>(std::forward<A>(inputs)...);
    return detail::call_with_hooks<Hooked, Entry<R>, R>(
        *this, {}, detail::Types<detail::Given<A>...>{}, std::forward<A>(inputs)...);
  }

  /// Unlike torch::nn's, keeps the names.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<c10::Device>& device = std::nullopt) const override {
    detail::check_clonable(*this);
    auto copy = std::make_shared<Hooked>();
    const auto children = named_children();
    size_t index = 0;
    for (const auto& module : *this) copy->push_back(children[index++].key(), module.clone(device));
    return copy;
  }

 private:
  template <class R>
  struct Entry {
    template <class... A>
    static R call(Hooked& self, A&&... inputs) {
      return self.SequentialImpl::forward<R>(std::forward<A>(inputs)...);
    }
    template <class... A>
    static R enter(Hooked& self, A&&... inputs) {
      return self.forward<R>(std::forward<A>(inputs)...);
    }
  };
};

class Sequential : public HookedHolder<torch::nn::SequentialImpl> {
 public:
  using HookedHolder::HookedHolder;
  using Impl = Hooked<torch::nn::SequentialImpl>;
  Sequential() = default;
  /// With names: Sequential({{"up", Linear(4, 8)}, {"down", Linear(8, 4)}}).
  Sequential(std::initializer_list<torch::nn::NamedAnyModule> named_modules)
      : HookedHolder(std::make_shared<Impl>(named_modules)) {}
};

#define TESSERA_NN_EMBEDDING(Name)                                                            \
  using torch::nn::Name##Impl;                                                                \
  class Name : public HookedHolder<Name##Impl> {                                              \
   public:                                                                                    \
    using HookedHolder<Name##Impl>::HookedHolder;                                             \
    using Impl = Hooked<Name##Impl>;                                                          \
    static Name from_pretrained(const at::Tensor& embeddings,                                 \
                                const torch::nn::Name##FromPretrainedOptions& options = {}) { \
      return std::make_shared<Impl>(*torch::nn::Name::from_pretrained(embeddings, options));  \
    }                                                                                         \
  }
TESSERA_NN_EMBEDDING(Embedding);
TESSERA_NN_EMBEDDING(EmbeddingBag);
#undef TESSERA_NN_EMBEDDING

}  // namespace tessera::nn
