from __future__ import annotations

import numpy as np
import pytest

from paceline.train.data.answers import Exchange
from paceline.train.students.initial_weights import draft_vocabulary, feature_layers


def test_the_draft_vocabulary_is_what_answers_say() -> None:
    """Prompts do not count; end tokens are always there."""
    said = [Exchange(np.array([9, 9, 9, 1, 1, 2, 3, 3, 3]), 3)]
    vocabulary = draft_vocabulary(said, size=3, vocab=12, always={11})
    assert vocabulary.ids.tolist() == [1, 3, 11]
    assert vocabulary.coverage == pytest.approx(5 / 6)
    assert len(draft_vocabulary(said, size=99, vocab=12, always={11}).ids) == 12


@pytest.mark.parametrize(
    ("layers", "wanted"), [(30, (2, 15, 27)), (5, (2, 2, 2)), (2, (1, 1, 1)), (1, (0, 0, 0)), (8, (2, 4, 5))]
)
def test_features_are_of_layers_that_there_are(layers: int, wanted: tuple[int, ...]) -> None:
    assert feature_layers(layers) == wanted
