"""What the command line makes of whatever goes wrong."""

from pathlib import Path

import pytest

from torchcaps.cli import info
from torchcaps.cli.main import main
from torchcaps.settings import SettingError


def failing(error: BaseException):
    def run(arguments: object) -> None:
        raise error

    return run


def test_what_nobody_has_thought_of_is_one_sentence_and_a_log_file(monkeypatch, capsys):
    monkeypatch.setattr(info, "run", failing(ZeroDivisionError("deep inside")))
    assert main(["info"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "Traceback" not in said
    log = Path(said.rsplit(" ", 1)[1].strip().rstrip("."))
    assert "ZeroDivisionError: deep inside" in log.read_text()
    log.unlink()


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (SettingError("run.batch_size", "must be at least 1, not 0"), 2, "--batch-size must be at least 1, not 0."),
        (MemoryError(), 2, "not enough memory"),
        (KeyboardInterrupt(), 130, "Stopped."),
        (PermissionError(13, "Permission denied", "some/file"), 2, "Permission denied: some/file"),
    ],
)
def test_errors_are_told_in_the_words_of_the_command_line(monkeypatch, capsys, error, code, words):
    monkeypatch.setattr(info, "run", failing(error))
    assert main(["info"]) == code
    assert words in capsys.readouterr().err


def test_a_misspelt_option_is_told_by_its_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--epchs", "3"])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: torchcaps train")
    assert "unrecognized arguments: --epchs 3 (did you mean --epochs?)" in said
