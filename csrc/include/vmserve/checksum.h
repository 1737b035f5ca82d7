// A checksum of 128 bits: four CRC-32C (Castagnoli), each over every fourth word of 8 bytes.
//
// Up to three flipped bits, wherever they are (in less than 1 GiB), and every burst of up to 32
// bits are found for certain. Of other changes within n words of one lane 1 in 2^32 goes unfound,
// of random content 1 in 2^128. Four independent chains hide the latency of the instruction.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace vmserve {

using Checksum = std::array<std::uint32_t, 4>;

Checksum checksum(const void* data, std::size_t bytes);
// By table, on any processor: what tests compare with.
Checksum checksum_by_table(const void* data, std::size_t bytes);

}  // namespace vmserve
