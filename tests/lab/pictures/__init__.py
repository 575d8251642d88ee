"""
The drawn pictures of the documentation, each once for light pages and once for dark ones.

``python -m tests.lab.pictures`` writes them into ``docs/images``. The same code always writes the same bytes.
"""
