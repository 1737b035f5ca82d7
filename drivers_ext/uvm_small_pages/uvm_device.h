// Calls of the driver to the system, as a table. A simulated device can replace it: a shared
// library that exports `vmserve_uvm_device` (option ioctl_library=PATH).
//
// Unless documented otherwise, a function returns VMSERVE_OK, or a class of error and fills
// `error`.
#pragma once

#include <cstdint>

#include "uvm_ioctl.h"
#include "vmserve_driver.h"

namespace uvm {

struct Device;  // defined by the implementation

struct DeviceTable {
  std::uint32_t struct_size;

  // The ioctl on a descriptor of the module opened only for it. That descriptor has no address
  // space, so a module that knows the ioctl refuses it before it does anything. Returns 0 or an
  // errno.
  std::int32_t (*probe)(const char* module_path, std::uint32_t number, void* parameters);

  std::int32_t (*open)(const char* module_path, std::int32_t ordinal, Device** device, Uuid* gpu,
                       vmserve_error* error);
  void (*close)(Device* device);

  // The ioctl on the descriptor of the process's CUDA address space. Returns 0 or an errno.
  std::int32_t (*ioctl)(Device* device, std::uint32_t number, void* parameters);

  // A managed allocation: addresses without memory, a multiple of kBlockBytes.
  std::int32_t (*reserve)(Device* device, std::uint64_t bytes, std::uint64_t* address,
                          vmserve_error* error);
  std::int32_t (*free_reservation)(Device* device, std::uint64_t address, vmserve_error* error);

  // In the order of calls, after kernels started before and before kernels started later.
  std::int32_t (*zero)(Device* device, std::uint64_t address, std::uint64_t bytes,
                       vmserve_error* error);
  std::int32_t (*copy)(Device* device, std::uint64_t dst, std::uint64_t src, std::uint64_t bytes,
                       vmserve_error* error);
  std::int32_t (*fence)(Device* device, vmserve_error* error);
  std::int32_t (*mark)(Device* device, std::uint64_t* mark, vmserve_error* error);
  std::int32_t (*reached)(Device* device, std::uint64_t mark, std::uint32_t* reached,
                          vmserve_error* error);

  std::int32_t (*alloc_host)(Device* device, std::uint64_t bytes, std::uint64_t* address,
                             vmserve_error* error);
  std::int32_t (*free_host)(Device* device, std::uint64_t address, vmserve_error* error);
};

// The real device: the nvidia-uvm module and libcuda.so.1.
const DeviceTable* cuda_device();

}  // namespace uvm

#define VMSERVE_UVM_DEVICE "vmserve_uvm_device"
extern "C" VMSERVE_EXPORT const uvm::DeviceTable* vmserve_uvm_device();
