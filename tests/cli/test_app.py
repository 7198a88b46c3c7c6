import pytest
from typer.testing import CliRunner

from parallax import parse
from parallax.cli import app
from parallax.errors import ParallaxError


def call(*arguments):
    return CliRunner().invoke(app, arguments)


def raised(work) -> str:
    with pytest.raises(ParallaxError) as error:
        work()
    return f"{type(error.value).__name__}: {error.value}\n"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def no_process_may_start(monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("a process was started")

    monkeypatch.setattr("parallax.cli.train.start", refuse)
    monkeypatch.setattr("parallax.cli.train.run", refuse)


def test_the_plan_of_a_composition_is_printed():
    result = call("plan", "tp(2), zero(2), bf16", "--world", "1024")
    assert result.exit_code == 0
    assert result.stdout == f"{parse('tp(2), zero(2), bf16').plan(1024)}\n"
    assert "1024 ranks" in result.stdout


@pytest.mark.parametrize("command", [("plan",), ("train", "--compose")])
def test_an_unknown_name_is_shown_as_text(command):
    result = call(*command, "zero(2), zorro(3)")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == raised(lambda: parse("zero(2), zorro(3)"))
    assert "zorro" in result.stderr


@pytest.mark.parametrize("command", [("plan", "--world"), ("train", "--nproc")])
def test_ranks_that_do_not_fit_are_shown_before_any_process_starts(command):
    text = "tp(2), bf16"
    arguments = (*command, "8", *(["--compose", text] if "train" in command else [text]))
    result = call(*arguments)
    assert result.exit_code == 1
    assert result.stderr == raised(lambda: parse(text).plan(8))
    assert result.stderr.startswith("MeshError: 8 ranks")


def test_a_missing_text_is_shown_before_any_process_starts(tmp_path):
    path = tmp_path / "nowhere"
    result = call("train", "--data", str(path))
    assert result.exit_code == 1
    assert result.stderr == (
        f"DataError: Text was asked for from {path}; there is no file or folder {str(path)!r}.\n\n"
        "Give --data a path that exists.\n"
    )


def test_an_unknown_size_is_shown_before_any_process_starts():
    result = call("train", "--size", "huge")
    assert result.exit_code == 1
    assert result.stderr == (
        "ParallaxError: The model size 'huge' was asked for; the sizes are tiny, small, 125m, 1b, "
        "3b, 8b.\n\n"
        "Choose one of those, or build a parallax.train.decoder.Size of your own.\n"
    )


@pytest.mark.parametrize(
    ("ranks", "compose"), [(1, "zero(2), bf16"), (3, "zero(2), bf16"), (4, "tp(2), zero(2), bf16")]
)
def test_the_default_composition_fits_any_number_of_ranks(monkeypatch, ranks, compose):
    jobs = []
    monkeypatch.setattr("parallax.cli.train.run", jobs.append)
    monkeypatch.setattr("parallax.cli.train.start", lambda run, job, **how: jobs.append(job))
    result = call("train", "--nproc", str(ranks))
    assert result.exit_code == 0, result.output
    assert [job.compose for job in jobs] == [compose]


def test_under_a_launcher_the_job_runs_in_this_process(monkeypatch):
    jobs = []
    monkeypatch.setattr("parallax.cli.train.run", jobs.append)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    result = call("train", "--steps", "7")
    assert result.exit_code == 0, result.output
    assert [job.steps for job in jobs] == [7]
