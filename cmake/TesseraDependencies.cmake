# Build dependencies, as targets tessera::cli11, tessera::json, tessera::toml, tessera::gtest (with gmock),
# tessera::gtest_main and, where the machine has them, tessera::benchmark and tessera::mpi. They come from find_package,
# else from .deps (`make deps`): a folder for each, or one that is taken from there would bring others along that the
# machine has in another version. Nothing is fetched, and the library needs none of them at run time.
set(TESSERA_DEPS ${PROJECT_SOURCE_DIR}/.deps)

# Defines tessera::<name> from `target` of package `package`, or from the folder that holds `header`.
function(tessera_header_only name package target header debian_package)
  if(package)
    find_package(${package} QUIET)
  endif()
  add_library(tessera_${name} INTERFACE)
  add_library(tessera::${name} ALIAS tessera_${name})
  if(TARGET "${target}")
    target_link_libraries(tessera_${name} INTERFACE ${target})
    return()
  endif()
  find_path(TESSERA_${name}_INCLUDE ${header} HINTS ${TESSERA_DEPS}/${name}/include)
  if(NOT TESSERA_${name}_INCLUDE)
    message(FATAL_ERROR "Tessera's build needs ${header}: install ${debian_package}, or put it into .deps/${name}/include.")
  endif()
  target_include_directories(tessera_${name} SYSTEM INTERFACE ${TESSERA_${name}_INCLUDE})
endfunction()

function(tessera_find_gtest)
  find_package(GTest QUIET)
  if(TARGET GTest::gtest AND TARGET GTest::gmock)
    add_library(tessera_gtest INTERFACE)
    target_link_libraries(tessera_gtest INTERFACE GTest::gmock GTest::gtest)
    add_library(tessera_gtest_main INTERFACE)
    target_link_libraries(tessera_gtest_main INTERFACE GTest::gtest_main)
  else()
    find_path(TESSERA_GTEST_SOURCE googletest/src/gtest-all.cc
              PATHS ${TESSERA_DEPS}/src/googletest /usr/src/googletest NO_DEFAULT_PATH)
    if(NOT TESSERA_GTEST_SOURCE)
      message(FATAL_ERROR "Tessera's tests need GoogleTest: install libgtest-dev and libgmock-dev, "
                          "put its sources into .deps/src/googletest, or pass -DTESSERA_BUILD_TESTS=OFF.")
    endif()
    find_package(Threads REQUIRED)
    set(parts ${TESSERA_GTEST_SOURCE}/googletest ${TESSERA_GTEST_SOURCE}/googlemock)
    add_library(tessera_gtest STATIC
      ${TESSERA_GTEST_SOURCE}/googletest/src/gtest-all.cc ${TESSERA_GTEST_SOURCE}/googlemock/src/gmock-all.cc)
    list(TRANSFORM parts APPEND /include OUTPUT_VARIABLE includes)
    target_include_directories(tessera_gtest PRIVATE ${parts} SYSTEM PUBLIC ${includes})
    target_link_libraries(tessera_gtest PUBLIC Threads::Threads)
    add_library(tessera_gtest_main STATIC ${TESSERA_GTEST_SOURCE}/googletest/src/gtest_main.cc)
    target_link_libraries(tessera_gtest_main PUBLIC tessera_gtest)
  endif()
  add_library(tessera::gtest ALIAS tessera_gtest)
  add_library(tessera::gtest_main ALIAS tessera_gtest_main)
endfunction()

if(TESSERA_BUILD_TOOLS OR TESSERA_BUILD_TESTS)
  tessera_header_only(cli11 CLI11 CLI11::CLI11 CLI/CLI.hpp libcli11-dev)
  # The header alone: Debian's package would link a shared library.
  tessera_header_only(toml "" "" toml++/toml.h libtomlplusplus-dev)
endif()
tessera_header_only(json nlohmann_json nlohmann_json::nlohmann_json nlohmann/json.hpp nlohmann-json3-dev)
if(TESSERA_BUILD_TESTS)
  tessera_find_gtest()
endif()
find_package(benchmark QUIET)
if(TARGET benchmark::benchmark)
  add_library(tessera_benchmark INTERFACE)
  add_library(tessera::benchmark ALIAS tessera_benchmark)
  target_link_libraries(tessera_benchmark INTERFACE benchmark::benchmark)
endif()
if(TESSERA_BUILD_EXAMPLES OR TESSERA_BUILD_TESTS)
  set(MPI_CXX_SKIP_MPICXX ON)  # the bindings that MPI has dropped
  find_package(MPI QUIET COMPONENTS CXX)
  if(MPI_CXX_FOUND)  # the target is there without it, too
    add_library(tessera_mpi INTERFACE)
    add_library(tessera::mpi ALIAS tessera_mpi)
    target_link_libraries(tessera_mpi INTERFACE MPI::MPI_CXX)
  endif()
  # Open MPI starts no ranks for root, and none beyond the cores, unless told to; others pass it over.
  set(TESSERA_MPI_ENVIRONMENT OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
      OMPI_MCA_rmaps_base_oversubscribe=1)
endif()
