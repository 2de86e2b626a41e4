include(GoogleTest)

# One GoogleTest binary. Its tests with the same labels are one test of ctest, <name>.<labels>, and run in one process, whose
# ranks stay for the next test (TESSERA_REUSE_RANKS): to start them takes longer than most tests do. The label `apart` gives
# each a process of its own, as <name>.<Suite>.<Test>: for tests that change their process for good, or measure all of it.
#
#   tessera_test(NAME comm_collectives SOURCES collectives_test.cpp LABELS fast dist
#                [CPU_SOURCES ...]                     # without GPU tests: a binary <name>_cpu, which cuda_tests leaves out
#                [LIBRARIES tessera::json ...]         # besides tessera and tessera_test_support
#                [FILTER_LABELS "*Peer*=peer" ...]     # further labels (a,b) for tests that match; the first match counts
#                [COST 100]                            # about how many seconds they take: the longest start first
#                [SERIAL])                             # nothing runs beside these: for tests that measure time
#
# Binaries with tests labelled cuda are what the target cuda_tests builds and scripts/test_cuda.sh runs; those with tests
# labelled sanitize are the target sanitize_tests.
function(tessera_test)
  cmake_parse_arguments(PARSE_ARGV 0 test "SERIAL" "NAME;COST" "SOURCES;CPU_SOURCES;LABELS;LIBRARIES;FILTER_LABELS")
  if(NOT test_NAME OR NOT test_SOURCES OR NOT (test_LABELS OR test_FILTER_LABELS) OR test_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "tessera_test: expected NAME, SOURCES and LABELS or FILTER_LABELS, got '${ARGN}'")
  endif()

  if(NOT test_COST)
    set(test_COST 0)
  endif()

  if(test_CPU_SOURCES)
    set(filters ${test_FILTER_LABELS})
    list(FILTER filters EXCLUDE REGEX "=cuda$")
    set(serial "")
    if(test_SERIAL)
      set(serial SERIAL)
    endif()
    tessera_test(NAME ${test_NAME}_cpu SOURCES ${test_CPU_SOURCES} LABELS ${test_LABELS} LIBRARIES ${test_LIBRARIES}
                 FILTER_LABELS ${filters} COST ${test_COST} ${serial})
  endif()

  add_executable(${test_NAME} ${test_SOURCES})
  target_link_libraries(${test_NAME} PRIVATE tessera_test_support ${test_LIBRARIES})
  target_precompile_headers(${test_NAME} REUSE_FROM tessera_test_pch)
  # CMake gives executables -fPIE and libraries -fPIC; a precompiled header serves only one of them.
  target_compile_options(${test_NAME} PRIVATE -fPIC)
  set_target_properties(${test_NAME} PROPERTIES
    POSITION_INDEPENDENT_CODE OFF
    RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin/tests)

  set(taken "")
  foreach(pair IN LISTS test_FILTER_LABELS)
    if(NOT pair MATCHES "^([^=]+)=([a-z_,]+)$")
      message(FATAL_ERROR "tessera_test(${test_NAME}): expected <gtest pattern>=<label>, got '${pair}'")
    endif()
    set(pattern "${CMAKE_MATCH_1}")
    string(REPLACE "," ";" labels "${CMAKE_MATCH_2}")
    if("cuda" IN_LIST labels)
      _tessera_add_cuda_test(${test_NAME} "${pattern}")
    endif()
    if("sanitize" IN_LIST labels)
      if(NOT TARGET sanitize_tests)
        add_custom_target(sanitize_tests)
      endif()
      add_dependencies(sanitize_tests ${test_NAME})
    endif()
    _tessera_register(${test_NAME} "${pattern}" "${taken}" ${test_SERIAL} ${test_COST} ${test_LABELS} ${labels})
    list(APPEND taken "${pattern}")
  endforeach()
  if(NOT "*" IN_LIST taken)
    _tessera_register(${test_NAME} "*" "${taken}" ${test_SERIAL} ${test_COST} ${test_LABELS})
  endif()
endfunction()

# Adds a line "<binary> <pattern of its GPU tests>" to cuda_tests.txt in the build folder.
function(_tessera_add_cuda_test name pattern)
  if(NOT TARGET cuda_tests)
    add_custom_target(cuda_tests)
    file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/cuda_tests.txt
         CONTENT "$<JOIN:$<TARGET_PROPERTY:cuda_tests,TESSERA_CUDA_TESTS>,\n>\n")
  endif()
  add_dependencies(cuda_tests ${name})
  set_property(TARGET cuda_tests APPEND PROPERTY TESSERA_CUDA_TESTS "${name} ${pattern}")
endfunction()

# Registers the tests of `name` that match `pattern` and none of `excluded`; the remaining arguments are labels.
function(_tessera_register name pattern excluded serial cost)
  string(REPLACE ";" ":" excluded "${excluded}")
  set(labels ${ARGN})
  if("apart" IN_LIST labels)
    list(REMOVE_ITEM labels apart)
    _tessera_discover(${name} "${pattern}-${excluded}" ${serial} ${labels})
    return()
  endif()
  string(JOIN "+" test ${labels})
  set(base ${name}.${test})
  set(test ${base})
  set(number 1)
  while(TEST ${test})
    math(EXPR number "${number} + 1")
    set(test ${base}.${number})
  endwhile()
  add_test(NAME ${test}
           COMMAND ${name} --gtest_filter=${pattern}-${excluded}
                   --gtest_output=xml:${PROJECT_BINARY_DIR}/test-results/${test}.xml)
  set(seconds 300)  # for one test, which the binary is told
  if(TESSERA_SANITIZE)
    set(seconds 900)
  endif()
  math(EXPR timeout "10 * ${seconds}")
  set_tests_properties(${test} PROPERTIES
    LABELS "${labels}" TIMEOUT ${timeout} RUN_SERIAL ${serial} COST ${cost}
    ENVIRONMENT "TESSERA_REUSE_RANKS=1;TESSERA_TEST_SECONDS=${seconds}")
endfunction()

function(_tessera_discover name filter serial)
  string(MAKE_C_IDENTIFIER "${name}_${filter}" tests)
  # Names without printed values: CMake leaves names with brackets out of the list, and so without labels.
  gtest_discover_tests(${name}
    NO_PRETTY_VALUES
    TEST_FILTER "${filter}"
    TEST_LIST ${tests}
    TEST_PREFIX ${name}.
    DISCOVERY_MODE PRE_TEST
    DISCOVERY_TIMEOUT 120
    PROPERTIES TIMEOUT 300 RUN_SERIAL ${serial})
  # gtest_discover_tests takes one label at most; ctest reads this file after the one with the tests.
  set(file ${CMAKE_CURRENT_BINARY_DIR}/${tests}_labels.cmake)
  file(WRITE ${file} "if(${tests})\n  set_tests_properties(\${${tests}} PROPERTIES LABELS \"${ARGN}\")\nendif()\n")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${file})
endfunction()
