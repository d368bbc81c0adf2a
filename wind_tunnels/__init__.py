"""Exact sources: tasks whose Bayesian posterior is known in closed form."""
