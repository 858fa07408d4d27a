"""What the rollouts cost beside their bounds and their peers: `python -m benchmarks`.

Every figure compares things that were measured side by side, in turns, in one process. Tests assert
no time; docs/benchmarks.md says how each figure is made.
"""
