// The three ways in which the memory core fails, kept apart because they ask for
// different reactions: misuse is a bug of the caller, a driver error is the memory
// system refusing a call, out of memory is ordinary and recoverable.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace vmserve {

// Base of all. `completed` is meaningful when a batched driver call threw: that many of
// its runs are done; the rest, the failing one included, had no effect.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& what, std::size_t completed = 0)
      : std::runtime_error(what), completed(completed) {}
  std::size_t completed;
};

// A precondition does not hold. Python: ValueError.
class MisuseError : public Error {
 public:
  using Error::Error;
};

// The memory system refused `call` with `code` (an errno, or a CUresult). `sticky`: the device is
// lost and every later call may fail. Python: vmserve.errors.DriverError.
class DriverError : public Error {
 public:
  DriverError(std::string call, int code, const std::string& what, std::size_t completed = 0,
              bool sticky = false)
      : Error(what, completed), call(std::move(call)), code(code), sticky(sticky) {}
  std::string call;
  int code;
  bool sticky;
};

// Not enough memory; nothing changed. Python: vmserve.errors.OutOfMemoryError.
class OutOfMemoryError : public Error {
 public:
  using Error::Error;
};

// A conservation law is broken: state that must never be observed. Python: AssertionError.
class InvariantError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

}  // namespace vmserve
