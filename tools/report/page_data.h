#pragma once

#include "report/run_folder.h"

#include <nlohmann/json.hpp>

#include <cstddef>
#include <vector>

namespace tessera::report {

constexpr std::size_t kMostCurvePoints = 2000;

/// What the page's scripts draw, as page/main.js expects it. Curves are cut down to
/// kMostCurvePoints.
nlohmann::ordered_json page_data(const std::vector<Run>& runs);

}  // namespace tessera::report
