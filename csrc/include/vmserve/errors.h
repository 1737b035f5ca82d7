// Three kinds of failure of the memory core, which callers handle differently. Misuse is a bug of
// the caller, a driver error a refusal of the system. Out of memory is ordinary and recoverable.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace vmserve {

// Base class. If a batched driver call threw, `completed` of its runs are done. The others, the
// failing one included, had no effect.
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

// The system refused `call` with `code` (an errno or a CUresult). `sticky`: the device is lost, and
// every later call may fail. Python: vmserve.errors.DriverError.
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

// A conservation law is broken, which must never happen. Python: AssertionError.
class InvariantError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

}  // namespace vmserve
