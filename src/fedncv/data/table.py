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
        "| name | dataset | description | classes | images | images in the paper | resolution | year |",
        "|---|---|---|---:|---:|---:|---|---:|",
    ]
    for name, entry in datasets.items():
        channels, height, width = entry.shape
        paper = f"{PAPER_IMAGES[name]:,}" if name in PAPER_IMAGES else ""
        lines.append(
            f"| `{name}` | [{entry.title}]({entry.home}) | {entry.description} | {entry.num_classes} "
            f"| {entry.num_images:,} | {paper} | {height}x{width}x{channels} | {entry.year} |"
        )
    lines += ["", "| name | files | hub id | verified |", "|---|---|---|---|"]
    for name, entry in datasets.items():
        where = f"`{entry.folders[0]}/`" if entry.files else "built in"
        packed = f" or `{entry.archives[0]}`" if entry.archives else ""
        hub = f"`{entry.hub.id}`" if entry.hub else ""
        lines.append(f"| `{name}` | {where}{packed} | {hub} | {entry.checked} |")
    return "\n".join(lines) + "\n"
