"""Runs PTX on the CPU: parser, NumPy executor, memory, and the counters that a profiler would show."""

from tilewave.emulator.counters import CLASSES, Counters
from tilewave.emulator.launch import LaunchResult, launch
from tilewave.emulator.memory import Buffer, Memory
from tilewave.emulator.ptx import Module, parse_ptx

__all__ = ["CLASSES", "Buffer", "Counters", "LaunchResult", "Memory", "Module", "launch", "parse_ptx"]
