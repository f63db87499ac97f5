"""The product's planner: legal kernels and schedules, the estimate, the choice, and its account of itself."""
