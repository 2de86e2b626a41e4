// Sources, for a reader.

const tokens = /(\/\/[^\n]*|\/\*[\s\S]*?\*\/)|("(?:[^"\\\n]|\\.)*")|\b(auto|bool|break|class|const|constexpr|continue|double|else|extern|false|float|for|if|inline|int|int64_t|namespace|nullptr|return|size_t|static|struct|template|true|typename|using|void|while)\b/g;

/** C++ with comments, strings and keywords told apart. */
function colouredCode(text) {
  const pre = make("pre", {});
  if (text.length > 400000) return fill(pre, {}, [text]);
  let done = 0;
  for (const match of text.matchAll(tokens)) {
    pre.append(text.slice(done, match.index), make("span", { class: match[1] ? "comment" : match[2] ? "string" : "keyword" }, match[0]));
    done = match.index + match[0].length;
  }
  pre.append(text.slice(done));
  return pre;
}
