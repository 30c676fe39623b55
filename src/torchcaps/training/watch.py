"""Noticing, while a run goes on, that it does not learn."""

from __future__ import annotations

from collections.abc import Mapping

RISE = 1.5
SATURATED = 0.9
DEAD = 0.01
PATIENCE_IN_ROWS = 3  # rows in a row before something is said


class Watch:
    """Looks at the rows of the metrics and says, once for each trouble, what is wrong and what to change."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None  # loss and error
        self._counts = {"rise": 0, "saturated": 0, "dead": 0}

    def remarks(self, row: Mapping[str, float | int | None]) -> list[str]:
        """What there is to say about the run after this row."""
        loss, error, right, wrong = (
            float(row[name] or 0.0) for name in ("loss", "train_error", "length_right", "length_wrong")
        )
        if self._first is None:
            self._first = loss, error
        signs = {
            "rise": loss > RISE * self._first[0] and error >= self._first[1],  # the spread loss grows by itself
            "saturated": min(right, wrong) > SATURATED,
            "dead": max(right, wrong) < DEAD,
        }
        said = []
        for name, there in signs.items():
            self._counts[name] = self._counts[name] + 1 if there else 0
            if self._counts[name] == PATIENCE_IN_ROWS:
                said.append(REMARKS[name])
        return said


REMARKS = {
    "rise": "The loss is rising: the steps are too large. Choose a smaller --learning-rate, with muon a smaller "
    "--matrix-rate, and where coefficients ascend a smaller --gamma.",
    "saturated": "All class capsules are as long as they can be, whatever the image shows, and learn little. "
    "Choose a smaller --weight-std, or smaller steps.",
    "dead": "All class capsules have hardly any length, whatever the image shows. Choose a larger --weight-std, or a "
    "longer --warmup.",
}
