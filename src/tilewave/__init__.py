"""tilewave: single-precision matrix multiply for NVIDIA GPUs."""
