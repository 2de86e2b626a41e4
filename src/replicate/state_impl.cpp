#include "replicate/state_impl.h"

#include "base/capture.h"
#include "base/devices.h"
#include "base/memory.h"
#include "comm/backends.h"
#include "comm/call_check.h"
#include "replicate/init.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>
#include <utility>

namespace tessera::detail::replicate {
namespace {

/// Where inputs are moved: not to the CPU.
std::optional<c10::Device> device_of(const c10::IValue& id) {
  const auto device = device_from_id("replicate", id);
  return device && device->is_cpu() ? std::nullopt : device;
}

std::vector<at::Tensor> frozen_in(const ManagedParameters& parameters) {
  std::vector<at::Tensor> frozen;
  for (const auto& tensor : parameters.tensors) {
    if (!tensor.requires_grad()) frozen.push_back(tensor);
  }
  return frozen;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

State::State(torch::nn::Module& module, ReplicateOptions options, Boundary boundary)
    : module_(module),
      options_(std::move(options)),
      boundary_(boundary),
      device_(device_of(options_.device_id)) {
  TORCH_CHECK_VALUE(!options_.group || !options_.mesh,
                    "replicate: expected a group or a mesh, got both; leave one out");
  TORCH_CHECK_VALUE(
      !options_.mesh || options_.mesh->ndim() == 1, "replicate: expected a 1-D mesh, got a ",
      options_.mesh ? options_.mesh->ndim() : 0, "-D one; slice it first, e.g. mesh[\"dp\"]");
  TORCH_CHECK_VALUE(!options_.bucket_cap_mb || *options_.bucket_cap_mb > 0,
                    "replicate: expected bucket_cap_mb to be positive, got ",
                    options_.bucket_cap_mb.value_or(0));
  TORCH_CHECK_VALUE(boundary != Boundary::None || !(device_ || options_.find_unused_parameters),
                    "replicate: expected a module whose calls can be hooked for ",
                    device_ ? "device_id" : "find_unused_parameters", ", got ", nn::name_of(module),
                    "; declare it with TESSERA_MODULE instead of TORCH_MODULE");
  TORCH_CHECK_VALUE(boundary != Boundary::None || !options_.mixed_precision,
                    "replicate: expected a module whose calls can be hooked for mixed_precision, "
                    "got ",
                    nn::name_of(module),
                    "; declare it with TESSERA_MODULE instead of TORCH_MODULE");
  TORCH_CHECK_VALUE(
      options_.delay_all_reduce_named_params.empty() == options_.param_to_hook_all_reduce.empty(),
      "replicate: expected delay_all_reduce_named_params and "
      "param_to_hook_all_reduce together, got one of them; name the parameter whose "
      "gradient sends the delayed ones");
  for (const auto& ignored : options_.ignored_modules) ignored_.insert(&*ignored);
}

State::~State() {
  end_watch();
  forget_managed(managed_);
}

void State::watch_gradients() {
  for (const auto& parameter : collect_parameters(module_, ignored_).managed.tensors) {
    watch_.push_back(register_post_accumulate_grad_hook(
        parameter, [weak = weak_from_this()](const at::Tensor& tensor) {
          if (const auto self = weak.lock()) self->refuse_gradient(tensor);
        }));
  }
}

void State::refuse_gradient(const at::Tensor& parameter) const {
  if (!requires_sync_ || is_managed(parameter)) return;
  // Since the watch began other functions may have taken over parts of the module.
  const auto [tensors, names, is_sparse] = collect_parameters(module_, ignored_).managed;
  for (size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK(
        !tensors[i].is_same(parameter), "replicate: parameter '", names[i], "' of ", module_name(),
        " got a gradient, but forward of the replicated ", module_name(),
        " was never called, so nothing would be averaged; call the module itself (not its parts, "
        "not a reference to its base class), name further entry points with TESSERA_MODULE_METHOD, "
        "or replicate each part; a backward that is to stay local goes into a NoSync scope");
  }
}

void State::end_watch() {
  for (auto& hook : watch_) hook.remove();
  watch_.clear();
}

std::vector<std::string> State::param_names() const {
  return engine_ ? engine_->reducer().parameters().names : std::vector<std::string>();
}

void State::check_parameters(const ManagedParameters& parameters) const {
  const auto& tensors = parameters.tensors;
  TORCH_CHECK_VALUE(!tensors.empty(), "replicate: expected ", nn::name_of(module_),
                    " to have a parameter that requires grad, but it has none; there is nothing to "
                    "average");
  for (size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK_VALUE(!tensors[i].is_meta(), "replicate: expected parameters with memory, but '",
                      parameters.names[i], "' of ", nn::name_of(module_),
                      " is on the meta device; build the model outside of MetaInit, which is for "
                      "fully_shard: that gives memory and values");
    TORCH_CHECK_VALUE(tensors[i].device().type() == tensors[0].device().type(),
                      "replicate: expected all parameters on one kind of device, but '",
                      parameters.names[0], "' is on ", tensors[0].device(), " and '",
                      parameters.names[i], "' on ", tensors[i].device(), "; move the module first");
  }
  TORCH_CHECK_VALUE(!device_ || device_->type() == tensors[0].device().type(),
                    "replicate: expected device_id to name the parameters' device, ",
                    tensors[0].device(), ", got ", device_ ? device_->str() : "",
                    "; leave it out for a module on the CPU");
}

void State::build() {
  const capture::HiddenMessage hidden;  // what happens once is no part of a step
  if (lowered_) lowered_->raise();
  TORCH_CHECK(options_.group || options_.mesh || is_initialized(),
              "replicate: expected tessera::init() to have been called, or a group or mesh in the "
              "options, before ",
              module_name(),
              " joins the other ranks; call tessera::init() at the start of the program");
  group_ = options_.group  ? options_.group
           : options_.mesh ? options_.mesh->group(0)
                           : default_group();
  auto [parameters, all] = collect_parameters(module_, ignored_);
  check_parameters(parameters);
  const auto device = parameters.tensors[0].device().type();
  const auto served = group_->getDeviceTypes();
  TORCH_CHECK_VALUE(std::find(served.begin(), served.end(), device) != served.end(),
                    "replicate: expected a group with a backend for ", device, " tensors, got '",
                    group_->getGroupDesc(), "'; make it with the backend \"auto\"");
  if (options_.broadcast_buffers) buffers_ = collect_buffers(module_, ignored_);
  if (options_.init_sync) {
    verify_parameters(all, describe_options(), group_);
    broadcast_values(all.tensors, group_);
    broadcast_values(buffers_, group_);
  }
  begin_precision(all);  // before the reducer: its hooks are to see gradients that are cast
  auto together = delayed_in(parameters);
  // A device needs no core of the host to go on.
  const bool has_help = !comm::shares_memory(*group_, device) || comm::has_cores_to_spare(group_);
  // All ranks alike, or collectives of several engines would come in different orders.
  const bool in_background = agree(options_.overlap.value_or(has_help), group_);
  const bool learns_order = options_.static_graph || !options_.find_unused_parameters;
  const auto reducer =
      std::make_shared<Reducer>(std::move(parameters),
                                IterationSettings{.module_name = nn::name_of(module_),
                                                  .group = group_,
                                                  .find_unused = options_.find_unused_parameters,
                                                  .static_graph = options_.static_graph,
                                                  .has_forward = boundary_ != Boundary::None,
                                                  .frozen = frozen_in(all)},
                                BucketsSettings{.limits = limits_of(options_.bucket_cap_mb),
                                                .views = options_.gradient_as_bucket_view,
                                                .in_background = in_background,
                                                .learns_order = learns_order,
                                                .together = std::move(together)});
  remember_managed(reducer->parameters(), nn::name_of(module_));
  managed_ = reducer->parameters().tensors;
  frozen_ = frozen_in(all);
  if (auto hook = hook_for_reducer()) reducer->set_hook(std::move(hook));
  reducer->require_sync(requires_sync_);
  reducer->attach();
  if (engine_)
    engine_->replace(reducer);
  else
    engine_ = std::make_unique<Engine>(reducer);
  end_watch();
  if (device_) engine_->device_ids = {device_->index()};
  if (device == c10::DeviceType::CPU) keep_memory_warm();
}

void State::follow_frozen() {
  const auto is_trained = [](const auto& tensor) { return tensor.requires_grad(); };
  const auto trained = std::count_if(managed_.begin(), managed_.end(), is_trained);
  const bool is_thawed = std::any_of(frozen_.begin(), frozen_.end(), is_trained);
  // If all are frozen no gradient comes: a module that another one is trained through.
  const bool is_frozen = trained != 0 && std::cmp_less(trained, managed_.size());
  if (!is_thawed && !is_frozen) return;
  TORCH_CHECK(!announce_, "replicate: parameters of ", module_name(),
              " were frozen or thawed since a Join began; change requires_grad outside of it");
  const auto frozen = std::find_if_not(managed_.begin(), managed_.end(), is_trained);
  const auto& names = engine_->reducer().parameters().names;
  // For ranks that have not changed theirs.
  const comm::CallNote note(
      frozen == managed_.end()
          ? std::string("since a parameter was thawed")
          : "since '" + names[static_cast<size_t>(frozen - managed_.begin())] + "' was frozen");
  forget_managed(std::exchange(managed_, {}));
  build();
}

void State::set_syncs_gradients(bool syncs) {
  requires_sync_ = syncs;
  if (engine_) engine_->reducer().require_sync(syncs);
}

void State::begin_backward(const std::vector<at::Tensor>& outputs) {
  set_syncs_gradients(true);
  if (boundary_ == Boundary::None || !engine_) return;
  auto& reducer = engine_->reducer();
  reducer.begin(/*synchronise=*/true,
                searches_unused() ? find_unused(outputs, reducer.parameters().tensors)
                                  : std::vector<size_t>(),
                /*forward_seconds=*/0, /*graph=*/nullptr);
}

void State::set_hook(CommHook hook) {
  TORCH_CHECK_VALUE(hook, "register_comm_hook: expected a function, got an empty one");
  TORCH_CHECK(!hook_, "register_comm_hook: ", nn::name_of(module_), " already has a comm hook");
  TORCH_CHECK(!engine_ || !engine_->reducer().has_started(),
              "register_comm_hook: expected to be called before the first backward of ",
              nn::name_of(module_), ", which has had one");
  hook_ = std::move(hook);
  if (engine_) engine_->reducer().set_hook(hook_for_reducer());
}

std::string State::describe_options() const {
  std::ostringstream out;
  out << "bucket_cap_mb "
      << (options_.bucket_cap_mb ? std::to_string(*options_.bucket_cap_mb) : "none")
      << ", find_unused_parameters " << options_.find_unused_parameters
      << ", gradient_as_bucket_view " << options_.gradient_as_bucket_view << ", static_graph "
      << options_.static_graph << ", broadcast_buffers " << options_.broadcast_buffers
      << ", comm hook " << (hook_ ? "yes" : "no");
  if (const auto& dtypes = options_.mixed_precision) {
    const auto name = [](const auto& dtype) { return dtype ? c10::toString(*dtype) : "none"; };
    out << ", mixed_precision " << name(dtypes->param_dtype) << " " << name(dtypes->reduce_dtype)
        << " " << name(dtypes->buffer_dtype);
  }
  for (const auto& name : options_.delay_all_reduce_named_params)
    out << ", delayed '" << name << "'";
  return out.str();
}

void State::move_inputs(c10::function_ref<void(nn::TensorVisitor)> for_each_input) const {
  for_each_input([&](at::Tensor& tensor) {
    if (tensor.defined()) tensor = tensor.to(*device_, /*non_blocking=*/true);
  });
}

void State::before_forward(c10::function_ref<void(nn::TensorVisitor)> for_each_input) {
  if (device_) move_inputs(for_each_input);
  if (is_in_backward()) {  // a checkpoint computes again what has been counted
    if (lowered_) lower_parameters(for_each_input);
    return;
  }
  if (!engine_) build();
  if (c10::GradMode::is_enabled()) {
    engine_->reducer().check_finished();
    follow_frozen();
  }
  if (lowered_) lower_parameters(for_each_input);
  if (!c10::GradMode::is_enabled()) return;
  if (requires_sync_) sync_buffers();
  forward_began_ = std::chrono::steady_clock::now();
}

void State::sync_buffers() {
  int source = 0;
  if (announce_ && (announces_forward_ || !buffers_.empty())) {
    source = announce_(Step::Forward, 0).first;
  }
  if (buffers_.empty()) return;
  if (announce_) {
    capture::tell([&](capture::Observer& observer) {
      observer.give_up("inside a Join, buffers of " + module_name() + " come from varying ranks");
    });
  }
  broadcast_values(buffers_, group_, source);
}

// The backward that comes through the outputs is the outermost: others run inside it.
void State::watch_outputs(c10::function_ref<void(nn::TensorVisitor)> for_each_output) {
  for_each_output([&](at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.requires_grad()) return;
    tensor.register_hook([weak = engine_->reducer().weak_from_this()](const at::TensorBase&) {
      if (const auto reducer = weak.lock()) reducer->expect_end_of_backward();
    });
  });
}

// Hooks live as long as the graph that they are in.
std::shared_ptr<void> State::watch_graph(
    c10::function_ref<void(nn::TensorVisitor)> for_each_output) const {
  if (!module_.is_training() || capture::observer() != nullptr) return nullptr;
  std::shared_ptr<void> graph;
  for_each_output([&](at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.grad_fn()) return;
    if (!graph) graph = std::make_shared<char>();
    tensor.register_hook([graph](const at::TensorBase&) {});
  });
  return graph;
}

void State::after_forward(c10::function_ref<void(nn::TensorVisitor)> for_each_output) {
  if (lowered_ && std::exchange(lowered_here_, false)) {
    bool has_backward = false;
    for_each_output([&](at::Tensor& tensor) {
      has_backward = has_backward || (tensor.defined() && tensor.requires_grad());
    });
    if (!has_backward) lowered_->raise();
  }
  if (is_in_backward() || !engine_ || !c10::GradMode::is_enabled()) return;
  std::vector<size_t> unused;
  auto& reducer = engine_->reducer();
  if (requires_sync_ && searches_unused()) {
    std::vector<at::Tensor> outputs;
    for_each_output([&](at::Tensor& tensor) { outputs.push_back(tensor); });
    unused = find_unused(outputs, reducer.parameters().tensors);
  }
  reducer.begin(requires_sync_, unused, seconds_since(forward_began_),
                requires_sync_ ? watch_graph(for_each_output) : nullptr);
  if (requires_sync_ && reducer.asks_for_end_of_backward()) watch_outputs(for_each_output);
}

void State::require_unjoined() const {
  TORCH_CHECK(!announce_, "Join: expected ", nn::name_of(module_),
              " not to be inside another Join; end that one first");
}

void State::ensure_built() {
  if (!engine_) build();
}

const Group& State::join_group() {
  if (!join_group_) {
    const auto served = group_->getDeviceTypes();
    const bool has_cpu = std::find(served.begin(), served.end(), c10::kCPU) != served.end();
    join_group_ =
        new_group(ranks(group_),
                  {.backend = has_cpu ? std::nullopt : std::optional<BackendOption>(Backend::Auto),
                   .description = "roll calls of Join"});
  }
  return join_group_;
}

void State::join(Announce announce, bool announces_forward) {
  engine_->reducer().announce_by(announce);
  announce_ = std::move(announce);
  announces_forward_ = announces_forward;
}

void State::end_join() noexcept {
  announce_ = {};
  engine_->reducer().announce_by({});
}

void State::shadow(Step step, size_t bucket, int first) {
  if (step == Step::Forward)
    broadcast_values(buffers_, group_, first);
  else
    engine_->reducer().shadow(step, bucket, first);
}

void State::take_values_of(int source) {
  broadcast_values(collect_parameters(module_, ignored_).all.tensors, group_, source);
  broadcast_values(collect_buffers(module_, ignored_), group_, source);
}

}  // namespace tessera::detail::replicate
