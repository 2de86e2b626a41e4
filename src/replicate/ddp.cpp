#include <tessera/replicate/ddp.h>

#include "replicate/state_impl.h"

namespace tessera::detail {

WrappedCalls::WrappedCalls(torch::nn::Module& module,
                           const DistributedDataParallelOptions& options) {
  ReplicateOptions same{.broadcast_buffers = options.broadcast_buffers,
                        .init_sync = options.init_sync,
                        .group = options.group,
                        .mesh = options.mesh,
                        .bucket_cap_mb = options.bucket_cap_mb,
                        .find_unused_parameters = options.find_unused_parameters,
                        .gradient_as_bucket_view = options.gradient_as_bucket_view,
                        .static_graph = options.static_graph,
                        .delay_all_reduce_named_params = options.delay_all_reduce_named_params,
                        .param_to_hook_all_reduce = options.param_to_hook_all_reduce,
                        .mixed_precision = options.mixed_precision};
  if (options.device_id) same.device_id = *options.device_id;
  state_ = replication::apply(module, std::move(same), /*is_wrapped=*/true);
}

void WrappedCalls::before(c10::function_ref<void(nn::TensorVisitor)> for_each_input) {
  static_cast<replication::State&>(*state_).before_forward(for_each_input);
}

void WrappedCalls::after(c10::function_ref<void(nn::TensorVisitor)> for_each_output) {
  static_cast<replication::State&>(*state_).after_forward(for_each_output);
}

}  // namespace tessera::detail
