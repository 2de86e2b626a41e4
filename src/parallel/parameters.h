#pragma once

#include <tessera/dtensor.h>
#include <tessera/parallel/styles.h>

#include <string>

/// Parameters of one module that becomes tensor parallel.
namespace tessera::parallel {

struct ParameterLayout {
  const char* name;  // in the module, e.g. "weight"
  Placement placement;
  int64_t packed = 1;  // parts that each rank gets its share of
};

/// Distributes a parameter in place; nothing if the module has none of that name (a bias left out).
/// One that another module shares and has distributed stays as it is; throws if that is otherwise
/// than asked for here. `used`: the member that forward reads, which may be another tensor than the
/// registered one if the user has tied it to another module's; then both are distributed.
void distribute_parameter(const StyleTarget& target, const char* style,
                          const ParameterLayout& layout, const at::Tensor& used = {});

/// Every parameter of the module and its submodules becomes Replicate.
void replicate_parameters(const StyleTarget& target, const char* style);

/// Throws unless `features` are `heads` times something, and ranks can have equally many of them.
void check_heads(const StyleTarget& target, const char* style, int64_t features, int64_t heads,
                 int64_t packed = 1);

}  // namespace tessera::parallel
