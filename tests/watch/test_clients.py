"""The clients of a federation, from the rows of its run."""

import json

from made_up_runs import write_run

from fedncv.config import RunConfig
from fedncv.watch import now
from fedncv.watch.clients import clients, is_federation
from fedncv.watch.follow import FollowedFolder
from fedncv.watch.overview import overview

CONFIG = RunConfig(data="custom", clients=6, per_round=3, rounds=10)
ROWS = [
    {"round": 0, "sizes": [10, 20, 30, 40, 50, 0], "barred": {"5": "it reports 0 samples"}},
    {"round": 1, "counted": [0, 1], "absent": [2]},
    {"round": 2, "counted": [0], "refused": {"1": "a number is not finite"}, "clipped": {"0": ["move"]}},
    {"round": 3, "counted": [2, 3]},
]


def federation(out, rows=ROWS):
    run = out / "server/runs/first"
    write_run(run, CONFIG, 0.5)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "timing.jsonl").write_text(
        "".join(json.dumps({"round": t, "seconds": 60.0}) + "\n" for t in range(len(rows)))
    )
    (run / "log.txt").write_text("2026-01-01 round 3 of 10: counted [2, 3]\n")
    (out / "server/server.toml").write_text("")
    folder = FollowedFolder(out)
    folder.look()
    return folder, folder.runs[run]


def test_every_client_has_its_last_counted_round_and_the_state_of_its_last_request(tmp_path):
    _, followed = federation(tmp_path)
    assert is_federation(followed, followed.run)
    found = clients(followed, followed.run)
    assert [(each.client, each.samples, each.state, each.why, each.last) for each in found] == [
        (0, 10, "counted", "clipped: move", 2),
        (1, 20, "refused", "a number is not finite", 1),
        (2, 30, "counted", "", 3),
        (3, 40, "counted", "", 3),
        (4, 50, "not drawn yet", "", None),
        (5, 0, "excluded", "it reports 0 samples", None),
    ]
    at = followed.last_row
    assert [None if each.when is None else at - each.when for each in found] == [60, 120, 0, 0, None, None]
    assert found[1].rounds == {1: "counted", 2: "refused"}


def test_before_the_first_row_those_who_have_joined_are_shown(tmp_path):
    folder, followed = federation(tmp_path, rows=[])
    (followed.folder / "joined.json").write_text(json.dumps({"sizes": {"1": 20}, "barred": {}}))
    assert [each.state for each in clients(followed, followed.run)] == [
        "not joined",
        "not drawn yet",
        *["not joined"] * 4,
    ]
    (followed.folder / "joined.json").write_text('{"sizes": 3')  # half written
    assert [each.state for each in clients(followed, followed.run)] == ["not joined"] * 6
    assert "Clients of server/runs/first" in now.section(folder, overview(folder))


def test_the_page_shows_the_clients_with_a_strip_and_the_log(tmp_path):
    folder, _ = federation(tmp_path)
    text = now.section(folder, overview(folder))
    assert "round 3 of 10: counted [2, 3]" in text
    assert text.count('class="strip"') == 6
    assert "counted 1 times, refused 1 times, absent 0 times" in text
    assert "a number is not finite" in text


def test_a_log_that_is_a_link_is_not_shown(tmp_path):
    folder, followed = federation(tmp_path)
    (tmp_path / "secret").write_text("the secret")
    (followed.folder / "log.txt").unlink()
    (followed.folder / "log.txt").symlink_to(tmp_path / "secret")
    assert "the secret" not in now.section(folder, overview(folder))
