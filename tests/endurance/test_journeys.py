"""The steps of a user who adopts the package."""

from tests.lab.journeys.__main__ import main


def test_package_is_adopted_in_a_new_project():
    """Every step of the journey ends as the documentation says."""
    done: list[str] = []
    main(done.append)
    assert len(done) == 9, done
