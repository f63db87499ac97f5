"""Small kernels that measure one thing each, and the lane maps that they are given."""
