"""The alignment end to end: what is trained on these features drafts well for the real target."""

from pathlib import Path

import overfit
import pytest


@pytest.mark.slow
def test_a_drafter_trained_on_the_features_drafts_and_the_wrong_pairing_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both look perfect in training; only one of them is right when it is served."""
    out = overfit.extract(tmp_path, 96)
    right = overfit.measure(out, "right", 300)
    wrong = overfit.measure(out, "wrong", 300)
    with capsys.disabled():
        print(f"\nright pairing {right}\nwrong pairing {wrong}")
    assert right.accuracy > 0.95 and wrong.accuracy > 0.95
    assert right.accepted > 2.5 > 1.5 > wrong.accepted
    assert right.identical and wrong.identical  # whatever the drafter says, the target decides
