"""`python -m agent_vllm` is the `agent-vllm` command."""

import sys

from agent_vllm.cli import main

sys.exit(main())
