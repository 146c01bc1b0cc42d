"""Refuse old spellings of ``fedncv``, from when its parts were knobs of one file, and give the new spelling.

A run with an old spelling cannot be resumed: the chain's state has other fields.
"""

RENAMED = {"tau": "prior.tau", "epsilon": "prior.epsilon", "alpha": "drift.alpha", "rate": "drift.rate"}
ADDED = ("memory", "beta", "forget", "weights", "samples")  # now switches of their own
VALUES = {"drift": ("fixed", "adaptive"), "even": ("true", "false")}


def refuse(text: str) -> None:
    """Raise ValueError with the new spelling if ``text``, the first part of a chain, has an old one."""
    name, _, rest = text.partition(":")
    if name not in ("fedncv", "fedncv-sums"):
        return
    knobs = {key: value for key, _, value in (word.partition("=") for word in rest.split(","))}
    if "personal" in knobs:
        raise ValueError(f"{text!r}: personal=head was removed; use fedper or fedrep for a personal head")
    if any(key in RENAMED or key in ADDED or knobs[key] in VALUES.get(key, ()) for key in knobs):
        raise ValueError(f"{text!r} is the spelling of an older version; write {new_spelling(name, knobs)!r}")


def new_spelling(name: str, knobs: dict[str, str]) -> str:
    """Return the chain that the old knobs stand for.

    >>> new_spelling("fedncv", {"memory": "adaptive", "tau": "0"})
    'fedncv:prior=off+memory:beta=learned'
    """
    learned = knobs.get("drift") == "adaptive"
    words = []
    for key, value in knobs.items():
        if (key == "alpha" and learned) or key in ADDED or (key, value) == ("drift", "fixed"):
            continue
        if key == "drift" and learned:
            words.append("drift.alpha=learned")
        elif (key, value) == ("tau", "0"):
            words.append("prior=off")
        elif key == "even":
            words.append(f"even={'off' if value in ('false', 'off') else 'on'}")
        else:
            words.append(f"{RENAMED.get(key, key)}={value}")
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
