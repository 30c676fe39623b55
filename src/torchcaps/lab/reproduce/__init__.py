"""The paper's table and figures from real runs.

`paper` (what was published) -> `budgets` (how to train) -> `cells` (one training run each) -> `engine` and `worker`
(train them) -> :mod:`torchcaps.lab.results` (kept as data) -> `figures` and `report`, with `runtime` and
`reconstruction`.
"""
