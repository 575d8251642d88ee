"""Nodes of records over a simulated etcd cluster: taken in if the checkout has django_redlock.contrib.consensus."""
