"""`tilewave bench`: products of any shapes, timed against cuBLAS by a protocol that docs/benchmarking.md
tells.
"""
