// The interface of vAttention's modified nvidia-uvm module, in our own declarations.
//
// Layouts and numbers are from the public sources of that module (open driver 545.23.06): the
// parameter structs in its uvm_ioctl.h and the routing in its uvm.c. NVIDIA's UVM ioctls are plain
// numbers, not _IOC() ones. An ioctl that the module routes returns 0 and its result in `status`,
// the last field of each struct.
#pragma once

#include <cstddef>
#include <cstdint>

namespace uvm {

struct Uuid {
  std::uint8_t bytes[16];
};

constexpr std::uint32_t kGetHandle = 200;
constexpr std::uint32_t kMapHandle = 201;
constexpr std::uint32_t kFreeHandle = 202;
constexpr std::uint32_t kCleanUpRange = 203;
// Every UVM module has it: whether pageable memory can be used. Changes nothing.
constexpr std::uint32_t kPageableAccess = 39;

constexpr std::uint32_t kOk = 0x00;
constexpr std::uint32_t kIllegalAction = 0x16;  // the descriptor has no address space
constexpr std::uint32_t kNoMemory = 0x51;

struct GetHandle {
  std::uint64_t size;
  Uuid gpu;
  std::uint64_t handle;  // out: the physical address
  std::uint32_t status;  // out
};

struct MapHandle {
  std::uint64_t address;
  std::uint64_t handle;
  Uuid gpu;
  std::uint64_t size;
  std::uint32_t status;  // out
};

struct FreeHandle {
  std::uint64_t handle;
  std::uint64_t size;
  Uuid gpu;
  std::uint32_t status;  // out
};

struct CleanUpRange {
  std::uint64_t address;
  std::uint64_t size;
  Uuid gpu;
  std::uint32_t status;  // out
};

struct PageableAccess {
  std::uint8_t supported;  // out
  std::uint32_t status;    // out
};

static_assert(sizeof(GetHandle) == 40 && offsetof(GetHandle, status) == 32, "the module's layout");
static_assert(sizeof(MapHandle) == 48 && offsetof(MapHandle, status) == 40, "the module's layout");
static_assert(sizeof(FreeHandle) == 40 && offsetof(FreeHandle, status) == 32, "the module's");
static_assert(sizeof(CleanUpRange) == 40 && offsetof(CleanUpRange, status) == 32, "the module's");
static_assert(sizeof(PageableAccess) == 8 && offsetof(PageableAccess, status) == 4, "the module's");

// Alignment of managed allocations. The module counts blocks of this size from the start.
constexpr std::uint64_t kBlockBytes = std::uint64_t{2} << 20;

}  // namespace uvm
