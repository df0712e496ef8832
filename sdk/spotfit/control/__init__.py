"""The hand: carries out what judgement ordered, intent first.

It may not decide anything itself, and knows of clouds only the waist.
"""
