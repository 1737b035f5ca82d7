"""Compare greedy tokens of a GGUF file of llama with ``transformers`` on its dequantized weights.

``python -m tests.e2e.gguf_tokens FILE.gguf [--prompts N] [--longest N] [--tokens N]``: prompts of
5 tokens and more, chats and plain text, in every regime and on paths through the memory.
Counters prove that a path was taken. A token that is not the reference's first has a *gap*: by how
much its logit is below the highest, in float64. Ends with status 1 where a gap is no near tie.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from tests.support.engines import greedy
from tests.support.paths import PATHS, serve
from vmserve import LLM, BeamSearchParams  # before torch

import torch  # isort: skip
from transformers import LlamaConfig, LlamaForCausalLM  # isort: skip

from vmserve.models.gguf.config import describe
from vmserve.models.gguf.reader import open_gguf
from vmserve.models.gguf.tensors import find_weights
from vmserve.text.tokenizer import load_tokenizer

__all__ = ["NEAR_TIE", "Reference", "Taken", "compare", "paths", "real_prompts"]

#: Rows are rounded to int16 before quantized weights, which moves logits by some thousandths.
NEAR_TIE = 0.05
_ROOT = Path(__file__).parents[2]
_OTHER_LANGUAGES = (
    "Am Morgen ging der alte Fischer zum Hafen, um die Netze zu flicken.",
    "Le petit boulanger ouvrit sa boutique à six heures et prépara le pain pour tout le village.",
    "La niña escribió una carta a su abuela, que vivía en las montañas, y le contó su viaje.",
    "В маленьком городе у реки жил часовщик, который чинил часы быстрее всех в округе.",
    "从前有一座山,山上有一座庙,庙里有一个老和尚在给小和尚讲故事。",
    "昔々、ある村に、おじいさんとおばあさんが住んでいました。",
    "كان يا ما كان في قديم الزمان تاجر يسافر بين المدن.",
    "एक समय की बात है, एक गाँव में एक किसान रहता था।",
)
_QUESTIONS = (
    "What is the capital of France?",
    "Write a function that reverses a list in Python, and explain it.",
    "Summarize the following text in two sentences:\n",
)


def real_prompts(file: Path, count: int, longest: int) -> list[list[int]]:
    """Prompts of 5 to ``longest`` tokens, as many short as long ones."""
    tokenizer, rng = load_tokenizer(file), random.Random(22)
    documents = [path.read_text() for path in sorted((_ROOT / "docs").glob("*.md"))]
    code = [path.read_text() for path in sorted((_ROOT / "vmserve").rglob("*.py"))]
    prompts = []
    for index in range(count):
        length = round(5 * (longest / 5) ** (index / (count - 1)))
        kind = index % 5
        if kind < 2:
            question = _QUESTIONS[index // 5 % 3]
            text = question + (rng.choice(documents) if length > 60 else "")
            ids = tokenizer.apply_chat_template([{"role": "user", "content": text}])[1]
            # The end of a chat is what makes it one.
            ids = [*ids[: max(0, length - 8)], *ids[-8:]]
        elif kind == 4:
            ids = tokenizer.encode(" ".join(rng.sample(_OTHER_LANGUAGES, 8)) * (length // 100 + 1))
        else:
            text = "".join(rng.sample(documents if kind == 2 else code, 8)) * 4
            ids = tokenizer.encode(text)
            start = rng.randrange(max(1, len(ids) - length))
            ids = ids[start:]
        prompts.append(ids[:length])
    return prompts


class Reference:
    """``transformers`` in float32, and in float64 where that does not decide."""

    def __init__(self, path: Path) -> None:
        model = open_gguf(path)
        self._config = describe(model).network
        self._weights = {}
        for name, weight in find_weights(model, self._config).items():
            kind = GGMLQuantizationType[weight.tensor.type.name]
            numbers = dequantize(weight.file.raw(weight.tensor), kind).reshape(weight.tensor.shape)
            if weight.rows_of_tensor is not None:
                numbers = numbers[weight.rows_of_tensor]
            self._weights[name] = torch.from_numpy(numbers.copy())
        self._known: dict[tuple[int, ...], list[float]] = {}

    def _model(self, dtype: torch.dtype) -> LlamaForCausalLM:
        network = self._config
        positions: Any = network.positions
        config = LlamaConfig(
            vocab_size=network.vocab_size,
            hidden_size=network.hidden_size,
            intermediate_size=network.mlp_size,
            num_hidden_layers=network.num_layers,
            num_attention_heads=network.q_heads,
            num_key_value_heads=network.kv_heads,
            head_dim=network.head_dim,
            rms_norm_eps=network.norm.eps,
            max_position_embeddings=positions.max_position_embeddings,
            rope_parameters={"rope_type": "default", **positions.parameters},
            tie_word_embeddings=network.tied_embeddings,
        )
        assert positions.rope_type == "default", "only the plain kind is written here"
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model = model.to_empty(device="cpu")
        # Frequencies are no weights, and not in the file.
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
        weights = self._weights
        left = model.load_state_dict(weights, strict=False)
        assert not left.unexpected_keys
        assert set(left.missing_keys) <= {"lm_head.weight"}
        model.tie_weights()
        return model.to(dtype).eval()

    @cached_property
    def single(self) -> LlamaForCausalLM:
        return self._model(torch.float32)

    @cached_property
    def _double(self) -> LlamaForCausalLM:
        return self._model(torch.float64)

    @torch.inference_mode()
    def logits(self, prompt: list[int], tokens: list[int], *, double: bool = False) -> torch.Tensor:
        """``[tokens, vocab]``: what each of ``tokens`` was chosen from."""
        model = self._double if double else self.single
        ids = torch.tensor([[*prompt, *tokens[:-1]]])
        found: torch.Tensor = model(ids, use_cache=False, logits_to_keep=len(tokens)).logits[0]
        return found

    def gaps(self, prompt: list[int], tokens: list[int]) -> list[float]:
        """0 for each token that is the reference's own."""
        key = (len(prompt), *prompt, *tokens)
        if key not in self._known:
            for double in (False, True):
                logits = self.logits(prompt, tokens, double=double)
                chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
                self._known[key] = (logits.max(1).values - chosen).tolist()
                if not any(self._known[key]):
                    break
        return self._known[key]

    @torch.inference_mode()
    def beams(self, prompt: list[int], width: int, num_tokens: int) -> list[list[int]]:
        found = self.single.generate(
            torch.tensor([prompt]), num_beams=width, num_return_sequences=width, do_sample=False,
            max_new_tokens=num_tokens, min_new_tokens=num_tokens, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        return [row[len(prompt) :].tolist() for row in found]

    def score(self, prompt: list[int], tokens: list[int]) -> float:
        """Mean log-probability."""
        logits = self.logits(prompt, tokens, double=True).log_softmax(1)
        return float(logits.gather(1, torch.tensor(tokens)[:, None]).mean())


@dataclass
class Taken:
    """A path's answers. ``beams``: a prompt, and the token ids of all its beams, best first."""

    name: str
    answers: list[tuple[list[int], list[int]]]
    beams: list[tuple[list[int], list[list[int]]]]


_BEAMS, _BEAM_TOKENS = 4, 12
_TAKEN = ("together", "hits", "recompute", "swap", "convert", "persist")


def paths(file: Path, prompts: list[list[int]], regime: str, num_tokens: int) -> Iterator[Taken]:
    """With forks and beams of short prompts among the others."""
    beams = BeamSearchParams(beam_width=_BEAMS, max_tokens=_BEAM_TOKENS, ignore_eos=True)
    few = sorted(prompts, key=len)[: 2 + len(prompts) // 3]
    asked = [*((prompt, greedy(num_tokens)) for prompt in prompts)]
    asked += [(prompt, greedy(num_tokens, n=2)) for prompt in few]
    asked += [(prompt, beams) for prompt in few[:2]]
    for name in _TAKEN:
        options = {
            "dtype": "float32",
            "kv_cache_memory": "1GiB",
            "kv_regime": regime,
            "max_model_len": max(map(len, prompts)) + 2 * num_tokens,
            "max_num_batched_tokens": 77 if name == "together" else 256,
            **PATHS[name].options,
        }
        with TemporaryDirectory() as folder:
            served = serve(partial(LLM, str(file)), name, options, asked, Path(folder))
        *answers, one, other = served.found[-1]
        assert served.stats["forks_total"] > 2 * (_BEAMS - 1)
        yield Taken(
            name,
            [(list(r.prompt_token_ids), list(c.token_ids)) for r in answers for c in r.outputs],
            [
                (list(each.prompt_token_ids), [list(c.token_ids) for c in each.outputs])
                for each in (one, other)
            ],
        )


def compare(reference: Reference, taken: Taken) -> tuple[int, list[float]]:
    """How many tokens (or beams) there are, and the gaps of those that differ."""
    gaps = [gap for answer in taken.answers for gap in reference.gaps(*answer)]
    for prompt, beams in taken.beams:
        expected = reference.beams(prompt, _BEAMS, _BEAM_TOKENS)
        for ours, theirs in zip(beams, expected, strict=True):
            # Another beam in its place: as good as it, or not.
            same = ours == theirs
            apart = 0.0 if same else reference.score(prompt, theirs) - reference.score(prompt, ours)
            gaps.append(0.0 if same else abs(apart) or 1e-300)
    return len(gaps), sorted((gap for gap in gaps if gap), reverse=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--longest", type=int, default=3000)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--regimes", nargs="+", default=["virtual", "paged"])
    given = parser.parse_args()
    reference = Reference(given.file)
    prompts = real_prompts(given.file, given.prompts, given.longest)
    lengths = sorted(map(len, prompts))
    print(f"{len(prompts)} prompts of {lengths[0]} to {lengths[-1]:,} tokens")
    worst = 0.0
    for regime in given.regimes:
        for taken in paths(given.file, prompts, regime, given.tokens):
            began = time.monotonic()
            count, gaps = compare(reference, taken)
            worst = max([worst, *gaps[:1]])
            print(
                f"{regime:8}{taken.name:14}{count - len(gaps):5} of {count:5} the same"
                f"{'; gaps ' + ', '.join(f'{gap:.2g}' for gap in gaps[:5]) if gaps else ''}"
                f"  {time.monotonic() - began:.0f} s",
                flush=True,
            )
    return int(worst > NEAR_TIE)


if __name__ == "__main__":
    raise SystemExit(main())
