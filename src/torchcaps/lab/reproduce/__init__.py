"""The paper's table and figures from real runs.

`paper` (what was published) -> `budgets` (how to train) -> `cells` (one training run each) -> `engine` (runs them)
-> `figures`, `runtime`, `reconstruction` (pictures and numbers) -> `report`.
"""

from torchcaps.reproduce.command import FIGURES, Request, list_cells, reproduce

__all__ = ["FIGURES", "Request", "list_cells", "reproduce"]
