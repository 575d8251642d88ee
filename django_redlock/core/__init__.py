"""
Decisions: the protocol without I/O, clock, sleep or randomness (internal).

Code here receives the time and the replies as arguments, and returns what to ask next. The blocking driver, the
asyncio driver and the tests run this same code.
"""
