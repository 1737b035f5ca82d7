// Formats numbers for error texts.
#pragma once

#include <cstdint>
#include <string>

namespace vmserve {

std::string with_commas(std::int64_t n);       // 65530 -> "65,530"
std::string human_bytes(std::uint64_t bytes);  // 1572864 -> "1.5 MiB"
std::string errno_text(int code);              // 12 -> "Cannot allocate memory"

}  // namespace vmserve
