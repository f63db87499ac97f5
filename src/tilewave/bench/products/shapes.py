"""Which products to measure: words of the command line, CSV files, and the built-in suites."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from tilewave.bench.suite import SuiteProduct, squares, workloads
from tilewave.errors import UsageError

LAYOUTS = ("NN", "NT", "TN", "TT")
SUITES = {"workloads": workloads, "squares": squares}
COLUMNS = ("id", "family", "M", "N", "K", "transA", "transB", "batch", "strideA0", "strideB0", "source")
"""Columns of a CSV of products: M, N and K are needed. A stride of 0 between items is a shared matrix."""

LARGEST = 2**31 - 1
_ACCEPTED = (
    "accepted are M,N,K[,batch][,NN|NT|TN|TT] such as 1024,1024,512 or 64,64,64,4096,NT; a CSV file; and "
    f"the suites {', '.join(SUITES)}"
)


def products_of(words: Sequence[str]) -> list[SuiteProduct]:
    """The products that words of a command line name, in their order and without repeats.

    A word is a shape, a file that ends in .csv, or a suite. Raises ``UsageError`` for anything else.
    """
    found: dict[SuiteProduct, None] = {}
    for word in words:
        if word in SUITES:
            found.update(dict.fromkeys(SUITES[word]()))
        elif word.lower().endswith(".csv"):
            found.update(dict.fromkeys(read_csv(Path(word))))
        else:
            found[parse_shape(word)] = None
    names = [product.name for product in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"two different products are called {twice!r}; accepted are names of their own")
    return list(found)


def parse_shape(word: str) -> SuiteProduct:
    """A product from "M,N,K[,batch][,layouts]"."""
    parts = [part.strip() for part in word.split(",")]
    layouts = parts.pop().upper() if parts[-1].upper() in LAYOUTS else "NN"
    if len(parts) not in (3, 4):
        raise UsageError(f"{word!r} is no shape: {_ACCEPTED}")
    m, n, k, *more = (_size(part, word) for part in parts)
    return SuiteProduct(
        ",".join([*parts, layouts]),
        "given",
        m,
        n,
        k,
        transposed_a=layouts[0] == "T",
        transposed_b=layouts[1] == "T",
        batch=more[0] if more else 1,
    )


def read_csv(path: Path) -> list[SuiteProduct]:
    """Products of a CSV file with a header line: columns M, N, K, and any others of `COLUMNS`."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    reader = csv.DictReader(io.StringIO(text))
    missing = [name for name in ("M", "N", "K") if name not in (reader.fieldnames or ())]
    if missing:
        raise UsageError(
            f"{path} has no column {missing[0]}; accepted is a first line with M, N, K and, if wanted, "
            f"{', '.join(name for name in COLUMNS if name not in 'MNK')}"
        )
    products = []
    for place, row in enumerate(reader, 2):
        where = f"{path}, line {place}"
        m, n, k = (_size(row[name] or "", where) for name in ("M", "N", "K"))
        batch = _size(row.get("batch") or "1", where)
        products.append(
            SuiteProduct(
                row.get("id") or f"line{place}",
                row.get("family") or "given",
                m,
                n,
                k,
                transposed_a=_letter(row.get("transA") or "N", where),
                transposed_b=_letter(row.get("transB") or "N", where),
                batch=batch,
                shared_a=batch > 1 and (row.get("strideA0") or "").strip() == "0",
                shared_b=batch > 1 and (row.get("strideB0") or "").strip() == "0",
                source=row.get("source") or "",
            )
        )
    return products


def write_csv(products: Iterable[SuiteProduct], counts: Iterable[int] | None = None) -> str:
    """Products as a CSV that `read_csv` reads; with ``counts``, how often each was computed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    rows = list(products)
    times = list(counts) if counts is not None else None
    writer.writerow([*COLUMNS, *(["count"] if times is not None else [])])
    for place, product in enumerate(rows):
        writer.writerow(
            [
                product.name,
                product.family,
                product.m,
                product.n,
                product.k,
                "T" if product.transposed_a else "N",
                "T" if product.transposed_b else "N",
                product.batch,
                "0" if product.shared_a else "",
                "0" if product.shared_b else "",
                product.source,
                *([times[place]] if times is not None else []),
            ]
        )
    return text.getvalue()


def _size(text: str, where: str) -> int:
    word = text.strip()
    if not (word.isascii() and word.isdecimal()) or not 1 <= int(word) <= LARGEST:
        raise UsageError(f"{where}: size {word!r}; whole numbers from 1 to {LARGEST} are accepted")
    return int(word)


def _letter(text: str, where: str) -> bool:
    word = text.strip().upper()
    if word not in ("N", "T"):
        raise UsageError(f"{where}: layout {text!r}; accepted are N and T")
    return word == "T"
