"""Pages behind a sliding window are given up while the sequence runs, and nobody misses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.checkpoints import _SMALL, VARIANTS, gemma3, save
from tests.support.engines import each_step, greedy, tokens_of
from tests.support.reference import beams_of, generated
from vmserve import LLM, BeamSearchParams, SamplingParams
from vmserve.attention.sdpa import SdpaBackend
from vmserve.engine.engine import LLMEngine
from vmserve.errors import ConfigurationError
from vmserve.memory.layout import LayerKind
from vmserve.numbers.sizes import parse_size

from transformers import Qwen3Config  # isort: skip  # torch is imported above

#: The native decoder runs it.
MIXED = Qwen3Config(
    **_SMALL,
    head_dim=32,
    use_sliding_window=True,
    sliding_window=24,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)
REGIMES = pytest.mark.parametrize("regime", ["virtual", "paged"])


@pytest.fixture
def windowed(tmp_path: Path, model_dir: Path) -> dict[str, Any]:
    """A model whose layers all have a window of 7 tokens."""
    directory = save(VARIANTS["mistral-window"], tmp_path / "windowed")
    return {"model": str(directory), "tokenizer": str(model_dir), "dtype": "float32"}


def used_by_kind(llm: LLM) -> list[list[int]]:
    """Check the memory after each step; the list gets the pages that each kind uses then, and all
    of them."""
    used: list[list[int]] = []

    def look(engine: LLMEngine, step: int) -> None:
        memory = engine.memory
        each = [stats.used_pages for stats in memory.kind_stats()]
        used.append([*each, memory.stats().used_pages])
        memory.check()

    each_step(llm, after=look)
    return used


def test_a_windowed_model_holds_only_its_window(windowed: dict[str, Any]) -> None:
    prompt = [2 + (7 * i) % 90 for i in range(100)]
    with LLM(
        **windowed,
        kv_page_size="8KiB",  # 32 tokens of one layer
        kv_cache_memory="1MiB",
        max_num_batched_tokens=64,
    ) as llm:
        used = used_by_kind(llm)
        found = llm.generate([prompt], greedy(60, detokenize=False))
        page_tokens = int(llm.stats()["page_tokens"])
    assert tokens_of(found) == [[generated(Path(windowed["model"]), prompt, 60)]]
    # A chunk of 64 and a window of 7 touch this many pages; all 160 tokens would take twice that.
    assert max(pages for *_, pages in used) <= -(-(64 + 7) // page_tokens) + 1
    assert max(pages for *_, pages in used) < -(-160 // page_tokens)


def test_what_a_kernel_reads_before_the_window_stays(
    windowed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels load whole tiles, which need not begin where the window does."""
    slack, window = 40, 7
    monkeypatch.setattr(SdpaBackend, "head_slack_tokens", slack)
    with LLM(
        **windowed,
        kv_page_size="4KiB",  # 16 tokens of one layer
        kv_cache_memory="1MiB",
        kv_regime="virtual",
        enable_prefix_caching=False,
        attention_backend="sdpa",
    ) as llm:
        engine = llm.engine
        engine.add_request("a", list(range(2, 52)), greedy(60, detokenize=False))
        kept = []
        while engine.has_unfinished:
            engine.step()
            if not engine.has_unfinished:
                break
            length, blocks = engine.memory.length(0), engine.memory.blocks(0)
            first = max(0, length - window - slack) // 16
            assert (blocks[first:] >= 0).all(), length
            kept.append(int((blocks >= 0).sum()))
    assert kept[-1] <= -(-(window + slack) // 16) + 1


@REGIMES
def test_the_least_pool_serves_the_longest_request(
    regime: str, tmp_path: Path, model_dir: Path
) -> None:
    """The error at the start names what each kind needs, and the least size that is accepted."""
    options: dict[str, Any] = {
        "model": str(save(MIXED, tmp_path / "mixed")),
        "tokenizer": str(model_dir),
        "dtype": "float32",
        "kv_regime": regime,
        "kv_page_size": "4KiB",  # 8 tokens of one layer
        "block_size": 8,
        "max_model_len": 256,
        "max_num_batched_tokens": 20,
        "max_num_seqs": 4,
    }
    with pytest.raises(ConfigurationError, match="raise --kv-cache-memory to") as refused:
        LLM(kv_cache_memory="12KiB", **options)
    text = str(refused.value)
    assert "128 KiB in 32 pages of 4 KiB (all: 1 layers)" in text
    # Of a chunk of 20 and a window of 24, 43 tokens touch at most 7 pages of 8.
    assert "56 KiB in 7 pages of 8 KiB (window 24: 2 layers)" in text
    least = text.split("raise --kv-cache-memory to ")[1].split(" or ")[0]
    params = greedy(16, detokenize=False)
    prompts = [[2 + (k * i) % 90 for i in range(240)] for k in (3, 7)]
    with LLM(kv_cache_memory="4MiB", **options) as llm:
        expected = tokens_of(llm.generate(prompts, params))
        page_bytes = llm.engine.memory.layout.total_page_bytes
        with pytest.raises(ConfigurationError, match=f"raise --kv-cache-memory to {least}"):
            llm.engine.set_kv_cache_memory(parse_size(least) - page_bytes)
    with LLM(kv_cache_memory=least, **options) as llm:
        assert tokens_of(llm.generate(prompts, params)) == expected
        assert llm.stats()["limit_pages"] < 256 // 8
    with pytest.raises(ConfigurationError, match=f"raise --kv-cache-memory to {least}"):
        LLM(kv_cache_memory=parse_size(least) - page_bytes, **options)


@REGIMES
def test_beams_of_a_windowed_model(regime: str, windowed: dict[str, Any]) -> None:
    """Forks begin with what the window still sees, through a pool that does not hold them all."""
    prompts = [[2 + (k * i) % 90 for i in range(20 * k)] for k in (1, 2, 3)]
    beams = BeamSearchParams(beam_width=4, max_tokens=30, ignore_eos=True, detokenize=False)
    with LLM(
        **windowed,
        kv_regime=regime,  # type: ignore[arg-type]
        kv_page_size="4KiB",  # 16 tokens of one layer
        kv_cache_memory="208KiB",
        max_model_len=128,
        enable_prefix_caching=False,
    ) as llm:
        searched = llm.beam_search(prompts, beams)
        stats = llm.stats()
        llm.engine.memory.check()
    assert stats["num_preemptions_total"] > 0
    assert stats["forks_total"] >= 3 * 3
    directory = Path(windowed["model"])
    assert tokens_of(searched) == [beams_of(directory, prompt, 30, 4) for prompt in prompts]


@pytest.mark.parametrize(
    ("layers", "regime", "tight_memory"),
    [
        ("native", "virtual", "416KiB"),
        ("native", "paged", "416KiB"),
        ("torch", "virtual", "288KiB"),
        ("torch", "paged", "288KiB"),
    ],
)
def test_layers_with_windows_give_their_past_up_beside_those_without(
    layers: str,
    regime: str,
    tight_memory: str,
    tmp_path: Path,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answers are those of one page for all layers, in less memory; where it is short, pages
    of one kind become another's."""
    config = MIXED if layers == "native" else gemma3(num_hidden_layers=4, sliding_window=24)
    directory = save(config, tmp_path / "kinds")
    prompts = [[2 + (k * i) % 90 for i in range(20 + 25 * k)] for k in range(1, 5)]
    expected = [[generated(directory, prompt, 40)] for prompt in prompts]
    options: dict[str, Any] = {"kv_page_size": "8KiB" if layers == "native" else "4KiB"}
    if layers == "torch":
        backend = {"virtual": "sdpa", "paged": "reference"}[regime]
        options |= {"linear_backend": "torch", "attention_backend": backend, "block_size": 8}

    common = {"ignore_eos": True, "detokenize": False}
    drawn = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=30, **common)
    beams = BeamSearchParams(beam_width=3, max_tokens=20, **common)

    def answers(kv_cache_memory: str) -> tuple[list[Any], dict[str, Any], list[list[int]], int]:
        """Tokens, figures, pages that each kind used (at last: all), and how many one kind gave
        another."""
        with LLM(
            str(directory),
            tokenizer=str(model_dir),
            dtype="float32",
            kv_regime=regime,  # type: ignore[arg-type]
            kv_cache_memory=kv_cache_memory,
            max_model_len=192,
            max_num_batched_tokens=64,
            swap_space="1MiB",
            **options,
        ) as llm:
            used = used_by_kind(llm)
            for _ in range(2):  # then after hits
                assert tokens_of(llm.generate(prompts, greedy(40, detokenize=False))) == expected
            found = [*llm.generate(prompts, drawn), *llm.beam_search(prompts[:2], beams)]
            given = sum(kind.pages_given_back_total for kind in llm.engine.memory.kind_stats())
            return tokens_of(found), llm.stats(), used, given

    kinds, roomy, used, _ = answers("4MiB")
    assert roomy["prefix_cache_hits_total"] > 0
    # Four prompts of up to 160 tokens, of which the windows keep 24 and a chunk.
    everything, windows, few_pages = map(max, zip(*used, strict=True))
    assert windows < 0.75 * everything
    tight, stats, _, given = answers(tight_memory)
    assert tight == kinds
    assert stats["num_preemptions_total"] > 0
    assert given > 0
    monkeypatch.setattr("vmserve.memory.longest.layer_kinds", lambda *_: [LayerKind((), None)])
    one_kind, same, more, _ = answers("4MiB")
    assert one_kind == kinds
    assert same["limit_pages"] == roomy["limit_pages"]
    assert few_pages < 0.8 * max(pages for *_, pages in more)
