"""The `mst` command as a whole: help with examples, exit codes, one line for a user's mistake."""

import contextlib
import json
import subprocess
import sys
from importlib import metadata

import pytest

import mst_scale
from mst_scale import cli, comm
from mst_scale.errors import UserError
from tests.support import tiny_run


@pytest.mark.parametrize(("value", "wanted"), [("", False), ("0", False), ("false", False), ("1", True), ("yes", True)])
def test_tracebacks_are_shown_on_request(monkeypatch, value, wanted):
    monkeypatch.setenv("MST_TRACEBACK", value)
    assert comm.is_plain(OSError("gone")) != wanted


@pytest.mark.parametrize(
    "said", ["DefaultCPUAllocator: can't allocate memory: you tried", "CUDA out of memory.\nTried"]
)
def test_too_little_memory_is_one_line(said):
    error = RuntimeError(said)
    assert comm.is_plain(error) and comm.exit_code(error) == 1
    line = comm.one_line(error)
    assert line.startswith("out of memory: reduce train_micro_batch") and len(line.splitlines()) == 1


@pytest.mark.parametrize("words", [["--help"], ["flops", "--config", "gpt2_small"]])
def test_output_that_nobody_takes_ends_with_a_documented_code(words):
    """A reader that has exited, and a full disk; Python's own code would be 120."""
    environment = {**tiny_run.environment()}
    environment.pop("PYTHONUNBUFFERED", None)
    command = [sys.executable, "-m", "mst_scale", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == ("", 1)
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "No space left" in done.stderr


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_help_with_an_example(verb, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([verb, "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert f"mst {verb}" in text.split("usage:")[1].split("\n", 2)[2], "an example"


@pytest.mark.parametrize("words", [["--help"], []])
def test_the_verbs_are_listed(words, capsys):
    with pytest.raises(SystemExit) if words else contextlib.nullcontext():
        assert cli.main(words) == 2
    text = capsys.readouterr().out
    assert all(f"    {verb}" in text for verb in cli.VERBS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["reprot"], ": the nearest is 'report'"),
        (
            ["plan", "--config", "demo", "--gpus", "1", "--methd", "rigl"],
            "mst plan: unrecognized arguments: --methd rigl: the nearest is '--method'",
        ),
        (["launch", "locl", "demo"], ": the nearest is 'local'"),
        (["plan", "--config", "nope"], "nope: no such config file; ready-made are "),
        (["plan", "--config", "gpt2-smal", "--gpus", "1"], "the nearest ready-made config is 'gpt2_small'"),
        (["export", "runs/demo", "/proc/x"], "OUT /proc/x cannot be created"),
    ],
)
def test_a_mistyped_name_is_one_line_with_a_suggestion(words, said, capsys):
    try:
        code = cli.main(words)
    except SystemExit as ended:
        code = ended.code
    err = capsys.readouterr().err
    assert code == 2 and said in err and err.count("\n") == 1


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_help_and_version_do_not_import_torch(option):
    program = (
        f"import sys\nfrom mst_scale import cli\ntry: cli.main(['{option}'])\nfinally: print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    child = subprocess.run(command, env=tiny_run.environment(), capture_output=True, text=True, check=True)
    assert child.stdout.endswith("False\n")
    torch, deepspeed = map(metadata.version, ("torch", "deepspeed"))
    versions = f"mst_scale {mst_scale.__version__} (torch {torch}, DeepSpeed {deepspeed})\n"
    assert child.stdout.startswith(versions) == (option == "--version")


@pytest.mark.parametrize(
    "argv",
    [
        ["nonsense"],
        ["inspect", "nowhere", "a\nb"],
        ["inspect"],
        ["data", "--nonsense"],
        ["plan", "--config", "C", "--gpus", "many"],
        ["bench"],
        ["bench", "nonsense"],
        ["launch"],
        ["launch", "nonsense"],
        ["bench", "topology", "--nonsense"],
        ["bench", "topology", "--rounds", "0"],
        ["bench", "linear", "--threads", "0"],
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(argv, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(argv)
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("mst") and err.endswith("--help)\n")


def run_verb(error):
    def run(args):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UserError("no such thing; use this instead"), 2, "mst: no such thing; use this instead\n"),
        (OSError(28, "No space left on device"), 1, "mst: [Errno 28] No space left on device\n"),
        (KeyboardInterrupt(), 1, "mst: stopped\n"),
    ],
)
def test_errors_are_one_line(error, code, text, monkeypatch, capsys):
    import mst_scale.cli.data

    monkeypatch.setattr(mst_scale.cli.data, "run", run_verb(error))
    monkeypatch.delenv("MST_TRACEBACK", raising=False)
    assert cli.main(["data", "stdlib"]) == code
    assert capsys.readouterr().err == text


def test_a_traceback_that_was_asked_for_keeps_the_exit_code(monkeypatch, capsys):
    import mst_scale.cli.data

    monkeypatch.setattr(mst_scale.cli.data, "run", run_verb(UserError("no such thing")))
    monkeypatch.setenv("MST_TRACEBACK", "1")
    assert cli.main(["data", "stdlib"]) == 2
    assert capsys.readouterr().err.startswith("Traceback")


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch):
    import mst_scale.cli.data

    def run(args):
        first, second = [1, 2, 3]  # a ValueError that nobody raised on purpose
        return first + second

    monkeypatch.setattr(mst_scale.cli.data, "run", run)
    with pytest.raises(ValueError, match="too many values"):
        cli.main(["data", "stdlib"])


def test_it_runs_as_a_module_and_answers_machines(tmp_path):
    command = [
        sys.executable,
        "-m",
        "mst_scale",
        "data",
        "stdlib",
        "--max-bytes",
        "300K",
        "--out",
        str(tmp_path),
        "--json",
    ]
    child = subprocess.run(command, env=tiny_run.environment(), capture_output=True, text=True, check=True)
    meta = json.loads(child.stdout)
    assert meta["tokenizer"] == "byte" and meta["splits"]["train"]["tokens"] > 100_000


@pytest.mark.parametrize(
    ("words", "new"),
    [
        (["export", "nowhere", "{}/a", "--how", "wanda"], "--method"),
        (["report", "nowhere", "--frontier"], "--compute-frontier"),
        (["flops", "--config", "gpt2_small", "--method", "dense-short", "--like=nowhere"], "--match-flops"),
        (["bench", "step", "--config", "nowhere", "--micro", "1"], "--micro-batch-size"),
        (["bench", "observer", "--nonsense"], "logging_overhead"),
        (["bench", "rivals", "--nonsense"], "baselines"),
    ],
)
def test_old_names_work_with_a_warning(words, new, tmp_path, caplog):
    words = [word.format(tmp_path) for word in words]
    try:
        assert cli.main(words) == 2, "what else is wrong with this command"
    except SystemExit as left:
        assert left.code == 2
    assert [record.levelname for record in caplog.records if new in record.getMessage()] == ["WARNING"]


def test_an_option_is_not_given_by_both_names(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["export", "nowhere", "out", "--how", "wanda", "--method", "wanda"])
    assert left.value.code == 2 and "old name of --method" in capsys.readouterr().err


def test_bench_hands_its_options_on(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", "topology", "--help"])
    assert left.value.code == 0
    assert "--ranks" in capsys.readouterr().out
