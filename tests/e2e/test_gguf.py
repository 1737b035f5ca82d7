"""GGUF files in the whole engine: found, loaded, answered."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.e2e.gguf_tokens import NEAR_TIE, Reference, compare, paths, real_prompts
from tests.helpers import smollm2_file
from tests.models.gguf_checkpoints import add_embedded_tokenizer, convert
from tests.models.gguf_files import (
    add_byte_level,
    add_llama,
    byte_vocabulary,
    random_blocks,
    write,
)
from vmserve import LLM, SamplingParams
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.hub import resolve_model
from vmserve.models.pullable import PULLABLE

_MEMORY = 64 << 20


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as a GGUF file."""
    path = tmp_path_factory.mktemp("embedded") / "model.gguf"
    convert(resolve_model(None), path, add_embedded_tokenizer)
    return path


def _answers(model: str | None) -> list[tuple[str, list[int]]]:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    greedy = SamplingParams(temperature=0, max_tokens=24)
    with LLM(model, kv_cache_memory=_MEMORY, dtype="float32") as llm:
        results = [*llm.generate(["Once upon a time", "2 + 3 ="], greedy), *llm.chat(chat, greedy)]
    return [(each.outputs[0].text, list(each.outputs[0].token_ids)) for each in results]


def test_same_answers_as_the_checkpoint(embedded: Path) -> None:
    expected = _answers(None)
    assert _answers(str(embedded)) == expected
    assert "Paris" in expected[2][0]
    assert _answers(str(embedded.parent)) == expected  # the directory that holds it


#: The type of each matrix of a layer: all of them, mixed within products too.
_MIXED = {
    "attn_q": "Q4_K", "attn_k": "Q5_K", "attn_v": "Q6_K", "attn_output": "Q5_0",
    "ffn_gate": "Q4_0", "ffn_up": "Q5_1", "ffn_down": "Q8_0",
}  # fmt: skip
_MIXED_WITH_PLAIN = {**_MIXED, "attn_q": "Q4_1", "attn_k": "F16", "ffn_gate": "BF16"}


def _mixed_model(path: Path, types: Mapping[str, str]) -> tuple[Path, Path]:
    """A random llama of such types, and the same weights in float32."""
    rng = np.random.default_rng(0)
    sizes = {"hidden": 256, "mlp": 512, "heads": 4, "kv_heads": 2}
    vocab = len(byte_vocabulary()[0])
    shapes = {
        "attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256),
        "attn_output": (256, 256), "ffn_gate": (512, 256), "ffn_up": (512, 256),
        "ffn_down": (256, 512),
    }  # fmt: skip
    tensors = {
        f"blk.{i}.{name}.weight": (types[name], shapes[name]) for i in (0, 1) for name in types
    }
    tensors["token_embd.weight"] = "Q4_K", (vocab, 256)
    tensors["output.weight"] = "Q6_K", (vocab, 256)
    norms = ["output_norm", *(f"blk.{i}.{name}_norm" for i in (0, 1) for name in ("attn", "ffn"))]
    ones = {f"{name}.weight": ("F32", np.ones(256, np.float32)) for name in norms}

    def metadata(writer: gguf.GGUFWriter) -> None:
        add_llama(writer, **sizes)
        add_byte_level(writer)

    # K types have factors of 6 or 8 bits below that of their block.
    stored = {
        name: (kind, random_blocks(kind, *shape, rng, 2e-4 if kind.endswith("_K") else 5e-3))
        for name, (kind, shape) in tensors.items()
    }
    exact = {
        name: ("F32", gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
        for name, (kind, raw) in stored.items()
    }
    return (
        write(path / "mixed.gguf", "llama", {**stored, **ones}, metadata),
        write(path / "exact.gguf", "llama", {**exact, **ones}, metadata),
    )


@pytest.mark.parametrize("types", [_MIXED, _MIXED_WITH_PLAIN], ids=["integers", "and-plain"])
def test_quantized_weights_are_what_the_file_says(types: Mapping[str, str], tmp_path: Path) -> None:
    """Of all types in one file, logits are those of the dequantized weights."""
    files = _mixed_model(tmp_path, types)
    prompt = {"prompt_token_ids": list(range(40, 72))}
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    found = []
    for path in files:
        with LLM(str(path), kv_cache_memory=_MEMORY, dtype="float32") as llm:
            [answer] = llm.generate([prompt], asked)
        rows = enumerate(answer.prompt_logprobs[1:], start=41)
        found.append(np.array([row[token].logprob for token, row in rows]))
    assert found[1].std() > 0.5  # the weights matter
    np.testing.assert_allclose(found[0], found[1], atol=2e-3)


@pytest.fixture(scope="module")
def smollm2() -> tuple[Reference, list[list[int]]]:
    file = smollm2_file()
    return Reference(file), real_prompts(file, 4, 290)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("regime", ["virtual", "paged"])
def test_same_tokens_as_transformers(
    regime: str, smollm2: tuple[Reference, list[list[int]]]
) -> None:
    """A real model on every path; ``python -m tests.e2e.gguf_tokens`` has more prompts."""
    reference, prompts = smollm2
    for taken in paths(smollm2_file(), prompts, regime, 16):
        count, gaps = compare(reference, taken)
        assert all(gap < NEAR_TIE for gap in gaps), (taken.name, gaps)
        assert len(gaps) <= count // 20, (taken.name, gaps)


def test_the_pulled_model_is_the_pinned_file_and_answers() -> None:
    path = smollm2_file()
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == PULLABLE["smollm2"].sha256
    questions = ["What is the capital of France?", "What is 2 + 2?"]
    with LLM(str(path), kv_cache_memory="512MiB") as llm:
        answers = llm.chat(
            [[{"role": "user", "content": question}] for question in questions],
            SamplingParams(temperature=0, max_tokens=24),
        )
    texts = [answer.outputs[0].text for answer in answers]
    assert "Paris" in texts[0]
    assert "4" in texts[1]


def test_torch_does_not_read_them(embedded: Path) -> None:
    with pytest.raises(UnsupportedError, match="GGUF files run in the native CPU decoder only"):
        LLM(str(embedded), kv_cache_memory=_MEMORY, linear_backend="torch")


def test_where_models_are_found(embedded: Path, tmp_path: Path) -> None:
    assert resolve_model(str(embedded)) == embedded
    assert resolve_model(str(embedded.parent)) == embedded
    with pytest.raises(ConfigurationError, match=r"model file none\.gguf does not exist"):
        resolve_model("none.gguf")
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(embedded, tmp_path / name)
    with pytest.raises(ConfigurationError, match=r"has 2 GGUF files: name one of them, as --model"):
        resolve_model(str(tmp_path))
    for part in (1, 2):
        (tmp_path / "split").mkdir(exist_ok=True)
        (tmp_path / "split" / f"m-0000{part}-of-00002.gguf").touch()
    assert resolve_model(str(tmp_path / "split")).name == "m-00001-of-00002.gguf"


def test_files_of_the_hubs_cache(embedded: Path, tmp_path: Path) -> None:
    """In a process of its own: where the cache is, is read when the hub's client is imported."""
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / "abc"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    snapshot.mkdir(parents=True)
    shutil.copy(embedded, snapshot / "m-f32.gguf")
    code = "import sys; from vmserve.models import resolve_model; print(resolve_model(sys.argv[1]))"

    def resolved(model: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, model],
            env={**os.environ, "HF_HUB_CACHE": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )

    assert resolved("some/model:m-f32.gguf").stdout.strip() == str(snapshot / "m-f32.gguf")
    said = resolved("some/model:other.gguf").stderr
    assert "other.gguf of some/model is not in the local Hugging Face cache: fetch it with" in said
    assert "'a/b/c' is not a hub id such as" in resolved("a/b/c:x.gguf").stderr
