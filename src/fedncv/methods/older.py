"""Refuse old spellings of ``fedncv``, from when its parts were knobs of one file, and give the new spelling.

A run with an old spelling cannot be resumed: the chain's state has other fields.
"""

NUMBERS = {"tau": "prior.tau", "epsilon": "prior.epsilon", "alpha": "drift.alpha", "rate": "drift.rate"}
WORDS = {  # knob -> its old values, all of which are refused
    "memory": ("off", "fixed", "adaptive"), "drift": ("fixed", "adaptive"), "even": ("true", "false"),
    "samples": ("off", "saga", "svrg"), "weights": ("self_normalised", "ht"), "personal": ("none", "head"),
}  # fmt: skip


def refuse(text: str) -> None:
    """Raise ValueError with the new spelling if ``text``, the first part of a chain, has an old one."""
    name, _, rest = text.partition(":")
    if name not in ("fedncv", "fedncv-sums"):
        return
    knobs = {key: value for key, _, value in (word.partition("=") for word in rest.split(","))}
    if knobs.get("memory") in ("server", "clients"):
        raise ValueError(f"{text!r}: this is a knob of drift; write {name}:drift.memory={knobs['memory']}")
    numbers = {*NUMBERS, "beta", "forget"} & knobs.keys()
    if not numbers and not any(knobs.get(key) in values for key, values in WORDS.items()):
        return
    old = f"{text!r} is the spelling of an older version, whose runs cannot be resumed"
    if name == "fedncv-sums":
        raise ValueError(f"{old}; fedncv-sums was another method then, see docs/methods/fedncv-sums.md")
    if knobs.get("personal") == "head":
        raise ValueError(f"{old}; personal=head was removed, use fedper or fedrep for a personal head")
    raise ValueError(f"{old}; in a new run write {new_spelling(name, knobs)!r}")


def new_spelling(name: str, knobs: dict[str, str]) -> str:
    """Return the chain that the old knobs stand for. A ceiling of a learned alpha or beta has no new form.

    >>> new_spelling("fedncv", {"memory": "adaptive", "tau": "0", "epsilon": "2"})
    'fedncv:prior=off+memory:beta=learned'
    """
    drift, prior_off = knobs.get("drift", "fixed"), knobs.get("tau") in ("0", "0.0")
    words = []
    for key, value in knobs.items():
        part = NUMBERS.get(key, key).partition(".")[0]
        if key == "drift":
            words += {"off": ["drift=off"], "adaptive": ["drift.alpha=learned"]}.get(value, [])
        elif key == "even":
            words.append(f"even={'off' if value in ('false', 'off') else 'on'}")
        elif key == "tau" and prior_off:
            words.append("prior=off")
        elif (part == "prior" and prior_off) or (part == "drift" and drift == "off"):
            continue  # a knob of a part that is off
        elif key == "alpha" and drift == "adaptive":
            continue  # its ceiling
        elif key in NUMBERS:
            words.append(f"{NUMBERS[key]}={value}")
        elif key in ("momentum", "average", "blend"):
            words.append(f"{key}={value}")
    text = ":".join(filter(None, [name, ",".join(words)]))
    if knobs.get("memory", "off") != "off":
        beta = "learned" if knobs["memory"] == "adaptive" else knobs.get("beta", "1")
        forget = f",forget={knobs['forget']}" if "forget" in knobs else ""
        text += f"+memory:beta={beta}{forget}"
    if knobs.get("weights") == "ht":
        text += "+ht"
    if knobs.get("samples", "off") != "off":
        text += f"+samples:kind={knobs['samples']}"
    return text
