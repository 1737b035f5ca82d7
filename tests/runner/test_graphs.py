"""Captured decoding steps: the same tokens as without, whatever comes and goes in the batch.

On the CPU a graph is a tape of operations on the tensors that it was recorded with, so that what
a GPU would have frozen is frozen here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.attention.stand_ins import EmulatedFlash
from tests.models.checkpoints import NATIVE, deepseek_v2, save
from tests.runner.planned import PlannedCpu
from tests.runner.test_async_scheduling import PROMPTS
from tests.support.engines import drain, greedy
from vmserve import BeamSearchParams, SamplingParams
from vmserve.attention import BACKENDS, PREFERRED
from vmserve.attention.flash import FlashBackend
from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.memory.base import Regime
from vmserve.models.hub import resolve_model
from vmserve.runner import graphs
from vmserve.runner.graphs import DecodeGraphs, widths
from vmserve.runner.torch_runtime import TorchCpuRuntime


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[PlannedCpu]:
    """Backends that plan ahead, in the place of the CPU's own; as they are made."""
    made: list[PlannedCpu] = []

    def create() -> PlannedCpu:
        made.append(PlannedCpu())
        return made[-1]

    monkeypatch.setitem(BACKENDS, "cpu", create)  # type: ignore[arg-type]
    return made


def engine_on(runtime: TorchCpuRuntime, **options: Any) -> LLMEngine:
    defaults: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory": "32MiB"}
    config = EngineConfig(**({"dtype": "float32"} | defaults | options))
    return LLMEngine(config, runtime=runtime)


def serve(
    *,
    graphs: bool,
    params: Callable[[int], Any],
    change: Callable[[LLMEngine, int], None] = lambda engine, step: None,
    **options: Any,
) -> tuple[dict[str, list[list[int]]], DecodeGraphs | None]:
    """Requests arrive one by one, so that the batch grows and shrinks."""
    # Captured steps have torch's products: eager ones shall have them, too.
    engine = engine_on(TorchCpuRuntime(graphs=graphs), linear_backend="torch", **options)
    done: dict[str, list[list[int]]] = {}
    waiting = list(enumerate(PROMPTS))
    step = 0
    while waiting or engine.has_unfinished:
        if waiting and step % 3 == 0:
            index, prompt = waiting.pop(0)
            known = engine.runner.model.config.vocab_size
            tokens = [token % known for token in engine.tokenizer.encode(prompt)]
            engine.add_request(str(index), tokens, params(index))
        change(engine, step)
        result = engine.step()
        assert not result.failures
        for output in result.outputs:
            if output.finished:
                done[output.request_id] = [choice.token_ids for choice in output.outputs]
        engine.memory.check()
        step += 1
    captured = engine.runner._graphs
    engine.close()
    return done, captured


def mixed_params(index: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0 if index % 2 else 0.9,
        top_p=0.95 if index % 3 else 1.0,
        seed=index,
        n=1 + index % 2,
        max_tokens=10 + 5 * index,
        ignore_eos=True,
    )


def regimes_in_turn(engine: LLMEngine, step: int) -> None:
    """Half of the requests change their regime, so that batches are mixed."""
    for index in range(len(PROMPTS)):
        regime = Regime.PAGED if (index + step // 4) % 2 else Regime.VIRTUAL
        engine.convert(str(index), regime)


@pytest.mark.parametrize("regime", ["virtual", "paged"])
def test_whole_steps_of_one_regime(regime: str, planned: list[PlannedCpu]) -> None:
    expected, none = serve(graphs=False, params=mixed_params, kv_regime=regime)
    assert none is None
    planned.clear()
    tokens, captured = serve(graphs=True, params=mixed_params, kv_regime=regime)
    assert tokens == expected
    assert captured is not None
    assert captured._pieces == {}
    assert captured.num_captured == len({width for _, width, _ in captured._whole}) >= 3
    assert sum(backend.num_updates for backend in planned) > 3 * captured.num_captured


def test_mixed_batches_are_captured_in_pieces(planned: list[PlannedCpu]) -> None:
    options: dict[str, Any] = {"params": mixed_params, "change": regimes_in_turn}
    expected, _ = serve(graphs=False, **options)
    planned.clear()
    tokens, captured = serve(graphs=True, **options)
    assert tokens == expected
    assert captured is not None
    assert len(captured._pieces) >= 2
    for step in captured._pieces.values():
        assert len(step.pieces) == 4  # one before each layer's attention
    assert captured._whole  # there were batches of one regime, too
    assert sum(backend.num_updates for backend in planned) > 0


def test_latents_in_pieces_and_states_not_at_all(tmp_path: Path) -> None:
    """Of latents results are narrower than queries; both in batches of two regimes."""
    dense = deepseek_v2(hidden_size=64, first_k_dense_replace=3)
    for name, config in (("latents", dense), ("states", NATIVE["qwen3.5"])):
        save(config, tmp_path / name)
        options: dict[str, Any] = {"params": mixed_params, "change": regimes_in_turn}
        options |= {"model": str(tmp_path / name), "tokenizer": str(resolve_model(None))}
        expected, _ = serve(graphs=False, **options, kv_regime="virtual")
        tokens, captured = serve(graphs=True, **options)
        assert tokens == expected
        assert (captured is None) == (name == "states")
        if captured is not None:
            assert len(captured._pieces) >= 2


@pytest.mark.parametrize("regime", ["virtual", "paged", "auto"])
def test_kernels_that_cannot_be_captured_stay_outside(regime: str) -> None:
    expected, _ = serve(graphs=False, params=mixed_params, kv_regime=regime)
    tokens, captured = serve(graphs=True, params=mixed_params, kv_regime=regime)
    assert tokens == expected
    assert captured is not None
    assert captured._whole == {}
    assert len(captured._pieces) >= 3


def test_beams(planned: list[PlannedCpu]) -> None:
    def beams(index: int) -> Any:
        return BeamSearchParams(beam_width=3, max_tokens=12 + index)

    expected, _ = serve(graphs=False, params=beams)
    tokens, captured = serve(graphs=True, params=beams)
    assert tokens == expected
    assert captured is not None
    assert captured.num_captured > 0


def test_stock_flash_attention_over_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "torch-flash", lambda: FlashBackend(EmulatedFlash()))  # type: ignore[arg-type]
    monkeypatch.setitem(PREFERRED, "cpu", ("torch-flash", "cpu"))  # type: ignore[arg-type]

    def growing(index: int) -> SamplingParams:
        return greedy(8 + index)

    options: dict[str, Any] = {"params": growing, "kv_regime": "virtual"}
    eager, _ = serve(graphs=False, **options)
    tokens, captured = serve(graphs=True, **options)
    monkeypatch.undo()
    expected, _ = serve(graphs=False, **options)
    assert eager == tokens == expected
    assert captured is not None
    assert len(captured._whole) >= 2
    assert captured._pieces == {}


def test_widths() -> None:
    assert widths(1) == [1]
    assert widths(6) == [1, 2, 4, 6]
    assert widths(64) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert widths(100)[-2:] == [96, 100]
    for most in (1, 7, 64, 256):
        sizes = widths(most)
        for need in range(1, most + 1):
            width = next(size for size in sizes if size >= need)
            assert width <= max(need + 7, need * 3 / 2)


def test_lengths_are_far_apart(planned: list[PlannedCpu]) -> None:

    engine = engine_on(
        TorchCpuRuntime(graphs=True),
        kv_cache_memory="64MiB",
        kv_regime="virtual",
        max_model_len=None,
    )
    for length in (20, 505, 600, 2100):
        engine.add_request(str(length), [7] * length, greedy(3))
        drain(engine)
    engine.close()
    found = [max_len for backend in planned for _, max_len in backend.capacities]
    assert found == [512, 2048, 8192]


def test_a_step_whose_capture_fails_is_computed_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And no further one is tried."""
    num_ended = 0

    class Failing(TorchCpuRuntime):
        def end_capture(self) -> Any:
            nonlocal num_ended
            num_ended += 1
            raise RuntimeError("this operation cannot be captured")

    found = []
    for runtime in (Failing(graphs=True), TorchCpuRuntime()):
        engine = engine_on(runtime, linear_backend="torch")
        for index in range(2):
            engine.add_request(str(index), [5, 6, 7 + index], greedy(4))
        done = drain(engine)
        engine.close()
        found.append({name: output.outputs[0].token_ids for name, output in done.items()})
    assert found[0] == found[1]
    assert num_ended == 1
    assert "--enforce-eager" in caplog.text
    assert "this operation cannot be captured" in caplog.text


class ShortOfMemory(TorchCpuRuntime):
    """Has no memory for the first ``failures`` captures."""

    memory_errors = (MemoryError,)

    def __init__(self, failures: int, **options: Any) -> None:
        super().__init__(graphs=True, **options)
        self.failures = failures
        self.num_begun = 0

    def begin_capture(self) -> None:
        self.num_begun += 1
        if self.num_begun <= self.failures:
            raise MemoryError("no room for a graph")
        super().begin_capture()


def test_a_capture_without_memory_is_tried_again_later(
    monkeypatch: pytest.MonkeyPatch, planned: list[PlannedCpu]
) -> None:
    """The steps until then are computed as they are, and take no pages for graphs."""
    monkeypatch.setattr(graphs, "PAUSE_STEPS", 4)
    runtime = ShortOfMemory(2)
    engine = engine_on(runtime, kv_regime="virtual")
    engine.add_request("a", [5, 6, 7], greedy(24))
    begun = []
    while engine.has_unfinished:
        assert not engine.step().failures
        begun.append(runtime.num_begun)
    # The prompt, an attempt, 4 steps without, another, 8 steps without, and one that succeeds.
    assert begun[:16] == [0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3]
    assert begun[-1] == 3
    assert engine.runner._graphs is not None
    assert engine.runner._graphs.num_captured == 1
    assert engine.stats()["pages_given_back_total"] == 0
    engine.close()


@pytest.mark.parametrize("kv_regime", ["virtual", "paged", "auto"])
def test_steps_are_captured_at_start_the_widest_first(
    kv_regime: str, planned: list[PlannedCpu]
) -> None:
    """And none while requests run; no page stays behind."""
    runtime = TorchCpuRuntime(graphs=True, captures_ahead=True)
    engine = engine_on(runtime, kv_regime=kv_regime, max_num_seqs=3, max_model_len=1000)
    captured = engine.runner._graphs
    assert captured is not None
    expected = [(3, 1000), (3, 512), (2, 1000), (2, 512), (1, 1000), (1, 512)]
    for backend in planned:
        assert backend.capacities in ([], expected)
    assert len(captured._whole) == 6 * (2 if kv_regime == "auto" else 1)
    assert list(captured._pieces) == ([3, 2, 1] if kv_regime == "auto" else [])
    assert engine.memory.stats().used_pages == engine.memory.stats().num_seqs == 0
    before = captured.num_captured
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), engine.tokenizer.encode(prompt), mixed_params(index))
    drain(engine)
    assert captured.num_captured == before
    # One tensor takes the logits of all widths.
    assert len({step.logits.data_ptr() for _, step in captured._whole.values()}) == 1
    engine.close()


def test_at_start_what_finds_memory_is_captured(planned: list[PlannedCpu]) -> None:
    runtime = ShortOfMemory(1, captures_ahead=True)
    engine = engine_on(runtime, kv_regime="virtual")
    assert engine.runner._graphs is not None
    assert (engine.runner._graphs.num_captured, runtime.num_begun) == (0, 1)
    assert engine.memory.stats().waiting_pages == 0
    engine.close()


def test_enforce_eager_captures_nothing() -> None:
    engine = engine_on(TorchCpuRuntime(graphs=True), enforce_eager=True)
    assert engine.runner._graphs is None
    engine.close()
