"""The pure parts of the comparison with peers, and runs of what is here, end to end."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch

from tests.models.gguf_checkpoints import add_embedded_tokenizer, convert
from vmserve.models.hub import resolve_model
from vmserve_bench.lab.measure import pss_bytes

PEERS = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
NAMES = ("checkpoint", "environments", "launch", "memory", "models", "reference", "report", "run",
         "serving", "subjects", "summary", "to_gguf", "traffic", "engines.stepped")  # fmt: skip


@pytest.fixture(scope="module")
def peers() -> SimpleNamespace:
    """The benchmark's modules, imported as its script sees them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(PEERS), *sys.path])
        before = set(sys.modules)
        found = {name.split(".")[-1]: importlib.import_module(name) for name in NAMES}
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(PEERS)):
                del sys.modules[name]  # a later test may mean another module of that name
    return SimpleNamespace(**found)


def test_a_variant_has_a_name_and_engine_options(peers: SimpleNamespace) -> None:
    def told(text: str) -> tuple[Any, ...]:
        found = peers.subjects.variant_of(text)
        return found.name, found.weights, found.width, found.isa, found.options

    assert told("default") == ("vmserve default", "checkpoint", "16 bit", "", {})
    assert told("q:dtype=float16")[1:4] == ("float16", "16 bit", "")
    assert told("q:quantization=int8")[1:4] == ("int8", "8 bit", "")
    quantized = {"quantization": "int8-dynamic"}
    text = "f:weights=q4_k_m,quantization=int8-dynamic,isa=avx2"
    assert told(text) == ("vmserve f", "q4_k_m", "4 bit", "avx2", quantized)
    options = {"linear_backend": "native", "max_num_seqs": 8, "eager": True, "a": None, "x": "4GiB"}
    assert told("n:linear-backend=native,max_num_seqs=8,eager=true,a=none,x=4GiB")[4] == options


def test_a_peer_without_weights_means_those_of_8_and_16_bit(peers: SimpleNamespace) -> None:
    peers_of = peers.subjects.peers_of
    widths = {"llama.cpp bf16": "16 bit", "llama.cpp f16": "16 bit", "llama.cpp q8_0": "8 bit"}
    assert {each.name: each.width for each in peers_of("llama.cpp")} == widths
    [old] = peers_of("llama.cpp:q4_1:slots=4,isa=avx2")
    assert (old.name, old.isa) == ("llama.cpp q4_1 (slots=4,isa=avx2)", "avx2")
    assert old.options == {"slots": 4}
    [batch] = peers_of("transformers:batch_size=32")
    assert (batch.weights, batch.is_played, batch.options) == ("bf16", False, {"batch_size": 32})
    [paged] = peers_of("transformers:bf16:batching=continuous")
    assert paged.is_played


@pytest.mark.parametrize(
    ("variants", "named", "told"),
    [
        ([""], [], "no name"),
        ([":a=1"], [], "no name"),
        (["name:=1"], [], "no OPTION=VALUE"),
        (["name:a="], [], "no OPTION=VALUE"),
        (["a:weights=q3_k"], [], r"weights=q3_k: GGUF files here are bf16, .*, q4_k_m"),
        (["a:isa=sse2"], [], r"vmserve with isa=sse2: .* are avx2"),
        (["a", "a:max_num_seqs=2"], [], "'vmserve a' is there twice"),
        ([], ["openvino:int4:isa=avx2"], r"openvino with isa=avx2: .* of vmserve and llama.cpp"),
        ([], ["sglang"], "choose from transformers, llama.cpp"),
        ([], ["vllm:q8_0"], "the weights of vllm are bf16"),
        ([], ["vllm:bf16:eager"], "the weights of vllm are bf16"),
    ],
)
def test_subjects_that_there_are_not(
    peers: SimpleNamespace, variants: list[str], named: list[str], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        peers.subjects.subjects_of(variants, named)


def test_vllm_is_set_up_as_its_guide_says(
    peers: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    is_zen = peers.environments.is_zen
    assert is_zen("vendor_id : AuthenticAMD\nflags : avx2 avx512f")
    assert not is_zen("vendor_id : AuthenticAMD\nflags : avx2")
    assert not is_zen("vendor_id : GenuineIntel\nflags : avx512f")
    monkeypatch.setattr(peers.launch, "find_library", lambda name: f"lib{name}.so.4")
    assert peers.launch.preloaded(tmp_path) == "libtcmalloc_minimal.so.4"
    openmp = tmp_path / "libiomp5.so"
    openmp.touch()
    assert peers.launch.preloaded(tmp_path) == f"libtcmalloc_minimal.so.4:{openmp}"


def test_servers_are_started_with_the_same_limits(peers: SimpleNamespace) -> None:
    environment = peers.environments.Environment(
        Path("python"), {}, {"llama-server": Path("llama-server")}
    )
    job = {"model": "M", "files": {"gguf": "M.gguf"}, "num_threads": 2, "max_num_seqs": 64,
           "max_model_len": 512, "has_bf16": False}  # fmt: skip

    def command(subject: Any) -> str:
        return " ".join(peers.serving.command(subject, environment, job, 80))

    limits = "--max-num-seqs 64 --max-model-len 512 --no-enable-prefix-caching"
    ours = command(peers.subjects.variant_of("x:linear_backend=native,kv_swap=none"))
    assert ours == (
        "python -m vmserve serve --model M --served-model-name peers --host 127.0.0.1 --port 80 "
        f"{limits} --linear-backend native"
    )
    [llama] = peers.subjects.peers_of("llama.cpp:q8_0:slots=4,ubatch=64,kv_unified=false")
    assert command(llama) == (
        "llama-server --host 127.0.0.1 --port 80 --model M.gguf --alias peers --threads 2 "
        "--threads-batch 2 --parallel 4 --ctx-size 2048 --no-cache-prompt --cache-ram 0 "
        "--no-webui --log-disable --ubatch-size 64 --no-kv-unified"
    )
    [vllm] = peers.subjects.peers_of("vllm:bf16:enforce_eager=true")
    assert command(vllm).endswith(f"{limits} --dtype float32 --enforce-eager")
    [llama] = peers.subjects.peers_of("llama.cpp:q8_0:polling=1")
    failed = peers.serving.run_server(llama, environment, job, {}, [], 1.0)
    assert failed == {"error": "llama-server has no option polling here", "workloads": {}}


def test_environments_are_what_is_pinned(
    peers: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments, stamped = peers.environments, tmp_path / "stamp.json"
    assert not environments.is_stamped(stamped, environments.stamp("a==1"))
    stamped.write_text(json.dumps(environments.stamp("a==1", "native")))
    assert environments.is_stamped(stamped, environments.stamp("a==1", "native"))
    assert not environments.is_stamped(stamped, environments.stamp("a==2", "native"))
    command = [sys.executable, "-c", "print('why it failed'); raise SystemExit(3)"]
    with pytest.raises(environments.NotInstalledError, match=r"ended with 3: why it failed"):
        environments.run(command, tmp_path / "logs" / "x.log")
    monkeypatch.setattr(environments, "REQUIREMENTS", tmp_path)
    here = f"numpy=={np.__version__}"
    for lines, is_here in ((here, True), (f"{here}0", False), (f"{here}\nno-such==1", False)):
        (tmp_path / "a.txt").write_text(lines)
        assert environments.is_installed_here("a") == is_here


def test_workloads_are_what_they_always_were(peers: SimpleNamespace) -> None:
    traffic = peers.traffic
    found = traffic.make_workloads(traffic.WORKLOADS, traffic.MIDDLE, 4096, 0, 2.0)
    told = {name: traffic.describe(each) for name, each in found.items()}
    names = ("num_requests", "num_input_tokens", "num_output_tokens", "longest_tokens")
    assert [told["offline"][name] for name in names[:3]] == [64, 9_634, 8_218]
    assert told["offline"]["static_batch_use"] == pytest.approx({"16": 0.39, "32": 0.3}, abs=0.005)
    assert [told["decode"][name] for name in names] == [2, 1024, 258, 641]
    assert told["prefill"]["longest_tokens"] == 2049
    prompts = [tuple(each["prompt_token_ids"]) for some in found.values() for each in some]
    assert len(set(prompts)) == len(prompts)
    assert min(map(min, prompts)) >= 3  # no special id
    equal = traffic.replace(traffic.MIDDLE, mean_in=320.0, sigma=0.0)
    requests = traffic.make_workloads(["offline"], equal, 4096, 0, 1.0)["offline"]
    assert {len(each["prompt_token_ids"]) for each in requests} == {320}
    # Repeats differ in the arrivals of served requests alone.
    other = traffic.make_workloads(traffic.WORKLOADS, traffic.MIDDLE, 4096, 0, 2.0, repeat=1)
    arrivals, others = ([each.pop("arrival_s") for each in w["served"]] for w in (found, other))
    assert found == other
    assert arrivals == sorted(arrivals) != others
    assert arrivals[-1] == others[-1] == len(arrivals) / 2.0


def test_a_cache_of_a_fixed_size_holds_the_largest_workload(peers: SimpleNamespace) -> None:
    config = peers.models.config_of("8m")  # 2 x 6 x 6 x 48 x 4 = 13,824 bytes a token
    for num_tokens, gib in ((77_672, 1), (77_673, 2)):
        asked = [{"prompt_token_ids": [5] * num_tokens, "num_output_tokens": 0}]
        assert peers.traffic.kv_gib({"decode": asked, "offline": asked}, config) == gib


def request_of(num_output_tokens: int, arrival_s: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"num_output_tokens": num_output_tokens, "arrival_s": arrival_s, **more}


def test_requests_run_when_they_are_due(peers: SimpleNamespace) -> None:
    class Fake(peers.stepped.Stepped):  # type: ignore[misc, name-defined]
        """A token per step for all that it was given."""

        def __init__(self) -> None:
            self.left: dict[int, int] = {}
            self.added: list[int] = []
            self.widths: list[int] = []

        def add(self, number: int, request: dict[str, Any]) -> None:
            self.left[number] = request["num_output_tokens"]
            self.added.append(number)

        def step(self) -> list[tuple[int, list[int]]]:
            self.widths.append(len(self.left))
            found = [(number, [7]) for number in self.left]
            self.left = {number: left - 1 for number, left in self.left.items() if left > 1}
            return found

    engine = Fake()
    together = engine.run([request_of(3), request_of(1)])
    assert [each["token_ids"] for each in together] == [[7, 7, 7], [7]]
    assert [len(each["times_s"]) for each in together] == [3, 1]
    first, second = engine.run([request_of(2, is_sequential=True)] * 2)
    assert second["due_s"] >= first["times_s"][-1]
    late, early = engine.run([request_of(1, 0.02), request_of(1)])
    assert early["times_s"][0] < 0.02 == late["due_s"] <= late["times_s"][0]
    assert engine.widths == [2, 1, 1, *[1, 1, 1, 1], 1, 1]
    assert engine.added == [0, 1, 2, 3, 5, 4]


def test_metrics_of_a_run(peers: SimpleNamespace) -> None:
    workloads = {
        "offline": [request_of(30), request_of(10)],
        "prefill": [{**request_of(1), "prompt_token_ids": [5] * 100}],
    }
    streams = [[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]]  # both decode from 2 to 4
    served = {"due_s": [0.0, 1.0], "times_s": [[0.5, 0.6], [3.5, 3.8]], "peak_pss_bytes": 11}
    run = {
        "first_token_s": 1.5, "load_s": 1.25, "loaded_pss_bytes": 4, "peak_rss_bytes": 12,
        "file_bytes": 2, "kv_bytes": {"decode": 1, "prefill": 2, "streams": 4},
        "workloads": {
            "offline": {"elapsed_s": 2.0, "cpu_s": 3.0, "peak_pss_bytes": 5},
            "decode": {"times_s": [[1.0, 1.25, 1.5]], "peak_pss_bytes": 9},
            "prefill": {"times_s": [[3.0]], "due_s": [1.0], "peak_pss_bytes": 7},
            "streams": {"times_s": streams, "peak_pss_bytes": 8},
            "served": served
        },
    }  # fmt: skip
    expected = {
        "offline_tokens_per_s": 20.0, "offline_busy_cores": 1.5, "decode_tokens_per_s": 4.0,
        "prefill_tokens_per_s": 50.0, "streams_tokens_per_s": 2.0,
        "served_ttft_p50_s": 1.5, "served_ttft_p99_s": 2.48, "served_tpot_p50_s": 0.2,
        "served_itl_p50_s": 0.2, "served_itl_p99_s": 0.298, "served_unfinished": 1.0,
        "offline_peak_pss_bytes": 5, "decode_peak_pss_bytes": 9, "prefill_peak_pss_bytes": 7,
        "streams_peak_pss_bytes": 8, "served_peak_pss_bytes": 11, "peak_pss_bytes": 9,
        "loaded_pss_bytes": 4, "peak_rss_bytes": 12, "file_bytes": 2, "pss_per_file_and_kv": 3.0,
        "load_s": 1.25, "first_token_s": 1.5,
    }  # fmt: skip
    assert peers.summary.metrics_of(run, workloads) == pytest.approx(expected)
    assert set(expected) | {"server_first_token_s"} == {m.name for m in peers.summary.METRICS}
    server = {"is_server": True, "first_token_s": 9.0, "workloads": {"served": served}}
    names = {"server_first_token_s", *(name for name in expected if name.startswith("served"))}
    assert set(peers.summary.metrics_of(server, {})) == names


def test_an_advantage_is_above_one_where_vmserve_is_better(peers: SimpleNamespace) -> None:
    more, less = (each for each in peers.summary.METRICS if each.name in (
        "offline_tokens_per_s", "peak_pss_bytes"))  # fmt: skip
    advantage = peers.summary.advantage
    ours, theirs = {"0": 30.0, "1": 10.0}, {"0": 10.0, "1": 10.0, "2": 99.0}
    assert list(advantage(more, ours, theirs).values()) == [2.0, None, None, 2]
    assert advantage(less, ours, theirs)["ratio"] == 0.5
    ours, theirs = {"0": 20.0, "1": 24.0, "2": 30.0}, {"0": 10.0, "1": 10.0, "2": 10.0}
    # The interval holds the ratio, and nothing beyond the repeats.
    assert list(advantage(more, ours, theirs).values()) == [2.4, 2.0, 3.0, 3]
    assert list(advantage(more, ours, ours).values()) == [1.0, 1.0, 1.0, 3]


def test_weights_of_one_width_are_compared_on_the_same_instructions(peers: SimpleNamespace) -> None:
    subjects = peers.subjects.subjects_of(
        ["d", "small:quantization=int8", "a:weights=q4_1", "b:weights=q4_k_m",
         "c:weights=q4_1,isa=avx2"],
        ["llama.cpp:bf16", "llama.cpp:q8_0", "llama.cpp:q4_1", "llama.cpp:q4_k_m",
         "llama.cpp:q4_1:isa=avx2", "openvino:int4", "vllm"],
    )  # fmt: skip
    metrics = {"decode_tokens_per_s": {"0": 2.0}}
    values = {each.name: metrics for each in subjects if each.engine != "vllm"}
    found = peers.summary.compare(values, subjects)
    assert [(each["vmserve"].removeprefix("vmserve "), each["peer"]) for each in found] == [
        ("d", "llama.cpp bf16"), ("small", "llama.cpp q8_0"),
        ("a", "llama.cpp q4_1"), ("a", "openvino int4"),
        ("b", "llama.cpp q4_k_m"), ("b", "openvino int4"), ("c", "llama.cpp q4_1 (isa=avx2)"),
    ]  # fmt: skip
    assert {*found[0]["metrics"]} == {"decode_tokens_per_s"}


def test_the_report_says_what_its_intervals_are(peers: SimpleNamespace) -> None:
    one, two, three, six = (
        str(peers.report.interval([{"metrics": {"decode_tokens_per_s": {"num_repeats": num}}}]))
        for num in (1, 2, 3, 6)
    )
    assert (one, two) == ("one repeat: no interval", "2 repeats: no interval")
    assert three.endswith("over 3 repeats, so few that it is about their range]")
    assert six == "[95 % interval: bootstrap over 6 repeats]"


def test_the_report_has_every_metric_and_names_who_is_missing(peers: SimpleNamespace) -> None:
    found = {"ratio": 1.5, "low": 1.25, "high": 2.0, "num_repeats": 3}
    results = {
        "date": "2026-01-02",
        "machine": {"cpu": "Some CPU", "cpu_extensions": ["avx2"], "git_revision": None},
        "num_threads": 2, "num_repeats": 3, "smoke": False,
        "values": {"8m": {
            "vmserve a": {"decode_tokens_per_s": {"0": 1234.5, "1": 1235.5, "2": 1300.0},
                          "offline_peak_pss_bytes": {"0": 3 * 2**20, "1": 5 * 2**20}},
            "vllm bf16": {"served_unfinished": {"0": 30.0}}
        }},
        "workloads": {"8m": {}},
        "comparisons": {"8m": [{"vmserve": "vmserve a", "peer": "vllm bf16",
                                "metrics": {"decode_tokens_per_s": found}}]},
        "checks": {"8m": {"a": {"num_identical": 2, "num_requests": 3, "max_margin": 0.25}}},
        "absent": [{"name": "openvino", "reason": "pip ended with 1"}],
        "runs": [{"subject": "vllm bf16", "model": "8m", "repeat": 0,
                  "error": "Traceback\n  ValueError: no kernel in /some/where/x.py\n"}],
    }  # fmt: skip
    text = peers.report.markdown(results)
    for line in (
        "|  | vmserve a | vllm bf16 |",
        "| decode, one stream, tokens/s | 1,236 (1,234 to 1,300) | - |",
        "| unfinished when the last one arrived, requests | - | 30 |",
        "| offline, peak PSS, MiB | 4 (3 to 5) | - |",
        "| 8m | a | vllm bf16 | 1.50 [1.25, 2.00] |",
        "- a: 2 of 3 requests identical; widest margin at a first difference 0.25 logits",
        "- openvino: pip ended with 1",
        "- vllm bf16, 8m, repeat 1: ValueError: no kernel in x.py",
    ):
        assert line in text.splitlines()
    assert "Computes in" not in text


def test_tokens_are_checked_where_an_answer_is_whole(peers: SimpleNamespace) -> None:
    reference, request = peers.reference, request_of(3)
    logits = [[[0.0, 1.0, 0.75]], [[2.0, 0.0, 0.5]], [[9.0, 0.0, 0.0]]]
    told = {"num_tokens": 3, "position": 1, "margin": 1.5}
    assert reference.first_divergence([1, 0, 0], [1, 2, 1], logits) == told
    assert reference.first_divergence([1, 0, 0], [1, 0, 0], logits) is None
    found = reference.summary([None, {**told, "margin": 0.25}, told])
    assert (found["num_requests"], found["num_identical"], found["max_margin"]) == (3, 1, 1.5)
    assert peers.serving.token_ids_of(" w12w7 w3") == [12, 7, 3]
    answers = [[12, 7, 3], [7, 3]]  # of the second, a token had no text
    whole = [reference.is_whole(answers, index, request) for index in range(3)]
    assert whole == [True, False, False]


def test_a_worker_that_fails_or_takes_too_long_is_reported(peers: SimpleNamespace) -> None:
    script = "worker.py", Path(sys.executable), {}, dict(os.environ)
    for limit_s, error in ((60, "exit code 1: "), (0, "stopped after 0 s")):
        found = peers.launch.run_script(*script, limit_s, peers.memory.MemorySamples())
        assert found["error"].startswith(error)


def test_memory_of_a_running_process(peers: SimpleNamespace) -> None:
    samples = peers.memory.MemorySamples(instants=[1.0, 2.0, 3.0, 4.0], pss_bytes=[10, 40, 30, 90])
    assert samples.peak(2.0, 3.5) == 40
    assert samples.peak(2.1, 2.9) == 0
    samples.take(os.getpid())
    assert samples.pss_bytes[-1] > 2**20
    assert pss_bytes(2**22 + 1) == 0  # above any process id


def test_a_checkpoint_is_reused_and_comes_back_from_a_gguf_file(
    peers: SimpleNamespace, tmp_path: Path
) -> None:
    checkpoint = peers.checkpoint
    weights = checkpoint.random_weights(peers.models.config_of("125m"), seed=0)
    assert sum(weight.numel() for weight in weights.values()) == 124_668_672
    directory = checkpoint.ensure_checkpoint(tmp_path, "smoke", seed=1)
    content = (directory / "model.safetensors").read_bytes()
    stamp = (directory / "model.safetensors").stat().st_mtime_ns
    assert checkpoint.ensure_checkpoint(tmp_path, "smoke", seed=1) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == stamp
    again = checkpoint.ensure_checkpoint(tmp_path / "again", "smoke", seed=1)
    assert (again / "model.safetensors").read_bytes() == content
    assert {path.name for path in tmp_path.iterdir()} == {"again", directory.name}
    peers.to_gguf.write(directory, tmp_path / "model.gguf", "bf16")
    tensors = {each.name: each for each in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    rotated = dequantize(tensors["blk.0.attn_q.weight"].data, gguf.GGMLQuantizationType.BF16)
    ours = load_torch(directory / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    # Head 0 has 16 rows: llama.cpp turns the first two together, Hugging Face rows 0 and 8.
    assert np.array_equal(rotated[:2], ours[[0, 8]].float().numpy())
    save_file({"a": np.zeros(2, np.float32)}, directory / "model.safetensors")
    with pytest.raises(ValueError, match="a is F32, not BF16"):
        peers.to_gguf.write(directory, tmp_path / "other.gguf", "bf16")


def run_peers(tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Results of a smoke run, and its table; nothing in them names this machine's directories."""
    command = [sys.executable, str(PEERS / "run.py"), "--smoke", "--threads", "1", *arguments]
    command += ["--cache-dir", str(tmp_path / "cache"), "--output-dir", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [directory] = (tmp_path / "out").iterdir()
    assert (directory / "picture.svg").read_text().startswith("<?xml")
    text = (directory / "results.json").read_text()
    assert str(tmp_path) not in text
    return json.loads(text), (directory / "tables.md").read_text()


@pytest.mark.timeout(600)  # processes that import torch
def test_a_file_s_model_has_the_tokens_of_its_dequantized_weights(
    peers: SimpleNamespace, tmp_path: Path
) -> None:
    """vmserve reads the file; it is turned into a checkpoint for transformers and the reference.

    Neither padding nor batching may change what a request generates, near-ties aside.
    """

    def add(writer: gguf.GGUFWriter) -> None:
        add_embedded_tokenizer(writer)
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)

    embedded = resolve_model(None)
    convert(embedded, tmp_path / "model.gguf", add)
    theirs = "transformers:bf16:dtype=float32,batch_size=4"
    is_here = peers.environments.is_installed_here("transformers")  # in the version that is pinned
    results, table = run_peers(
        tmp_path, "--model-file", str(tmp_path / "model.gguf"), "--workloads", "offline",
        "streams", "--requests", "5", "--variant", "f32:weights=f16,dtype=float32",
        "--peers", *([theirs] if is_here else []),
    )  # fmt: skip
    [made] = (tmp_path / "cache" / "models").glob("*/model.safetensors")
    converted, original = load_file(made), load_torch(embedded / "model.safetensors")
    for name, weight in converted.items():
        assert np.array_equal(weight, original[name].float().numpy()), name
    names = ["vmserve f32", *(["transformers bf16 (dtype=float32,batch_size=4)"] * is_here)]
    checks, values = results["checks"]["model"], results["values"]["model"]
    assert set(checks) == {f"{name}{told}" for name in names for told in ("", ", streams")}
    for name, check in checks.items():
        assert check["num_requests"] == (4 if "streams" in name else 5)
        assert (check["max_margin"] or 0.0) < 1e-3
    assert list(values) == names
    for each in values.values():
        assert each["offline_tokens_per_s"]["0"] > 0
        assert min(each["peak_rss_bytes"]["0"], each["peak_pss_bytes"]["0"]) > 2**20
    assert f"|  | {' | '.join(names)} |" in table


@pytest.mark.timeout(600)
def test_vmserve_and_its_server_alone(tmp_path: Path) -> None:
    results, table = run_peers(
        tmp_path, "--peers", "--workloads", "decode", "served", "--served-requests", "2",
        "--variant", "paged:kv_regime=paged", "--check-requests", "0",
    )  # fmt: skip
    assert (results["schema"], results["schema_version"]) == ("vmserve-bench-peers", 1)
    values = {name: each["0"] for name, each in results["values"]["8m"]["vmserve paged"].items()}
    memory = {f"{name}pss_bytes" for name in ("peak_", "decode_peak_", "served_peak_", "loaded_")}
    memory |= {"peak_rss_bytes", "file_bytes", "pss_per_file_and_kv"}
    served = {f"served_{each}_s" for each in ("ttft_p50", "ttft_p99", "tpot_p50", "itl_p50")}
    served |= {"served_itl_p99_s", "served_unfinished", "server_first_token_s"}
    assert set(values) == {"decode_tokens_per_s", "first_token_s", "load_s"} | memory | served
    for name, value in values.items():
        assert math.isfinite(value), name
        # Tokens that are read together, where cores are shared, have no time between them.
        assert value > 0 or (value == 0 and ("_itl_" in name or "_tpot_" in name)), name
    assert "|  | vmserve paged |" in table
