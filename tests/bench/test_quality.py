"""``vmserve bench quality`` against figures made another way; worse weights look worse."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.support.bench import bench
from vmserve import LLM, SamplingParams
from vmserve.errors import ConfigurationError, VmserveError
from vmserve.models.hub import resolve_model
from vmserve.text.tokenizer import Tokenizer, load_tokenizer
from vmserve_bench.ab.variants import Variant, parse_variants
from vmserve_bench.quality.command import KNOWN, Options, run
from vmserve_bench.quality.text import Text, cut, read_text

EMBEDDED = resolve_model(None)
HEAD = "lm_head.weight"
WINDOW, STRIDE = 96, 40
TEXT = Text("a text", read_text(None).content[:800])


def measure(*variants: str, text: Text = TEXT, window: int = WINDOW, **engine: Any) -> Any:
    """Rows by variant, beneath them the figures of all."""
    parsed = parse_variants(variants, KNOWN, least=1)
    shares: list[float] = []
    data = run(Options(parsed, engine, text, window, STRIDE), shares.append).data
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
    return {row["name"]: row for row in data["rows"]} | {"": data}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[float]]:
    """By transformers and by the whole distributions that requests get: means by window."""
    ids = load_tokenizer(EMBEDDED).encode(TEXT.content)
    bos, ids = ids[:1], ids[1:]
    own = WINDOW - 1
    windows = [bos + ids[i : i + own] for i in range(0, len(ids) - own + 1, STRIDE)]
    reference = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    found: dict[str, list[float]] = {"nats": [], "same": [], "kl": [], "int8": []}
    with torch.inference_mode():
        rows = reference(torch.tensor(windows)).logits[:, -STRIDE - 1 : -1].double()
    logp = rows.log_softmax(-1).numpy()
    targets = np.array(windows)[:, -STRIDE:]
    params = SamplingParams(max_tokens=0, prompt_logprobs=-1)
    with LLM(quantization="int8", max_logprobs=-1, max_num_seqs=2) as llm:
        answers = llm.generate([{"prompt_token_ids": window} for window in windows], params)
    for p, target, answer in zip(logp, targets, answers, strict=True):
        positions = answer.prompt_logprobs
        assert positions is not None
        q = np.array(
            [[at[i].logprob for i in range(p.shape[1])] for at in positions[-STRIDE:] if at]
        )
        found["nats"].append(-np.take_along_axis(p, target[:, None], 1).mean())
        found["int8"].append(-np.take_along_axis(q, target[:, None], 1).mean())
        found["same"].append((p.argmax(1) == q.argmax(1)).mean())
        found["kl"].append((np.exp(p) * (p - q)).sum(1).mean())
    return found


def test_figures_are_those_of_transformers(expected: dict[str, list[float]]) -> None:
    found = measure("none,int8")
    assert found["none"]["window_nats"] == pytest.approx(expected["nats"], abs=2e-5)
    assert found["int8"]["window_nats"] == pytest.approx(expected["int8"], abs=2e-5)
    assert found["int8"]["window_same_argmax"] == pytest.approx(expected["same"], abs=1e-9)
    assert found["int8"]["window_divergence"] == pytest.approx(expected["kl"], rel=1e-3, abs=1e-7)
    nats, differences = np.mean(expected["nats"]), np.subtract(expected["int8"], expected["nats"])
    assert found["none"]["perplexity"] == pytest.approx(math.exp(nats), rel=1e-4)
    assert found["int8"]["nats_above_first"]["mean"] == pytest.approx(differences.mean(), abs=4e-5)
    assert found["int8"]["divergence"] == pytest.approx(np.mean(expected["kl"]), rel=1e-3)
    assert (found["none"]["bits_per_weight"], found["int8"]["bits_per_weight"]) == (16, 8)
    assert found[""]["num_scored"] == STRIDE * len(expected["nats"])
    assert found[""]["leading_tokens"] == [0]


def test_windows_that_take_several_steps_score_the_same() -> None:
    whole = measure("none,int8")
    # Chunks end within the context, and within what is scored.
    pieces = measure("none,int8", max_num_batched_tokens=17)
    for name in ("none", "int8"):
        for figures in ("window_nats", "window_same_argmax", "window_divergence"):
            assert pieces[name][figures] == pytest.approx(whole[name][figures], abs=1e-5)


def changed(directory: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """A copy of the embedded model in the directory, with weights changed."""
    if not directory.exists():
        shutil.copytree(EMBEDDED, directory)
    file = directory / "model.safetensors"
    weights = {name: change(name, weight) for name, weight in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    return directory


def test_worse_weights_are_told_by_every_figure(tmp_path: Path) -> None:
    names = []
    for spread in (0.2, 0.6):
        torch.manual_seed(0)

        def noisy(name: str, weight: torch.Tensor, spread: float = spread) -> torch.Tensor:
            noise = spread * weight.std() * torch.randn_like(weight) if weight.dim() == 2 else 0
            return weight + noise

        names.append(f"noise{spread}=model={changed(tmp_path / str(spread), noisy)}")
    found = measure("none", "again=dtype=auto", *names, text=known_text())
    rows = [found[name] for name in ("none", "again", "noise0.2", "noise0.6")]
    assert rows[0]["perplexity"] == rows[1]["perplexity"]
    assert (rows[1]["same_argmax"], rows[1]["divergence"]) == (1.0, 0.0)
    for figure, sign in (("perplexity", 1), ("divergence", 1), ("same_argmax", -1)):
        values = [sign * row[figure] for row in rows[1:]]
        assert values[0] < values[1] < values[2], figure
    assert rows[3]["nats_above_first"]["low"] > 0
    assert rows[3]["options"] == {"model": "0.6"}, "without the path"


def test_broken_weights(tmp_path: Path) -> None:
    def scaled(scale: float) -> Path:
        return changed(tmp_path / str(scale), lambda name, w: w * scale if name == HEAD else w)

    row = measure("none", f"b=model={scaled(1e30)}")["b"]
    assert row["nats_above_first"]["mean"] > 1000
    assert math.isfinite(row["perplexity"])
    with pytest.raises(VmserveError, match="variant b: its logits"):
        measure("none", f"b=model={scaled(math.nan)}")


def known_text() -> Text:
    """Text of the embedded model's own language: of other text, worse weights may know more."""
    with LLM(max_num_seqs=8) as llm:
        params = SamplingParams(max_tokens=160, temperature=0.7, seed=1, ignore_eos=True)
        answers = llm.generate(
            ["Once upon a time", "The capital of", "There was", "Question"], params
        )
    return Text("stories", "\n".join(answer.outputs[0].text for answer in answers))


def test_variants_of_other_tokens_are_refused(tmp_path: Path) -> None:
    swapped = tmp_path / "swapped"
    shutil.copytree(EMBEDDED, swapped)
    described = json.loads((swapped / "tokenizer.json").read_text())
    merges = described["model"]["merges"]
    described["model"]["merges"] = merges[: len(merges) // 2]
    (swapped / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(ConfigurationError, match=r"variant b: its tokenizer is not that of none: "):
        measure("none", f"b=model={swapped}")
    assert set(measure("none", f"b=model={swapped}", tokenizer=str(EMBEDDED))) == {"none", "b", ""}
    config = json.loads((swapped / "config.json").read_text())
    (swapped / "config.json").write_text(json.dumps(config | {"vocab_size": 2047}))
    changed(swapped, lambda _, weight: weight[: 2047 if weight.shape[0] == 2048 else None].clone())
    with pytest.raises(ConfigurationError, match=r"variant b: its vocabulary has 2,047 tokens, "):
        measure("none", f"b=model={swapped}", tokenizer=str(EMBEDDED))


def test_what_cannot_be_measured_is_told(tmp_path: Path) -> None:
    for variants, options, told in (
        ("none", {"text": Text("short", "a few words")}, "--window: the text has .* fewer than"),
        ("none", {"window": 40}, "--stride: 40 leaves no token of a window of 40"),
        ("none", {"max_model_len": 64}, "above the context of 64 tokens of variant none"),
        ("int9", {}, "no variant is named 'int9': choose from none,"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            measure(variants, **options)
    with pytest.raises(ConfigurationError, match=r"--text .*missing.txt: No such file"):
        read_text(tmp_path / "missing.txt")
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    with pytest.raises(ConfigurationError, match="it is not UTF-8 text: byte 2 is 0xff"):
        read_text(tmp_path / "bytes")


@pytest.mark.parametrize(
    ("template", "leading"), [("<s> $A </s>", [0]), ("$A </s>", []), ("<s> <s> $A", [0, 0])]
)
def test_windows_begin_as_texts_of_the_tokenizer_do(template: str, leading: list[int]) -> None:
    words = {"<s>": 0, "</s>": 1} | {f"w{i}": 2 + i for i in range(30)}
    backend = Backend(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    windows = cut(tokenizer, " ".join(f"w{i}" for i in range(30)), size=12, stride=5)
    own = 12 - len(leading)
    starts = [at for at in (0, 5, 10, 15, 20) if at + own <= 30]
    assert windows.prompts == [[*leading, *range(2 + at, 2 + at + own)] for at in starts]
    assert (windows.leading, windows.num_scored) == (leading, 5)


def test_files_of_the_command(tmp_path: Path) -> None:
    text, path, table = (tmp_path / name for name in ("some.txt", "q.json", "q.md"))
    text.write_text(TEXT.content)
    line = "quality --variants none,int8 --window 96"
    where = ("--text", text, "--json", path, "--markdown", table, "--tokenizer", EMBEDDED)
    assert "quality of vmserve-embedded on some.txt" in bench(line, *where, columns=200)
    written = path.read_text()
    section = json.loads(written)["sections"]["quality"]
    assert (section["window"], section["stride"], section["text"]["name"]) == (96, 48, "some.txt")
    assert str(tmp_path) not in written
    assert json.loads(written)["options"] == {"tokenizer": EMBEDDED.name}, "without its path"
    assert "| none | " in table.read_text()
    assert isinstance(section["rows"][0], dict)
    assert Variant("int8", section["rows"][1]["options"]) == KNOWN["int8"]
