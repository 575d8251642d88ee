"""
What ``manage.py demo`` starts, and how it checks itself. You do not need this package to use locks in your project.

It sees the shop from outside, as a visitor and an operator do: through HTTP and management commands.
"""
