#include "compiler/kernels/nvrtc.h"

#include "base/environment.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <algorithm>
#include <filesystem>
#include <vector>

namespace tessera::compiler {
namespace {

namespace fs = std::filesystem;

/// The folder of libtorch's own libraries.
fs::path torch_libraries() {
  Dl_info found{};
  if (dladdr(reinterpret_cast<const void*>(&c10::GetExceptionString), &found) == 0) return {};
  std::error_code ignored;
  return fs::canonical(found.dli_fname, ignored).parent_path();
}

/// Files in `folder` whose name begins with `prefix`, the newest version first.
std::vector<std::string> libraries_in(const fs::path& folder, const std::string& prefix) {
  std::vector<std::string> found;
  std::error_code ignored;
  for (fs::directory_iterator entry(folder, ignored), end; !ignored && entry != end;
       entry.increment(ignored)) {
    if (entry->path().filename().string().starts_with(prefix)) found.push_back(entry->path());
  }
  std::sort(found.rbegin(), found.rend());
  return found;
}

/// Where libnvrtc may be, best first.
std::vector<std::string> candidates() {
  if (const auto chosen = Environment().get("TESSERA_NVRTC")) return {*chosen};
  std::vector<std::string> paths;
  const auto add = [&](const std::vector<std::string>& found) {
    paths.insert(paths.end(), found.begin(), found.end());
  };
  // A wheel of libtorch has it in a package beside it: nvidia/cu13/lib, nvidia/cuda_nvrtc/lib.
  const auto torch = torch_libraries();
  constexpr const char* kName = "libnvrtc.so";
  add(libraries_in(torch, kName));
  std::error_code ignored;
  for (fs::directory_iterator entry(torch.parent_path().parent_path() / "nvidia", ignored), end;
       !ignored && entry != end; entry.increment(ignored))
    add(libraries_in(entry->path() / "lib", kName));
  add({"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"});
  add(libraries_in("/usr/local/cuda/lib64", kName));
  return paths;
}

template <class Function>
bool resolve(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace

struct Nvrtc::Functions {
  using Program = void*;
  int (*create)(Program*, const char* source, const char* name, int headers,
                const char* const* texts, const char* const* names);
  int (*compile)(Program, int options, const char* const* texts);
  int (*destroy)(Program*);
  int (*log_size)(Program, size_t*);
  int (*log)(Program, char*);
  int (*code_size)(Program, size_t*);
  int (*code)(Program, char*);
  int (*version)(int*, int*);

  bool find_in(void* library) {
    return resolve(library, "nvrtcCreateProgram", create) &&
           resolve(library, "nvrtcCompileProgram", compile) &&
           resolve(library, "nvrtcDestroyProgram", destroy) &&
           resolve(library, "nvrtcGetProgramLogSize", log_size) &&
           resolve(library, "nvrtcGetProgramLog", log) &&
           resolve(library, "nvrtcGetCUBINSize", code_size) &&
           resolve(library, "nvrtcGetCUBIN", code) && resolve(library, "nvrtcVersion", version);
  }
};

const Nvrtc* Nvrtc::find(std::string* why_not) {
  static const auto& found = *[] {
    auto* functions = new Functions();
    for (const auto& path : candidates()) {
      // It looks for a part of itself by name, which lies beside it and may be on no path.
      const auto folder = fs::path(path).parent_path();
      if (!folder.empty()) {
        for (const auto& part : libraries_in(folder, "libnvrtc-builtins.so"))
          dlopen(part.c_str(), RTLD_NOW | RTLD_LOCAL);
      }
      void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (library != nullptr && functions->find_in(library))
        return new std::unique_ptr<const Nvrtc>(new Nvrtc(*functions));
    }
    return new std::unique_ptr<const Nvrtc>();
  }();
  if (!found && why_not != nullptr)
    *why_not =
        "no libnvrtc: neither beside libtorch, nor on the loader's path, nor in /usr/local/cuda; "
        "install nvidia-cuda-nvrtc, or name the file by TESSERA_NVRTC";
  return found.get();
}

std::string Nvrtc::version() const {
  int major = 0, minor = 0;
  functions_.version(&major, &minor);
  return std::to_string(major) + "." + std::to_string(minor);
}

std::optional<std::string> Nvrtc::compile(const std::string& source,
                                          const std::string& architecture,
                                          std::string* why_not) const {
  Functions::Program program = nullptr;
  functions_.create(&program, source.c_str(), "tessera.cu", 0, nullptr, nullptr);
  const std::string target = "--gpu-architecture=" + architecture;
  const char* options[] = {target.c_str(), "--std=c++17", "--device-as-default-execution-space"};
  const int status = functions_.compile(program, static_cast<int>(std::size(options)), options);
  std::optional<std::string> code;
  size_t size = 0;
  if (status == 0 && functions_.code_size(program, &size) == 0) {
    code.emplace(size, '\0');
    functions_.code(program, code->data());
  } else if (why_not != nullptr) {
    functions_.log_size(program, &size);
    std::string said(size, '\0');
    functions_.log(program, said.data());
    *why_not = "NVRTC " + version() + " for " + architecture + " failed (" +
               std::to_string(status) + "): " + said.c_str();
  }
  functions_.destroy(&program);
  return code;
}

namespace {

/// What kernels need of the driver.
struct Driver {
  int (*init)(unsigned);
  int (*device)(int*, int ordinal);
  int (*attribute)(int*, int attribute, int device);
  int (*current)(void**);
  int (*retain)(void**, int device);
  int (*make_current)(void*);
  int (*load)(void**, const void* code);
  int (*unload)(void*);
  int (*function)(void**, void* module, const char* name);
  int (*set_attribute)(void* function, int attribute, int value);
  int (*launch)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                unsigned block_y, unsigned block_z, unsigned shared, void* stream, void** arguments,
                void** extra);
  int (*describe)(int error, const char** text);

  bool find_in(void* library) {
    return resolve(library, "cuInit", init) && resolve(library, "cuDeviceGet", device) &&
           resolve(library, "cuDeviceGetAttribute", attribute) &&
           resolve(library, "cuCtxGetCurrent", current) &&
           resolve(library, "cuDevicePrimaryCtxRetain", retain) &&
           resolve(library, "cuCtxSetCurrent", make_current) &&
           resolve(library, "cuModuleLoadData", load) &&
           resolve(library, "cuModuleUnload", unload) &&
           resolve(library, "cuModuleGetFunction", function) &&
           resolve(library, "cuFuncSetAttribute", set_attribute) &&
           resolve(library, "cuLaunchKernel", launch) &&
           resolve(library, "cuGetErrorString", describe);
  }

  std::string text_of(int error) const {
    const char* text = nullptr;
    if (describe(error, &text) != 0 || text == nullptr) text = "unknown error";
    return std::string(text) + " (" + std::to_string(error) + ")";
  }

  static const Driver* find(std::string* why_not) {
    static const auto& found = *[] {
      auto* driver = new Driver();
      void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
      const bool is_there = library != nullptr && driver->find_in(library) && driver->init(0) == 0;
      return new std::unique_ptr<Driver>(is_there ? driver : nullptr);
    }();
    if (!found && why_not != nullptr) *why_not = "no driver for NVIDIA GPUs (libcuda.so.1)";
    return found.get();
  }

  /// The context that libtorch's runtime has on the device.
  bool use(int ordinal, std::string* why_not) const {
    void* context = nullptr;
    int handle = 0;
    int error = current(&context);
    if (error == 0 && context != nullptr) return true;
    error = device(&handle, ordinal);
    if (error == 0) error = retain(&context, handle);
    if (error == 0) error = make_current(context);
    if (error != 0 && why_not != nullptr) *why_not = "no context on the GPU: " + text_of(error);
    return error == 0;
  }
};

}  // namespace

std::optional<std::string> architecture_of(int device, std::string* why_not) {
  const auto* driver = Driver::find(why_not);
  if (driver == nullptr) return std::nullopt;
  constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
  int handle = 0, major = 0, minor = 0;
  int error = driver->device(&handle, device);
  if (error == 0) error = driver->attribute(&major, kMajor, handle);
  if (error == 0) error = driver->attribute(&minor, kMinor, handle);
  if (error == 0) return "sm_" + std::to_string(major) + std::to_string(minor);
  if (why_not != nullptr) *why_not = "the GPU does not say what it is: " + driver->text_of(error);
  return std::nullopt;
}

std::shared_ptr<CudaModule> CudaModule::load(const std::string& code, int device,
                                             std::string* why_not) {
  const auto* driver = Driver::find(why_not);
  if (driver == nullptr || !driver->use(device, why_not)) return nullptr;
  void* module = nullptr;
  const int error = driver->load(&module, code.data());
  if (error == 0) return std::shared_ptr<CudaModule>(new CudaModule(module));
  if (why_not != nullptr) *why_not = "kernels can't be loaded: " + driver->text_of(error);
  return nullptr;
}

// At the end of a process the driver may be gone, which then has unloaded it.
CudaModule::~CudaModule() {
  void* context = nullptr;
  const auto* driver = Driver::find(nullptr);
  if (driver->current(&context) == 0 && context != nullptr) driver->unload(module_);
}

void* CudaModule::function(const std::string& name) const {
  void* function = nullptr;
  return Driver::find(nullptr)->function(&function, module_, name.c_str()) == 0 ? function
                                                                                : nullptr;
}

bool CudaModule::allow_shared(void* function, int64_t bytes) {
  constexpr int kMaxDynamicSharedSizeBytes = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
  return Driver::find(nullptr)->set_attribute(function, kMaxDynamicSharedSizeBytes,
                                              static_cast<int>(bytes)) == 0;
}

void CudaModule::launch(void* function, const Kernel::Grid& grid, void* stream, void** arguments) {
  const auto* driver = Driver::find(nullptr);
  const int error = driver->launch(function, static_cast<unsigned>(grid.blocks), 1, 1,
                                   static_cast<unsigned>(grid.threads), 1, 1,
                                   static_cast<unsigned>(grid.shared), stream, arguments, nullptr);
  TORCH_CHECK(error == 0, "compile: a kernel was not launched: ", driver->text_of(error));
}

}  // namespace tessera::compiler
