"""Fine-tuning: other local training for the score after, and nothing else; the stacked engine does the same."""

import pytest
import torch
from federations import everyone, products, tiny, train, vector
from torch.testing import assert_close

from fedncv.engine import evaluate, stacked_scores
from fedncv.engine.problem import arrivals
from fedncv.engine.stacked import StackedEngine
from fedncv.methods import find_method


def test_fine_tuning_has_its_own_rate_and_epochs():
    """products, t = 3: two steps of 0.05 on head and body by hand; the training round keeps lr 0.1 and one epoch."""
    problem = products("fedavg+finetune:lr=0.05,epochs=2", targets=(3.0,))
    tuned = problem.tuning
    assert [phase.epochs for phase in tuned.method.phases(1)] == [2]
    (arrival,) = arrivals(problem, train(problem), everyone(0).ids)
    assert_close(arrival.down.x_P, vector(1.2, 1.2))  # one step of 0.1 from (1, 1)
    body = head = 1.2
    for _ in range(2):
        error = 3 - body * head
        body, head = body + 0.05 * head * error, head + 0.05 * body * error
    seen = []
    method = problem.method._replace(predict=lambda *given: seen.append(given[1]) or problem.method.predict(*given))
    evaluate.score_after(problem._replace(method=method), 1, arrival)
    assert_close(seen[0], vector(body, head))


@pytest.mark.parametrize(
    "name",
    [
        *("fedavg", "fedbabu:tune=head"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedrep", "scaffold+samples:kind=svrg", "fedrod")),
    ],
)
def test_stacked_clients_are_fine_tuned_like_single_ones(name):
    """Also after a round of ordinary training in the same engine, with a schedule that fine-tuning ignores."""
    problem = tiny(f"{name}+finetune:lr=0.03,epochs=3", per_round=2, schedule="exponential:decay=0.5")
    engine = StackedEngine([problem])
    state = train(problem)
    for _ in range(2):
        assert stacked_scores.after(engine, [state]) == [evaluate.after(problem, state)]
        ((state, _),) = engine.run_rounds([state])
    assert engine.config.lr == 0.1


def test_other_fine_tuning_changes_no_round():
    plain, tuned = tiny("fedavg", sizes=(40, 40)), tiny("fedavg+finetune:lr=1,epochs=9", sizes=(40, 40))
    a, b = train(plain, rounds=2), train(tuned, rounds=2)
    assert torch.equal(a.server.x_P, b.server.x_P)
    assert a.totals == b.totals
    assert evaluate.before(plain, a) == evaluate.before(tuned, b)


def test_nothing_to_change_leaves_the_method_and_bad_values_are_refused():
    assert find_method("fedavg+finetune").finetune is None
    with pytest.raises(ValueError, match="lr must be at least 0 and finite, not -1"):
        find_method("fedavg+finetune:lr=-1")
    with pytest.raises(ValueError, match="epochs must be at least 0, not -1"):
        find_method("fedavg+finetune:epochs=-1")


def test_each_knob_alone_keeps_the_other_from_the_study():
    rate, epochs = tiny("fedavg+finetune:lr=0.02"), tiny("fedavg+finetune:epochs=5")
    assert (rate.tuning.fixed_lr, [p.epochs for p in rate.tuning.method.phases(2)]) == (0.02, [2])
    assert (epochs.tuning.fixed_lr, [p.epochs for p in epochs.tuning.method.phases(2)]) == (None, [5])
    assert [p.epochs for p in rate.method.phases(2)] == [p.epochs for p in epochs.method.phases(2)] == [2]


def test_phases_of_the_method_are_kept():
    """FedRep's ten epochs are nine of the head and one of the body; FedBABU's head is tuned alone if it says so."""
    assert [(p.epochs, p.trains) for p in find_method("fedrep+finetune:epochs=10").finetune.phases(2)] == [
        (9, ("head",)),
        (1, ("body",)),
    ]
    assert [(p.epochs, p.trains) for p in find_method("fedbabu:tune=head+finetune:epochs=3").finetune.phases(2)] == [
        (3, ("head",))
    ]
