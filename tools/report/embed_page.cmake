# Writes OUTPUT, a C++ source with the files of PAGE, so that the program needs no files beside it.
set(scripts format.js draw.js chart.js timeline.js tables.js main.js)  # in this order on the page

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

file(READ ${PAGE}/page.html html)
file(READ ${PAGE}/style.css style)
set(script "")
foreach(name IN LISTS scripts)
  file(READ ${PAGE}/${name} text)
  string(APPEND script "${text}")
endforeach()
literal("${html}" html)
literal("${style}" style)
literal("${script}" script)
file(WRITE ${OUTPUT} "#include \"report/page.h\"

tessera::report::PageSources tessera::report::page_sources() {
  return {
${html},
${style},
${script}};
}
")
