"""Pages behind a sliding window are given up while the sequence runs, and nobody misses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vmserve import LLM, BeamSearchParams, SamplingParams  # before torch: how its threads wait

import torch  # isort: skip
from transformers import AutoModelForCausalLM, Qwen3Config  # isort: skip

from tests.models.checkpoints import _SMALL, VARIANTS, save
from vmserve.attention.sdpa import SdpaBackend
from vmserve.errors import ConfigurationError
from vmserve.memory.layout import LayerKind
from vmserve.numbers.sizes import parse_size

#: The native decoder runs it.
MIXED = Qwen3Config(
    **_SMALL,
    head_dim=32,
    use_sliding_window=True,
    sliding_window=24,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)


def watch_pages(llm: LLM) -> list[int]:
    """Check the memory after each step; the list gets how many pages are used then."""
    used_pages: list[int] = []
    step = llm.engine.step

    def watched_step() -> object:
        result = step()
        used_pages.append(int(llm.stats()["used_pages"]))
        llm.engine.memory.check()
        return result

    llm.engine.step = watched_step  # type: ignore[method-assign, assignment]
    return used_pages


def test_a_windowed_model_holds_only_its_window(tmp_path: Path, model_dir: Path) -> None:
    directory = save(VARIANTS["mistral-window"], tmp_path / "windowed")
    prompt = [2 + (7 * i) % 90 for i in range(100)]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(60):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))

    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)
    with LLM(
        model=str(directory),
        tokenizer=str(model_dir),
        dtype="float32",
        kv_page_size="8KiB",  # 32 tokens of one layer
        kv_cache_memory="1MiB",
        max_num_batched_tokens=64,
    ) as llm:
        used_pages = watch_pages(llm)
        [result] = llm.generate([prompt], params)
        page_tokens = int(llm.stats()["page_tokens"])
    assert result.outputs[0].token_ids == tokens[100:]
    # A chunk of 64 and a window of 7 touch this many pages; all 160 tokens would take twice that.
    assert max(used_pages) <= -(-(64 + 7) // page_tokens) + 1
    assert max(used_pages) < -(-160 // page_tokens)


def test_what_a_kernel_reads_before_the_window_stays(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels load whole tiles, which need not begin where the window does."""
    slack, window = 40, 7
    monkeypatch.setattr(SdpaBackend, "head_slack_tokens", slack)
    directory = save(VARIANTS["mistral-window"], tmp_path / "windowed")
    with LLM(
        model=str(directory),
        tokenizer=str(model_dir),
        dtype="float32",
        kv_page_size="4KiB",  # 16 tokens of one layer
        kv_cache_memory="1MiB",
        kv_regime="virtual",
        enable_prefix_caching=False,
        attention_backend="sdpa",
    ) as llm:
        engine = llm.engine
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)
        engine.add_request("a", list(range(2, 52)), params)
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


@pytest.mark.parametrize("regime", ["virtual", "paged"])
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
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    prompts = [[2 + (k * i) % 90 for i in range(240)] for k in (3, 7)]
    with LLM(kv_cache_memory="4MiB", **options) as llm:
        expected = [result.outputs[0].token_ids for result in llm.generate(prompts, params)]
        page_bytes = llm.engine.memory.layout.total_page_bytes
        with pytest.raises(ConfigurationError, match=f"raise --kv-cache-memory to {least}"):
            llm.engine.set_kv_cache_memory(parse_size(least) - page_bytes)
    with LLM(kv_cache_memory=least, **options) as llm:
        assert [one.outputs[0].token_ids for one in llm.generate(prompts, params)] == expected
        assert llm.stats()["limit_pages"] < 256 // 8
    with pytest.raises(ConfigurationError, match=f"raise --kv-cache-memory to {least}"):
        LLM(kv_cache_memory=parse_size(least) - page_bytes, **options)


@pytest.mark.parametrize("regime", ["virtual", "paged"])
def test_beams_and_choices_of_a_windowed_model(
    regime: str, tmp_path: Path, model_dir: Path
) -> None:
    """Forks begin with what the window still sees, through a pool that does not hold them all."""
    directory = save(VARIANTS["mistral-window"], tmp_path / "windowed")
    prompts = [[2 + (k * i) % 90 for i in range(20 * k)] for k in (1, 2, 3)]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    expected = []
    for prompt in prompts:
        with torch.inference_mode():
            found = model.generate(
                torch.tensor([prompt]),
                num_beams=4,
                num_return_sequences=4,
                do_sample=False,
                max_new_tokens=30,
                eos_token_id=None,
                pad_token_id=0,
            )
        expected.append([row[len(prompt) :].tolist() for row in found])
    beams = BeamSearchParams(beam_width=4, max_tokens=30, ignore_eos=True, detokenize=False)
    drawn = SamplingParams(
        n=4, temperature=1.0, seed=1, max_tokens=30, ignore_eos=True, detokenize=False
    )
    options: dict[str, Any] = {
        "model": str(directory),
        "tokenizer": str(model_dir),
        "dtype": "float32",
        "kv_regime": regime,
        "kv_page_size": "4KiB",  # 16 tokens of one layer
        "max_model_len": 128,
        "enable_prefix_caching": False,
    }
    with LLM(kv_cache_memory="4MiB", **options) as llm:
        roomy = llm.generate(prompts, drawn)
    with LLM(kv_cache_memory="208KiB", **options) as llm:
        searched = llm.beam_search(prompts, beams)
        sampled = llm.generate(prompts, drawn)
        stats = llm.stats()
        llm.engine.memory.check()
    assert stats["num_preemptions_total"] > 0
    assert stats["forks_total"] >= 3 * (3 + 3)
    assert [[o.token_ids for o in result.outputs] for result in searched] == expected
    for one, other in zip(roomy, sampled, strict=True):
        assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other.outputs]


@pytest.mark.parametrize("regime", ["virtual", "paged"])
def test_layers_with_windows_give_their_past_up_beside_those_without(
    regime: str, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers are those of one page for all layers, in less memory: greedy ones after hits,
    drawn ones of several choices, and beams, through a pool in which some must give way."""
    directory = save(MIXED, tmp_path / "kinds")
    prompts = [[2 + (k * i) % 90 for i in range(20 + 25 * k)] for k in range(1, 5)]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    expected = []
    for prompt in prompts:
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(40):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        expected.append(tokens[len(prompt) :])
    common = {"ignore_eos": True, "detokenize": False}
    greedy = SamplingParams(temperature=0, max_tokens=40, **common)
    drawn = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=30, **common)
    beams = BeamSearchParams(beam_width=3, max_tokens=20, **common)

    def answers(kv_cache_memory: str) -> tuple[list[Any], dict[str, Any], int]:
        with LLM(
            model=str(directory),
            tokenizer=str(model_dir),
            dtype="float32",
            kv_regime=regime,
            kv_page_size="8KiB",  # 16 tokens of one layer
            kv_cache_memory=kv_cache_memory,
            max_model_len=192,
            max_num_batched_tokens=64,
            swap_space="1MiB",
        ) as llm:
            used_pages = watch_pages(llm)
            found: list[Any] = [llm.generate(prompts, greedy) for _ in range(2)]
            assert [[o.outputs[0].token_ids for o in each] for each in found] == [expected] * 2
            found = [*llm.generate(prompts, drawn), *llm.beam_search(prompts[:2], beams)]
            return (
                [[o.token_ids for o in each.outputs] for each in found],
                llm.stats(),
                max(used_pages),
            )

    kinds, roomy, few_pages = answers("4MiB")
    assert roomy["prefix_cache_hits_total"] > 0
    tight = answers("416KiB")
    assert tight[0] == kinds
    monkeypatch.setattr("vmserve.memory.longest.layer_kinds", lambda *_: [LayerKind((), None)])
    one_kind, same, more_pages = answers("4MiB")
    assert one_kind == kinds
    assert same["limit_pages"] == roomy["limit_pages"]
    # Four prompts of up to 160 tokens, of which two layers of three keep 24 and a chunk.
    assert few_pages < 0.8 * more_pages
