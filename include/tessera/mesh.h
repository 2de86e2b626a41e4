#pragma once

#include <tessera/comm.h>

#include <cstddef>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// An n-dimensional array of world ranks with one group per dimension: the ranks that differ from
/// this one in that coordinate alone. A cheap value; slices of a mesh share its groups.
class DeviceMesh {
 public:
  /// `ranks`: an integer tensor of any shape with distinct world ranks. Every rank of the world
  /// that appears in it calls this (others may), in the same order as other meshes; blocks until
  /// the groups exist.
  DeviceMesh(c10::DeviceType device_type, const at::Tensor& ranks,
             std::vector<std::string> dim_names = {});
  /// A 1-D mesh of these ranks.
  DeviceMesh(c10::DeviceType device_type, std::vector<int64_t> ranks,
             std::vector<std::string> dim_names = {});
  DeviceMesh(c10::DeviceType device_type, std::initializer_list<int64_t> ranks,
             std::vector<std::string> dim_names = {});

  /// The sub-mesh of these dimensions that contains this rank: mesh["tp"], mesh[{"dp", "tp"}], in
  /// the mesh's order. On the root mesh a name given to flatten() works too. On a rank outside the
  /// mesh: the first such sub-mesh.
  DeviceMesh operator[](std::string_view dim_name) const;
  DeviceMesh operator[](std::initializer_list<std::string_view> dim_names) const;
  DeviceMesh operator[](const std::vector<std::string>& dim_names) const;
  /// The 1-D mesh of all this mesh's ranks, named `dim_name` (default: the names joined by "_").
  /// Collective over the mesh the first time.
  DeviceMesh flatten(const std::string& dim_name = {}) const;

  c10::DeviceType device_type() const;
  int64_t ndim() const;
  /// Ranks in the whole mesh, or along one dimension (negative counts from the end).
  int64_t size() const;
  int64_t size(int64_t mesh_dim) const;
  std::vector<int64_t> shape() const;
  /// World ranks, shaped like the mesh.
  at::Tensor ranks() const;
  const std::vector<std::string>& dim_names() const;

  /// The group along a dimension; without an argument the mesh must be 1-D.
  Group group() const;
  Group group(int64_t mesh_dim) const;
  Group group(std::string_view dim_name) const;
  /// This rank's position; none if it is outside the mesh.
  std::optional<std::vector<int64_t>> coordinate() const;
  /// This rank's index along a dimension; an error outside the mesh.
  int64_t local_rank() const;
  int64_t local_rank(int64_t mesh_dim) const;
  int64_t local_rank(std::string_view dim_name) const;

  /// The mesh this one was sliced from; itself if none.
  DeviceMesh root() const;

  /// Same device type, ranks, shape and names.
  friend bool operator==(const DeviceMesh& left, const DeviceMesh& right);
  /// "DeviceMesh(cpu, dp=2 x tp=2, [[0, 1], [2, 3]])"; more than 64 ranks are abbreviated.
  friend std::ostream& operator<<(std::ostream& out, const DeviceMesh& mesh);

  class Impl;

 private:
  friend struct std::hash<DeviceMesh>;
  friend DeviceMesh init_device_mesh(c10::DeviceType device_type, const std::vector<int64_t>& shape,
                                     std::vector<std::string> dim_names);
  explicit DeviceMesh(std::shared_ptr<const Impl> impl);

  std::shared_ptr<const Impl> impl_;
};

/// A mesh of all ranks of the world, 0.. in row-major order. The product of `shape` is the world
/// size.
DeviceMesh init_device_mesh(c10::DeviceType device_type, const std::vector<int64_t>& shape,
                            std::vector<std::string> dim_names = {});

/// While it lives, functions of this thread that want a mesh and are given none take this one:
///   const MeshScope scope(mesh["tp"]);
///   parallelize_module(net, plan);
class MeshScope {
 public:
  explicit MeshScope(DeviceMesh mesh);
  ~MeshScope();
  MeshScope(const MeshScope&) = delete;
  MeshScope& operator=(const MeshScope&) = delete;

 private:
  std::optional<DeviceMesh> before_;
};

/// The mesh of the innermost MeshScope of this thread; none outside of any.
std::optional<DeviceMesh> current_mesh();

}  // namespace tessera

template <>
struct std::hash<tessera::DeviceMesh> {
  size_t operator()(const tessera::DeviceMesh& mesh) const;
};
