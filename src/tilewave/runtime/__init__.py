"""The GPU at run time: a thin, checked layer over the CUDA driver."""
