"""
What ``manage.py demo`` starts, and how it checks itself. To use locks in a project of yours, you need nothing of this.

It sees the shop from outside, as a visitor and an operator do: through HTTP and management commands.
"""
