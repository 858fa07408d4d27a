"""Compare the cost of rollouts with their bounds and with other libraries: `python -m benchmarks`.

Every figure compares things that were measured in turns, in one process. Tests assert no time.
docs/benchmarks.md says how each figure is measured.
"""
