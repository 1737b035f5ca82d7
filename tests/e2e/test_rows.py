"""Every family by every path with every feature: an answer depends on its request alone.

Rows cover all pairs of what :data:`AXES` has. A row computes the requests of a feature together, by
a path, and compares them with each request alone in a roomy engine, whose prompt is one chunk: bit
for bit in the native decoder, token for token where torch multiplies. Counters prove that the path
was taken, and no page is left. Pairs that no row can have are refused, as rules say.

``VMSERVE_ROWS=SEED`` gives other rows.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.lives.pairs import Row, covering_rows, pairs_of
from tests.models import gguf_checkpoints, quantized_checkpoints
from tests.models.checkpoints import (
    DEEPSEEK_ROPE,
    deepseek_v3,
    gemma3,
    gpt_oss,
    phi3,
    qwen3_moe,
    qwen3_next,
    save,
)
from tests.support.engines import greedy, measure_nothing, seen, tokens_of
from tests.support.paths import ALONE, PATHS, Asked, serve, together
from vmserve import LLM, BeamSearchParams, RequestOutput, SamplingParams
from vmserve.config import EngineConfig
from vmserve.errors import ConfigurationError
from vmserve.models import ModelConfig
from vmserve.models.config import DecoderConfig
from vmserve.models.hub import resolve_model
from vmserve.models.slices import refusal_of_ranks
from vmserve.options import rules

import torch  # isort: skip
from transformers import AutoModelForCausalLM, PreTrainedConfig  # isort: skip

Prompts = Callable[[int, int, int], list[list[int]]]

SEED = int(os.environ.get("VMSERVE_ROWS", "0"))
EMBEDDED = str(resolve_model(None))
#: Small random models with the vocabulary of the embedded one.
_SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "max_position_embeddings": 512,
}
_WINDOWS = {"num_hidden_layers": 4, "sliding_window": 24}


class Family(NamedTuple):
    """A model, as the engine computes it. ``config`` None: the embedded one."""

    config: PreTrainedConfig | None = None
    options: dict[str, Any] = {"dtype": "bfloat16"}  # noqa: RUF012  none changes them
    #: The embedded model as another kind of file.
    stored: str = ""

    @property
    def is_exact(self) -> bool:
        """Torch multiplies batches of other shapes in another order."""
        return self.options.get("linear_backend") != "torch"


TORCH = {"dtype": "float32", "linear_backend": "torch"}
FAMILIES = {
    "embedded": Family(),
    "float32": Family(options={"dtype": "float32"}),
    "int8": Family(options={"dtype": "bfloat16", "quantization": "int8"}),
    "int8-dynamic": Family(options={"dtype": "bfloat16", "quantization": "int8-dynamic"}),
    "kv-int8": Family(options={"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
    "q4": Family(stored="gguf"),
    "gptq": Family(stored="gptq"),
    "phi3": Family(phi3(**_SIZES, partial_rotary_factor=0.75)),
    "gpt-oss": Family(gpt_oss(**_SIZES)),
    "qwen3-moe": Family(qwen3_moe(**_SIZES, num_experts=9, num_experts_per_tok=4)),
    "qwen3-next": Family(qwen3_next(**_SIZES, num_experts=6, moe_intermediate_size=48)),
    "deepseek-v3": Family(deepseek_v3(**_SIZES, rope_parameters=DEEPSEEK_ROPE)),
    "gemma3": Family(gemma3(**_SIZES, **_WINDOWS, final_logit_softcapping=20.0)),
    "embedded torch": Family(options=TORCH),
    "gemma3 torch": Family(gemma3(**_SIZES, **_WINDOWS), TORCH),
    "gpt-oss torch": Family(gpt_oss(**_SIZES, **_WINDOWS), TORCH),
    "qwen3-next torch": Family(qwen3_next(**_SIZES, num_experts=4, num_experts_per_tok=2), TORCH),
    "deepseek-v3 torch": Family(deepseek_v3(**_SIZES), TORCH),
}


def _drawn(seed: int, **options: Any) -> SamplingParams:
    given = {"temperature": 0.9, "max_tokens": 24, "ignore_eos": True, **options}
    return SamplingParams(seed=seed, **given)


#: What requests ask for beside a long greedy answer, and two with log-probabilities.
FEATURES: dict[str, list[SamplingParams | BeamSearchParams]] = {
    "drawn": [_drawn(1, n=3), _drawn(2, top_p=0.9, top_k=50), _drawn(3, min_p=0.02, logprobs=0)],
    "shaped": [
        _drawn(1, repetition_penalty=1.2, presence_penalty=0.5, bad_words=[" the"]),
        _drawn(2, frequency_penalty=0.6, logit_bias={7: 2.5, 90: -4.0}, logprobs=1),
        _drawn(3, n=2, stop=["e", "an"], min_tokens=8, ignore_eos=False),
    ],
    "structured": [
        _drawn(1, n=2, structured_outputs={"regex": r"[a-z]{5}-[0-9]{8,30}"}),
        _drawn(2, structured_outputs={"regex": r"(la ){3,9}!"}, logprobs=1),
    ],
    "beams": [
        BeamSearchParams(beam_width=3, max_tokens=16, ignore_eos=True, logprobs=1),
        BeamSearchParams(beam_width=2, max_tokens=12, length_penalty=0.0),
    ],
    "scored": [
        SamplingParams(max_tokens=0, pooling="mean", detokenize=False),
        SamplingParams(max_tokens=0, pooling="last", detokenize=False),
        greedy(4, prompt_logprobs=2),
    ],
}
AXES: dict[str, list[Any]] = {
    "family": list(FAMILIES),
    "path": list(PATHS),
    "feature": list(FEATURES),
    "regime": ["virtual", "paged", "auto"],
    "budget": [16, 37, 50, 512],
    "block": [16, 32],
    "mapper": ["thread", "off"],
    "threads": [1, 2],
}


# -- what is refused ----------------------------------------------------------------------


def options_of(row: Row) -> dict[str, Any]:
    family, way = FAMILIES[row["family"]], PATHS[row["path"]]
    options = {
        "kv_cache_memory": "64MiB",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "kv_regime": row["regime"],
        "max_num_batched_tokens": row["budget"],
        "block_size": row["block"],
        "kv_mapper": row["mapper"],
        **family.options,
        **way.options,
    }
    if not family.is_exact and options["kv_regime"] != "auto":
        backends = {"virtual": "sdpa", "paged": "cpu" if family.config else "reference"}
        options["attention_backend"] = backends[options["kv_regime"]]
    return {name: value for name, value in options.items() if value is not None}


@cache
def _facts_of(family: str) -> dict[str, Any]:
    """What rules ask of a model."""
    config = FAMILIES[family].config
    with TemporaryDirectory() as folder:
        if config is not None:
            config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
            config.save_pretrained(folder)
        model = ModelConfig.from_directory(folder if config is not None else EMBEDDED)
    assert isinstance(model.network, DecoderConfig)
    refusal = refusal_of_ranks(model.network, 2)
    return {"state_bytes": model.state_bytes, "ranks_refusal": refusal}


@cache
def _refusal(family: str, path: str, regime: str) -> ConfigurationError | None:
    row: Row = {"family": family, "path": path, "regime": regime}
    row |= {"budget": 64, "block": 16, "mapper": "off"}
    try:
        rules.check({**vars(EngineConfig()), **options_of(row), **_facts_of(family)})
    except ConfigurationError as refused:
        return refused
    return None


def refusal_of(row: Row) -> ConfigurationError | None:
    """What rules say of a row; the other axes are in none of them."""
    return _refusal(row["family"], row["path"], row["regime"])


# -- who computes -------------------------------------------------------------------------


@cache
def checkpoint(family: str, folder: Path) -> str | None:
    made, path = FAMILIES[family], folder / family.replace(" ", "-")
    if made.config is not None:
        save(made.config, path)
    elif made.stored == "gptq":
        scheme = quantized_checkpoints.SCHEMES["gptq-asymmetric"]
        quantized_checkpoints.convert(Path(EMBEDDED), path, folder / "plain", scheme)
    elif made.stored == "gguf":
        path = path.with_suffix(".gguf")
        add = gguf_checkpoints.add_embedded_tokenizer
        gguf_checkpoints.convert(Path(EMBEDDED), path, add, "Q4_1")
    else:
        return None
    return str(path)


class Rows:
    """Runs rows, whose checkpoints are in ``folder``."""

    def __init__(self, folder: Path, prompts: Prompts) -> None:
        self._folder = folder
        head, *tails = prompts(6, 40, 21)
        head *= 4
        # Lengths of whole blocks and one token more: after a hit, one row is left to compute.
        self._prompts = [head, [*head[:64], *tails[0][:1]], [*head[:48], *tails[1][:40]]]
        self._prompts += [[*tail, *head][: 32 * i + 1] for i, tail in enumerate(tails[2:], 1)]

    def asked(self, feature: str) -> Asked:
        # Of three tokens an answer repeats itself, and can be looked up.
        of_three = greedy(30, logprobs=2, allowed_token_ids=[7, 8, 9])
        plain = [greedy(60), _drawn(5, n=2, logprobs=2), of_three]
        return list(zip(self._prompts, [*plain, *FEATURES[feature]], strict=False))

    @contextmanager
    def llm(self, family: str, **options: Any) -> Iterator[LLM]:
        model = checkpoint(family, self._folder)
        if model is not None and not FAMILIES[family].stored:
            options["tokenizer"] = EMBEDDED
        with LLM(model, **options) as llm:
            yield llm

    @cache  # noqa: B019  one object a module
    def alone(self, family: str, feature: str) -> list[RequestOutput]:
        options = {**FAMILIES[family].options, **ALONE, "max_model_len": 256}
        with self.llm(family, kv_cache_memory="64MiB", **options) as llm:
            return [together(llm, [one])[0] for one in self.asked(feature)]

    def run(self, row: Row, folder: Path) -> None:
        asked = self.asked(row["feature"])
        llm_of = partial(self.llm, row["family"])
        served = serve(llm_of, row["path"], options_of(row), asked, folder)
        for found in served.found:
            _compare(row, found, self.alone(row["family"], row["feature"]))
        # A sibling whose window has left the prompt gives none of it, nor does one that gave way.
        is_short = row["path"] in ("recompute", "swap")
        assert served.stats["forks_total"] > 0 or served.windows != {None} or is_short
        if row["path"] in ("together", "convert", "overlap"):
            chunks = max(result.metrics.num_prefill_chunks for result in served.found[0])
            assert (chunks > 2) == (row["budget"] <= 50)
        if row["path"] != "convert" and row["regime"] != "auto":
            assert {each.metrics.kv_regime for each in served.found[-1]} == {row["regime"]}


def _compare(row: Row, found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    # Steps that overlap draw by torch or not, in which log-probabilities are rounded otherwise.
    to_the_bit = FAMILIES[row["family"]].is_exact and row["path"] != "overlap"
    differing = []
    for index, (one, alone) in enumerate(zip(found, expected, strict=True)):
        if to_the_bit:
            same = seen(one) == seen(alone)
        else:
            same = tokens_of([one]) == tokens_of([alone])
            if alone.embedding is not None:
                np.testing.assert_allclose(one.embedding, alone.embedding, rtol=1e-3, atol=1e-3)
        differing += [] if same else [index]
    assert not differing, f"{len(differing)} of {len(found)} differ: {differing}"


# -- rows ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, prompts: Prompts) -> Rows:
    return Rows(tmp_path_factory.mktemp("rows"), prompts)


ROWS = covering_rows(AXES, lambda row: refusal_of(row) is None, SEED)
ROWS.sort(key=lambda row: list(FAMILIES).index(row["family"]))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_as_alone(row: Row, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_nothing(monkeypatch)
    torch.set_num_threads(row["threads"])  # a fixture sets it back
    rows.run(row, tmp_path)


@pytest.mark.parametrize("family", ["embedded", "q4", "gemma3", "qwen3-next"])
def test_a_choice_does_not_depend_on_others(rows: Rows, family: str) -> None:
    options = {**FAMILIES[family].options, **ALONE, "max_model_len": 256}
    [(prompt, _), *_] = rows.asked("drawn")
    with rows.llm(family, kv_cache_memory="64MiB", **options) as llm:
        [several] = together(llm, [(prompt, _drawn(5, n=3, logprobs=2))])
        [single] = together(llm, [(prompt, _drawn(5, logprobs=2))])
    assert len(seen(several)[0]) == 3
    assert seen(several)[0][:1] == seen(single)[0]


def test_pairs_that_no_row_has_are_refused_as_rules_say(rows: Rows) -> None:
    met = set().union(*map(pairs_of, ROWS))
    wanted = {
        ((a, x), (b, y))
        for (a, xs), (b, ys) in itertools.combinations(AXES.items(), 2)
        for x, y in itertools.product(xs, ys)
    }
    missing = sorted(wanted - met)
    for pair in missing:
        row = {**ROWS[0], **dict(pair)}
        refused = refusal_of(row)
        assert refused is not None, pair
        with pytest.raises(type(refused)) as caught, rows.llm(row["family"], **options_of(row)):
            pass
        assert str(caught.value) == str(refused)
    assert {path for _, (_, path) in missing} == {"lookup", "draft", "overlap", "ranks"}
