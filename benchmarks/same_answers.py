"""Compare the answers of two files of `vllm_blend.quality.held_out`, question by question.

    python -m vllm_blend.quality.held_out inputs/demo-model-long --dtype float32 --device cpu --split test \\
        --families 4 --samples 30 --settings relevant_passages@0.07,0.155 --output check/long.json
    python -m benchmarks.same_answers check/long.json benchmarks/results/held_out_test_long.json

The first command asks the first 30 of the committed questions again; the second prints, for each setting and ratio that
both files have, how many questions both asked, and which of them were answered otherwise. It ends with status 1 if any
was, and if the files have nothing in common.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from vllm_blend.quality.held_out_file import Answered, Cell, HeldOut, read_held_out

RIGHT = object()  # in place of a right answer, which the files do not hold


def answers(cell: Cell, run: Answered) -> dict[str, object]:
    """Return what each question was answered, or RIGHT."""
    wrong = iter(run.wrong)
    return {name: RIGHT if right else next(wrong) for name, right in zip(cell.questions, run.correct, strict=True)}


def compare(ours: HeldOut, theirs: HeldOut) -> list[tuple[str, int, list[str]]]:
    """Return a line for each way to answer that both have: its name, how many questions both asked, and those with
    other answers. Raises ValueError if weights or dtype differ, or there is no such question."""
    for name in ("weights", "dtype"):
        if ours.about[name] != theirs.about[name]:
            raise ValueError(f"the files are of other {name}: {ours.about[name]} and {theirs.about[name]}")
    found = []
    known = {(cell.name, run.setting, run.ratio): answers(cell, run) for cell in theirs.cells for run in cell.runs}
    for cell in ours.cells:
        for run in cell.runs:
            own, other = answers(cell, run), known.get((cell.name, run.setting, run.ratio), {})
            shared = [name for name in own if name in other]
            ratio = "" if run.ratio is None else f" at {100 * run.ratio:g}%"
            if shared:
                changed = [name for name in shared if own[name] != other[name]]
                found.append((f"{cell.name}: {run.setting}{ratio}", len(shared), changed))
    if not found:
        raise ValueError("the files have no question in common that was asked in the same way")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ours", type=Path, help="the file to check")
    parser.add_argument("theirs", type=Path, help="the file to compare it with")
    args = parser.parse_args(argv)
    try:
        found = compare(read_held_out(args.ours), read_held_out(args.theirs))
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    for name, shared, changed in found:
        print(f"{name}: {shared} questions, {len(changed)} answered otherwise", *changed)
    return int(any(changed for _, _, changed in found))


if __name__ == "__main__":
    raise SystemExit(main())
