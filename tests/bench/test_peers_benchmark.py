"""The pure parts of the comparison with peers, and one run of vmserve alone, end to end."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from vmserve_bench.lab.measure import MemorySamples, pss_bytes

from tests.models.gguf_checkpoints import add_embedded_tokenizer, convert
from vmserve.models.hub import resolve_model

if TYPE_CHECKING:
    from types import ModuleType

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PEERS = BENCHMARKS / "peers"
RUN = [sys.executable, str(PEERS / "run.py"), "--smoke", "--threads", "1"]
NAMES = (
    "model_shape",
    "checkpoint",
    "worker",
    "reference",
    "environments",
    "subjects",
    "traffic",
    "models",
    "launch",
    "gguf_layout",
    "serving",
    "summary",
    "report",
    "run",
    "engines",
    "engines.stepped",
)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The benchmark's modules, imported as its script sees them."""
    monkeypatch.setattr(sys, "path", [str(PEERS), *sys.path])
    modules = {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        del sys.modules[name]  # a later test may mean another module of that name
    return modules


# -- who is compared --------------------------------------------------------------------


def test_variant_has_a_name_and_engine_options(peers: dict[str, ModuleType]) -> None:
    variant_of = peers["subjects"].variant_of
    native = variant_of("native:linear-backend=native,max_num_seqs=8,enforce_eager=true")
    assert native.name == "vmserve native"
    assert native.options == {
        "linear_backend": "native",
        "max_num_seqs": 8,
        "enforce_eager": True,
    }
    assert native.width == "16 bit"
    assert variant_of("q:quantization=int8").width == "8 bit"
    assert variant_of("half:dtype=float16").width == "16 bit"
    assert variant_of("default").options == {}
    file = variant_of("file:weights=q4_k_m,quantization=int8-dynamic,isa=avx2")
    assert (file.weights, file.width, file.isa) == ("q4_k_m", "4 bit", "avx2")
    assert file.options == {"quantization": "int8-dynamic"}


@pytest.mark.parametrize("text", ["", ":a=1", "name:a", "name:=1", "name:a="])
def test_variant_that_cannot_be_read(peers: dict[str, ModuleType], text: str) -> None:
    with pytest.raises(ValueError, match=r"no name|no OPTION=VALUE"):
        peers["subjects"].variant_of(text)


def test_files_and_instruction_sets_that_there_are_not(peers: dict[str, ModuleType]) -> None:
    with pytest.raises(ValueError, match=r"weights=q3_k: GGUF files here are bf16, .*, q4_k_m"):
        peers["subjects"].variant_of("a:weights=q3_k")
    with pytest.raises(ValueError, match=r"vmserve with isa=sse2: .* are avx2"):
        peers["subjects"].variant_of("a:isa=sse2")
    with pytest.raises(ValueError, match=r"openvino with isa=avx2: .* of vmserve and llama.cpp"):
        peers["subjects"].peers_of("openvino:int4:isa=avx2")


def test_peer_without_weights_means_those_of_8_and_16_bit(peers: dict[str, ModuleType]) -> None:
    peers_of = peers["subjects"].peers_of
    assert [each.name for each in peers_of("llama.cpp")] == [
        "llama.cpp bf16",
        "llama.cpp f16",
        "llama.cpp q8_0",
    ]
    assert [each.width for each in peers_of("llama.cpp")] == ["16 bit", "16 bit", "8 bit"]
    [one] = peers_of("openvino:int8:max_num_batched_tokens=1024")
    assert (one.name, one.options) == (
        "openvino int8 (max_num_batched_tokens=1024)",
        {"max_num_batched_tokens": 1024},
    )
    [old] = peers_of("llama.cpp:q4_1:slots=4,isa=avx2")
    assert (old.name, old.isa) == ("llama.cpp q4_1 (slots=4,isa=avx2)", "avx2")
    assert old.options == {"slots": 4}
    [batch] = peers_of("transformers:batch_size=32")
    assert (batch.weights, batch.options) == ("bf16", {"batch_size": 32})


def test_vllm_is_set_up_as_its_guide_says(
    peers: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    is_zen = peers["environments"].is_zen
    assert is_zen("vendor_id : AuthenticAMD\nflags : avx2 avx512f")
    assert not is_zen("vendor_id : AuthenticAMD\nflags : avx2")
    assert not is_zen("vendor_id : GenuineIntel\nflags : avx512f")
    launch = peers["launch"]
    monkeypatch.setattr(launch, "find_library", lambda name: f"lib{name}.so.4")
    assert launch.preloaded(tmp_path) == ["libtcmalloc_minimal.so.4"]
    (tmp_path / "libiomp5.so").touch()
    assert launch.preloaded(tmp_path)[1:] == [str(tmp_path / "libiomp5.so")]
    monkeypatch.setattr(launch, "find_library", lambda name: None)
    assert launch.preloaded(tmp_path) == [str(tmp_path / "libiomp5.so")]


@pytest.mark.parametrize("text", ["sglang", "vllm:q8_0", "vllm:bf16:eager"])
def test_peer_that_there_is_not(peers: dict[str, ModuleType], text: str) -> None:
    with pytest.raises(ValueError, match=r"choose from|the weights of vllm are bf16"):
        peers["subjects"].peers_of(text)


def test_two_of_one_name_are_refused(peers: dict[str, ModuleType]) -> None:
    with pytest.raises(ValueError, match="'vmserve a' is there twice"):
        peers["subjects"].subjects_of(["a", "a:max_num_seqs=2"], [])


def test_options_for_the_command_line(peers: dict[str, ModuleType]) -> None:
    options = {"max_num_seqs": 8, "enable_prefix_caching": False, "eager": True, "dtype": None}
    assert peers["subjects"].command_line_options(options) == [
        "--max-num-seqs",
        "8",
        "--no-enable-prefix-caching",
        "--eager",
    ]


def test_servers_are_started_with_the_same_limits(peers: dict[str, ModuleType]) -> None:
    subjects = peers["subjects"]
    Environment = peers["environments"].Environment
    environment = Environment(Path("python"), {}, {"llama-server": Path("llama-server")})
    job = {
        "model": "M",
        "files": {"gguf": "M.gguf"},
        "num_threads": 2,
        "max_num_seqs": 64,
        "max_model_len": 512,
        "has_bf16": False,
    }

    def command(subject: Any) -> str:
        return " ".join(peers["serving"].command(subject, environment, job, 80))

    ours = command(subjects.variant_of("x:linear_backend=native"))
    assert "--model M --served-model-name peers --host 127.0.0.1 --port 80" in ours
    assert "--max-num-seqs 64 --max-model-len 512 --no-enable-prefix-caching" in ours
    assert ours.endswith("--linear-backend native")
    [llama] = subjects.peers_of("llama.cpp:q8_0:slots=4")
    assert "-m M.gguf" in command(llama)
    assert "--threads 2 --threads-batch 2 --parallel 4 --ctx-size 2048" in command(llama)
    assert command(llama).endswith("--log-disable")
    [llama] = subjects.peers_of("llama.cpp:q8_0:ubatch=64,kv_unified=false")
    assert command(llama).endswith("--log-disable --ubatch-size 64 --no-kv-unified")
    [llama] = subjects.peers_of("llama.cpp:q8_0:polling=1")
    with pytest.raises(peers["serving"].ServerFailedError, match="no option polling here"):
        command(llama)
    failed = peers["serving"].run_server(llama, environment, job, {}, [], 1.0)
    assert failed == {"error": "llama-server has no option polling here", "workloads": {}}
    [vllm] = subjects.peers_of("vllm:bf16:enforce_eager=true")
    assert command(vllm).endswith("--no-enable-prefix-caching --dtype float32 --enforce-eager")


# -- what they are asked ----------------------------------------------------------------


def test_offline_asks_what_it_always_did(peers: dict[str, ModuleType]) -> None:
    traffic = peers["traffic"]
    sizes = traffic.FULL["125m"]
    found = traffic.make_workloads(["offline", "decode", "prefill"], sizes, 4096, 0, 1.0)
    described = traffic.describe(found)
    assert described["offline"]["num_requests"] == 64
    assert described["offline"]["num_input_tokens"] == 9_634
    assert described["offline"]["num_output_tokens"] == 8_218
    longer = traffic.replace(sizes, mean_in=320.0, sigma=0.0)
    [same] = {
        len(r["prompt_token_ids"])
        for r in traffic.make_workloads(["offline"], longer, 4096, 0, 1.0)["offline"]
    }
    assert same == 320
    assert described["decode"] == {
        "num_requests": 2,
        "num_input_tokens": 1024,
        "num_output_tokens": 258,
        "longest_tokens": 641,
        "last_arrival_s": 0.0,
    }
    assert described["prefill"]["longest_tokens"] == 2049
    prompts = [tuple(each["prompt_token_ids"]) for some in found.values() for each in some]
    assert len(set(prompts)) == len(prompts)
    assert min(min(prompt) for prompt in prompts) >= 3  # no special id


def test_fixed_cache_holds_the_largest_workload(peers: dict[str, ModuleType]) -> None:
    shape = peers["model_shape"].LLAMA_8M  # 2 x 6 x 6 x 48 x 4 = 13,824 bytes a token
    small = [{"prompt_token_ids": [5] * 9, "num_output_tokens": 1}]
    exact = [{"prompt_token_ids": [5] * 77_672, "num_output_tokens": 0}]
    assert peers["traffic"].kv_gib({"decode": small, "offline": exact}, shape) == 1
    exact[0]["num_output_tokens"] = 1
    assert peers["traffic"].kv_gib({"decode": small, "offline": exact}, shape) == 2


def test_served_arrives_at_its_rate(peers: dict[str, ModuleType]) -> None:
    traffic = peers["traffic"]
    [served] = traffic.make_workloads(["served"], traffic.FULL["8m"], 4096, 0, 2.0).values()
    arrivals = [each["arrival_s"] for each in served]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == len(served) / 2.0


def test_repeats_of_served_differ_in_arrivals_alone(peers: dict[str, ModuleType]) -> None:
    traffic = peers["traffic"]

    def made(repeat: int) -> tuple[list[Any], list[float]]:
        sizes = traffic.FULL["125m"]
        [served] = traffic.make_workloads(["served"], sizes, 4096, 0, 2.0, repeat).values()
        asked = [(each["prompt_token_ids"], each["num_output_tokens"]) for each in served]
        return asked, [each["arrival_s"] for each in served]

    (first, arrivals), (second, others) = made(0), made(1)
    assert first == second
    assert arrivals != others
    assert arrivals[-1] == others[-1] == 24.0
    assert made(1)[1] == others


def test_largest_model_s_requests_are_small(peers: dict[str, ModuleType]) -> None:
    traffic = peers["traffic"]
    names = list(traffic.WORKLOADS)
    found = traffic.make_workloads(names, traffic.FULL["1b"], 32_000, 0, traffic.RATES["1b"])
    described = traffic.describe(found)
    assert [described[name]["num_requests"] for name in names] == [6, 1, 1, 6, 16]
    assert max(each["longest_tokens"] for each in described.values()) == 257
    assert described["served"]["last_arrival_s"] == 60.0


class FakeEngine:
    """A token per step for all that it was given; tells which requests it saw, and when."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.widths: list[int] = []

    def add(self, number: int, request: dict[str, Any]) -> None:
        self.left[number] = request["num_output_tokens"]

    def step(self) -> list[tuple[int, list[int]]]:
        self.widths.append(len(self.left))
        found = [(number, [7]) for number in self.left]
        self.left = {number: left - 1 for number, left in self.left.items() if left > 1}
        return found


def request_of(num_output_tokens: int, arrival_s: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"num_output_tokens": num_output_tokens, "arrival_s": arrival_s, **more}


def test_stepped_requests_run_together(peers: dict[str, ModuleType]) -> None:
    engine = FakeEngine()
    answers = peers["engines.stepped"].run_all(engine, [request_of(3), request_of(1)], 10)
    assert [each["token_ids"] for each in answers] == [[7, 7, 7], [7]]
    assert engine.widths == [2, 1, 1]
    assert all(len(each["times_s"]) == len(each["token_ids"]) for each in answers)


def test_sequential_requests_run_alone(peers: dict[str, ModuleType]) -> None:
    engine = FakeEngine()
    requests = [request_of(2, is_sequential=True), request_of(2, is_sequential=True)]
    answers = peers["engines.stepped"].run_all(engine, requests, 0)
    assert engine.widths == [1, 1, 1, 1]
    assert answers[1]["due_s"] >= answers[0]["times_s"][-1]


def test_request_is_not_added_before_it_arrives(peers: dict[str, ModuleType]) -> None:
    engine = FakeEngine()
    requests = [request_of(1, 0.02), request_of(1)]
    late, early = peers["engines.stepped"].run_all(engine, requests, 0)
    assert engine.widths == [1, 1]
    assert early["times_s"][0] < 0.02 <= late["times_s"][0]
    assert late["due_s"] == 0.02


# -- what came of it --------------------------------------------------------------------


def test_metrics_of_a_run(peers: dict[str, ModuleType]) -> None:
    workloads = {
        "offline": [request_of(30), request_of(10)],
        "decode": [request_of(3)],
        "prefill": [{**request_of(1), "prompt_token_ids": [5] * 100}],
    }
    run = {
        "first_token_s": 1.5,
        "loaded_pss_bytes": 4,
        "file_bytes": 2,
        "kv_bytes": {"decode": 1, "prefill": 2, "streams": 4},
        "workloads": {
            "offline": {"elapsed_s": 2.0, "peak_pss_bytes": 5},
            "decode": {"times_s": [[1.0, 1.25, 1.5]], "peak_pss_bytes": 9},
            "prefill": {"times_s": [[3.0]], "due_s": [1.0], "peak_pss_bytes": 7},
            # Both decode from 2 to 4: two tokens each.
            "streams": {
                "times_s": [[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]],
                "peak_pss_bytes": 8,
            },
            "served": {
                "due_s": [0.0, 1.0],
                "times_s": [[0.5, 0.6], [3.5, 3.8]],
                "peak_pss_bytes": 11,
            },
        },
    }
    assert peers["summary"].metrics_of(run, workloads) == pytest.approx(
        {
            "offline_tokens_per_s": 20.0,
            "decode_tokens_per_s": 4.0,
            "prefill_tokens_per_s": 50.0,
            "streams_tokens_per_s": 2.0,
            "served_ttft_p50_s": 1.5,
            "served_ttft_p99_s": 2.48,
            "served_tpot_p50_s": 0.2,
            "served_itl_p50_s": 0.2,
            "served_itl_p99_s": 0.298,
            "served_unfinished": 1.0,
            "offline_peak_pss_bytes": 5,
            "decode_peak_pss_bytes": 9,
            "prefill_peak_pss_bytes": 7,
            "streams_peak_pss_bytes": 8,
            "served_peak_pss_bytes": 11,
            "peak_pss_bytes": 9,
            "file_bytes": 2,
            "loaded_pss_bytes": 4,
            "pss_per_file_and_kv": 3.0,
            "first_token_s": 1.5,
        }
    )


def test_server_gives_latencies_and_its_own_memory(peers: dict[str, ModuleType]) -> None:
    served = {"due_s": [0.0], "times_s": [[0.5]], "peak_pss_bytes": 3}
    run = {"is_server": True, "first_token_s": 9.0, "workloads": {"served": served}}
    found = peers["summary"].metrics_of(run, {})
    assert found == {
        "served_ttft_p50_s": 0.5,
        "served_ttft_p99_s": 0.5,
        "served_unfinished": 1.0,
        "served_peak_pss_bytes": 3,
        "server_first_token_s": 9.0,
    }


def test_report_says_who_did_not_keep_up(peers: dict[str, ModuleType]) -> None:
    values = {
        "vmserve a": {"served_unfinished": {"0": 1.0, "1": 2.0, "2": 9.0}},
        "vllm bf16": {"served_unfinished": {"0": 30.0}},
        "transformers bf16": {},
    }
    [_, line] = peers["report"].kept_up(values)
    assert line.endswith("(many: it did not keep up): vmserve a 2, vllm bf16 30.")
    assert peers["report"].kept_up({"transformers bf16": {}}) == []


def test_report_has_the_memory_of_every_workload(peers: dict[str, ModuleType]) -> None:
    values = {"vmserve a": {"offline_peak_pss_bytes": {"0": 3 * 2**20, "1": 5 * 2**20}}}
    assert peers["report"].memory_table(values) == [
        "",
        "| PSS, MiB, peak while | offline |",
        "|---|---:|",
        "| vmserve a | 4 |",
    ]
    assert peers["report"].memory_table({"vmserve a": {"first_token_s": {"0": 1.0}}}) == []


@pytest.mark.parametrize(
    ("num_repeats", "told"),
    [
        (1, "; one repeat: no interval"),
        (2, "; 2 repeats: no interval"),
        (3, "; [95 % interval: bootstrap over 3 repeats, so few that it is about their range]"),
        (6, "; [95 % interval: bootstrap over 6 repeats]"),
    ],
)
def test_report_says_what_its_intervals_are(
    peers: dict[str, ModuleType], num_repeats: int, told: str
) -> None:
    rows = [{"metrics": {"decode_tokens_per_s": {"num_repeats": num_repeats}}}]
    assert peers["report"].interval(rows) == told


def test_values_come_in_the_order_of_subjects_with_all_repeats(
    peers: dict[str, ModuleType],
) -> None:
    def run(subject: str, repeat: int, seconds: float) -> dict[str, Any]:
        told = {"model": "8m", "subject": subject, "repeat": repeat, "workloads": {}}
        return told | {"first_token_s": seconds}

    runs = [run("b", 0, 3.0), run("a", 0, 1.0), run("a", 1, 2.0), run("b", 1, 5.0)]
    found = peers["summary"].collect(runs, {"8m": {}}, ["a", "b"])
    assert list(found["8m"]) == ["a", "b"]
    assert found["8m"]["b"] == {"first_token_s": {"0": 3.0, "1": 5.0}}
    assert peers["summary"].medians(found["8m"])["a"] == {"first_token_s": 1.5}


def metric(peers: dict[str, ModuleType], name: str) -> Any:
    return next(each for each in peers["summary"].METRICS if each.name == name)


def test_advantage_is_above_one_where_vmserve_is_better(peers: dict[str, ModuleType]) -> None:
    advantage = peers["summary"].advantage
    ours, theirs = {"0": 30.0, "1": 10.0}, {"0": 10.0, "1": 10.0, "2": 99.0}
    fast = advantage(metric(peers, "offline_tokens_per_s"), ours, theirs)
    assert fast == {"ratio": 2.0, "low": None, "high": None, "num_repeats": 2}
    small = advantage(metric(peers, "peak_pss_bytes"), ours, theirs)
    assert small["ratio"] == 0.5
    assert advantage(metric(peers, "peak_pss_bytes"), ours, {"7": 1.0}) is None


def test_interval_holds_the_ratio_and_nothing_beyond_the_repeats(
    peers: dict[str, ModuleType],
) -> None:
    ours = {"0": 20.0, "1": 24.0, "2": 30.0}
    theirs = {"0": 10.0, "1": 10.0, "2": 10.0}
    found = peers["summary"].advantage(metric(peers, "decode_tokens_per_s"), ours, theirs)
    assert (found["ratio"], found["low"], found["high"]) == (2.4, 2.0, 3.0)
    same = peers["summary"].advantage(metric(peers, "decode_tokens_per_s"), ours, ours)
    assert (same["ratio"], same["low"], same["high"]) == (1.0, 1.0, 1.0)


def test_only_weights_of_one_width_are_compared(peers: dict[str, ModuleType]) -> None:
    subjects = peers["subjects"].subjects_of(
        ["default", "small:quantization=int8"], ["llama.cpp:bf16", "llama.cpp:q8_0"]
    )
    values = {each.name: {"decode_tokens_per_s": {"0": 2.0}} for each in subjects}
    pairs = [(each["vmserve"], each["peer"]) for each in peers["summary"].compare(values, subjects)]
    assert pairs == [
        ("vmserve default", "llama.cpp bf16"),
        ("vmserve small", "llama.cpp q8_0"),
    ]


def test_files_are_compared_with_themselves_on_the_same_instructions(
    peers: dict[str, ModuleType],
) -> None:
    subjects = peers["subjects"].subjects_of(
        ["a:weights=q4_1", "b:weights=q4_k_m", "c:weights=q4_1,isa=avx2"],
        ["llama.cpp:q4_1", "llama.cpp:q4_k_m", "llama.cpp:q4_1:isa=avx2", "openvino:int4"],
    )
    values = {each.name: {"decode_tokens_per_s": {"0": 2.0}} for each in subjects}
    pairs = [(each["vmserve"], each["peer"]) for each in peers["summary"].compare(values, subjects)]
    assert pairs == [
        ("vmserve a", "llama.cpp q4_1"),
        ("vmserve a", "openvino int4"),
        ("vmserve b", "llama.cpp q4_k_m"),
        ("vmserve b", "openvino int4"),
        ("vmserve c", "llama.cpp q4_1 (isa=avx2)"),
    ]


def test_report_names_who_is_missing_and_why(peers: dict[str, ModuleType]) -> None:
    results = {
        "date": "2026-01-02",
        "machine": {"cpu": "Some CPU", "cpu_extensions": ["avx2"], "git_revision": None},
        "num_threads": 2,
        "num_repeats": 3,
        "smoke": False,
        "values": {"8m": {"vmserve default": {"decode_tokens_per_s": {"0": 1234.5}}}},
        "workloads": {"8m": {}},
        "comparisons": {
            "8m": [
                {
                    "vmserve": "vmserve default",
                    "peer": "vllm bf16",
                    "metrics": {
                        "decode_tokens_per_s": {
                            "ratio": 1.5,
                            "low": 1.25,
                            "high": 2.0,
                            "num_repeats": 3,
                        }
                    },
                }
            ]
        },
        "checks": {},
        "absent": [{"name": "openvino", "reason": "pip ended with 1"}],
        "runs": [
            {
                "subject": "vllm bf16",
                "model": "8m",
                "repeat": 0,
                "error": "Traceback\n  ValueError: no kernel in /some/where/x.py\n",
            }
        ],
    }
    text = peers["report"].markdown(results)
    assert "| vmserve default | 1,234 |" in text
    assert "| vllm bf16 | 1.50 [1.25, 2.00] |" in text
    assert "- openvino: pip ended with 1" in text
    assert "Computes in" not in text
    assert "- vllm bf16, 8m, repeat 1: ValueError: no kernel in x.py" in text


def test_overview_has_a_row_for_every_comparison(peers: dict[str, ModuleType]) -> None:
    found = {"ratio": 1.5, "low": 1.25, "high": 2.0, "num_repeats": 3}
    row = {"vmserve": "vmserve a", "peer": "vllm bf16", "metrics": {"decode_tokens_per_s": found}}
    lines = peers["report"].overview({"comparisons": {"8m": [row], "1b": [{**row, "metrics": {}}]}})
    assert lines[0].startswith("Above 1: vmserve is ahead; [95 % interval: bootstrap over 3")
    assert lines[2:] == [
        "| model | variant | than | decode, one stream |",
        "|---|---|---|---:|",
        "| 8m | a | vllm bf16 | 1.50 [1.25, 2.00] |",
        "| 1b | a | vllm bf16 | - |",
    ]


def test_environment_is_made_anew_when_what_it_is_from_changes(
    peers: dict[str, ModuleType], tmp_path: Path
) -> None:
    environments = peers["environments"]
    environments.put_stamp(tmp_path, environments.stamp("a==1", "native"))
    assert environments.is_stamped(tmp_path, environments.stamp("a==1", "native"))
    assert not environments.is_stamped(tmp_path, environments.stamp("a==1", "native"), "server")
    assert not environments.is_stamped(tmp_path, environments.stamp("a==2", "native"))
    assert not environments.is_stamped(tmp_path / "none", environments.stamp("a==1"))


def test_failed_installation_says_what_failed(peers: dict[str, ModuleType], tmp_path: Path) -> None:
    environments = peers["environments"]
    command = [sys.executable, "-c", "print('why it failed'); raise SystemExit(3)"]
    with pytest.raises(environments.NotInstalledError, match=r"ended with 3: why it failed"):
        environments.run(command, tmp_path / "logs" / "x.log")


def test_check_counts_what_is_identical(peers: dict[str, ModuleType]) -> None:
    same = {"num_tokens": 5, "position": None, "margin": None}
    found = peers["run"].summarize_check(
        [same, {"num_tokens": 5, "position": 2, "margin": 0.25}, same]
    )
    assert (found["num_requests"], found["num_identical"], found["max_margin"]) == (3, 2, 0.25)
    assert peers["run"].summarize_check([same])["max_margin"] is None


def test_only_answers_that_all_gave_in_full_are_checked(peers: dict[str, ModuleType]) -> None:
    requests = [request_of(2), request_of(1), request_of(2), request_of(1)]
    served = [[4, 5], [], [6, 7]]  # of the second, only a token without text came
    candidates = {"a": [[4, 5], [2], [6, 8], [9]], "b": served}
    kept, answers = peers["run"].comparable(requests, candidates)
    assert kept == [requests[0], requests[2]]
    assert answers == {"a": [[4, 5], [6, 8]], "b": [[4, 5], [6, 7]]}
    assert peers["run"].comparable(requests, {}) == ([], {})


def test_words_of_an_answer_are_its_ids(peers: dict[str, ModuleType]) -> None:
    assert peers["serving"].token_ids_of(" w12 w7") == [12, 7]
    assert peers["serving"].token_ids_of("w12w7") == [12, 7]


def test_what_is_stored_has_no_tokens(peers: dict[str, ModuleType]) -> None:
    run = {
        "error": "first\nRuntimeError: /a/b.py broke",
        "workloads": {"offline": {"elapsed_s": 1.0, "token_ids": [[1]], "times_s": [[1.0]]}},
    }
    assert peers["run"].stored(run) == {
        "error": "RuntimeError: b.py broke",
        "workloads": {"offline": {"elapsed_s": 1.0}},
    }


def test_offline_rows(peers: dict[str, ModuleType]) -> None:
    def run(elapsed: float, loaded: int | None, peak: int) -> dict[str, Any]:
        offline = {"elapsed_s": elapsed, "cpu_s": 1.5 * elapsed, "loaded_pss_bytes": loaded}
        each = {"model": "8m", "subject": "a", "load_s": 2.0, "peak_rss_bytes": 2 * peak}
        return {**each, "workloads": {"offline": {**offline, "peak_pss_bytes": peak}}}

    summary = peers["summary"]
    requests = [request_of(30), request_of(10)]
    failed = {"model": "8m", "subject": "a", "error": "boom", "workloads": {}}
    [row] = summary.offline_rows([run(4.0, None, 5), failed, run(1.0, 3, 9)], requests, "8m")
    assert row == {
        "subject": "a",
        "tokens_per_s": [10.0, 40.0],
        "median_busy_cores": 1.5,
        "median_load_s": 2.0,
        "loaded_pss_bytes": 3,
        "peak_pss_bytes": 9,
        "peak_rss_bytes": 18,
    }
    lines = peers["report"].offline_table({"rows": [row], "static_batch_use": {"16": 0.39}})
    assert lines[3] == "| a | 25.0 | 10.0 to 40.0 | 1.50 | 2.0 | 0 | 0 | 0 |"
    assert "39% in one of 16" in lines[-1]
    assert peers["report"].offline_table({}) == []


def test_static_batch_use(peers: dict[str, ModuleType]) -> None:
    use = peers["summary"].static_batch_use
    assert use([4, 2, 6, 6, 5], [2]) == {"2": 23 / (4 * 2 + 6 * 2 + 5)}
    assert use([3, 3, 3], [2]) == {"2": 1.0}


def test_divergence_has_its_position_and_margin(peers: dict[str, ModuleType]) -> None:
    first_divergence = peers["reference"].first_divergence
    logits = [[[0.0, 1.0, 0.75]], [[2.0, 0.0, 0.5]], [[9.0, 0.0, 0.0]]]
    assert first_divergence([1, 0, 0], [1, 2, 1], logits) == {
        "num_tokens": 3,
        "position": 1,
        "margin": 1.5,
    }
    same = first_divergence([1, 0, 0], [1, 0, 0], logits)
    assert same == {"num_tokens": 3, "position": None, "margin": None}


def test_checkpoint_has_125m_parameters_and_is_reused(
    peers: dict[str, ModuleType], tmp_path: Path
) -> None:
    checkpoint = peers["checkpoint"]
    shape = peers["model_shape"].LLAMA_125M
    weights_125m = checkpoint.random_weights(shape, seed=0)
    assert sum(weight.numel() for weight in weights_125m.values()) == 124_668_672
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (12, 4, 64)
    smoke = peers["model_shape"].SMOKE
    directory = checkpoint.ensure_checkpoint(tmp_path, smoke, seed=1)
    weights = (directory / "model.safetensors").read_bytes()
    stamp = (directory / "model.safetensors").stat().st_mtime_ns
    assert checkpoint.ensure_checkpoint(tmp_path, smoke, seed=1) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == stamp
    again = checkpoint.ensure_checkpoint(tmp_path / "again", smoke, seed=1)
    assert (again / "model.safetensors").read_bytes() == weights
    other = checkpoint.ensure_checkpoint(tmp_path, smoke, seed=2)
    assert (other / "model.safetensors").read_bytes() != weights
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["again", directory.name, other.name]


@pytest.mark.parametrize(("limit_s", "error"), [(60, "exit code 1: "), (0, "stopped after 0 s")])
def test_a_worker_that_fails_or_takes_too_long_is_reported(
    peers: dict[str, ModuleType], limit_s: float, error: str
) -> None:
    launch, samples = peers["launch"], MemorySamples()
    python = Path(sys.executable)
    result = launch.run_script("worker.py", python, {}, launch.inherited(), limit_s, samples)
    assert result["error"].startswith(error)


def test_memory_of_a_running_process() -> None:
    samples = MemorySamples(instants=[1.0, 2.0, 3.0, 4.0], pss_bytes=[10, 40, 30, 90])
    assert samples.peak(2.0, 3.5) == 40
    assert samples.peak(2.1, 2.9) == 0
    assert samples.last_before(3.9) == 30
    assert samples.last_before(0.5) is None
    samples.take(os.getpid())
    assert samples.pss_bytes[-1] > 2**20
    assert pss_bytes(2**22 + 1) == 0  # above any process id


def test_a_peer_whose_pins_are_here_needs_no_environment(
    peers: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments = peers["environments"]
    monkeypatch.setattr(environments, "REQUIREMENTS", tmp_path)
    (tmp_path / "a.txt").write_text(f"numpy=={np.__version__}\n")
    assert environments.is_installed_here("a")
    (tmp_path / "a.txt").write_text(f"numpy=={np.__version__}0\n")
    assert not environments.is_installed_here("a")
    (tmp_path / "a.txt").write_text("no-such-package==1\n")
    assert not environments.is_installed_here("a")


@pytest.mark.timeout(600)  # processes that import torch
@pytest.mark.skipif(
    not importlib.util.find_spec("transformers"), reason="transformers is not installed"
)
def test_offline_beside_transformers_has_its_tokens(
    peers: dict[str, ModuleType], tmp_path: Path
) -> None:
    """Neither padding nor batching may change what a request generates, near-ties aside."""
    if not peers["environments"].is_installed_here("transformers"):
        pytest.skip("transformers is here in another version than the benchmark pins")
    command = [*RUN, "--workloads", "offline"]
    command += ["--requests", "5", "--peers", "transformers:bf16:dtype=float32,batch_size=4"]
    command += ["--variant", "f32:dtype=float32"]
    command += ["--cache-dir", str(tmp_path / "cache"), "--output-dir", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [path] = (tmp_path / "out").glob("*.json")
    results = json.loads(path.read_text())
    names = ["vmserve f32", "transformers bf16 (dtype=float32,batch_size=4)"]
    assert sorted(results["checks"]["8m"]) == sorted(names)
    for check in results["checks"]["8m"].values():
        assert check["num_requests"] == 5
        assert (check["max_margin"] or 0.0) < 1e-3
    rows = {row["subject"]: row for row in results["offline"]["8m"]["rows"]}
    assert sorted(rows) == sorted(names)
    for row in rows.values():
        assert row["tokens_per_s"][0] > 0
        assert min(row["peak_rss_bytes"], row["peak_pss_bytes"]) > 2**20
    assert str(tmp_path) not in path.read_text()
    assert "| vmserve f32 |" in path.with_suffix(".md").read_text()


@pytest.mark.timeout(600)  # four processes that import torch: long where cores are shared
def test_vmserve_alone_end_to_end(tmp_path: Path) -> None:
    """One engine and its server: results, table and picture are there and hold numbers."""
    command = [*RUN, "--peers", "--workloads", "decode", "served", "--served-requests", "2"]
    command += ["--variant", "paged:kv_regime=paged", "--check-requests", "0"]
    command += ["--cache-dir", str(tmp_path / "cache"), "--output-dir", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [path] = (tmp_path / "out").glob("*.json")
    results = json.loads(path.read_text())
    assert (results["schema"], results["schema_version"]) == ("vmserve-bench-peers", 1)
    assert [each["name"] for each in results["subjects"]] == ["vmserve paged"]
    values = results["medians"]["8m"]["vmserve paged"]
    memory = {"peak_pss_bytes", "decode_peak_pss_bytes", "served_peak_pss_bytes"}
    memory |= {"file_bytes", "loaded_pss_bytes", "pss_per_file_and_kv"}
    served = {f"served_{each}_s" for each in ("ttft_p50", "ttft_p99", "tpot_p50", "itl_p50")}
    served |= {"served_itl_p99_s", "served_unfinished", "server_first_token_s"}
    assert set(values) == {"decode_tokens_per_s", "first_token_s"} | memory | served
    # Tokens that are read together, where cores are shared, have no time between them.
    gaps = {name: value for name, value in values.items() if "_itl_" in name or "_tpot_" in name}
    assert all(math.isfinite(value) and value >= 0 for value in gaps.values())
    others = [value for name, value in values.items() if name not in gaps]
    assert all(math.isfinite(value) and value > 0 for value in others)
    assert "| vmserve paged |" in path.with_suffix(".md").read_text()
    assert path.with_suffix(".svg").read_text().startswith("<?xml")
    assert str(tmp_path) not in path.read_text()


def test_model_of_a_file_has_the_tokens_of_its_dequantized_weights(tmp_path: Path) -> None:
    """The file is read by vmserve, and turned into a checkpoint for the reference."""

    def add(writer: gguf.GGUFWriter) -> None:
        add_embedded_tokenizer(writer)
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)

    convert(resolve_model(None), tmp_path / "model.gguf", add)
    command = [*RUN, "--peers"]
    command += ["--model-file", str(tmp_path / "model.gguf"), "--workloads", "streams"]
    command += ["--variant", "f16:weights=f16,dtype=float32"]
    command += ["--cache-dir", str(tmp_path / "cache"), "--output-dir", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [path] = (tmp_path / "out").glob("*.json")
    results = json.loads(path.read_text())
    assert results["checks"]["model"]["vmserve f16, streams"]["num_requests"] == 4
    assert results["checks"]["model"]["vmserve f16, streams"]["max_margin"] in (
        None,
        pytest.approx(0.0, abs=1e-3),
    )
    assert results["medians"]["model"]["vmserve f16"]["streams_tokens_per_s"] > 0


# -- conversion -------------------------------------------------------------------------


def turned(vector: Any, position: int, *, pairs: bool) -> Any:
    """Rotary embedding of one head by its definition: pairs of neighbours, or of halves."""
    size = len(vector) // 2
    angles = position * 10000.0 ** (-np.arange(size) / size)
    first, second = (vector[0::2], vector[1::2]) if pairs else (vector[:size], vector[size:])
    real = first * np.cos(angles) - second * np.sin(angles)
    imaginary = first * np.sin(angles) + second * np.cos(angles)
    return np.stack([real, imaginary], axis=1).ravel() if pairs else np.r_[real, imaginary]


def test_rows_in_the_order_of_neighbours_give_the_same_scores(
    peers: dict[str, ModuleType],
) -> None:
    rng = np.random.default_rng(0)
    num_heads, head_dim, hidden = 3, 8, 5
    query, key = rng.normal(size=(2, num_heads * head_dim, hidden))
    tokens = rng.normal(size=(2, hidden))
    neighbours = peers["gguf_layout"].neighbours

    def scores(query: Any, key: Any, *, pairs: bool) -> list[float]:
        rows = [
            (query @ tokens[0]).reshape(num_heads, -1),
            (key @ tokens[1]).reshape(num_heads, -1),
        ]
        return [
            float(turned(q, 7, pairs=pairs) @ turned(k, 3, pairs=pairs))
            for q, k in zip(*rows, strict=True)
        ]

    wanted = scores(query, key, pairs=False)
    moved = scores(neighbours(query, num_heads), neighbours(key, num_heads), pairs=True)
    assert moved == pytest.approx(wanted)
    assert scores(query, key, pairs=True) != pytest.approx(wanted)
    assert np.array_equal(peers["gguf_layout"].halves(neighbours(query, num_heads), 3), query)


def test_tensors_are_read_bit_by_bit(peers: dict[str, ModuleType], tmp_path: Path) -> None:
    values = np.array([[1.5, -2.0, 2.0**-100], [3.0, 0.0, 65536.0]], dtype=np.float32)
    bits = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    told = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, len(bits)]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "model.norm.weight": told}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bits)
    layout = peers["gguf_layout"]
    [(name, found)] = layout.read_tensors(path).items()
    assert layout.gguf_name(name) == "output_norm.weight"
    assert np.array_equal(layout.as_float32(found), values)
    save_file({"a": values}, tmp_path / "y.safetensors")
    with pytest.raises(ValueError, match="a is F32, not BF16"):
        layout.read_tensors(tmp_path / "y.safetensors")


def test_gguf_names_of_a_layer(peers: dict[str, ModuleType]) -> None:
    layout = peers["gguf_layout"]
    for name, theirs in (
        ("model.layers.11.self_attn.o_proj.weight", "blk.11.attn_output.weight"),
        ("model.layers.0.post_attention_layernorm.weight", "blk.0.ffn_norm.weight"),
        ("lm_head.weight", "output.weight"),
    ):
        assert layout.gguf_name(name) == theirs
        assert layout.checkpoint_name(theirs) == name
