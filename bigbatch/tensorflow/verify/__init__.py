"""Checks of a loss on the user's own data: is the accumulated gradient that of the full batch, and if not, why?"""
