"""Draw the trace of stage 3: where each chunk of a prompt was at every step, and what moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MAX_ANSWERS = 4  # in a picture
WITHOUT = "leave --timeline out"


def load_pyplot(instead: str) -> Any:
    """Return matplotlib's pyplot, set to draw to files.

    Raises ImportError that says how to install it, or what to do `instead`. Call it before anything is computed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "a picture needs matplotlib, which is not installed: run pip install matplotlib (it is in the extra "
            f"`bench`), or {instead}"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_timeline(output: dict[str, Any], path: Path) -> None:
    """Draw the answers of a trace that moved most, one panel each: a row per chunk, a column per token."""
    plt = load_pyplot(WITHOUT)
    answered = [result for result in output["results"] if result["steps"]]
    chosen = sorted(answered, key=lambda result: -_num_moves(result))[:MAX_ANSWERS]
    figure, panels = plt.subplots(len(chosen), 1, figsize=(9, 3.2 * len(chosen)), squeeze=False)
    for result, panel in zip(chosen, panels[:, 0], strict=True):
        _draw_result(result, panel)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _num_moves(result: dict[str, Any]) -> int:
    return sum(len(step["promotions"] or []) + len(step["evictions"] or []) for step in result["steps"])


def _draw_result(result: dict[str, Any], panel: Any) -> None:
    steps = result["steps"]
    names = [chunk["chunk_id"] for chunk in result["chunks"]]
    on_gpu = [[name in step["resident_chunks"] for step in steps] for name in names]
    panel.imshow(on_gpu, aspect="auto", cmap="Blues", vmin=0, vmax=1.6, interpolation="nearest")
    for kind, marker, colour in (("promotions", "^", "tab:green"), ("evictions", "v", "tab:red")):
        points = [(x, names.index(name)) for x, step in enumerate(steps) for name in step[kind] or []]
        panel.scatter(*zip(*points, strict=True) if points else ([], []), marker=marker, color=colour, label=kind)
    panel.set_yticks(range(len(names)), names, fontsize=6)
    panel.set_xticks(range(len(steps)), [repr(step["text"])[1:-1] for step in steps], fontsize=7, rotation=45)
    panel.set_title(f"{result['id']}: {result['question']} -> {result['prediction']}", fontsize=8)
    panel.legend(loc="upper right", fontsize=6)
    latency = panel.twinx()
    latency.plot([step["latency_ms"] for step in steps], color="tab:orange", linewidth=1)
    latency.set_ylabel("ms per step", fontsize=7)
