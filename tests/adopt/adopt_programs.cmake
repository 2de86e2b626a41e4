# cmake -DTOOL=… -DPROGRAMS=… -DADOPTED=… -P adopt_programs.cmake: a copy of the programs, changed by `tessera adopt`, which
# finds nothing more to change in it.
file(REMOVE_RECURSE ${ADOPTED} ${ADOPTED}.stamp)
file(COPY ${PROGRAMS}/ DESTINATION ${ADOPTED})
foreach(mode --write --check)
  execute_process(COMMAND ${TOOL} adopt ${mode} ${ADOPTED} OUTPUT_VARIABLE told ERROR_VARIABLE told RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "tessera adopt ${mode} ${ADOPTED}: ${result}\n${told}")
  endif()
endforeach()
file(TOUCH ${ADOPTED}.stamp)
