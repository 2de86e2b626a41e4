#include <tessera/nn/hook_point.h>

#include "nn/module_hooks.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

namespace tessera::nn {
namespace {

// libtorch keeps a module's name in a private member and makes it from typeid, which would say
// Hooked<…>. An explicit instantiation may name private members; this one hands out a pointer to
// it.
using Name = std::optional<std::string> torch::nn::Module::*;
Name name_member();
template <Name kMember>
struct Reveal {
  friend Name name_member() { return kMember; }
};
template struct Reveal<&torch::nn::Module::name_>;

}  // namespace

std::string detail::class_name(const std::type_info& type) { return c10::demangle(type.name()); }

void name_after(torch::nn::Module& module, const std::type_info& type) {
  auto& name = module.*name_member();
  if (!name) name = detail::class_name(type);
}

std::string name_of(const torch::nn::Module& module) { return module.name(); }

void detail::refuse_clone(const std::string& name, const char* why) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "clone_module: expected a module that can be cloned, but ",
                              name, " ", why,
                              "; build a second one and copy the values with load_state_dict");
}

void detail::refuse_null_module() {
  TORCH_CHECK_VALUE(false,
                    "expected a module, got an empty holder or a null pointer; make the "
                    "module first");
}

void detail::refuse_replay(const char* what) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "replay: expected arguments that can be copied, but a call of ", c10::demangle(what),
      " has one that can't; pass it by reference to "
      "something the module keeps, or checkpoint a smaller part");
}

void detail::refuse_stand_in(const char* what) {
  TORCH_CHECK_TYPE(false,
                   "expected a forward that returns one tensor where another function is to ",
                   "run in its place, but that of ", c10::demangle(what),
                   " returns something else; replace the modules inside of it");
}

}  // namespace tessera::nn
