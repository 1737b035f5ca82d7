// The kernels of one variant. The host defines:
//   VMS_TYPE      Bf16 or Fp16
//   VMS_KV        of K and V: the same, or E4m3
//   VMS_HEAD_DIM  64, 128 or 256
//   VMS_PAGED     true: block tables; false: slots
//   VMS_STAGES    tiles of the decode kernel, in use and in flight, 2 or more
//   VMS_PART_TOKENS  positions of a part of the keys
//   VMS_DECODE_BLOCKS, VMS_APPEND_BLOCKS  blocks per multiprocessor; limits registers
#include "append.cuh"
#include "combine.cuh"
#include "decode.cuh"
#include "gate.cuh"
#include "norm.cuh"
#include "write.cuh"

VMS_KERNEL(32 * kDecodeWarps, VMS_DECODE_BLOCKS) vms_decode(const AttendArgs args) {
  attend_decode<VMS_TYPE, VMS_KV, VMS_HEAD_DIM, VMS_PAGED, VMS_STAGES>(args);
}

VMS_KERNEL(32 * kAppendWarps, VMS_APPEND_BLOCKS) vms_append(const AttendArgs args) {
  attend_append<VMS_TYPE, VMS_KV, VMS_HEAD_DIM, VMS_PAGED>(args);
}

VMS_KERNEL(32 * kCombineWarps, 4) vms_combine(const CombineArgs args) {
  combine_parts<VMS_TYPE, VMS_HEAD_DIM>(args);
}

VMS_KERNEL(kWriteThreads, 8) vms_write(const WriteArgs args) {
  write_token<VMS_TYPE, VMS_KV, VMS_HEAD_DIM, VMS_PAGED>(args);
}

VMS_KERNEL(kNormThreads, 4) vms_norm(const NormArgs args) {
  norm_row<VMS_TYPE>(args);
}

VMS_KERNEL(kGateThreads, 12) vms_gate(const GateArgs args) {
  gate_row<VMS_TYPE>(args);
}

VMS_KERNEL(kMoveThreads, 4) vms_copy(const MoveArgs args) {
  move_runs<false>(args);
}

VMS_KERNEL(kMoveThreads, 4) vms_zero(const MoveArgs args) {
  move_runs<true>(args);
}
