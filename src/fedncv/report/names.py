"""Display names of methods, datasets and metrics.

A method or dataset of the user's own is `package.module:function`, or `custom:name#fingerprint` if it was an object in
Python; data can also be files, `table:path=…`. Headings show the short name, and more only where two share it.
"""

import re
from pathlib import PurePath

from fedncv.catalogue import methods as listed_methods
from fedncv.config import CUSTOM, own_object
from fedncv.figures import APART
from fedncv.results import UNSEEN

OURS = "fedncv"
METHODS = {name: about.title for name, about in listed_methods().items()}
# Variants of FedNCV by the parts they lack and have. A variant that sets all six parts is FedAvg with the parts that
# are on; with all parts off it is FedAvg.
WITHOUT = {
    "drift=off": "drift correction",
    "even=off": "even samples",
    "prior=off": "label prior",
    "momentum=off": "momentum",
    "average=off": "average",
    "blend=off": "blend",
    # as runs before the parts were switches spell it
    "even=false": "even samples",
    "tau=0": "label prior",
    "momentum=0": "momentum",
    "average=0": "average",
    "blend=0": "blend",
}
WITH = {
    "drift=fixed": "drift correction",
    "blend=0.03": "blend",
    "memory=adaptive": "server memory",
    "samples=saga": "sample level (SAGA)",
}
SAID = {"drift=adaptive": "alpha learned", "drift.alpha=learned": "alpha learned", "beta=learned": "learned"}
DATASETS = {
    "digits": "Digits",
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "emnist": "EMNIST",
    "emnist_balanced": "EMNIST balanced",
    "emnist_letters": "EMNIST letters",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "svhn": "SVHN",
    "svhn_extra": "SVHN extra",
    "tiny_imagenet": "Tiny-ImageNet",
    "cinic10": "CINIC-10",
}
METRICS = {
    "before": "before local training",
    "after": "after local training",
    "before_client_mean": "before, mean over clients",
    "before_worst_decile": "before, worst tenth of clients",
    "after_client_mean": "after, mean over clients",
    "after_worst_decile": "after, worst tenth of clients",
    "unseen_before": "clients that never train, before local training",
    "unseen_after": "clients that never train, after local training",
    "unseen_pooled": "shared model on all test samples of clients that never train",
    "pooled": "shared model on all test samples",
    "loss": "training loss",
    "variance_signal": "signal",
    "variance_within": "within clients",
    "variance_between": "between clients",
    "variance_snr": "signal-to-noise ratio",
    "variance_sampling": "sampling of clients",
    "variance_batches": "batches of a round",
}


def is_listed(method: str) -> bool:
    """Return whether the method, without its knobs and switches, is a built-in one."""
    return re.split(r"[:+]", method, maxsplit=1)[0] in METHODS


def short(methods: list[str]) -> dict[str, str]:
    """Return text -> the name in a report: without the module or the fingerprint, unless another one has that name.

    >>> list(short(["fedavg", "my.code:mine:mu=1+prior", "custom:theirs#1f0a2b", "custom:fedavg#3d0a2b"]).values())
    ['fedavg', 'mine:mu=1+prior', 'theirs', 'custom:fedavg#3d0a2b']
    >>> list(short(["custom:theirs#1f0a2b", "custom:theirs#2e0a2b"]).values())
    ['custom:theirs#1f0a2b', 'custom:theirs#2e0a2b']
    """
    brief = {text: _brief(text) for text in methods}
    taken = list(brief.values())
    return {
        text: name if taken.count(name) == 1 and (name == text or not is_listed(name)) else text
        for text, name in brief.items()
    }


def _brief(text: str) -> str:
    """Return an own method or dataset without its module or fingerprint; any other text as it is."""
    if own := own_object(text):
        return own.short
    if found := re.fullmatch(r"[\w.]*\.?\w+:([A-Za-z_]\w*)((?:[:+].*)?)", text):
        return found[1] + found[2]
    return text


def method(text: str) -> str:
    """fedprox:mu=0.1+prior -> FedProx, mu 0.1 + prior.

    >>> method("fedprox:mu=0.1,server_lr=2+prior:tau=1")
    'FedProx, mu 0.1, server_lr 2 + prior, tau 1'
    >>> method("fedncv:memory=adaptive,drift=off")
    'FedNCV with server memory, without drift correction'
    >>> method("fedavg @ runs/a"), method("custom:theirs#1f0a2b"), method("my.code:mine:mu=1"), method("custom")
    ('FedAvg (runs/a)', 'theirs #1f0a2b', 'my.code:mine, mu 1', 'own method')
    """
    text, apart, folder = text.partition(APART)
    if apart:
        return f"{method(text)} ({folder})"
    parts = []
    for part in re.split(r"\+(?=[a-z])", text):
        name, rest = _name_and_knobs(part)
        knobs = [knob for knob in rest.split(",") if knob]
        said = _variant(knobs) if name == OURS else _with_knobs(METHODS.get(name, name), knobs)
        parts.append(said)
    return " + ".join(parts)


def _name_and_knobs(part: str) -> tuple[str, str]:
    if part == CUSTOM:
        return "own method", ""
    if own := own_object(part):
        return f"{own.short} #{own.fingerprint}", ""
    if found := re.fullmatch(r"([\w.]+:[A-Za-z_]\w*)(?::(.*))?", part):  # package.module:function:knobs
        return found[1], found[2] or ""
    name, _, rest = part.partition(":")
    return name, rest


def _with_knobs(name: str, knobs: list[str]) -> str:
    return ", ".join([name, *(SAID.get(knob, knob.replace("=", " ")) for knob in knobs)])


def _variant(knobs: list[str]) -> str:
    has = [WITH[knob] for knob in knobs if knob in WITH]
    lacks = [WITHOUT[knob] for knob in knobs if knob in WITHOUT]
    others = [knob for knob in knobs if knob not in WITH and knob not in WITHOUT]
    sets = {knob.partition("=")[0] for knob in knobs}
    name = "FedNCV"
    if has + others and sets >= {"drift", "even", "tau", "momentum", "average", "blend"}:
        name, lacks = "FedAvg", []
    words = [f"with {', '.join(has)}"] * bool(has) + [f"without {', '.join(lacks)}"] * bool(lacks)
    return _with_knobs(" ".join([name, ", ".join(words)]).strip(), others)


def dataset(text: str) -> str:
    """
    >>> dataset("cifar10"), dataset('table:path="/my data/a,b.csv",y=sick'), dataset("my.code:patients:year=2020")
    ('CIFAR-10', 'a,b.csv', 'patients, year 2020')
    >>> dataset("custom:breast cancer#1f0a2b"), dataset("custom"), dataset("folder:path=/data/birds,size=32")
    ('breast cancer', 'own data', 'birds')
    """
    if text == CUSTOM:
        return "own data"
    if path := re.search(r'(?<=[:,])path=(?:"((?:[^"\\]|\\.)*)"|([^,]*))', text):
        found = path[2] if path[1] is None else re.sub(r"\\(.)", r"\1", path[1])
        return PurePath(found).name or text
    brief = _brief(text)
    if brief == text:
        return DATASETS.get(text, text)
    name, _, knobs = brief.partition(":")
    return _with_knobs(name, knobs.split(",") if knobs else [])


def datasets(texts: list[str]) -> dict[str, str]:
    """Return the text of each dataset -> its heading; the whole text where two have one heading."""
    brief = {text: dataset(text) for text in texts}
    shown = list(brief.values())
    return {text: name if shown.count(name) == 1 else text for text, name in brief.items()}


def thing(text: str) -> str:
    """
    >>> thing("lenet5"), thing("my.code:net"), thing("custom:net#1f0a2b"), thing("custom")
    ('lenet5', 'net', 'net', 'own')
    """
    return "own" if text == CUSTOM else _brief(text)


def heading(name: str) -> str:
    """Return the short name of a score, for a column of a table.

    >>> heading("after"), heading("unseen_after")
    ('after', 'after, unseen')
    """
    return f"{name.removeprefix(UNSEEN)}, unseen" if name.startswith(UNSEEN) else name


def metric(name: str) -> str:
    """
    >>> metric("before"), metric("after_f1_macro"), metric("before_f1_macro_client_mean")
    ('before local training', 'after, f1 macro', 'before, f1 macro, mean over clients')
    """
    if name in METRICS:
        return METRICS[name]
    if name.startswith(UNSEEN):
        return f"{metric(name.removeprefix(UNSEEN))}, clients that never train"
    found = re.fullmatch(r"(before|after)_(.+?)(_client_mean|_worst_decile)?", name)
    if found is None:
        return name.replace("_", " ")
    over = {"_client_mean": ", mean over clients", "_worst_decile": ", worst tenth of clients"}.get(found[3] or "", "")
    return f"{found[1]}, {found[2].replace('_', ' ')}{over}"


def traffic(number: float) -> str:
    """
    >>> traffic(1234567), traffic(999_900)
    ('1.23 MB', '1 MB')
    """
    return _three_digits(number, " B", " kB", " MB", " GB", " TB")


def quantity(number: float) -> str:
    """
    >>> quantity(31902), quantity(1234567), quantity(999.6)
    ('31.9 k', '1.23 M', '1 k')
    """
    return _three_digits(number, "", " k", " M", " G")


def duration(seconds: float) -> str:
    """
    >>> duration(42), duration(600), duration(9000), duration(200_000)
    ('42 s', '10 min', '2.5 h', '2.3 days')
    """
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.1f} {unit}" if unit == "h" else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.1f} days"


def _three_digits(number: float, *units: str) -> str:
    for unit in units[:-1]:
        if number < 999.5:  # more would round to 1000
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}{units[-1]}"
