"""Settings of a process that a check changes for a while."""

import warnings

import pytest

from opsmith.checking.side_effects.global_settings import without_warnings


@pytest.mark.parametrize("ignored", [True, False], ids=["the process ignores warnings", "it does not"])
def test_filters_that_an_operator_changes_are_restored(ignored: bool) -> None:
    with warnings.catch_warnings():
        if ignored:
            warnings.simplefilter("ignore")
        before = [*warnings.filters]
        with without_warnings():
            warnings.simplefilter("error")
            with without_warnings():
                warnings.warn("not seen", stacklevel=1)
            assert warnings.filters[0][0] == "error"
        assert warnings.filters == before
