"""Luggage: how the user's function and its surroundings reach the machines.

This room knows neither who will run the function nor when; no agent, no framework, no policy.
"""
