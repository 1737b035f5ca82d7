/* A driver plugin that does nothing, and one thing wrong: the option `fault` says which. What is
 * wrong with the table itself is chosen when it is compiled. Plain C99, so that the header is. */
#include <string.h>

#include "vmserve_driver.h"

struct vmserve_driver_context {
  char fault[32];
  uint64_t next;
  uint64_t marks;
};

static struct vmserve_driver_context context;
static int num_calls;
static int num_closes;
static int num_unfenced_closes;
static int fenced;

VMSERVE_EXPORT int misbehaving_calls(void);
VMSERVE_EXPORT int misbehaving_calls(void) {
  return num_calls;
}

VMSERVE_EXPORT int misbehaving_unfenced_closes(void);
VMSERVE_EXPORT int misbehaving_unfenced_closes(void) {
  return num_unfenced_closes;
}

VMSERVE_EXPORT int misbehaving_closes(void);
VMSERVE_EXPORT int misbehaving_closes(void) {
  return num_closes;
}

static int fault_is(const char* name) {
  return strcmp(context.fault, name) == 0;
}

static int32_t fail(int32_t status, uint64_t completed, vmserve_error* error) {
  error->code = 5;
  error->completed = completed;
  strcpy(error->call, "frobnicate");
  strcpy(error->message, "the reason and the remedy");
  if (fault_is("silent")) memset(error->message, 0, sizeof(error->message));
  if (fault_is("endless")) {
    memset(error->message, 'x', sizeof(error->message));
    memset(error->call, 'y', sizeof(error->call));
  }
  return status;
}

static int32_t open_driver(const vmserve_driver_config* config, vmserve_driver_context** result,
                           vmserve_driver_info* info, vmserve_error* error) {
  memset(&context, 0, sizeof(context));
  context.next = UINT64_C(1) << 40;
  context.marks = 10;
  if (config->num_options == 1) strncpy(context.fault, config->options[0].value, 31);
#ifdef __cplusplus
  if (fault_is("throwing open")) throw 1;
#endif
  if (fault_is("refused open")) return fail(VMSERVE_REFUSED, 0, error);
  info->capabilities = VMSERVE_CAN_READ_ONLY | VMSERVE_CAN_HOST_MEMORY | VMSERVE_IS_ASYNCHRONOUS;
  if (fault_is("claims unmap")) info->capabilities |= VMSERVE_CAN_UNMAP;
  if (fault_is("future")) info->capabilities |= UINT64_C(1) << 60;
  info->granularity = fault_is("granularity") ? 4095 : 4096;
  info->frame_bytes = fault_is("frame_bytes") ? 8192 : config->frame_bytes;
  info->num_frames = config->num_frames;
  *result = fault_is("no context") ? NULL : &context;
  return VMSERVE_OK;
}

static void close_driver(vmserve_driver_context* c) {
  (void)c;
  ++num_closes;
  num_unfenced_closes += !fenced;
  fenced = 0;
}

static int32_t reserve(vmserve_driver_context* c, uint64_t bytes, uint32_t backing,
                       uint64_t* address, vmserve_error* error) {
  (void)backing;
  (void)error;
  ++num_calls;
  *address = c->next;
  c->next += bytes;
  if (fault_is("misaligned")) *address += 1;
  if (fault_is("null")) *address = 0;
  if (fault_is("wrapping")) *address = UINT64_MAX - 4095;
  if (fault_is("overlapping")) c->next -= 4096;
  return VMSERVE_OK;
}

static int32_t give_back(vmserve_driver_context* c, uint64_t address, vmserve_error* error) {
  (void)c;
  (void)address;
  (void)error;
  ++num_calls;
  return VMSERVE_OK;
}

static int32_t on_frames(vmserve_driver_context* c, const vmserve_frame_run* runs, uint64_t count,
                         vmserve_error* error) {
  (void)c;
  (void)runs;
  (void)count;
  ++num_calls;
  if (fault_is("half created")) return fail(VMSERVE_OUT_OF_MEMORY, 1, error);
  return VMSERVE_OK;
}

static int32_t map(vmserve_driver_context* c, const vmserve_map_run* runs, uint64_t count,
                   vmserve_error* error) {
  (void)c;
  (void)runs;
  ++num_calls;
#ifdef __cplusplus
  if (fault_is("throwing map")) throw 1;
#endif
  if (fault_is("misuse")) return fail(VMSERVE_MISUSE, 1, error);
  if (fault_is("refused")) return fail(VMSERVE_REFUSED, 1, error);
  if (fault_is("out of memory")) return fail(VMSERVE_OUT_OF_MEMORY, 1, error);
  if (fault_is("sticky")) return fail(VMSERVE_STICKY, 1, error);
  if (fault_is("silent") || fault_is("endless")) return fail(VMSERVE_MISUSE, 0, error);
  if (fault_is("all completed")) return fail(VMSERVE_REFUSED, count, error);
  if (fault_is("unknown status")) return fail(99, 0, error);
  return VMSERVE_OK;
}

static int32_t on_addresses(vmserve_driver_context* c, const vmserve_address_run* runs,
                            uint64_t count, vmserve_error* error) {
  (void)c;
  (void)runs;
  (void)count;
  (void)error;
  ++num_calls;
  return VMSERVE_OK;
}

static int32_t set_access(vmserve_driver_context* c, const vmserve_access_run* runs, uint64_t count,
                          vmserve_error* error) {
  (void)runs;
  return on_addresses(c, NULL, count, error);
}

static int32_t copy(vmserve_driver_context* c, const vmserve_copy_run* runs, uint64_t count,
                    vmserve_error* error) {
  (void)runs;
  return on_addresses(c, NULL, count, error);
}

static int32_t fence(vmserve_driver_context* c, vmserve_error* error) {
  (void)c;
  (void)error;
  ++num_calls;
  fenced = 1;
  return VMSERVE_OK;
}

static int32_t mark(vmserve_driver_context* c, uint64_t* result, vmserve_error* error) {
  (void)error;
  ++num_calls;
  *result = fault_is("marks backwards") ? c->marks-- : c->marks++;
  return VMSERVE_OK;
}

static int32_t reached(vmserve_driver_context* c, uint64_t value, uint32_t* result,
                       vmserve_error* error) {
  (void)c;
  (void)value;
  (void)error;
  ++num_calls;
  *result = fault_is("half reached") ? 2 : 1;
  return VMSERVE_OK;
}

static int32_t query(vmserve_driver_context* c, uint64_t address, vmserve_mapping* mapping,
                     vmserve_error* error) {
  (void)c;
  (void)address;
  (void)error;
  ++num_calls;
  mapping->frame = fault_is("query frame") ? 99 : fault_is("query access") ? 0 : VMSERVE_NO_FRAME;
  return VMSERVE_OK;
}

static int32_t stats(vmserve_driver_context* c, vmserve_driver_stats* result,
                     vmserve_error* error) {
  (void)c;
  (void)error;
  ++num_calls;
  result->max_mappings = INT64_MAX;
  if (fault_is("negative stats")) result->mapped_frames = -1;
  if (fault_is("too many frames")) result->created_frames = 1000;
  if (fault_is("too many mappings")) result->max_mappings = -1;
  return VMSERVE_OK;
}

static int32_t alloc_host(vmserve_driver_context* c, uint64_t bytes, uint64_t* address,
                          vmserve_error* error) {
  (void)c;
  (void)bytes;
  (void)error;
  ++num_calls;
  *address = fault_is("no host memory") ? 0 : 4096;
  return VMSERVE_OK;
}

#ifndef MISBEHAVING_NO_ENTRY
const vmserve_driver* vmserve_driver_entry(uint32_t host_abi_version) {
  static struct {
    vmserve_driver table;
    void* newer_field;
  } newer;
  vmserve_driver* table = &newer.table;
  (void)host_abi_version;
  table->abi_version = VMSERVE_DRIVER_ABI_VERSION;
  table->struct_size = sizeof(newer); /* as of a later revision: its last field is ignored */
  table->name = "misbehaving";
  table->open = open_driver;
  table->close = close_driver;
  table->reserve = reserve;
  table->free_reservation = give_back;
  table->create = on_frames;
  table->destroy = on_frames;
  table->map = map;
  table->set_access = set_access;
  table->zero = on_addresses;
  table->copy = copy;
  table->fence = fence;
  table->mark = mark;
  table->reached = reached;
  table->alloc_host = alloc_host;
  table->free_host = give_back;
  table->query = query;
  table->stats = stats;
#ifdef MISBEHAVING_VERSION
  table->abi_version = MISBEHAVING_VERSION;
#endif
#ifdef MISBEHAVING_SIZE
  table->struct_size = MISBEHAVING_SIZE;
#endif
#ifdef MISBEHAVING_MISSING
  table->map = NULL;
  table->query = NULL;
#endif
#ifdef MISBEHAVING_NO_TABLE
  return NULL;
#else
  return table;
#endif
}
#endif
