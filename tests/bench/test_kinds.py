"""The benchmark of kinds of layers: ways to share pages, and what they let run at once."""

from __future__ import annotations

from benchmarks.kinds.capacity import mixed, serve, ways
from benchmarks.kinds.waste import rows
from vmserve.cli.planning.report import PRESETS


def test_padded_groups_have_as_many_layers_as_vllm_makes_room_for() -> None:
    padded = {
        model: next(way for way in ways(PRESETS[model]) if "vLLM" in way.name)
        for model in ("gemma-3-27b", "gpt-oss-20b")
    }
    layers = {
        model: (way.num_layers, [len(kind.layers) for kind in way.kinds])
        for model, way in padded.items()
    }
    assert layers == {"gemma-3-27b": (70, [10, 60]), "gpt-oss-20b": (24, [12, 12])}


def test_more_requests_run_at_once_with_kinds() -> None:
    requests = mixed(24, seed=0)
    one_page, groups, kinds, _, slots = (
        serve(PRESETS["gemma-3-27b"], way, 8 << 30, requests)["requests_at_once"]
        for way in ways(PRESETS["gemma-3-27b"])
    )
    assert one_page < groups < kinds
    assert groups < slots < kinds  # pages of 64 tokens: between padding and blocks of 16


def test_waste_is_a_share_of_what_is_held() -> None:
    found = list(rows((12, 1000)))
    assert len(found) == 4 * 3 * 2
    for row in found:
        for way in ("slots", "blocks", "whole", "equal"):
            assert 0 <= row[f"{way}_waste"] < 1
            assert row[f"{way}_bytes"] >= row["needed_bytes"]
