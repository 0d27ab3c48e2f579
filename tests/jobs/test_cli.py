"""The command `draftfleet`: its commands, their help, job files by name, and completion."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs.load import ConfigError, load_job, load_preset
from configs.presets import JOBS, job_names
from configs.schema import CaptionJobConfig
from files import installation
from jobs import cli, completion, estimate
from jobs.terminal.arguments import add_job_file, new_parser, take_job_file

ROOT = Path(__file__).resolve().parents[2]


def test_the_help_lists_every_command_and_imports_neither_ray_nor_torch() -> None:
    program = (
        "import sys\nfrom jobs.cli import main\nmain(['--help'])\nprint({'ray', 'torch', 'pydantic'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
    assert [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")][: len(cli.COMMANDS)] == [
        *cli.COMMANDS
    ]


def test_every_job_of_the_folder_is_a_command() -> None:
    runnable = {path.stem for path in (ROOT / "jobs").glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert {name.replace("-", "_") for name in cli.COMMANDS} == runnable - {"cli"}


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_a_command_has_groups_an_example_and_no_other_command(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/draftfleet"])
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: draftfleet {name} ")
    assert f"\nexample: draftfleet {name} " in text
    assert "python -m jobs" not in text
    known = cli.module_of(name).parser()
    named = [group.title for group in known._action_groups if group._group_actions]
    assert name in ("check", "completion") or len(named) > 1
    assert [action.dest for action in known._actions if not action.help] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["captoin"], "draftfleet: there is no command 'captoin'; did you mean caption?\n"),
        (["train_drafte"], "draftfleet: there is no command 'train_drafte'; did you mean train-drafter?\n"),
        (["xyz"], f"draftfleet: there is no command 'xyz'; the commands are {', '.join(cli.COMMANDS)}\n"),
    ],
)
def test_an_unknown_command_is_refused_with_the_closest_name(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (cli.main(words), capsys.readouterr().err) == (2, message)


def test_a_command_returns_its_own_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(tmp_path / "gone")]) == 2
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"draftfleet {installation.version()}\n"
    assert cli.main([]) == 2


def test_another_version_than_that_of_the_submitter_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(cli.VERSION_VARIABLE, "99.1")
    assert cli.main(["check", "gone"]) == 2
    assert "the job was submitted by draftfleet 99.1, and this machine has " in capsys.readouterr().err


def test_commands_in_messages_are_those_of_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/jobs/caption.py"])
    assert installation.command("train-drafter") == ["python", "-m", "jobs.train_drafter"]
    monkeypatch.setattr(installation, "IS_INSTALLED", True)
    assert installation.command("train-drafter") == ["draftfleet", "train-drafter"]
    monkeypatch.setattr(installation, "IS_INSTALLED", False)
    monkeypatch.setattr(sys, "argv", ["/venv/bin/draftfleet"])
    assert installation.command("check") == ["draftfleet", "check"]


# --- job files -----------------------------------------------------------------------------------------------------


def taken(*words: str) -> tuple[str, list[str]]:
    parser = new_parser("caption", "`x`: about", "demo_folder")
    add_job_file(parser)
    arguments = take_job_file(parser, parser.parse_intermixed_args(words))
    return str(arguments.config), arguments.overrides


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["demo", "a.b=1"], ("demo", ["a.b=1"])),
        (["--config", "demo", "a.b=1", "c=2"], ("demo", ["a.b=1", "c=2"])),
        (["a.b=1", "--config", "demo"], ("demo", ["a.b=1"])),
        (["demo", "--config", "other"], ("other", ["demo"])),
        (["runs/lr=3/job.yaml"], ("runs/lr=3/job.yaml", [])),
    ],
)
def test_the_job_file_is_an_option_or_the_first_argument(words: list[str], expected: tuple[str, list[str]]) -> None:
    assert taken(*words) == expected


def test_a_missing_job_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        taken("a.b=1")
    assert ended.value.code == 2
    assert "the job file is missing: give its path, or the name of a shipped one" in capsys.readouterr().err


def test_a_name_is_a_shipped_job_file_or_preset_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo_caption").mkdir()  # a folder is no job file
    by_name = load_job(CaptionJobConfig, "demo_caption", ("job.seed=5",))
    assert by_name == load_job(CaptionJobConfig, JOBS / "demo_caption.yaml", ("job.seed=5",))
    preset = load_job(CaptionJobConfig, "zoo_sage", ("sink.path=mine",))
    assert preset == load_preset(CaptionJobConfig, "zoo_sage", ("sink.path=mine",))
    assert preset.method != by_name.method
    assert {"zoo_sage", "demo_folder"} <= {*job_names()}


def test_a_file_of_the_working_directory_comes_before_a_shipped_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (JOBS / "demo_caption.yaml").read_text().replace("path: out/captions", "path: out/own")
    (tmp_path / "demo_caption").write_text(text)
    assert load_job(CaptionJobConfig, "demo_caption").sink.path == "out/own"


def test_an_unknown_name_is_refused_with_near_names() -> None:
    with pytest.raises(ConfigError, match=r"demo_captoin: no file and no shipped job file .* mean demo_caption"):
        load_job(CaptionJobConfig, "demo_captoin")
    with pytest.raises(ConfigError, match=r"gone\.yaml: cannot be read"):
        load_job(CaptionJobConfig, "gone.yaml")


def test_an_estimate_is_the_job_s_own_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Module:
        @staticmethod
        def main(words: list[str]) -> int:
            seen.append(words)
            return 7

    monkeypatch.setattr(estimate, "module_of", lambda name: seen.append(name) or Module)
    assert estimate.main(["zoo_images", "a.b=1", "--job", "synthesize", "--samples", "5", "--shard", "0/2"]) == 7
    assert seen == ["synthesize", ["--config", "zoo_images", "a.b=1", "--estimate", "5", "--shard", "0/2"]]


# --- completion ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bash() -> str:
    return completion.script("bash")


def completed(script: str, *words: str) -> set[str]:
    """The completions of the last word by bash."""
    program = (
        f"{script}\nCOMP_WORDS=({' '.join(words)})\nCOMP_CWORD={len(words) - 1}\n_draftfleet\necho ${{COMPREPLY[@]}}"
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return {*done.stdout.split()}


def test_bash_completes_commands_options_job_files_and_keys(bash: str) -> None:
    assert completed(bash, "draftfleet", "ca") == {"caption"}
    assert completed(bash, "draftfleet", "caption", "--dry") == {"--dry-run"}
    assert completed(bash, "draftfleet", "caption", "demo_f") == {"demo_folder"}
    assert completed(bash, "draftfleet", "caption", "demo_folder", "sink.rows") == {"sink.rows_per_file="}
    assert "method.drafter.kind=" in completed(bash, "draftfleet", "estimate", "method.drafter.")
    assert completed(bash, "draftfleet", "completion", "z") == {"zsh"}
    assert completed(bash, "draftfleet", "caption", "sink.path", "=", "demo_f") == set()  # a value: files
    assert completed(bash, "draftfleet", "check", "demo_f") == set()


def test_scripts_name_every_command_and_bash_accepts_its_own(bash: str) -> None:
    assert subprocess.run(["bash", "-n"], input=bash, text=True, check=False).returncode == 0
    script = completion.script("zsh")
    for name in cli.COMMANDS:
        assert f"        {name}) " in script
        assert f"            {name}) " in bash
