"""What pytest must know before it collects."""

import importlib.util

# Triton has no wheel everywhere, and the command line is an extra; both have tests of their own.
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["upgd/kernels/triton_*.py"]
if not importlib.util.find_spec("typer"):
    collect_ignore_glob.append("upgd/cli/*.py")
