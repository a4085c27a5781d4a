"""What `import te_dist` says where it cannot work."""

from __future__ import annotations

import subprocess
import sys


def test_sources_without_what_is_compiled_say_so() -> None:
    code = "import sys; sys.modules['te_dist._C'] = None; import te_dist"  # None: a module that is not to be found
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "holds the sources of te_dist and nothing compiled: leave the folder" in ended.stderr, ended.stderr
