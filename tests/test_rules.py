"""The table of what does not go with what: each pair is refused, and nothing else."""

from __future__ import annotations

import dataclasses
import re
import string
from contextlib import nullcontext
from itertools import combinations, product
from typing import Any

import pytest

from vmserve.config import EngineConfig
from vmserve.options.rules import RULES, Fact, Rule, check

#: Values of the names in texts that are no facts of their rule.
FILLED: dict[str, Any] = {
    "able": "reference, sdpa", "attention_backend": "sdpa", "backend": "sdpa", "dtype": "float16",
    "head_dim": 512, "launcher": "torchrun", "readable": "auto or int8", "refusals": "",
    "size_name": "WORLD_SIZE", "model_name": "model.gguf", "no_gpu": " (no driver)", "num_gpus": 1,
    "softcap": 50.0, "softcap_remedy": "use --attention-backend cpu",
    "speculative_model": "tiny.gguf", "tensor_parallel_size": 2, "whose_engines": "--engine",
}  # fmt: skip


def refuses(rule: Rule, facts: dict[str, Any]) -> bool:
    both = (rule.this, rule.other)
    return all(fact.name in facts and fact.holds(facts[fact.name]) for fact in both)


def ids(rule: Rule) -> str:
    return f"{rule.this.says} | {rule.other.says}".replace("`", "")


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_a_pair_is_refused_and_each_alone_is_not(rule: Rule) -> None:
    facts = {}
    for fact in (rule.this, rule.other):
        facts[fact.name] = fact.example
        check({fact.name: fact.example})
    named = {name for _, name, _, _ in string.Formatter().parse(rule.text) if name}
    filled = {name: FILLED[name] for name in named - facts.keys()}
    with pytest.raises(rule.kind) as refusal:
        check({**filled, **facts})
    assert str(refusal.value) == rule.text.format_map({**filled, **facts})
    assert type(refusal.value) is rule.kind


def test_rules_are_different() -> None:
    for one, other in combinations(RULES, 2):
        assert (one.this.says, one.other.says) != (other.this.says, other.other.says)


def test_facts_of_one_name_say_what_they_mean() -> None:
    meanings: dict[tuple[str, str], Fact] = {}
    for rule in RULES:
        for fact in (rule.this, rule.other):
            assert fact.holds(fact.example), fact
            known = meanings.setdefault((fact.name, fact.says), fact)
            assert known.example == fact.example


def test_a_fact_with_the_name_of_an_option_is_the_option() -> None:
    options = {field.name for field in dataclasses.fields(EngineConfig)}
    for rule in RULES:
        for fact in {rule.this, rule.other}:
            if fact.name in options - {"kv_cache_memory"}:
                flag = fact.name.replace("_", "-").replace("enable-", "no-enable-")
                assert f"--{flag}" in fact.says, fact


OPTIONS: dict[str, list[Any]] = {
    "async_scheduling": ["on", "off"],
    "attention_backend": ["sdpa", "cpu"],
    "enable_prefix_caching": [False, True],
    "kv_persist": ["DIR", None],
    "kv_persist_bytes": ["20GiB", None],
    "linear_backend": ["native", "torch"],
    "num_speculative_tokens": [5, None],
    "preemption": ["swap", "recompute"],
    "priority_max_wait": [5.0, None],
    "scheduling_policy": ["priority", "fcfs"],
    "speculative": ["draft-model", "auto", "off"],
    "speculative_model": ["tiny", None],
    "swap_space": ["0", "1GiB"],
    "tensor_parallel_size": [2, 1],
}


def test_each_pair_of_options() -> None:
    """What the table says of two options is what a configuration does, and nothing else is."""
    plain = EngineConfig(model="m")
    for (first, values), (second, others) in combinations(OPTIONS.items(), 2):
        for value, other in product(values, others):
            given = {first: value, second: other}
            facts = {**vars(plain), **given}
            if facts["preemption"] == "swap":
                facts["swap_bytes"] = given.get("swap_space") == "1GiB"
            refused = [rule for rule in RULES if refuses(rule, facts)]
            told = refused[0].text.format_map(facts) if refused else ""
            refusal = pytest.raises(refused[0].kind, match=re.escape(told)) if refused else None
            with refusal or nullcontext():
                EngineConfig(model="m", **given)
