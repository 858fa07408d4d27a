"""`vllm serve` processes: reached, checked, started, given weights."""
