# cmake -DHEADERS=… -DOUTPUT=… -P module_names.cmake: the classes of torch::nn that tessera::nn has, as the public headers
# declare them, for `tessera adopt`. HEADERS: separated by |.
string(REPLACE "|" ";" headers "${HEADERS}")
set(names "")
foreach(header IN LISTS headers)
  file(READ ${header} text)
  string(REGEX MATCHALL
         "(\nTESSERA_NN_(MODULE|EMBEDDING)\\([A-Za-z0-9]+\\)|\nTORCH_MODULE_IMPL\\([A-Za-z0-9]+|\nusing torch::nn::[A-Za-z0-9]+;|\nclass Sequential )"
         found "${text}")
  foreach(declaration IN LISTS found)
    string(REGEX MATCH "[A-Za-z0-9]+[^A-Za-z0-9]*$" name "${declaration}")
    string(REGEX MATCH "^[A-Za-z0-9]+" name "${name}")
    list(APPEND names ${name})
  endforeach()
endforeach()
list(REMOVE_DUPLICATES names)
list(SORT names)
list(LENGTH names count)
if(count LESS 100)
  message(FATAL_ERROR "expected more than 100 classes of tessera::nn in ${headers}, found ${count}")
endif()
list(TRANSFORM names REPLACE "(.+)" "    \"\\1\",\n")
string(CONCAT rows ${names})
set(text "// Made from the public headers.
#include \"adopt/names.h\"

namespace tessera::adopt {

const std::set<std::string, std::less<>>& module_names() {
  static const std::set<std::string, std::less<>> kNames = {
${rows}  };
  return kNames;
}

}  // namespace tessera::adopt
")
file(WRITE ${OUTPUT} "${text}")
