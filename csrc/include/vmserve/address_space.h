// The address reservations of one KV memory, and its layout in them.
//
// Each layer group has an arena of max_pages pages and a slot area of num_slots x slot_pages pages.
// On request it has a shadow: a second slot area that reads as zero where nothing is mapped. Page p
// of group g is frame g * max_pages + p.
#pragma once

#include <memory>
#include <vector>

#include "vmserve/driver.h"
#include "vmserve/types.h"

namespace vmserve {

class AddressSpace {
 public:
  struct Shape {
    std::int32_t num_groups;
    std::int32_t num_slots;
    std::int64_t slot_pages;
    std::int64_t max_pages;
  };

  AddressSpace(std::shared_ptr<PageDriver> driver, Shape shape);
  // Tensors over the memory share ownership: the last owner frees it.
  ~AddressSpace();
  AddressSpace(const AddressSpace&) = delete;
  AddressSpace& operator=(const AddressSpace&) = delete;

  PageDriver& driver() const { return *driver_; }
  const Shape& shape() const { return shape_; }
  std::size_t page_bytes() const { return page_bytes_; }
  std::size_t arena_bytes() const { return shape_.max_pages * page_bytes_; }
  std::size_t slot_bytes() const { return shape_.slot_pages * page_bytes_; }
  std::size_t slots_bytes() const { return shape_.num_slots * slot_bytes(); }

  FrameId frame(std::int32_t group, PageId page) const { return group * shape_.max_pages + page; }
  Address arena(std::int32_t group, PageId page = 0) const {
    return arenas_[group] + page * page_bytes_;
  }
  Address slot(std::int32_t group, std::int32_t slot = 0, std::int64_t index = 0) const {
    return slots_[group] + slot * slot_bytes() + index * page_bytes_;
  }
  // Pre: has_shadow().
  Address shadow(std::int32_t group, std::int32_t slot = 0, std::int64_t index = 0) const {
    return shadows_[group] + slot * slot_bytes() + index * page_bytes_;
  }

  bool has_shadow() const { return !shadows_.empty(); }
  void reserve_shadow();
  void free_shadow();

 private:
  Address reserve(std::size_t bytes, Backing backing);

  std::shared_ptr<PageDriver> driver_;
  Shape shape_;
  std::size_t page_bytes_;
  std::vector<Address> all_;  // all reservations, for the destructor
  std::vector<Address> arenas_;
  std::vector<Address> slots_;
  std::vector<Address> shadows_;
};

}  // namespace vmserve
