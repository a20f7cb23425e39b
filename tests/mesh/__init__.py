"""``trio_ucx.mesh``: how ranks find each other, the launchers that start them, and what a group does.

``launchers.py`` starts programs with real launchers.
"""
