"""The options of `spark-elastic-run`: what is taken, and what is refused by a sentence. No process is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from spark_elastic import cli
from spark_elastic.errors import InvalidInput


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return str(path)


def _wanted(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> cli.Wanted:
    found: list[cli.Wanted] = []
    monkeypatch.setattr(cli, "play", found.append)
    result = CliRunner().invoke(cli.run, arguments)
    assert result.exit_code == 0, result.output
    return found[0]


def test_horovods_options_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    line = (
        "-np 4 --min-np 2 --max-np 8 --host-discovery-script s.sh --slots-per-host 2 --reset-limit 3 --gloo "
        "--elastic-timeout 60 --start-timeout 5 --blacklist-cooldown-range 10 100 --output-filename out "
        "--prefix-output-with-timestamp --verbose --gloo-timeout-seconds 7 python train.py --lr 0.1 -np 9"
    )
    wanted = _wanted(monkeypatch, *line.split())
    assert (wanted.num_proc, wanted.min_np, wanted.max_np) == (4, 2, 8)
    assert wanted.command == ("python", "train.py", "--lr", "0.1", "-np", "9")
    config = cli._config(wanted)
    assert (config.cooldown_range, config.reset_limit, config.start_timeout) == ((10.0, 100.0), 3, 60.0)
    assert (config.gather_timeout, config.collective_timeout) == (5.0, 7.0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--network-interfaces eth0", "starts processes of this machine only"),
        ("--ssh-port 22", "starts processes of this machine only"),
        ("--mpi", "the job's own mesh"),
        ("--config-file c.yaml", "SPARK_ELASTIC_<NAME>"),
    ],
)
def test_what_means_nothing_here_is_refused(options: str, sentence: str, script: str) -> None:
    result = CliRunner().invoke(cli.run, [*options.split(), "-np", "2", "python", script])
    assert isinstance(result.exception, InvalidInput)
    assert sentence in str(result.exception)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("python {}", "needs -np"),
        ("-np 2 bash {}", "runs Python scripts"),
        ("-np 2 /nowhere/python {}", "not with /nowhere/python"),
        ("-np 2 python -m train", "give the path of a script"),
        ("-np 2 python none.py", "cannot be read"),
        ("-np 2 -H node1:2 --hostfile f python {}", "give one of -H"),
        ("-np 2 --hostfile none python {}", "cannot be read"),
        ("-np 2 -H 192.0.2.7:2 python {}", "192.0.2.7 is not this machine"),
        ("-np 2 -H localhost python {}", "write host:slots"),
        ("-np 2 --min-np 3 python {}", "1 <= min_workers <= num_workers"),
        ("-np 2 --host-discovery-script /nowhere/s.sh python {}", "host discovery failed at its first call"),
    ],
)
def test_mistakes_end_with_1_and_one_sentence(line: str, sentence: str, script: str) -> None:
    result = CliRunner().invoke(cli.run, line.format(script).split())
    assert result.exit_code == 1
    assert sentence in result.output
    assert result.output.startswith("spark-elastic-run: ")
