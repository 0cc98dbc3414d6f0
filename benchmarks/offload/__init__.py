"""Models larger than the memory, against peers under one enforced limit: ``python -m benchmarks.offload``."""
