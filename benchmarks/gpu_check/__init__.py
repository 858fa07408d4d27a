"""Check on a real GPU what a CPU can't show. `python -m benchmarks.gpu_check` runs all checks."""
