# What `make wheel` and `make deb` need to know of the build. A package works with one minor version of libtorch, for CPUs
# or for one major version of CUDA; its own version says which: 0.1.0+torch2.13.cpu, 0.1.0+torch2.11.cu12.
set(kind cpu)
if(TESSERA_TORCH_HAS_CUDA)
  set(kind cuda)
  foreach(place "version.py;^cuda.*'([0-9]+)\\." "build-version;\\+cu([0-9][0-9])")  # of a wheel, of an archive
    list(POP_FRONT place file)
    if(EXISTS ${TESSERA_TORCH}/${file})
      file(STRINGS ${TESSERA_TORCH}/${file} line REGEX "${place}" LIMIT_COUNT 1)
      if(line MATCHES "${place}")
        set(kind cu${CMAKE_MATCH_1})
      endif()
    endif()
  endforeach()
endif()
set(TESSERA_PACKAGE_VERSION ${PROJECT_VERSION}+torch${TESSERA_TORCH_MINOR_VERSION}.${kind}
    CACHE INTERNAL "Version of the wheel and of the .deb")

# `cpack -G DEB`. libtorch is no package of Debian's: this one looks for it in a folder that does not depend on who built.
set(libtorch /opt/libtorch)
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME tessera)
set(CPACK_PACKAGE_VERSION ${TESSERA_PACKAGE_VERSION})
set(CPACK_PACKAGE_CONTACT "Tessera authors <tessera@localhost>")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_INSTALL_CMAKE_PROJECTS "")  # or it would build all, tests included
set(CPACK_INSTALL_SCRIPTS ${PROJECT_SOURCE_DIR}/packaging/deb/install.cmake)
set(CPACK_TESSERA_BUILD ${PROJECT_BINARY_DIR})
set(CPACK_TESSERA_LIBTORCH ${libtorch})
set(CPACK_TESSERA_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
find_program(TESSERA_SHLIBDEPS dpkg-shlibdeps)  # of dpkg-dev
if(TESSERA_SHLIBDEPS)
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${TESSERA_TORCH}/lib)
else()
  set(CPACK_DEBIAN_PACKAGE_DEPENDS "libc6, libgcc-s1, libstdc++6")
endif()
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "g++, cmake")
set(CPACK_DEBIAN_PACKAGE_DESCRIPTION
"Library, headers, CMake package and the program tessera.

It needs libtorch ${TESSERA_TORCH_MINOR_VERSION} (${kind}) in ${libtorch}, which no Debian package has: an
unpacked libtorch, or a link to the folder of the torch wheel
(ln -s .../site-packages/torch ${libtorch}).")
include(CPack)
