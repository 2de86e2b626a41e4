# Writes OUTPUT, a C++ source that defines FUNCTION, whose result is the text of FILES one behind the other, so that the
# program needs no files beside it.

# A literal longer than 65,536 letters is more than compilers must take; adjacent ones are joined.
function(literal text result)
  set(parts "")
  string(LENGTH "${text}" length)
  set(at 0)
  while(at LESS length)
    string(SUBSTRING "${text}" ${at} 8000 part)
    string(APPEND parts "R\"page(${part})page\"\n")
    math(EXPR at "${at} + 8000")
  endwhile()
  set(${result} "${parts}" PARENT_SCOPE)
endfunction()

set(all "")
string(REPLACE "|" ";" FILES "${FILES}")
foreach(name IN LISTS FILES)
  file(READ ${name} text)
  string(APPEND all "${text}")
endforeach()
literal("${all}" all)
file(WRITE ${OUTPUT} "#include \"report/html.h\"

const char* tessera::report::${FUNCTION}() {
  return
${all};
}
")
