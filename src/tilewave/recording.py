"""Which products a running program computes: `record` notes them, `tilewave bench` measures them."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewave.bench.suite import SuiteProduct
    from tilewave.call import GemmCall

ACTIVE: tuple[RecordedShapes, ...] = ()
"""Who records now. The front door looks at nothing but its truth while nobody does."""

_lock = threading.Lock()
# M, N, K, A transposed, B transposed, batch, A shared, B shared
_Key = tuple[int, int, int, bool, bool, int, bool, bool]


class RecordedShapes:
    """The products computed since the recording began, each with how often; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[_Key, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def __str__(self) -> str:
        times = "\n".join(f"{count:>10,} times  {product}" for product, count in self.items())
        return times or "no product was recorded"

    def items(self) -> list[tuple[SuiteProduct, int]]:
        """The different products in the order of their first appearance, and how often each was computed."""
        from tilewave.bench.suite import SuiteProduct

        with self._lock:
            counts = list(self._counts.items())
        return [
            (
                SuiteProduct(
                    f"r{place}", "recorded", m, n, k, transposed_a, transposed_b, batch, shared_a, shared_b
                ),
                count,
            )
            for place, (
                (m, n, k, transposed_a, transposed_b, batch, shared_a, shared_b),
                count,
            ) in enumerate(counts, 1)
        ]

    def write(self, path: str | Path) -> None:
        """Write them as a CSV for `tilewave bench`. Raises ``UsageError`` where that cannot be written."""
        from tilewave.bench.products.shapes import write_csv
        from tilewave.errors import UsageError

        found = self.items()
        text = write_csv([product for product, _ in found], [count for _, count in found])
        try:
            Path(path).write_text(text, encoding="utf-8")
        except (OSError, ValueError) as error:  # a name may hold what no file's name can
            raise UsageError(f"cannot write {path!s}: {getattr(error, 'strerror', None) or error}") from error

    def _note(self, key: _Key) -> None:
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + 1


@contextmanager
def record(path: str | Path | None = None) -> Iterator[RecordedShapes]:
    """Note the shapes of all products that this process computes inside, in whatever thread.

    ``with tilewave.record() as shapes: ...`` collects M, N, K, the number of items of a batch, layouts, and
    whether one matrix is shared by all items, with a count each; ``print(shapes)`` shows them and
    ``shapes.write(path)`` writes a CSV, which ``tilewave bench FILE.csv`` takes. With ``path`` that file is
    written at the end, after an exception too. Gaps between rows, offsets and epilogues are not noted, nor
    are products without elements or with nothing to sum. Recordings may be nested.

    Raises ``UsageError`` for a ``path`` that is no name, and where the file cannot be written.
    """
    global ACTIVE
    _check_name(path)
    shapes = RecordedShapes()
    with _lock:
        ACTIVE = (*ACTIVE, shapes)
    try:
        yield shapes
    finally:
        with _lock:
            ACTIVE = tuple(one for one in ACTIVE if one is not shapes)
        if path is not None:
            shapes.write(path)


def _check_name(path: object) -> None:
    if path is not None and not isinstance(path, str | os.PathLike):
        from tilewave.errors import UsageError
        from tilewave.messages import kind_of

        raise UsageError(f"path is {kind_of(path)}; accepted are None and the name of a file")


def note(call: GemmCall) -> None:
    """Tell those who record of a call that was checked."""
    product = call.product
    batch = math.prod(product.batch)
    if not call.reads_product or 0 in (product.m, product.n, batch):
        return
    key = (
        product.m,
        product.n,
        product.k,
        _is_transposed(product.a, product.m, product.k),
        _is_transposed(product.b, product.k, product.n),
        batch,
        _is_shared(product.a, product.batch),
        _is_shared(product.b, product.batch),
    )
    for shapes in ACTIVE:
        shapes._note(key)


def _is_transposed(strides: tuple[int, ...], rows: int, columns: int) -> bool:
    """Whether neighbours in memory are elements of one column; vectors count as stored by rows."""
    return rows > 1 and columns > 1 and strides[-2] == 1 and strides[-1] != 1


def _is_shared(strides: tuple[int, ...], batch: tuple[int, ...]) -> bool:
    """Whether all items of a batch are one matrix."""
    steps = [stride for stride, extent in zip(strides, batch, strict=False) if extent > 1]
    return bool(steps) and not any(steps)
