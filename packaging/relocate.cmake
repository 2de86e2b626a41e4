# cmake -DPREFIX=… -DTORCH=… -P relocate.cmake
# Makes an installed tree look for libtorch in TORCH instead of the folder it was built with: an absolute folder, or one
# relative to PREFIX that moves with it.
cmake_minimum_required(VERSION 3.25)

# RUNPATH entry for `folder`, seen from `file`.
function(entry_for folder file result)
  cmake_path(GET file PARENT_PATH from)
  cmake_path(RELATIVE_PATH folder BASE_DIRECTORY ${from})
  set(${result} $ORIGIN/${folder} PARENT_SCOPE)
endfunction()

file(GLOB_RECURSE config ${PREFIX}/*/TesseraConfig.cmake)
file(GLOB programs ${PREFIX}/bin/*)
file(GLOB_RECURSE libraries ${PREFIX}/*/libtessera.so.*)
foreach(file IN LISTS programs libraries)
  if(IS_SYMLINK ${file})
    continue()
  endif()
  if(IS_ABSOLUTE ${TORCH})
    set(entries ${TORCH}/lib)
  else()
    cmake_path(SET torch NORMALIZE ${PREFIX}/${TORCH}/lib)
    entry_for(${torch} ${file} entries)
  endif()
  if(file IN_LIST programs)
    list(GET libraries 0 library)
    cmake_path(GET library PARENT_PATH library)
    entry_for(${library} ${file} entry)
    list(PREPEND entries ${entry})
  endif()
  file(READ_ELF ${file} RUNPATH before)
  list(JOIN before : before)
  list(JOIN entries : after)
  # It is written over what is there, so it must not be longer.
  string(LENGTH "${before}" room)
  string(LENGTH "${after}" length)
  if(length GREATER room)
    message(FATAL_ERROR "${file}: expected room for the RUNPATH ${after}, found only ${before}: build with libtorch in a "
                        "folder with a longer name.")
  endif()
  file(RPATH_CHANGE FILE ${file} OLD_RPATH "${before}" NEW_RPATH "${after}")
endforeach()

if(NOT IS_ABSOLUTE ${TORCH})
  set(TORCH "\${PACKAGE_PREFIX_DIR}/${TORCH}")
endif()
file(READ ${config} text)
string(REGEX REPLACE "\nset\\(TESSERA_TORCH_OF_BUILD \"[^\n]*\"\\)\n" "\nset(TESSERA_TORCH_OF_BUILD \"${TORCH}\")\n"
       changed "${text}")
if(changed STREQUAL text)
  message(FATAL_ERROR "${config}: expected it to set TESSERA_TORCH_OF_BUILD")
endif()
file(WRITE ${config} "${changed}")
