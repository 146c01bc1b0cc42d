"""Metrics of many samples at once, such as F1 or AUROC, beside the task's score of every sample.

A metric is a function from (outputs, targets), numpy arrays with one row per sample, to a number. It is applied to the
predictions of each client, and to those of all clients together. NaN or None means that it is not defined for these
samples, as AUROC of a single class; such a client is left out of the mean and counted.

Outputs of a classifier are logits, one per class on the second axis; probabilities are their softmax. Further axes,
such as the characters of a sentence, count as samples. scikit-learn is imported at the first use.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedncv.config import own_object
from fedncv.imports import import_object, own
from fedncv.spec import nearest

Array = NDArray[Any]
Function = Callable[[Array, Array], float | None]
Kind = Literal["classification", "regression"]

ECE_BINS = 15
TAKEN = ("client_mean", "worst_decile", "clients", "defined", "standard_error")  # ends of the names that rows use


class Metric(NamedTuple):
    name: str  # in rows: before_NAME
    function: Function


class Predicted(NamedTuple):
    """Predictions of a classifier, one row per sample (N) and one column per class (C)."""

    p_NC: Array  # probabilities
    guess_N: Array
    y_N: Array  # true classes


def predicted(outputs: Array, targets: Array) -> Predicted:
    z_NC = np.moveaxis(outputs, 1, -1).reshape(-1, outputs.shape[1]).astype(np.float64)
    p_NC = np.exp(z_NC - z_NC.max(axis=1, keepdims=True))
    return Predicted(p_NC / p_NC.sum(axis=1, keepdims=True), z_NC.argmax(axis=1), targets.reshape(-1))


def of_classes(function: Callable[[Predicted], float | None]) -> Function:
    return lambda outputs, targets: function(predicted(outputs, targets))


def averaged(name: str, average: str) -> Function:
    """Return scikit-learn's f1, precision or recall; a class without samples and predictions does not count."""

    def function(it: Predicted) -> float:
        from sklearn import metrics

        return float(getattr(metrics, f"{name}_score")(it.y_N, it.guess_N, average=average, zero_division=0))

    return of_classes(function)


def accuracy(it: Predicted) -> float:
    return float((it.guess_N == it.y_N).mean())


def balanced_accuracy(it: Predicted) -> float:
    """Mean over the classes that occur of the share of their samples that is predicted."""
    from sklearn.metrics import recall_score

    return float(recall_score(it.y_N, it.guess_N, labels=np.unique(it.y_N), average="macro"))


def one_against_rest(name: str) -> Function:
    """Return scikit-learn's score of two classes, or its mean over the classes that occur, each against the rest."""

    def function(it: Predicted) -> float | None:
        from sklearn import metrics

        occur = np.unique(it.y_N)
        if len(occur) < 2:
            return None
        score = getattr(metrics, name)
        if it.p_NC.shape[1] == 2:
            return float(score(it.y_N == 1, it.p_NC[:, 1]))
        return float(np.mean([score(it.y_N == c, it.p_NC[:, c]) for c in occur]))

    return of_classes(function)


def log_loss(it: Predicted) -> float:
    from sklearn.metrics import log_loss

    return float(log_loss(it.y_N, it.p_NC, labels=np.arange(it.p_NC.shape[1])))


def brier(it: Predicted) -> float:
    """Mean squared error of the probabilities: of class 1 if there are two, otherwise summed over classes."""
    error_NC = it.p_NC - (it.y_N[:, None] == np.arange(it.p_NC.shape[1]))
    squares_N = (error_NC**2).sum(axis=1)
    return float(squares_N.mean() / (2 if it.p_NC.shape[1] == 2 else 1))


def mcc(it: Predicted) -> float | None:
    from sklearn.metrics import matthews_corrcoef

    if len(np.unique(it.y_N)) < 2 or len(np.unique(it.guess_N)) < 2:
        return None
    return float(matthews_corrcoef(it.y_N, it.guess_N))


def kappa(it: Predicted) -> float | None:
    from sklearn.metrics import cohen_kappa_score

    if len(np.unique(np.concatenate([it.y_N, it.guess_N]))) < 2:
        return None
    return float(cohen_kappa_score(it.y_N, it.guess_N))


def top5(it: Predicted) -> float:
    from sklearn.metrics import top_k_accuracy_score

    return float(top_k_accuracy_score(it.y_N, it.p_NC, k=5, labels=np.arange(it.p_NC.shape[1])))


def ece(it: Predicted) -> float:
    """Expected calibration error: sum over 15 bins of equal width of n_bin / n |accuracy - mean confidence|."""
    confidence_N = it.p_NC.max(axis=1)
    right_N = it.guess_N == it.y_N
    bin_N = np.minimum((confidence_N * ECE_BINS).astype(int), ECE_BINS - 1)
    gap_B = np.bincount(bin_N, right_N - confidence_N, minlength=ECE_BINS)
    return float(np.abs(gap_B).sum() / len(right_N))


def of_numbers(function: Callable[[Array, Array], float | None]) -> Function:
    """Return a metric of a regression from a function of (targets, outputs), both with one row per sample."""

    def flat(outputs: Array, targets: Array) -> float | None:
        shape = (len(outputs), -1)
        return function(targets.reshape(shape).astype(np.float64), outputs.reshape(shape).astype(np.float64))

    return flat


def rmse(y_NK: Array, guess_NK: Array) -> float:
    from sklearn.metrics import mean_squared_error

    return math.sqrt(mean_squared_error(y_NK, guess_NK))


def mae(y_NK: Array, guess_NK: Array) -> float:
    from sklearn.metrics import mean_absolute_error

    return float(mean_absolute_error(y_NK, guess_NK))


def r2(y_NK: Array, guess_NK: Array) -> float | None:
    from sklearn.metrics import r2_score

    if (y_NK.min(axis=0) == y_NK.max(axis=0)).any():  # no variance to explain
        return None
    return float(r2_score(y_NK, guess_NK))


CLASSIFICATION: dict[str, Function] = {
    "accuracy": of_classes(accuracy),
    "balanced_accuracy": of_classes(balanced_accuracy),
    "f1_macro": averaged("f1", "macro"),
    "f1_weighted": averaged("f1", "weighted"),
    "f1_micro": averaged("f1", "micro"),
    "precision_macro": averaged("precision", "macro"),
    "recall_macro": averaged("recall", "macro"),
    "auroc": one_against_rest("roc_auc_score"),
    "average_precision": one_against_rest("average_precision_score"),
    "log_loss": of_classes(log_loss),
    "brier": of_classes(brier),
    "ece": of_classes(ece),
    "mcc": of_classes(mcc),
    "kappa": of_classes(kappa),
    "top5": of_classes(top5),
}
REGRESSION: dict[str, Function] = {"rmse": of_numbers(rmse), "mae": of_numbers(mae), "r2": of_numbers(r2)}
BUILT_IN: dict[Kind, dict[str, Function]] = {"classification": CLASSIFICATION, "regression": REGRESSION}


def find_metrics(texts: Iterable[str], given: Mapping[str, Function] | None = None) -> tuple[Metric, ...]:
    """Return the metrics that the texts name; ``given`` holds those that were passed as functions.

    Raise ValueError if a name is unknown, given twice, or one that rows use already.
    """
    found = tuple(_found(text, given or {}) for text in texts)
    names = [metric.name for metric in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two metrics are called {name!r}; give each once, and own functions names of their own")
        if not name.isidentifier() or name.endswith(TAKEN):
            raise ValueError(f"a metric cannot be called {name!r}, because rows use such names; rename the function")
    return found


def _found(text: str, given: Mapping[str, Function]) -> Metric:
    for known in BUILT_IN.values():
        if text in known:
            if find_spec("sklearn") is None:
                raise ValueError(f"metric {text} needs scikit-learn, which is not installed; pip install scikit-learn")
            return Metric(text, known[text])
    passed = own_object(text)
    if passed is not None:
        if text not in given:
            raise ValueError(
                f"this run was started from Python with a metric of its own ({passed.short}); "
                f"resume it with fedncv.resume(folder, metrics=[{passed.short}])"
            )
        return Metric(passed.short, given[text])
    if "," in text:
        raise ValueError(f"{text!r} is one name; separate several metrics with spaces: {text.replace(',', ' ')}")
    named = own(text)
    if named is None or named.rest:
        names = [name for known in BUILT_IN.values() for name in known]
        raise ValueError(nearest(text, names, what="metric") + "; or name your own as package.module:function")
    function = import_object(named.name, what="metric")
    if not callable(function):
        raise ValueError(f"metric {text!r} is a {type(function).__name__}, not a function of (outputs, targets)")
    return Metric(named.name.rpartition(":")[2], function)


def check_fit(metrics: Iterable[Metric], kind: Kind, num_outputs: int) -> None:
    """Raise ValueError if a built-in metric is for another kind of task, or needs more classes than there are."""
    fit = [name for name in BUILT_IN[kind] if kind == "regression" or num_outputs > (5 if name == "top5" else 1)]
    for name, function in metrics:
        for other, known in BUILT_IN.items():
            if known.get(name) is function and name not in fit:
                what = f"this task is a {kind}" if other != kind else f"there are {num_outputs} outputs"
                fits = ", ".join(fit) or "only your own"
                raise ValueError(f"metric {name} is for {_use(name, other)}, and {what}; metrics that fit: {fits}")


def _use(name: str, kind: Kind) -> str:
    return "more than 5 classes" if name == "top5" else f"{kind} with one output per class" if kind[0] == "c" else kind


def measure(
    metrics: Iterable[Metric], outputs: Mapping[int, Array], targets: Mapping[int, Array], *, clients: Iterable[int]
) -> dict[str, Any]:
    """Return NAME, NAME_client_mean, NAME_defined and NAME_clients of every metric.

    NAME is over the samples of all clients together; the others are over those clients for which it is defined.
    NAME_clients has a number for each of ``clients``, None if it has no samples.
    """
    tested = sorted(outputs)
    listed = list(clients)
    row: dict[str, Any] = {}
    if not tested:
        return row
    together = [np.concatenate([part[u] for u in tested]) for part in (outputs, targets)]
    for metric in metrics:
        each = {u: value(metric, outputs[u], targets[u], of=f"client {u}") for u in tested}
        known = [number for number in each.values() if number is not None]
        row |= {
            metric.name: value(metric, *together, of="all clients"),
            f"{metric.name}_client_mean": float(np.mean(known)) if known else None,
            f"{metric.name}_defined": len(known),
            f"{metric.name}_clients": [each.get(u) for u in listed],
        }
    return row


def value(metric: Metric, outputs: Array, targets: Array, *, of: str) -> float | None:
    """Return the metric, or None if it is not defined for these samples or the outputs are not finite."""
    if not len(outputs) or not np.isfinite(outputs).all():
        return None
    outputs, targets = _read_only(outputs), _read_only(targets)
    with warnings.catch_warnings():  # one for every client and round, about what the row says anyway
        warnings.simplefilter("ignore")
        try:
            found = metric.function(outputs, targets)
        except Exception as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            if "read-only" in said:
                raise ValueError(
                    f"metric {metric.name} changes its arguments, which are read-only, because other metrics use them "
                    f"({said}); copy first: outputs = outputs.copy()"
                ) from error
            raise ValueError(
                f"metric {metric.name} failed for {of} ({said}); return nan where it is not defined"
            ) from error
    if found is None:
        return None
    try:
        number = float(found)
    except (TypeError, ValueError):
        raise ValueError(
            f"metric {metric.name} returns {type(found).__name__} for {of}; one number is wanted, or nan"
        ) from None
    return number if math.isfinite(number) else None


def _read_only(values: Array) -> Array:
    """Return a copy that numpy does not let anyone change: torch would write into it all the same."""
    copied = values.copy()
    copied.setflags(write=False)
    return copied
