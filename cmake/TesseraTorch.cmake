# Target torch::torch: libtorch by its include and lib folders. Its own CMake package demands a CUDA toolkit
# whenever the wheel is a CUDA build, which CPU work does not need, so it is not used.
# The installed package includes this file too (TesseraConfig.cmake).
#
# TESSERA_TORCH: the folder with include/ and lib/ (a wheel's site-packages/torch, or an unpacked libtorch).
# Found, in this order: -DTESSERA_TORCH, $TESSERA_TORCH, TESSERA_TORCH_OF_BUILD (set by the installed package); in the
# repository, what scripts/find_torch.sh says.
set(TESSERA_TORCH "$ENV{TESSERA_TORCH}" CACHE PATH "Folder of libtorch: has include/ and lib/")

function(tessera_torch_version folder result)
  set(version unknown)
  foreach(header torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
    if(version STREQUAL "unknown" AND EXISTS "${folder}/include/${header}")
      file(STRINGS "${folder}/include/${header}" lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH)")
      if(lines MATCHES "MAJOR ([0-9]+).*MINOR ([0-9]+).*PATCH ([0-9]+)")
        set(version ${CMAKE_MATCH_1}.${CMAKE_MATCH_2}.${CMAKE_MATCH_3})
      endif()
    endif()
  endforeach()
  set(${result} ${version} PARENT_SCOPE)
endfunction()

if(NOT TESSERA_TORCH AND EXISTS "${TESSERA_TORCH_OF_BUILD}/include/ATen/ATen.h")
  set(TESSERA_TORCH "${TESSERA_TORCH_OF_BUILD}" CACHE PATH "" FORCE)
endif()
if(NOT TESSERA_TORCH AND EXISTS "${CMAKE_CURRENT_LIST_DIR}/../scripts/find_torch.sh")
  execute_process(
    COMMAND "${CMAKE_CURRENT_LIST_DIR}/../scripts/find_torch.sh"
    RESULT_VARIABLE failed OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_VARIABLE why ERROR_STRIP_TRAILING_WHITESPACE)
  if(failed)
    message(FATAL_ERROR "${why}")
  endif()
  message(STATUS "${why}")
  set(TESSERA_TORCH "${folder}" CACHE PATH "" FORCE)
endif()
if(TESSERA_TORCH)
  cmake_path(ABSOLUTE_PATH TESSERA_TORCH BASE_DIRECTORY ${CMAKE_SOURCE_DIR} NORMALIZE)
endif()
if(NOT EXISTS "${TESSERA_TORCH}/include/ATen/ATen.h")
  message(FATAL_ERROR
    "Tessera needs libtorch 2.11 to 2.15: expected include/ATen/ATen.h in TESSERA_TORCH='${TESSERA_TORCH}'. "
    "Run `make setup` in the repository, or pass -DTESSERA_TORCH=<folder of the torch wheel or of libtorch>.")
endif()

tessera_torch_version("${TESSERA_TORCH}" TESSERA_TORCH_VERSION)
if(NOT TESSERA_TORCH_VERSION MATCHES "^2\\.1[1-5]\\.")
  message(FATAL_ERROR
    "Tessera works with libtorch 2.11 to 2.15, but ${TESSERA_TORCH} is ${TESSERA_TORCH_VERSION}. "
    "Install torch==2.13.0, or name another one by TESSERA_TORCH.")
endif()

set(TESSERA_TORCH_HAS_CUDA OFF)
if(EXISTS "${TESSERA_TORCH}/lib/libtorch_cuda.so")
  set(TESSERA_TORCH_HAS_CUDA ON)
endif()
if(TESSERA_REQUIRE_CUDA AND NOT TESSERA_TORCH_HAS_CUDA)
  message(FATAL_ERROR
    "TESSERA_REQUIRE_CUDA is on, but ${TESSERA_TORCH} is a CPU build of libtorch. "
    "Pass -DTESSERA_TORCH=<folder of a CUDA build>.")
endif()

if(NOT TARGET torch::torch)
  add_library(torch::torch INTERFACE IMPORTED GLOBAL)
  target_include_directories(torch::torch INTERFACE
    "${TESSERA_TORCH}/include" "${TESSERA_TORCH}/include/torch/csrc/api/include")
  target_link_directories(torch::torch INTERFACE "${TESSERA_TORCH}/lib")
  # libtorch.so pulls in libtorch_cuda.so where there is one; nothing refers to its symbols, hence --no-as-needed.
  # libstdc++ comes first: CUDA wheels export parts of std::filesystem of an older one, which crash when they are found
  # before the program's own.
  target_link_libraries(torch::torch INTERFACE
    "-Wl,--push-state,--no-as-needed -lstdc++ -ltorch -Wl,--pop-state"
    "${TESSERA_TORCH}/lib/libtorch_cpu.so" "${TESSERA_TORCH}/lib/libc10.so")
endif()
message(STATUS "libtorch ${TESSERA_TORCH_VERSION} at ${TESSERA_TORCH} (CUDA: ${TESSERA_TORCH_HAS_CUDA})")
