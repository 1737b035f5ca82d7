"""The command line as a user meets it: real processes, their output and exit status."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from vmserve.cli.main import main
from vmserve.cli.options import ENGINE_OPTIONS
from vmserve.cli.serve import SERVE_OPTIONS

Reference = Callable[[list[int], int], list[int]]
Refused = Callable[..., str]


def run(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from vmserve.cli.main import main; main()", *args],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        text=True,
        timeout=100,
        check=False,
    )


def vmserve(*args: str, **options: Any) -> str:
    """What a command that succeeds prints."""
    done = run(*args, **options)
    assert done.returncode == 0, done.stderr
    out: str = done.stdout
    return out


def test_generate_json_has_the_tokens_of_transformers(
    model_dir: Path, reference: Reference
) -> None:
    prompt = "Once upon a time there was a little girl"
    done = vmserve(
        *("generate", "--prompt", prompt, "--max-tokens", "64", "--temperature", "0"),
        *("--dtype", "float32", "--ignore-eos", "--format", "json"),
    )
    document = json.loads(done)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer(prompt)["input_ids"]
    [output] = document["outputs"]
    assert document["prompt"] == prompt
    assert document["prompt_token_ids"] == ids
    assert output["token_ids"] == reference(ids, 64)
    assert output["text"] == tokenizer.decode(output["token_ids"], skip_special_tokens=True)
    assert output["finish_reason"] == "length"
    assert output["cumulative_logprob"] < 0
    assert document["metrics"]["first_token_time"] is not None


def test_generate_reads_a_file_and_writes_a_line_for_each(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '"Tom had a red ball."\n{"prompt": "One day", "max_tokens": 3}\n\n'
        '{"prompt_token_ids": [5, 6, 7], "n": 2}\n'
    )
    done = vmserve("generate", "--file", str(file), "--format", "jsonl", "--ignore-eos")
    documents = [json.loads(line) for line in done.splitlines()]
    assert [len(d["outputs"]) for d in documents] == [1, 1, 2]
    assert [len(d["outputs"][0]["token_ids"]) for d in documents] == [16, 3, 16]


def test_generate_what_matches_a_schema(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(
        '{"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 2}'
    )
    done = vmserve(
        *("generate", "--prompt", "x", "--structured-json", f"@{file}", "--format", "json"),
        *("--max-tokens", "50"),
    )
    [output] = json.loads(done)["outputs"]
    assert output["finish_reason"] == "stop"
    assert set(json.loads(output["text"])) <= {"a", "b"}


def test_generate_reads_standard_input() -> None:
    done = vmserve("generate", "--max-tokens", "4", "--temperature", "0", input="Once upon")
    assert done.startswith("Once upon")


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command in this process, which it must end with status 2 and one line; returns it."""

    def run(*args: str) -> str:
        monkeypatch.setattr(sys, "argv", ["vmserve", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, ""), err
        [line] = [line for line in err.splitlines() if line.strip()]
        assert "Traceback" not in line
        return line

    return run


@pytest.fixture
def broken(tmp_path: Path, model_dir: Path) -> dict[str, str]:
    """Models that cannot be loaded, and files of prompts that cannot be read."""
    (tmp_path / "empty").mkdir()
    truncated, mute = (shutil.copytree(model_dir, tmp_path / each) for each in ("half", "mute"))
    with (truncated / "model.safetensors").open("r+b") as file:
        file.truncate((truncated / "model.safetensors").stat().st_size // 2)
    (mute / "tokenizer.json").unlink()
    lines = {
        "speed": '{"prompt": "x", "speed": 1}',
        "below": '{"prompt": "x", "max_tokens": -1}',
        "null": '{"prompt": null}',
        "short": '{"prompt": "x", "max_tokens": 3}',
    }
    for name, line in lines.items():
        (tmp_path / f"{name}.jsonl").write_text(f'"fine"\n{line}\n')
    return {path.stem: str(path) for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ("--model /none", ["/none"]),
        ("--model {empty}", ["config.json"]),
        ("--model {half}", ["model.safetensors"]),
        ("--model {mute}", ["tokenizer.json", "--tokenizer"]),
        ("--max-model-len 4", ["maximum context length is 4 tokens"]),
        ("--file {speed}", ["there is no sampling field speed", "speed.jsonl:2: "]),
        ("--file {below}", ["max_tokens must be at least 0", "below.jsonl:2: "]),
        ("--file {null}", ["is a string, not NoneType", "null.jsonl:2: "]),
        ("--file {short} --beam-width 2", ["max_tokens"]),
        ("--kv-cache-memory 64KiB", ["--kv-cache-memory", "64 KiB"]),
        ("--kv-cache-memory many", ["512MiB"]),
        ("--attention-backend flash", ["sdpa"]),
        ("--preemption swap", ["give --swap-space"]),
        ("--beam-width 4 --top-p 0.5", ["not sampled"]),
        ("--beam-width 65", ["--max-num-seqs"]),
        ("--length-penalty 2", ["give --beam-width"]),
        ("--max-model-len 9000", ["8192"]),
        ("--no-such-option", ["--no-such-option", "see vmserve generate --help"]),
    ],
)
def test_what_cannot_be_generated_is_refused_with_the_remedy(
    refused: Refused, broken: dict[str, str], args: str, told: list[str]
) -> None:
    given = args.format_map(broken).split()
    prompt = [] if "--file" in given else ["--prompt", "one two three four five"]
    line = refused("generate", *prompt, *given)
    assert all(words in line for words in told), line


@pytest.mark.parametrize(
    ("args", "told"),
    [
        *(
            ([command, "--no-such-option"], f"see vmserve {command} --help")
            for command in ("serve", "plan", "chat", "top", "bench")
        ),
        (["brew"], "'brew'"),
        (["serve", "--port", "x"], "--port"),
        (["serve", "a", "b"], "(b)"),
    ],
)
def test_wrong_command_lines_are_one_line(refused: Refused, args: list[str], told: str) -> None:
    assert told in refused(*args)


def test_plan_prints_a_table_and_json() -> None:
    done = vmserve("plan", "--model", "llama-3-8b", "--granularity", "64KiB")
    assert "64" in done
    done = vmserve("plan", "--format", "json")
    assert json.loads(done)


def test_a_piped_plan_cuts_no_column_short() -> None:
    done = vmserve("plan", "--kv-cache-memory", "1GiB", "--model", "vmserve-embedded")
    assert "requests" in done
    assert "…" not in done


def test_version_and_help_name_every_command() -> None:
    assert vmserve("--version").strip()
    done = vmserve("--help")
    for command in ("generate", "serve", "chat", "top", "plan", "bench"):
        assert command in done


def test_help_of_serve_spells_every_option_out() -> None:
    """In as few columns as a pipe has."""
    told = vmserve("serve", "--help")
    for option in [*SERVE_OPTIONS, *ENGINE_OPTIONS.values()]:
        for flag in "/".join(option.flags).split("/"):
            assert re.search(rf"(?<![\w-]){flag}(?![\w-])", told), flag


@pytest.mark.parametrize(
    "args", [["--help"], ["plan", "--paper"], ["generate", "-p", "x", "--max-tokens", "2"]]
)
def test_a_full_disk_is_one_line(args: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = run(*args, stdout=full)
    assert (done.returncode, done.stderr) == (1, "vmserve: No space left on device\n")
