"""
Decisions: the protocol without I/O, clock, sleep or randomness.

Everything here is told the time and the replies, and answers what to ask next. The blocking driver, the
asyncio driver and the tests run this same code.
"""
