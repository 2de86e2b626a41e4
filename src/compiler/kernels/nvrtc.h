#pragma once

#include "compiler/kernels/kernels.h"

#include <memory>
#include <optional>
#include <string>

/// CUDA's compiler and driver, opened at run time: nothing here needs a header or a library of CUDA
/// to build, and compiling needs no GPU.
namespace tessera::compiler {

/// The run-time compiler: libnvrtc of $TESSERA_NVRTC, of the process, beside libtorch, or of a
/// toolkit.
class Nvrtc {
 public:
  /// Null: `why_not` says where it was looked for.
  static const Nvrtc* find(std::string* why_not);

  /// Machine code for GPUs of that architecture ("sm_90"). None: `why_not` is what it said.
  std::optional<std::string> compile(const std::string& source, const std::string& architecture,
                                     std::string* why_not) const;
  /// "13.0": another one may make other code.
  std::string version() const;

  struct Functions;
  explicit Nvrtc(const Functions& functions) : functions_(functions) {}

 private:
  const Functions& functions_;
};

/// Machine code that was loaded to a GPU; unloaded with the last owner.
class CudaModule {
 public:
  /// Null: `why_not`.
  static std::shared_ptr<CudaModule> load(const std::string& code, int device,
                                          std::string* why_not);
  ~CudaModule();
  CudaModule(const CudaModule&) = delete;
  CudaModule& operator=(const CudaModule&) = delete;

  /// A kernel by name; null if there is none.
  void* function(const std::string& name) const;
  /// Lets its blocks have so much shared memory beside their own; whether the GPU has it.
  static bool allow_shared(void* function, int64_t bytes);
  /// Queues it; throws what the driver says.
  static void launch(void* function, const Kernel::Grid& grid, void* stream, void** arguments);

 private:
  explicit CudaModule(void* module) : module_(module) {}
  void* module_;
};

/// "sm_90" of a GPU. None: `why_not`.
std::optional<std::string> architecture_of(int device, std::string* why_not);

}  // namespace tessera::compiler
