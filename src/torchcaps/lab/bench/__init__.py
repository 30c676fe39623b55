"""Speed and memory of every routing beside a plain reference, all in one run.

`networks` (what) -> `reference` (beside what) -> `cases` (one thing to time each) -> `measure` (in turns, each in a
process) -> `operations` (the arithmetic limit) -> `report` (ratios, files, pictures).
"""
