# cmake -DBUILD=… -DPROJECT=… -DSCRATCH=… -DGENERATOR=… -DCOMPILER=… -DCHECK_RUNPATHS=… -P install_test.cmake
set(prefix ${SCRATCH}/prefix)
set(project_build ${SCRATCH}/build)
file(REMOVE_RECURSE ${SCRATCH})
unset(ENV{TESSERA_TORCH})  # the package remembers its libtorch

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix})
run(${CMAKE_COMMAND} -S ${PROJECT} -B ${project_build} -G ${GENERATOR}
    -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_PREFIX_PATH=${prefix})
run(${CMAKE_COMMAND} --build ${project_build})
run(${project_build}/hello)
run(${CMAKE_COMMAND} -E chdir ${SCRATCH} ${project_build}/model)
run(${prefix}/bin/tessera run -n 2 -- ${project_build}/hello)
run(${CHECK_RUNPATHS} --compiler ${COMPILER} ${prefix}/bin ${prefix}/lib ${project_build}/hello)
