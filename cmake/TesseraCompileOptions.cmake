# Flags every target of the project shares. They must be equal everywhere: a precompiled header built
# with other flags than its user makes g++ 12 crash.
add_library(tessera_options INTERFACE)
target_compile_options(tessera_options INTERFACE -Wall -Wextra -Wno-unused-parameter -fvisibility-inlines-hidden)
if(TESSERA_SANITIZE)
  target_compile_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer -g1)
  target_link_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZE})
endif()
