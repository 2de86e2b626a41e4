#include <tessera/mesh.h>

#include "comm/backends.h"
#include "comm/context.h"
#include "comm/type_names.h"
#include "mesh/layout.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>

// Note [slices look at the root]
// Every mesh is described by the mesh it was sliced from: each of its dimensions runs over some of
// the root's. So a slice of a slice needs no rules of its own, order and overlap are seen from the
// root's dimension numbers, and what flatten() names is kept in one place. The root keeps
// dimensions, not meshes: those would own it in turn.

namespace tessera {

using mesh::Axis;
using mesh::Layout;

class DeviceMesh::Impl {
 public:
  struct Dimension {
    Axis axis;    // of the root
    Group group;  // null on a rank outside the mesh
  };

  c10::DeviceType device_type = c10::DeviceType::CPU;
  Layout layout;
  std::vector<std::string> dim_names;  // empty, or one per dimension
  std::vector<Dimension> dimensions;
  int rank = 0;                                    // in the world, of the rank that made the mesh
  std::optional<std::vector<int64_t>> coordinate;  // of that rank
  std::shared_ptr<const Impl> root;                // null: this is the root
  size_t hash = 0;

  mutable std::mutex mutex;                            // guards what follows
  mutable std::map<std::string, Dimension> flattened;  // by name; of a root
};

namespace {

using Impl = DeviceMesh::Impl;
using Dimension = Impl::Dimension;
using ImplPtr = std::shared_ptr<const Impl>;

const ImplPtr& root_of(const ImplPtr& impl) { return impl->root ? impl->root : impl; }

std::string to_text(const Impl& impl) {
  std::string text =
      "DeviceMesh(" + c10::DeviceTypeName(impl.device_type, /*lower_case=*/true) + ", ";
  for (size_t dim = 0; dim < impl.layout.shape.size(); ++dim) {
    if (dim > 0) text += " x ";
    if (!impl.dim_names.empty()) text += impl.dim_names[dim] + "=";
    text += std::to_string(impl.layout.shape[dim]);
  }
  return text + ", " + mesh::to_text(impl.layout) + ")";
}

void set_hash(Impl& impl) {
  impl.hash = c10::get_hash(impl.device_type, impl.layout.shape, impl.layout.ranks, impl.dim_names);
}

Group group_of(const std::vector<int64_t>& ranks) {
  return comm::shared_group(std::vector<int>(ranks.begin(), ranks.end()));
}

Layout read_ranks(const at::Tensor& ranks) {
  TORCH_CHECK_VALUE(ranks.defined(),
                    "DeviceMesh: expected an integer tensor of ranks, got an undefined tensor; ",
                    "pass e.g. torch::arange(4).view({2, 2})");
  TORCH_CHECK_TYPE(c10::isIntegralType(ranks.scalar_type(), /*includeBool=*/false),
                   "DeviceMesh: expected an integer tensor of ranks, got one of ",
                   comm::name_of_dtype(ranks.scalar_type()), "; convert it with to(torch::kLong)");
  TORCH_CHECK_VALUE(ranks.dim() > 0,
                    "DeviceMesh: expected ranks with at least one dimension, got a scalar tensor; ",
                    "for a mesh of one rank pass {rank}");
  const at::Tensor host = ranks.to(at::kCPU, at::kLong).contiguous();
  const int64_t* first = host.const_data_ptr<int64_t>();
  return {host.sizes().vec(), std::vector<int64_t>(first, first + host.numel())};
}

ImplPtr make_root(const char* caller, c10::DeviceType device_type, Layout layout,
                  std::vector<std::string> dim_names) {
  const auto context = comm::require_context(caller);
  TORCH_CHECK_VALUE(device_type == c10::DeviceType::CPU || device_type == c10::DeviceType::CUDA,
                    caller, ": expected a mesh of cpu or cuda, got ",
                    c10::DeviceTypeName(device_type, /*lower_case=*/true),
                    "; pass the type of the device that the ranks compute on");
  TORCH_CHECK_VALUE(
      device_type != c10::DeviceType::CUDA || at::hasCUDA() ||
          comm::is_fake(context->backend, caller),
      caller,
      ": expected a device type of this machine, got cuda, but libtorch finds no GPU; pass ",
      "torch::kCPU, or run with a CUDA build of libtorch where a GPU is visible");
  mesh::check_ranks(caller, layout.ranks, context->world.world_size);
  mesh::check_dim_names(caller, dim_names, static_cast<int64_t>(layout.shape.size()));
  auto impl = std::make_shared<Impl>();
  impl->device_type = device_type;
  impl->layout = std::move(layout);
  impl->dim_names = std::move(dim_names);
  impl->rank = context->world.rank;
  impl->coordinate = mesh::find_coordinate(impl->layout, impl->rank);
  // Every rank makes its groups in this order, or two ranks would wait for each other in different
  // groups.
  for (size_t dim = 0; dim < impl->layout.shape.size(); ++dim) {
    Dimension dimension = {{dim}, {}};
    if (impl->coordinate)
      dimension.group = group_of(slice(impl->layout, *impl->coordinate, {{dim}}).ranks);
    impl->dimensions.push_back(std::move(dimension));
  }
  set_hash(*impl);
  return impl;
}

/// This rank's index in `axis`; it is in the mesh.
int64_t index_along(const Impl& root, const Axis& axis) {
  int64_t index = 0;
  for (size_t dim : axis) index = index * root.layout.shape[dim] + (*root.coordinate)[dim];
  return index;
}

ImplPtr make_slice(const ImplPtr& root, std::vector<std::string> dim_names,
                   std::vector<Dimension> dimensions) {
  std::vector<Axis> axes;
  for (const Dimension& dimension : dimensions) axes.push_back(dimension.axis);
  auto impl = std::make_shared<Impl>();
  impl->device_type = root->device_type;
  impl->layout =
      slice(root->layout,
            root->coordinate.value_or(std::vector<int64_t>(root->layout.shape.size())), axes);
  impl->dim_names = std::move(dim_names);
  impl->dimensions = std::move(dimensions);
  impl->rank = root->rank;
  if (root->coordinate) {
    impl->coordinate.emplace();
    for (const Axis& axis : axes) impl->coordinate->push_back(index_along(*root, axis));
  }
  impl->root = root;
  set_hash(*impl);
  return impl;
}

/// The dimension called `name`: the mesh's own or, of a root, a flattened one.
Dimension find_dimension(const char* caller, const Impl& impl, std::string_view name) {
  const auto own = std::find(impl.dim_names.begin(), impl.dim_names.end(), name);
  if (own != impl.dim_names.end()) return impl.dimensions[own - impl.dim_names.begin()];
  const std::lock_guard lock(impl.mutex);
  const auto flat = impl.flattened.find(std::string(name));
  if (flat != impl.flattened.end()) return flat->second;

  std::vector<std::string> known = impl.dim_names;
  for (const auto& [flat_name, dimension] : impl.flattened) known.push_back(flat_name);
  TORCH_CHECK_VALUE(!known.empty(), caller, ": expected a mesh with dim_names, got ", to_text(impl),
                    " asked for \"", name, "\"; name the dimensions when you make the mesh");
  TORCH_CHECK_VALUE(false, caller, ": expected one of ", mesh::to_text(known), ", got \"", name,
                    "\"; these are the dimensions of ", to_text(impl),
                    impl.root ? ", flattened ones are found in its root()" : "");
}

/// Dimensions of a slice stand in the root's order and share none of its dimensions.
void check_order(const std::vector<std::string>& dim_names,
                 const std::vector<Dimension>& dimensions) {
  Axis all;
  for (const Dimension& dimension : dimensions)
    all.insert(all.end(), dimension.axis.begin(), dimension.axis.end());
  const bool ascending = std::is_sorted(all.begin(), all.end());
  std::sort(all.begin(), all.end());
  TORCH_CHECK_VALUE(std::adjacent_find(all.begin(), all.end()) == all.end(),
                    "DeviceMesh::operator[]: expected dimensions that do not overlap, got ",
                    mesh::to_text(dim_names),
                    "; a dimension can be asked for once, by itself or inside a flattened one");
  TORCH_CHECK_VALUE(ascending,
                    "DeviceMesh::operator[]: expected dimensions in the mesh's order, got ",
                    mesh::to_text(dim_names), "; list them as in dim_names()");
}

void check_inside(const char* caller, const Impl& impl) {
  TORCH_CHECK_VALUE(impl.coordinate.has_value(), caller, ": expected a rank of the mesh, got rank ",
                    impl.rank, ", which is outside ", to_text(impl),
                    "; call it only where coordinate() has a value");
}

const Dimension& only_dimension(const char* caller, const Impl& impl) {
  TORCH_CHECK_VALUE(impl.dimensions.size() == 1, caller,
                    ": expected a 1-D mesh when no mesh_dim is given, got ", to_text(impl),
                    "; pass a mesh_dim or slice the mesh first");
  return impl.dimensions.front();
}

const Dimension& dimension_at(const char* caller, const Impl& impl, int64_t mesh_dim) {
  return impl.dimensions[mesh::wrap_mesh_dim(caller, mesh_dim,
                                             static_cast<int64_t>(impl.dimensions.size()))];
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : "_") + name;
  return text;
}

void check_flattened(const std::string& name, const Axis& asked, const Axis& known) {
  TORCH_CHECK_VALUE(asked == known, "DeviceMesh::flatten: expected a name of its own, got \"", name,
                    "\", which other dimensions were flattened to; choose another name");
}

/// The dimension that `root` knows by this name; none if it has not been flattened yet.
std::optional<Dimension> find_flattened(const Impl& root, const std::string& name,
                                        const Axis& axis) {
  const std::lock_guard lock(root.mutex);
  const auto found = root.flattened.find(name);
  if (found == root.flattened.end()) return std::nullopt;
  check_flattened(name, axis, found->second.axis);
  return found->second;
}

}  // namespace

DeviceMesh::DeviceMesh(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

DeviceMesh::DeviceMesh(c10::DeviceType device_type, const at::Tensor& ranks,
                       std::vector<std::string> dim_names)
    : DeviceMesh(make_root("DeviceMesh", device_type, read_ranks(ranks), std::move(dim_names))) {}

DeviceMesh::DeviceMesh(c10::DeviceType device_type, std::vector<int64_t> ranks,
                       std::vector<std::string> dim_names)
    : DeviceMesh(make_root("DeviceMesh", device_type,
                           Layout{{static_cast<int64_t>(ranks.size())}, ranks},
                           std::move(dim_names))) {}

DeviceMesh::DeviceMesh(c10::DeviceType device_type, std::initializer_list<int64_t> ranks,
                       std::vector<std::string> dim_names)
    : DeviceMesh(device_type, std::vector<int64_t>(ranks), std::move(dim_names)) {}

DeviceMesh init_device_mesh(c10::DeviceType device_type, const std::vector<int64_t>& shape,
                            std::vector<std::string> dim_names) {
  constexpr const char* kCaller = "init_device_mesh";
  const int64_t world_size = comm::require_context(kCaller)->world.world_size;
  mesh::check_shape(kCaller, shape, world_size);
  std::vector<int64_t> ranks(world_size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return DeviceMesh(
      make_root(kCaller, device_type, {shape, std::move(ranks)}, std::move(dim_names)));
}

DeviceMesh DeviceMesh::operator[](std::string_view dim_name) const {
  return (*this)[std::vector<std::string>{std::string(dim_name)}];
}

DeviceMesh DeviceMesh::operator[](std::initializer_list<std::string_view> dim_names) const {
  return (*this)[std::vector<std::string>(dim_names.begin(), dim_names.end())];
}

DeviceMesh DeviceMesh::operator[](const std::vector<std::string>& dim_names) const {
  TORCH_CHECK_VALUE(!dim_names.empty(),
                    "DeviceMesh::operator[]: expected at least one dimension name, got none; ",
                    "ask for dimensions of ", to_text(*impl_));
  if (dim_names == impl_->dim_names) return *this;
  std::vector<Dimension> dimensions;
  for (const std::string& name : dim_names) {
    dimensions.push_back(find_dimension("DeviceMesh::operator[]", *impl_, name));
  }
  check_order(dim_names, dimensions);
  return DeviceMesh(make_slice(root_of(impl_), dim_names, std::move(dimensions)));
}

DeviceMesh DeviceMesh::flatten(const std::string& dim_name) const {
  const std::string name = dim_name.empty() ? joined(impl_->dim_names) : dim_name;
  TORCH_CHECK_VALUE(!name.empty(), "DeviceMesh::flatten: expected a name, since ", to_text(*impl_),
                    " has no dim_names to join, got none; pass one, e.g. flatten(\"all\")");
  if (impl_->dim_names == std::vector<std::string>{name}) return *this;
  const ImplPtr& root = root_of(impl_);
  TORCH_CHECK_VALUE(
      std::find(root->dim_names.begin(), root->dim_names.end(), name) == root->dim_names.end(),
      "DeviceMesh::flatten: expected a name of its own, got \"", name,
      "\", which is a dimension of ", to_text(*root), "; choose another name");
  Axis axis;
  for (const Dimension& dimension : impl_->dimensions) {
    axis.insert(axis.end(), dimension.axis.begin(), dimension.axis.end());
  }
  std::optional<Dimension> dimension = find_flattened(*root, name, axis);
  if (!dimension) {
    // Not under the lock: making a group waits for other ranks, and other threads may slice the
    // mesh meanwhile.
    dimension = {axis, impl_->coordinate ? group_of(impl_->layout.ranks) : Group()};
    const std::lock_guard lock(root->mutex);
    check_flattened(name, axis, root->flattened.try_emplace(name, *dimension).first->second.axis);
  }
  return DeviceMesh(make_slice(root, {name}, {*dimension}));
}

c10::DeviceType DeviceMesh::device_type() const { return impl_->device_type; }

int64_t DeviceMesh::ndim() const { return static_cast<int64_t>(impl_->layout.shape.size()); }

int64_t DeviceMesh::size() const { return static_cast<int64_t>(impl_->layout.ranks.size()); }

int64_t DeviceMesh::size(int64_t mesh_dim) const {
  return impl_->layout.shape[mesh::wrap_mesh_dim("DeviceMesh::size", mesh_dim, ndim())];
}

std::vector<int64_t> DeviceMesh::shape() const { return impl_->layout.shape; }

at::Tensor DeviceMesh::ranks() const {
  at::Tensor ranks = at::empty(impl_->layout.shape, at::TensorOptions(at::kCPU).dtype(at::kLong));
  std::copy(impl_->layout.ranks.begin(), impl_->layout.ranks.end(),
            ranks.mutable_data_ptr<int64_t>());
  return ranks;
}

const std::vector<std::string>& DeviceMesh::dim_names() const { return impl_->dim_names; }

Group DeviceMesh::group() const {
  check_inside("DeviceMesh::group", *impl_);
  return only_dimension("DeviceMesh::group", *impl_).group;
}

Group DeviceMesh::group(int64_t mesh_dim) const {
  check_inside("DeviceMesh::group", *impl_);
  return dimension_at("DeviceMesh::group", *impl_, mesh_dim).group;
}

Group DeviceMesh::group(std::string_view dim_name) const {
  check_inside("DeviceMesh::group", *impl_);
  return find_dimension("DeviceMesh::group", *impl_, dim_name).group;
}

std::optional<std::vector<int64_t>> DeviceMesh::coordinate() const { return impl_->coordinate; }

int64_t DeviceMesh::local_rank() const {
  check_inside("DeviceMesh::local_rank", *impl_);
  return index_along(*root_of(impl_), only_dimension("DeviceMesh::local_rank", *impl_).axis);
}

int64_t DeviceMesh::local_rank(int64_t mesh_dim) const {
  check_inside("DeviceMesh::local_rank", *impl_);
  return index_along(*root_of(impl_),
                     dimension_at("DeviceMesh::local_rank", *impl_, mesh_dim).axis);
}

int64_t DeviceMesh::local_rank(std::string_view dim_name) const {
  check_inside("DeviceMesh::local_rank", *impl_);
  return index_along(*root_of(impl_),
                     find_dimension("DeviceMesh::local_rank", *impl_, dim_name).axis);
}

DeviceMesh DeviceMesh::root() const { return DeviceMesh(root_of(impl_)); }

bool operator==(const DeviceMesh& left, const DeviceMesh& right) {
  if (left.impl_ == right.impl_) return true;
  return left.impl_->hash == right.impl_->hash &&
         left.impl_->device_type == right.impl_->device_type &&
         left.impl_->layout == right.impl_->layout &&
         left.impl_->dim_names == right.impl_->dim_names;
}

std::ostream& operator<<(std::ostream& out, const DeviceMesh& mesh) {
  return out << to_text(*mesh.impl_);
}

namespace {

thread_local std::optional<DeviceMesh> mesh_in_force;

}  // namespace

MeshScope::MeshScope(DeviceMesh mesh) : before_(std::exchange(mesh_in_force, std::move(mesh))) {}
MeshScope::~MeshScope() { mesh_in_force = std::move(before_); }

std::optional<DeviceMesh> current_mesh() { return mesh_in_force; }

}  // namespace tessera

size_t std::hash<tessera::DeviceMesh>::operator()(const tessera::DeviceMesh& mesh) const {
  return mesh.impl_->hash;
}
