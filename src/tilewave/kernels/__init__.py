"""The product's kernels: CUDA templates, their instances, their argument block."""
