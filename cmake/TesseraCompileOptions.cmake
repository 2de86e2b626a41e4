# Flags every target of the project shares. They must be equal everywhere: a precompiled header built
# with other flags than its user makes g++ 12 crash.
add_library(tessera_options INTERFACE)
target_compile_options(tessera_options INTERFACE -Wall -Wextra -Wno-unused-parameter -fvisibility-inlines-hidden)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # Objects here and their callers are of one compiler.
  target_compile_options(tessera_options INTERFACE -Wno-psabi)
  if(CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    # It sees these in its own library: in copies of small vectors, as that of torch::autograd::Function, and in the
    # std::function of an empty optional.
    target_compile_options(tessera_options INTERFACE -Wno-array-bounds -Wno-stringop-overflow
                           -Wno-stringop-overread -Wno-maybe-uninitialized)
  endif()
endif()
if(TESSERA_SANITIZE)
  target_compile_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer -g1)
  target_link_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZE})
endif()
if(TESSERA_SANITIZE MATCHES "undefined")
  # libtorch keeps the type information of some of its classes to itself.
  target_compile_options(tessera_options INTERFACE -fno-sanitize-recover=all -fno-sanitize=vptr)
endif()
