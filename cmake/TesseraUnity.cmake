# Half of a translation unit's time goes into what libtorch's headers instantiate anew in each; sources compiled in
# groups pay that once. Turn it off while you edit: then only the file you touched is compiled.
option(TESSERA_UNITY "Compile sources in groups: a build from scratch takes half the time" ${PROJECT_IS_TOP_LEVEL})
set(CMAKE_UNITY_BUILD ${TESSERA_UNITY})
set(CMAKE_UNITY_BUILD_BATCH_SIZE 8)

# tessera_apart(sources...): sources whose file-local names another source of their folder uses too.
function(tessera_apart)
  set_source_files_properties(${ARGN} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()
