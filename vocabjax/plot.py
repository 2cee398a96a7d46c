"""Pictures of runs. matplotlib is imported when a picture is drawn."""

from pathlib import Path

from vocabjax.log import read_metrics


def plot_run(directory: Path) -> Path:
    """`curves.png`: training and validation loss of one run against tokens."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_metrics(directory / "metrics.jsonl")
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for key, label, style in (
        ("train_loss", "training batches", "-"),
        ("training_sample_loss", "training sample", "o-"),
        ("validation_loss", "validation", "s-"),
    ):
        points = [(line["tokens"], line[key]) for line in lines if key in line]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=3, linewidth=1)
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(directory.name)
    axes.grid(alpha=0.3)
    axes.legend()
    path = directory / "curves.png"
    figure.savefig(path, dpi=150)
    return path
