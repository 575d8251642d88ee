"""Refuse services of cloud providers that cannot keep locks, by the names of their hosts (internal)."""

import re

# In every region, as in shop-abc123.serverless.use1.cache.amazonaws.com.
ELASTICACHE_SERVERLESS = re.compile(r".+\.serverless\.[^.]+\.cache\.amazonaws\.com(\.cn)?\.?", re.IGNORECASE)
OCI = re.compile(r".+\.oci\.oraclecloud\.com\.?", re.IGNORECASE)


def refuse_service(host: str, *, clustered: bool) -> None:
    """
    Raise ValueError if *host* is of a service that cannot be a node.

    Args:
        host: The host's name.
        clustered: Whether the URL is that of a cluster.
    """
    if ELASTICACHE_SERVERLESS.fullmatch(host):
        raise ValueError(
            "ElastiCache Serverless hides several servers behind one endpoint, and reportedly refuses commands that "
            "the scripts use, such as TIME: create a cache of your own design, with nodes"
        )
    if clustered and OCI.fullmatch(host):
        raise ValueError(
            "a sharded cluster of OCI Cache does not run scripts, and every decision on a lock is a script: create a "
            "cluster that is not sharded"
        )
