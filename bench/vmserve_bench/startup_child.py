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
    from vmserve.runner.computing import Computing  # noqa: PLC0415
    from vmserve.sampling import SamplingParams  # noqa: PLC0415

    reached: dict[str, float] = {}
    cpu: dict[str, float] = {}

    def reach(name: str) -> None:
        reached[name], cpu[name] = time.monotonic(), time.process_time()

    reach("imports")
    made: dict[str, Any] = {}

    def stamp(owner: object, function: str, phase: str) -> None:
        original: Callable[..., Any] = getattr(owner, function)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if phase not in made:  # a draft model comes after the engine's own
                made[phase] = result
                reach(phase)
            return result

        setattr(owner, function, call)

    # This process ends with the measurement, so nothing else meets these.
    stamp(Computing, "load", "model")
    stamp(build, "create_memory", "kv_pool")
    engine = LLMEngine(EngineConfig.from_options(options))
    reach("engine")
    params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False, temperature=0.0)
    engine.add_request("first", list(range(10, 26)), params)
    while engine.has_unfinished:
        for failure in engine.step().failures:
            raise failure.error
    reach("first_token")
    from vmserve_bench.lab.measure import read_memory  # noqa: PLC0415 - after what is timed

    memory, pages = read_memory(), engine.memory.stats().committed_pages
    sizes = {
        "weights": made["model"].parameter_bytes,
        "kv_cache": pages * engine.memory.layout.total_page_bytes,
    }
    engine.close()
    return {"reached": reached, "cpu": cpu, "memory": memory, "sizes": sizes}


def main() -> None:
    """``offline OPTIONS`` and ``torch {}`` write what they found to standard output;
    ``serve OPTIONS`` serves."""
    options = json.loads(sys.argv[2])
    if sys.argv[1] == "serve":
        from vmserve.cli.serve import serve_command  # noqa: PLC0415 - it is what is timed

        server: dict[str, Any] = {"port": 0, "served_model_names": ["startup"]}
        serve_command(**server, **options)
    else:
        print(json.dumps(only_torch() if sys.argv[1] == "torch" else offline(options)))


if __name__ == "__main__":
    main()
