"""What pytest must know before it collects."""

import importlib.util

# Triton has no wheel everywhere; the kernels have tests of their own.
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["upgd/kernels/triton_*.py"]
