#include "inspect/program.h"

#include <tessera/compile.h>

#include "report/files.h"
#include "report/html.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <set>

namespace tessera::inspect {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using report::ReportError;

constexpr size_t kMostBytes = size_t{256} << 20;
constexpr const char* kOfRun = "program.txt";

/// "12-reuse_memory.txt": what passes leave in a dump folder.
bool is_dump(const fs::path& path) {
  const auto name = path.filename().string();
  const auto digits = name.find_first_not_of("0123456789");
  return path.extension() == ".txt" && digits != 0 && digits != std::string::npos &&
         name[digits] == '-';
}

fs::path file_in(const fs::path& folder) {
  if (fs::exists(folder / kOfRun)) return folder / kOfRun;
  std::vector<std::pair<unsigned long, fs::path>> dumps;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (is_dump(entry.path()))
      dumps.emplace_back(std::strtoul(entry.path().filename().c_str(), nullptr, 10), entry.path());
  }
  if (dumps.empty()) {
    throw ReportError("expected a program in " + folder.string() + ": " + kOfRun +
                      " of a run with --compile, or files of CompileOptions::dump_folder; found "
                      "neither");
  }
  return std::max_element(dumps.begin(), dumps.end())->second;
}

Json json_of(const ProgramLayout::Buffer& buffer) {
  return {{"name", buffer.label.empty() ? buffer.name : buffer.label},
          {"type", buffer.type},
          {"kind", buffer.kind},
          {"is_input", buffer.is_input},
          {"bytes", buffer.bytes},
          {"first", buffer.first},
          {"last", buffer.last}};
}

Json json_of(const ProgramLayout::Instruction& instruction) {
  return {{"text", instruction.text},
          {"op", instruction.op},
          {"module", instruction.module},
          {"kernel", instruction.kernel ? Json(*instruction.kernel) : Json()},
          {"sends", instruction.sends},
          {"operators", instruction.operators},
          {"reads", instruction.reads},
          {"writes", instruction.writes},
          {"moved", instruction.moved},
          {"held", instruction.held}};
}

Json data_of(const ProgramFile& program) {
  const auto& layout = program.layout;
  auto json = Json::object();
  const bool has_general_name = program.path.filename() == kOfRun;
  const auto folder = fs::absolute(program.path).parent_path().filename();
  json["name"] = (has_general_name ? folder : program.path.filename()).string();
  json["path"] = program.path.string();
  json["peak"] = layout.peak;
  json["peak_bytes"] = layout.peak_bytes;
  json["input_bytes"] = layout.input_bytes;
  json["inputs"] = std::ranges::count_if(layout.buffers, &ProgramLayout::Buffer::is_input);
  json["devices"] = layout.devices;
  json["outputs"] = layout.outputs;
  json["kernels"] = Json::array();
  for (const auto& [name, source, device, uses] : layout.kernels)
    json["kernels"].push_back(
        {{"name", name}, {"source", source}, {"device", device.str()}, {"uses", uses}});
  json["buffers"] = Json::array();
  for (const auto& buffer : layout.buffers) json["buffers"].push_back(json_of(buffer));
  json["instructions"] = Json::array();
  for (const auto& each : layout.instructions) json["instructions"].push_back(json_of(each));
  return json;
}

}  // namespace

ProgramFile read_program(const fs::path& path) {
  std::error_code ignored;
  const fs::path file = fs::is_directory(path, ignored) ? file_in(path) : path;
  const auto text = report::read_file(file, kMostBytes);
  if (!text) {
    throw ReportError("expected a program's file, a run or a dump folder, got " + path.string() +
                      ", which does not exist");
  }
  try {
    const auto graph = Graph::parse(*text);
    if (graph.nodes.empty() && graph.inputs.empty()) throw ReportError("it holds no program");
    return {.path = file, .layout = layout_of(graph)};
  } catch (const c10::Error& error) {
    throw ReportError(file.string() + ": " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw ReportError(file.string() + ": " + error.what());
  }
}

std::string to_page(const ProgramFile& program) {
  auto data = data_of(program);
  const auto title = data["name"].get<std::string>() + " · Tessera";
  return report::write_page({.title = title,
                             .command = "tessera inspect --program",
                             .sections = {"summary", "memory", "flow", "kernels"},
                             .data = std::move(data),
                             .script = report::program_script()});
}

std::string to_json(const ProgramFile& program) {
  return data_of(program).dump(2, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace) +
         "\n";
}

}  // namespace tessera::inspect
