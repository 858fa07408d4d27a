"""vLLM inside this process: built, stepped, given weights and ended."""
