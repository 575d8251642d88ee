"""Refuse endpoints of cloud providers that cannot keep locks, by the names of their hosts (internal)."""

import re

# In every region, as in shop-abc123.serverless.use1.cache.amazonaws.com.
AMAZON = r"\.[^.]+\.cache\.amazonaws\.com(\.cn)?\.?"
ELASTICACHE_SERVERLESS = re.compile(r".+\.serverless" + AMAZON, re.IGNORECASE)
# replica.shop.abc123.use1..., or without encryption shop-ro.abc123.ng.0001.use1...
ELASTICACHE_READER = re.compile(r"(replica\.[^.]+\.[^.]+|[^.]+-ro\.[^.]+\.ng\.0001)" + AMAZON, re.IGNORECASE)
# clustercfg.shop.abc123.use1.cache..., shop.abc123.clustercfg.use1.cache..., and the same of MemoryDB
CONFIGURATION = re.compile(r"(.+\.)?clustercfg\..+\.amazonaws\.com(\.cn)?\.?", re.IGNORECASE)
OCI = re.compile(r".+\.oci\.oraclecloud\.com\.?", re.IGNORECASE)


def refuse_service(host: str, *, clustered: bool) -> None:
    """
    Raise ValueError if *host* is an endpoint that cannot be a node.

    Args:
        host: The host's name.
        clustered: Whether the URL is that of a cluster.
    """
    if ELASTICACHE_SERVERLESS.fullmatch(host):
        raise ValueError(
            "ElastiCache Serverless hides several servers behind one endpoint, and reportedly refuses commands that "
            "the scripts use, such as TIME: create a cache of your own design, with nodes"
        )
    if ELASTICACHE_READER.fullmatch(host):
        raise ValueError(
            "its host is the reader endpoint of a replication group, whose replicas take no writes: write the primary "
            "endpoint"
        )
    if not clustered and CONFIGURATION.fullmatch(host):
        raise ValueError("its host is the configuration endpoint of a cluster: write redis+cluster or rediss+cluster")
    if clustered and OCI.fullmatch(host):
        raise ValueError(
            "a sharded cluster of OCI Cache does not run scripts, and every decision on a lock is a script: create a "
            "cluster that is not sharded"
        )
