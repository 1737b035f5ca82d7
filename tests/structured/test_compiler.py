"""Compiling: what is refused and how fast, what is kept, and that nothing outlives it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers import until
from tests.structured.gate import Gate
from vmserve.errors import InvalidRequestError
from vmserve.models import resolve_model
from vmserve.structured import compiler as compiler_module
from vmserve.structured.compiler import GrammarCompiler
from vmserve.structured.spec import StructuredOutputsParams
from vmserve.structured.vetting import VettingError, VettingProcess
from vmserve.structured.worker import Setup

EOS = 1
VOCAB = 2048
CHAIN = (
    "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1} a{i + 1}\n" for i in range(40)) + 'a40 ::= "x"\n'
)
#: Takes minutes and gigabytes, on any machine: an automaton with a state for each remainder.
BOMB = StructuredOutputsParams(json={"type": "integer", "multipleOf": 9_999_991})
#: Near a limit of time, of memory or of llguidance's own: which of them, if any, is the machine's.
HEAVY = {
    "regex": {"regex": "(a{1000}){1000}"},
    "nested regex": {"regex": "((a{100}){100}){100}"},
    "grammar": {"grammar": CHAIN},
    "schema": {"json": {"type": "integer", "multipleOf": 999_983}},
}
BROKEN = {
    "regex": ({"regex": "(a"}, "unclosed group"),
    "look-around": ({"regex": "(?=a)b"}, "look-around"),
    "undefined rule": ({"grammar": 'start: "a" | foo'}, "unknown name"),
    "undefined EBNF rule": ({"grammar": 'root ::= "a" | foo'}, "foo"),
    "no root": ({"grammar": 'rule ::= "a"'}, "root"),
    "no grammar": ({"grammar": "what is this"}, "::="),
    "deep grammar": ({"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000}, "too deep"),
    "endless grammar": ({"grammar": "start: s\ns: s"}, "nothing can match"),
    "no type": ({"json": {"type": "objectt"}}, "Invalid type"),
    "no schema": ({"json": {"properties": {"a": 3}}}, "schema must be an object"),
    "no reference": ({"json": {"$ref": "#/$defs/x"}}, "does not exist"),
    "unknown": ({"json": {"not": {"type": "string"}}}, "Unimplemented keys"),
    "lenient": ({"json": {"not": {}, "x-guidance": {"lenient": True}}}, "Unimplemented keys"),
    "impossible": ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "greater than"),
}


@pytest.fixture(scope="module")
def tokenizer() -> str:
    return (resolve_model(None) / "tokenizer.json").read_text(encoding="utf-8")


def compiling(
    tokenizer: str, vocab_size: int = VOCAB, **options: Any
) -> contextlib.closing[GrammarCompiler]:
    return contextlib.closing(GrammarCompiler(tokenizer, vocab_size, [EOS], **options))


def vetting(tokenizer: str) -> contextlib.closing[VettingProcess]:
    """With a short limit: what is tested is that it holds."""
    return contextlib.closing(VettingProcess(Setup(tokenizer, VOCAB, [EOS]), seconds=0.5))


@pytest.fixture(scope="module")
def compiler(tokenizer: str) -> Iterator[GrammarCompiler]:
    with compiling(tokenizer) as made:
        yield made


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_refused_with_the_reason(compiler: GrammarCompiler, name: str) -> None:
    given, told = BROKEN[name]
    with pytest.raises(InvalidRequestError, match=told) as caught:
        compiler.compile(StructuredOutputsParams(**given))  # type: ignore[arg-type]
    assert caught.value.param == "structured_outputs"
    assert len(str(caught.value)) < 1000


def test_the_first_mask(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputsParams(regex="[xy]+"))
    guide = grammar.start(stop_ids=[7])
    [mask] = compiler.masks([guide])
    first = mask.nonzero()[0].tolist()
    assert mask.shape == (VOCAB,)
    assert EOS not in first
    guide.accept(first[0])
    other = guide.fork()
    guide.accept(first[1])
    masks = compiler.masks([guide, other])
    # An answer may end now, with the end token or the stop id.
    assert all(sorted({*first, EOS, 7}) == mask.nonzero()[0].tolist() for mask in masks)
    assert guide.is_accepting
    assert not guide.is_complete


@pytest.mark.parametrize("vocab_size", [1500, 3000])
def test_a_model_with_fewer_or_more_tokens_than_its_tokenizer(
    tokenizer: str, vocab_size: int
) -> None:
    with compiling(tokenizer, vocab_size, num_tokens=VOCAB) as compiler:
        guide = compiler.compile(StructuredOutputsParams(regex="[a-z]+")).start()
        [mask] = compiler.masks([guide])
        assert mask.shape == (vocab_size,)
        assert 26 <= mask.sum() < VOCAB
        assert not mask[VOCAB:].any()


def test_a_complete_answer_can_only_end(compiler: GrammarCompiler) -> None:
    guide = compiler.compile(StructuredOutputsParams(regex="x")).start()
    [token] = compiler.masks([guide])[0].nonzero()[0].tolist()
    guide.accept(token)
    assert guide.is_complete
    assert compiler.masks([guide])[0].nonzero()[0].tolist() == [EOS]
    guide.accept(EOS)
    assert guide.error is None


def test_a_guide_that_failed_has_no_token_left(compiler: GrammarCompiler) -> None:
    """Not the end of an answer either, which would be told as one that matches."""
    guide = compiler.compile(StructuredOutputsParams(regex="[0-9]{3}")).start(())
    [allowed] = compiler.masks([guide])
    guide.accept(int((~allowed).nonzero()[0][10]))
    assert guide.error is not None
    assert not compiler.masks([guide]).any()


def test_what_fails_behind_its_first_token_is_refused(tokenizer: str) -> None:
    made = GrammarCompiler(tokenizer, VOCAB, [EOS], seconds=60.0)
    with contextlib.closing(made), pytest.raises(InvalidRequestError, match="make it simpler"):
        made.compile(StructuredOutputsParams(regex="(a{3000}){3000}"))


def test_equal_constraints_are_compiled_once(compiler: GrammarCompiler) -> None:
    one = compiler.submit(StructuredOutputsParams(choice=["a", "b"]))
    two = compiler.submit(StructuredOutputsParams(choice=["a", "b", "a"]))
    assert one.result() is two.result()


def test_the_cache_is_bounded(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_GRAMMARS", 2)
    params = [StructuredOutputsParams(regex=f"k{i}") for i in range(3)]
    first = compiler.compile(params[0])
    assert compiler.compile(params[0]) is first
    for other in params[1:]:
        compiler.compile(other)
    assert compiler.compile(params[0]) is not first


def test_a_bomb_ends_its_process_only(tokenizer: str) -> None:
    """A short limit: what is tested is that it holds, and that the next question is answered."""
    with vetting(tokenizer) as process:
        process.vet(StructuredOutputsParams(regex="a").constraint)
        before = process.pid
        assert before is not None
        with pytest.raises(VettingError, match="make it simpler") as caught:
            process.vet(BOMB.constraint)
        assert not caught.value.final
        assert not is_alive(before)
        assert process.vet(StructuredOutputsParams(regex="a").constraint).grammar
        assert process.pid != before


@pytest.mark.parametrize("name", HEAVY)
@pytest.mark.slow
def test_heavy_constraints_are_answered(tokenizer: str, name: str) -> None:
    with vetting(tokenizer) as process:
        with contextlib.suppress(VettingError):
            process.vet(StructuredOutputsParams(**HEAVY[name]).constraint)  # type: ignore[arg-type]
        assert process.vet(StructuredOutputsParams(regex="a").constraint).grammar


def test_a_refusal_is_remembered_and_others_are_served_meanwhile(tokenizer: str) -> None:
    with compiling(tokenizer, seconds=1.5) as compiler:
        assert compiler.pids == []
        late = compiler.submit(BOMB)
        assert compiler.compile(StructuredOutputsParams(regex="a+"))
        assert not late.done()
        with pytest.raises(InvalidRequestError, match="this json cannot be served"):
            late.result()
        assert compiler.submit(BOMB) is late


def test_processes_end_when_nothing_is_compiled(
    tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "IDLE_SECONDS", 0.05)
    with compiling(tokenizer) as compiler:
        for name in "ab":
            compiler.compile(StructuredOutputsParams(regex=name))
            until(lambda: compiler.pids == [])


def bomb(number: int) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=f"bomb{number}")


@pytest.fixture
def held(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Gate, GrammarCompiler]]:
    gate, made = Gate(monkeypatch), GrammarCompiler(tokenizer, VOCAB, [EOS])
    yield gate, made
    gate.open.set()
    made.close()


def test_a_flood_of_one_tenant_keeps_a_place_free(held: tuple[Gate, GrammarCompiler]) -> None:
    _, compiler = held
    flood = [compiler.submit(bomb(i), "a") for i in range(40)]
    assert compiler.submit(StructuredOutputsParams(choice=["x"]), "b").result(60)
    assert not any(future.done() for future in flood)
    assert compiler.num_waiting >= 38


def test_what_nobody_waits_for_is_not_compiled(held: tuple[Gate, GrammarCompiler]) -> None:
    gate, compiler = held
    flood = [(bomb(i), compiler.submit(bomb(i), "a")) for i in range(40)]
    until(lambda: len(gate.begun) == 2)
    shared = compiler.submit(bomb(39), "b")  # takes the third place
    until(lambda: len(gate.begun) == 3)
    for params, future in flood:
        compiler.abandon(params, future, "a")
    assert compiler.num_waiting == 0
    again = compiler.submit(bomb(38), "a")
    gate.open.set()
    assert shared.result(60)
    assert again.result(60)
    assert again is not flood[38][1]
    assert sorted(gate.begun) == ["bomb0", "bomb1", "bomb38", "bomb39"]


def test_one_of_several_who_wait_may_leave(held: tuple[Gate, GrammarCompiler]) -> None:
    gate, compiler = held
    for i in range(2):
        compiler.submit(bomb(i), "a")
    until(lambda: len(gate.begun) == 2)
    futures = [compiler.submit(bomb(2), "a") for _ in range(3)]
    compiler.abandon(bomb(2), futures[0], "a")
    compiler.abandon(bomb(2), futures[1], "a")
    assert compiler.num_waiting == 1
    gate.open.set()
    assert futures[2].result(60)
    compiler.abandon(bomb(2), futures[2], "a")  # too late to change anything
    assert compiler.submit(bomb(2), "a") is futures[2]


def test_closing_ends_what_runs(tokenizer: str) -> None:
    before = set(threading.enumerate())
    compiler = GrammarCompiler(tokenizer, VOCAB, [EOS], seconds=30)
    compiler.compile(StructuredOutputsParams(regex="a"))
    [pid] = compiler.pids
    late = compiler.submit(BOMB)
    compiler.close()
    assert not is_alive(pid)
    assert compiler.pids == []
    with pytest.raises(InvalidRequestError):
        late.result(timeout=0)
    until(lambda: set(threading.enumerate()) <= before)  # a cancelled timer ends by itself


def test_the_process_ends_with_its_input(tokenizer: str) -> None:
    """As it does when its parent is killed."""
    process = VettingProcess(Setup(tokenizer, VOCAB, [EOS]))
    process.vet(StructuredOutputsParams(regex="a").constraint)
    child = process._process
    assert child is not None
    assert child.stdin is not None
    child.stdin.close()
    until(lambda: child.poll() is not None)
    assert process.vet(StructuredOutputsParams(regex="a").constraint).grammar
    process.close()


def test_a_tokenizer_that_cannot_be_used() -> None:
    words, told = '{"model": {"type": "WordLevel"}}', "not available for this model's tokenizer"
    with compiling(words) as compiler, pytest.raises(InvalidRequestError, match=told):
        compiler.compile(StructuredOutputsParams(regex="a"))
