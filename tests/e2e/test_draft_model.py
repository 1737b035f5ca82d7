"""A draft model changes no answer, and drafts what the model itself would say where both agree."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_speculation import any_params, converting, small_pool
from tests.models import checkpoints
from tests.support.engines import each_step, greedy, seen
from vmserve import LLM, BeamSearchParams, SamplingParams
from vmserve.engine.draft_model import DraftModel
from vmserve.engine.drafts import Drafts
from vmserve.engine.engine import LLMEngine
from vmserve.errors import ConfigurationError
from vmserve.models import ModelConfig, resolve_model
from vmserve.speculation.draft_lengths import DraftLengths
from vmserve.speculation.in_order import InOrder

Prompts = Callable[[int, int, int], list[list[int]]]
#: Prompts and what is asked for each -> what a caller sees of the answers without drafts.
Alone = Callable[[list[list[int]], list[SamplingParams]], list[Any]]

SWAPS = {"preemption": "swap", "swap_space": "64MiB"}
#: Engines, and what each has to meet. Other budgets, and none of a cache: test_rows.py.
ENGINES: list[tuple[dict[str, Any], str]] = [
    ({"kv_regime": "virtual", "kv_cache_memory": "small"}, "num_preemptions_total"),
    ({"kv_regime": "paged", "kv_cache_memory": "small", **SWAPS}, "swapped_in_blocks_total"),
    ({"kv_cache_memory": "64MiB"}, "converted_to_paged_total"),
]
OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8}
#: The model drafts for itself.
ITSELF = {**OPTIONS, "speculative": "draft-model", "speculative_model": "vmserve-embedded"}


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small random model with the embedded one's tokenizer, and a few ids more."""
    own = resolve_model(None)
    config = ModelConfig.from_directory(own)
    directory = tmp_path_factory.mktemp("stranger")
    shape = checkpoints.llama(vocab_size=config.vocab_size + 8, head_dim=16)
    checkpoints.save(shape, directory)
    for file in own.glob("tokenizer*"):
        shutil.copy(file, directory)
    return directory


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    with LLM(**OPTIONS) as llm:
        yield lambda asked, params: list(map(seen, llm.generate(asked, params)))


@pytest.mark.parametrize(("options", "met"), ENGINES)
def test_random_workloads(
    options: dict[str, Any], met: str, prompts: Prompts, alone: Alone
) -> None:
    rng = random.Random(met)
    if options["kv_cache_memory"] == "small":
        options = {**options, "kv_cache_memory": small_pool(2)}
    pool = prompts(40, 120, 3)
    work = []
    for number in range(3):
        asked = [rng.choice(pool) for _ in range(rng.randrange(5, 9))]
        work.append((asked, [any_params(rng, 100 * number + i) for i in range(len(asked))]))
    expected = [alone(*each) for each in work]

    def preempt(engine: LLMEngine, step: int) -> None:
        """Let some steps find that the system has no memory."""
        if rng.random() < 0.1:
            engine.scheduler.make_room()

    with LLM(**ITSELF, **options) as llm:
        if met == "converted_to_paged_total":
            converting(llm, rng)
        each_step(llm, before=preempt)
        for _ in range(2):
            for (asked, params), answers in zip(work, expected, strict=True):
                for one, a, b in zip(params, answers, llm.generate(asked, params), strict=True):
                    assert seen(b) == a, one
        stats = llm.stats()
        drafted, accepted = (
            stats[f"spec_decode_num_{name}_tokens_total"] for name in ("draft", "accepted")
        )
        for memory in (llm.engine.memory, llm.engine.draft_model.memory):
            memory.check()
            assert memory.stats().used_pages == 0
    if met == "converted_to_paged_total":  # in which view requests begin depends on prices
        stats[met] += stats["converted_to_virtual_total"]
    assert stats[met] > 0
    assert drafted > 50
    # Grammars, and stop strings beside them, end answers that a draft goes on with.
    assert accepted > 0.75 * drafted


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_model_that_drafts_for_itself_is_believed(
    temperature: float, prompts: Prompts, alone: Alone
) -> None:
    asked = prompts(4, 60, 1)
    params = [
        SamplingParams(
            temperature=temperature, seed=i, max_tokens=40, ignore_eos=True, frequency_penalty=0.4
        )
        for i in range(4)
    ]
    with LLM(**ITSELF, num_speculative_tokens=3) as llm:
        found = llm.generate(asked, params)
        stats = llm.stats()
    assert list(map(seen, found)) == alone(asked, params)
    assert (
        stats["spec_decode_num_accepted_tokens_total"]
        == stats["spec_decode_num_draft_tokens_total"]
    )
    # 40 tokens: the first by the prompt's step, then 4 a step.
    assert stats["engine_steps_total"] <= 12


def test_a_stranger_is_not_believed(stranger: Path, prompts: Prompts, alone: Alone) -> None:
    asked = prompts(4, 60, 2)
    params = [SamplingParams(temperature=0.5 * (i % 2), seed=i, max_tokens=30) for i in range(4)]
    with LLM(**{**ITSELF, "speculative_model": str(stranger)}) as llm:
        assert list(map(seen, llm.generate(asked, params))) == alone(asked, params)
        stats = llm.stats()
    assert stats["spec_decode_num_draft_tokens_total"] > 50
    assert (
        stats["spec_decode_num_accepted_tokens_total"]
        < 0.1 * stats["spec_decode_num_draft_tokens_total"]
    )


def test_auto_asks_a_stranger_seldom(
    stranger: Path, prompts: Prompts, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With steps that take a second, and a fifth of one for each of the draft model's."""
    asked = prompts(4, 60, 2)
    params = [
        SamplingParams(temperature=0.5 * (i % 2), seed=i, max_tokens=120, ignore_eos=True)
        for i in range(4)
    ]
    expected = alone(asked, params)
    ran, learn, rounds = DraftLengths.ran, DraftLengths.learn, [0]

    def ran_in_a_fifth(lengths: DraftLengths, num_rows: int, num: int, _: float) -> None:
        rounds[-1] += 1
        ran(lengths, num_rows, num, 0.2)

    def learn_a_second(lengths: DraftLengths, _: float, __: float) -> None:
        learn(lengths, 1 + 0.2 * rounds[-1], 0.1)
        rounds.append(0)

    monkeypatch.setattr(DraftLengths, "ran", ran_in_a_fifth)
    monkeypatch.setattr(DraftLengths, "learn", learn_a_second)
    with LLM(**OPTIONS, speculative="auto", speculative_model=str(stranger)) as llm:
        assert isinstance(llm.engine._drafts, Drafts)
        assert isinstance(llm.engine._drafts._drafter, InOrder)
        llm.engine._drafts._drafter = llm.engine.draft_model  # no lookup
        assert list(map(seen, llm.generate(asked, params))) == expected
    assert 0 < sum(map(bool, rounds)) < 0.2 * len(rounds)


def test_who_gets_no_drafts(prompts: Prompts) -> None:
    """Requests that want none, beams, and ids that the draft model has not."""
    asked = prompts(3, 40, 5)
    with LLM(**ITSELF) as llm:
        llm.generate(asked[0], SamplingParams(max_tokens=20, speculative=False))
        llm.beam_search(asked[1], BeamSearchParams(beam_width=2, max_tokens=10))
        assert llm.stats()["spec_decode_num_drafts_total"] == 0
        assert not llm.engine.draft_model.memory.stats().used_pages


def test_a_draft_model_that_fails_ends_drafts_alone(prompts: Prompts) -> None:
    [asked] = prompts(1, 40, 6)
    one = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
    with LLM(**ITSELF) as llm:
        expected = llm.generate(asked, one)[0].outputs[0].token_ids
        drafts = llm.stats()["spec_decode_num_drafts_total"]

        def failing(*_: object) -> None:
            raise RuntimeError("out of order")

        llm.engine.draft_model._runner.execute = failing
        assert llm.generate(asked, one)[0].outputs[0].token_ids == expected
        assert llm.stats()["spec_decode_num_drafts_total"] == drafts > 0


def test_sequences_for_which_there_is_no_room_get_no_drafts(prompts: Prompts, alone: Alone) -> None:
    asked = prompts(6, 100, 8)
    expected = alone(asked, [greedy(60)] * 6)
    with LLM(**ITSELF) as llm:
        memory = llm.engine.draft_model.memory
        drafted, steps = [0], [0]
        for limit_pages in (100, 4):  # four have room for one and a half of six sequences
            llm.engine.reset_prefix_cache()
            llm.engine.draft_model.set_limit(limit_pages * memory.layout.total_page_bytes)
            assert list(map(seen, llm.generate(asked, greedy(60)))) == expected
            stats = llm.stats()
            drafted.append(stats["spec_decode_num_draft_tokens_total"] - sum(drafted))
            steps.append(stats["engine_steps_total"] - sum(steps))
            memory.check()
        assert 0 < drafted[2] < drafted[1]
        assert steps[2] > 1.5 * steps[1]
        assert stats["num_preemptions_total"] == 0


def test_the_limit_is_of_both_memories(prompts: Prompts) -> None:
    with LLM(**ITSELF, kv_cache_memory="64MiB") as llm:
        memories = (llm.engine.memory, llm.engine.draft_model.memory)

        def limits() -> list[int]:
            return [each.limit_pages * each.layout.total_page_bytes for each in memories]

        page = memories[0].layout.total_page_bytes
        assert 64 << 20 >= sum(limits()) > (64 << 20) - 2 * page
        llm.generate(prompts(4, 60, 7), SamplingParams(max_tokens=20))
        told = llm.engine.set_kv_cache_memory("16MiB")
        assert told == sum(limits())
        assert 16 << 20 >= told > (16 << 20) - 2 * page
        llm.engine.reset_prefix_cache()
        assert all(each.stats().cached_blocks == 0 for each in memories)


def test_another_tokenizer_is_refused(stranger: Path, tmp_path: Path) -> None:
    shutil.copytree(stranger, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    described = json.loads(file.read_text(encoding="utf-8"))
    vocab = described["model"]["vocab"]
    one, other = sorted(vocab)[300:302]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    file.write_text(json.dumps(described), encoding="utf-8")
    first = min(vocab[one], vocab[other])
    with pytest.raises(ConfigurationError, match=f"another tokenizer: token {first} is .*, not "):
        LLM(speculative="draft-model", speculative_model=str(tmp_path))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"speculative_model": "/nowhere"}, "/nowhere"),
        (
            {"kv_cache_memory": "1MiB", "max_model_len": 1024},
            "of the KV cache, 50% are the draft model's",
        ),
    ],
)
def test_options_that_do_not_agree_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        LLM(**{**ITSELF, **options})


def test_it_is_asked_once_a_step(prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by steps that are planned again because newcomers are admitted."""
    asked: list[int] = [0]
    propose = DraftModel.propose

    def counted(*args: Any) -> Any:
        asked[-1] += 1
        return propose(*args)

    monkeypatch.setattr(DraftModel, "propose", counted)
    waiting, admitted = [0], []

    def before(engine: LLMEngine, step: int) -> None:
        waiting.append(engine.scheduler.num_waiting if engine.scheduler.num_running else 0)

    def after(engine: LLMEngine, step: int) -> None:
        admitted.append(waiting[-1] > engine.scheduler.num_waiting)
        asked.append(0)

    with LLM(**{**ITSELF, "max_num_seqs": 4}) as llm:
        each_step(llm, before=before, after=after)
        lengths = [SamplingParams(max_tokens=5 + 7 * i, ignore_eos=True) for i in range(8)]
        llm.generate(prompts(8, 60, 5), lengths)
    assert any(admitted)
    assert max(asked) == 1
