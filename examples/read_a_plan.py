"""What the library would do on a GPU that you need not have, and why.

    python examples/read_a_plan.py

A plan is a record: print it, compare it, test it. The same sizes on the same GPU model give the same plan on
every machine.
"""

from __future__ import annotations

import tilewave


def padding_gain(n: int, multiple: int, device: str) -> float:
    """Predicted time of an n x n x n product over that of the next multiple: above 1, padding would pay."""
    padded = -(-n // multiple) * multiple
    return (
        tilewave.plan(n, n, n, device=device).estimate.total
        / tilewave.plan(padded, padded, padded, device=device).estimate.total
    )


def main() -> None:
    """One product on three GPUs, a closer look at one, and a question that the plans answer."""
    for device in ("T4", "H200", "GB10"):
        print(tilewave.plan(2049, 2049, 2049, device=device), end="\n\n")

    plan = tilewave.plan(64, 64, 100_000, device="H200")
    print(plan)
    print(f"cut along K: {plan.cut.pieces} pieces a tile, {plan.workspace_bytes:,} bytes of partial sums")
    print(f"{len(plan.rejected)} candidates were turned down; the first: {plan.rejected[0]}\n")

    print("The prose, which names what you could change:")
    print(tilewave.explain(plan).partition("Turned down")[0])

    gain = padding_gain(2049, 4, "H200")
    advice = "worth padding" if gain > 1 else "not worth padding"
    print(f"2049 takes {gain:.2f} times what 2052 is predicted to take: {advice}")


if __name__ == "__main__":
    main()
