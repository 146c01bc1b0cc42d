"""Table 2 of the paper, generated from the registry: description and verification of each dataset."""

from collections.abc import Mapping

from fedncv.data.registry import DATASETS, Entry

# Numbers in the paper's Table 2, for the datasets it has.
PAPER_IMAGES = {
    "mnist": 70_000,
    "cifar10": 60_000,
    "cifar100": 60_000,
    "svhn": 600_000,
    "tiny_imagenet": 110_000,
    "emnist": 805_263,
    "fashion_mnist": 70_000,
    "cinic10": 270_000,
}


def markdown(datasets: Mapping[str, Entry] = DATASETS) -> str:
    """Return two tables: the datasets, and where they come from."""
    lines = [
        "| name | dataset | description | classes | samples | images in the paper | resolution | year |",
        "|---|---|---|---:|---:|---:|---|---:|",
    ]
    for name, entry in datasets.items():
        paper = f"{PAPER_IMAGES[name]:,}" if name in PAPER_IMAGES else ""
        lines.append(
            f"| `{name}` | [{entry.title}]({entry.home}) | {entry.description} | {entry.num_classes} "
            f"| {entry.num_images:,} | {paper} | {_resolution(entry)} | {entry.year} |"
        )
    lines += ["", "| name | files | hub id | verified |", "|---|---|---|---|"]
    for name, entry in datasets.items():
        where = f"`{entry.folders[0]}/`" if entry.files else "built in"
        where = f"`{entry.files[0]}`" if entry.make and entry.files else where
        packed = f" or `{entry.archives[0]}`" if entry.archives else ""
        hub = f"`{entry.hub.id}`" if entry.hub else ""
        lines.append(f"| `{name}` | {where}{packed} | {hub} | {entry.checked} |")
    return "\n".join(lines) + "\n"


def _resolution(entry: Entry) -> str:
    if len(entry.shape) == 1:
        return f"{entry.shape[0]} {'characters' if entry.files else 'features'}"
    channels, height, width = entry.shape
    return f"{height}x{width}x{channels}"
