"""Rungs and cuBLAS under the profiler, beside what was predicted and what the emulator counts."""

from tilewave.lab.profile.records import KernelProfile, LibraryKernel, Profile, Reading, load_profile

__all__ = ["KernelProfile", "LibraryKernel", "Profile", "Reading", "load_profile"]
