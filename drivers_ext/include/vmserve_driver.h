/* The plugin ABI for page drivers of vmserve, version 1. Plain C99; C++ may include it.
 *
 * A plugin is a shared library that exports one function, `vmserve_driver_entry`. It returns a
 * table of functions; vmserve checks the table, opens a driver with `open` and closes it with
 * `close`. What each function must do is the contract of csrc/include/vmserve/driver.h, repeated
 * here in short; `python -m pytest tests/conformance --driver-plugin PATH` checks a plugin.
 *
 * Glossary
 *   frame        one unit of physical memory of `frame_bytes`, numbered 0 <= id < num_frames.
 *   reservation  a range of addresses without memory behind it.
 *   mapping      a frame made visible at an address. One frame may be mapped many times (aliases).
 *   run          adjacent frames at adjacent addresses.
 *   mark         a point in the device's order of work.
 *
 * Laws
 *   * Batches. A batched call executes its runs in order. When it fails, the first
 *     `error->completed` runs are done and the others, the failing one included, had no effect.
 *     `completed` is less than the number of runs. `create` is all or nothing: `completed` is 0.
 *     vmserve never calls with an empty batch.
 *   * Errors. A broken precondition is VMSERVE_MISUSE and changes nothing; a refusal of the
 *     system is VMSERVE_REFUSED or VMSERVE_OUT_OF_MEMORY; VMSERVE_STICKY means that the device is
 *     lost and every later call may fail. Nothing aborts the process or is dropped in silence.
 *     `error` is never NULL; vmserve clears it before each call.
 *   * Exceptions. No exception and no longjmp may cross this boundary.
 *   * Threads. Calls on one context are never concurrent but may come from several threads: keep
 *     no thread-local state between calls (make a device's context current in every call).
 *     Different contexts may be used at the same time.
 *   * Fork. vmserve never calls a context from a fork of the process that opened it.
 *   * Lifetime. The table and its strings live as long as the library is loaded. The library
 *     stays loaded while a context is open. Arguments live until the call returns: copy what is
 *     needed later. `close` gives everything back, frames and reservations included.
 *   * Time. map, unmap, set_access, create and destroy take effect at once without waiting. The
 *     caller guarantees that no work in flight uses the addresses. zero and copy are work: they are
 *     executed in the order of calls, after kernels started before them and before kernels started
 *     later.
 *
 * Versions
 *   `abi_version` changes when the meaning of a field changes; vmserve loads only its own.
 *   Fields are added only at the end of a struct; `struct_size` is the writer's size of it. A
 *   reader ignores fields that it does not know (struct_size larger than its own) and takes fields
 *   beyond the writer's struct_size as zero or NULL.
 *
 * Capabilities
 *   Functions that are not marked with a capability below are mandatory. A marked pointer may be
 *   NULL if its capability is absent. vmserve then does not call it, but answers itself: with a
 *   misuse error or, without ASYNCHRONOUS, with "all done".
 */
#ifndef VMSERVE_DRIVER_H
#define VMSERVE_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define VMSERVE_DRIVER_ABI_VERSION 1u
#define VMSERVE_DRIVER_ENTRY "vmserve_driver_entry"

/* What a call returns: VMSERVE_OK, or the class of its error. */
enum {
  VMSERVE_OK = 0,
  VMSERVE_MISUSE = 1,        /* a precondition does not hold; nothing changed */
  VMSERVE_REFUSED = 2,       /* the system refused the call */
  VMSERVE_OUT_OF_MEMORY = 3, /* not enough memory; nothing changed */
  VMSERVE_STICKY = 4         /* the device is lost */
};

/* Bits of vmserve_driver_info.capabilities. Calls that need an absent one are misuse.
 *   CAN_UNMAP          without it, frames stay where they were mapped: never multi-tenant
 *   CAN_READ_ONLY      VMSERVE_READ traps writes; without it, it maps writable
 *   CAN_ZEROS_BACKING  VMSERVE_BACKING_ZEROS
 *   CAN_HOST_MEMORY    alloc_host, and copies to and from it
 *   IS_ASYNCHRONOUS    zero and copy may still be running when the call returns */
#define VMSERVE_CAN_UNMAP (UINT64_C(1) << 0)
#define VMSERVE_CAN_READ_ONLY (UINT64_C(1) << 1)
#define VMSERVE_CAN_ZEROS_BACKING (UINT64_C(1) << 2)
#define VMSERVE_CAN_HOST_MEMORY (UINT64_C(1) << 3)
#define VMSERVE_IS_ASYNCHRONOUS (UINT64_C(1) << 4)

enum { VMSERVE_ACCESS_NONE = 0, VMSERVE_READ = 1, VMSERVE_READ_WRITE = 2 };

/* What an unmapped address of a reservation shows. */
enum {
  VMSERVE_BACKING_TRAP = 0, /* any access is a fault */
  VMSERVE_BACKING_ZEROS = 1 /* reads give zero, writes are a fault */
};

#define VMSERVE_NO_FRAME INT64_C(-1)
#define VMSERVE_MESSAGE_BYTES 512

/* Filled by a call that does not return VMSERVE_OK. `message` ends with a NUL and says what
 * failed, with its number and the remedy. `call` names the system call. */
typedef struct vmserve_error {
  uint32_t struct_size; /* set by vmserve */
  int32_t code;         /* an errno, or the system's own code; 0 if there is none */
  uint64_t completed;   /* runs of a batched call that are done */
  char call[32];
  char message[VMSERVE_MESSAGE_BYTES];
} vmserve_error;

typedef struct vmserve_option {
  const char* key;
  const char* value;
} vmserve_option;

/* The driver that vmserve requests. */
typedef struct vmserve_driver_config {
  uint32_t struct_size;
  uint32_t abi_version;
  uint64_t frame_bytes;
  int64_t num_frames;
  const vmserve_option* options; /* from the user; refuse unknown keys */
  uint64_t num_options;
} vmserve_driver_config;

/* Properties of the opened driver; constant until `close`. */
typedef struct vmserve_driver_info {
  uint32_t struct_size; /* set by vmserve */
  uint32_t reserved;
  uint64_t capabilities;
  uint64_t granularity; /* sizes and addresses of frames are multiples of this */
  uint64_t frame_bytes; /* as requested */
  int64_t num_frames;   /* as requested */
} vmserve_driver_info;

typedef struct vmserve_frame_run {
  int64_t first;
  int64_t count;
} vmserve_frame_run;

typedef struct vmserve_map_run {
  uint64_t address;
  int64_t first;
  int64_t count;
  uint32_t access;   /* VMSERVE_READ or VMSERVE_READ_WRITE */
  uint32_t prefault; /* a hint: not 0 if the range is about to be touched */
} vmserve_map_run;

typedef struct vmserve_address_run {
  uint64_t address;
  uint64_t bytes;
} vmserve_address_run;

typedef struct vmserve_access_run {
  uint64_t address;
  uint64_t bytes;
  uint32_t access;
  uint32_t reserved;
} vmserve_access_run;

typedef struct vmserve_copy_run {
  uint64_t dst;
  uint64_t src;
  uint64_t bytes;
} vmserve_copy_run;

typedef struct vmserve_mapping {
  int64_t frame; /* VMSERVE_NO_FRAME: nothing is mapped */
  uint32_t access;
  uint32_t reserved;
} vmserve_mapping;

typedef struct vmserve_driver_stats {
  uint32_t struct_size; /* set by vmserve */
  uint32_t reserved;
  int64_t created_frames;
  int64_t mapped_frames;   /* a frame mapped twice counts twice */
  int64_t num_mappings;    /* what counts against max_mappings */
  int64_t max_mappings;    /* the driver's limit; INT64_MAX: none */
  int64_t allocated_bytes; /* physical memory behind the frames now */
} vmserve_driver_stats;

/* Defined by the plugin; vmserve only passes it on. */
typedef struct vmserve_driver_context vmserve_driver_context;

typedef struct vmserve_driver {
  uint32_t abi_version; /* VMSERVE_DRIVER_ABI_VERSION */
  uint32_t struct_size; /* sizeof(vmserve_driver) of the plugin's build */
  const char* name;     /* for messages: "sample 1.0" */

  /* Post: *context is a driver of config->num_frames frames, none of which exists, and *info
   * describes it. On failure nothing is left behind and *context is ignored. */
  int32_t (*open)(const vmserve_driver_config* config, vmserve_driver_context** context,
                  vmserve_driver_info* info, vmserve_error* error);
  /* Never fails. No work is in flight: vmserve calls `fence` before, if there is one. */
  void (*close)(vmserve_driver_context* context);

  /* Pre:  bytes > 0, a multiple of frame_bytes; backing ZEROS only with CAN_ZEROS_BACKING.
   * Post: [*address, *address + bytes) is reserved, a multiple of the granularity; no memory is
   *       used. */
  int32_t (*reserve)(vmserve_driver_context* context, uint64_t bytes, uint32_t backing,
                     uint64_t* address, vmserve_error* error);
  /* Pre:  address came from reserve and was not freed.
   * Post: the range and all its mappings are gone. */
  int32_t (*free_reservation)(vmserve_driver_context* context, uint64_t address,
                              vmserve_error* error);

  /* Pre:  the frames do not exist, and none is twice in the batch.
   * Post: they exist, are not mapped and read as zero; their memory is allocated. All of the
   *       batch or nothing. */
  int32_t (*create)(vmserve_driver_context* context, const vmserve_frame_run* runs, uint64_t count,
                    vmserve_error* error);
  /* Pre:  the frames exist and are mapped nowhere.
   * Post: they do not exist; their memory is back with the system. */
  int32_t (*destroy)(vmserve_driver_context* context, const vmserve_frame_run* runs, uint64_t count,
                     vmserve_error* error);

  /* Pre:  the frames exist; the addresses lie in one reservation, frame-aligned from its start,
   *       and nothing is mapped there; access is READ or READ_WRITE.
   * Post: they show the frames. */
  int32_t (*map)(vmserve_driver_context* context, const vmserve_map_run* runs, uint64_t count,
                 vmserve_error* error);
  /* CAN_UNMAP. Pre: whole frames, all mapped.
   * Post: the addresses show their reservation's backing again and stay reserved. */
  int32_t (*unmap)(vmserve_driver_context* context, const vmserve_address_run* runs, uint64_t count,
                   vmserve_error* error);
  /* Pre: whole frames, all mapped; access is READ or READ_WRITE. Without CAN_READ_ONLY: checks
   * the preconditions, remembers the access for `query`, changes nothing else. */
  int32_t (*set_access)(vmserve_driver_context* context, const vmserve_access_run* runs,
                        uint64_t count, vmserve_error* error);

  /* Pre: the addresses are mapped READ_WRITE, bytes > 0. Post: they read as zero. */
  int32_t (*zero)(vmserve_driver_context* context, const vmserve_address_run* runs, uint64_t count,
                  vmserve_error* error);
  /* Pre: dst is mapped READ_WRITE, src is mapped, or they lie in host memory; no overlap. */
  int32_t (*copy)(vmserve_driver_context* context, const vmserve_copy_run* runs, uint64_t count,
                  vmserve_error* error);

  /* IS_ASYNCHRONOUS. Waits for all work requested before. */
  int32_t (*fence)(vmserve_driver_context* context, vmserve_error* error);
  /* IS_ASYNCHRONOUS. *mark is after all work requested so far. Marks never decrease and are
   * reached in order. */
  int32_t (*mark)(vmserve_driver_context* context, uint64_t* mark, vmserve_error* error);
  /* IS_ASYNCHRONOUS. *reached is 1 if all work before the mark is done, else 0. Never waits. */
  int32_t (*reached)(vmserve_driver_context* context, uint64_t mark, uint32_t* reached,
                     vmserve_error* error);

  /* CAN_HOST_MEMORY. Allocates host memory for swapping; its content is undefined. Pre: bytes > 0.
   */
  int32_t (*alloc_host)(vmserve_driver_context* context, uint64_t bytes, uint64_t* address,
                        vmserve_error* error);
  /* CAN_HOST_MEMORY. Pre: address came from alloc_host, no copy of it is running. */
  int32_t (*free_host)(vmserve_driver_context* context, uint64_t address, vmserve_error* error);

  /* What is mapped at the address. Pre: it lies in a reservation. */
  int32_t (*query)(vmserve_driver_context* context, uint64_t address, vmserve_mapping* mapping,
                   vmserve_error* error);
  int32_t (*stats)(vmserve_driver_context* context, vmserve_driver_stats* stats,
                   vmserve_error* error);
} vmserve_driver;

#if defined(__GNUC__)
#define VMSERVE_EXPORT __attribute__((visibility("default")))
#else
#define VMSERVE_EXPORT
#endif

/* The one exported symbol. `host_abi_version` is the version of the loading vmserve. Return a table
 * of that version if you have one, else your newest (vmserve then reports the difference), or NULL
 * if the plugin cannot work at all. */
VMSERVE_EXPORT const vmserve_driver* vmserve_driver_entry(uint32_t host_abi_version);

#ifdef __cplusplus
}
#endif

#endif /* VMSERVE_DRIVER_H */
