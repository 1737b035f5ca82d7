"""The process that ``vmserve bench startup`` measures; it writes when it reached each phase.

Times are of ``time.monotonic``, which all processes of a machine share, so that the parent can
count them from before this process existed. Imports come late for that reason.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main", "offline", "only_torch"]

_PROMPT = list(range(10, 26))


def only_torch() -> dict[str, Any]:
    """Measure an interpreter that imported torch and did nothing with it."""
    import torch  # noqa: PLC0415 - it is what is measured

    from vmserve_bench.lab.measure import read_memory  # noqa: PLC0415

    torch.zeros(1)
    return {"memory": read_memory()}


def offline(options: dict[str, Any]) -> dict[str, Any]:
    """An engine from nothing to its first token: what was reached when, by the clock and in
    seconds of the processor, and the memory at the end."""
    from vmserve.config import EngineConfig  # noqa: PLC0415
    from vmserve.engine import build  # noqa: PLC0415
    from vmserve.engine.engine import LLMEngine  # noqa: PLC0415 - it is what is timed
    from vmserve.sampling import SamplingParams  # noqa: PLC0415

    reached = {"imports": time.monotonic()}
    cpu = {"imports": time.process_time()}
    made: dict[str, Any] = {}

    def reach(name: str) -> None:
        reached[name], cpu[name] = time.monotonic(), time.process_time()

    def stamped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            made[name] = function(*args, **kwargs)
            reach(name)
            return made[name]

        return call

    # This process ends with the measurement, so nothing else meets these.
    for name, phase in (("create_memory", "kv_pool"), ("load_model", "model")):
        setattr(build, name, stamped(phase, getattr(build, name)))
    engine = LLMEngine(EngineConfig.from_options(options))
    reach("engine")
    params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False, temperature=0.0)
    engine.add_request("first", _PROMPT, params)
    while engine.has_unfinished:
        for failure in engine.step().failures:
            raise failure.error
    reach("first_token")
    from vmserve_bench.lab.measure import read_memory  # noqa: PLC0415 - after what is timed

    memory, stats = read_memory(), engine.memory.stats()
    sizes = {
        "weights": made["model"].parameter_bytes,
        "kv_cache": stats.committed_pages * engine.memory.layout.total_page_bytes,
    }
    engine.close()
    return {"reached": reached, "cpu": cpu, "memory": memory, "sizes": sizes}


def main() -> None:
    """``offline OPTIONS`` and ``torch {}`` write what they found to standard output;
    ``serve OPTIONS PORT`` serves."""
    options = json.loads(sys.argv[2])
    if sys.argv[1] == "serve":
        from vmserve.cli.serve import serve_command  # noqa: PLC0415 - it is what is timed

        server = {"port": int(sys.argv[3]), "served_model_names": ["startup"]}
        serve_command(**server, **options)
    else:
        print(json.dumps(only_torch() if sys.argv[1] == "torch" else offline(options)))


if __name__ == "__main__":
    main()
