"""The families of kernels, in the order in which the planner weighs them."""
