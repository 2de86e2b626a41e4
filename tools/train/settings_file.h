#pragma once

#include "train/settings.h"

/// Settings as TOML.
namespace tessera::train {

/// Gives fields whose flags were not given the values of a file. Throws CLI::ValidationError that
/// names file, line and key: of what is not TOML, of keys that are no flags, of wrong types.
void read_settings(const std::string& path, const Fields& fields);

/// All settings as a file that --config takes, but for the run's folder: it starts the same anew.
std::string to_toml(const Fields& fields);

/// Throws CLI::ValidationError that names the flag whose text cannot be written as TOML: text that
/// is not UTF-8.
void check_text(const Fields& fields);

}  // namespace tessera::train
