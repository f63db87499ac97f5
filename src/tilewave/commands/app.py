"""What all commands share: the group that they belong to, and how errors are told.

Everything heavy is imported inside the commands, so that ``--help`` and ``--version`` answer at once. Errors
of ours and of the command line are one line on stderr: exit code 2 for a request that makes no sense, 1 for
anything else that failed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tilewave.errors import TilewaveError, UsageError


class _OneLineErrors(TyperGroup):
    """A command group whose errors are single lines; Typer's own are boxes of several."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command and exit."""
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
            if sys.stdout is not None:
                sys.stdout.flush()  # what cannot be written is to be known here, not at the interpreter's end
        except TilewaveError as error:
            _complain(str(error))
            code = 2 if isinstance(error, UsageError) else 1
        except (typer.Abort, KeyboardInterrupt):
            _complain("interrupted")
            code = 130
        except BrokenPipeError:  # the reader has seen enough, as in `tilewave ladder | head`
            _write_nothing_more()
            code = 1
        except OSError as error:  # a full disk behind stdout, say; commands name the files that they write
            if sys.stdout is not None:
                _write_nothing_more()
            place = "the output" if error.filename is None else error.filename
            _complain(f"cannot read or write {place}: {error.strerror or error}")
            code = 1
        except Exception as error:
            message = getattr(error, "format_message", None)  # what Typer's errors have, in all its versions
            if message is None:
                raise
            _complain(" ".join(message().split()))
            code = getattr(error, "exit_code", 2)
        sys.exit(code if isinstance(code, int) else 0)


def _write_nothing_more() -> None:
    """Let what is left in the buffer of stdout go nowhere when the interpreter ends."""
    with contextlib.suppress(OSError):  # a stand-in for stdout that is no file has nothing to lose
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str) -> None:
    typer.echo(f"tilewave: {message}", err=True)


app = typer.Typer(
    cls=_OneLineErrors,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Single-precision matrix multiply on NVIDIA GPUs, and a lab that optimises it step by step.",
)


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from tilewave.bench.environment import tilewave_version

        typer.echo(f"tilewave {tilewave_version()}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
