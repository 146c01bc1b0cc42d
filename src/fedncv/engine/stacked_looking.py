"""The look of stacked clients at their training samples before they predict; ``looking`` does one client at a time."""

from typing import Any

import torch
from torch import Tensor

from fedncv.engine.asking import asking
from fedncv.engine.looking import SMALLEST, looking
from fedncv.engine.stacked import Arrived, StackedEngine
from fedncv.tree import tree_map


def surveyed(engine: StackedEngine, arrived: Arrived, y_KP: Tensor, round: int) -> Any:
    """Return the notes of every client at ``y_KP`` and the statistics of ``arrived``; () without a survey."""
    survey = engine.method.survey
    if survey is None:
        return ()
    looks = [problem._replace(method=looking(problem.method, survey)) for problem in engine.problems]
    other = engine.with_problems("survey", looks, smallest=SMALLEST)
    plan = other.plan(arrived.rows, [1.0] * len(arrived.rows), round)
    replied = other.train(arrived._replace(down=y_KP), plan)
    if len(replied.who) == len(arrived.rows):
        return replied.up

    def start(ask_of, y_P, b_R):  # type: ignore[no-untyped-def]
        return survey.start(ask_of(b_R), y_P)

    notes = asking(start, engine.asks(arrived.rows, round), y_KP, arrived.buffers_KR)
    who_K = torch.from_numpy(replied.who).to(engine.device)  # the others have no training sample
    return tree_map(lambda old, new: old.index_copy(0, who_K, new), notes, replied.up) if len(who_K) else notes
