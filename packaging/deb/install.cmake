# CPack runs this to lay out the package; /usr/bin and /usr/lib look for libtorch where the description says.
unset(ENV{DESTDIR})
set(prefix ${CPACK_TEMPORARY_DIRECTORY}${CPACK_PACKAGING_INSTALL_PREFIX})
execute_process(COMMAND ${CMAKE_COMMAND} --install ${CPACK_TESSERA_BUILD} --prefix ${prefix} --strip
                OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_COMMAND} -DPREFIX=${prefix} -DTORCH=${CPACK_TESSERA_LIBTORCH}
                        -P ${CMAKE_CURRENT_LIST_DIR}/../relocate.cmake
                OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
file(INSTALL ${CPACK_TESSERA_LICENSE} DESTINATION ${prefix}/share/doc/tessera RENAME copyright MESSAGE_NEVER)
