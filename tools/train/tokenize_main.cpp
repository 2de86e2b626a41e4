// `tessera tokenize`: texts as shards of tokens.
#include <tessera/corpus.h>

#include "command_line.h"
#include "numbers.h"
#include "train/agreed.h"
#include "train/sequences.h"

#include <CLI/CLI.hpp>

#include <iostream>
#include <string>
#include <vector>

namespace {

using tessera::data::Corpus;
using tessera::data::Tokenizer;

struct TokenizeOptions {
  std::string folder;
  std::vector<std::string> data;
  std::string tokenizer;
  tessera::data::ShardOptions shards;
};

void write_folder(const TokenizeOptions& options) {
  Corpus::write_shards(options.data, options.tokenizer, options.folder, options.shards);
  const auto tokenizer = Corpus::tokenizer_of_shards(options.folder).value();
  const Corpus written({options.folder},
                       tokenizer == "bytes" ? Tokenizer() : Tokenizer::from_file(tokenizer));
  std::cout << "wrote " << tessera::train::counted(written.tokens(), "token") << " of "
            << written.bytes() << " bytes of text in "
            << tessera::train::counted(written.files(), "shard") << " to " << options.folder
            << "; train on them: tessera train --data " << options.folder << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  constexpr int64_t kMostTokens = int64_t{1} << 40;
  CLI::App app("Writes the tokens of texts as shards, which tessera train reads with --data FOLDER",
               "tessera tokenize");
  TokenizeOptions options;
  app.add_option("FOLDER", options.folder, "A new folder for shards, index and tokenizer")
      ->required();
  app.add_option("--data", options.data, "Files, and folders whose text files are read")
      ->required();
  app.add_option("--tokenizer", options.tokenizer,
                 "'bytes', or a tokenizer.json with byte-level BPE")
      ->required();
  tessera::tool::add_number(app, "--shard-tokens", options.shards.shard_tokens, int64_t{1},
                            kMostTokens, "Tokens of a shard; the last one may have fewer");
  app.footer("tessera tokenize tokens --data books --tokenizer gpt2/tokenizer.json");
  try {
    tessera::tool::refuse_unknown_options(app, {argv + 1, argv + argc});
    app.parse(argc, argv);
    write_folder(options);
    return 0;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    std::cerr << "tessera tokenize: " << error.what() << "; see tessera tokenize --help\n";
    return tessera::train::kWrongSettings;
  } catch (const std::exception& error) {
    std::cerr << "tessera tokenize: " << tessera::train::message_of(error) << "\n";
    return 1;
  }
}
