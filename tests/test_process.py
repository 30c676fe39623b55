import pytest

from torchcaps.errors import UserError
from torchcaps.process import told


def failing(error: BaseException):
    def work() -> int:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code", "spoken"),
    [
        (UserError("The batch is too large."), 0, ""),  # the first process says it too
        (MemoryError(), 2, "not enough memory"),  # which one process alone may lack
        (LookupError("?"), 1, "Please report it"),
    ],
)
def test_another_process_than_the_first_tells_what_happened_to_it_alone(error, code, spoken, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert told(failing(error)) == code
    said = capsys.readouterr().err
    assert spoken in said if spoken else not said
