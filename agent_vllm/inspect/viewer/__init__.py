"""Look at recorded rollouts in a browser.

`data.py` says what is shown, `page.py` writes it as one file, `live.py` follows a running run, and
`static/` holds the page's own scripts and style.
"""

from agent_vllm.inspect.viewer.page import write_page

__all__ = ["write_page"]
