#include "vmserve/address_space.h"

#include <algorithm>

#include "vmserve/errors.h"

namespace vmserve {

AddressSpace::AddressSpace(std::shared_ptr<PageDriver> driver, Shape shape)
    : driver_(std::move(driver)), shape_(shape), page_bytes_(driver_->frame_bytes()) {
  std::size_t slots_total = 0;
  if (__builtin_mul_overflow(static_cast<std::size_t>(shape_.num_slots), slot_bytes(),
                             &slots_total)) {
    throw MisuseError("the slots need more than 2^64 bytes of address space");
  }
  try {
    for (std::int32_t group = 0; group < shape_.num_groups; ++group) {
      arenas_.push_back(reserve(arena_bytes(), Backing::kTrap));
      slots_.push_back(reserve(slots_bytes(), Backing::kTrap));
    }
  } catch (const Error&) {
    for (const Address addr : all_) driver_->free_reservation(addr);
    throw;
  }
}

AddressSpace::~AddressSpace() {
  for (const Address addr : all_) {
    try {
      driver_->free_reservation(addr);
    } catch (const Error&) {
      // In a fork, the parent frees the addresses. Else the driver frees them when it is destroyed.
      return;
    }
  }
}

Address AddressSpace::reserve(std::size_t bytes, Backing backing) {
  all_.reserve(all_.size() + 1);
  const Address addr = driver_->reserve(bytes, backing);
  all_.push_back(addr);
  return addr;
}

void AddressSpace::reserve_shadow() {
  try {
    for (std::int32_t group = 0; group < shape_.num_groups; ++group) {
      shadows_.push_back(reserve(slots_bytes(), Backing::kZeros));
    }
  } catch (const Error&) {
    free_shadow();
    throw;
  }
}

void AddressSpace::free_shadow() {
  for (const Address addr : shadows_) {
    driver_->free_reservation(addr);
    all_.erase(std::find(all_.begin(), all_.end(), addr));
  }
  shadows_.clear();
}

}  // namespace vmserve
