"""What ``vmserve plan`` says."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vmserve.cli.main import app
from vmserve.cli.planning.report import (
    PRESETS,
    ModelShape,
    block_size_report,
    block_size_table,
    plan_report,
)
from vmserve.cli.planning.together import ModelNeed, TogetherReport
from vmserve.errors import ConfigurationError
from vmserve.memory.layout import CUDA_GRANULARITY

GIB = 1 << 30


def printed(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(renderable)
    text = console.file
    assert isinstance(text, io.StringIO)
    return text.getvalue()


def line_with(text: str, *cells: str) -> list[str]:
    """The cells of the first row that starts with ``cells``."""
    for line in text.splitlines():
        found = [cell.strip() for cell in line.strip("│").split("│")]
        if found[: len(cells)] == list(cells):
            return found
    raise AssertionError(f"no row starts with {cells} in\n{text}")


def test_the_presets_are_the_published_shapes() -> None:
    shapes = {name: (s.num_layers, s.kv_heads, s.head_dim) for name, s in PRESETS.items()}
    assert shapes == {
        "llama-3-8b": (32, 8, 128),
        "yi-6b": (32, 4, 128),
        "yi-34b": (60, 8, 128),
        "qwen2.5-7b": (28, 4, 128),
        "gemma-3-27b": (62, 16, 128),
        "gpt-oss-20b": (24, 8, 64),
        "qwen3-next-80b-a3b": (12, 2, 256),
        "deepseek-v3": (61, 1, 576),
    }


def test_what_fits_in_a_cap() -> None:
    report = plan_report(
        PRESETS["llama-3-8b"], granularity=CUDA_GRANULARITY, limit_bytes=16 * GIB, max_len=8192
    )
    values = json.loads(json.dumps(report.to_dict()))
    assert (values["model"], values["granularity"]) == ("llama-3-8b", 2 << 20)
    first, default = values["candidates"][0], values["candidates"][5]
    # The engine puts all layers in a group, in pages of 128 tokens or more.
    assert (default["is_default"], default["page_tokens"]) == (True, 128)
    # 32 groups of 2 MiB pages with 512 tokens: 256 pages, 16 of them for 8,192 tokens.
    assert (first["page_tokens"], first["num_groups"]) == (512, 32)
    assert (first["num_pages"], first["num_tokens"], first["max_len_requests"]) == (256, 131072, 16)
    assert [c["layers_per_group"] for c in values["candidates"]] == [1, 2, 4, 8, 16, 32] * 2
    assert sum(c["is_default"] for c in values["candidates"]) == 1


def test_the_table_shows_the_numbers() -> None:
    text = printed(
        plan_report(PRESETS["qwen2.5-7b"], granularity=CUDA_GRANULARITY, limit_bytes=14 * GIB)
    )
    assert "qwen2.5-7b: 28 layers, 4 KV heads of 128, bfloat16; pages in multiples of 2 MiB" in text
    assert "fit: in 14 GiB per rank, requests of 131,072 tokens." in text
    assert line_with(text, "28", "together") == [
        *("28", "together", "1", "14 MiB", "256", "0.0%", "14 MiB", "3.9", "262,144", "2")
    ]
    assert line_with(text, "7", "apart")[2:8] == ["8", "2 MiB", "256", "12.5%", "16 MiB", "31.2"]


def test_without_a_cap_nothing_is_said_of_what_fits() -> None:
    report = plan_report(PRESETS["yi-6b"], tensor_parallel=2)
    text = printed(report)
    assert "2 ranks" in text
    assert "tokens fit" not in text
    assert line_with(text, "1", "together")[2:] == [
        *("32", "64 KiB", "64", "0.0%", "4 MiB", "500.0")
    ]
    first = report.to_dict()["candidates"][0]
    assert (first["num_tokens"], first["max_len_requests"]) == (None, None)


def test_any_shape_can_be_planned() -> None:
    shape = ModelShape(name="mine", num_layers=6, kv_heads=2, head_dim=32, dtype="float32")
    report = plan_report(shape, limit_bytes=64 << 20, max_map_count=65530)
    default = report.candidates[0]
    assert (default.layout.page_tokens, default.layout.shape.page_bytes) == (64, 32 << 10)
    assert default.num_pages == 341  # of 6 x 32 KiB
    # Its context is not known.
    assert (default.max_len_requests, default.slot_mappings) == (None, None)
    assert "map areas" not in printed(report)
    text = printed(plan_report(shape, max_len=8192, max_map_count=65530))
    assert "a request of 8,192 tokens takes 768 by default" in text
    fixed = plan_report(shape, page_bytes=8192)
    assert {c.layout.shape.page_bytes for c in fixed.candidates} == {8192}
    with pytest.raises(ConfigurationError, match="use pages of"):
        plan_report(shape, page_bytes=4096, block_tokens=32)


def test_the_block_size_tables_are_printed() -> None:
    rows = block_size_table([PRESETS["yi-34b"]])
    text = printed(block_size_report(rows))
    assert line_with(text, "yi-34b (TP-1)") == ["yi-34b (TP-1)", "32", "64", "128", "1,024"]
    waste = text[text.index("worst-case waste per request") :]
    assert line_with(waste, "yi-34b (TP-2)")[1:] == ["15 MiB", "30 MiB", "60 MiB", "480 MiB"]


def test_keys_without_values_are_alone() -> None:
    text = printed(plan_report(PRESETS["deepseek-v3"], granularity=CUDA_GRANULARITY))
    assert line_with(text, "61", "alone")[2:5] == ["1", "18 MiB", "256"]


def need(name: str, max_len: int, weight_bytes: int | None = 1 << 30) -> ModelNeed:
    report = plan_report(PRESETS[name], granularity=CUDA_GRANULARITY, max_len=max_len)
    assert report.longest is not None
    return ModelNeed(
        name=name, weight_bytes=weight_bytes, kinds=report.pages, longest=report.longest
    )


def together(*needs: ModelNeed, limit_bytes: int | None = None) -> TogetherReport:
    return TogetherReport(
        models=needs,
        lengths=(1000,),
        limit_bytes=limit_bytes,
        free_bytes=8 * GIB,
        whose="MemAvailable",
    )


def test_models_in_one_pool() -> None:
    # 8,192 tokens of 128 KiB; 2,048 of 56 KiB: whole pages in both.
    models = (need("llama-3-8b", 8192), need("qwen2.5-7b", 2048))
    report = together(*models, limit_bytes=2 * GIB)
    report.require_room()
    values = json.loads(json.dumps(report.to_dict()))
    assert [model["floor_bytes"] for model in values["models"]] == [GIB, 112 << 20]
    assert [model["token_bytes"] for model in values["models"]] == [128 << 10, 56 << 10]
    assert values["models"][1]["requests"] == [{"num_tokens": 1000, "bytes": 56 << 20}]
    assert values["left_bytes"] == GIB - (112 << 20)
    assert values["machine_left_bytes"] == 4 * GIB
    text = printed(report)
    assert "912 MiB of 2 GiB are left beside the floors" in text
    assert "4 GiB are left of 8 GiB (MemAvailable) beside weights and the pool." in text
    assert line_with(text, "all")[1:5] == ["2 GiB", "", "", "1.109 GiB"]
    # Without a limit the floors count; of a shape's weights nothing is known.
    assert together(*models).machine_left_bytes == 6 * GIB - GIB - (112 << 20)
    assert together(need("yi-6b", 4096, None)).machine_left_bytes is None
    assert "lack" in printed(together(*models, limit_bytes=7 * GIB))


def test_models_that_do_not_fit_together_are_told_what_each_needs() -> None:
    report = together(need("llama-3-8b", 8192), need("qwen2.5-7b", 2048), limit_bytes=GIB)
    told = (
        "need 1 GiB for 8,192 tokens of llama-3-8b, 112 MiB for 2,048 tokens of qwen2.5-7b; the KV "
        "cache has 1 GiB: raise --kv-cache-memory to 1.109 GiB"
    )
    with pytest.raises(ConfigurationError, match=told):
        report.require_room()


def test_plan_shows_kinds_and_what_requests_waste() -> None:
    report = plan_report(PRESETS["gemma-3-27b"], limit_bytes=32 << 30, lengths=[1000])
    values = report.to_dict()
    assert [(kind["kind"], kind["num_layers"], kind["window"]) for kind in values["kinds"]] == [
        ("all", 10, None),
        ("window 1024", 52, 1024),
    ]
    [request] = values["requests"]
    assert request["needed_bytes"] == 1000 * 62 * 8192
    assert request["slots_bytes"] == 1024 * 62 * 8192
    assert request["blocks_bytes"] == 1008 * 62 * 8192
    assert request["equal_bytes"] == 1008 * 70 * 8192
    assert request["equal_waste"] == pytest.approx(1 - 62000 / 70560)
    text = printed(report)
    assert "3 requests of 131,072 tokens fit in 32 GiB" in text
    assert "551.2 MiB (12.1%)" in text
    assert "kinds" not in plan_report(PRESETS["llama-3-8b"]).to_dict()
    assert "kinds" in plan_report(PRESETS["llama-3-8b"], lengths=[12]).to_dict()


def test_kinds_that_cannot_fit_are_refused_with_what_each_needs() -> None:
    needs = (
        r"gemma-3-27b: a sequence of 131072 tokens needs 352 pages of 31 MiB "
        r"\(10 GiB in 2,048 pages of 5 MiB \(all: 10 layers\); "
        r"650 MiB in 25 pages of 26 MiB \(window 1024: 52 layers\)\), 264 fit in the KV cache of "
        r"8 GiB: raise --kv-cache-memory to 10.66 GiB or lower --max-model-len to 96384"
    )
    with pytest.raises(ConfigurationError, match=needs):
        plan_report(PRESETS["gemma-3-27b"], limit_bytes=8 << 30, max_len=131072)
    plan_report(PRESETS["gemma-3-27b"], limit_bytes=8 << 30, max_len=65536)


@pytest.mark.parametrize("tokens", ["", "12,", "0", "-3", "x"])
def test_what_are_no_lengths_is_refused(tokens: str) -> None:
    result = CliRunner().invoke(app, ["plan", "--model", "yi-6b", "--tokens", tokens])
    assert isinstance(result.exception, ConfigurationError)
    assert "200,8000" in str(result.exception)
