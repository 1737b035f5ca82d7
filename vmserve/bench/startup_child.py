"""The fresh process that ``vmserve bench startup`` times; it says when it came to what.

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

__all__ = ["main", "offline"]

_PROMPT = list(range(10, 26))


def offline(options: dict[str, Any]) -> dict[str, float]:
    """An engine from nothing to its first token; what was reached when."""
    import vmserve.engine as engine_module  # noqa: PLC0415 - it is what is timed
    from vmserve.config import EngineConfig  # noqa: PLC0415
    from vmserve.sampling import SamplingParams  # noqa: PLC0415

    reached = {"imports": time.monotonic()}

    def stamped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            reached[name] = time.monotonic()
            return result

        return call

    # This process ends with the measurement, so that nobody else meets these.
    for name, phase in (("_create_memory", "kv_pool"), ("load_model", "model")):
        setattr(engine_module, name, stamped(phase, getattr(engine_module, name)))
    engine = engine_module.LLMEngine(EngineConfig.from_options(options))
    reached["engine"] = time.monotonic()
    params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False, temperature=0.0)
    engine.add_request("first", _PROMPT, params)
    while engine.has_unfinished:
        for failure in engine.step().failures:
            raise failure.error
    reached["first_token"] = time.monotonic()
    engine.close()
    return reached


def main() -> None:
    """``offline OPTIONS`` writes times to standard output; ``serve OPTIONS PORT`` serves."""
    options = json.loads(sys.argv[2])
    if sys.argv[1] == "serve":
        from vmserve.cli_serve import serve_command  # noqa: PLC0415 - it is what is timed

        serve_command(port=int(sys.argv[3]), served_model_name=["startup"], **options)
    else:
        print(json.dumps(offline(options)))


if __name__ == "__main__":
    main()
