"""Compiling an instance: its template and headers, one entry, one cubin."""

from __future__ import annotations

import functools

from tilewave.compiler import Program, Source, compile_source
from tilewave.compiler.records import Kernel
from tilewave.kernels.instances import Instance


@functools.cache
def source_of(header: str) -> Source:
    """The source that instantiates kernels of a template, by the template's path in the package."""
    template = Source.packaged(header)
    name = header.rpartition("/")[2].removesuffix(".cuh") + ".cu"
    return Source.from_text(name, f'#include "{header}"\n', {header: template.text, **template.headers})


def compile_instance(
    instance: Instance, arch: str, *, machine_code_only: bool = False
) -> tuple[Program, Kernel]:
    """The program that holds an instance, and the kernel in it.

    With ``machine_code_only`` it is the one that came with the package, if that has it: without PTX.
    """
    source = source_of(instance.header)
    program = compile_source(source, [instance.entry], arch, machine_code_only=machine_code_only)
    return program, program.kernels[instance.entry]
