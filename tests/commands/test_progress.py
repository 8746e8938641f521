"""Progress of a command where standard error is not a terminal."""

from megalin.commands.progress import _lines


def test_the_first_line_comes_after_two_seconds_and_others_every_ten(capsys):
    now = 0.0
    report = _lines(lambda: now)
    for done, now in enumerate((1.9, 2.0, 11.9, 12.0)):  # noqa: B007  read by the clock
        report("estimates", done, 3 if done == 3 else None)
    assert capsys.readouterr().err.splitlines() == ["estimates: 1", "estimates: 3 of 3"]
