"""The body of a singleton task, and what it calls, know the lease of its slot."""

from django_redlock import assert_locked, current_lease


def test_run_holds_its_slot(make, worker):
    """As any block of a lock does; what runs after it does not."""
    held = []

    def body(self, shop_id):
        assert_locked(self.singleton.lease.name)
        held.append((current_lease() is self.singleton.lease, current_lease().name))

    make(body).delay(7)
    assert worker.run() == "SUCCESS"

    assert held == [(True, "task:shop.sync:shop_id=7")]
