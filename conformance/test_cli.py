"""The command line: what is asked for, what is refused, what is recorded, and that no mistake shows a traceback."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from commandline import Command, on
from conftest import ROOT

import runtime
from runtime.checkpoint import Checkpoint
from runtime.cli.ending import end
from runtime.commands.terminal import Interrupts
from runtime.errors import UsageError
from runtime.generate.embedded import NOTE
from runtime.setup.synth import synthesize
from runtime.units import parse_size

CAPITAL = "The capital of France is"

# -- mistakes ------------------------------------------------------------------------------------------------

MISTAKES = {
    "unknown option": ("run --prompt a --nope", 2, "--nope"),
    "unknown command": ("bogus", 2, "bogus"),
    "stray argument": ("run --prompt a b", 2, "unexpected"),
    "option without its value": ("run --prompt", 2, "--prompt"),
    "no prompt": ("run", 2, "one of --prompt, --prompt-file and --prompt-ids"),
    "two prompts": ("run --prompt a --prompt-ids 1", 2, "--prompt and --prompt-ids"),
    "ids missing": ("run --prompt-ids 1,,2", 2, "item 1 is ''"),
    "ids that are words": ("run --prompt-ids 1,two", 2, "item 1 is 'two'"),
    "ids in other digits": ("run --prompt-ids ١,٢", 2, "item 0"),
    "an endless id": ("run --prompt-ids " + "9" * 5000, 2, "item 0"),
    "ids for a message": ("run --chat --prompt-ids 1", 2, "--chat"),
    "prompt file missing": ("run --prompt-file /nowhere/p.txt", 2, "/nowhere/p.txt: No such file"),
    "prompt file a directory": ("run --prompt-file /", 2, "Is a directory"),
    "system without a message": ("run --prompt a --system b", 2, "--system"),
    "effort without a message": ("run --prompt a --reasoning-effort low", 2, "--reasoning-effort"),
    "unknown effort": ("run --chat --prompt a --reasoning-effort medium", 2, "medium"),
    "size in words": ("run --prompt a --memory lots", 2, "--memory 'lots'"),
    "size with a wrong unit": ("run --prompt a --expert-cache 5X", 2, "--expert-cache '5X'"),
    "size of nothing": ("run --prompt a --memory 0", 2, "--memory '0'"),
    "number that is none": ("run --prompt a --max-new many", 2, "--max-new"),
    "unknown backend": ("run --prompt a --backend abacus", 2, "abacus"),
    "no threads": ("run --prompt a --backend cpu --threads 0", 2, "--threads 0"),
    "threads elsewhere": ("run --prompt a --backend reference --threads 2", 2, "--threads"),
    "model missing": ("run --prompt a --model /nowhere", 3, "/nowhere"),
    "model a file": (f"run --prompt a --model {__file__}", 3, __file__),
    "model of no name": ("run --prompt a --model=", 2, "'--model': the name is empty"),
    "prompt file of no name": ("run --prompt-file=", 2, "'--prompt-file': the name is empty"),
    "drives of a model of no name": ("drives map --model=", 2, "'--model': the name is empty"),
    "convert to no name": ("convert --trunk int8 --out=", 2, "'--out': the name is empty"),
    "replicate to no name": ("replicate --budget all --to=", 2, "'--to': the name is empty"),
    "synth to no name": ("synth --shape tiny --out=", 2, "'--out': the name is empty"),
    "synth without a shape": ("synth --out x", 2, "--shape"),
    "synth over something": ("synth --shape tiny --out /", 2, "not an empty directory"),
    "chat that may not answer": ("chat --max-new 0", 2, "--max-new"),
}


@pytest.mark.parametrize(("line", "status", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_ends_with_its_status_and_one_line(cli: Command, line: str, status: int, said: str) -> None:
    outcome = cli(*line.split(" "))
    assert outcome.status == status
    assert outcome.out == ""
    assert said in outcome.err
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1


REFUSALS = {
    "nothing to generate": (["--prompt", "a", "--max-new", "0"], 2, "--max-new"),
    "no chunk": (["--prompt", "a", "--prefill-chunk", "0"], 2, "--prefill-chunk"),
    "no context": (["--prompt", "a", "--context", "0"], 2, "context of 0"),
    "context past the model's": (["--prompt", "a", "--context", "5000"], 2, "1 to 4,096"),
    "id past the vocabulary": (["--prompt-ids", "1,1024"], 2, "token id 1024 at position 1"),
    "negative id": (["--prompt-ids", "-1,2"], 2, "token id -1 at position 0"),
    "prompt past the context": (["--prompt", "a" * 50, "--context", "5"], 2, "--context"),
    "empty prompt": (["--prompt", ""], 2, "empty"),
    "memory too small": (["--prompt", "a", "--memory", "10M"], 5, "The least it can run in"),
    "cache below one layer": (["--prompt", "a", "--expert-cache", "1K"], 5, "--expert-cache"),
}


@pytest.mark.parametrize(("options", "status", "said"), REFUSALS.values(), ids=REFUSALS)
def test_what_a_checkpoint_cannot_do_is_refused_before_it_is_loaded(
    cli: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], status: int, said: str
) -> None:
    monkeypatch.setattr("runtime.generate.engine.Trunk", None)  # loading would be a TypeError
    outcome = cli("run", *on(tiny), *options, "--json")
    assert outcome.status == status
    error = outcome.record["error"]
    assert outcome.record == {"schema": "expertstream.run/1", "error": error}
    assert error["code"] == {2: "usage", 5: "does_not_fit"}[status]
    assert said in error["message"]
    assert outcome.err.endswith(f"error: {error['message']}\n")


def test_a_prompt_file_must_be_text(cli: Command, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"na\xc3\xafve \xff")
    outcome = cli("run", "--prompt-file", file)
    assert outcome.status == 2
    assert "byte 0xff at offset 7" in outcome.err
    file.write_bytes(b"")
    outcome = cli("run", "--prompt-file", file)
    assert outcome.status == 2
    assert f"{file} is empty" in outcome.err


def change_config(directory: Path, **changes: object) -> None:
    """Change keys of the text model, and of the root where it has them too."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= changes
    config |= {key: value for key, value in changes.items() if key in config}
    path.write_text(json.dumps(config))


def test_a_damaged_checkpoint_is_status_3(cli: Command, tiny: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(tiny, tmp_path / "damaged")
    shard = sorted(damaged.glob("*.safetensors"))[3]
    shard.write_bytes(shard.read_bytes()[:-1])
    outcome = cli("run", *on(damaged), "--prompt", "a", "--json")
    assert outcome.status == 3
    assert outcome.record["error"]["code"] == "bad_checkpoint"
    assert shard.name in outcome.record["error"]["message"]


def test_what_is_wrong_with_a_checkpoint_is_a_line_each(cli: Command, tiny: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(tiny, tmp_path / "damaged")
    change_config(damaged, num_experts=20)
    outcome = cli("run", *on(damaged), "--prompt", "a")
    summary, *named = outcome.err.splitlines()
    assert outcome.status == 3
    assert summary.startswith(f"error: {damaged} is not the checkpoint")
    assert 2 < len(named) <= 25
    assert all(line.startswith(("  missing: ", "  wrong shape: ")) for line in named)
    assert any("experts.{16..19}" in line for line in named)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"vocab_size": 1000}, "vocab_size 1,000"), ({"eos_token_id": 5}, "eos_token_id 5")],
)
def test_the_tokenizer_of_another_model_is_status_3(
    cli: Command, tiny: Path, tmp_path: Path, change: dict[str, int], said: str
) -> None:
    other = tmp_path / "other"
    synthesize("tiny", other, vocab=change.get("vocab_size", 1024))
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copyfile(tiny / name, other / name)
    change_config(other, **change)
    outcome = cli("run", *on(other), "--prompt", "a")
    assert outcome.status == 3
    assert said in outcome.err
    assert "another model's" in outcome.err


def test_logits_that_are_not_numbers_are_status_3(cli: Command, tiny: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(tiny, tmp_path / "damaged")
    with Checkpoint.open(damaged) as checkpoint:
        span = checkpoint.span("language_model.model.norm.weight")
    with open(span.path, "r+b") as shard:
        shard.seek(span.offset)
        shard.write(b"\xc0\x7f" * 2)  # NaN in bf16
    outcome = cli("run", *on(damaged), "--prompt", "a")
    assert outcome.status == 3
    assert "the logits are not numbers" in outcome.err


def test_the_record_opens_no_file(cli: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drives may hold every descriptor: an answer that has been computed is printed all the same."""

    def refuse(*arguments: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    for place in ("runtime.generate.record.version", "platform.platform", "platform.libc_ver"):
        monkeypatch.setattr(place, refuse)
    outcome = cli("run", *on(tiny), "--prompt", "a", "--json")
    assert outcome.status == 0
    assert outcome.record["settings"]["versions"]["numpy"] is not None


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("runtime.generate.engine.Trunk", MemoryError()),
        ("runtime.generate.engine.Trunk", OSError(errno.ENOMEM, "Cannot allocate memory")),
        ("threading.Thread.start", RuntimeError("can't start new thread")),
        ("runtime.drives.buffers.mmap.mmap", OSError(errno.ENOMEM, "Cannot allocate memory")),
    ],
    ids=["array", "call", "thread", "buffer"],
)
def test_memory_the_system_refuses_is_status_5(
    cli: Command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(place, refuse)
    outcome = cli("run", *on(tiny), "--drive", f"other={tiny}", "--prompt", "a", "--json")
    assert outcome.status == 5
    assert outcome.record["error"]["code"] == "does_not_fit"
    assert "the system refused" in outcome.record["error"]["message"]
    assert "--memory" in outcome.record["error"]["message"]


def test_a_read_that_fails_is_status_4_and_names_the_expert(
    cli: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expert_nbytes = Checkpoint.open(tiny).expert_nbytes
    preadv = os.preadv

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if len(buffers[0]) == expert_nbytes:
            raise OSError(5, "Input/output error")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    outcome = cli("run", *on(tiny), "--prompt", "a")
    assert outcome.status == 4
    assert "layer 1 expert" in outcome.err
    assert outcome.err.endswith("Input/output error\n")


def test_a_bug_is_a_traceback(cli: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.generate.engine.Trunk", None)
    with pytest.raises(TypeError):
        cli("run", *on(tiny), "--prompt", "a")


def test_control_characters_in_a_message_stay_on_its_line(cli: Command) -> None:
    outcome = cli("run", "--prompt", "a", "--model", "/no\nwhere\x1b[31m")
    assert outcome.status == 3
    assert outcome.err.count("\n") == 1
    assert "\x1b" not in outcome.err


def test_an_argument_that_is_not_utf8() -> None:
    command = [sys.executable, "-m", "runtime", "run", "--prompt", b"a\xff"]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert outcome.returncode == 2
    assert outcome.stderr == b"error: argument 3 is not UTF-8 text at character 1: a\\udcff\n"


# -- sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24G", 24 * 10**9),
        ("24GB", 24 * 10**9),
        ("24gib", 24 << 30),
        ("1.5Ti", 3 << 39),
        ("0.3K", 300),
        ("17547264", 17_547_264),
        ("16 M", 16 * 10**6),
        ("7B", 7),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text, "--memory") == nbytes


def test_nothing_is_a_size_where_it_means_something() -> None:
    assert parse_size("0", "--floor", least=0) == 0
    with pytest.raises(UsageError, match="less than a byte"):
        parse_size("0", "--memory")


@pytest.mark.parametrize("text", ["", "G", "-1G", "1e9", "1,5G", "24iB", "24i", "24 G B", "0.0001", "١G"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="--memory"):
        parse_size(text, "--memory")


# -- answers -------------------------------------------------------------------------------------------------


def test_the_embedded_default_answers_and_says_what_it_is(cli: Command) -> None:
    outcome, record = (cli("run", "--prompt", CAPITAL, "--max-new", 17, *json) for json in ((), ("--json",)))
    assert outcome.status == 0
    assert record.record["finish_reason"] == "stop"
    assert record.record["model"]["note"] == NOTE
    assert outcome.out == record.record["text"] + "\n"
    assert "<|" not in outcome.out
    assert "Paris" in outcome.out
    assert CAPITAL not in outcome.out
    assert f"model    {NOTE}\n" in outcome.err
    assert "not Kimi K3" in outcome.err
    assert "memory   " in outcome.err


def test_a_message_is_answered_on_stdout_and_thought_about_on_stderr(cli: Command) -> None:
    arguments = ("run", "--chat", "--prompt", "What is the capital of France?", "--max-new", 80)
    outcome, record = cli(*arguments), cli(*arguments, "--json").record
    assert outcome.status == 0
    assert "Paris" in outcome.out
    assert record["text"] + "\n" == outcome.out
    assert record["reasoning"]
    assert outcome.err.endswith(f"{record['reasoning']}\n")
    assert record["finish_reason"] == "stop"
    assert record["settings"]["reasoning_effort"] == "max"
    assert not any(marker in outcome.out for marker in ("<|", "think", "response"))


def test_system_and_effort_reach_the_prompt(cli: Command) -> None:
    def prompt_ids(*options: object) -> list[int]:
        return cli("run", "--chat", "--prompt", "a", "--max-new", 1, "--json", *options).record["prompt_ids"]

    prompts = [prompt_ids(), prompt_ids("--reasoning-effort", "low"), prompt_ids("--system", "Be brief.")]
    assert prompts[0] == prompt_ids("--reasoning-effort", "max")
    assert len({tuple(prompt) for prompt in prompts}) == 3


def test_a_prompt_file_is_used_as_it_is(cli: Command, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("\r\n naïve \n\n".encode())
    ids = cli("run", *on(tiny), "--prompt-file", file, "--max-new", 1, "--json").record["prompt_ids"]
    assert ids == cli("run", *on(tiny), "--prompt", "\r\n naïve \n\n", "--max-new", 1, "--json").record["prompt_ids"]


def test_a_checkpoint_without_a_tokenizer_takes_and_prints_ids(cli: Command, tiny: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(tiny, tmp_path / "bare")
    (bare / "tiktoken.model").unlink()
    arguments = ("run", *on(bare), "--prompt-ids", "1, 2,3", "--max-new", 4)
    outcome, record = cli(*arguments), cli(*arguments, "--json").record
    assert outcome.status == 0
    assert outcome.out == ",".join(map(str, record["token_ids"])) + "\n"
    assert record["prompt_ids"] == [1, 2, 3]
    assert record["text"] is None
    for line in (("run", *on(bare), "--prompt", "a"), ("chat", *on(bare))):
        outcome = cli(*line)
        assert outcome.status == 2
        assert "tiktoken.model" in outcome.err


def test_a_full_context_is_said(cli: Command, tiny: Path) -> None:
    outcome = cli("run", *on(tiny), "--prompt-ids", "1,2,3", "--context", 5, "--json")
    assert outcome.record["finish_reason"] == "length"
    assert len(outcome.record["token_ids"]) == 3
    assert "a context of 5 tokens leaves room for 3 new ones, not 256" in outcome.err


def test_stats_are_a_line_per_token_and_a_table(cli: Command, tiny: Path) -> None:
    plain = cli("run", *on(tiny), "--prompt-ids", "1,2,3", "--max-new", 4)
    outcome = cli("run", *on(tiny), "--prompt-ids", "1,2,3", "--max-new", 4, "--stats")
    assert outcome.out == plain.out
    lines = [line.split() for line in outcome.err.splitlines()]
    tokens = [line for line in lines if line[0] in "1234" and "hits" in line]
    assert [line[0] for line in tokens] == ["1", "2", "3", "4"]
    assert {"load", "prompt", "decode", "experts", "memory"} <= {line[0] for line in lines}


# -- the record ----------------------------------------------------------------------------------------------

RECORD = {
    "schema": None,
    "model": {"path", "note", "fingerprint", "layers", "experts", "trunk"},
    "backend": None,
    "prompt_ids": None,
    "token_ids": None,
    "text": None,
    "reasoning": None,
    "finish_reason": None,
    "logits_sha256": None,
    "timing": {"load_s", "ttft_s", "prefill_s", "decode_s", "decode_tokens_per_s", "waiting"},
    "io": {"requested_bytes", "device_bytes", "by_drive", "by_kind", "prefetch"},
    "cache": {"hits", "misses", "evictions", "budget_bytes", "peak_bytes"},
    "prefill": {"rows", "layer_passes", "expert_reads", "distinct_experts", "amplification"},
    "memory": {"budget_bytes", "plan", "peak_rss_bytes"},
    "settings": {
        *("backend", "threads", "context", "prefill_chunk", "max_new", "chat", "system", "reasoning_effort"),
        *("memory_bytes", "expert_cache_bytes", "expert_reuse", "drives", "trunk", "precision", "versions", "platform"),
        *("machine", "verify_reads", "prefetch"),
    },
}


def test_the_record_has_the_documented_keys(cli: Command, tiny: Path) -> None:
    record = cli("run", *on(tiny), "--prompt-ids", "1,2,3", "--max-new", 2, "--json").record
    assert set(record) == set(RECORD)
    for name, keys in RECORD.items():
        if keys is not None:
            assert set(record[name]) == keys, name
    documented = (ROOT / "docs" / "run-record.md").read_text()
    for key in [*RECORD, *(key for keys in RECORD.values() for key in keys or ())]:
        assert f"`{key}`" in documented, key
    assert record["schema"] == "expertstream.run/1"
    assert record["model"]["path"] == str(tiny)
    assert record["model"]["note"] is None
    assert record["logits_sha256"] is None
    assert record["settings"]["versions"]["expertstream"] == runtime.__version__


def test_the_record_counts_every_read_as_the_system_saw_it(
    cli: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    preadv = os.preadv

    def counting(fd: int, buffers: list[memoryview], offset: int) -> int:
        seen.append(preadv(fd, buffers, offset))
        return seen[-1]

    monkeypatch.setattr(os, "preadv", counting)
    record = cli("run", *on(tiny), "--prompt-ids", "1,2,3", "--max-new", 4, "--json").record
    io, cache = record["io"], record["cache"]
    drive = {"bytes": sum(seen), "reads": len(seen), "retries": 0, "errors": 0, "landed_last": 0}
    drive["mode"] = "buffered"
    assert io["by_drive"] == {"model": drive}
    assert io["requested_bytes"] == sum(seen) == sum(io["by_kind"].values())
    assert io["device_bytes"] is None
    with Checkpoint.open(tiny) as checkpoint:
        assert io["by_kind"]["demand"] == cache["misses"] * checkpoint.expert_nbytes
        assert io["by_kind"]["trunk"] >= checkpoint.trunk_nbytes
    assert cache["peak_bytes"] <= cache["budget_bytes"] == record["settings"]["expert_cache_bytes"]
    assert record["memory"]["plan"]["total"] <= record["memory"]["budget_bytes"]


def test_prefill_counts_rows_passes_and_reads(cli: Command, tiny: Path) -> None:
    whole, halves = (
        cli("run", *on(tiny), "--prompt-ids", "1,2,3,4", "--max-new", 1, "--json", "--prefill-chunk", chunk).record
        for chunk in (4, 2)
    )
    assert whole["prefill"]["rows"] == halves["prefill"]["rows"] == 4
    assert whole["prefill"]["layer_passes"] * 2 == halves["prefill"]["layer_passes"] == 18
    assert whole["prefill"]["expert_reads"] == whole["prefill"]["distinct_experts"]
    assert whole["prefill"]["amplification"] == 1.0
    assert whole["token_ids"] == halves["token_ids"]


def test_logits_hashes_do_not_depend_on_cache_or_chunk(cli: Command, tiny: Path) -> None:
    line = ("run", *on(tiny), "--prompt-ids", "1,2,3,4,5", "--max-new", 5, "--json", "--logits-hash")
    first = cli(*line).record
    assert len(first["logits_sha256"]) == 5
    for options in (("--expert-cache", "off"), ("--prefill-chunk", 2), ("--expert-cache", "60K")):
        other = cli(*line, *options).record
        assert other["logits_sha256"] == first["logits_sha256"], options
    shown = cli(*line[:-2], "--logits-hash")
    assert [row.split()[-1] for row in shown.err.splitlines()[-5:]] == first["logits_sha256"]


def test_settings_are_what_was_resolved(cli: Command, tiny: Path) -> None:
    options = ("--memory", "2G", "--expert-cache", "off", "--prefill-chunk", 7, "--context", 64, "--max-new", 2)
    record = cli("run", *on(tiny), "--prompt-ids", "1", "--json", *options).record
    settings = record["settings"]
    assert settings["memory_bytes"] == record["memory"]["budget_bytes"] == 2 * 10**9
    assert record["memory"]["plan"]["source"] == "--memory"
    assert (settings["expert_reuse"], settings["prefill_chunk"], settings["context"]) == (False, 7, 64)
    assert settings["max_new"] == 2
    assert "weight-exact" in settings["precision"]
    assert record["cache"]["hits"] == 0


# -- synth ---------------------------------------------------------------------------------------------------


def test_synth_writes_what_run_reads(cli: Command, tmp_path: Path) -> None:
    out = tmp_path / "made"
    made = cli("synth", "--shape", "tiny", "--layers", 5, "--experts", 8, "--top-k", 2, "--seed", 3, "--out", out)
    assert (made.status, made.out) == (0, "")
    record = cli("run", *on(out), "--prompt-ids", "1", "--max-new", 1, "--json").record
    assert (record["model"]["layers"], record["model"]["experts"]) == (5, 8)


def test_an_interrupted_synth_leaves_nothing(cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interrupts, "cancelled", lambda self: True)
    assert cli("synth", "--shape", "tiny", "--out", tmp_path / "made").status == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", [["run", "--prompt", "x"], ["doctor"], ["drives", "probe"]])
def test_a_place_one_may_not_look_at_is_said_in_one_line(
    line: list[str], cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "is_dir", hidden)
    outcome = cli(*line, "--drive", f"a={tmp_path}")
    assert (outcome.status, outcome.err.count("\n")) == (2, 1)
    assert outcome.err.startswith(f"error: {tmp_path}: Permission denied; ")


@pytest.mark.parametrize("command", ["map", "probe", "monitor --seconds 1"])
def test_a_model_one_may_not_look_at_is_a_bad_checkpoint(
    command: str, cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path))
    monkeypatch.setattr(Path, "is_dir", mock.Mock(side_effect=hidden))
    outcome = cli("drives", *command.split(), "--model", tmp_path)
    assert (outcome.status, outcome.err) == (3, f"error: cannot read {tmp_path}: Permission denied\n")


def test_a_file_there_is_no_room_for_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/here/a", None, "/there/a"))
    assert end(full) == 4
    assert (
        capsys.readouterr().err == "error: /there/a: No space left on device; make room there, or name another place\n"
    )


@pytest.mark.parametrize(
    "command",
    [
        "run --prompt-ids 1",
        "verify",
        "replicate --to . --budget all",
        "forecast",
        "drives map",
        "drives probe",
        "drives monitor --seconds 1",
    ],
)
def test_a_model_that_is_not_there_is_a_bad_checkpoint(cli: Command, command: str) -> None:
    outcome = cli(*command.split(), "--model", "/no/such/place")
    assert (outcome.status, outcome.out) == (3, "")
    assert "/no/such/place" in outcome.err
    assert outcome.err.count("\n") == 1
