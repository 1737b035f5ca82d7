"""Every script of the benchmarks does its work once, in its smallest form.

It runs as its README says, in a copy of ``benchmarks/``, where it keeps what it measures.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from vmserve.errors import VmserveError
from vmserve_bench.lab.server import serving

_ROOT = Path(__file__).parents[2]
_BENCHMARKS = _ROOT / "benchmarks"
#: Of a process that hangs.
_LIMIT_SECONDS = 110


@dataclass(frozen=True)
class Smoke:
    """Where a command leaves a figure: every one has to be finite and above zero."""

    #: Of standard output: what groups match are figures.
    said: tuple[str, ...] = ()
    #: Paths of figures in the JSON that is kept in ``file``; ``*``: of all items.
    kept: tuple[str, ...] = ()
    file: str = "benchmarks/*/results/*/results.json"
    #: Values at paths.
    equal: Mapping[str, Any] = field(default_factory=dict)
    #: The last line on standard error, where something is missing: the exit status is not 0.
    refused: str = ""
    cores: int = 1


def said(*patterns: str, **more: Any) -> Smoke:
    return Smoke(said=patterns, **more)


def kept(*paths: str, **more: Any) -> Smoke:
    return Smoke(kept=paths, **more)


def refused(last_line: str) -> Smoke:
    return Smoke(refused=last_line)


_CELL = r" +([\d,.]+) "
_RATES = "--streams 2 --prompt-tokens 4 --tokens 4 --singles 1 --rounds 1"

#: By arguments of the interpreter; of several commands the last one leaves the figures.
SMOKES = {
    "benchmarks/alloc/burst.py --groups 1 --batches 2 --step-ms 1": said(
        '"mapper": "thread".* "median_host_ms": ([^,]+).*"slowest_step": ([^}]+)'
    ),
    "benchmarks/kinds/turns.py --turns 2 --prompt-tokens 100 --models qwen3.5 llama": said(
        '"qwen3.5", "prompt_tokens": ([0-9]+), "computed_tokens": ([0-9]+)',
        '"llama", "prompt_tokens": ([0-9]+), "computed_tokens": ([0-9]+)',
    ),
    "benchmarks/alloc/run.py --quick --section bookkeeping": kept(
        "sections/bookkeeping/rows/*/plan_apply_ns/median"
    ),
    "benchmarks/batch/run.py --lines 2 --max-tokens 4 --rounds 1 --connections 2": said(
        *(
            rf"{way}: .* s, ([\d,]+) generated tokens/s; ([\d.]+) s of processors"
            for way in ("batch", "serve")
        )
    ),
    "benchmarks/families/run.py --smoke --families llama --rounds 1 --threads 1": kept(
        *(f"runs/*/{name}" for name in ("decode", "long", "streams", "prefill")),
        refused="llama.cpp is not here: .* ended with 1: no index",
    ),
    "benchmarks/gpu/compile_matrix.py --variants bf16-64-paged --architectures sm_80 "
    "--out out.json": kept(
        "rows/*/resources/registers",
        "rows/*/cubin_bytes",
        said=(r"(\d+) kernels, no kernel spills",),
        file="out.json",
    ),
    "benchmarks/gpu/engine.py --dry-run --parts ttft --out out": kept(
        "parts/ttft/*/ttft_ms",
        file="out/results.json",
        equal={"parts/ttft/*/backend": "cpu", "left_out": [], "failed": {}},
    ),
    # tests/cuda_kernels/test_bench.py has the time for a figure.
    "benchmarks/gpu/kernels.py --dry-run --parts decode --budget-seconds 0": said(
        r"0 measured, (\d+) points left out, 0 wrong"
    ),
    "benchmarks/gpu/probe.py --dry-run --sections device --out out": kept(
        "sections/*/records/0/granularity_minimum_bytes",
        file="out/results.json",
        equal={"sections/*/status": "done"},
    ),
    "benchmarks/kernels/run.py --quick --section products": kept(
        *(f"sections/products/points/*/{name}_ns" for name in ("one_row", "prompt"))
    ),
    "-m benchmarks.kinds.run --num-requests 12": kept(
        "results/waste/rows/*/blocks_bytes", "results/capacity/rows/*/most_at_once"
    ),
    "benchmarks/kv_dtype/run.py --smoke --threads 1": said(
        f"│ 512 +│{_CELL}│{_CELL}│", f"│ 1,024 +│{_CELL}│{_CELL}│", r"\(([\d.]+) times\)"
    ),
    "-m benchmarks.models.pool --section switch,server --rounds 2 --max-tokens 4": kept(
        *("results/switch/first_token_s_after_the_other/*", "results/switch/num_needs"),
        *("results/server/median_a_s", "results/server/median_b_s"),
    ),
    "-m benchmarks.models.simulated --seeds 1 --devices GPU": said(
        r"│ GPU +│ +60 : 4 │ clients │ ([\d.]+) .*│ +([\d.]+) │ +([\d.]+), ([\d.]+) │"
    ),
    "benchmarks/overload/run.py --kind real --rounds 1 --loads 0.5 --requests 24": kept(
        "results/*/*/*/tokens_per_second", "results/*/*/*/num_steps"
    ),
    "benchmarks/papers/run.py --engine real --figure 13 --quick": kept(
        "figures/13/cases/*/requests_per_s/*", "figures/13/cases/*/at_once/*"
    ),
    "benchmarks/peers/checkpoint.py cache smoke 0 && "
    "benchmarks/peers/to_gguf.py cache/llama-h64-l2-q4-kv2-m128-v512-seed0 a.gguf bf16 && "
    "-c \"import gguf; print('tensors:', len(gguf.GGUFReader('a.gguf').tensors))\"": said(
        r"tensors: (\d+)"
    ),
    "benchmarks/peers/quantize_gguf.py a b q8_0": refused("quantize_gguf.py: .*llama_cpp.*"),
    "benchmarks/peers/to_openvino.py a b int8": refused("to_openvino.py: no optimum-cli .*"),
    f"benchmarks/peers/report.py {_BENCHMARKS}/peers/results/2026-11-24-amd-epyc.json": said(
        r"\| 125m \| q4_k_m \| openvino int4 \| ([\d.]+) \| ([\d.]+) \|"
    ),
    "benchmarks/persist/run.py vmserve-embedded --tokens 300 --rounds 1 --pairs 1": kept(
        *(
            f"data/vmserve-embedded/{path}"
            for path in ("restarts/seconds/*", "restarts/runs/restored/*/cached", "steady/written")
        ),
        equal={"data/vmserve-embedded/restarts/wrong": 0},
    ),
    "benchmarks/persist/run.py vmserve-embedded --beside-llama-cpp": refused(
        "run.py: .* ended with 1: no index"
    ),
    "benchmarks/quality/run.py --variants none,int8 --text benchmarks/quality/README.md": kept(
        "sections/quality/rows/*/perplexity", "sections/quality/rows/*/weight_bytes"
    ),
    "benchmarks/ranks/run.py --model vmserve-embedded --work 'decode, 1 stream' --pairs 1": said(
        r"decode, 1 stream: ([\d,]+) tokens/s, ([\d,]+) tokens/s", cores=2
    ),
    "benchmarks/regimes/run.py --quick --rounds 1 --workloads long": said(
        rf"│ long +│{_CELL}│{_CELL}│{_CELL}│"
    ),
    "benchmarks/regimes/simulated.py --seeds 2 --quick --workloads shared-prefix": kept(
        "runs/shared-prefix/*/*/seconds"
    ),
    "benchmarks/replicas/run.py --seconds 0.3 --rounds 1 --workloads 'no prefixes' "
    "--subjects prefix": said(
        r"│ no prefixes │ +([\d.]+) \(\d+%\) │", r"a choice by prefix: ([\d.]+) ms", cores=2
    ),
    "benchmarks/sampling/run.py --vocab 100 --rows 1 --seconds 0.001": kept(
        "results/*/core_us", "results/*/torch_us"
    ),
    " && ".join(
        f"benchmarks/scale/run.py {part} --replicas 2 --prefixes 2 --workloads hot {size}"
        for part, size in (
            ("check", "--num 10 --rates 2"),
            ("limits", "--seconds 5"),
            ("scale", "--num 10 --rates 2"),
        )
    ): kept(
        "rows/*/finished_per_second", "rows/*/hit_rate", file="benchmarks/scale/results/*.json"
    ),
    f"benchmarks/server_overhead/run.py {_RATES} --ways http --output out.json": kept(
        "medians/*/tokens_per_s",
        "medians/*/*_cpu_us_per_token",
        "medians/*/idle_ttft_ms",
        file="out.json",
    ),
    "benchmarks/server_overhead/per_token.py --streams 4 --tokens 99 --repeats 1 --step-ms 2": said(
        '"us_per_token": ([^,]+)', r'"events_per_token": (\S+)'
    ),
    "benchmarks/sharing/run.py --section blocks --widths 2 --num-requests 2 --workload alpaca "
    "--block-sizes 16": kept(
        "sections/blocks/runs/*/virtual/distinct", "sections/blocks/runs/*/max_sequences"
    ),
    "benchmarks/speculation/run.py --modes off,prompt-lookup --workloads copying --streams 1 "
    "--conversations 1 --max-tokens 8 --rounds 1": kept(
        "results/*/tokens_per_second", "results/*/cpu_ms_a_token"
    ),
    "benchmarks/step/decoder.py vmserve-embedded --quantization none --num-seqs 1 "
    "--context 232 --steps 8 --repeats 1": said(r"1 sequences, none : step +(\d+)  forward +(\d+)"),
    "benchmarks/step/pair.py other --rounds 1 --num-seqs 1": said(
        f"│ 1 +│ virtual │{_CELL}│{_CELL}│", f"│ 1 +│ +paged │{_CELL}│{_CELL}│"
    ),
    "benchmarks/step/run.py --num-seqs 1 --steps 5": kept(
        "sections/step/rows/*/overhead_ns/median"
    ),
}

#: What another one, or a test, starts: where that is written.
ELSEWHERE = {
    "gpu/run.sh": "tests/gpu_probe/test_run_sh.py",
    "gpu/serve.py": "tests/gpu_probe/test_serve.py",
    "peers/from_gguf.py": "benchmarks/peers/models.py",
    "peers/reference.py": "benchmarks/peers/run.py",
    "peers/run.py": "tests/bench/test_peers_benchmark.py",
    "peers/worker.py": "benchmarks/peers/launch.py",
    "server_overhead/scripted_engine.py": "benchmarks/server_overhead/per_token.py",
}


def script_of(command: str) -> str:
    """Its name in ``benchmarks``; empty for another command."""
    first, second = shlex.split(command)[:2]
    name = second.replace(".", "/") + ".py" if first == "-m" else first
    return name.removeprefix("benchmarks/") if name.startswith("benchmarks/") else ""


def startable() -> set[str]:
    """The scripts that have a main part, or are a command in a README."""
    found = set(_BENCHMARKS.rglob("*.sh"))
    found |= {
        path
        for path in _BENCHMARKS.rglob("*.py")
        if re.search(r"^if __name__ == .__main__.:", path.read_text(encoding="utf-8"), re.M)
    }
    for readme in _BENCHMARKS.rglob("README.md"):
        text = readme.read_text(encoding="utf-8")
        for module in re.findall(r"python -m (benchmarks\.[\w.]+)", text):
            found.add(_ROOT / (module.replace(".", "/") + ".py"))
        for script in re.findall(r"(?:^|python |\s)(benchmarks/[\w/]+\.(?:py|sh))", text):
            found.add(_ROOT / script)
    return {str(path.relative_to(_BENCHMARKS)) for path in found}


def test_every_script_is_run() -> None:
    run = {script_of(command) for line in SMOKES for command in line.split(" && ")} - {""}
    assert not run & set(ELSEWHERE)
    assert run | set(ELSEWHERE) == startable()
    for script, path in ELSEWHERE.items():
        assert Path(script).name in (_ROOT / path).read_text(encoding="utf-8"), script


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the benchmarks, another "checkout" and an environment that installs nothing."""
    left_out = shutil.ignore_patterns("results", "__pycache__")
    shutil.copytree(_BENCHMARKS, tmp_path / "benchmarks", ignore=left_out)
    programs = {
        "other/.venv": f'exec {shlex.join(interpreter())} "$@"',
        "cache/envs/llama-cpp": "echo no index >&2; exit 1",
    }
    for place, line in programs.items():
        python = tmp_path / place / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\n{line}\n")
        python.chmod(0o755)
    return tmp_path


def interpreter() -> list[str]:
    return [sys.executable, *(["-S"] if sys.flags.no_site else [])]


def run(command: str, tree: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """The command in the tree, with ``more`` in its environment; one that hangs is killed."""
    path = os.pathsep.join([str(tree), *sys.path, str(_ROOT)])
    variables = {"PYTHONPATH": path, "VMSERVE_PEERS_CACHE": str(tree / "cache"), **more}
    with subprocess.Popen(
        [*interpreter(), *shlex.split(command)],
        cwd=tree,
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as process:
        try:
            out, err = process.communicate(timeout=_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            raise AssertionError(f"{command} hangs: {out}\n{err}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):  # servers that it left
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def values(data: Any, path: str) -> list[Any]:
    found = [data]
    for key in path.split("/"):
        if isinstance(found[0], list):
            pairs = [(each, range(len(each))) for each in found]
            found = [each[i] for each, keys in pairs for i in keys if key in ("*", str(i))]
        else:
            pattern = re.compile(re.escape(key).replace(r"\*", ".*"))
            found = [each[name] for each in found for name in each if pattern.fullmatch(name)]
        assert found, f"{key} of {path} is not there"
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("line", SMOKES, ids=lambda line: line.partition(" && ")[0][:48])
def test_a_script_measures(line: str, tree: Path) -> None:
    each = SMOKES[line]
    if len(os.sched_getaffinity(0)) < each.cores:
        pytest.skip(f"it needs {each.cores} cores")
    for command in line.split(" && "):
        done = run(command, tree)
        assert (done.returncode != 0) == bool(each.refused), done.stdout + done.stderr
        assert "Traceback" not in done.stderr
    if each.refused:
        assert re.fullmatch(each.refused, done.stderr.splitlines()[-1]), done.stderr
    figures = []
    for pattern in each.said:
        matches = [match.groups() for match in re.finditer(pattern, done.stdout)]
        assert matches, f"{pattern} is not in {done.stdout}"
        figures += [float(text.replace(",", "")) for groups in matches for text in groups]
    if each.kept:
        files = list(tree.glob(each.file))
        assert files, f"no {each.file}"
        for file in files:
            data = json.loads(file.read_text(encoding="utf-8"))
            figures += [float(value) for path in each.kept for value in values(data, path)]
            for path, expected in each.equal.items():
                assert all(value == expected for value in values(data, path)), path
    assert figures or (each.refused and not each.said)
    assert all(math.isfinite(figure) and figure > 0 for figure in figures), figures


def test_a_server_that_ends_while_it_loads_is_not_waited_for(tree: Path) -> None:
    with (
        pytest.raises(VmserveError, match=r"did not start: .*--no-such-option"),
        serving("--no-such-option"),
    ):
        pass
    command = "benchmarks/server_overhead/per_token.py --streams 1 --tokens 1 --repeats 1"
    done = run(command, tree, VMSERVE_CPU_ISA="none")
    assert done.stderr.splitlines()[-1] == "the server did not start: exit status 1"
