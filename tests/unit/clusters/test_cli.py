"""The options of `spark-elastic-run`: what is taken, and what is refused by a sentence. No process is started."""

from __future__ import annotations

import io
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from spark_elastic.clusters import cli, store_cli
from spark_elastic.clusters.local.command import take_python_options
from spark_elastic.config import ElasticConfig, operations_from_env
from spark_elastic.data.store import Store
from spark_elastic.errors import ElasticError, InvalidInput
from spark_elastic.testing.fakes import FakeClock


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return str(path)


def _parse_options(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    found: list[Any] = []
    monkeypatch.setattr(cli, "execute", found.append)
    result = CliRunner().invoke(cli.run, arguments)
    assert result.exit_code == 0, result.output
    return found[0]


def test_horovods_options_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    line = (
        "-np 4 --min-np 2 --max-np 8 --host-discovery-script s.sh --slots-per-host 2 --reset-limit 3 --gloo "
        "--elastic-timeout 60 --start-timeout 5 --blacklist-cooldown-range 10 100 --output-filename out "
        "--prefix-output-with-timestamp --verbose --gloo-timeout-seconds 7 --device cpu python train.py --lr 0.1 -np 9"
    )
    wanted = _parse_options(monkeypatch, *line.split())
    assert (wanted.num_proc, wanted.min_np, wanted.max_np) == (4, 2, 8)
    assert wanted.command == ("python", "train.py", "--lr", "0.1", "-np", "9")
    monkeypatch.setenv("SPARK_ELASTIC_WORKER_PORT_RANGE", "7000-7010")
    config = cli._make_config(wanted)
    assert config.worker_port_range == (7000, 7010)
    assert (config.cooldown_range, config.reset_limit, config.start_timeout) == ((10.0, 100.0), 3, 60.0)
    assert (config.gather_timeout, config.collective_timeout, config.device) == (5.0, 7.0, "cpu")


MARKED, LATIN_1 = b"\xef\xbb\xbf# none\n", "knüll:1".encode("latin-1")  # files of hosts
NO_MEANING = [
    ("-cb", "--check-build: nothing is compiled"),
    ("--no-hierarchical-allreduce", "nothing is to be chosen"),
    ("--tcp", "the job's own mesh"),
    ("--mpi", "the job's own mesh"),
    ("--config-file c.yaml", "SPARK_ELASTIC_<NAME>"),
]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("python {}", "needs -np"),
        ("-np 2 --restarts 2 python {}", "needs --run-id and --store: by them the next driver continues"),
        ("-np 3 --max-np 2 python {}", "needs --min-np <= -np <= --max-np; got 3 <= 3 <= 2."),
        ("-np 2 cat {}", "cat ended and has started no `python` or `python3` of its PATH, so that no worker"),
        ("-np 2 nowhere-to-be-found {}", "'nowhere-to-be-found' cannot be run"),
        ("-np 2 python -I {}", "the workers' Python cannot be given -I: leave it out"),
        ("-np 2 python -X frozen_modules {}", "the workers' Python cannot be given -X frozen_modules: leave"),
        ("-np 2 /nowhere/python {}", "there is no executable '/nowhere/python'"),
        ("-np 2 python -c", "give the path of a script after python, -m and a module, or -c"),
        ("-np 2 python -m nowhere.train", "there is no module 'nowhere.train' to run"),
        ("-np 2 python none.py", "cannot be read"),
        ("-np 2 --output-filename {0} python {0}", "is no folder that files can be put into"),
        ("-np 2 -H node1:2 --hostfile f python {}", "give one of -H"),
        ("-np 2 --hostfile none python {}", "cannot be read"),
        ("-np 2 --hostfile {marked} python {}", "names no host: write one"),
        ("-np 2 --hostfile {latin_1} python {}", "cannot be read: 'utf-8' codec"),
        ("-np 2 --network-interface nowhere0 python {}", "='nowhere0' is no network interface of this"),
        ("-np 2 -H localhost python {}", "write host:slots"),
        ("-np 2 --hostfile /dev/null python {}", "/dev/null names no host: write one"),
        ("-np 2 -H localhost:1 python {}", "the hosts have 1 slots and the job needs 2 workers"),
        ("-np 2 --host-discovery-script /nowhere/s.sh python {}", "host discovery failed at its first call"),
        ("-np 3 --device cuda python {}", "2 GPUs, for 2 slots, where the job needs 3 workers: give"),
        ("-np 3 --device cuda python {}", "device='cuda', and this host shows no GPU"),
        *(
            (f"-np 2 {option} 0 python {{}}", f"Invalid value for '{option}'")
            for option in ("-np", "--checkpoint-steps")
        ),
        *((f"{options} -np 2 python {{}}", sentence) for options, sentence in NO_MEANING),
    ],
)
def test_a_mistake_is_one_sentence(
    line: str, sentence: str, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "" if "shows no GPU" in sentence else "0,1")
    files = {"marked": tmp_path / "marked", "latin_1": tmp_path / "latin_1"}
    files["marked"].write_bytes(MARKED)
    files["latin_1"].write_bytes(LATIN_1)
    result = CliRunner().invoke(cli.run, line.format(script, **files).split())
    if sentence in dict(NO_MEANING).values():  # which the whole command line prints
        assert isinstance(result.exception, InvalidInput)
        assert sentence in str(result.exception)
        return
    assert sentence in result.output
    if "Invalid value" in sentence:
        assert result.exit_code == 2
    else:
        assert (result.exit_code, result.output.count("\n")) == (1, 1)
        assert result.output.startswith("spark-elastic-run: ")


@pytest.mark.parametrize("verbose", [False, True])
def test_losses_joins_and_ends_are_lines(verbose: bool, capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    listener = cli.CommandOutput(None, stream, FakeClock(), False, verbose, True)
    listener.on_world(2, "begins")
    listener.on_world_broken("world 1 is over: worker 1-0.1 is lost: its process ended (killed by signal 9)")
    listener.on_world(1, "world 2: worker 1-0.1 is lost: its process ended (killed by signal 9)")
    listener.on_world(2, "joining: 1-0.2")
    listener.on_notice("the process of worker 1-0.1 ended: killed by SIGKILL")
    lines = [
        "world 1 is over: worker 1-0.1 is lost: its process ended (killed by signal 9)",
        "the next world has 1 worker",
        "joining: 1-0.2",
        "the process of worker 1-0.1 ended: killed by SIGKILL",
    ]
    told = "" if verbose else "".join(f"spark-elastic-run: {line}\n" for line in lines)
    assert capsys.readouterr().err == told
    assert stream.getvalue() == (f"[driver] {lines[-1]}\n" if verbose else "")


# Of Horovod 0.28.1's parser.
HOROVODRUN = """
    -v --version -np --num-proc -cb --check-build --disable-cache --start-timeout --network-interfaces
    --network-interface --output-filename --verbose --config-file -p --ssh-port -i --ssh-identity-file
    --fusion-threshold-mb --cycle-time-ms --cache-capacity --hierarchical-allreduce --no-hierarchical-allreduce
    --hierarchical-allgather --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune
    --autotune-log-file --autotune-warmup-samples --autotune-steps-per-sample --autotune-bayes-opt-max-samples
    --autotune-gaussian-process-noise --min-np --min-num-proc --max-np --max-num-proc --slots-per-host
    --elastic-timeout --reset-limit --blacklist-cooldown-range --timeline-filename --timeline-mark-cycles
    --no-timeline-mark-cycles --no-stall-check --stall-check --stall-check-warning-time-seconds
    --stall-check-shutdown-time-seconds --mpi-threads-disable --no-mpi-threads-disable --mpi-args --tcp --binding-args
    --num-nccl-streams --thread-affinity --gloo-timeout-seconds --log-level --log-with-timestamp
    --log-without-timestamp -prefix-timestamp --prefix-output-with-timestamp --log-hide-timestamp
    --no-log-hide-timestamp -H --hosts -hostfile --hostfile --host-discovery-script --gloo --mpi --jsrun
"""


def test_every_option_of_horovodrun_is_taken_or_refused() -> None:
    known = {name for parameter in cli.run.params for name in (*parameter.opts, *parameter.secondary_opts)}
    horovodruns = set(HOROVODRUN.split())
    assert sorted(horovodruns - known) == []
    refused = {name for _, _, options in cli.REFUSED for names in options for name in names.split()}
    assert refused <= horovodruns


@pytest.mark.parametrize(
    ("options", "setting", "value"),
    [
        ("--fusion-threshold-mb 16", "fusion_threshold", 16 << 20),
        ("--fusion-threshold-mb 16", "bucket_bytes", 16 << 20),
        ("--no-autotune", "bucket_bytes", 25 << 20),
        ("--timeline-filename t.json", "timeline", "t.json"),
        ("--timeline-mark-cycles", "timeline_mark_cycles", True),
        ("--no-timeline-mark-cycles", "timeline_mark_cycles", False),
        ("--no-stall-check", "warn_after", math.inf),
        ("--stall-check-warning-time-seconds 3 --no-stall-check", "warn_after", math.inf),
        ("--stall-check", "warn_after", 20.0),
        ("--stall-check-warning-time-seconds 3", "warn_after", 3.0),
        ("--stall-check-shutdown-time-seconds 4", "wait_at_most", 4.0),
        ("--log-level TRACE", "log_level", "DEBUG"),
    ],
)
def test_options_of_operations_reach_the_training_processes_and_win_over_variables(
    options: str, setting: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    inherited = {
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1" if options == "--stall-check" else "0",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "20",
        "HOROVOD_LOG_LEVEL": "error",
    }
    wanted = _parse_options(monkeypatch, *options.split(), "-np", "2", "python", "train.py")
    gloo = _parse_options(monkeypatch, "--gloo", "-np", "2", "python", "train.py")
    assert cli._make_environment(gloo) == {}
    environment = {**inherited, **cli._make_environment(wanted)}
    assert getattr(operations_from_env(environment), setting) == value


def test_variables_of_options_are_in_its_environment(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    prepare = cli.prepare

    def record_and_stop(
        path: str, arguments: tuple[str, ...], named: dict[str, object], config: ElasticConfig
    ) -> None:
        given.append(prepare(path, arguments, named, config).program.environment)
        raise InvalidInput("enough is known.")

    monkeypatch.setattr(cli, "prepare", record_and_stop)
    CliRunner().invoke(cli.run, ["--timeline-filename", "t.json", "-np", "2", "python", script])
    assert given == [{"SPARK_ELASTIC_TIMELINE": "t.json"}]


@pytest.mark.parametrize(
    ("words", "variables", "rest"),
    [
        ("-u train.py -O", {}, ["train.py", "-O"]),
        ("-uOO -m train -X", {"PYTHONOPTIMIZE": "2"}, ["-m", "train", "-X"]),
        ("-B t.py", {"PYTHONDONTWRITEBYTECODE": "1"}, ["t.py"]),
        ("-W error -Wignore:a -c pass", {"PYTHONWARNINGS": "error,ignore:a"}, ["-c", "pass"]),
        (
            "-X dev -Xutf8=0 -X int_max_str_digits=9 t.py",
            {"PYTHONDEVMODE": "1", "PYTHONUTF8": "0", "PYTHONINTMAXSTRDIGITS": "9"},
            ["t.py"],
        ),
    ],
)
def test_options_of_python_become_variables(words: str, variables: dict[str, str], rest: list[str]) -> None:
    assert take_python_options(words.split()) == (variables, rest)


def test_the_doctor_examines_this_machine_and_a_store_without_a_cluster(tmp_path: Path) -> None:
    doctor = partial(CliRunner().invoke, store_cli.group)
    fine = doctor(["doctor", "--store", str(tmp_path)])
    assert (fine.exit_code, len(fine.output.splitlines())) == (0, 4), fine.output
    assert f"{tmp_path} can be written here" in fine.output
    refused = doctor(["doctor", "--store", "nowhere://x"])
    assert refused.exit_code == 1
    with pytest.raises(ElasticError) as said:
        Store.open("nowhere://x")
    assert f"refused  {said.value}\n" in refused.output
    assert "--conf takes NAME=VALUE" in str(doctor(["doctor", "--master", "local", "--conf", "a"]).exception)
