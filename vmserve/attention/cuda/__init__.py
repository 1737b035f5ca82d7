"""Our CUDA kernels over either view: decode, prefill, and the write of K and V.

``csrc/cuda`` has the kernels; NVRTC compiles them at first use (:mod:`.compile`), a cubin
is kept on disk. Nothing of CUDA is imported before a backend is used.

A step, eagerly (allocates its plan at ``bind``, nothing in the calls of the layers)::

    backend = CudaPagedBackend()            # or create_backend("cuda", ...)
    call = backend.bind(view, batch)        # host: makes the plan, copies it to the device
    for layer in layers:
        out = call(layer.attention, q, k, v, rotary)

For CUDA graphs, buffers and grids of a fixed size, whose contents change between replays::

    plan = backend.plan_capacity(
        view, max_seqs=64, max_tokens=64, max_new=1, max_len=8192, q_heads=32, windows=(None,)
    )
    plan.update(batch)                  # any batch that fits; asynchronous, on this stream
    with torch.cuda.graph(graph):
        out = plan.call(spec, q, k, v, rotary, out=buffer)  # once per layer
    ...
    plan.update(next_batch)                 # before every replay, on the stream of the replay
    graph.replay()

Rules of a captured plan:

* q, k and v have any number of rows from ``batch.num_tokens`` to ``max_tokens``, the same in every
  replay; rows past ``batch.num_tokens`` are neither written to the cache nor attended, and their
  rows of the output are left as they are.
* ``update`` makes a plan for each of ``windows``: every ``spec.window`` that a layer asks for must
  be among them. It returns when the plan is enqueued; it does not wait for the device.
* Plans of a backend share the room for parts and for rotated queries: two of them must not run at
  once. That with the most room should come first, or the room is taken twice.
* Plans are made for one ``view``: slots may be remapped, lengths and block tables may change
  between replays, the tensors of the view must stay where they are. ``view.block_tables`` may be
  on the host (then ``update`` copies the rows that the batch needs) or on the device (then it is
  read in place, and whoever keeps it current orders that before the replay).
* ``plan.call`` allocates only its output, and only if ``out`` is not given; it makes no copy and
  waits for nothing.

The kernels read no position at or past a sequence's length (``read_slack_tokens`` is 0), in
blocks of 16 tokens or a multiple that is a power of two, and heads of 64, 128 or 256 in bf16 or
fp16. K and V are in the same type, or codes of 8 bits with a scale for each token and head
(``--kv-cache-dtype fp8``, docs/decisions/0080).
"""

from __future__ import annotations

from vmserve.attention.cuda.backend import CapacityPlan, CudaCall, CudaPagedBackend
from vmserve.attention.cuda.launcher import CudaLauncher, Launcher
from vmserve.attention.cuda.moves import Mover
from vmserve.attention.cuda.plan import SharedPrefix

__all__ = [
    "CapacityPlan",
    "CudaCall",
    "CudaLauncher",
    "CudaPagedBackend",
    "Launcher",
    "Mover",
    "SharedPrefix",
]
