// Modules that can't be wrapped: with one of the macros REFUSED_… defined, this must not compile.
#include <tessera/nn.h>

struct GoodImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x) { return x; }
  at::Tensor encode(at::Tensor x) { return x; }
};
TESSERA_MODULE(Good);
#ifdef REFUSED_LATE
int size_of_good() { return sizeof(Good::Impl); }
#endif
TESSERA_MODULE_METHOD(Good, encode);

#ifdef REFUSED_OVERLOADED
struct OverloadedImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x) { return x; }
  at::Tensor forward(at::Tensor x, at::Tensor y) { return x + y; }
};
TESSERA_MODULE(Overloaded);
#endif

#ifdef REFUSED_TEMPLATE
struct GenericImpl : torch::nn::Module {
  template <class T>
  T forward(T x) {
    return x;
  }
};
TESSERA_MODULE(Generic);
#endif

#ifdef REFUSED_REFERENCE
struct ReferenceImpl : torch::nn::Module {
  const at::Tensor& forward(const at::Tensor& x) { return x; }
};
TESSERA_MODULE(Reference);
void call(Reference& module, at::Tensor& x) { module(x); }
#endif
