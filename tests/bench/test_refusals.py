"""What ``vmserve bench`` refuses, of each command: before anything is measured or written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.bench import refusal
from vmserve import _core
from vmserve.errors import ConfigurationError, DriverError

#: A command, and what it says; ``{here}`` is the directory in which it runs.
REFUSED = [
    ("ab --workload chats", "--workload: no workload is named 'chats': choose from chat, alp"),
    ("ab --variants virtual", "needs two or more, got virtual"),
    ("ab --variants virtual,virtual", "virtual is given twice"),
    ("ab --variants virtual,segments", "is named 'segments': choose from virtual, paged, auto"),
    ("ab --variants x=pages=3", "x: no engine option is named 'pages': known are"),
    ("ab --variants x=kv_mapper", "x: 'kv_mapper' has no value"),
    ("ab --variants x=max_num_seqs=many", "x: max_num_seqs is a number, not 'many'"),
    ("ab --variants x=enforce_eager=perhaps", "x: enforce_eager is on or off, not 'perhaps'"),
    ("ab --variants virtual,x=kv_mapper=off", "give variants with options a --variants of their"),
    ("ab --concurrency 2 --rate 1", "exclude each other"),
    ("ab --search --rate 1 --slo-ttft 1s", "leave --rate"),
    ("ab --search", "needs an objective"),
    ("ab --burstiness 0.5", "give --rate"),
    ("ab --rate 0", "--rate: 0 is not a number above 0"),
    ("ab --scale nan", "--scale: nan is not a number above 0"),
    ("ab --slo-ttft soon", "--slo-ttft: 'soon' is no duration"),
    ("ab --max-len 9000", "--max-len: 9000 is above the 8192 tokens"),
    ("ab --trace none.jsonl", "none.jsonl: No such file"),
    ("ab --renew 2 --rebuild-engines", "--renew: --rebuild-engines does so in every run"),
    ("ab --renew 2 --search --slo-ttft 1s", "--renew: --search keeps its engines"),
    ("ab --kv-cache-memory lots", "kv_cache_memory: 'lots' is not a size"),
    ("ab --model no/such/model --output {here}/file", "cannot write .*it is no directory"),
    ("alloc --section calls,nothing", "no section is named 'nothing'.*calls, steps"),
    ("alloc --section calls,steps --driver cuda", "--driver cuda is named 'steps'.*calls, band"),
    ("alloc --section calls --quick --json {here}", "cannot write .*it is a directory"),
    ("compare a.json", "two files or more"),
    ("compare a.json b.json", "cannot read a.json"),
    ("compare a.json b.json --json {here}/file/x.json", "cannot write .*it is no directory"),
    ("compare a.json b.json --fail-above -1", "no number from 0"),
    ("kernels --section nothing,decode", "'nothing': choose from decode, blocks"),
    ("kernels --quick --json -", "cannot write .*standard output"),
    ("kernels --quick --markdown /proc/none/x.json", "cannot write .*No such file"),
    ("papers --all --figure 12", "exclude each other"),
    ("papers --engine real --minutes 1", "--minutes is of simulated traces"),
    ("papers --model vmserve-embedded", "--model is of the real engine"),
    ("papers --quick --minutes 1", "--quick and --minutes"),
    ("papers --figure v7", "of --engine simulated is named 'v7': choose from 12, 13, 14, 19"),
    ("papers --engine real --figure 5", "--engine real is named '5': choose from 2, 12, 13"),
    ("papers --engine real --figure 13 --model nowhere", "model nowhere is neither"),
    ("papers --quick --json -", "cannot write .*standard output"),
    ("profile --output -", "cannot write .*standard output"),
    ("sharing --section block", "no section is named 'block': choose from blocks, prefix"),
    ("sharing --widths 1,2", "--widths: '1' is no whole number of at least 2"),
    ("sharing --block-sizes 16,24", "24 is no power of two"),
    ("sharing --workload alpaca,books", "no workload is named 'books'"),
    ("sharing --mode twice", "no mode is named 'twice'"),
    ("sharing --json -", "cannot write .*standard output"),
    ("startup --json -", "cannot write .*standard output"),
    ("step --json -", "cannot write .*standard output"),
    *((f"step --num-seqs {n}", "no whole number from 1 to 1024") for n in ("0", "2000", "1,,2")),
]


@pytest.mark.parametrize(("command", "told"), REFUSED, ids=[command for command, _ in REFUSED])
def test_a_command_that_cannot_be_measures_nothing(
    command: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    said = refusal(command.format(here=tmp_path), kind=ConfigurationError)
    assert re.search(told, said), said
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_machine_without_cuda_says_so_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*numbers: int) -> None:
        raise DriverError("the CUDA driver library cannot be loaded")

    monkeypatch.setattr(_core, "CudaDriver", refuse)
    line = "alloc --driver cuda --quick --json"
    assert "cannot be loaded" in refusal(line, tmp_path / "results.json", kind=DriverError)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_with_the_file() -> None:
    said = refusal("step --steps 1 --num-seqs 1 --json /dev/full")
    assert "cannot write /dev/full: No space left on device" in said


def test_what_a_process_said_is_told(tmp_path: Path) -> None:
    said = refusal("startup --repeats 1 --model", tmp_path / "none")
    assert re.search(r"the process did not start: .*none", said)
