"""The trace file: every step and request, in the format that Perfetto reads."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from vmserve import LLM, BeamSearchParams, SamplingParams
from vmserve.errors import ConfigurationError
from vmserve.telemetry.phases import PHASES

Event = dict[str, Any]


def named(events: list[Event], phase: str, name: str) -> list[Event]:
    return [event for event in events if event["ph"] == phase and event["name"] == name]


def test_every_step_and_request_is_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    prompts = [[1, *range(5, 5 + length)] for length in (90, 60, 30)]
    pool = {"kv_page_size": "16KiB", "kv_cache_memory": "1MiB", "max_model_len": 256}
    swap = {"kv_regime": "paged", "swap_space": "8MiB", "preemption": "swap"}
    with LLM(dtype="float32", trace_file=str(path), **pool, **swap) as llm:
        drawn = SamplingParams(n=3, seed=1, max_tokens=40, ignore_eos=True)
        results = llm.generate(prompts, drawn)
        llm.beam_search(prompts[2:], BeamSearchParams(beam_width=2, max_tokens=8))
        stats = llm.stats()
    events = json.loads(path.read_text())
    steps = named(events, "X", "step")
    assert len(steps) == stats["engine_steps_total"]
    assert sum(step["args"]["tokens"] for step in steps) == stats["tokens_computed_total"]
    assert all(step["args"]["virtual"] == 0 for step in steps)
    # The phases of a step fill it, in order.
    parts = [event for event in events if event["ph"] == "X" and event["name"] != "step"]
    assert [part["name"] for part in parts] == list(PHASES) * len(steps)
    for index, step in enumerate(steps):
        inside = parts[index * len(PHASES) :][: len(PHASES)]
        assert inside[0]["ts"] == step["ts"]
        assert sum(part["dur"] for part in inside) == pytest.approx(step["dur"], abs=1)
    for name in PHASES:
        seconds = sum(part["dur"] for part in parts if part["name"] == name) / 1e6
        assert stats[f"step_{name}_seconds_total"] == pytest.approx(seconds, abs=1e-3)
    # What happened between the steps adds up to the counters.
    happened: Counter[str] = Counter()
    for event in events:
        if event["ph"] == "i":
            happened[event["name"]] += event["args"]["count"]
    assert happened["num_preemptions"] == stats["num_preemptions_total"] > 0
    assert happened["forks"] == stats["forks_total"] > 0
    assert happened["swapped_in_blocks"] == stats["swapped_in_blocks_total"] > 0
    for result in results:
        [begun], [ended] = (named(events, phase, result.request_id) for phase in "be")
        assert begun["args"]["preemptions"] == result.metrics.num_preemptions
        assert begun["args"]["regime"] == "paged"
        took = result.metrics.finished_time - result.metrics.arrival_time  # type: ignore[operator]
        assert ended["ts"] - begun["ts"] == pytest.approx(took * 1e6, abs=100)


def test_a_trace_that_is_cut_off_lacks_its_end_only(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with LLM(kv_cache_memory="64MiB", trace_file=str(path)) as llm:
        llm.generate([[1, 5, 6]], SamplingParams(max_tokens=4))
        llm.engine._figures.trace._file.flush()  # type: ignore[union-attr]
        events = json.loads(path.read_text() + "]")
    assert len(named(events, "X", "step")) == 4


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"trace_file: cannot write .* No such file"):
        LLM(kv_cache_memory="64MiB", trace_file=str(tmp_path / "no" / "trace.json"))


@pytest.mark.parametrize("num_tokens", [4, 400])  # what fails is the last write, or one before
def test_a_full_disk_ends_the_trace_and_nothing_else(
    num_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    with LLM(kv_cache_memory="64MiB", trace_file="/dev/full") as llm:
        [result] = llm.generate([[1, 5, 6]], params)
    assert len(result.outputs[0].token_ids) == num_tokens
    [told] = [record.getMessage() for record in caplog.records]
    assert told.startswith("trace_file: ")
    assert told.endswith("No space left on device")
